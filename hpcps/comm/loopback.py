"""The in-process channel: a hub joins the channels of one process, one a role and rank.

It is the channel of a world of one (no thread, no copy: whoever waits turns the server), and the test
bench of everything above: ranks are threads, and the hub can delay, drop, repeat and reorder frames.
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

import numpy as np

from hpcps.comm.channel import Array, Arrival, Channel, Control, Event, Notice, Slot, Ticket
from hpcps.comm.layout import Layout
from hpcps.comm.link import NO_USE, LinkUse
from hpcps.errors import ChannelError, DeadlineError

__all__ = ["Faults", "Hub", "LoopbackChannel"]


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
        self.published: dict[int, tuple[int, Array]] = {}
        self.groups: list[list[int]] = []
        self.turn_server: Callable[[], bool] | None = None
        self._rounds: dict[tuple[object, ...], _Round] = {}
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

    def meet(self, name: tuple[object, ...], members: Sequence[int], *, rank: int, share: _Share) -> None:
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
class _Share:
    """What one member brings to a collective."""

    buffer: Array
    combine: Callable[[list[Array]], None]
    finish: Callable[[], None]


@dataclass(slots=True)
class _Round:
    shares: dict[int, _Share] = field(default_factory=dict)


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


@dataclass(slots=True)
class _Ring:
    """A worker's slots on one server: what waits for a credit, and which slots are taken."""

    waiting: deque[tuple[bytes, Array, Ticket]] = field(default_factory=deque)
    taken: set[int] = field(default_factory=set)
    next_seq: int = 0
    use: LinkUse = NO_USE


