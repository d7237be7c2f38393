"""Pushes of a plane: one line a server, in order, as many at a time as there are credits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Bytes, Counters, Slot, Ticket
from hpcps.comm.layout import Layout, ShardRoom
from hpcps.comm.plane import Plane

NOTHING = np.zeros(0, np.uint8)


class Channel(SimpleNamespace):
    """The part of a channel that pushes use."""

    def __init__(self) -> None:
        super().__init__(counters=Counters(), rank=9)

    def finish(self, ticket: Ticket) -> None:
        ticket.done = True


class RecordingPlane(Plane):
    """Keeps what was sent; the test gives slots and payloads back."""

    def __init__(self, *, num_servers: int, num_slots: int) -> None:
        super().__init__(Channel())  # type: ignore[arg-type]
        self.sent: list[tuple[int, int, int, bytes]] = []
        self.credits: dict[tuple[int, int], int] = {}
        self.held: set[tuple[int, int]] = set()
        self.num_asked = 0
        room = ShardRoom(server=0, num_bytes=8, head_bytes=64)
        servers = tuple(range(num_servers))
        layout = Layout(servers=servers, workers=(num_servers,), shards=(room,), num_slots=num_slots, num_buffers=2)
        list(self.open(layout, Ticket()))

    def open(self, layout: Layout, ticket: Ticket) -> Operation:
        self._open_lines(layout)
        yield True

    def close(self) -> Operation:
        yield True

    def look(self) -> bool:
        return False

    def pull(self, key: int, version: int, out: Bytes, ticket: Ticket) -> Operation:
        yield True

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
