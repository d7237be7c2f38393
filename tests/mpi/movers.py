"""Ranks that play with moving shards: servers that publish and give shards away, a mover, readers that check.

Every number of a shard says which shard and version it is of, so that a reader sees what it was given.
"""

from __future__ import annotations

import random
import struct
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from mpi_ranks import DEADLINE_S

from hpcps.comm.channel import Array, Channel, Control, Notice, Parcel, Ticket
from hpcps.comm.layout import Layout

ELEMS = (20_000, 20_001, 1, 777, 5_000)
NUM_ROOMS = 6
"""Of all servers together: one more than shards, so that what moves takes the room that was left last."""
NUM_MOVES = 60
LATE_S = 0.02
"""A worker hears of a route later than it came by up to this."""
WORDS = struct.Struct("<4q")
MOVE, MOVED, ROUTE, STOP, BYE = range(5)


def message(kind: int, *numbers: int) -> bytes:
    return WORDS.pack(kind, *numbers, *(0,) * (3 - len(numbers)))


def content(key: int, version: int, out: Array) -> Array:
    """Every number says which shard and version it is of, and where it stands."""
    out[:] = np.arange(out.size) % 5 + 10 * version + 1e9 * key
    return out


def all_done(channel: Channel, tickets: list[Ticket], what: str) -> None:
    channel.wait(lambda: all(ticket.done for ticket in tickets), what)


# --- a server that gives shards away and takes them in -----------------------------------------------------


@dataclass
class Shard:
    values: Array
    version: int
    publication: Ticket


@dataclass
class Server:
    """Publishes what it holds without pause; the first one orders moves."""

    channel: Channel
    layout: Layout
    index: int
    shards: dict[int, Shard] = field(default_factory=dict)
    leaving: list[tuple[int, int, int, Shard, Ticket]] = field(default_factory=list)
    num_byes: int = 0
    num_parcels: int = 0
    mover: Mover | None = None

    def run(self) -> int:
        """Until every worker has said goodbye; returns the number of parcels that came."""
        for key in self.layout.server_keys(self.index):
            self.adopt(key, 0)
        self.mover = Mover(self) if self.index == 0 else None
        end_s = time.monotonic() + DEADLINE_S
        while self.num_byes < len(self.layout.workers):
            assert time.monotonic() < end_s, "a rank does not come to its end"
            for event in self.channel.take():
                if isinstance(event, Parcel):
                    self.on_parcel(event)
                elif isinstance(event, Control):
                    kind, *numbers = WORDS.unpack(event.data)
                    self.on_control(kind, numbers)
            for key, shard in self.shards.items():
                if shard.publication.done:
                    self.publish(key, shard, shard.version + 1)
            self.send_parcels()
            if self.mover is not None:
                self.mover.order_moves()
            self.channel.wait_events(0.0005)
        return self.num_parcels

    def adopt(self, key: int, version: int) -> None:
        shard = Shard(np.empty(ELEMS[key]), version, Ticket())
        self.shards[key] = shard
        self.publish(key, shard, version)

    def publish(self, key: int, shard: Shard, version: int) -> None:
        shard.version = version
        shard.publication = self.channel.publish(key, version, content(key, version, shard.values))
        for worker in self.layout.workers:
            self.channel.notify(worker, Notice(key, version, 2 * version))

    def on_control(self, kind: int, numbers: list[int]) -> None:
        if kind == BYE:
            self.num_byes += 1
        elif kind == MOVE:
            self.give_away(*numbers)
        else:
            assert kind == MOVED and self.mover is not None
            self.mover.on_moved(*numbers)

    def give_away(self, key: int, target: int, room: int) -> None:
        shard = self.shards.pop(key)
        self.leaving.append((key, target, room, shard, self.channel.retire(key)))

    def send_parcels(self) -> None:
        """What readers can find here no longer may be published elsewhere."""
        while self.leaving and self.leaving[0][4].done:
            key, target, room, shard, _ = self.leaving.pop(0)
            self.channel.parcel(target, WORDS.pack(key, shard.version, room, 0), shard.values)

    def on_parcel(self, parcel: Parcel) -> None:
        key, version, room, _ = WORDS.unpack(parcel.head)
        assert (parcel.body.view(np.float64) == content(key, version, np.empty(ELEMS[key]))).all()
        self.num_parcels += 1
        self.channel.host(key, room)
        self.adopt(key, version)
        if self.mover is not None:
            self.mover.on_moved(key, self.index, room)
        else:
            self.channel.send(self.layout.servers[0], message(MOVED, key, self.index, room))


