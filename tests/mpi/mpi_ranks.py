"""This rank among all the ranks of a test: how they agree, and how they use a channel together.

A rank's MPI belongs to its channel's thread while the channel lives, so a test that uses one runs as a body between
opening and closing, keeps what went wrong, and the ranks agree on it afterwards, on a communicator of their own.
"""

from __future__ import annotations

import faulthandler
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from mpi4py import MPI

from hpcps.comm.channel import Channel, Event, Ticket
from hpcps.comm.layout import Layout, ShardRoom
from hpcps.comm.start import open_channel
from hpcps.comm.world import World, open_world
from hpcps.config import CommConfig
from hpcps.plan import Roles

T = TypeVar("T")
E = TypeVar("E")

DEADLINE_S = 20.0  # of a wait inside a test, well below the test's own limit


class Ranks:
    """All ranks of the run, for one test."""

    def __init__(self, comm: MPI.Intracomm, uncaptured: Callable[[], AbstractContextManager[None]]) -> None:
        self.comm = comm
        self._uncaptured = uncaptured
        self.rank = comm.rank
        self.size = comm.size

    def agree(self, problem: str = "") -> None:
        """Fail on all ranks together if one of them has a problem. Collective; no channel may be open."""
        found = [(rank, text) for rank, text in enumerate(self.comm.allgather(problem)) if text]
        if found:
            raise AssertionError("".join(f"\n[rank {rank}] {text}" for rank, text in found))

    def gather(self, value: T) -> list[T]:
        """Everyone's value, in rank order. Collective; no channel may be open."""
        return list(self.comm.allgather(value))

    def check(self, body: Callable[[], T]) -> T:
        """Run assertions on every rank and agree on their outcome."""
        value, problem = _attempt(body)
        self.agree(problem)
        return value  # type: ignore[return-value]

    def roles(self, num_servers: int) -> Roles:
        """The first ranks serve."""
        return Roles(servers=tuple(range(num_servers)), workers=tuple(range(num_servers, self.size)))

    def layout(
        self,
        num_servers: int,
        shard_bytes: list[int],
        *,
        num_slots: int = 2,
        num_buffers: int = 3,
        num_rooms: int | None = None,
    ) -> Layout:
        """Shards dealt to the servers in turn; every frame may have 192 bytes of head.

        Every server has so many rooms, by default those that its shards need.
        """
        roles = self.roles(num_servers)
        return Layout(
            servers=roles.servers,
            workers=roles.workers,
            shards=tuple(
                ShardRoom(server=key % num_servers, num_bytes=size, head_bytes=192, room=key // num_servers)
                for key, size in enumerate(shard_bytes)
            ),
            num_slots=num_slots,
            num_buffers=num_buffers,
            num_rooms=tuple(
                len(range(server, len(shard_bytes), num_servers)) if num_rooms is None else num_rooms
                for server in range(num_servers)
            ),
        )

    def play(self, plane: str, layout: Layout, body: Callable[[Channel], T]) -> T:
        """Open a channel, run the body on it, close it, agree. Returns what the body returned.

        A rank that waits for one that failed comes to the end by its deadline; ``close`` waits for it.
        """
        world = open_world(versions="test")
        channel = open_channel(world, layout.workers, CommConfig(mode=plane, deadline_s=DEADLINE_S))

        def opened() -> T:
            channel.open(layout)
            return body(channel)

        value, problem = _attempt(opened)
        try:
            channel.close()
        except Exception:  # the ranks cannot meet again: say why, here and now, and end all of them
            self._end_all(f"{problem}\nthe channel does not close: {traceback.format_exc()}")
        self.agree(problem)
        return value  # type: ignore[return-value]

    def _end_all(self, text: str) -> None:
        """Print a text and every stack past pytest's capture, then end all ranks."""
        with self._uncaptured():
            sys.stderr.write(f"\n[rank {self.rank}] {text}\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(file=2)
        MPI.COMM_WORLD.Abort(1)


def free_world(world: World) -> None:
    """Give back the communicators of a world that got no channel."""
    world.control.Free()
    world.data.Free()


class StandIn:
    """What a plane needs of the channel to stand alone."""

    rank = 0
    link_bytes_per_s = 0.0

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.world = World(rank=0, size=1, control=comm, data=comm, ranks=(), library="")

    def barrier(self) -> tuple[()]:
        return ()

    def finish(self, ticket: Ticket, result: int = 0) -> None:
        ticket.done = True


class Inbox:
    """Takes events off a channel by kind, in their order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: deque[Event] = deque()

    def take(self, kind: type[E], what: str) -> E:
        """The next event of a kind; waits for it."""
        while True:
            for event in self._kept:
                if isinstance(event, kind):
                    self._kept.remove(event)
                    return event
            self._channel.wait(lambda: self._channel.has_events, what)
            self.look()

    def all(self, kind: type[E]) -> list[E]:
        """All events of a kind that have come."""
        self.look()
        found = [event for event in self._kept if isinstance(event, kind)]
        self._kept = deque(event for event in self._kept if not isinstance(event, kind))
        return found

    def look(self) -> None:
        """Take in what has come, without waiting."""
        self._kept.extend(self._channel.take())


def _attempt(body: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return body(), ""
    except Exception:
        return None, traceback.format_exc()
