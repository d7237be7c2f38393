"""What is known of workers while they run: short stories of steps, levels, lines and neighbours."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from hpcps.config import CapacityConfig
from hpcps.errors import DataError
from hpcps.policy import CapacityFit, TimedStep
from hpcps.protocol.speeds import Speeds

Events = list[tuple[str, dict[str, object]]]
CONFIG = CapacityConfig()
FIRST = CONFIG.drop_steps + CONFIG.warmup_steps
"""Steps until the first line."""


def speeds(*workers: int, config: CapacityConfig = CONFIG, events: Events | None = None) -> Speeds:
    log: Events = [] if events is None else events
    return Speeds(config, workers or (1,), report=lambda name, fields: log.append((name, fields)))


def step(work: float, *, fixed_s: float = 0.0, unit_s: float = 0.001, factor: float = 1.0) -> TimedStep:
    return TimedStep(work=work, seconds=factor * (fixed_s + unit_s * work))


def warm_up(known: Speeds, rank: int = 1, *, unit_s: float = 0.001, fixed_s: float = 0.0) -> None:
    """Two sizes in turns, as in a warm-up."""
    for index in range(FIRST):
        known.take(rank, [step((24, 40)[index % 2], unit_s=unit_s, fixed_s=fixed_s)])


def changes(events: Events) -> list[dict[str, object]]:
    return [fields for name, fields in events if name == "change"]


def test_a_line_comes_with_the_last_step_of_the_warm_up() -> None:
    known = speeds()
    answers = [known.take(1, [step((24, 40)[index % 2], fixed_s=0.01)]) for index in range(FIRST)]
    assert answers == [False] * (FIRST - 1) + [True]
    [fit] = known.fits
    assert (fit.fixed_s, fit.per_sample_s) == pytest.approx((0.01, 0.001))
    assert known.measured
    assert not known.take(1, [])


def test_a_steady_worker_is_worth_no_partition_but_at_refits() -> None:
    known, rng = speeds(), random.Random(2)
    warm_up(known)
    looks = [index for index in range(400) if known.take(1, [step(32, factor=math.exp(0.02 * rng.gauss(0, 1)))])]
    assert looks == [19, 59, 139, 239, 339], "after 20 steps, 40 more, 80 more, then every 100"


def test_a_slow_down_is_found_and_told_with_its_reason() -> None:
    events: Events = []
    known = speeds(events=events)
    warm_up(known)
    waits = [0.0] * 5 + [0.6] * 3
    answers = [known.take(1, [step(32, factor=2.0 if wait else 1.0)], cpu_wait_frac=wait) for wait in waits]
    assert answers == [False] * 7 + [True]
    [change] = changes(events)
    assert (change["worker"], change["steps"]) == (1, 3)
    assert change["ratio"] == pytest.approx(2.0)
    assert change["cpu_wait_frac"] == pytest.approx(0.6)
    assert str(change["reason"]).endswith("; others use its processor")
    assert known.fits[0].seconds(32) == pytest.approx(0.064)
    assert "now 2.000 times that, by 3 steps" in known.fits[0].reason


@pytest.mark.parametrize(("factor", "wait"), [(2.0, 0.1), (0.5, 0.6)])
def test_other_changes_are_not_put_down_to_neighbours(factor: float, wait: float) -> None:
    events: Events = []
    known = speeds(events=events)
    warm_up(known)
    for _ in range(3):
        known.take(1, [step(32, factor=factor)], cpu_wait_frac=wait)
    [change] = changes(events)
    assert "others" not in str(change["reason"])


def test_a_small_jump_changes_the_curve_but_is_no_event() -> None:
    events: Events = []
    known = speeds(events=events)
    warm_up(known)
    assert [known.take(1, [step(32, factor=1.1)]) for _ in range(3)] == [False, False, True]
    assert changes(events) == []
    assert known.fits[0].per_sample_s == pytest.approx(0.0011)


def test_after_a_change_the_line_is_fitted_anew_from_steps_since() -> None:
    """The device became slower for samples only: the scaled line is wrong at other sizes, the next one is right."""
    events: Events = []
    known = speeds(events=events)
    warm_up(known, fixed_s=0.02)
    looks = []
    for index in range(32):
        size = 40 if index < 8 else 20
        looks.append(known.take(1, [step(size, fixed_s=0.02, unit_s=0.003)]))
        if index == 8:
            assert known.fits[0].seconds(20) == pytest.approx(0.08 * 7 / 6), "the old shape"
        elif index > 10:
            assert (known.fits[0].fixed_s, known.fits[0].per_sample_s) == pytest.approx((0.02, 0.003), rel=1e-6)
    assert [index for index, look in enumerate(looks) if look] == [2, 10, 30]
    assert known.fits[0].reason.startswith("line through the medians of 2 sizes; 31 steps")
    assert len(changes(events)) == 1


def test_a_slow_drift_is_followed() -> None:
    known, rng = speeds(), random.Random(4)
    warm_up(known)
    off = []
    for index in range(1000):
        known.take(1, [step(32, factor=1.001**index * math.exp(0.05 * rng.gauss(0, 1)))])
        off.append(abs(math.log(known.fits[0].seconds(32) / (0.032 * 1.001**index))))
    assert max(off) < 0.1
    assert sum(off) / len(off) < 0.04


def test_without_following_the_first_line_stays() -> None:
    events: Events = []
    known = speeds(config=CapacityConfig(follow=False), events=events)
    warm_up(known)
    first = known.fits
    assert not any(known.take(1, [step(32, factor=3.0)], link_s=[0.5]) for _ in range(300))
    assert (known.fits, changes(events)) == (first, [])
    assert known.link_s == {1: 0.5}, "other facts are taken in"


def test_a_line_that_misses_far_from_the_warm_up_is_put_right_without_an_event() -> None:
    """Sizes of 24 and 40 said that all time is fixed; at 96 samples it shows that next to none is."""
    events: Events = []
    known = speeds(events=events)
    for index in range(FIRST):
        known.take(1, [TimedStep(work=(24, 40)[index % 2], seconds=0.032)])
    for _ in range(3):
        known.take(1, [TimedStep(work=96, seconds=0.075)])
    assert changes(events) == []
    [fit] = known.fits
    assert (fit.seconds(96), fit.seconds(40)) == pytest.approx((0.075, 0.032), rel=0.01)
    assert "line through sizes 40 and 96" in fit.reason


def test_where_the_line_held_before_a_jump_is_a_change_though_sizes_changed_with_it() -> None:
    """But then it is doubted: the next time it is the line."""
    events: Events = []
    known = speeds(events=events)
    warm_up(known)
    for size in (32, 96, 32, 96):
        for _ in range(12):
            known.take(1, [step(size)])
    assert (len(changes(events)), known.fits[0].seconds(96)) == (0, pytest.approx(0.096))
    for _ in range(3):
        known.take(1, [TimedStep(work=32, seconds=0.096)])
    assert len(changes(events)) == 1
    assert known.fits[0].seconds(32) == pytest.approx(0.096)
    assert known.fits[0].seconds(96) == pytest.approx(3 * 0.096), "scaled"
    for _ in range(5):
        known.take(1, [TimedStep(work=96, seconds=0.096)])
    assert len(changes(events)) == 1
    assert known.fits[0].seconds(96) == pytest.approx(0.096, rel=0.02)
    assert known.fits[0].seconds(32) == pytest.approx(0.096, rel=0.02), "flat"


def test_a_level_that_moved_half_the_dead_band_is_worth_a_look() -> None:
    known = speeds()
    warm_up(known)
    noisy = [step(32, factor=math.exp(0.1 * (-1) ** index)) for index in range(60)]
    for each in noisy:
        known.take(1, [each])
    looks = [known.take(1, [dataclasses.replace(each, seconds=1.05 * each.seconds)]) for each in noisy[:28]]
    assert 1 <= sum(looks) <= 2
    assert known.fits[0].seconds(32) / 0.032 > 1.02


def test_noise_that_hid_gains_is_looked_at_again_when_it_is_less() -> None:
    """Of ten workers one is slower: three steps say too little, so there are more looks until the level is known."""
    known = speeds(*range(10))
    for rank in range(10):
        warm_up(known, rank)
    rng = random.Random(6)
    for _ in range(200):
        known.take(0, [step(32, factor=math.exp(0.1 * rng.gauss(0, 1)))])
    slow = [known.take(0, [step(32, factor=2.0 * math.exp(0.02 * rng.gauss(0, 1)))]) for _ in range(19)]
    first = slow.index(True)
    assert first in (2, 3)
    assert sum(slow[first:]) >= 3
    assert known.noise_frac < 0.1


def test_noise_grows_with_the_number_of_workers_and_shrinks_with_steps() -> None:
    known = speeds(1, 2, 3, 4)
    assert known.noise_frac == 0.0
    for rank in (1, 2, 3, 4):
        warm_up(known, rank)
    assert known.noise_frac == pytest.approx(0.02 / math.sqrt(20) * math.sqrt(2 * math.log(4)))
    assert speeds(1).noise_frac == 0.0


def test_given_speeds_count_until_measured_and_in_the_units_of_those_that_are() -> None:
    """Speeds 3 and 1 are only relative: once the first worker's milliseconds are known, the other's are thrice that."""
    known = speeds(1, 2, config=CapacityConfig(prior=(3.0, 1.0)))
    assert (known.known, known.measured) == (True, False)
    assert [fit.per_sample_s for fit in known.fits] == pytest.approx([1 / 3, 1.0])
    assert [fit.error_frac for fit in known.fits] == [1.0, 1.0]
    warm_up(known, 1, unit_s=0.002)
    assert (known.known, known.measured) == (True, False)
    assert [fit.per_sample_s for fit in known.fits] == pytest.approx([0.002, 0.006])
    warm_up(known, 2, unit_s=0.005)
    assert known.measured
    assert [fit.per_sample_s for fit in known.fits] == pytest.approx([0.002, 0.005])
    assert max(fit.error_frac for fit in known.fits) < 0.01


def test_links_stand_beside_the_curves() -> None:
    known = speeds(1, 2, 3)
    for rank in (1, 2, 3):
        warm_up(known, rank)
    groups = [(1, 2), (3,)]
    assert known.fits_in(groups) == known.fits, "links are not known"
    for rank, link_s in ((1, 0.1), (2, 0.3), (3, 0.05)):
        assert not known.take(rank, [], link_s=[link_s] * 3 + [9.0])
    assert known.link_s == {1: pytest.approx(0.1), 2: pytest.approx(0.3), 3: pytest.approx(0.05)}
    assert [fit.fixed_s for fit in known.fits_in(groups)] == pytest.approx([0.25, 0.25, 0.0], abs=1e-9)
    assert known.fits_in([(1, 2, 3)]) == known.fits_in([]) == known.fits
    described = known.described()
    assert described["workers"] == [1, 2, 3]
    assert described["link_s"] == pytest.approx([0.1, 0.3, 0.05])
    assert described["per_sample_s"] == pytest.approx([0.001] * 3)
    assert described["fixed_s"] == pytest.approx([0.0] * 3, abs=1e-9)
    assert described["error_frac"] == pytest.approx([0.02 / math.sqrt(20)] * 3)


def test_another_cap_is_worth_a_look() -> None:
    known = speeds(1, 2)
    assert known.max_samples == {}
    assert known.take(1, [], max_samples=40)
    assert not known.take(1, [], max_samples=40)
    assert not known.take(1, [], max_samples=0), "not measured is no news"
    assert known.take(1, [], max_samples=50)
    assert known.max_samples == {1: 50}


def test_a_short_interval_refits_only_from_steps_enough() -> None:
    known = speeds(config=CapacityConfig(interval_steps=1))
    warm_up(known)
    assert known.take(1, [step(32)]), "every step"
    for _ in range(3):
        known.take(1, [step(32, factor=2.0)])
    looks = [known.take(1, [step(32, factor=2.0)]) for _ in range(20)]
    assert looks == [False] * 16 + [True] * 4, "20 steps since the change"


def test_a_new_unit_of_work_keeps_the_steps_since_the_last_change() -> None:
    known = speeds(1, 2)
    warm_up(known, 1)
    kept = {1: [step((24, 40)[index % 2], unit_s=0.002) for index in range(64)], 2: []}
    known.restart_units(kept)
    assert [fit.per_sample_s for fit in known.fits] == pytest.approx([0.002])
    assert isinstance(known.fits[0], CapacityFit)
    assert known.fits[0].num_steps == 20
    assert not known.known


def test_a_line_that_is_to_stay_stays_in_a_new_unit_too() -> None:
    known = speeds(config=CapacityConfig(follow=False))
    warm_up(known)
    before = known.fits
    known.restart_units({1: [step((24, 40)[index % 2], unit_s=0.009) for index in range(64)]})
    assert known.fits == before


def test_a_change_that_took_longer_to_find_than_steps_are_kept() -> None:
    events: Events = []
    known = speeds(config=CapacityConfig(history_steps=20, interval_steps=1000), events=events)
    swing = [math.exp(0.0564 * (-1) ** index) for index in range(400)]
    for factor in swing[:130]:
        known.take(1, [step(32, factor=factor)])
    shift = math.exp(1.6 * 0.11)
    before = known.fits[0].seconds(32)
    index = next(index for index, factor in enumerate(swing) if known.take(1, [step(32, factor=shift * factor)]))
    assert index >= 19
    assert known.fits[0].seconds(32) / before == pytest.approx(shift, rel=0.07), "a swing of 6 %"
    assert len(changes(events)) == 1


def test_given_speeds_are_one_a_worker() -> None:
    with pytest.raises(DataError, match=r"cannot use capacity.prior: got 3 speeds, need 2 \(one a worker\)"):
        speeds(1, 2, config=CapacityConfig(prior=(1.0, 2.0, 3.0)))