class Mover:
    """Knows where every shard is, and moves one after the other to any free room."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rng = random.Random(5)
        self.places = {
            key: (shard.server, key // len(server.layout.servers)) for key, shard in enumerate(server.layout.shards)
        }
        self.moving: dict[int, tuple[int, int]] = {}
        """Where the shards that are on their way were: no room for others yet."""
        self.num_moves = 0
        self.stopped = False

    def order_moves(self) -> None:
        layout = self.server.layout
        while not self.moving and self.num_moves < NUM_MOVES:
            key = self.rng.choice([key for key in self.places if key not in self.moving])
            source, _ = self.places[key]
            free = [
                (server, room)
                for server in range(len(layout.servers))
                for room in range(layout.num_rooms[server])
                if server != source and (server, room) not in {*self.places.values(), *self.moving.values()}
            ]
            if not free:
                continue
            target, room = self.rng.choice(free)
            self.moving[key] = self.places[key]
            self.places[key] = target, room
            self.num_moves += 1
            if source == 0:
                self.server.give_away(key, target, room)
            else:
                self.server.channel.send(layout.servers[source], message(MOVE, key, target, room))
        if self.num_moves == NUM_MOVES and not self.moving and not self.stopped:
            self.stopped = True
            for worker in layout.workers:
                self.server.channel.send(worker, message(STOP))

    def on_moved(self, key: int, server: int, room: int) -> None:
        assert self.places[key] == (server, room)
        del self.moving[key]
        for worker in self.server.layout.workers:
            self.server.channel.send(worker, message(ROUTE, key, server, room))


# --- a worker that reads without pause --------------------------------------------------------------------


@dataclass
class Reader:
    """Reads all shards over and over, one read of each at a time, and checks what it gets."""

    channel: Channel
    layout: Layout
    newest: list[int] = field(default_factory=lambda: [-1] * len(ELEMS))
    """Versions that were noticed."""
    before: list[int] = field(default_factory=lambda: [-1] * len(ELEMS))
    """Versions that were read."""
    reads: dict[int, tuple[int, Array, Ticket]] = field(default_factory=dict)
    routes: deque[tuple[float, list[int]]] = field(default_factory=deque)
    """New places of shards, and when this worker hears of them."""
    stopped: bool = False
    num_reads: int = 0

    def run(self) -> int:
        """Until nothing moves any more; returns the number of reads."""
        end, rng = 2 * len(ELEMS), random.Random(self.channel.rank)
        end_s = time.monotonic() + DEADLINE_S
        while not self.stopped or self.reads or end:
            assert time.monotonic() < end_s, f"reads of {sorted(self.reads)} do not come to their end"
            self.take(rng)
            while self.routes and self.routes[0][0] <= time.monotonic():
                self.channel.reroute(*self.routes.popleft()[1])
            for key in range(len(ELEMS)):
                if key in self.reads:
                    self.look(key)
                elif self.newest[key] >= 0 and (not self.stopped or end):
                    end -= self.stopped
                    out = np.full(ELEMS[key], -1.0)
                    known = max(self.newest[key], self.before[key])
                    self.reads[key] = known, out, self.channel.pull(key, known, out)
            self.channel.wait_events(0.0002)
        for server in self.layout.servers:
            self.channel.send(server, message(BYE))
        return self.num_reads

    def take(self, rng: random.Random) -> None:
        for event in self.channel.take():
            if isinstance(event, Notice):
                assert event.clock == 2 * event.version
                self.newest[event.key] = max(self.newest[event.key], event.version)
            elif isinstance(event, Control):
                kind, *numbers = WORDS.unpack(event.data)
                if kind == ROUTE:
                    self.routes.append((time.monotonic() + rng.uniform(0, LATE_S), numbers))
                else:
                    assert kind == STOP
                    self.stopped = True

    def look(self, key: int) -> None:
        promised, out, ticket = self.reads[key]
        if not ticket.done:
            return
        del self.reads[key]
        self.num_reads += 1
        right = content(key, ticket.result, np.empty(ELEMS[key]))
        assert (out == right).all(), f"shard {key}, version {ticket.result}: got {np.unique(out)[:8]}"
        assert ticket.result >= promised, f"shard {key} went back from version {promised} to {ticket.result}"
        self.before[key] = ticket.result
