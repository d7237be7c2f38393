"""The in-process channel: a hub joins the channels of one process, one a role and rank.

It is the channel of a world of one (no thread, no copy: whoever waits turns the server), and the test
bench of everything above: ranks are threads, and the hub can delay, drop, repeat and reorder frames.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcps.comm.channel import Array, Arrival, Channel, Control, Event, Notice, Parcel, Slot, Ticket
from hpcps.comm.hub import Faults, Hub, Share
from hpcps.comm.layout import Layout
from hpcps.comm.link import NO_USE, LinkUse
from hpcps.comm.rooms import Rooms
from hpcps.errors import ChannelError, DeadlineError

__all__ = ["Faults", "Hub", "LoopbackChannel"]


@dataclass(slots=True)
class _Ring:
    """A worker's slots on one server: what waits for a credit, and which slots are taken."""

    waiting: deque[tuple[bytes, Array, Ticket]] = field(default_factory=deque)
    taken: set[int] = field(default_factory=set)
    next_seq: int = 0
    use: LinkUse = NO_USE


@dataclass(frozen=True, slots=True)
class _Read:
    """A pull."""

    key: int
    version: int
    out: Array
    ticket: Ticket


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
        self._rooms: Rooms | None = None
        self._index = -1
        self._places: list[tuple[int, int]] = []
        """On a worker: server and room of each shard, as far as it knows."""
        self._parked: dict[int, list[_Read]] = {}
        """Reads of shards that had left."""
        hub.ends["server" if serves else "worker", rank] = self

    @property
    def shares_memory(self) -> bool:
        """True in a world of one."""
        return self._hub.shared_memory

    def open(self, layout: Layout) -> Layout:
        self._hub.layout = layout
        self._rings = {server: _Ring() for server in range(len(layout.servers))}
        if not self._hub.groups:
            self._hub.groups = [list(layout.workers)]
        self._places = [(shard.server, shard.room) for shard in layout.shards]
        if self._serves:
            self._rooms = Rooms(self.rank, layout)
            self._index = layout.servers.index(self.rank)
        return layout

    def close(self) -> None:
        self._hub.ends.pop(("server" if self._serves else "worker", self.rank), None)

    def abort(self, code: int) -> None:
        for end in list(self._hub.ends.values()):
            end._fail(ChannelError(f"cannot go on: rank {self.rank} ended the job with code {code}", rank=self.rank))

    def send(self, rank: int, data: bytes) -> None:
        ends = self._hub.ends
        end = ends.get(("worker" if self._serves else "server", rank))
        if self._serves and end is None and rank != self.rank:
            end = ends.get(("server", rank))
        self.counters.control_messages += 1
        if end is not None:
            end._deliver(Control(self.rank, data))

    def regroup(self, groups: Sequence[Sequence[int]]) -> None:
        ticket = Ticket()
        members = self._layout().workers

        def adopt(_: list[Array]) -> None:
            self._hub.groups = [list(group) for group in groups]

        share = Share(np.empty(0), adopt, lambda: self._finish(ticket))
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

    def pull_use(self, server: int) -> LinkUse:
        return NO_USE

    def pull(self, key: int, version: int, out: Array) -> Ticket:
        read = _Read(key, version, out, Ticket())
        self.counters.pulls += 1
        self.counters.pulled_bytes += out.nbytes
        self._read(read)
        return read.ticket

    def reroute(self, key: int, server: int, room: int) -> None:
        with self._hub.lock:
            self._places[key] = (server, room)
            parked = self._parked.pop(key, [])
        for read in parked:
            self._read(read)

    def release(self, slot: Slot) -> None:
        worker = self._hub.ends.get(("worker", slot.worker))
        if worker is not None:
            server = self._layout().servers.index(self.rank)
            self._hub.deliver(lambda: worker._credit(server, slot.seq))

    def publish(self, key: int, version: int, values: Array) -> Ticket:
        ticket = Ticket()
        room = self._held().find(key, "publish")
        with self._hub.lock:
            kept = values if self._hub.shared_memory else values.copy()
            self._hub.rooms[self._index, room] = (key, version, kept)
        self._finish(ticket)
        return ticket

    def retire(self, key: int) -> Ticket:
        ticket = Ticket()
        room = self._held().leave(key)
        with self._hub.lock:
            self._hub.rooms.pop((self._index, room), None)
        self._hub.deliver(lambda: self._finish(ticket))
        return ticket

    def host(self, key: int, room: int) -> None:
        self._held().enter(key, room)

    def parcel(self, server: int, head: bytes, body: Array) -> Ticket:
        ticket = Ticket()
        rank = self._layout().servers[server]
        self.counters.parcels += 1
        self.counters.parcel_bytes += len(head) + body.nbytes

        def arrive() -> None:
            end = self._hub.ends.get(("server", rank))
            if end is not None:
                end._deliver(Parcel(self.rank, head, body.reshape(-1).view(np.uint8).copy()))
            self._finish(ticket)

        self._hub.deliver_in_order(self.rank, rank, arrive)
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

    def _read(self, read: _Read) -> None:
        """Read what lies at the place that this worker knows; park the read where that is another shard or none."""
        with self._hub.lock:
            found = self._hub.rooms.get(self._places[read.key])
            if found is None or found[0] != read.key:
                self._parked.setdefault(read.key, []).append(read)
                return
            _, newest, values = found
            if newest < read.version:
                raise ChannelError(
                    f"cannot read shard {read.key} at rank {self.rank}: found version {newest}, need {read.version}"
                    " that was noticed; run the same hpcps on every rank",
                    rank=self.rank,
                )
            if values.ctypes.data != read.out.ctypes.data:
                np.copyto(read.out, values)
        self._finish(read.ticket, newest)

    def _held(self) -> Rooms:
        if self._rooms is None:
            raise ChannelError("cannot use rooms: this end does not serve, or is not open", rank=self.rank)
        return self._rooms

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
        share = Share(buffer, combine, lambda: self._finish(ticket))
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
