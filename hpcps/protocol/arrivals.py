"""What a server notes of the pushes that come: the pace of each group, and what became of its gradients.

Refuses to judge: the window policy reads the paces, logs and reports read the counts.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["GroupCounts", "Paces"]

_STEPS_KEPT = 9
"""Intervals between a group's pushes that its median is taken over: a change of pace shows after five."""


@dataclass(slots=True)
class Paces:
    """Seconds between two pushes of one shard by the same group."""

    _seen_s: dict[int, float] = field(default_factory=dict)
    _steps_s: dict[int, deque[float]] = field(default_factory=dict)
    _medians_s: dict[int, float] = field(default_factory=dict)
    """Of the groups that were asked for since their last push."""

    def came(self, group: int, *, now_s: float) -> None:
        """The group's next push of the shard has come."""
        before_s = self._seen_s.get(group)
        self._seen_s[group] = now_s
        if before_s is not None:
            self._steps_s.setdefault(group, deque(maxlen=_STEPS_KEPT)).append(now_s - before_s)
            self._medians_s.pop(group, None)

    def of(self, groups: Iterable[int]) -> tuple[float, float]:
        """Seconds of a step: the median over these groups, and of the slowest of them; 0 where none is known yet."""
        known_s = [self._median_s(group) for group in groups if group in self._steps_s]
        return (statistics.median(known_s), max(known_s)) if known_s else (0.0, 0.0)

    def _median_s(self, group: int) -> float:
        if group not in self._medians_s:
            self._medians_s[group] = statistics.median(self._steps_s[group])
        return self._medians_s[group]


@dataclass(slots=True, kw_only=True)
class GroupCounts:
    """What became of the pushes of one group, one a shard and step.

    Args:
        used: let into a window with their full weight.
        decayed: let in with less.
        dropped: refused, for they were over the cap of staleness.
        late: of those let in, the ones that missed the window of their own step.
        dropped_in_a_row: the last ones, if nothing was let in since.
    """

    used: int = 0
    decayed: int = 0
    dropped: int = 0
    late: int = 0
    dropped_in_a_row: int = 0

    def let_in(self, factor: float, *, late: bool) -> None:
        """A push was let into a window with this factor on its weight."""
        if factor < 1:
            self.decayed += 1
        else:
            self.used += 1
        self.late += late
        self.dropped_in_a_row = 0

    def drop(self) -> int:
        """A push was dropped; returns how many in a row."""
        self.dropped += 1
        self.dropped_in_a_row += 1
        return self.dropped_in_a_row
