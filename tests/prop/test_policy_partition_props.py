"""Shares are exact, within bounds, and independent of the order of workers."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import PartitionConfig
from hpcps.errors import PlanError
from hpcps.policy import CapacityFit, Partition, equal_shares, warmup_shares

fixed = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 10))
per = st.one_of(st.sampled_from([0.25, 0.5, 1.0]), st.floats(0.01, 10))
workers = st.builds(lambda a, b: CapacityFit(fixed_s=a, per_sample_s=b), fixed, per)


def finish_s(fits: list[CapacityFit], counts: tuple[int, ...]) -> float:
    return max(fit.seconds(count) for fit, count in zip(fits, counts, strict=True))


def brute_force_s(fits: list[CapacityFit], total: int, *, low: list[int], high: list[int]) -> float:
    """Least greatest time over all ways to split."""
    ways = itertools.product(*(range(least, most + 1) for least, most in zip(low[:-1], high[:-1], strict=True)))
    splits = ((*way, total - sum(way)) for way in ways)
    return min(finish_s(fits, split) for split in splits if low[-1] <= split[-1] <= high[-1])


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    fits=st.lists(workers, min_size=1, max_size=4),
    total=st.integers(0, 12),
    min_share=st.integers(0, 3),
    max_share=st.sampled_from([0, 3, 5, 8]),
    own_caps=st.one_of(st.just([]), st.lists(st.integers(0, 8), min_size=4, max_size=4)),
)
def test_shares_equal_the_best_of_all_splits(
    fits: list[CapacityFit], total: int, min_share: int, max_share: int, own_caps: list[int]
) -> None:
    policy = Partition(PartitionConfig(min_share=min_share, max_share=max_share), 0.0)
    caps = own_caps[: len(fits)]
    high = [min(cap or total, max_share or total) for cap in caps or [0] * len(fits)]
    if sum(high) < total:
        with pytest.raises(PlanError, match="cannot place"):
            policy.decide(fits, total, caps=caps)
        return
    low = [min(min_share, most) for most in high]
    if sum(low) > total:
        low = [min(total // len(fits), most) for most in high]
    shares = policy.decide(fits, total, caps=caps)
    assert sum(shares.counts) == total
    assert all(least <= count <= most for least, count, most in zip(low, shares.counts, high, strict=True))
    assert shares.finish_s == finish_s(fits, shares.counts) == brute_force_s(fits, total, low=low, high=high)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    fits=st.lists(workers, min_size=1, max_size=40),
    total=st.integers(0, 5000),
    seed=st.integers(0, 1000),
    min_share=st.integers(0, 4),
)
def test_shares_do_not_depend_on_the_order_of_workers(
    fits: list[CapacityFit], total: int, seed: int, min_share: int
) -> None:
    policy = Partition(PartitionConfig(min_share=min_share), 0.05)
    order = list(range(len(fits)))
    random.Random(seed).shuffle(order)
    straight = policy.decide(fits, total)
    mixed = policy.decide([fits[index] for index in order], total)
    assert mixed.finish_s == straight.finish_s

    def by_fit(pairs: list[tuple[CapacityFit, int]]) -> list[tuple[float, float, int]]:
        return sorted((fit.fixed_s, fit.per_sample_s, count) for fit, count in pairs)

    assert by_fit([(fits[index], count) for index, count in zip(order, mixed.counts, strict=True)]) == by_fit(
        list(zip(fits, straight.counts, strict=True))
    )


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    kinds=st.lists(workers, min_size=1, max_size=3),
    copies=st.integers(2, 20),
    total=st.integers(0, 10_000),
)
def test_equal_workers_are_within_one(kinds: list[CapacityFit], copies: int, total: int) -> None:
    counts = Partition(PartitionConfig(), 0.05).decide(kinds * copies, total).counts
    for kind in range(len(kinds)):
        of_kind = counts[kind :: len(kinds)]
        assert max(of_kind) - min(of_kind) <= 1


@settings(deadline=None, max_examples=200, derandomize=True)
@given(fits=st.lists(workers, min_size=1, max_size=20), total=st.integers(1, 2000), seed=st.integers(0, 1000))
def test_the_dead_band_never_costs_more_than_it_says(fits: list[CapacityFit], total: int, seed: int) -> None:
    rng = random.Random(seed)
    current = [0] * len(fits)
    for _ in range(total):
        current[rng.randrange(len(fits))] += 1
    best = Partition(PartitionConfig(min_share=0), 0.0).decide(fits, total)
    kept = Partition(PartitionConfig(min_share=0), 0.1).decide(fits, total, current=current)
    assert kept.counts in (best.counts, tuple(current))
    assert best.finish_s >= 0.9 * kept.finish_s * (1 - 1e-12)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(fits=st.lists(workers, min_size=1, max_size=20), per_worker=st.integers(1, 50))
def test_the_ideal_speed_up_is_at_least_one(fits: list[CapacityFit], per_worker: int) -> None:
    assert Partition(PartitionConfig(), 0.0).decide(fits, per_worker * len(fits)).speedup >= 1.0


@settings(deadline=None, max_examples=200, derandomize=True)
@given(num_workers=st.integers(1, 20), total=st.integers(0, 500), step=st.integers(0, 50))
def test_warm_up_shares_sum_and_leave_no_worker_out(num_workers: int, total: int, step: int) -> None:
    counts = warmup_shares(total, num_workers, step)
    assert len(counts) == num_workers
    assert sum(counts) == sum(equal_shares(total, num_workers)) == total
    assert min(counts) >= (1 if total >= num_workers else 0)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(num_workers=st.integers(2, 20), per_worker=st.integers(2, 100), extra=st.integers(0, 19))
def test_warm_up_shows_every_worker_two_sizes(num_workers: int, per_worker: int, extra: int) -> None:
    total = per_worker * num_workers + extra % num_workers
    seen = [warmup_shares(total, num_workers, step) for step in range(6)]
    for worker in range(num_workers):
        sizes = {counts[worker] for counts in seen}
        assert max(sizes) - min(sizes) >= 0.2 * max(sizes)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    caps=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    total=st.integers(0, 200),
    step=st.integers(0, 50),
    max_share=st.sampled_from([0, 20]),
)
def test_warm_up_shares_keep_every_cap(caps: list[int], total: int, step: int, max_share: int) -> None:
    high = [min(cap or total, max_share or total) for cap in caps]
    if sum(high) < total:
        with pytest.raises(PlanError, match="cannot place"):
            warmup_shares(total, len(caps), step, max_share=max_share, caps=caps)
        return
    counts = warmup_shares(total, len(caps), step, max_share=max_share, caps=caps)
    assert sum(counts) == total
    assert all(0 <= count <= most for count, most in zip(counts, high, strict=True))
