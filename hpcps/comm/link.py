"""One direction of a rank's link: what went over it, in what time, and how long an emulated one would take."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LinkUse", "NO_USE", "Reads", "Throttle"]


class LinkUse(NamedTuple):
    """What was pushed to one server so far, or read from it.

    ``busy_s`` counts the time in which at least one frame was under way, waits for a free slot left out. Messages of
    the two-sided plane count as under way until MPI has taken them, which is at once for small ones. A read is under
    way from the request until the values are there.
    """

    num_frames: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0


NO_USE = LinkUse()


class Reads:
    """Counts the reads from one server, of which several may be under way at once."""

    def __init__(self) -> None:
        self.use = NO_USE
        """Replaced as a whole: another thread reads it."""
        self._num_under_way = 0
        self._since_s = 0.0

    def begin(self, *, now_s: float) -> None:
        """A read begins."""
        if self._num_under_way == 0:
            self._since_s = now_s
        self._num_under_way += 1

    def end(self, num_bytes: int, *, now_s: float) -> None:
        """A read has brought so many bytes; 0: it found nothing, and only its seconds count."""
        self._num_under_way -= 1
        frames, total_bytes, busy_s = self.use
        busy_s += now_s - self._since_s
        self._since_s = now_s
        self.use = LinkUse(frames + (num_bytes > 0), total_bytes + num_bytes, busy_s)


class Throttle:
    """Says when bytes would be over an emulated link that carries one thing after the other.

    Args:
        bytes_per_s: rate of the link; 0: as fast as it goes.
    """

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def reserve(self, num_bytes: int, *, now_s: float) -> float:
        """Take the link for so many bytes, after all that was taken before. Returns: when they are over."""
        if self._bytes_per_s == 0:
            return now_s
        self._free_s = max(now_s, self._free_s) + num_bytes / self._bytes_per_s
        return self._free_s
