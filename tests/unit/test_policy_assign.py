"""Longest first onto members of unlike speed, as tables."""

from __future__ import annotations

import numpy as np
import pytest

from hpcps.config import PartitionConfig
from hpcps.errors import PlanError
from hpcps.policy import AssignSamples

# costs, fixed seconds, seconds a unit, caps, least share; the member of each sample
TABLE = [
    ("one member takes all", (1, 2, 3), (0,), (1,), (), 1, (0, 0, 0)),
    ("longest first, ties to the lower index", (1, 3, 2, 3), (0, 0), (1, 1), (), 1, (1, 0, 0, 1)),
    ("twice as quick, twice the work", (2, 2, 2), (0, 0), (1, 2), (), 1, (0, 0, 1)),
    ("a long sample goes where it ends first", (9, 1, 1, 1), (0, 0), (1, 3), (), 1, (0, 1, 1, 1)),
    ("a fixed time counts as work", (2, 2, 2), (3, 0), (1, 1), (), 0, (1, 1, 0)),
    ("who is too slow for any gets none", (1, 1), (0, 50), (1, 1), (), 0, (0, 0)),
    ("but the least share, of the cheapest", (1, 2, 3), (0, 50), (1, 1), (), 1, (1, 0, 0)),
    ("two of the cheapest", (1, 2, 3, 4, 5), (0, 50), (1, 1), (), 2, (1, 1, 0, 0, 0)),
    ("fewer than the least share for all: less", (4, 5), (0, 0, 50), (1, 1, 1), (), 1, (1, 0)),
    ("a cap sends the rest elsewhere", (4, 3, 2, 1), (0, 9), (1, 1), (2, 0), 1, (0, 0, 1, 1)),
    ("a cap below the least share rules", (4, 3, 2, 1), (0, 0), (1, 1), (1, 0), 2, (0, 1, 1, 1)),
    ("samples without cost go where it ends first", (0, 0, 5), (0, 0), (1, 1), (), 1, (1, 1, 0)),
    ("no samples", (), (0, 1), (1, 1), (2, 0), 1, ()),
]


@pytest.mark.parametrize(("name", "costs", "fixed_s", "unit_s", "caps", "least", "members"), TABLE)
def test_table(
    name: str,
    costs: tuple[float, ...],
    fixed_s: tuple[float, ...],
    unit_s: tuple[float, ...],
    caps: tuple[int, ...],
    least: int,
    members: tuple[int, ...],
) -> None:
    policy = AssignSamples(PartitionConfig(min_share=least))
    got = policy.decide(np.array(costs, dtype=np.float64), fixed_s, unit_s, caps=caps)
    assert tuple(got.members.tolist()) == members, name
    assert got.counts == tuple(members.count(each) for each in range(len(unit_s)))
    times = [fixed_s[each] + unit_s[each] * got.work[each] if got.counts[each] else 0.0 for each in range(len(unit_s))]
    assert got.finish_s == pytest.approx(max(times))
    assert sum(got.work) == pytest.approx(sum(costs))


def test_the_reason_says_how_even_the_end_is() -> None:
    got = AssignSamples(PartitionConfig()).decide(np.array([3.0, 1.0, 1.0]), (0.0, 0.0), (1.0, 1.0))
    assert "longest of 3 samples first: the slowest of 2 members finishes in 3" in got.reason
    assert "2.5" in got.reason


@pytest.mark.parametrize(
    ("costs", "fixed_s", "unit_s", "caps", "message"),
    [
        ((1.0, -1.0), (0,), (1,), (), "need finite costs of 0 or more"),
        ((float("nan"),), (0,), (1,), (), "need finite costs"),
        ((float("inf"),), (0,), (1,), (), "need finite costs"),
        ((1.0,), (), (), (), "0 fixed times, 0 unit times"),
        ((1.0,), (0, 0), (1,), (), "2 fixed times, 1 unit times"),
        ((1.0,), (0,), (0,), (), "a unit time above 0"),
        ((1.0,), (-1,), (1,), (), "a fixed time of 0 or more"),
        ((1.0,), (0,), (float("inf"),), (), "a unit time above 0"),
        ((1.0,), (0, 0), (1, 1), (1,), "and 1 caps"),
        (((1.0, 2.0),), (0,), (1,), (), r"costs of shape \(1, 2\)"),
        ((1.0, 1.0, 1.0), (0, 0), (1, 1), (1, 1), "cannot assign 3 samples to 2 members: their caps hold 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    costs: tuple[float, ...],
    fixed_s: tuple[float, ...],
    unit_s: tuple[float, ...],
    caps: tuple[int, ...],
    message: str,
) -> None:
    with pytest.raises(PlanError, match=message):
        AssignSamples(PartitionConfig()).decide(np.array(costs), fixed_s, unit_s, caps=caps)
