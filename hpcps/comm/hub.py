"""Joins the in-process channels: what one end hands to another goes through the hub, at once or as the faults have it.

A dropped frame or ack is sent again later, as a reliable transport over a lossy link does, so the far
side may see a frame late, out of order or twice; it never sees a torn one.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcps.comm.channel import Array
from hpcps.comm.layout import Layout

if TYPE_CHECKING:
    from hpcps.comm.loopback import LoopbackChannel

__all__ = ["Faults", "Hub", "Share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What the hub does to frames, acks and notices.

    Args:
        seed: of the hub's random numbers.
        delay_s: longest random delay.
        drop_frac: part of the deliveries that are lost and sent again, 0 to below 1.
        repeat_frac: part of the frames that arrive twice, as after a lost ack, 0 to 1.
    """

    seed: int
    delay_s: float = 0.0
    drop_frac: float = 0.0
    repeat_frac: float = 0.0


class Hub:
    """Joins the channels of one process.

    Args:
        faults: what to do to the traffic; none by default.
        shared_memory: hand arrays over by reference (a world of one); else copy as a network does.
    """

    def __init__(self, *, faults: Faults | None = None, shared_memory: bool = False) -> None:
        self.lock = threading.RLock()
        self.faults = faults
        self.shared_memory = shared_memory
        self.ends: dict[tuple[str, int], LoopbackChannel] = {}
        self.layout: Layout | None = None
        self.rooms: dict[tuple[int, int], tuple[int, int, Array]] = {}
        """What lies in a room of a server (an index): key, version and values. A free room has no entry."""
        self.groups: list[list[int]] = []
        self.turn_server: Callable[[], bool] | None = None
        self._rounds: dict[tuple[object, ...], _Round] = {}
        self._pipes: dict[tuple[int, int], deque[Callable[[], None]]] = {}
        self._line = _DelayLine(random.Random(faults.seed)) if faults else None

    def deliver(self, action: Callable[[], None], *, repeatable: bool = False) -> None:
        """Run an action at the far side: now, or as the faults have it."""
        if self.faults is None or self._line is None:
            action()
            return
        rng = self._line.rng
        with self.lock:
            delay_s = rng.uniform(0, self.faults.delay_s)
            while rng.random() < self.faults.drop_frac:
                delay_s += rng.uniform(0, 2 * self.faults.delay_s)
            again = repeatable and rng.random() < self.faults.repeat_frac
            again_s = delay_s + rng.uniform(0, 2 * self.faults.delay_s)
        self._line.at(delay_s, action)
        if again:
            self._line.at(again_s, action)

    def deliver_in_order(self, source: int, target: int, action: Callable[[], None]) -> None:
        """The same for what never overtakes its like of the same pair of ranks and never comes twice."""
        with self.lock:
            pipe = self._pipes.setdefault((source, target), deque())
            pipe.append(action)

        def run_next() -> None:
            with self.lock:
                pipe.popleft()()

        self.deliver(run_next)

    def meet(self, name: tuple[object, ...], members: Sequence[int], *, rank: int, share: Share) -> None:
        """Join a collective; the last member to come completes it for all."""
        with self.lock:
            round_ = self._rounds.setdefault(name, _Round())
            round_.shares[rank] = share
            if len(round_.shares) < len(members):
                return
            del self._rounds[name]
        buffers = [round_.shares[member].buffer for member in sorted(members)]
        round_.shares[rank].combine(buffers)
        for each in round_.shares.values():
            each.finish()

    def stop(self) -> None:
        """End the delay line's thread."""
        if self._line is not None:
            self._line.stop()


@dataclass(slots=True)
class Share:
    """What one member brings to a collective."""

    buffer: Array
    combine: Callable[[list[Array]], None]
    finish: Callable[[], None]


@dataclass(slots=True)
class _Round:
    shares: dict[int, Share] = field(default_factory=dict)


class _DelayLine:
    """A thread that runs actions when they are due."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False
        threading.Thread(target=self._run, name="hpcps-delay", daemon=True).start()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), action))
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._stopped:
                    return
                action = heapq.heappop(self._due)[2]
            action()
