"""The level beside a line and the notice of a change, by tables."""

from __future__ import annotations

import math
import random

import pytest

from hpcps.config import CapacityConfig
from hpcps.policy import ChangeDecision, DetectChange, LevelMemory

POLICY = DetectChange(CapacityConfig())


def settled(*, noise: float = 0.1, num_steps: int = 32) -> LevelMemory:
    """A worker that is known well; the floor is above no noise at all."""
    return LevelMemory(num_steps=num_steps, noise_frac=noise, num_differences=100)


def run(ratios: list[float], memory: LevelMemory) -> tuple[list[ChangeDecision], LevelMemory]:
    """The alarms among the steps, and what is remembered at last."""
    alarms = []
    for ratio in ratios:
        decision = POLICY.decide(ratio, memory)
        memory = decision.memory
        if decision.changed:
            alarms.append(decision)
    return alarms, memory


# noise, ratios of measured to predicted seconds; steps until the alarm (0: none), new over old level, steps behind it
ALARMS = [
    (0.1, [2.0] * 3, 3, 2.0, 3),
    (0.1, [0.5] * 3, 3, 0.5, 3),
    (0.1, [1.02, 0.98, 2.1, 1.9, 2.0], 5, 2.0, 3),
    (0.1, [1.25, 2.0, 2.0, 2.0], 4, 2.0, 3),
    (0.1, [1.6, 2.2, 3.0, 2.4], 4, math.exp((math.log(2.2) + math.log(2.4)) / 2), 4),
    (0.1, [1.3] * 7, 7, 1.3, 7),
    (0.0, [1.1] * 3, 3, 1.1, 3),
    (0.0, [1.05] * 7, 7, 1.05, 7),
    (0.1, [1000.0], 0, 1.0, 0),
    (0.1, [1000.0, 1.0, 5.0, 1.0, 3.0, 1.0, 1.0], 0, 1.0, 0),
    (0.1, [3.0, 10.0, 5.0], 0, 1.0, 0),
    (0.1, [1.1] * 50, 0, 1.0, 0),
    (0.0, [1.02] * 50, 0, 1.0, 0),
]


@pytest.mark.parametrize(("noise", "ratios", "at", "ratio", "num_steps"), ALARMS)
def test_alarms(noise: float, ratios: list[float], at: int, ratio: float, num_steps: int) -> None:
    memory = settled(noise=noise)
    found = 0
    for index, value in enumerate(ratios, start=1):
        decision = POLICY.decide(value, memory)
        memory = decision.memory
        if decision.changed:
            found = index
            assert decision.ratio == pytest.approx(ratio, rel=0.002)
            assert (decision.num_steps, memory.num_steps) == (num_steps, num_steps)
            assert math.exp(memory.level) == pytest.approx(ratio)
            assert f"{num_steps} steps take {decision.ratio:.3f} of the time before, noise" in decision.reason
        else:
            assert (decision.ratio, decision.num_steps, decision.notable) == (1.0, 0, False)
    assert found == at


def test_only_large_changes_are_worth_telling() -> None:
    for ratio, notable in ((1.1, False), (1.2, True), (0.9, False), (0.8, True)):
        [alarm], _ = run([ratio] * 3, settled(noise=0.0))
        assert alarm.notable is notable, ratio


def test_the_level_follows_what_is_too_little_for_an_alarm() -> None:
    alarms, memory = run([1.1] * 200, settled())
    assert alarms == []
    assert math.exp(memory.level) == pytest.approx(1.1, rel=0.01)
    assert math.exp(run([1.1] * 30, settled())[1].level) == pytest.approx(1.06, abs=0.02)


def test_one_stall_moves_the_level_by_its_clipped_part_only() -> None:
    _, memory = run([1e6] + [1.0] * 5, settled())
    assert 0 < memory.level < 3.25 * 0.11 / 32 + 1e-3
    assert memory.num_waiting == 0, "all steps are in the level again"


def test_the_level_waits_while_a_change_may_be_under_way() -> None:
    """Else it would run after the change and hide it."""
    _, memory = run([1.3, 1.3], settled())
    assert (memory.level, memory.num_waiting, memory.doubtful) == (0.0, 2, True)
    assert memory.slower == (math.log(1.3), math.log(1.3))
    _, memory = run([1.3, 1.3, *[1.0] * 6], settled())
    assert memory.level > 0.01
    assert (memory.doubtful, memory.slower, memory.num_waiting) == (False, (), 0)


def test_a_level_is_known_better_with_every_step() -> None:
    memory = settled(num_steps=1)
    errors = []
    for _ in range(40):
        memory = POLICY.decide(1.0, memory).memory
        errors.append(memory.error_frac)
    assert errors[0] == pytest.approx(0.11 / math.sqrt(2), rel=0.02)
    assert errors == sorted(errors, reverse=True)
    assert memory.num_steps == 32


def test_noise_is_found_from_neighbours_and_has_a_floor() -> None:
    rng = random.Random(3)
    steps = [math.exp(0.1 * rng.gauss(0, 1)) for _ in range(300)]
    memory = LevelMemory.of_fit(steps[:20])
    assert memory.num_differences == 19
    assert memory.sigma == pytest.approx(memory.noise_frac * (1 + 1 / math.sqrt(19)))
    _, memory = run(steps[20:], memory)
    assert memory.noise_frac == pytest.approx(0.1, rel=0.2)
    drift = LevelMemory.of_fit([1.005**index for index in range(40)])
    assert drift.noise_frac == pytest.approx(0.0044, rel=0.02), "a drift is no noise"
    assert LevelMemory.of_fit([1.0] * 20).sigma == LevelMemory.of_fit([1.0]).sigma == 0.02
    stalled = LevelMemory.of_fit([1.0, 1.001, 0.999, 500.0, 1.0, 1.001, 0.999, 1.0] * 3)
    assert stalled.noise_frac < 0.03


def test_a_refit_starts_from_its_own_line() -> None:
    _, memory = run([1.1] * 40 + [1.3] * 2, settled())
    fresh = memory.after_refit(num_steps=64, last_ratio=1.2)
    assert (fresh.level, fresh.num_steps, fresh.up, fresh.slower) == (0.0, 32, 0.0, ())
    assert (fresh.noise_frac, fresh.num_differences) == (memory.noise_frac, memory.num_differences)
    assert fresh.last == math.log(1.2)


def test_a_run_keeps_a_bounded_number_of_steps() -> None:
    """A shift just above what is allowed leads to a long run."""
    sigma, swing = settled().sigma, 0.1 * math.sqrt(1 / math.pi)
    alarms, memory = run([math.exp(1.3 * sigma + swing), math.exp(1.3 * sigma - swing)] * 40, settled())
    assert (len(alarms), len(memory.slower), memory.num_waiting) == (0, 64, 80)


@pytest.mark.parametrize("drift", [1.01, 1 / 1.01, 1.001])
def test_a_drift_is_followed(drift: float) -> None:
    """A tenth of a percent a step by the level alone, a percent a step by small jumps as well."""
    memory = settled()
    rng = random.Random(5)
    off = []
    for step in range(300):
        memory = POLICY.decide(drift**step * math.exp(0.1 * rng.gauss(0, 1)), memory).memory
        off.append(abs(memory.level - step * math.log(drift)))
    assert max(off[50:]) < 0.3
    assert sum(off[50:]) / 250 < 0.16
