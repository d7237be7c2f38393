"""Groups do not follow noise, and do follow what is real."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import GroupingConfig
from hpcps.policy.grouping import GroupingDecision, GroupWorkers
from hpcps.policy.regroup import STAND_STEPS, Regroup, RegroupFacts
from hpcps.policy.speed_classes import WorkerFacts

CONFIG = GroupingConfig(hold_steps=1)
STEPS = 20
"""Steps between two decisions, and those that a speed is the mean of."""


def seen(speeds: Mapping[int, float], rng: random.Random, *, noise: float, error: float) -> dict[int, WorkerFacts]:
    """Speeds as they are measured, shares of the size that they ask for."""
    found = {}
    for rank, speed in speeds.items():
        measured = speed * math.exp(rng.gauss(0, noise))
        count = round(32 * speed)
        found[rank] = WorkerFacts(speed=measured, error_frac=error, num_samples=count, step_s=count / measured)
    return found


def first(workers: Mapping[int, WorkerFacts]) -> GroupingDecision:
    speeds = {rank: worker.speed for rank, worker in workers.items()}
    return GroupWorkers("hybrid", 0).decide(speeds, generation=1, workers=workers)


def changes(
    decision: GroupingDecision,
    speeds: Mapping[int, float],
    rng: random.Random,
    *,
    noise: float,
    error: float,
    num_decisions: int,
    size: int = 0,
) -> tuple[int, GroupingDecision]:
    """Number of regroupings over so many decisions on the same workers, and the last decision."""
    policy, count, since = Regroup(CONFIG, size), 0, 0
    for _ in range(num_decisions):
        since += STEPS
        workers = seen(speeds, rng, noise=noise, error=error)
        decision = policy.decide(RegroupFacts(present=decision, workers=workers, num_steps=since))
        if decision.changed:
            count, since = count + 1, 0
    return count, decision


@settings(deadline=None, max_examples=6, derandomize=True)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4))
def test_speeds_that_jump_by_ten_percent_move_nobody(seed: int, sizes: list[int]) -> None:
    """Thousands of decisions, each on speeds that are as noisy as single steps, classes of a factor of two."""
    rng = random.Random(seed)
    speeds = {rank: 2.0**index for index, size in enumerate(sizes) for rank in range(10 * index, 10 * index + size)}
    begin = first(seen(speeds, rng, noise=0.0, error=0.0))
    count, _ = changes(begin, speeds, rng, noise=0.1, error=0.1, num_decisions=2000)
    assert count == 0


@settings(deadline=None, max_examples=12, derandomize=True)
@given(seed=st.integers(0, 2**32), num_workers=st.integers(1, 8))
def test_workers_of_any_speed_stay_where_they_are(seed: int, num_workers: int) -> None:
    """Steps of 10 % noise, speeds over twenty of them: on the edge between two classes nobody goes back and forth."""
    rng = random.Random(seed)
    speeds = {rank: math.exp(rng.uniform(0, 2)) for rank in range(num_workers)}
    error = 0.1 / math.sqrt(STEPS)
    begin = first(seen(speeds, rng, noise=error, error=error))
    count, last = changes(begin, speeds, rng, noise=error, error=error, num_decisions=1000)
    assert count == 0
    assert len(last.grouping.groups) <= len(last.classes)


@settings(deadline=None, max_examples=6, derandomize=True)
@given(seed=st.integers(0, 2**32), num_workers=st.integers(2, 8))
def test_equal_workers_in_groups_of_a_given_size_stay(seed: int, num_workers: int) -> None:
    rng = random.Random(seed)
    speeds = dict.fromkeys(range(num_workers), 1.0)
    error = 0.1 / math.sqrt(STEPS)
    begin = GroupWorkers("hybrid", 2).decide(speeds, generation=1)
    count, _ = changes(begin, speeds, rng, noise=error, error=error, num_decisions=1000, size=2)
    assert count == 0


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(2, 4), min_size=2, max_size=4),
    factor=st.sampled_from([0.25, 0.5, 2.0, 4.0]),
)
def test_a_worker_that_changes_class_is_moved_at_once(seed: int, sizes: list[int], factor: float) -> None:
    rng = random.Random(seed)
    speeds = {rank: 2.0**index for index, size in enumerate(sizes) for rank in range(10 * index, 10 * index + size)}
    error = 0.1 / math.sqrt(STEPS)
    begin = first(seen(speeds, rng, noise=0.0, error=0.0))
    rank = rng.choice(sorted(speeds))
    speeds[rank] *= factor
    count, last = changes(begin, speeds, rng, noise=error, error=error, num_decisions=2)
    assert last.classes == first(seen(speeds, rng, noise=0.0, error=0.0)).classes
    assert count <= 1
    assert changes(last, speeds, rng, noise=error, error=error, num_decisions=200)[0] == 0
    assert STEPS >= STAND_STEPS, "so the second decision is the one that moves it"
