"""When a server closes an aggregation window. Pure: the caller's clock comes in with the facts."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from hpcps.config import WindowConfig
from hpcps.errors import PlanError

__all__ = ["WindowDecision", "WindowFacts", "WindowPolicy"]

ROUNDING = 1e-9
"""Slack before a quorum is rounded up: 0.1 of 30 groups are 3, not 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFacts:
    """State of one shard's open window.

    Args:
        num_arrived: groups whose push is in the window.
        num_live: groups that still push.
        opened_s: time of the first push, on the clock of ``now_s``.
        now_s: the present.
        offsets_s: past arrivals, each in seconds after its window opened.
    """

    num_arrived: int
    num_live: int
    opened_s: float
    now_s: float
    offsets_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.num_arrived < 0 or self.num_live < 0:
            raise PlanError(
                f"cannot judge a window: got {self.num_arrived} arrived and {self.num_live} live groups,"
                " need 0 or more; correct the count of groups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDecision:
    """Close now or not.

    Args:
        close: apply what is in the window and open the next one at the next push.
        deadline_s: time at which to ask again, on the clock of the facts; None: at the next arrival.
        reason: why.
    """

    close: bool
    deadline_s: float | None
    reason: str


class WindowPolicy:
    """Close when all live groups are in, or at the deadline if a quorum is."""

    def __init__(self, config: WindowConfig) -> None:
        self._config = config

    def decide(self, facts: WindowFacts) -> WindowDecision:
        """Judge one window; ask after every arrival, every departure and at the deadline."""
        arrived, live = facts.num_arrived, facts.num_live
        if arrived == 0:
            return WindowDecision(close=False, deadline_s=None, reason="nothing arrived")
        if arrived >= live:
            return WindowDecision(close=True, deadline_s=None, reason=f"all {live} live groups are in")
        wait_s, how = self._wait(facts.offsets_s)
        deadline_s = facts.opened_s + wait_s
        if facts.now_s < deadline_s:
            return WindowDecision(
                close=False, deadline_s=deadline_s, reason=f"{arrived} of {live} groups, {how} deadline not reached"
            )
        quorum = min(live, max(1, math.ceil(self._config.quorum_frac * live - ROUNDING)))
        state = f"{arrived} of {live} groups at the {how} deadline, quorum {quorum}"
        return WindowDecision(close=arrived >= quorum, deadline_s=None, reason=state)

    def _wait(self, offsets_s: tuple[float, ...]) -> tuple[float, str]:
        """Seconds from opening to the deadline, and which rule gave them."""
        config = self._config
        if config.deadline == "fixed" or len(offsets_s) < config.min_history:
            return config.fixed_s, "fixed"
        median_s = statistics.median(offsets_s)
        mad_s = statistics.median(abs(offset - median_s) for offset in offsets_s)
        return median_s + config.mad_k * mad_s, "mad"
