"""When a window closes, by tables."""

from __future__ import annotations

import pytest

from hpcps.config import WindowConfig
from hpcps.errors import PlanError
from hpcps.policy import WindowFacts, WindowPolicy

FIXED = WindowConfig(deadline="fixed", fixed_s=0.5)
MAD = WindowConfig(deadline="mad", fixed_s=0.5, mad_k=3.0, min_history=4)
# median 0.2, absolute deviations 0.1 0 0 0.1 0.1, median 0.1: the deadline lies 0.5 after opening
HISTORY = (0.1, 0.2, 0.2, 0.3, 0.1)
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
    (MAD, 1, 4, 10.0, TIGHT, False, 10.2),
    (MAD, 2, 4, 10.3, TIGHT, True, None),
    (MAD, 1, 4, 10.0, HISTORY, False, 10.5),
]


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
    facts = WindowFacts(num_arrived=arrived, num_live=live, opened_s=10.0, now_s=now_s, offsets_s=offsets_s)
    decision = WindowPolicy(config).decide(facts)
    assert decision.close is close
    assert decision.deadline_s == (None if deadline_s is None else pytest.approx(deadline_s))
    assert decision.reason


def test_a_quorum_that_is_whole_is_not_rounded_up() -> None:
    config = WindowConfig(deadline="fixed", quorum_frac=0.1)
    facts = WindowFacts(num_arrived=3, num_live=30, opened_s=0.0, now_s=1.0)
    assert WindowPolicy(config).decide(facts).close


def test_negative_counts_are_refused() -> None:
    with pytest.raises(PlanError, match="cannot judge a window: got -1 arrived and 2 live groups"):
        WindowFacts(num_arrived=-1, num_live=2, opened_s=0.0, now_s=0.0)
