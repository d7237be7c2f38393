"""What a worker tells of itself beside its timed steps: its link, its memory, and how others use its processor.

Measures; decides nothing and keeps no more than the next report needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcps.comm.channel import Channel
from hpcps.comm.link import LinkUse
from hpcps.policy.memory import FitMemory
from hpcps.runtime.disturbance import Disturbance
from hpcps.runtime.link_watch import LinkWatch

__all__ = ["MemoryMeter", "Observer", "Sight"]

logger = logging.getLogger(__name__)

MemoryMeter = Callable[[], tuple[int, int] | None]
"""Peak bytes since the last call, and bytes that this process may hold; None where memory is not measured."""

NUM_SIZES = 4
"""Sizes of batches whose peak is measured: the warm-up's two, and those of the first shares."""

LINK_STEPS = 10
"""Steps between two looks at the links, and between two reports of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen since the last report; see ``OrderRequest``."""

    link_s: list[float]
    links: list[float]
    cpu_wait_frac: float
    max_samples: int


class Observer:
    """Looks at one worker.

    Args:
        channel: its channel, asked how long its link was busy.
        num_servers: servers that it pushes to; 0: it shares a process with the only one, so there is no link.
        disturbance: counts its waits for a processor.
    """

    def __init__(self, channel: Channel, *, num_servers: int, disturbance: Disturbance | None = None) -> None:
        self._channel = channel
        self._pushes = [LinkWatch() for _ in range(num_servers)]
        self._pulls = [LinkWatch() for _ in range(num_servers)]
        self._busy_s = 0.0
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
        if not self._pushes:
            return
        self._num_steps += 1
        uses = [self._channel.link_use(server) for server in range(len(self._pushes))]
        busy_s = sum(use.busy_s for use in uses)
        self._link_s.append((busy_s - self._busy_s) / max(1, num_batches))
        self._busy_s = busy_s
        if self._num_steps % LINK_STEPS == 0:
            self._look_at_links(uses)

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

    def _look_at_links(self, uses: Sequence[LinkUse]) -> None:
        number, self._links = self._num_steps // LINK_STEPS, []
        for server, (pushes, pulls) in enumerate(zip(self._pushes, self._pulls, strict=True)):
            pushes.look(uses[server], number=number)
            pulls.look(self._channel.pull_use(server), number=number)
            self._links += [*pushes.described(), *pulls.described()]

    def close(self) -> None:
        """Give back what measuring took."""
        self._disturbance.close()
