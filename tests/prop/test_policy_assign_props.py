"""Every sample goes to one member, within the bound of longest-first, and never much worse than by count."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import PartitionConfig
from hpcps.policy import AssignSamples, CapacityFit, Partition

costs_of = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 3.0]), st.floats(0.01, 100))
units = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.05, 20))
fixed = st.one_of(st.just(0.0), st.floats(0, 50))
members_of = st.lists(st.tuples(fixed, units), min_size=1, max_size=8)


def finish_s(costs: np.ndarray, who: list[int], fixed_s: list[float], unit_s: list[float]) -> float:
    work = np.bincount(who, weights=costs, minlength=len(unit_s))
    counts = np.bincount(who, minlength=len(unit_s))
    return max(a + b * w if n else 0.0 for a, b, w, n in zip(fixed_s, unit_s, work, counts, strict=True))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    costs=st.lists(costs_of, max_size=60),
    members=members_of,
    least=st.integers(0, 4),
    caps=st.lists(st.integers(0, 20), min_size=8, max_size=8),
)
def test_bounds_hold(costs: list[float], members: list[tuple[float, float]], least: int, caps: list[int]) -> None:
    fixed_s, unit_s = [list(each) for each in zip(*members, strict=True)]
    caps = caps[: len(members)]
    if 0 not in caps and sum(caps) < len(costs):
        caps[0] = 0
    got = AssignSamples(PartitionConfig(min_share=least)).decide(np.array(costs), fixed_s, unit_s, caps=caps)
    assert len(got.members) == len(costs), "each sample has a place, and so has one only"
    assert sum(got.counts) == len(costs)
    floor = min(least, len(costs) // len(members))
    for count, cap in zip(got.counts, caps, strict=True):
        assert count <= (cap or len(costs))
        assert count >= min(floor, cap or len(costs))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(costs=st.lists(costs_of, min_size=1, max_size=7), unit_s=st.lists(units, min_size=1, max_size=3))
def test_within_the_bound_of_the_best_assignment(costs: list[float], unit_s: list[float]) -> None:
    """2 - 2 / (m + 1), by trying every assignment; fixed times and least shares are not what the bound is for."""
    num_members = len(unit_s)
    nothing = [0.0] * num_members
    array = np.array(costs)
    got = AssignSamples(PartitionConfig(min_share=0)).decide(array, nothing, unit_s)
    ways = itertools.product(range(num_members), repeat=len(costs))
    best_s = min(finish_s(array, list(way), nothing, unit_s) for way in ways)
    assert got.finish_s <= (2 - 2 / (num_members + 1)) * best_s * (1 + 1e-12)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(costs=st.lists(costs_of, min_size=1, max_size=80), members=members_of, least=st.integers(0, 1))
def test_never_worse_than_by_count_by_more_than_a_sample(
    costs: list[float], members: list[tuple[float, float]], least: int
) -> None:
    """The best counts, then samples as they come: how a loader without costs does it."""
    fixed_s, unit_s = [list(each) for each in zip(*members, strict=True)]
    config, array = PartitionConfig(min_share=least), np.array(costs)
    got = AssignSamples(config).decide(array, fixed_s, unit_s)
    fits = [CapacityFit(fixed_s=a, per_sample_s=b) for a, b in members]
    counts = Partition(config, 0.0).decide(fits, len(costs)).counts
    by_count = [member for member, count in enumerate(counts) for _ in range(count)]
    one_sample_s = max(costs) * max(unit_s)
    assert got.finish_s <= finish_s(array, by_count, fixed_s, unit_s) + one_sample_s * (1 + 1e-9)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(costs=st.lists(costs_of, min_size=1, max_size=40), members=members_of, seed=st.integers(0, 1000))
def test_the_order_of_samples_does_not_matter(
    costs: list[float], members: list[tuple[float, float]], seed: int
) -> None:
    """Up to ties: each member gets the same costs, whatever their order."""
    fixed_s, unit_s = [list(each) for each in zip(*members, strict=True)]
    shuffled = np.random.default_rng(seed).permutation(np.array(costs))
    policy = AssignSamples(PartitionConfig())
    one, other = policy.decide(np.array(costs), fixed_s, unit_s), policy.decide(shuffled, fixed_s, unit_s)
    for member in range(len(members)):
        mine = sorted(np.array(costs)[one.members == member].tolist())
        assert mine == sorted(shuffled[other.members == member].tolist())
