"""How many samples a worker's memory holds, from the peaks of its first batches.

Allocates and measures nothing: peaks come in, a cap goes out. It speaks of batches whose samples are alike; where the
content of a sample decides what it needs, peaks say nothing and are not asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcps.units import format_bytes

__all__ = ["FitMemory", "MemoryCap"]

RESERVE_FRAC = 0.1
"""Part of the memory that is left free: an allocator's blocks have gaps, and the next batch may differ a little."""

MIN_GAP_FRAC = 0.2
"""Two sizes closer than this part of the larger say too little about one more sample: allocators round up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCap:
    """Samples that a worker's memory holds, and why."""

    max_samples: int
    reason: str


class FitMemory:
    """Find the line through peaks by batch size and where it meets the memory, less a reserve of 10 %."""

    def decide(self, peaks: Sequence[tuple[int, int]], total_bytes: int) -> MemoryCap | None:
        """Find the cap, or say None where the peaks give none.

        A size that was held is never above the cap, whatever the line says.

        Args:
            peaks: samples and peak bytes of batches, in any order.
            total_bytes: bytes that this process may hold, above 0.
        """
        if not peaks:
            return None
        most_at: dict[int, int] = {}
        for num_samples, peak_bytes in peaks:
            most_at[num_samples] = max(peak_bytes, most_at.get(num_samples, 0))
        least, most = min(most_at), max(most_at)
        if most - least < MIN_GAP_FRAC * most:
            return None
        slope = (most_at[most] - most_at[least]) / (most - least)
        if slope <= 0:
            return None
        fixed = max(at - slope * size for size, at in most_at.items())
        usable = (1 - RESERVE_FRAC) * total_bytes
        cap = max(most, math.floor((usable - fixed) / slope))
        return MemoryCap(
            max_samples=cap,
            reason=f"{format_bytes(round(fixed))} and {format_bytes(round(slope))} a sample, from sizes {least} to"
            f" {most}; {format_bytes(total_bytes)} less {RESERVE_FRAC:.0%} hold {cap}",
        )
