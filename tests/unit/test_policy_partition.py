"""Shares of a batch, by tables."""

from __future__ import annotations

import pytest

from hpcps.config import PartitionConfig
from hpcps.errors import ConfigError, PlanError
from hpcps.policy import CapacityFit, Partition, equal_shares, warmup_shares


def fits_of(*speeds: float, fixed_s: float = 0.0) -> list[CapacityFit]:
    return [CapacityFit(fixed_s=fixed_s, per_sample_s=1.0 / speed) for speed in speeds]


def partition(*, min_share: int = 1, max_share: int = 0, dead_band_frac: float = 0.05) -> Partition:
    return Partition(PartitionConfig(min_share=min_share, max_share=max_share), dead_band_frac)


# speeds, total, counts, finish
SHARES = [
    ((3, 2, 1, 1), 7, (3, 2, 1, 1), 1.0),
    ((3, 2, 1, 1), 256, (111, 73, 36, 36), 37.0),
    ((1, 1, 1), 8, (3, 3, 2), 3.0),
    ((2, 2, 2, 1, 1, 1), 256, (58, 57, 57, 28, 28, 28), 29.0),
    ((5,), 12, (12,), 2.4),
    ((1, 1), 0, (0, 0), 0.0),
    ((1, 100), 10, (1, 9), 1.0),
]


@pytest.mark.parametrize(("speeds", "total", "counts", "finish_s"), SHARES)
def test_share_table(speeds: tuple[float, ...], total: int, counts: tuple[int, ...], finish_s: float) -> None:
    shares = partition().decide(fits_of(*speeds), total)
    assert sum(shares.counts) == total
    assert shares.counts == counts
    assert shares.finish_s == pytest.approx(finish_s)
    assert "finish in" in shares.reason


def test_fixed_cost_moves_samples_to_the_worker_without_it() -> None:
    fits = [CapacityFit(fixed_s=4.0, per_sample_s=1.0), CapacityFit(fixed_s=0.0, per_sample_s=1.0)]
    shares = partition().decide(fits, 10)
    assert shares.counts == (3, 7)
    assert shares.finish_s == 7.0


def test_a_minimum_of_zero_lets_a_slow_worker_rest() -> None:
    fits = [CapacityFit(fixed_s=100.0, per_sample_s=1.0), CapacityFit(fixed_s=0.0, per_sample_s=1.0)]
    assert partition(min_share=0).decide(fits, 10).counts == (0, 10)
    assert partition(min_share=1).decide(fits, 10).counts == (1, 9)


def test_caps_hold_and_the_rest_goes_elsewhere() -> None:
    assert partition(max_share=4).decide(fits_of(10, 1, 1), 9).counts == (4, 3, 2)


def test_caps_that_hold_too_little_are_refused_with_caps_and_need() -> None:
    with pytest.raises(
        PlanError, match=r"cannot place 13 samples on 3 workers: caps of 4 samples hold 12, need 13; raise partition"
    ):
        partition(max_share=4).decide(fits_of(1, 1, 1), 13)


def test_minimum_falls_where_the_batch_is_too_small() -> None:
    shares = partition(min_share=1).decide(fits_of(1, 3, 2, 1), 2)
    assert shares.counts == (0, 1, 1, 0)
    assert "minimum lowered from 1 to 0: 2 samples, 4 workers" in shares.reason
    shares = partition(min_share=4).decide(fits_of(100, 1, 1), 7)
    assert shares.counts == (3, 2, 2)
    assert "minimum lowered from 4 to 2" in shares.reason


def test_small_gains_leave_the_shares_as_they_are() -> None:
    fits = fits_of(1.02, 1.0)
    kept = partition().decide(fits, 200, current=(100, 100))
    assert kept.counts == (100, 100)
    assert kept.finish_s == 100.0
    assert "shares kept: a change would gain 1.0%, dead band 5.0%" in kept.reason
    moved = partition(dead_band_frac=0.0).decide(fits, 200, current=(100, 100))
    assert moved.counts == (101, 99)
    assert "gain 1.0% over the present shares" in moved.reason


