"""When a window closes, by tables."""

from __future__ import annotations

from typing import Any

import pytest

from hpcps.config import WindowConfig
from hpcps.errors import PlanError
from hpcps.policy import WindowFacts, WindowPolicy

FIXED = WindowConfig(deadline="fixed", fixed_s=0.5)
ALL = WindowConfig(deadline="fixed", fixed_s=0.5, quorum_frac=1.0)
MAD = WindowConfig(deadline="mad", fixed_s=0.5, mad_k=3.0, min_history=4)
NO_K = WindowConfig(deadline="mad", fixed_s=0.5, mad_k=0.0, min_history=4)
# median 0.2, absolute deviations 0.1 0 0 0.1 0.1, median 0.1: the deadline lies 0.5 after opening
HISTORY = (0.1, 0.2, 0.2, 0.3, 0.1)
# no deviation in the middle: the spread is a twentieth of the median, the deadline 0.2 + 3 x 0.01
TIGHT = (0.2, 0.2, 0.2, 0.2, 9.0)

# config, arrived, live, now (opened at 10), offsets, close, deadline
WINDOWS = [
    (FIXED, 0, 4, 10.0, (), False, None),
    (FIXED, 1, 4, 10.0, (), False, 10.5),
    (FIXED, 3, 4, 10.4, (), False, 10.5),
    (FIXED, 4, 4, 10.0, (), True, None),
    (FIXED, 2, 4, 10.5, (), True, None),
    (FIXED, 1, 4, 10.5, (), False, None),
    (FIXED, 2, 5, 11.0, (), False, None),
    (FIXED, 3, 5, 11.0, (), True, None),
    (FIXED, 1, 2, 10.5, (), True, None),
    (FIXED, 1, 1, 10.0, (), True, None),
    (FIXED, 1, 0, 10.0, (), True, None),
    (FIXED, 0, 0, 10.0, (), False, None),
    (FIXED, 2, 1, 10.0, (), True, None),
    (FIXED, 1, 4, 10.0, TIGHT, False, 10.5),
    (MAD, 1, 4, 10.0, (), False, 10.5),
    (MAD, 1, 4, 10.0, TIGHT[:3], False, 10.5),
    (MAD, 1, 4, 10.0, TIGHT, False, 10.23),
    (MAD, 2, 4, 10.3, TIGHT, True, None),
    (MAD, 1, 4, 10.0, HISTORY, False, 10.5),
]


def facts(arrived: int, live: int, now_s: float = 10.0, **other: Any) -> WindowFacts:
    """A window that opened at 10."""
    return WindowFacts(num_arrived=arrived, num_live=live, opened_s=10.0, now_s=now_s, **other)


@pytest.mark.parametrize(("config", "arrived", "live", "now_s", "offsets_s", "close", "deadline_s"), WINDOWS)
def test_window_table(
    config: WindowConfig,
    arrived: int,
    live: int,
    now_s: float,
    offsets_s: tuple[float, ...],
    close: bool,
    deadline_s: float | None,
) -> None:
    decision = WindowPolicy(config).decide(facts(arrived, live, now_s, offsets_s=offsets_s))
    assert decision.close is close
    assert decision.deadline_s == (None if deadline_s is None else pytest.approx(deadline_s))
    assert decision.reason


# config, offsets, seconds of a step (0: unknown), deadline after the opening
DEADLINES = [
    # regular arrivals: the spread never is below a twentieth of the median, nor below a millisecond
    (MAD, (0.2,) * 8, 0.0, 0.23),
    (MAD, (0.01,) * 8, 0.0, 0.013),
    (MAD, (0.0,) * 8, 0.0, 0.003),
    (NO_K, (0.2,) * 8, 0.0, 0.2),
    (NO_K, (0.0,) * 8, 0.0, 0.001),
    # two of twenty arrivals a little later: so long that the last of them is in, up to k = 12
    (MAD, (*(0.2,) * 18, 0.25, 0.26), 0.0, 0.26),
    (MAD, (*(0.2,) * 18, 0.31, 0.32), 0.0, 0.32),
    # one of twenty is no reason to wait; nor are some that come much later; k = 0 is never widened
    (MAD, (*(0.2,) * 19, 0.26), 0.0, 0.23),
    (MAD, (*(0.2,) * 17, 0.9, 0.9, 0.9), 0.0, 0.23),
    (MAD, (*(0.2,) * 17, 0.26, 0.27, 0.9), 0.0, 0.27),
    (NO_K, (*(0.2,) * 10, *(0.25,) * 9), 0.0, 0.2),
    # never longer than a step takes, widened or not
    (MAD, (*(0.2,) * 18, 0.25, 0.26), 0.255, 0.23),
    (MAD, (0.2,) * 8, 0.15, 0.15),
    (MAD, (0.2,) * 8, 0.0001, 0.001),
    (FIXED, (0.2,) * 8, 0.15, 0.5),
]


@pytest.mark.parametrize(("config", "offsets_s", "step_s", "wait_s"), DEADLINES)
def test_deadline_table(config: WindowConfig, offsets_s: tuple[float, ...], step_s: float, wait_s: float) -> None:
    decision = WindowPolicy(config).decide(facts(1, 4, offsets_s=offsets_s, step_s=step_s))
    assert decision.deadline_s == pytest.approx(10.0 + wait_s)


