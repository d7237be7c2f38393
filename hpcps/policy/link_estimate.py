"""How fast a link is, from the transfers it carried. Pure arithmetic on what the caller timed.

Model: a transfer of n bytes takes ``latency_s + n / bytes_per_s`` seconds. Medians only. A rate that rests on small
transfers alone says little about large ones, where other limits rule: such facts are marked as not trusted.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpcps.errors import DataError, PlanError

__all__ = ["LinkEstimate", "LinkFacts"]

WINDOW_STEPS = 32
"""Steps after which a transfer is forgotten."""

MAX_TRANSFERS = 128
"""Transfers kept at most, where a step has many."""

SPREAD = 3.5
"""Sizes this far apart give a latency and a rate; int8 frames are 3.98 times smaller than plain ones."""

SAME_SIZE = 1.25
"""Sizes within this factor count as one: below 1 + CHANGE_FRAC, so that a size alone never looks like a change."""

TRUSTED_FACTOR = 2.0
"""A rate is trusted for transfers up to this much larger than the largest one seen."""

MIN_TRANSFERS = 3
"""Fewer transfers are no ground for a median."""

MAX_KNOWN_PART = 0.5
"""A latency from before is used up to this part of a transfer, so that noise is at most doubled."""

CHANGE_TRANSFERS = 5
"""Last transfers in whose median a change is looked for."""

CHANGE_FRAC = 0.3
"""A median this far from the fit is a change of the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """What is known of one link.

    Args:
        latency_s: seconds that a transfer takes whatever its size, 0 or more.
        bytes_per_s: rate, above 0; infinity where it takes no time.
        num_transfers: transfers that this rests on.
        trusted: False where it should not decide about transfers of the size in question.
        num_changes: changes of the link noticed so far.

    Raises:
        PlanError: a value is out of range.
    """

    latency_s: float
    bytes_per_s: float
    num_transfers: int = 0
    trusted: bool = True
    num_changes: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bytes_per_s > 0):
            raise PlanError(
                f"cannot describe a link: got a latency of {self.latency_s} s and {self.bytes_per_s} B/s, need a finite"
                " one of 0 or more and a rate above 0; correct the measurement"
            )

    def seconds(self, num_bytes: float) -> float:
        """Predicted time of a transfer."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    step: int
    num_bytes: int
    seconds: float


class LinkEstimate:
    """Latency and rate of one link by a robust line through its recent transfers.

    The line goes through the median of the smallest and the median of the largest transfers where these are far
    enough apart. Else it goes through the median of all and, where large transfers are left, the latency that was
    found before; without such a one through 0, and the latency is then part of the rate.
    """

    def __init__(self) -> None:
        self._transfers: deque[_Transfer] = deque(maxlen=MAX_TRANSFERS)
        self._num_changes = 0
        self._latency_s = 0.0
        self._latency_bytes = 0  # largest transfers of the line that gave the latency

    def add(self, num_bytes: int, seconds: float, *, step: int) -> None:
        """Take in a finished transfer. The first of a step also looks for a change of the link.

        Args:
            num_bytes: bytes moved, at least 1.
            seconds: time it took, above 0.
            step: the step it belongs to, never less than that of the transfer before.

        Raises:
            DataError: bytes or seconds are out of range.
        """
        if num_bytes < 1 or not 0 < seconds < math.inf:
            raise DataError(
                f"cannot use a transfer of {num_bytes} B in {seconds} s: need at least 1 B and a finite time above"
                " 0 s; measure with a monotonic clock"
            )
        begins_step = bool(self._transfers) and step > self._transfers[-1].step
        self._transfers.append(_Transfer(step=step, num_bytes=num_bytes, seconds=seconds))
        while self._transfers[0].step <= step - WINDOW_STEPS:
            self._transfers.popleft()
        if begins_step:
            self._look_back()

    def _look_back(self) -> None:
        """Look for a change of the link, and keep the latency where it shows."""
        transfers = list(self._transfers)
        departed = _departed(transfers)
        if departed:
            self._transfers = deque(departed, maxlen=MAX_TRANSFERS)
            self._num_changes += 1
            self._latency_s, self._latency_bytes = 0.0, 0
            return
        sizes = [each.num_bytes for each in transfers]
        if max(sizes) >= SPREAD * min(sizes):
            self._latency_s, _ = _line(transfers)
            self._latency_bytes = max(sizes)

    def facts(self, num_bytes: int) -> LinkFacts:
        """Describe the link; while no transfer is known it is infinitely quick and not trusted.

        Args:
            num_bytes: the largest transfer that the facts shall decide about.
        """
        if not self._transfers:
            return LinkFacts(latency_s=0.0, bytes_per_s=math.inf, trusted=False)
        largest = max(each.num_bytes for each in self._transfers)
        known_s = self._latency_s if largest * SAME_SIZE >= self._latency_bytes else 0.0
        latency_s, bytes_per_s = _line(list(self._transfers), known_s)
        count = len(self._transfers)
        return LinkFacts(
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            num_transfers=count,
            trusted=count >= MIN_TRANSFERS and num_bytes <= TRUSTED_FACTOR * largest,
            num_changes=self._num_changes,
        )


def _line(transfers: Sequence[_Transfer], known_s: float = 0.0) -> tuple[float, float]:
    """Latency and rate; ``known_s`` is the latency where the transfers are too much alike to tell it."""
    sizes = [each.num_bytes for each in transfers]
    smallest, largest = min(sizes), max(sizes)
    if largest < SPREAD * smallest:
        middle_s = statistics.median(each.seconds for each in transfers)
        latency_s = known_s if known_s <= MAX_KNOWN_PART * middle_s else 0.0
        return latency_s, statistics.median(sizes) / (middle_s - latency_s)
    small_bytes, small_s = _medians([each for each in transfers if each.num_bytes <= SAME_SIZE * smallest])
    large_bytes, large_s = _medians([each for each in transfers if each.num_bytes * SAME_SIZE >= largest])
    per_byte_s = (large_s - small_s) / (large_bytes - small_bytes)
    latency_s = small_s - per_byte_s * small_bytes
    if per_byte_s <= 0 or latency_s <= 0:  # noise, or a line through 0: the large ones say more about the rate
        return 0.0, large_bytes / large_s
    return latency_s, 1.0 / per_byte_s


def _medians(transfers: Sequence[_Transfer]) -> tuple[float, float]:
    return (
        statistics.median(each.num_bytes for each in transfers),
        statistics.median(each.seconds for each in transfers),
    )


def _departed(transfers: Sequence[_Transfer]) -> list[_Transfer]:
    """Those of the last transfers that show a change of the link; empty: none is seen.

    Like is compared with like: against the fitted line, the first frames of another codec would look like a change
    of the link, as the line was never held against their size.
    """
    before, last = transfers[:-CHANGE_TRANSFERS], transfers[-CHANGE_TRANSFERS:]
    ratios: list[float] = []
    for each in last:
        low, high = each.num_bytes / SAME_SIZE, each.num_bytes * SAME_SIZE
        costs_s = [other.seconds / other.num_bytes for other in before if low <= other.num_bytes <= high]
        if len(costs_s) < MIN_TRANSFERS:
            return []
        ratios.append(each.seconds / each.num_bytes / statistics.median(costs_s))
    middle = statistics.median(ratios)
    if abs(middle - 1.0) <= CHANGE_FRAC:
        return []
    slower = middle > 1.0
    return [
        each
        for each, ratio in zip(last, ratios, strict=True)
        if abs(ratio - 1.0) > CHANGE_FRAC and (ratio > 1.0) == slower
    ]
