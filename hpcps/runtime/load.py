"""What a server can do, and what it did: one measurement at the start, counters while it serves.

The hot path only adds to counters; `LoadMeter.report` makes a message of them once an interval. It judges nothing:
that is the coordinator's part (`hpcps.protocol.router`, `hpcps.policy.rebalance`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import numpy as np

from hpcps import native
from hpcps.plan import Codec
from hpcps.protocol.control import ServerLoad
from hpcps.runtime.memory import free_memory
from hpcps.units import MiB

__all__ = ["LoadMeter", "measure_rate"]

_TRIAL_ELEMS = 4 * MiB // 4
"""Elements of the shard that is tried: the default shard, larger than most caches hold with its sum."""
_TRIAL_S = 0.03
"""The trial ends after this; what has begun is finished."""
_MOST_PASSES = 12
_MOST_OFFSETS = 512
"""Arrival offsets kept for a median: the newest of an interval."""


def measure_rate(emulated_bytes_per_s: float = 0.0) -> float:
    """Gradient bytes that this server takes in a second: decode into a sum, then update the values with it.

    The quickest of a few passes counts, after one that only touches the memory: what else runs on the host while all
    ranks start can only slow a pass down, and a slowness that stays is seen by the `LoadMeter`.

    Args:
        emulated_bytes_per_s: the stated rate of an emulated server, which is believed; 0: measure.

    Returns: bytes of float32 gradients a second, above 0. It takes less than 50 ms on an idle core.
    """
    if emulated_bytes_per_s > 0:
        return emulated_bytes_per_s
    gradient, total, values = (np.ones(_TRIAL_ELEMS, np.float32) for _ in range(3))
    payload = gradient.view(np.uint8)
    passes: list[float] = []
    end_s = time.perf_counter() + _TRIAL_S
    while len(passes) < 2 or (len(passes) < _MOST_PASSES and time.perf_counter() < end_s):
        began_s = time.perf_counter()
        native.decode_accumulate(total, [payload], [int(Codec.NONE)], [0.5], assign=True)
        native.accumulate(values, total, -1e-3)
        passes.append(time.perf_counter() - began_s)
    return gradient.nbytes / min(passes[1:])


class LoadMeter:
    """Counters of one server between two reports.

    A server is busy while it works on what has come: also while it waits for a processor that others use or that
    a quota holds back, or for its own communication thread, for that is what slows its shards. It is not busy while it
    moves shards.

    Args:
        server: index of the server.
        interval_steps: versions of its newest shard between two reports, at least 1.
        memory: tells the bytes that may still be used, 0: unknown.
        clock: seconds, rising.
        cpu_clock: seconds of processor that this process had.
    """

    def __init__(
        self,
        server: int,
        *,
        interval_steps: int,
        memory: Callable[[], int] = free_memory,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._server = server
        self._interval_steps = interval_steps
        self._memory = memory
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._version = -1
        self._turn_began_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._began_s = self._clock()
        self._cpu_began_s = self._cpu_clock()
        self._busy_s = self._left_out_s = 0.0
        self._raw_bytes = self._queue = 0
        self._pushes: dict[int, int] = {}
        self._num_pushes = self._num_late = self._staleness_sum = 0
        self._offsets_s: list[float] = []
        self._agreement_sum, self._num_compared = 0.0, 0

    # --- what the server loop tells ------------------------------------------------------------------

    def turn_began(self) -> None:
        """A turn begins."""
        self._turn_began_s = self._clock()
        self._left_out_s = 0.0

    def turn_ended(self, *, worked: bool) -> None:
        """The turn is over; one that found nothing to do is no work."""
        if worked:
            self._busy_s += max(0.0, self._clock() - self._turn_began_s - self._left_out_s)

    def leave_out(self, seconds: float) -> None:
        """So much of this turn says nothing of how quickly gradients are taken."""
        self._left_out_s += seconds

    def queued(self, num_frames: int) -> None:
        """A turn found so many frames waiting."""
        self._queue = max(self._queue, num_frames)

    def arrived(self, key: int, raw_bytes: int, *, times: int = 1) -> None:
        """A push of a shard came in, bytes as they were before a codec; -1 times: it goes on to another server."""
        self._raw_bytes += times * raw_bytes
        self._pushes[key] = self._pushes.get(key, 0) + times

    def admitted(self, *, staleness: int, offset_s: float, late: bool) -> None:
        """A push was let into a window.

        Args:
            staleness: versions between the gradient's parameters and the shard's.
            offset_s: seconds since that window opened, 0 for the push that opens it.
            late: it missed the window of its own step.
        """
        self._num_pushes += 1
        self._num_late += late
        self._staleness_sum += staleness
        if len(self._offsets_s) < _MOST_OFFSETS:
            self._offsets_s.append(offset_s)
        else:
            self._offsets_s[self._num_pushes % _MOST_OFFSETS] = offset_s

    def compared(self, cosine: float) -> None:
        """Two gradients of one window have this cosine."""
        self._agreement_sum += cosine
        self._num_compared += 1

    # --- what it makes of it -------------------------------------------------------------------------

    def report(self, version: int, keys: Iterable[int]) -> ServerLoad | None:
        """The load since the last report, once an interval of versions is full, else None.

        The first version that a server has is where its first interval begins; so does one that was without shards.

        Args:
            version: newest version of any of its shards, -1: it has none.
            keys: the shards that it holds.
        """
        if version < 0 or self._version < 0:
            if version != self._version:
                self._version = version
                self._clear()
            return None
        self._version = min(self._version, version)  # the newest shard may have left
        if version < self._version + self._interval_steps:
            return None
        held = sorted(keys)
        load = ServerLoad(
            server=self._server,
            version=version,
            seconds=self._clock() - self._began_s,
            busy_s=self._busy_s,
            cpu_s=self._cpu_clock() - self._cpu_began_s,
            raw_bytes=max(0, self._raw_bytes),
            keys=held,
            pushes=[max(0, self._pushes.get(key, 0)) for key in held],
            queue=self._queue,
            memory_bytes=self._memory(),
            num_pushes=self._num_pushes,
            num_late=self._num_late,
            offset_s=statistics.median(self._offsets_s) if self._offsets_s else 0.0,
            staleness=self._staleness_sum / max(1, self._num_pushes),
            agreement=self._agreement_sum / self._num_compared if self._num_compared else 1.0,
        )
        self._version = version
        self._clear()
        return load