def test_large_gains_change_the_shares() -> None:
    shares = partition().decide(fits_of(3, 1), 40, current=(20, 20))
    assert shares.counts == (30, 10)
    assert "gain 50.0%" in shares.reason


def test_present_shares_outside_the_bounds_are_not_kept() -> None:
    shares = partition(max_share=101).decide(fits_of(1.02, 1.0), 200, current=(102, 98))
    assert shares.counts == (101, 99)
    assert "leave the bounds" in shares.reason


@pytest.mark.parametrize("current", [(100,), (100, 99), (201, -1)])
def test_present_shares_of_another_batch_are_refused(current: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"cannot compare with the present shares: .* need 2 shares of 0 or more"):
        partition().decide(fits_of(1, 1), 200, current=current)


def test_no_worker_and_negative_batches_are_refused() -> None:
    with pytest.raises(PlanError, match="got 4 samples and 0 workers"):
        partition().decide([], 4)
    with pytest.raises(PlanError, match="got -1 samples and 1 workers"):
        equal_shares(-1, 1)
    with pytest.raises(ConfigError, match=r"cannot accept capacity.dead_band_frac: got 1.0"):
        Partition(PartitionConfig(), 1.0)


def test_ten_thousand_workers_and_a_million_samples() -> None:
    fits = fits_of(*(1 + worker % 4 for worker in range(10_000)))
    shares = partition().decide(fits, 1_000_000)
    assert sum(shares.counts) == 1_000_000
    assert shares.counts[:4] == (40, 80, 120, 160)
    assert shares.finish_s == pytest.approx(40.0)


def test_a_device_whose_time_does_not_grow_stays_even_with_its_like() -> None:
    flat = CapacityFit(fixed_s=1.0, per_sample_s=1e-30)
    assert partition().decide([flat, flat, flat], 3000).counts == (1000, 1000, 1000)


def test_equal_shares_table() -> None:
    assert equal_shares(10, 4) == (3, 3, 2, 2)
    assert equal_shares(2, 3) == (1, 1, 0)
    assert equal_shares(0, 2) == (0, 0)


# total, workers, shares of steps 0, 1, 2, 3
WARMUP = [
    (128, 4, [(40, 24, 40, 24), (24, 40, 24, 40), (40, 24, 40, 24), (24, 40, 24, 40)]),
    (96, 3, [(40, 24, 32), (32, 40, 24), (24, 32, 40), (40, 24, 32)]),
    (8, 4, [(3, 1, 3, 1), (1, 3, 1, 3), (3, 1, 3, 1), (1, 3, 1, 3)]),
    (3, 2, [(2, 1), (1, 2), (2, 1), (1, 2)]),
    (1, 2, [(1, 0), (0, 1), (1, 0), (0, 1)]),
    (9, 1, [(9,), (9,), (9,), (9,)]),
]


@pytest.mark.parametrize(("total", "num_workers", "expected"), WARMUP)
def test_warm_up_table(total: int, num_workers: int, expected: list[tuple[int, ...]]) -> None:
    assert [warmup_shares(total, num_workers, step) for step in range(4)] == expected


def test_warm_up_keeps_the_cap() -> None:
    assert warmup_shares(128, 4, 0, max_share=34) == (34, 30, 34, 30)
    assert warmup_shares(128, 4, 0, max_share=32) == (32, 32, 32, 32)


def test_ideal_speed_up_is_mean_over_least_speed() -> None:
    assert partition().decide(fits_of(3, 2, 1, 1), 28).speedup == pytest.approx(1.75)
    assert partition().decide(fits_of(2, 2, 2, 1, 1, 1), 18).speedup == pytest.approx(1.5)
    assert partition().decide(fits_of(1, 1), 10).speedup == pytest.approx(1.0)
    capped = Partition(PartitionConfig(max_share=5), 0.0)
    assert capped.decide(fits_of(3, 1), 8).speedup == pytest.approx(4 / 3)


