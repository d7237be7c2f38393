"""How long the communication thread sleeps between two looks: nothing while work comes, longer and longer after."""

from __future__ import annotations

__all__ = ["Backoff"]

_FREE_POLLS = 30
"""Looks without sleep after the last progress; measured: keeps round trips on one node below 100 us."""
_FIRST_S = 20e-6
_GROWTH = 1.3
_BUSY_S = 200e-6
"""Longest sleep while operations are under way; measured: below it the script's own thread loses the interpreter."""
_IDLE_AFTER = 400
"""Looks without progress, half a second, after which a rank counts as idle."""
_LONGEST_IDLE_S = 0.010
"""An idle rank's sleep grows to this: the first message after a long silence is late by as much, and no other."""
_IDLE_GROWTH = 1.02
"""Slow, so that a pause of a second costs no more than a few milliseconds at its end."""


class Backoff:
    """Sleep of an adaptive polling loop.

    Args:
        longest_s: longest sleep of a working rank.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._polls = 0
        self._sleep_s = _FIRST_S

    def next_s(self, *, progressed: bool, under_way: bool) -> float:
        """Seconds to sleep after a look.

        Args:
            progressed: the look found something to do.
            under_way: operations are waiting for the other side, so each look may be what moves them.
        """
        if progressed:
            self._polls, self._sleep_s = 0, _FIRST_S
            return 0.0
        self._polls += 1
        if self._polls <= _FREE_POLLS:
            return 0.0
        if self._polls > _IDLE_AFTER:
            self._sleep_s = min(self._sleep_s * _IDLE_GROWTH, _LONGEST_IDLE_S)
        else:
            self._sleep_s = min(self._sleep_s * _GROWTH, _BUSY_S if under_way else self._longest_s)
        return self._sleep_s
