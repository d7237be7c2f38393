"""One direction between a worker and a server, watched: what went over it tells its latency and rate."""

from __future__ import annotations

from hpcps.comm.link import NO_USE, LinkUse
from hpcps.policy.link_estimate import LinkEstimate

__all__ = ["LinkWatch"]


class LinkWatch:
    """Takes in what a link carried, as the mean frame since the last look.

    Attributes:
        estimate: of the frames that counted.
    """

    def __init__(self) -> None:
        self.estimate = LinkEstimate()
        self._seen = NO_USE

    def look(self, use: LinkUse, *, number: int, counts: bool = True) -> None:
        """Look at what it carried.

        Args:
            use: the counters now.
            number: of the look, rising; the estimate forgets by it.
            counts: False where what was carried since the last look says nothing.
        """
        frames, busy_s = use.num_frames - self._seen.num_frames, use.busy_s - self._seen.busy_s
        if frames > 0 and busy_s > 0 and counts:
            num_bytes = use.num_bytes - self._seen.num_bytes
            self.estimate.add(max(1, num_bytes // frames), busy_s / frames, step=number)
        self._seen = use

    def described(self) -> tuple[float, float]:
        """Latency in seconds and bytes a second; 0 and 0: unknown."""
        facts = self.estimate.facts(0)
        return (facts.latency_s, facts.bytes_per_s) if facts.num_transfers else (0.0, 0.0)
