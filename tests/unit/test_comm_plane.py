"""Pushes of a plane: one line a server, in order, as many at a time as there are credits."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from types import SimpleNamespace

import numpy as np
import pytest

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Bytes, Counters, Slot, Ticket
from hpcps.comm.layout import Layout, ShardRoom
from hpcps.comm.link import NO_USE, Reads, Throttle
from hpcps.comm.plane import Place, Plane

NOTHING = np.zeros(0, np.uint8)


class Channel(SimpleNamespace):
    """The part of a channel that pushes use."""

    def __init__(self, link_bytes_per_s: float) -> None:
        super().__init__(counters=Counters(), rank=9, link_bytes_per_s=link_bytes_per_s)

    def finish(self, ticket: Ticket, result: int = 0) -> None:
        ticket.result, ticket.done = result, True


class RecordingPlane(Plane):
    """Keeps what was sent; the test gives slots and payloads back."""

    frame_extra_bytes = 10

    def __init__(self, *, num_servers: int, num_slots: int, link_bytes_per_s: float = 0.0) -> None:
        super().__init__(Channel(link_bytes_per_s))  # type: ignore[arg-type]
        self.sent: list[tuple[int, int, int, bytes]] = []
        self.credits: dict[tuple[int, int], int] = {}
        self.held: set[tuple[int, int]] = set()
        self.reads: list[tuple[int, int, int, int]] = []
        self.newest: dict[tuple[int, int], int] = {}
        """What the test put into the rooms of the servers."""
        self.num_asked = 0
        layout = Layout(
            servers=tuple(range(num_servers)),
            workers=(num_servers,),
            shards=(ShardRoom(server=0, num_bytes=8, head_bytes=64),),
            num_slots=num_slots,
            num_buffers=2,
            num_rooms=(1,) + (0,) * (num_servers - 1),
        )
        list(self.open(layout, Ticket()))

    def open(self, layout: Layout, ticket: Ticket) -> Operation:
        self._open_lines(layout)
        yield True

    def close(self) -> Operation:
        yield True

    def look(self) -> bool:
        return False

    def empty_outbox(self) -> bool:
        return False

    def read(self, key: int, place: Place, version: int, out: Bytes) -> Generator[bool, None, int]:
        self.reads.append((key, place.server, place.room, version))
        yield True
        return self.newest.get((place.server, place.room), -1)

    def acked(self, server: int, slot: int) -> int:
        self.num_asked += 1
        return self.credits.get((server, slot), 0)

    def send(self, server: int, slot: Slot, head: bytes, payload: Bytes) -> Callable[[], bool]:
        self.sent.append((server, slot.index, slot.seq, head))
        return lambda: (server, slot.seq) not in self.held


def turns(active: list[Operation]) -> list[Operation]:
    """Give every operation a turn; returns those that go on."""
    remaining = []
    for operation in active:
        try:
            next(operation)
            remaining.append(operation)
        except StopIteration:
            pass
    return remaining


def test_frames_go_in_order_as_credits_come() -> None:
    plane = RecordingPlane(num_servers=2, num_slots=2)
    tickets = [Ticket() for _ in range(6)]
    heads = [b"a", b"b", b"c", b"d", b"e", b"f"]
    servers = [0, 0, 0, 1, 0, 0]
    active = [plane.push(s, h, NOTHING, t) for s, h, t in zip(servers, heads, tickets, strict=True)]

    active = turns(active)
    assert plane.sent == [(0, 0, 1, b"a"), (0, 1, 2, b"b"), (1, 0, 1, b"d")]
    assert [ticket.done for ticket in tickets] == [True, True, False, True, False, False]
    assert plane._channel.counters.credit_waits == 3

    active = turns(active)
    assert len(plane.sent) == 3

    plane.credits[0, 1] = 2  # the second slot comes back before the first
    active = turns(active)
    assert plane.sent[3:] == [(0, 1, 3, b"c")]

    plane.credits.update({(0, 0): 1, (0, 1): 3})
    assert turns(active) == []
    assert plane.sent[4:] == [(0, 0, 4, b"e"), (0, 1, 5, b"f")]
    assert all(ticket.done for ticket in tickets)
    assert plane._channel.counters.credit_waits == 3


def test_one_operation_moves_all_that_wait() -> None:
    plane = RecordingPlane(num_servers=1, num_slots=2)
    active = turns([plane.push(0, b"%d" % number, NOTHING, Ticket()) for number in range(3000)])
    assert len(active) == 1
    assert plane._channel.counters.credit_waits == 2998
    plane.num_asked = 0
    for seq in range(1, 2999):
        plane.credits[0, (seq - 1) % 2] = seq
        active = turns(active)
    assert active == []
    assert plane.num_asked <= 4 * 2998
    assert [head for *_, head in plane.sent] == [b"%d" % number for number in range(3000)]
    assert plane._channel.counters.credit_waits == 2998


def test_a_ticket_is_done_when_its_payload_is_free() -> None:
    plane = RecordingPlane(num_servers=1, num_slots=2)
    plane.held = {(0, 1)}
    tickets = [Ticket() for _ in range(2)]
    active = turns([plane.push(0, b"", NOTHING, ticket) for ticket in tickets])
    assert ([ticket.done for ticket in tickets], len(active)) == ([False, True], 1)
    plane.held.clear()
    assert turns(active) == []
    assert tickets[0].done


def test_a_pull_that_meets_a_shard_that_has_left_waits_for_its_route() -> None:
    plane = RecordingPlane(num_servers=3, num_slots=2)
    ticket = Ticket()
    active = turns([plane.pull(0, 4, NOTHING, ticket)])
    for _ in range(5):
        active = turns(active)
    assert plane.reads == [(0, 0, 0, 4)], "no more reads until there is a route"

    plane.reroute(0, 2, 1)
    for _ in range(3):
        active = turns(active)
    assert plane.reads[1:] == [(0, 2, 1, 4)], "it has left again"

    plane.newest[0, 0] = 6
    plane.reroute(0, 0, 0)
    assert turns(turns(active)) == []
    assert plane.reads[2:] == [(0, 0, 0, 4)]
    assert (ticket.done, ticket.result) == (True, 6)


def test_a_route_that_comes_during_a_read_is_not_missed() -> None:
    """Also where it names the same room, to which the shard has come back."""
    plane = RecordingPlane(num_servers=1, num_slots=2)
    ticket = Ticket()
    active = turns([plane.pull(0, 4, NOTHING, ticket)])
    plane.reroute(0, 0, 0)
    active = turns(active)
    plane.newest[0, 0] = 4
    assert turns(turns(active)) == []
    assert (ticket.result, len(plane.reads)) == (4, 2)


def test_what_a_link_carried_is_counted_with_all_that_a_push_puts() -> None:
    plane = RecordingPlane(num_servers=2, num_slots=2)
    tickets = [Ticket() for _ in range(3)]
    payload = np.zeros(100, np.uint8)
    active = [plane.push(0, b"head", payload, ticket) for ticket in tickets]
    active.append(plane.push(1, b"", NOTHING, Ticket()))
    active = turns(active)
    assert plane.link_use(0)[:2] == (2, 2 * (4 + 100 + 10)), "the third waits for a slot"
    plane.credits = {(0, 0): 1, (0, 1): 2}
    turns(active)
    assert plane.link_use(0)[:2] == (3, 3 * (4 + 100 + 10))
    assert plane.link_use(1)[:2] == (1, 10)
    assert plane._channel.counters.pushed_bytes == 3 * 114 + 10
    assert plane.link_use(0).busy_s > 0


def test_an_emulated_link_carries_one_frame_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    plane = RecordingPlane(num_servers=1, num_slots=2, link_bytes_per_s=1000.0)
    payload = np.zeros(500, np.uint8)
    active = [plane.push(0, b"", payload, Ticket()) for _ in range(2)]
    sent = []
    for _ in range(12):
        active = turns(active)
        sent.append(len(plane.sent))
        now_s[0] += 0.125
    assert sent == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert plane.link_use(0) == (2, 1020, 1.0)


def test_a_throttle_takes_turns_and_never_saves_up() -> None:
    throttle = Throttle(100.0)
    assert throttle.reserve(50, now_s=10.0) == 10.5
    assert throttle.reserve(50, now_s=10.1) == 11.0
    assert throttle.reserve(50, now_s=20.0) == 20.5, "an idle link does not carry twice as much later"
    assert Throttle().reserve(10**9, now_s=3.0) == 3.0


def test_reads_that_overlap_are_busy_together() -> None:
    reads = Reads()
    reads.begin(now_s=1.0)
    reads.begin(now_s=2.0)
    reads.end(100, now_s=4.0)
    assert reads.use == (1, 100, 3.0)
    reads.end(50, now_s=5.0)
    assert reads.use == (2, 150, 4.0)
    reads.begin(now_s=9.0)
    reads.end(0, now_s=9.5)
    assert reads.use == (2, 150, 4.5), "a shard that has left: the link was busy for nothing"


def test_pulls_are_counted_where_the_values_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    plane = RecordingPlane(num_servers=2, num_slots=2, link_bytes_per_s=1000.0)
    plane.newest[0, 0] = 4
    active = turns([plane.pull(0, 4, np.zeros(500, np.uint8), Ticket())])
    while active:
        now_s[0] += 0.125
        active = turns(active)
    assert plane.pull_use(0) == (1, 500, 0.125 + 0.5), "one turn for the read, the rest by the emulated link"
    assert plane.pull_use(1) == NO_USE
