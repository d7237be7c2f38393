"""Which data plane the ranks take, all the same one, when the windows fail or do not fit on one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from mpi_ranks import DEADLINE_S, Inbox, Ranks, StandIn, free_world

from hpcps.comm import rma, start
from hpcps.comm.channel import Arrival, Control, Ticket
from hpcps.comm.layout import Layout, ShardRoom
from hpcps.comm.mailbox import Mailbox
from hpcps.comm.mpi import MpiChannel
from hpcps.comm.p2p import P2pPlane
from hpcps.comm.start import open_channel, self_test
from hpcps.comm.tags import Tag
from hpcps.comm.world import World, open_world
from hpcps.config import CommConfig
from hpcps.errors import ChannelError, ProtocolError


class BrokenWindow:
    """A window that refuses one operation."""

    def __init__(self, window: MPI.Win, refused: str) -> None:
        self._window = window
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return self._refuse if name == self._refused else getattr(self._window, name)

    def tomemory(self) -> Any:
        return self._window.tomemory()

    def _refuse(self, *_: object) -> None:
        raise MPI.Exception(MPI.ERR_OTHER)


def push_one_frame(channel: MpiChannel, layout: Layout) -> str:
    """What is wrong after one frame from every worker, a credit for it, and word that it has come."""
    inbox = Inbox(channel)
    if channel.rank not in layout.servers:
        ticket = channel.push(0, b"h" * 192, np.arange(64, dtype=np.uint8))
        channel.wait(lambda: ticket.done, "the push")
        return "" if inbox.take(Control, "the server").data == b"came" else "wrong message"
    for _ in layout.workers:
        arrival = inbox.take(Arrival, "frames")
        assert arrival.payload.tobytes() == bytes(range(64))
        channel.release(arrival.slot)
        channel.send(arrival.slot.worker, b"came")
    return ""


# --- the self-test fails on one rank ----------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("refused", ["Put", "Fetch_and_op"])
def test_error_of_one_rank_gives_all_ranks_the_same_reason(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real = start._exchange
    monkeypatch.setattr(
        start,
        "_exchange",
        lambda world, window: real(world, BrokenWindow(window, refused) if world.rank == 0 else window),  # type: ignore[arg-type]
    )
    world = open_world(versions="test")
    found = ranks.gather(self_test(world))
    free_world(world)
    assert found[0].startswith("rank 0: window operations fail: ")
    assert found == [found[0]] * ranks.size


@pytest.mark.mpi(min_size=2)
def test_auto_takes_messages_where_one_rank_fails_the_self_test(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_exchange", lambda world, window: "broken" if world.rank == 1 else "")
    layout = ranks.layout(1, [64])
    world = open_world(versions="test")
    channel = open_channel(world, layout.workers, CommConfig(mode="auto", deadline_s=DEADLINE_S))
    channel.open(layout)
    problem = push_one_frame(channel, layout)
    channel.close()

    def check() -> None:
        assert problem == ""
        assert channel.mode == "p2p (rank 1: broken)"
        assert isinstance(channel._plane, P2pPlane)

    ranks.check(check)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", ["auto", "rma"])
def test_shards_cannot_move_where_only_the_spare_rooms_do_not_fit(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    tight = ranks.layout(1, [64])

    def no_room_to_spare(world: World, window_bytes: Callable[[int], int]) -> str:
        return "/dev/shm is small" if world.rank == 1 and window_bytes(0) > tight.window_bytes(0) else ""

    monkeypatch.setattr(rma, "shared_memory_problem", no_room_to_spare)
    world = open_world(versions="test")
    channel = open_channel(world, tight.workers, CommConfig(mode=mode, deadline_s=DEADLINE_S))
    layout = channel.open(dataclasses.replace(tight, num_rooms=(3,)))
    problem = push_one_frame(channel, layout)
    channel.close()

    def check() -> None:
        assert problem == ""
        assert layout == tight
        assert channel.mode.startswith("rma")
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == [
            "shards cannot move: rank 1: /dev/shm is small; give the container more shared memory, or lower"
            " routing.spare_frac"
        ]

    ranks.check(check)


@pytest.mark.mpi(min_size=2)
def test_messages_need_no_memory_for_rooms_so_shards_may_move(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rma, "shared_memory_problem", no_room_at_rank_1)
    wide = dataclasses.replace(ranks.layout(1, [64]), num_rooms=(3,))
    channel = open_channel(open_world(versions="test"), wide.workers, CommConfig(mode="auto", deadline_s=DEADLINE_S))
    layout = channel.open(wide)
    problem = push_one_frame(channel, layout)
    channel.close()
    ranks.agree(problem or ("" if (layout, channel.mode[:3]) == (wide, "p2p") else f"{layout} {channel.mode}"))


@pytest.mark.mpi(min_size=2)
def test_rma_is_refused_on_all_ranks_where_one_fails_the_self_test(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_exchange", lambda world, window: "broken" if world.rank == 1 else "")
    world = open_world(versions="test")

    def check() -> None:
        with pytest.raises(ChannelError, match="cannot use one-sided mode with .*: rank 1: broken; set comm.mode"):
            open_channel(world, ranks.roles(1).workers, CommConfig(mode="rma"))

    ranks.check(check)
    free_world(world)


# --- the windows do not fit on one rank -------------------------------------------------------------------


def no_room_at_rank_1(world: World, _: object) -> str:
    return "/dev/shm is full" if world.rank == 1 else ""


@pytest.mark.mpi(min_size=2)
def test_auto_takes_messages_where_the_windows_do_not_fit(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rma, "shared_memory_problem", no_room_at_rank_1)
    layout = ranks.layout(1, [64])
    world = open_world(versions="test")
    channel = open_channel(world, layout.workers, CommConfig(mode="auto", deadline_s=DEADLINE_S))
    before = channel.mode
    channel.open(layout)
    problem = push_one_frame(channel, layout)
    channel.close()

    def check() -> None:
        assert problem == ""
        assert (before, channel.mode) == ("rma (self-test passed)", "p2p (rank 1: /dev/shm is full)")
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == ["the data plane is p2p: rank 1: /dev/shm is full"]

    ranks.check(check)


@pytest.mark.mpi(min_size=2)
def test_rma_is_refused_on_all_ranks_where_the_windows_do_not_fit(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rma, "shared_memory_problem", no_room_at_rank_1)
    layout = ranks.layout(1, [64])
    channel = open_channel(open_world(versions="test"), layout.workers, CommConfig(mode="rma", deadline_s=DEADLINE_S))
    said = ""
    try:
        channel.open(layout)
    except ChannelError as error:
        said = str(error)
    channel.close()
    expected = "cannot open the data plane: rank 1: /dev/shm is full; give the container more shared memory"
    ranks.agree("" if said.startswith(expected) else f"{said!r}")


# --- what comes off the wire ------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("length", [-1, 2**30 + 1, 2**62])
def test_control_message_of_an_impossible_length_is_refused(ranks: Ranks, length: int) -> None:
    comm = MPI.COMM_SELF.Dup()
    mailbox = Mailbox(comm, peers=[0])
    sent = comm.Isend([np.array([length], np.int64), MPI.INT64_T], dest=0, tag=Tag.CONTROL)

    def check() -> None:
        with pytest.raises(ProtocolError, match=f"from rank 0: got a length of {length} bytes, need 0 to 1073741824;"):
            while True:
                mailbox.look()

    ranks.check(check)
    sent.Wait()
    comm.Free()


@pytest.mark.mpi
def test_pull_of_an_unknown_key_is_refused(ranks: Ranks) -> None:
    comm = MPI.COMM_SELF.Dup()
    rooms = (ShardRoom(server=0, num_bytes=64, head_bytes=192),)
    plane = P2pPlane(StandIn(comm))  # type: ignore[arg-type]
    layout = Layout(servers=(0,), workers=(0,), shards=rooms, num_slots=2, num_buffers=2, num_rooms=(1,))
    list(plane.open(layout, Ticket()))
    plane.publish(0, 0, np.zeros(64, np.uint8), Ticket())
    sent = comm.Isend([np.array([7, 0], np.int64), MPI.INT64_T], dest=0, tag=Tag.PULL)

    def check() -> None:
        with pytest.raises(
            ProtocolError, match="a pull from rank 0: got key 7, need one below 1; run the same plan"
        ) as caught:
            while True:
                plane.look()
        assert (caught.value.key, caught.value.op) == (7, "pull")

    ranks.check(check)
    sent.Wait()
    for standing in plane._standing:
        standing.cancel()
    comm.Free()
