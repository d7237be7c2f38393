"""What the two data planes of the MPI channel have in common: their interface. Communication thread only,
but for ``release``, ``publish``, ``notify``, ``retire``, ``host`` and ``reroute``: the main thread calls these. What
leaves the rank goes by way of an outbox that is emptied in order.
"""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Bytes, Notice, Slot, Ticket
from hpcps.comm.layout import Layout
from hpcps.comm.link import NO_USE, LinkUse, Reads, Throttle
from hpcps.comm.rooms import Rooms
from hpcps.errors import ChannelError

if TYPE_CHECKING:
    from hpcps.comm.mpi import MpiChannel

__all__ = ["Outgoing", "Place", "Plane", "Posting", "Publication", "Retirement"]


@dataclass(frozen=True, slots=True)
class Publication:
    """A version of a shard to be published in a room."""

    key: int
    room: int
    version: int
    values: Bytes
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Retirement:
    """A shard leaves its room."""

    key: int
    room: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Posting:
    """A notice for a worker (a world rank)."""

    worker: int
    notice: Notice


Outgoing: TypeAlias = Slot | Publication | Posting | Retirement
"""A slot stands for its ack."""


@dataclass(slots=True, eq=False)
class Place:
    """Where a worker looks for a shard; each route makes a new one, also of the same room."""

    server: int
    room: int
    stay: int = -1
    """Number of the shard's stay there, as it was last read; -1: not yet."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame that is to be pushed."""

    head: bytes
    payload: Bytes
    ticket: Ticket

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.payload.size


@dataclass(slots=True)
class _Line:
    """Pushes to one server, in order; one operation moves all of them."""

    in_slots: list[int]
    """The last push put into each slot, 0 before the first."""
    waiting: deque[_Frame] = field(default_factory=deque)
    sending: list[tuple[Callable[[], bool], Ticket]] = field(default_factory=list)
    """At most one a slot: what tells that the payload is free again."""
    num_sent: int = 0
    num_counted: int = 0
    """Frames at the head of the line that are counted as having waited."""
    moving: bool = False
    """An operation moves this line."""
    use: LinkUse = NO_USE
    """Replaced as a whole: another thread reads it."""
    over_s: float | None = None
    """When the frame at the head would be over an emulated link."""
    busy_since_s: float = 0.0