# config, level, arrived of 4, lapped, now (opened at 10; a step of the slowest takes 0.4 s), close, ask again at
LEVELS = [
    # free: a group that comes round again closes with a quorum
    (FIXED, 0, 2, True, 10.0, True, None),
    (FIXED, 0, 1, True, 10.0, False, 15.0),
    (FIXED, 0, 1, True, 15.0, True, None),
    (FIXED, 0, 1, False, 15.0, False, None),
    (ALL, 0, 3, True, 10.0, False, 15.0),
    (ALL, 0, 3, True, 15.0, True, None),
    # long deadline: one and a half of the slowest step
    (FIXED, 1, 2, True, 10.0, False, 10.6),
    (FIXED, 1, 2, False, 10.6, True, None),
    (FIXED, 1, 1, True, 10.6, False, 15.0),
    (FIXED, 1, 4, False, 10.0, True, None),
    # all, or nobody for so long that something is wrong
    (FIXED, 2, 3, False, 99.0, False, None),
    (FIXED, 2, 3, True, 10.0, False, 15.0),
    (FIXED, 2, 3, True, 15.0, True, None),
    (ALL, 2, 3, True, 15.0, True, None),
    (FIXED, 3, 3, False, 99.0, False, None),
    (FIXED, 3, 4, False, 10.0, True, None),
]


@pytest.mark.parametrize(("config", "level", "arrived", "lapped", "now_s", "close", "deadline_s"), LEVELS)
def test_level_table(
    config: WindowConfig, level: int, arrived: int, lapped: bool, now_s: float, close: bool, deadline_s: float | None
) -> None:
    state = facts(arrived, 4, now_s, level=level, lapped=lapped, step_s=0.2, slowest_s=0.4)
    decision = WindowPolicy(config).decide(state)
    assert decision.close is close
    assert decision.deadline_s == (None if deadline_s is None else pytest.approx(deadline_s))


def test_a_long_deadline_is_no_shorter_than_the_usual_one_and_waits_for_slow_groups() -> None:
    decide = WindowPolicy(FIXED).decide
    assert decide(facts(1, 4, level=1, slowest_s=0.1)).deadline_s == pytest.approx(10.5)
    assert decide(facts(1, 4, level=2, lapped=True, slowest_s=3.0)).deadline_s == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("now_s", "lapped", "reason"),
    [
        (10.5, False, "2 of 4 groups, quorum 2, fixed deadline, but 3 frames are to be looked at first"),
        (10.1, True, "2 of 4 groups, quorum 2, a group comes round again, but 3 frames are to be looked at first"),
    ],
)
def test_frames_are_looked_at_before_a_window_closes_without_them(now_s: float, lapped: bool, reason: str) -> None:
    policy = WindowPolicy(FIXED)
    decision = policy.decide(facts(2, 4, now_s, lapped=lapped, num_queued=3))
    assert not decision.close
    assert decision.deadline_s == now_s, "it is asked again as soon as they were looked at"
    assert decision.reason == reason
    assert policy.decide(facts(2, 4, now_s, lapped=lapped)).close
    assert policy.decide(facts(4, 4, now_s, num_queued=3)).close, "nobody is missing"


def test_reasons_tell_the_rule() -> None:
    def reason(config: WindowConfig, state: WindowFacts) -> str:
        return WindowPolicy(config).decide(state).reason

    assert reason(FIXED, facts(0, 4)) == "nothing arrived"
    assert reason(FIXED, facts(4, 4)) == "all 4 live groups are in"
    assert reason(FIXED, facts(1, 4)) == "1 of 4 groups, quorum 2, fixed deadline not reached"
    assert reason(MAD, facts(2, 4, 12.0, offsets_s=HISTORY)) == "2 of 4 groups, quorum 2, mad deadline"
    near = (*(0.2,) * 18, 0.25, 0.26)
    widened = "1 of 4 groups, quorum 2, mad, widened for 2 of 20 arrivals, deadline not reached"
    assert reason(MAD, facts(1, 4, offsets_s=near)) == widened
    assert reason(MAD, facts(2, 4, 12.0, offsets_s=HISTORY, step_s=0.3)) == "2 of 4 groups, quorum 2, one-step deadline"
    assert reason(FIXED, facts(1, 4, level=1)) == "1 of 4 groups, quorum 2, guard level 1: long deadline not reached"
    assert reason(FIXED, facts(1, 4, level=2)) == "1 of 4 groups, quorum 2, guard level 2 waits for all"
    stuck = "1 of 4 groups, quorum 2, and no other for 5 s while one waits"
    assert reason(FIXED, facts(1, 4, 15.0, lapped=True)) == stuck


def test_a_quorum_that_is_whole_is_not_rounded_up() -> None:
    config = WindowConfig(deadline="fixed", quorum_frac=0.1)
    state = WindowFacts(num_arrived=3, num_live=30, opened_s=0.0, now_s=1.0)
    assert WindowPolicy(config).decide(state).close


def test_negative_counts_are_refused() -> None:
    with pytest.raises(PlanError, match="cannot judge a window: got -1 arrived and 2 live groups"):
        WindowFacts(num_arrived=-1, num_live=2, opened_s=0.0, now_s=0.0)
