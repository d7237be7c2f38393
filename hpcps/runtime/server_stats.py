"""Counts of one server since the start. Over all servers, what was pushed is what was applied or refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcps.protocol.arrivals import GroupCounts
from hpcps.protocol.messages import PushHeader
from hpcps.runtime.metrics import EventLog
from hpcps.units import format_bytes

__all__ = ["ServerStats"]

logger = logging.getLogger(__name__)

COST_BIAS = 0.05
"""A larger distance between the mean cost of what was pushed and of what was applied is worth a warning."""


@dataclass(slots=True, kw_only=True)
class ServerStats:
    """Counts; a push counts where the shard is, not where it was sent on."""

    num_pushes: int = 0
    num_windows: int = 0
    num_refused: int = 0
    num_skipped: int = 0
    payload_bytes: int = 0
    raw_bytes: int = 0
    """What the payloads would have been without a codec."""
    pushed_weight: float = 0.0
    applied_weight: float = 0.0
    refused_weight: float = 0.0
    pushed_cost: float = 0.0
    """Weight times cost of a sample, over all pushes."""
    counted_weight: float = 0.0
    """Weight times what staleness left of it, over all pushes let into windows."""
    counted_cost: float = 0.0
    """The same times cost of a sample."""
    staleness_sum: int = 0
    staleness_max: int = 0
    queue_max: int = 0
    num_moves: int = 0
    """Shards given to other servers."""
    moved_bytes: int = 0
    num_relayed: int = 0
    """Frames sent on to where their shard is."""

    def count_push(self, header: PushHeader, *, raw_bytes: int, times: int = 1) -> None:
        """A gradient came; -1 times: it goes on to another server and counts there."""
        self.num_pushes += times
        self.pushed_weight += times * header.weight
        self.pushed_cost += times * header.weight * header.sample_cost
        self.payload_bytes += times * header.payload_bytes
        self.raw_bytes += times * raw_bytes

    @property
    def cost_bias(self) -> float:
        """Mean cost of a sample as applied over that as pushed, less 1: below 0 where costly samples count less.

        0 where all samples cost the same, or nothing was applied.
        """
        if not (self.pushed_cost > 0 and self.counted_weight > 0):
            return 0.0
        return self.counted_cost / self.counted_weight * self.pushed_weight / self.pushed_cost - 1.0

    def count_applied(self, header: PushHeader, *, staleness: int, weight: float) -> None:
        """A gradient was let into a window, with what staleness left of its weight."""
        self.counted_weight += weight
        self.counted_cost += weight * header.sample_cost
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)
        self.applied_weight += header.weight

    def write(self, events: EventLog, *, counts: Mapping[tuple[int, int], GroupCounts]) -> None:
        """Tell the counts as an event.

        Args:
            events: where it goes.
            counts: what became of each group's pushes, by generation and group.
        """
        if self.payload_bytes != self.raw_bytes:
            logger.info(
                "%d pushes brought %s for %s of gradients",
                self.num_pushes,
                format_bytes(self.payload_bytes),
                format_bytes(self.raw_bytes),
            )
        if abs(self.cost_bias) > COST_BIAS:
            logger.warning(
                "costly samples count %.1f %% %s than they should: batches that take longer come late; raise"
                " window.quorum_frac or set staleness.decay to none",
                100 * abs(self.cost_bias),
                "less" if self.cost_bias < 0 else "more",
            )
        fields: dict[str, Any] = dataclasses.asdict(self) | {"cost_bias": self.cost_bias}
        fields["groups"] = [list(name) for name in sorted(counts)]
        for what in ("used", "decayed", "dropped", "late"):
            fields[f"num_{what}"] = [getattr(counts[name], what) for name in sorted(counts)]
        fields["staleness_mean"] = fields.pop("staleness_sum") / max(1, self.num_pushes - self.num_refused)
        events.write("server", **fields)
