"""What a worker tells of itself beside its timed steps: its link, its memory, and how others use its processor.

Measures; decides nothing and keeps no more than the next report needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from hpcps.comm.channel import Channel
from hpcps.comm.link import NO_USE, LinkUse
from hpcps.policy.link_estimate import LinkEstimate
from hpcps.policy.memory import FitMemory
from hpcps.runtime.disturbance import Disturbance

__all__ = ["MemoryMeter", "Observer", "Sight"]

logger = logging.getLogger(__name__)

MemoryMeter = Callable[[], tuple[int, int] | None]
"""Peak bytes since the last call, and bytes that this process may hold; None where memory is not measured."""

NUM_SIZES = 4
"""Sizes of batches whose peak is measured: the warm-up's two, and those of the first shares."""


LINK_STEPS = 10
"""Steps between two reports of the links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen since the last report; see ``OrderRequest``."""

    link_s: list[float]
    links: list[float]
    cpu_wait_frac: float
    max_samples: int


@dataclass(slots=True)
class _Way:
    """One direction between this worker and a server."""

    estimate: LinkEstimate = field(default_factory=LinkEstimate)
    seen: LinkUse = NO_USE

    def note(self, use: LinkUse, *, step: int) -> float:
        """Take in what went this way in a step, as its mean frame. Returns: seconds in which it was busy."""
        frames, busy_s = use.num_frames - self.seen.num_frames, use.busy_s - self.seen.busy_s
        if frames > 0 and busy_s > 0:
            num_bytes = use.num_bytes - self.seen.num_bytes
            self.estimate.add(max(1, num_bytes // frames), busy_s / frames, step=step)
        self.seen = use
        return busy_s

    def described(self) -> tuple[float, float]:
        """Latency in seconds and bytes a second; 0 and 0: unknown."""
        facts = self.estimate.facts(0)
        return (facts.latency_s, facts.bytes_per_s) if facts.num_transfers else (0.0, 0.0)


class Observer:
    """Looks at one worker.

    Args:
        channel: its channel, asked how long its link was busy.
        num_servers: servers that it pushes to; 0: it shares a process with the only one, so there is no link.
        disturbance: counts its waits for a processor.
    """

    def __init__(self, channel: Channel, *, num_servers: int, disturbance: Disturbance | None = None) -> None:
        self._channel = channel
        self._ways = [(_Way(), _Way()) for _ in range(num_servers)]
        """Pushes and pulls of each server."""
        self._num_steps = 0
        self._links: list[float] = []
        self._disturbance = disturbance or Disturbance()
        self._meter: MemoryMeter | None = None
        self._peaks: dict[int, int] = {}
        self._measures = False
        self._max_samples = 0
        self._link_s: list[float] = []
        self._wait_began_s = self._waited_s = self._compute_s = 0.0

    def watch_memory(self, meter: MemoryMeter) -> None:
        """Measure peaks of the first sizes of batches; the meter's peak is only reset for those."""
        self._meter = meter

    def begin_batch(self, num_samples: int, *, alike: bool) -> None:
        """A batch begins.

        Args:
            num_samples: its samples.
            alike: all its samples need the same memory.
        """
        self._wait_began_s = self._disturbance.waited_s()
        new = alike and num_samples > 0 and num_samples not in self._peaks and len(self._peaks) < NUM_SIZES
        self._measures = new and self._meter is not None and self._meter() is not None

    def end_compute(self, num_samples: int, compute_s: float) -> None:
        """Its gradients are there, after so many seconds."""
        self._waited_s += self._disturbance.waited_s() - self._wait_began_s
        self._compute_s += compute_s
        seen = self._meter() if self._measures and self._meter is not None else None
        self._measures = False
        if seen is None:
            return
        self._peaks[num_samples], total_bytes = seen
        cap = FitMemory().decide(list(self._peaks.items()), total_bytes)
        if cap is not None and cap.max_samples != self._max_samples:
            self._max_samples = cap.max_samples
            logger.info("at most %d samples fit in memory (%s)", cap.max_samples, cap.reason)

    def end_step(self, num_batches: int) -> None:
        """A step is over; its exchange counts for each of its batches alike."""
        if not self._ways:
            return
        self._num_steps += 1
        busy_s = 0.0
        for server, (pushes, pulls) in enumerate(self._ways):
            busy_s += pushes.note(self._channel.link_use(server), step=self._num_steps)
            pulls.note(self._channel.pull_use(server), step=self._num_steps)
        self._link_s.append(busy_s / max(1, num_batches))
        if self._num_steps % LINK_STEPS == 0:
            self._links = [number for both in self._ways for way in both for number in way.described()]

    def take(self) -> Sight:
        """What was seen since the last call."""
        wait_frac = self._waited_s / self._compute_s if self._compute_s > 0 else 0.0
        sight = Sight(
            link_s=self._link_s,
            links=self._links,
            cpu_wait_frac=min(1.0, max(0.0, wait_frac)),
            max_samples=self._max_samples,
        )
        self._link_s, self._links, self._waited_s, self._compute_s = [], [], 0.0, 0.0
        return sight

    def close(self) -> None:
        """Give back what measuring took."""
        self._disturbance.close()
