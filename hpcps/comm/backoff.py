"""How long the communication thread sleeps between two looks: nothing while work comes, longer and longer after."""

from __future__ import annotations

__all__ = ["Backoff"]

_FREE_POLLS = 30
"""Looks without sleep after the last progress; measured: keeps round trips on one node below 100 us."""
_FIRST_S = 20e-6
_GROWTH = 1.3
_IDLE_AFTER = 400
"""Looks at the longest working sleep before the rank counts as idle."""
_IDLE_FACTOR = 4.0
"""An idle rank sleeps this much longer: eight of them cost a few per cent of a core."""


class Backoff:
    """Sleep of an adaptive polling loop.

    Args:
        longest_s: longest sleep of a working rank.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._polls = 0
        self._sleep_s = _FIRST_S

    def next_s(self, *, progressed: bool) -> float:
        """Seconds to sleep after a look that found something to do or did not."""
        if progressed:
            self._polls, self._sleep_s = 0, _FIRST_S
            return 0.0
        self._polls += 1
        if self._polls <= _FREE_POLLS:
            return 0.0
        limit_s = self._longest_s * (_IDLE_FACTOR if self._polls > _IDLE_AFTER else 1.0)
        self._sleep_s = min(self._sleep_s * _GROWTH, limit_s)
        return self._sleep_s