class LoopbackChannel(Channel):
    """One end in a hub.

    Args:
        hub: the hub that joins the ends.
        rank: world rank.
        serves: True for the server's end; in a world of one rank 0 has one of each.
        deadline_s: longest wait.
    """

    def __init__(self, hub: Hub, rank: int, *, serves: bool, deadline_s: float = 60.0) -> None:
        super().__init__(rank, deadline_s=deadline_s)
        self._hub = hub
        self._serves = serves
        self._rings: dict[int, _Ring] = {}
        self._sequence: dict[object, itertools.count[int]] = {}
        self._refs: dict[tuple[int, int], Ticket] = {}
        self._generation = 0
        hub.ends["server" if serves else "worker", rank] = self

    @property
    def shares_memory(self) -> bool:
        """True in a world of one."""
        return self._hub.shared_memory

    def open(self, layout: Layout) -> None:
        self._hub.layout = layout
        self._rings = {server: _Ring() for server in range(len(layout.servers))}
        if not self._hub.groups:
            self._hub.groups = [list(layout.workers)]

    def close(self) -> None:
        self._hub.ends.pop(("server" if self._serves else "worker", self.rank), None)

    def abort(self, code: int) -> None:
        for end in list(self._hub.ends.values()):
            end._fail(ChannelError(f"cannot go on: rank {self.rank} ended the job with code {code}", rank=self.rank))

    def send(self, rank: int, data: bytes) -> None:
        end = self._hub.ends.get(("worker" if self._serves else "server", rank))
        self.counters.control_messages += 1
        if end is not None:
            end._deliver(Control(self.rank, data))

    def regroup(self, groups: Sequence[Sequence[int]]) -> None:
        ticket = Ticket()
        members = self._layout().workers

        def adopt(_: list[Array]) -> None:
            self._hub.groups = [list(group) for group in groups]

        share = _Share(np.empty(0), adopt, lambda: self._finish(ticket))
        self._hub.meet(("regroup", self._next("regroup")), members, rank=self.rank, share=share)
        self.wait(lambda: ticket.done, "the other workers to regroup")
        self._generation += 1

    def allreduce(self, buffer: Array, *, everyone: bool = False) -> Ticket:
        members = self._layout().workers if everyone else self._group()
        self.counters.reduced_bytes += buffer.nbytes

        def total(buffers: list[Array]) -> None:
            result = buffers[0].copy()
            for other in buffers[1:]:
                result += other
            for each in buffers:
                each[...] = result

        name = ("everyone",) if everyone else ("group", self._generation, tuple(members))
        return self._collective(name, members, buffer, total if len(members) > 1 else lambda _: None)

    def broadcast(self, buffer: Array, root: int) -> Ticket:
        members = self._layout().workers
        place = members.index(root)

        def spread(buffers: list[Array]) -> None:
            for each in buffers:
                if each is not buffers[place]:
                    each[...] = buffers[place]

        return self._collective(("everyone",), members, buffer, spread)

    def push(self, server: int, head: bytes, payload: Array) -> Ticket:
        ticket = Ticket()
        began_s = time.monotonic()
        body = payload if self._hub.shared_memory else payload.copy()
        num_bytes = len(head) + payload.nbytes
        with self._hub.lock:
            ring = self._rings[server]
            ring.waiting.append((head, body, ticket))
            frames, total_bytes, busy_s = ring.use
            ring.use = LinkUse(frames + 1, total_bytes + num_bytes, busy_s + time.monotonic() - began_s)
        self.counters.pushes += 1
        self.counters.pushed_bytes += num_bytes
        self._fill(server)
        return ticket

    def link_use(self, server: int) -> LinkUse:
        return self._rings[server].use

    def pull(self, key: int, version: int, out: Array) -> Ticket:
        ticket = Ticket()
        with self._hub.lock:
            newest, values = self._hub.published[key]
            if values.ctypes.data != out.ctypes.data:
                np.copyto(out, values)
        self.counters.pulls += 1
        self.counters.pulled_bytes += out.nbytes
        self._finish(ticket, newest)
        return ticket

    def release(self, slot: Slot) -> None:
        worker = self._hub.ends.get(("worker", slot.worker))
        if worker is not None:
            server = self._layout().servers.index(self.rank)
            self._hub.deliver(lambda: worker._credit(server, slot.seq))

    def publish(self, key: int, version: int, values: Array) -> Ticket:
        ticket = Ticket()
        with self._hub.lock:
            self._hub.published[key] = (version, values if self._hub.shared_memory else values.copy())
        self._finish(ticket)
        return ticket

    def notify(self, worker: int, notice: Notice) -> None:
        end = self._hub.ends.get(("worker", worker))
        if end is not None:
            self._hub.deliver(lambda: end._deliver(notice))

    def wait(self, until: Callable[[], bool], what: str, *, deadline_s: float | None = None) -> None:
        turn = self._hub.turn_server
        if turn is None or self._serves:
            super().wait(until, what, deadline_s=deadline_s)
            return
        end_s = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        while not until():
            if not turn() and time.monotonic() > end_s:
                raise DeadlineError(f"cannot go on: waited for {what}; the only process has nothing to do", op=what)

    def _fill(self, server: int) -> None:
        """Move waiting frames into free slots."""
        layout = self._layout()
        ring = self._rings[server]
        end = self._hub.ends.get(("server", layout.servers[server]))
        if end is None:  # a late ack: the server has left, so nothing waits any more
            return
        while True:
            with self._hub.lock:
                if not ring.waiting or len(ring.taken) >= layout.num_slots:
                    self.counters.credit_waits += bool(ring.waiting)
                    return
                head, body, ticket = ring.waiting.popleft()
                seq, ring.next_seq = ring.next_seq, ring.next_seq + 1
                ring.taken.add(seq)
                self._refs[server, seq] = ticket
            slot = Slot(self.rank, seq % layout.num_slots, seq)
            event: Event = Arrival(slot, head, body.view(np.uint8))
            self._hub.deliver(lambda event=event: end._deliver(event), repeatable=True)  # type: ignore[misc]
            if not self._hub.shared_memory:
                self._finish(ticket)

    def _credit(self, server: int, seq: int) -> None:
        """An ack has come; one for a frame that came twice is old news."""
        with self._hub.lock:
            ring = self._rings[server]
            if seq not in ring.taken:
                return
            ring.taken.discard(seq)
            ticket = self._refs.pop((server, seq))
        self._finish(ticket)
        self._fill(server)

    def _collective(
        self, name: tuple[object, ...], members: Sequence[int], buffer: Array, combine: Callable[[list[Array]], None]
    ) -> Ticket:
        ticket = Ticket()
        share = _Share(buffer, combine, lambda: self._finish(ticket))
        self._hub.meet((*name, self._next(name)), members, rank=self.rank, share=share)
        return ticket

    def _next(self, name: object) -> int:
        return next(self._sequence.setdefault(name, itertools.count()))

    def _group(self) -> list[int]:
        return next(group for group in self._hub.groups if self.rank in group)

    def _layout(self) -> Layout:
        if self._hub.layout is None:
            raise ChannelError("cannot use the channel: it is not open; call open first", rank=self.rank)
        return self._hub.layout
