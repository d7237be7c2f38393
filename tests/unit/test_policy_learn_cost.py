"""Costs are found again from timed steps, whatever the workers' speeds, overheads, noise and stalls."""

from __future__ import annotations

import numpy as np
import pytest

from hpcps.config import CapacityConfig
from hpcps.policy import CostRow, LearnCost

SPEEDS = (3.0, 2.0, 1.0, 1.0)
UNIFORM = (1.0, 0.0, 0.0)
Rows = list[list[CostRow]]


def rows(
    weights: tuple[float, ...],
    *,
    fixed: float = 0.0,
    noise: float = 0.02,
    stall_frac: float = 0.0,
    num_steps: int = 24,
    same_length: bool = False,
    seed: int = 1,
) -> Rows:
    """Steps of four workers with 12 or 20 samples, whose lengths are skewed; features are 1, length and its square."""
    rng = np.random.default_rng(seed)
    lengths = np.ones(4000) if same_length else rng.lognormal(0, 0.8, 4000)
    table = np.stack([np.ones(4000), lengths / lengths.mean(), lengths**2 / (lengths**2).mean()], axis=1)
    found: Rows = []
    for worker, speed in enumerate(SPEEDS):
        found.append([])
        for step in range(num_steps):
            sums = table[rng.integers(0, 4000, 12 if (worker + step) % 2 else 20)].sum(axis=0)
            seconds = (fixed + float(sums @ np.array(weights))) / speed * np.exp(noise * rng.normal())
            if rng.random() < stall_frac:
                seconds *= 6
            found[-1].append(CostRow(features=tuple(sums.tolist()), seconds=float(seconds)))
    return found


# what steps cost: weights, fixed work, noise, stalls; how near the weights are found
FOUND = [
    ("by length", (0.0, 1.0, 0.0), 0.0, 0.02, 0.0, 0.06),
    ("by length and more", (0.3, 0.7, 0.0), 0.0, 0.02, 0.0, 0.06),
    ("by the square too", (0.0, 0.6, 0.4), 0.0, 0.02, 0.0, 0.06),
    ("beside what a step takes anyway", (0.0, 1.0, 0.0), 6.0, 0.02, 0.0, 0.1),
    ("with a stall in ten steps", (0.0, 1.0, 0.0), 0.0, 0.02, 0.1, 0.06),
    ("with noise", (0.2, 0.8, 0.0), 0.0, 0.08, 0.0, 0.2),
]


@pytest.mark.parametrize(("name", "weights", "fixed", "noise", "stalls", "within"), FOUND)
def test_weights_are_found_again(
    name: str, weights: tuple[float, ...], fixed: float, noise: float, stalls: float, within: float
) -> None:
    made = rows(weights, fixed=fixed, noise=noise, stall_frac=stalls)
    got = LearnCost(CapacityConfig()).decide(made, current=UNIFORM)
    assert got is not None
    assert got.changed
    assert sum(got.weights) == pytest.approx(1.0)
    assert min(got.weights) >= 0
    assert got.weights == pytest.approx(weights, abs=within), name
    assert got.error_frac < 1.5 * max(noise, 0.02)
    assert "learned from 96 steps of 4 workers" in got.reason


def test_the_order_of_steps_and_workers_does_not_matter() -> None:
    made = rows((0.2, 0.8, 0.0))
    policy = LearnCost(CapacityConfig())
    one, other = (
        policy.decide(made, current=UNIFORM),
        policy.decide([each[::-1] for each in made[::-1]], current=UNIFORM),
    )
    assert one is not None
    assert other is not None
    assert one.weights == pytest.approx(other.weights, rel=1e-9, abs=1e-12)


def test_what_is_known_well_is_kept() -> None:
    """The true weights stay, and so do near ones: others predict hardly better."""
    policy = LearnCost(CapacityConfig())
    first = policy.decide(rows((0.0, 1.0, 0.0), seed=1), current=UNIFORM)
    assert first is not None
    for seed in range(2, 8):
        again = policy.decide(rows((0.0, 1.0, 0.0), seed=seed), current=first.weights)
        assert again is not None
        assert not again.changed
        assert again.weights == first.weights
        assert again.reason.startswith("kept: others gain")


def test_where_length_costs_nothing_all_samples_stay_alike() -> None:
    got = LearnCost(CapacityConfig()).decide(rows((1.0, 0.0, 0.0)), current=UNIFORM)
    assert got is not None
    assert not got.changed
    assert got.weights == UNIFORM


def test_another_cost_replaces_the_one_in_use() -> None:
    got = LearnCost(CapacityConfig()).decide(rows((0.0, 0.0, 1.0)), current=(0.0, 1.0, 0.0))
    assert got is not None
    assert got.changed
    assert got.weights[2] == pytest.approx(1.0, abs=0.06)


def test_too_few_steps_say_nothing() -> None:
    policy = LearnCost(CapacityConfig(warmup_steps=20))
    enough = rows((0.0, 1.0, 0.0), num_steps=20)
    assert policy.decide(enough, current=UNIFORM) is not None
    assert policy.decide([*enough[:3], enough[3][:19]], current=UNIFORM) is None, "19 steps of one worker"
    assert policy.decide([enough[0]], current=UNIFORM) is None, "20 steps in all for 4 numbers"
    assert policy.decide([], current=UNIFORM) is None


def test_features_that_are_all_alike_tell_no_weights() -> None:
    """Where all samples have one length, its weight cannot be told from the sample's own: no change, and no failure."""
    got = LearnCost(CapacityConfig()).decide(rows((0.5, 0.5, 0.0), same_length=True), current=UNIFORM)
    assert got is not None
    assert not got.changed


def test_times_that_do_not_depend_on_samples_tell_nothing() -> None:
    made = [[CostRow(features=row.features, seconds=1.0) for row in each] for each in rows((0.0, 1.0, 0.0))]
    assert LearnCost(CapacityConfig()).decide(made, current=UNIFORM) is None


def test_a_step_whose_samples_should_cost_nothing_is_no_division_by_zero() -> None:
    made = rows((0.0, 1.0, 0.0))
    made[0][0] = CostRow(features=(4.0, 0.0, 0.0), seconds=made[0][0].seconds)
    got = LearnCost(CapacityConfig()).decide(made, current=(0.0, 1.0, 0.0))
    assert got is not None
    assert got.weights[1] > 0.9