# speeds, total, cap for all, caps of each, counts
CAPPED = [
    ((3, 2, 1, 1), 70, 0, (20, 0, 0, 0), (20, 26, 12, 12)),
    ((3, 2, 1, 1), 70, 0, (0, 0, 0, 5), (33, 22, 10, 5)),
    ((1, 1, 1), 9, 4, (2, 0, 9), (2, 4, 3)),
    ((1, 1), 10, 0, (5, 5), (5, 5)),
    ((5, 1), 3, 0, (1, 0), (1, 2)),
]


@pytest.mark.parametrize(("speeds", "total", "max_share", "caps", "counts"), CAPPED)
def test_caps_of_each_worker(
    speeds: tuple[float, ...], total: int, max_share: int, caps: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    assert partition(max_share=max_share).decide(fits_of(*speeds), total, caps=caps).counts == counts


def test_a_cap_below_the_minimum_wins() -> None:
    assert partition(min_share=4).decide(fits_of(1, 1, 1), 12, caps=(2, 0, 0)).counts == (2, 5, 5)
    shares = partition(min_share=4).decide(fits_of(1, 1, 1), 8, caps=(2, 0, 0))
    assert shares.counts == (2, 3, 3)
    assert "minimum lowered from 4 to 2: 8 samples, 3 workers" in shares.reason


def test_caps_of_each_that_hold_too_little_are_refused_with_caps_and_need() -> None:
    with pytest.raises(
        PlanError,
        match=r"cannot place 13 samples on 3 workers: caps of 4, 6, 2 samples hold 12, need 13; raise"
        r" partition.max_share or partition.caps or lower the global batch",
    ):
        partition(max_share=6).decide(fits_of(1, 1, 1), 13, caps=(4, 0, 2))
    with pytest.raises(PlanError, match=r"caps of 1, 1, 1, 1, 1, 1, 1, 1, \.\.\. samples hold 11, need 99"):
        partition().decide(fits_of(*[1] * 10), 99, caps=(*[1] * 9, 2))
    with pytest.raises(PlanError, match=r"cannot use caps of shares: got 2, need 3 \(one a worker\)"):
        partition().decide(fits_of(1, 1, 1), 13, caps=(4, 0))


def test_present_shares_above_a_cap_are_not_kept() -> None:
    shares = partition().decide(fits_of(1, 1), 20, current=(10, 10), caps=(9, 0))
    assert shares.counts == (9, 11)
    assert "leave the bounds" in shares.reason


def test_shares_tell_the_best_and_the_equal_time() -> None:
    shares = partition(dead_band_frac=0.5).decide(fits_of(3, 1), 40, current=(20, 20), caps=(28, 0))
    assert (shares.finish_s, shares.best_s, shares.equal_s) == (20.0, 12.0, 20.0)
    assert shares.speedup == pytest.approx(20 / 12)
    assert partition().decide(fits_of(3, 1), 0).speedup == 1.0
    assert partition().decide(fits_of(3, 1), 40, caps=(28, 0)).speedup == pytest.approx(20 / 12)


# total, caps of each, shares of steps 0 and 1
WARMUP_CAPS = [
    ((16, 4), (2, 0, 0, 0), [(2, 5, 6, 3), (1, 6, 4, 5)]),
    ((16, 4), (4, 0, 0, 0), [(4, 4, 5, 3), (3, 5, 3, 5)]),
    ((16, 2), (8, 8), [(8, 8), (8, 8)]),
    ((5, 3), (1, 0, 0), [(1, 2, 2), (1, 2, 2)]),
    ((4, 3), (0, 0, 0), [(2, 1, 1), (1, 1, 2)]),
]


@pytest.mark.parametrize(("request_", "caps", "expected"), WARMUP_CAPS)
def test_warm_up_keeps_the_caps_of_each(
    request_: tuple[int, int], caps: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    assert [warmup_shares(*request_, step, caps=caps) for step in range(2)] == expected


def test_a_warm_up_that_no_cap_holds_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot place 16 samples on 2 workers: caps of 3, 4 samples hold 7, need 16"):
        warmup_shares(16, 2, 0, caps=(3, 4))
