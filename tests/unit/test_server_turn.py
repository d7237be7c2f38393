"""What a server's turn tells its state machine of the frames that have come with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcps.comm.channel import Arrival, Control, Event, Parcel, Slot
from hpcps.config import RunConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Roles
from hpcps.protocol.control import EndOfData
from hpcps.protocol.control_json import encode_control
from hpcps.runtime.metrics import EventLog
from hpcps.runtime.parcels import pack_frame
from hpcps.runtime.server_loop import ServerLoop

ROLES = Roles(servers=(0, 1), workers=(2, 3))
END = Control(2, encode_control(EndOfData(generation=0, group=0, clock=1)))
ARRIVAL = Arrival(Slot(2, 0, 1), b"", SimpleNamespace(size=0))  # type: ignore[arg-type]
PARCEL = Parcel(0, pack_frame(b""), SimpleNamespace(size=0))  # type: ignore[arg-type]


def loop_of(events: list[Event]) -> ServerLoop:
    channel = SimpleNamespace(rank=1, take=lambda: events, send=lambda rank, data: None)
    return ServerLoop(
        channel,  # type: ignore[arg-type]
        RunConfig(server_num=2),
        roles=ROLES,
        make_rule=lambda *_: None,  # type: ignore[arg-type,return-value]
        events=EventLog(None, rank=1, role="server"),
    )


@pytest.mark.parametrize(
    ("events", "queued"),
    [([END, ARRIVAL], [1, 0]), ([END, PARCEL, END, ARRIVAL], [2, 1, 1, 0]), ([ARRIVAL, END], [0, 0])],
)
def test_frames_of_the_same_turn_are_queued_from_its_start(events: list[Event], queued: list[int]) -> None:
    loop = loop_of(events)
    protocol = SimpleNamespace(num_queued=0, next_deadline_s=None, version=lambda key: 0)
    store = SimpleNamespace(settle=lambda: None, totals=lambda codec: [], newest=-1, keys=())
    migration = SimpleNamespace(poll=lambda: None)
    loop._plane = SimpleNamespace(protocol=protocol, store=store, migration=migration)  # type: ignore[assignment]
    seen: list[int] = []
    protocol.on_end_of_data = lambda *_, **__: seen.append(protocol.num_queued) or []
    loop._on_frame = lambda *_: seen.append(protocol.num_queued)  # type: ignore[method-assign]
    loop.turn()
    assert seen == queued


def test_a_shard_before_there_is_a_plan_is_refused() -> None:
    loop = loop_of([Parcel(0, b"\x01{}", SimpleNamespace(size=0))])  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="cannot take a shard from rank 0: rank 1 has no plan yet; run the same"):
        loop.turn()
