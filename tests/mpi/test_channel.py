"""The MPI channel between real ranks, over both data planes: everything arrives, once, whole and in order."""

from __future__ import annotations

import struct
import zlib
from collections import deque

import numpy as np
import pytest
from mpi4py import MPI
from mpi_ranks import Inbox, Ranks, free_world

from hpcps.comm.channel import Arrival, Bytes, Channel, Control, Notice, Ticket
from hpcps.comm.layout import Layout
from hpcps.comm.start import open_channel, self_test
from hpcps.comm.world import open_world
from hpcps.config import CommConfig
from hpcps.errors import ChannelError, DeadlineError

PLANES = pytest.mark.parametrize("plane", ["rma", "p2p"])
NUM_PUSHES = 500
IN_FLIGHT = 6
FRAME_SIZES = (0, 1, 63, 64, 4_096, 262_147)
HEAD_SIZES = (32, 128, 192)
HEAD = struct.Struct("<iiqq")
NUM_PULLS = 100


def num_servers(ranks: Ranks) -> int:
    return 2 if ranks.size >= 4 else 1


def random_bytes(size: int, *seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def all_done(channel: Channel, tickets: list[Ticket], what: str) -> None:
    channel.wait(lambda: all(ticket.done for ticket in tickets), what)


# --- world and self-test ---------------------------------------------------------------------------------


@pytest.mark.mpi
def test_world_knows_every_rank(ranks: Ranks) -> None:
    world = open_world(versions="test")
    library = MPI.Get_library_version()
    found = (world.rank, world.size, len(world.ranks), {facts.versions for facts in world.ranks})
    free_world(world)

    def check() -> None:
        assert found == (ranks.rank, ranks.size, ranks.size, {"test"})
        assert world.library and library.startswith(world.library)
        by_host: dict[str, list[int]] = {}
        for facts in world.ranks:
            by_host.setdefault(facts.host, []).append(facts.local_rank)
            assert facts.num_cores >= 1 and facts.memory_bytes > 0
        assert all(sorted(local) == list(range(len(local))) for local in by_host.values())

    ranks.check(check)


@pytest.mark.mpi
def test_window_self_test_passes_here(ranks: Ranks) -> None:
    world = open_world(versions="test")
    problem = self_test(world)
    free_world(world)
    ranks.agree(problem)


@pytest.mark.mpi(min_size=2)
def test_auto_mode_takes_the_windows(ranks: Ranks) -> None:
    world = open_world(versions="test")
    channel = open_channel(world, ranks.roles(1).workers, CommConfig(mode="auto"))
    channel.close()
    ranks.agree("" if channel.mode == "rma (self-test passed)" else channel.mode)


# --- control messages ------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@PLANES
def test_control_messages_of_all_sizes_come_in_order_both_ways(ranks: Ranks, plane: str) -> None:
    sizes = [0, 10, 1_000_000, 1, 32_760, 32_768, 70_000, 0, 10] * 3
    layout = ranks.layout(num_servers(ranks), [64, 64])

    def message(source: int, target: int, index: int) -> bytes:
        return random_bytes(sizes[index], source, target, index).tobytes()

    def body(channel: Channel) -> None:
        peers = layout.workers if ranks.rank in layout.servers else layout.servers
        for index in range(len(sizes)):
            for peer in peers:
                channel.send(peer, message(ranks.rank, peer, index))
        inbox = Inbox(channel)
        counts = dict.fromkeys(peers, 0)
        while sum(counts.values()) < len(peers) * len(sizes):
            control = inbox.take(Control, "control messages")
            index = counts[control.source]
            assert len(control.data) == sizes[index]
            assert control.data == message(control.source, ranks.rank, index)
            counts[control.source] += 1
        assert channel.counters.control_messages == len(peers) * len(sizes)

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=4)
@PLANES
def test_control_message_between_two_workers_is_refused(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(1, [64])

    def body(channel: Channel) -> None:
        if ranks.rank == 1:
            with pytest.raises(ChannelError, match="cannot send a control message from rank 1 to rank 2: both work"):
                channel.send(2, b"")

    ranks.play(plane, layout, body)


# --- frames ----------------------------------------------------------------------------------------------


def frame(worker: int, server: int, number: int) -> tuple[bytes, Bytes]:
    payload = random_bytes(FRAME_SIZES[number % len(FRAME_SIZES)], worker, server, number)
    head = HEAD.pack(worker, number, payload.size, zlib.crc32(payload))
    return head.ljust(HEAD_SIZES[number % len(HEAD_SIZES)], b"h"), payload


def check_frame(arrival: Arrival, *, first: bool) -> int:
    """A frame is what its head says; returns its number."""
    worker, number, size, crc = HEAD.unpack_from(arrival.head)
    assert worker == arrival.slot.worker and number == arrival.slot.seq - 1
    assert len(arrival.head) == HEAD_SIZES[number % len(HEAD_SIZES)]
    assert arrival.payload.size == size
    assert zlib.crc32(np.ascontiguousarray(arrival.payload)) == crc, "overwritten" if not first else "wrong payload"
    return number


def push_all(channel: Channel, layout: Layout) -> None:
    tickets: deque[tuple[Ticket, Bytes]] = deque()
    for number in range(NUM_PUSHES):
        for server in range(len(layout.servers)):
            head, payload = frame(channel.rank, server, number)
            tickets.append((channel.push(server, head, payload), payload))
            while len(tickets) >= IN_FLIGHT * len(layout.servers):
                all_done(channel, [tickets[0][0]], "a credit")
                tickets.popleft()
    all_done(channel, [ticket for ticket, _ in tickets], "the last credits")
    assert channel.counters.pushes == NUM_PUSHES * len(layout.servers)
    assert channel.counters.credit_waits > 0


def serve_slowly(channel: Channel, layout: Layout, *, all_at_once: bool) -> None:
    """Keep every slot of a worker as long as it has pushes left, look at the frames again, then give slots back."""
    inbox = Inbox(channel)
    held: dict[int, list[Arrival]] = {worker: [] for worker in layout.workers}
    seen: dict[int, set[int]] = {worker: set() for worker in layout.workers}
    while any(len(numbers) < NUM_PUSHES for numbers in seen.values()):
        arrival = inbox.take(Arrival, "frames")
        worker = arrival.slot.worker
        number = check_frame(arrival, first=True)
        assert number not in seen[worker]
        seen[worker].add(number)
        held[worker].append(arrival)
        assert len(held[worker]) <= layout.num_slots, "more frames than slots"
        ending = NUM_PUSHES - len(seen[worker]) <= IN_FLIGHT  # the last pushes may all want the same slot
        if ending or len(held[worker]) == layout.num_slots:
            for old in held[worker]:
                check_frame(old, first=False)
            for _ in range(len(held[worker]) if ending or all_at_once else 1):
                channel.release(held[worker].pop(-1 if all_at_once else 0).slot)
    for arrival in (arrival for arrivals in held.values() for arrival in arrivals):
        check_frame(arrival, first=False)
        channel.release(arrival.slot)
    assert not inbox.all(Arrival)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("all_at_once", [False, True], ids=["one at a time", "newest first"])
@pytest.mark.parametrize("num_slots", [2, 3])
@PLANES
def test_slow_server_holds_pushers_back_and_loses_nothing(
    ranks: Ranks, plane: str, num_slots: int, all_at_once: bool
) -> None:
    servers = num_servers(ranks)
    layout = ranks.layout(servers, [FRAME_SIZES[-1]] * servers, num_slots=num_slots)

    def body(channel: Channel) -> None:
        if ranks.rank in layout.servers:
            serve_slowly(channel, layout, all_at_once=all_at_once)
        else:
            push_all(channel, layout)

    ranks.play(plane, layout, body)


# --- parameters ------------------------------------------------------------------------------------------


def publish_until_all_are_done(channel: Channel, layout: Layout, elems: list[int]) -> None:
    """Publish new versions as fast as the channel takes them; every number of a shard is its version."""
    inbox = Inbox(channel)
    keys = layout.server_keys(layout.servers.index(channel.rank))
    values = {key: np.empty(elems[key]) for key in keys}
    num_done, version = 0, -1
    while num_done < len(layout.workers):
        version += 1
        for key in keys:
            values[key][:] = version
            ticket = channel.publish(key, version, values[key])
            for worker in layout.workers:
                channel.notify(worker, Notice(key, version, 2 * version))
            all_done(channel, [ticket], "a publication")
        num_done += len(inbox.all(Control))
    for worker in layout.workers:
        channel.send(worker, str(version).encode())


def pull_many(channel: Channel, layout: Layout, elems: list[int]) -> None:
    inbox = Inbox(channel)
    outs = [np.empty(count) for count in elems]
    newest = [-1] * len(elems)

    def take_notices() -> None:
        for notice in inbox.all(Notice):
            assert notice.version > newest[notice.key], "versions do not rise"
            assert notice.clock == 2 * notice.version
            newest[notice.key] = notice.version

    def pull_all() -> list[int]:
        tickets = [channel.pull(key, newest[key], out) for key, out in enumerate(outs)]
        all_done(channel, tickets, "pulls")
        for key, (ticket, out) in enumerate(zip(tickets, outs, strict=True)):
            assert ticket.result >= newest[key]
            assert (out == ticket.result).all(), f"torn: version {ticket.result}, values {np.unique(out)}"
        return [ticket.result for ticket in tickets]

    def wait_for(versions: list[int], what: str) -> None:
        take_notices()
        while any(have < need for have, need in zip(newest, versions, strict=True)):
            channel.wait(lambda: channel.has_events, what)
            take_notices()

    wait_for([0] * len(elems), "first versions")
    before = [-1] * len(elems)
    for _ in range(NUM_PULLS):
        take_notices()
        got = pull_all()
        assert all(now >= then for now, then in zip(got, before, strict=True)), "a pull went back in time"
        before = got
    for server in layout.servers:
        channel.send(server, b"done")
    last = [0] * len(elems)
    for _ in layout.servers:
        control = inbox.take(Control, "the last version")
        for key in layout.server_keys(layout.servers.index(control.source)):
            last[key] = int(control.data)
    wait_for(last, "the last notices")
    assert newest == last
    assert pull_all() == last
    assert channel.counters.pulls == (NUM_PULLS + 1) * len(elems)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("num_buffers", [2, 3])
@PLANES
def test_pulls_are_whole_while_servers_publish_without_pause(ranks: Ranks, plane: str, num_buffers: int) -> None:
    elems = [20_000, 20_001, 1, 777]
    layout = ranks.layout(num_servers(ranks), [8 * count for count in elems], num_buffers=num_buffers)

    def body(channel: Channel) -> None:
        if ranks.rank in layout.servers:
            publish_until_all_are_done(channel, layout, elems)
        else:
            pull_many(channel, layout, elems)

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=2)
@PLANES
def test_pull_of_an_overwritten_version_gives_a_newer_one(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(1, [8 * 1_000])

    def body(channel: Channel) -> None:
        inbox = Inbox(channel)
        if ranks.rank in layout.servers:
            values = np.empty(1_000)
            for version in range(11):
                values[:] = version
                all_done(channel, [channel.publish(0, version, values)], "a publication")
            for worker in layout.workers:
                channel.send(worker, b"ten versions are out")
            for _ in layout.workers:
                inbox.take(Control, "the workers")
        else:
            inbox.take(Control, "the server")
            out = np.empty(1_000)
            ticket = channel.pull(0, 0, out)
            all_done(channel, [ticket], "a pull")
            assert ticket.result == (9 if plane == "rma" else 10)  # windows: the newest that is surely complete
            assert (out == ticket.result).all()
            assert channel.counters.pull_retries == (1 if plane == "rma" else 0)
            channel.send(0, b"done")

    ranks.play(plane, layout, body)


# --- collectives of the workers ----------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@PLANES
def test_reductions_of_group_and_everyone_run_side_by_side(ranks: Ranks, plane: str, dtype: str) -> None:
    layout = ranks.layout(1, [64])
    places = {worker: place for place, worker in enumerate(layout.workers)}
    sizes = [1, 0, 1_000, 3, 300_000]

    def body(channel: Channel) -> None:
        if ranks.rank in layout.servers:
            return
        for _ in range(3):
            buffers = [np.full(size, places[ranks.rank] + number, dtype) for number, size in enumerate(sizes * 2)]
            tickets = [channel.allreduce(buffer, everyone=number % 2 == 1) for number, buffer in enumerate(buffers)]
            all_done(channel, tickets, "reductions")
            for number, buffer in enumerate(buffers):
                total = sum(place + number for place in places.values())
                assert buffer.dtype == dtype and (buffer == total).all()

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=2)
@PLANES
def test_broadcast_from_each_worker(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(1, [64])

    def body(channel: Channel) -> None:
        for root in layout.workers if ranks.rank in layout.workers else ():
            for size in (1, 10, 100_000):
                buffer = np.full(size, float(root) if ranks.rank == root else -1.0)
                all_done(channel, [channel.broadcast(buffer, root)], "a broadcast")
                assert (buffer == root).all()

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=4)
@PLANES
def test_regrouped_workers_reduce_in_their_groups(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(1, [64])
    first, *others = layout.workers
    groupings = [[[first], others], [[*others, first]], [[rank] for rank in layout.workers], [others, [first]]]

    def body(channel: Channel) -> None:
        if ranks.rank in layout.servers:
            return
        for groups in groupings:
            channel.regroup(groups)
            mine, everyone = np.full(1_000, float(ranks.rank)), np.full(1_000, float(ranks.rank))
            tickets = [channel.allreduce(mine), channel.allreduce(everyone, everyone=True)]
            all_done(channel, tickets, "reductions")
            group = next(group for group in groups if ranks.rank in group)
            assert (mine == sum(group)).all()
            assert (everyone == sum(layout.workers)).all()

    ranks.play(plane, layout, body)


# --- deadlines and end -------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@PLANES
def test_deadline_error_names_rank_and_wait(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(1, [64])

    def body(channel: Channel) -> None:
        text = (
            f"cannot go on at rank {ranks.rank}: waited 0.2 s for a message that nobody sends; look at the other"
            " ranks' logs for the first error, or raise comm.deadline_s"
        )
        channel.deadline_s = 0.2
        with pytest.raises(DeadlineError) as caught:
            channel.wait(lambda: channel.has_events, "a message that nobody sends")
        assert str(caught.value) == text
        assert caught.value.rank == ranks.rank and caught.value.op == "a message that nobody sends"

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=2)
@PLANES
def test_closed_channels_leave_no_communicator_and_no_window(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(1, [4_096])

    def body(channel: Channel) -> None:
        if ranks.rank in layout.workers:
            channel.regroup([layout.workers])
            all_done(channel, [channel.push(0, b"h" * 128, np.ones(16))], "a push")
        else:
            inbox = Inbox(channel)
            for _ in layout.workers:
                channel.release(inbox.take(Arrival, "frames").slot)

    def highest_handles() -> tuple[int, int]:
        """Of more communicators than a channel has, and of a window: a library gives freed numbers out again."""
        comms = [ranks.comm.Dup() for _ in range(12)]
        window = MPI.Win.Allocate(64, 1, comm=comms[0])
        handles = max(comm.py2f() for comm in comms), window.py2f()
        window.Free()
        for comm in comms:
            comm.Free()
        return handles

    ranks.play(plane, layout, body)
    before = highest_handles()
    for _ in range(3):
        ranks.play(plane, layout, body)
    after = highest_handles()
    ranks.agree("" if before == after else f"handles were {before} and became {after}")


@pytest.mark.mpi(min_size=2)
@PLANES
def test_second_close_does_nothing(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(1, [64])
    world = open_world(versions="test")
    channel = open_channel(world, layout.workers, CommConfig(mode=plane))
    channel.open(layout)
    channel.close()
    channel.close()
    never_opened = open_channel(open_world(versions="test"), layout.workers, CommConfig(mode=plane))
    never_opened.close()
    never_opened.close()
    ranks.agree()