class Plane(abc.ABC):
    """Frames up, parameters down.

    Args:
        channel: the channel that this plane serves.
    """

    frame_extra_bytes: int
    """Bytes that a push puts besides head and payload."""

    def __init__(self, channel: MpiChannel) -> None:
        self.outbox: deque[Outgoing] = deque()
        self._channel = channel
        self._lines: dict[int, _Line] = {}
        self._reads: dict[int, Reads] = {}
        self._rooms: Rooms | None = None
        """On a server; the main thread's."""
        self._places: list[Place] = []
        """On a worker: of each shard. The main thread replaces whole entries."""
        self._up = Throttle(channel.link_bytes_per_s)
        self._down = Throttle(channel.link_bytes_per_s)

    def problem(self, layout: Layout) -> str:
        """Why this plane cannot be opened at this rank; empty if it can."""
        return ""

    @abc.abstractmethod
    def open(self, layout: Layout, ticket: Ticket) -> Operation:
        """Collective set-up."""

    @abc.abstractmethod
    def close(self) -> Operation:
        """Collective end; no operation is under way."""

    @abc.abstractmethod
    def look(self) -> bool:
        """Take in and give out; True if there was anything."""

    @abc.abstractmethod
    def empty_outbox(self) -> bool:
        """Give out what the main thread put into the outbox; True if there was anything."""

    @abc.abstractmethod
    def acked(self, server: int, slot: int) -> int:
        """The last push into a slot that the server gave back; 0 before the first."""

    @abc.abstractmethod
    def send(self, server: int, slot: Slot, head: bytes, payload: Bytes) -> Callable[[], bool]:
        """Start a push into a free slot. Returns what tells that the payload is free again."""

    def push(self, server: int, head: bytes, payload: Bytes, ticket: Ticket) -> Operation:
        """Put a frame into a slot on a server that is free, after the frames that wait for one there."""
        line = self._lines[server]
        line.waiting.append(_Frame(head, payload, ticket))
        progressed = self._move(server, line)
        if line.moving:
            return
        line.moving = True
        while line.waiting or line.sending:
            yield progressed
            progressed = self._move(server, line)
        line.moving = False

    @abc.abstractmethod
    def read(self, key: int, place: Place, version: int, out: Bytes) -> Generator[bool, None, int]:
        """Read a shard of at least a version. Returns: the version read; -1: the shard is not there."""

    def pull(self, key: int, version: int, out: Bytes, ticket: Ticket) -> Operation:
        """Read a published shard of at least a version, as soon as this worker knows where it is."""
        got = -1
        while got < 0:
            place = self._places[key]
            reads = self._reads[place.server]
            reads.begin(now_s=time.monotonic())
            got = yield from self.read(key, place, version, out)
            if got >= 0:
                yield from self._arriving(out.size)
            reads.end(out.size if got >= 0 else 0, now_s=time.monotonic())
            while got < 0 and self._places[key] is place:
                yield False
        self._channel.finish(ticket, got)

    def reroute(self, key: int, server: int, room: int) -> None:
        """Pulls of a shard go there."""
        self._places[key] = Place(server, room)

    def release(self, slot: Slot) -> None:
        """Queue an ack."""
        self.outbox.append(slot)

    def publish(self, key: int, version: int, values: Bytes, ticket: Ticket) -> None:
        """Queue a publication."""
        self.outbox.append(Publication(key, self._held().find(key, "publish"), version, values, ticket))

    def retire(self, key: int, ticket: Ticket) -> None:
        """Queue the end of a shard's stay."""
        self.outbox.append(Retirement(key, self._held().leave(key), ticket))

    def host(self, key: int, room: int) -> None:
        """What is queued of a shard from now on goes to this room."""
        self._held().enter(key, room)

    def notify(self, worker: int, notice: Notice) -> None:
        """Queue a notice."""
        self.outbox.append(Posting(worker, notice))

    def link_use(self, server: int) -> LinkUse:
        """What was pushed to a server so far (any thread)."""
        return self._lines[server].use

    def pull_use(self, server: int) -> LinkUse:
        """What was pulled from a server so far (any thread)."""
        return self._reads[server].use

    def _arriving(self, num_bytes: int) -> Operation:
        """Wait as long as an emulated link takes for what was read."""
        over_s = self._down.reserve(num_bytes, now_s=time.monotonic())
        while time.monotonic() < over_s:
            yield False

    def _open_lines(self, layout: Layout) -> None:
        """Set up what both planes keep of pushes, rooms and routes."""
        self._lines = {server: _Line([0] * layout.num_slots) for server in range(len(layout.servers))}
        self._reads = {server: Reads() for server in range(len(layout.servers))}
        self._places = [Place(shard.server, shard.room, 0) for shard in layout.shards]
        if self._channel.rank in layout.servers:
            self._rooms = Rooms(self._channel.rank, layout)

    def _held(self) -> Rooms:
        if self._rooms is None:
            rank = self._channel.rank
            raise ChannelError(f"cannot use rooms at rank {rank}: it does not serve, or is not open", rank=rank)
        return self._rooms

    def _move(self, server: int, line: _Line) -> bool:
        """Send as many frames as there are credits; True if anything moved."""
        progressed = False
        while line.waiting and (index := self._free_slot(server, line)) >= 0:
            frame = line.waiting[0]
            if not self._may_leave(line, frame):
                break
            line.waiting.popleft()
            line.num_counted = max(0, line.num_counted - 1)
            line.num_sent += 1
            line.in_slots[index] = line.num_sent
            slot = Slot(self._channel.rank, index, line.num_sent)
            line.sending.append((self.send(server, slot, frame.head, frame.payload), frame.ticket))
            self._count(line, frame)
            progressed = True
        self._channel.counters.credit_waits += len(line.waiting) - line.num_counted
        line.num_counted = len(line.waiting)
        remaining = []
        for is_free, ticket in line.sending:
            if is_free():
                self._channel.finish(ticket)
                progressed = True
            else:
                remaining.append((is_free, ticket))
        line.sending = remaining
        if line.busy_since_s and not remaining and line.over_s is None:
            line.use = line.use._replace(busy_s=line.use.busy_s + time.monotonic() - line.busy_since_s)
            line.busy_since_s = 0.0
        return progressed

    def _may_leave(self, line: _Line, frame: _Frame) -> bool:
        """True once the frame at the head would be over; an emulated link takes its time before the frame is put."""
        now_s = time.monotonic()
        if line.over_s is None:
            line.over_s = self._up.reserve(frame.num_bytes, now_s=now_s)
            line.busy_since_s = line.busy_since_s or now_s
        return now_s >= line.over_s

    def _count(self, line: _Line, frame: _Frame) -> None:
        line.over_s = None
        num_bytes = frame.num_bytes + self.frame_extra_bytes
        line.use = line.use._replace(num_frames=line.use.num_frames + 1, num_bytes=line.use.num_bytes + num_bytes)
        self._channel.counters.pushes += 1
        self._channel.counters.pushed_bytes += num_bytes

    def _free_slot(self, server: int, line: _Line) -> int:
        """A slot whose last push the server gave back; -1 for none. Any will do: slots come back in any order."""
        for slot, seq in enumerate(line.in_slots):
            if self.acked(server, slot) >= seq:
                return slot
        return -1
