"""A plane of one rank that stands alone: the order of what it does, what it refuses, and that it takes turns."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from mpi_ranks import Ranks, StandIn

from hpcps.comm.channel import Notice, Ticket
from hpcps.comm.layout import Layout, ShardRoom
from hpcps.comm.p2p import P2pPlane
from hpcps.comm.rma import RmaPlane
from hpcps.errors import ProtocolError

ONE_SHARD = Layout(
    servers=(0,),
    workers=(0,),
    shards=(ShardRoom(server=0, num_bytes=64, head_bytes=64),),
    num_slots=2,
    num_buffers=2,
    num_rooms=(1,),
)


class RecordingWindow:
    """A window that keeps the order of what is done to it, beside the number of tickets that were done by then."""

    def __init__(self, window: MPI.Win, tickets: list[Ticket]) -> None:
        self._window = window
        self._tickets = tickets
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> object:
            self.calls.append((name, sum(ticket.done for ticket in self._tickets)))
            return getattr(self._window, name)(*arguments)

        return call


@pytest.mark.mpi
def test_shard_has_left_when_its_notices_have_and_its_room_says_so(ranks: Ranks) -> None:
    comm = MPI.COMM_SELF.Dup()
    plane = RmaPlane(StandIn(comm))  # type: ignore[arg-type]
    list(plane.open(ONE_SHARD, Ticket()))
    published, left = Ticket(), Ticket()
    window, plane._window = plane._window, RecordingWindow(plane._window, [published, left])
    plane.publish(0, 0, np.zeros(64, np.uint8), published)
    plane.notify(0, Notice(0, 0, 1))
    plane.retire(0, left)
    plane.empty_outbox()
    calls, plane._window = plane._window.calls, window
    list(plane.close())
    comm.Free()

    def check() -> None:
        assert [call for call in calls if call[0] != "Sync"] == [
            ("Accumulate", 0),  # the room names the shard
            ("Flush", 0),
            ("Put", 1),  # the notice
            ("Flush", 1),
            ("Accumulate", 1),  # the room names no shard
            ("Flush", 1),
        ]
        assert left.done

    ranks.check(check)


@pytest.mark.mpi
def test_windows_refuse_what_their_words_cannot_say(ranks: Ranks) -> None:
    comm = MPI.COMM_SELF.Dup()
    plane = RmaPlane(StandIn(comm))  # type: ignore[arg-type]
    many = plane.problem(SimpleNamespace(shards=range(2**20)))  # type: ignore[arg-type]
    rooms = (ShardRoom(server=0, num_bytes=64, head_bytes=64),)
    list(
        plane.open(
            Layout(servers=(0,), workers=(0,), shards=rooms, num_slots=2, num_buffers=2, num_rooms=(1,)), Ticket()
        )
    )
    for version in (3, 4, 4, 6):
        plane.publish(0, version, np.zeros(64, np.uint8), Ticket())
    said = ""
    try:
        plane.empty_outbox()
    except ProtocolError as error:
        said = str(error)
    list(plane.close())
    comm.Free()

    def check() -> None:
        assert many == "1048576 shards, the words of a window name 1048575; raise comm.shard_bytes"
        assert said.startswith("cannot publish version 6 of shard 0: its last was 4, need the next; retire and host")

    ranks.check(check)


@pytest.mark.mpi
@pytest.mark.parametrize("make", [RmaPlane, P2pPlane])
def test_server_that_never_rests_gets_its_turns(ranks: Ranks, make: Callable[[Any], RmaPlane | P2pPlane]) -> None:
    """Whoever publishes again as soon as it may would else keep the communication thread from all other work."""

    class Restless(StandIn):
        num_publications = 0

        def finish(self, ticket: Ticket, result: int = 0) -> None:
            self.num_publications += 1
            if self.num_publications < 100:
                plane.publish(0, self.num_publications, np.zeros(64, np.uint8), Ticket())

    comm = MPI.COMM_SELF.Dup()
    channel = Restless(comm)
    plane = make(channel)
    steps = plane.open(ONE_SHARD, Ticket())
    channel.num_publications = 100  # the ticket of ``open`` is none
    list(steps)
    channel.num_publications = 0
    plane.publish(0, 0, np.zeros(64, np.uint8), Ticket())
    turns = [(plane.empty_outbox(), channel.num_publications) for _ in range(3)]
    plane.outbox.clear()
    if isinstance(plane, RmaPlane):
        list(plane.close())
    else:
        for standing in plane._standing:
            standing.cancel()
        list(plane._questions.close())
    comm.Free()
    ranks.agree("" if turns == [(True, 1), (True, 2), (True, 3)] else f"{turns}")
