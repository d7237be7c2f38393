"""The in-process channel where shards move: reads find them, rooms are used again, parcels come in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hpcps.comm.channel import Control, Notice, Parcel
from hpcps.comm.layout import Layout, ShardRoom
from hpcps.comm.loopback import Faults, Hub, LoopbackChannel
from hpcps.errors import ChannelError, PlanError

NUM_WORKERS = 2


class Job:
    """Two servers with two rooms each, shards 0 and 1 on the first, shard 2 on the second, and two workers."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.hub = Hub(faults=faults)
        self.servers = [LoopbackChannel(self.hub, rank, serves=True, deadline_s=10.0) for rank in (0, 1)]
        self.workers = [LoopbackChannel(self.hub, rank, serves=False, deadline_s=10.0) for rank in (2, 3)]
        shards = tuple(
            ShardRoom(server=server, num_bytes=32, head_bytes=64, room=room)
            for server, room in ((0, 0), (0, 1), (1, 1))
        )
        layout = Layout(servers=(0, 1), workers=(2, 3), shards=shards, num_slots=2, num_buffers=2, num_rooms=(2, 2))
        for end in (*self.servers, *self.workers):
            end.open(layout)

    def publish(self, server: int, key: int, version: int) -> None:
        ticket = self.servers[server].publish(key, version, values(key, version))
        assert ticket.done

    def retire(self, server: int, key: int) -> None:
        ticket = self.servers[server].retire(key)
        self.servers[server].wait(lambda: ticket.done, "the shard to leave")


def values(key: int, version: int) -> np.ndarray:
    return np.full(4, 100.0 * key + version)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.hub.stop()


def test_a_read_that_finds_its_shard_gone_goes_on_where_it_is(job: Job) -> None:
    job.publish(0, 0, 3)
    job.retire(0, 0)
    out = np.empty(4)
    early = job.workers[0].pull(0, 3, out)
    assert not early.done
    job.servers[1].host(0, 0)
    job.publish(1, 0, 4)
    late = np.empty(4)
    other = job.workers[1].pull(0, 3, late)
    assert not other.done, "the other worker has not heard of the new place"
    job.workers[0].reroute(0, 1, 0)
    assert early.done and early.result == 4 and (out == values(0, 4)).all()
    assert not other.done
    job.workers[1].reroute(0, 1, 0)
    assert other.done and (late == values(0, 4)).all()


def test_a_read_on_its_way_is_sent_on_as_often_as_its_shard_moves(job: Job) -> None:
    job.publish(0, 0, 0)
    job.retire(0, 0)
    out = np.empty(4)
    ticket = job.workers[0].pull(0, 0, out)
    job.servers[1].host(0, 0)
    job.publish(1, 0, 0)
    job.retire(1, 0)
    job.workers[0].reroute(0, 1, 0)
    assert not ticket.done, "it has left again"
    job.servers[0].host(0, 0)
    job.publish(0, 0, 1)
    job.workers[0].reroute(0, 0, 0)
    assert ticket.done and ticket.result == 1


def test_a_room_that_another_shard_took_is_not_read(job: Job) -> None:
    job.publish(0, 0, 5)
    job.publish(1, 2, 9)
    job.retire(0, 0)
    job.retire(1, 2)
    job.servers[0].host(2, 0)
    job.publish(0, 2, 9)
    out = np.empty(4)
    ticket = job.workers[0].pull(0, 5, out)
    assert not ticket.done, "shard 2 lies in the room of shard 0"
    job.workers[0].reroute(2, 0, 0)
    moved = job.workers[0].pull(2, 9, out)
    assert moved.done and (out == values(2, 9)).all()


def test_a_version_older_than_was_noticed_is_an_error(job: Job) -> None:
    job.publish(0, 0, 1)
    with pytest.raises(ChannelError, match="cannot read shard 0 at rank 2: found version 1, need 2 that was noticed"):
        job.workers[0].pull(0, 2, np.empty(4))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda end: end.publish(2, 0, np.zeros(4)), r"cannot publish shard 2 at rank 0: it holds \[0, 1\]; host the"),
        (lambda end: end.retire(2), r"cannot retire shard 2 at rank 0: it holds \[0, 1\]; host the shard first"),
        (lambda end: end.host(0, 0), r"cannot host shard 0 in room 0 at rank 0: it holds \[0, 1\] of 3 shards; retire"),
        (lambda end: end.host(3, 0), r"cannot host shard 3 in room 0 at rank 0: it holds \[0, 1\] of 3 shards"),
        (lambda end: end.host(2, 2), "cannot host shard 2 in room 2 at rank 0: it has 2 rooms"),
        (lambda end: end.host(2, -1), "cannot host shard 2 in room -1 at rank 0: it has 2 rooms"),
        (lambda end: end.host(2, 1), "cannot host shard 2 in room 1 at rank 0: shard 1 lies there"),
    ],
)
def test_what_a_server_does_not_hold_is_refused(
    job: Job, act: Callable[[LoopbackChannel], object], message: str
) -> None:
    with pytest.raises(ChannelError, match=message):
        act(job.servers[0])


