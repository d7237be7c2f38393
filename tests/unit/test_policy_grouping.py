"""Groups of workers, by tables."""

from __future__ import annotations

import pytest

from hpcps.errors import ConfigError, PlanError
from hpcps.plan import Group, Grouping
from hpcps.policy import GroupWorkers

# mode, size, speeds by rank (ranks from 1), groups
GROUPS = [
    ("sync", 0, (3, 2, 1, 1), [(1, 2, 3, 4)]),
    ("async", 0, (1, 3, 2, 1), [(2,), (3,), (1,), (4,)]),
    ("hybrid", 0, (3, 2, 1, 1), [(1, 2), (3, 4)]),
    ("hybrid", 0, (1, 1, 3, 2), [(3, 4), (1, 2)]),
    ("hybrid", 0, (2, 2, 2, 1, 1, 1), [(1, 2, 3), (4, 5, 6)]),
    ("hybrid", 0, (5,), [(1,)]),
    ("hybrid", 0, (5, 1), [(1, 2)]),
    ("hybrid", 0, (1, 1.2, 1.25), [(1, 2, 3)]),
    ("hybrid", 0, (1, 1.3, 10, 10), [(3, 4), (1, 2)]),
    ("hybrid", 0, (10, 4, 1, 1), [(1, 2), (3, 4)]),
    ("hybrid", 0, (8, 8, 7, 1, 1), [(1, 2, 3), (4, 5)]),
    ("hybrid", 0, (8, 8, 1, 1, 6), [(1, 2, 5), (3, 4)]),
    ("hybrid", 3, (2, 2, 2, 1, 1, 1), [(1, 2, 3), (4, 5, 6)]),
    ("hybrid", 3, (1, 2, 3, 4, 5, 6, 7), [(5, 6, 7), (1, 2, 3, 4)]),
    ("hybrid", 3, (1, 2, 3, 4, 5), [(3, 4, 5), (1, 2)]),
    ("hybrid", 8, (1, 2, 3), [(1, 2, 3)]),
    ("hybrid", 3, (1,), [(1,)]),
    ("hybrid", 1, (1, 2), [(2,), (1,)]),
]


@pytest.mark.parametrize(("mode", "size", "speeds", "groups"), GROUPS)
def test_group_table(mode: str, size: int, speeds: tuple[float, ...], groups: list[tuple[int, ...]]) -> None:
    by_rank = {rank: float(speed) for rank, speed in enumerate(speeds, start=1)}
    decision = GroupWorkers(mode, size).decide(by_rank, generation=4)
    expected = tuple(Group(index=index, workers=workers) for index, workers in enumerate(groups))
    assert decision.grouping == Grouping(generation=4, groups=expected)
    assert decision.reason.startswith(f"{mode}: ")


def test_a_slow_drift_does_not_make_one_group() -> None:
    speeds = {rank: 1.2**rank for rank in range(8)}
    groups = GroupWorkers("hybrid", 0).decide(speeds, generation=0).grouping.groups
    assert [group.workers for group in groups] == [(6, 7), (4, 5), (2, 3), (0, 1)]


def test_input_order_does_not_matter() -> None:
    policy = GroupWorkers("hybrid", 2)
    forward = policy.decide({1: 1.0, 2: 1.0, 3: 1.0}, generation=0)
    assert forward == policy.decide({3: 1.0, 2: 1.0, 1: 1.0}, generation=0)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_speeds_are_refused(speed: float) -> None:
    with pytest.raises(PlanError, match=r"cannot group rank 7: got speed .* need a finite speed above 0") as caught:
        GroupWorkers("hybrid", 0).decide({7: speed}, generation=0)
    assert caught.value.rank == 7


def test_no_worker_and_bad_settings_are_refused() -> None:
    with pytest.raises(PlanError, match="cannot group workers: got no worker"):
        GroupWorkers("sync", 0).decide({}, generation=0)
    with pytest.raises(ConfigError, match="cannot accept sync_mode: got 'fast'"):
        GroupWorkers("fast", 0)
    with pytest.raises(ConfigError, match="cannot accept sync_group_size: got -1"):
        GroupWorkers("hybrid", -1)
