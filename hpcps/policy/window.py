"""When a server closes an aggregation window. Pure: the caller's clock comes in with the facts.

The rules, in the order in which they are asked:

1. A window with all live groups in closes.
2. At guard level 0 it closes with a quorum at the deadline, or when one of its groups comes round again: the others
   are the late ones.
3. At guard level 1 it waits for all a little longer than the slowest group takes for a step, and closes then with a
   quorum; from level 2 on it waits for all.
4. Nothing closes while frames are waiting that nobody has looked at: they may be what is missing.
5. Where a group waits for its turn in this window and nobody comes for many steps of the slowest group, the window
   closes with whoever is in: groups that wait for each other in windows of different shards go on so.

The deadline is the median of the arrivals' offsets plus k times their spread:

- The spread is the median absolute deviation, but never below a part of the median and a millisecond: regular arrivals
  would else race with their own deadline.
- k is ``window.mad_k`` while nearly all arrivals come by then.
- It is up to ``WIDEST`` times that where more than a few come a little later, so much as the last of them needs: they
  would be decayed to save a wait shorter than their own jitter. Offsets are measured whether or not the window was
  still open, so a wide deadline does not hide what made it wide; it narrows when such arrivals leave the history.
- It never is longer than a step takes: by then the first group comes round again. Offsets hold late arrivals too, and
  their median alone could make all wait for the slowest.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from hpcps.config import WindowConfig
from hpcps.errors import PlanError

__all__ = ["WAIT_FOR_ALL", "WAIT_LONG", "WindowDecision", "WindowFacts", "WindowPolicy"]

WAIT_LONG = 1
"""Guard level from which on windows wait longer than their deadline."""

WAIT_FOR_ALL = 2
"""Guard level from which on windows wait for all live groups."""

ROUNDING = 1e-9
"""Slack before a quorum is rounded up: 0.1 of 30 groups are 3, not 4."""

SPREAD_FRAC = 0.05
"""Least spread of arrivals as part of their median."""

SPREAD_S = 0.001
"""Least spread in seconds: the longest sleep of a communication thread is of this size."""

WIDEST = 4.0
"""Largest k, in units of ``window.mad_k``."""

FEW_LATE_FRAC = 0.05
"""Part of the arrivals that may come after the deadline before it is widened."""

LONG_STEPS = 1.5
"""Steps of the slowest group that a window waits at guard level 1: one, and half of one for its jitter."""

STUCK_STEPS = 10
"""Steps of the slowest group after which nobody else is expected any more."""

STUCK_S = 5.0
"""And seconds: what a busy machine may hold a rank up without anything being wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFacts:
    """State of one shard's open window.

    Args:
        num_arrived: groups whose push is in the window.
        num_live: groups that still push.
        opened_s: time of the first push, on the clock of ``now_s``.
        now_s: the present.
        offsets_s: past arrivals, each in seconds after the opening of the window that it was for.
        step_s: seconds that a group takes for a step, median over the groups; 0: unknown.
        slowest_s: the same for the slowest live group.
        num_queued: frames that have come and were not looked at yet.
        lapped: a group that is in the window has its next push waiting.
        level: guard level, from 0.
    """

    num_arrived: int
    num_live: int
    opened_s: float
    now_s: float
    offsets_s: tuple[float, ...] = ()
    step_s: float = 0.0
    slowest_s: float = 0.0
    num_queued: int = 0
    lapped: bool = False
    level: int = 0

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
    """Close when all live groups are in, or as the module says when they are not."""

    def __init__(self, config: WindowConfig) -> None:
        self._config = config

    def decide(self, facts: WindowFacts) -> WindowDecision:
        """Judge one window; ask after every arrival, every departure and at the deadline."""
        arrived, live = facts.num_arrived, facts.num_live
        if arrived == 0:
            return WindowDecision(close=False, deadline_s=None, reason="nothing arrived")
        if arrived >= live:
            return WindowDecision(close=True, deadline_s=None, reason=f"all {live} live groups are in")
        quorum = min(live, max(1, math.ceil(self._config.quorum_frac * live - ROUNDING)))
        due_s, how = self._due(facts)
        stuck_s = facts.opened_s + max(STUCK_STEPS * facts.slowest_s, STUCK_S) if facts.lapped else math.inf
        state = f"{arrived} of {live} groups, quorum {quorum}"
        if facts.now_s >= stuck_s:
            close, reason = True, f"{state}, and no other for {facts.now_s - facts.opened_s:.3g} s while one waits"
        else:
            close = facts.now_s >= due_s and arrived >= quorum
            reason = f"{state}, {how}{' not reached' if facts.now_s < due_s < math.inf else ''}"
        if close and facts.num_queued:
            reason = f"{reason}, but {facts.num_queued} frames are to be looked at first"
            return WindowDecision(close=False, deadline_s=facts.now_s, reason=reason)
        ahead = [] if close else [at_s for at_s in (due_s, stuck_s) if facts.now_s < at_s < math.inf]
        return WindowDecision(close=close, deadline_s=min(ahead, default=None), reason=reason)

    def _due(self, facts: WindowFacts) -> tuple[float, str]:
        """When the window may close with a quorum, and by which rule."""
        if facts.level >= WAIT_FOR_ALL:
            return math.inf, f"guard level {facts.level} waits for all"
        if facts.level >= WAIT_LONG:
            wait_s = max(LONG_STEPS * facts.slowest_s, self._wait(facts)[0])
            return facts.opened_s + wait_s, f"guard level {facts.level}: long deadline"
        if facts.lapped:
            return facts.opened_s, "a group comes round again"
        wait_s, how = self._wait(facts)
        return facts.opened_s + wait_s, f"{how} deadline"

    def _wait(self, facts: WindowFacts) -> tuple[float, str]:
        """Seconds from opening to the deadline, and which rule gave them."""
        config, offsets_s = self._config, facts.offsets_s
        if config.deadline == "fixed" or len(offsets_s) < config.min_history:
            return config.fixed_s, "fixed"
        median_s = statistics.median(offsets_s)
        mad_s = statistics.median(abs(offset - median_s) for offset in offsets_s)
        spread_s = max(mad_s, SPREAD_FRAC * median_s, SPREAD_S)
        longest_s = max(facts.step_s, SPREAD_S) if facts.step_s > 0 else math.inf
        narrow_s = max(median_s + config.mad_k * spread_s, SPREAD_S)
        widest_s = min(median_s + WIDEST * config.mad_k * spread_s, longest_s)
        near_s = [offset for offset in offsets_s if narrow_s < offset <= widest_s]
        if len(near_s) > FEW_LATE_FRAC * len(offsets_s):
            return max(near_s), f"mad, widened for {len(near_s)} of {len(offsets_s)} arrivals,"
        if narrow_s > longest_s:
            return longest_s, "one-step"
        return narrow_s, "mad"
