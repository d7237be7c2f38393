"""Shards that move between servers while workers read them, over both data planes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from movers import ELEMS, NUM_MOVES, NUM_ROOMS, Reader, Server, all_done, content
from mpi_ranks import DEADLINE_S, Inbox, Ranks

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Channel, Control, Notice, Parcel
from hpcps.comm.layout import Layout
from hpcps.comm.mpi import MpiChannel
from hpcps.errors import ChannelError

PLANES = pytest.mark.parametrize("plane", ["rma", "p2p"])


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("num_buffers", [2, 3])
@pytest.mark.parametrize("num_servers", [2, 3])
@PLANES
def test_readers_find_whole_shards_while_these_move(
    ranks: Ranks, plane: str, num_servers: int, num_buffers: int
) -> None:
    num_servers = min(num_servers, ranks.size - 1)
    sizes = [8 * elems for elems in ELEMS]
    layout = ranks.layout(num_servers, sizes, num_buffers=num_buffers, num_rooms=NUM_ROOMS // num_servers)

    def body(channel: Channel) -> int:
        if ranks.rank in layout.servers:
            return Server(channel, layout, layout.servers.index(ranks.rank)).run()
        return Reader(channel, layout).run()

    counts = ranks.gather(ranks.play(plane, layout, body))
    ranks.agree("" if sum(counts[:num_servers]) == NUM_MOVES else f"{counts[:num_servers]} parcels came")
    ranks.agree(
        "" if min(counts[num_servers:]) > 3 * len(ELEMS) else f"{counts[num_servers:]} reads in {NUM_MOVES} moves"
    )


# --- one step after the other -----------------------------------------------------------------------------


class Play:
    """Ranks take turns: the first server says what happens, one rank does it and answers."""

    def __init__(self, channel: Channel, layout: Layout) -> None:
        self.channel = channel
        self.layout = layout
        self.inbox = Inbox(channel)

    def serve(self, key: int, versions: range) -> None:
        """Publish versions of a shard, one after the other."""
        for version in versions:
            all_done(
                self.channel,
                [self.channel.publish(key, version, content(key, version, np.empty(100)))],
                "a publication",
            )

    def leave(self, key: int) -> None:
        all_done(self.channel, [self.channel.retire(key)], "a shard to leave")

    def meet(self, *ranks: int) -> None:
        """Go on when these ranks have come here, too; servers with anyone, workers with servers."""
        for rank in ranks:
            if rank != self.channel.rank:
                self.channel.send(rank, b"")
        for rank in ranks:
            if rank != self.channel.rank:
                self.inbox.take(Control, f"rank {rank} to come")

    def read(self, key: int, version: int) -> int:
        """Version that a read of a shard gives; its content is checked."""
        out = np.full(100, -1.0)
        ticket = self.channel.pull(key, version, out)
        all_done(self.channel, [ticket], "a pull")
        assert (out == content(key, ticket.result, np.empty(100))).all(), f"version {ticket.result}: {out[:5]}"
        return ticket.result


@pytest.mark.mpi(min_size=3)
@PLANES
def test_first_version_in_a_room_is_the_oldest_there(ranks: Ranks, plane: str) -> None:
    """A worker may know of an older one; its copy in the new room is another shard's."""
    layout = ranks.layout(2, [800, 800], num_rooms=2)

    def body(channel: Channel) -> None:
        play = Play(channel, layout)
        if ranks.rank == 0:
            play.serve(0, range(10))
            play.leave(0)
            play.meet(1)
        elif ranks.rank == 1:
            play.serve(1, range(9))
            play.leave(1)
            play.meet(0)
            channel.host(0, 0)
            play.serve(0, range(9, 10))
            play.meet(2)
            play.meet(2)
            play.serve(0, range(10, 11))
            play.meet(2)
            play.meet(2)
        elif ranks.rank == 2:
            play.meet(1)
            channel.reroute(0, 1, 0)
            assert play.read(0, 8) == 9
            play.meet(1)
            play.meet(1)
            assert play.read(0, 8) in (9, 10)
            play.meet(1)

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=3)
@PLANES
def test_room_that_another_shard_took_is_not_believed(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(2, [800, 800, 800], num_rooms=2)

    def body(channel: Channel) -> None:
        play = Play(channel, layout)
        if ranks.rank == 0:
            play.serve(0, range(6))
            play.leave(0)
            play.meet(1)
            channel.host(1, 0)
            play.serve(1, range(3, 9))
            play.meet(2)
            play.meet(1, 2)
        elif ranks.rank == 1:
            play.serve(1, range(4))
            play.leave(1)
            channel.host(0, 0)
            play.serve(0, range(5, 7))
            play.meet(0)
            play.meet(0)
        elif ranks.rank == 2:
            out = np.full(100, -1.0)
            play.meet(0)
            ticket = channel.pull(0, 5, out)
            channel.wait_events(0.2)
            assert not ticket.done, f"got version {ticket.result}, {out[:5]}"
            channel.reroute(0, 1, 0)
            all_done(channel, [ticket], "the pull to go on")
            assert ticket.result in (5, 6) and (out == content(0, ticket.result, np.empty(100))).all()
            play.meet(0)

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=3)
@PLANES
def test_shard_that_came_back_to_its_room_is_read_anew(ranks: Ranks, plane: str) -> None:
    """The same shard and version, another stay: what was read before the stay was known is not believed."""
    layout = ranks.layout(2, [800, 800], num_rooms=2)

    def body(channel: Channel) -> None:
        play = Play(channel, layout)
        if ranks.rank == 0:
            play.serve(0, range(1))
            play.meet(2)
            play.meet(2)
            play.leave(0)
            channel.host(1, 0)
            play.serve(1, range(1))
            play.leave(1)
            channel.host(0, 0)
            play.serve(0, range(1))
            play.meet(2)
            play.meet(2)
        elif ranks.rank == 2:
            play.meet(0)
            assert play.read(0, 0) == 0
            assert channel.counters.pull_retries == 0
            play.meet(0)
            play.meet(0)
            assert play.read(0, 0) == 0
            assert channel.counters.pull_retries == (1 if plane == "rma" else 0)
            assert play.read(0, 0) == 0
            assert channel.counters.pull_retries == (1 if plane == "rma" else 0)
            play.meet(0)

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=3)
@PLANES
def test_messages_and_parcels_leave_after_what_was_published_before_them(
    ranks: Ranks, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ranks.layout(2, [800, 800], num_rooms=2)
    left: list[int] = []

    def hold(channel: MpiChannel) -> tuple[threading.Event, threading.Event]:
        """Stop the communication thread at the end of a round; its next one begins with what it was given meanwhile."""
        held, free = threading.Event(), threading.Event()
        look = channel._parcels.look

        def look_and_stop() -> bool:
            held.set()
            free.wait(DEADLINE_S)
            return look()

        monkeypatch.setattr(channel._parcels, "look", look_and_stop)
        return held, free

    def body(channel: Channel) -> None:
        assert isinstance(channel, MpiChannel)
        inbox = Inbox(channel)
        if ranks.rank == 0:

            def when_it_leaves(send: Callable[..., Operation]) -> Callable[..., Operation]:
                """Keeps the version that a worker could read as a message leaves."""

                def sending(*arguments: Any) -> Operation:
                    found = channel._plane._questions._newest(0)  # type: ignore[attr-defined]
                    left.append(-1 if found is None else found[0])
                    yield from send(*arguments)

                return sending

            for version in (0, 1):
                monkeypatch.setattr(channel._mailbox, "send", when_it_leaves(channel._mailbox.send))
                monkeypatch.setattr(channel._parcels, "send", when_it_leaves(channel._parcels.send))
                held, free = hold(channel)
                assert held.wait(DEADLINE_S)
                channel.publish(0, version, content(0, version, np.empty(100)))
                if version == 0:
                    channel.send(2, b"")
                else:
                    channel.parcel(1, b"", np.zeros(0))
                monkeypatch.undo()
                free.set()
                inbox.take(Control, "an answer")
            assert left == [0, 1]
        elif ranks.rank == 1:
            inbox.take(Parcel, "a parcel")
            channel.send(0, b"")
        elif ranks.rank == 2:
            inbox.take(Control, "a message")
            assert Play(channel, layout).read(0, 0) >= 0
            channel.send(0, b"")

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=3)
@PLANES
def test_last_notices_of_a_shard_are_those_of_its_new_server(ranks: Ranks, plane: str) -> None:
    """The old server's notices are over when ``retire`` is, also those that no worker has looked at."""
    layout = ranks.layout(2, [8, 8], num_rooms=2)

    def body(channel: Channel) -> None:
        inbox = Inbox(channel)
        if ranks.rank in layout.servers:
            other = 1 - ranks.rank
            for turn in range(60):
                if turn % 2 == ranks.rank:
                    if turn > 0:
                        inbox.take(Parcel, "the shard")
                        channel.host(0, ranks.rank)
                    for version in range(10 * turn, 10 * turn + 10):
                        channel.publish(0, version, np.array([float(version)]))
                        for worker in layout.workers:
                            channel.notify(worker, Notice(0, version, version))
                    ticket = channel.retire(0)
                    all_done(channel, [ticket], "the shard to leave")
                    channel.parcel(other, b"", np.zeros(0))
            for _ in layout.workers:
                inbox.take(Control, "the workers")
        else:
            newest = -1
            while newest < 599:
                channel.wait(lambda: channel.has_events, "notices")
                for notice in inbox.all(Notice):
                    assert plane == "p2p" or notice.version > newest, "a notice went back"
                    newest = max(newest, notice.version)
            for server in layout.servers:
                channel.send(server, b"")

    ranks.play(plane, layout, body)


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=3)
@PLANES
def test_misuse_is_refused_before_anything_happens(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(2, [64, 64], num_rooms=2)

    def body(channel: Channel) -> None:
        if ranks.rank == 2:
            with pytest.raises(ChannelError, match="cannot use rooms at rank 2: it does not serve, or is not open"):
                channel.retire(0)
            with pytest.raises(ChannelError, match="cannot send a parcel from rank 2 to rank 0: need two servers"):
                channel.parcel(0, b"", np.zeros(0))
        if ranks.rank == 0:
            with pytest.raises(ChannelError, match="cannot send a parcel from rank 0 to rank 0: need two servers"):
                channel.parcel(0, b"", np.zeros(0))
            with pytest.raises(ChannelError, match=r"cannot publish shard 1 at rank 0: it holds \[0\]"):
                channel.publish(1, 0, np.zeros(8))
            with pytest.raises(ChannelError, match="cannot host shard 1 in room 0 at rank 0: shard 0 lies there"):
                channel.host(1, 0)
            if plane == "rma":
                with pytest.raises(ChannelError, match="cannot publish version 68719476736 of shard 0: need 0 to 6871"):
                    channel.publish(0, 2**36, np.zeros(8))

    ranks.play(plane, layout, body)