def test_workers_have_no_rooms(job: Job) -> None:
    with pytest.raises(ChannelError, match="cannot use rooms: this end does not serve, or is not open"):
        job.workers[0].retire(0)


def test_servers_send_control_messages_to_each_other_and_to_workers(job: Job) -> None:
    job.servers[0].send(1, b"to a server")
    job.servers[1].send(2, b"to a worker")
    job.servers[0].send(0, b"to nobody")
    assert job.servers[1].take() == [Control(0, b"to a server")]
    assert job.workers[0].take() == [Control(1, b"to a worker")]
    assert job.servers[0].take() == []


def test_parcels_of_a_pair_come_once_whole_and_in_order_whatever_the_line_does() -> None:
    job = Job(Faults(seed=3, delay_s=0.002, drop_frac=0.4, repeat_frac=0.5))
    num_parcels = 60
    bodies = [[np.full(number % 7, 10.0 * source + number) for number in range(num_parcels)] for source in (0, 1)]
    tickets = [
        job.servers[source].parcel(1 - source, b"%d" % number, bodies[source][number])
        for number in range(num_parcels)
        for source in (0, 1)
    ]
    for source in (0, 1):
        got: list[Parcel] = []
        while len(got) < num_parcels:
            job.servers[1 - source].wait_events(1.0)
            got += [event for event in job.servers[1 - source].take() if isinstance(event, Parcel)]
        assert [parcel.head for parcel in got] == [b"%d" % number for number in range(num_parcels)]
        assert {parcel.source for parcel in got} == {source}
        for parcel, body in zip(got, bodies[source], strict=True):
            assert (parcel.body.view(np.float64) == body).all()
        assert job.servers[source].counters.parcels == num_parcels
        assert job.servers[source].counters.parcel_bytes == sum(len(parcel.head) + parcel.body.size for parcel in got)
    job.servers[0].wait(lambda: all(ticket.done for ticket in tickets), "the parcels")
    job.hub.stop()


def test_a_parcel_for_a_server_that_left_is_dropped(job: Job) -> None:
    job.servers[1].close()
    assert job.servers[0].parcel(1, b"head", np.zeros(3)).done


def test_reads_and_notices_find_a_shard_that_moves_back_and_forth_under_faults() -> None:
    """The room and the clock of the line: what a worker reads is never older than what it heard of."""
    job = Job(Faults(seed=11, delay_s=0.001, drop_frac=0.2))
    worker, heard, holder = job.workers[0], -1, 0
    for version in range(40):
        job.publish(holder, 0, version)
        job.servers[holder].notify(2, Notice(0, version, version))
        if version % 3 == 2:
            job.retire(holder, 0)
            out = np.empty(4)
            ticket = worker.pull(0, max(heard, 0), out)
            holder = 1 - holder
            job.servers[holder].host(0, 0)
            job.publish(holder, 0, version)
            assert not ticket.done
            worker.reroute(0, holder, 0)
            assert ticket.done and ticket.result >= heard and (out == values(0, ticket.result)).all()
        heard = max([heard, *(event.version for event in worker.take() if isinstance(event, Notice))])
    end_s = time.monotonic() + 5.0
    while heard < 39 and time.monotonic() < end_s:
        worker.wait_events(0.5)
        heard = max([heard, *(event.version for event in worker.take() if isinstance(event, Notice))])
    assert heard == 39
    job.hub.stop()


def test_a_layout_refuses_two_shards_in_one_room_and_rooms_that_are_not_there() -> None:
    room = ShardRoom(server=0, num_bytes=8, head_bytes=64)

    def layout(*rooms: ShardRoom, num_rooms: tuple[int, ...] = (1,)) -> Layout:
        return Layout(servers=(0,), workers=(1,), shards=rooms, num_slots=2, num_buffers=2, num_rooms=num_rooms)

    with pytest.raises(PlanError, match="cannot lay out shard 1: got room 0 of server 0, and shard 0 lies there"):
        layout(room, room, num_rooms=(2,))
    with pytest.raises(PlanError, match="cannot lay out shard 0: got room 0 of server 0, and it has 0"):
        layout(room, num_rooms=(0,))
    with pytest.raises(PlanError, match="cannot lay out the windows: got rooms of 2 servers, need those of 1"):
        layout(room, num_rooms=(1, 1))
