"""Two servers' arrays and moves over a channel that only notes what it is asked: order, slots, and what is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hpcps.comm.channel import Slot, Ticket
from hpcps.config import StalenessConfig, WindowConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Piece, Route, Shard, TensorSpec
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify
from hpcps.protocol.control import Move
from hpcps.protocol.messages import HEADER_BYTES, FrameShape, PushHeader
from hpcps.protocol.messages import Kind as FrameKind
from hpcps.protocol.server import ServerProtocol
from hpcps.runtime.load import LoadMeter
from hpcps.runtime.migration import Migration
from hpcps.runtime.parcels import Kind, unpack_head, unpack_shard
from hpcps.runtime.server_stats import ServerStats
from hpcps.runtime.shard_store import ShardArrays, ShardStore
from hpcps.update.rule import Rule, RuleSpec
from hpcps.update.sgd import NumpySgd

NUMEL = 4
TENSORS = (TensorSpec(name="t", numel=2 * NUMEL, dtype="float32", param_group=0),)
SHARDS = tuple(
    Shard(
        key=key,
        server=key,
        dtype="float32",
        begin=NUMEL * key,
        numel=NUMEL,
        pieces=(Piece(tensor=0, start=NUMEL * key, stop=NUMEL * (key + 1), offset=0),),
    )
    for key in range(2)
)
ROUTE = Route(epoch=0, num_servers=2, shards=SHARDS)
SPEC = RuleSpec(
    kind="sgd",
    option_names=("lr", "momentum", "dampening", "weight_decay"),
    options=((0.5, 0.9, 0.0, 0.0),),
    flags=((),),
)
SHAPE = FrameShape(num_options=4, num_pieces=1, payload_bytes=4 * NUMEL)


def make_rule(shard: Shard) -> Rule:
    return NumpySgd(shard, SPEC, tensors=TENSORS)


class NotingChannel:
    """Does nothing at once; the test says when a parcel has left."""

    shares_memory = False

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[Any, ...]] = []
        self.parcels: list[tuple[int, bytes, np.ndarray, Ticket]] = []

    def release(self, slot: Slot) -> None:
        self.calls.append(("release", slot.seq))

    def publish(self, key: int, version: int, values: np.ndarray) -> Ticket:
        self.calls.append(("publish", key, version, values.tolist()))
        ticket = Ticket()
        ticket.done = True
        return ticket

    def retire(self, key: int) -> Ticket:
        self.calls.append(("retire", key))
        return Ticket()

    def host(self, key: int, room: int) -> None:
        self.calls.append(("host", key, room))

    def parcel(self, server: int, head: bytes, body: np.ndarray) -> Ticket:
        self.calls.append(("parcel", server, unpack_head(head)[0].name))
        self.parcels.append((server, head, body, Ticket()))
        return self.parcels[-1][3]


@dataclass
class Server:
    """One server without its loop."""

    index: int
    stats: ServerStats = field(default_factory=ServerStats)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.channel = NotingChannel(self.index)
        self.store = ShardStore(
            self.channel,  # type: ignore[arg-type]
            num_options=4,
            stats=self.stats,
            meter=LoadMeter(self.index, interval_steps=1000),
        )
        own = ROUTE.of_server(self.index)
        for shard in own:
            self.store.add(shard, make_rule(shard))
        self.protocol = ServerProtocol(
            own,
            window=WindowConfig(quorum_frac=1.0),
            staleness=StalenessConfig(decay="none"),
            num_workers=4,
            adaptive=False,
        )
        self.migration = Migration(
            self.channel,  # type: ignore[arg-type]
            route=ROUTE,
            server=self.index,
            protocol=self.protocol,
            store=self.store,
            make_rule=make_rule,
            stats=self.stats,
            clock=lambda: self.now_s,
        )

    def frame(self, head: bytes, payload: np.ndarray, slot: Slot | None) -> None:
        """A frame, as the loop takes it."""
        header = PushHeader.unpack(head[:HEADER_BYTES])
        if self.protocol.holds(header.key):
            frame = self.store.frame(header, head, payload, slot, shape=SHAPE)
            self.do(self.protocol.on_push(header, frame, now_s=self.now_s))
        else:
            self.migration.send_on(header.key, head, payload, slot)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Load):
                self.store.load(action)
            elif isinstance(action, Accumulate):
                self.store.accumulate(action)
            elif isinstance(action, Close):
                self.store.close(action)
            elif not isinstance(action, Notify):
                self.store.refuse(action)


def frame(
    clock: int,
    *,
    group: int = 0,
    groups: int = 1,
    key: int = 0,
    value: float = 1.0,
    rate: float = 0.5,
    presence: bytes = b"\1",
) -> tuple[bytes, np.ndarray]:
    header = PushHeader(
        kind=FrameKind.GRADIENT if clock else FrameKind.INIT,
        key=key,
        route_epoch=0,
        generation=0,
        group=group,
        num_groups=groups,
        sender=2 + group,
        clock=clock,
        since_clock=1,
        base_version=0,
        weight=1.0 if clock else 0.0,
        share_frac=1.0 / groups,
        numel=NUMEL,
        meta_bytes=SHAPE.meta_bytes,
        payload_bytes=4 * NUMEL,
    )
    payload = np.full(NUMEL, value, np.float32).view(np.uint8)
    return header.pack() + SHAPE.pack_meta((rate, *SPEC.options[0][1:]), presence), payload


def slot(seq: int) -> Slot:
    return Slot(2, seq % 2, seq)


def loaded() -> tuple[Server, Server]:
    servers = Server(0), Server(1)
    for key, server in enumerate(servers):
        server.frame(*frame(0, key=key, value=10.0), slot(0))
        server.channel.calls.clear()
    return servers


def deliver(source: Server, target: Server) -> list[Any]:
    """Parcels arrive in order; returns what the coordinator is told."""
    told = []
    sent, source.channel.parcels = source.channel.parcels, []
    for server, head, body, ticket in sent:
        assert server == target.index
        kind, rest = unpack_head(head)
        if kind is Kind.FRAME:
            target.frame(rest, body.copy(), None)
        else:
            moved, actions = target.migration.take(rest, body.copy(), began_s=target.now_s)
            target.do(actions)
            told.append(moved)
        ticket.done = True
    return told


MOVE = Move(key=0, epoch=3, target=1, room=4)


def test_a_shard_moves_with_its_sum_its_momentum_and_its_values() -> None:
    """The open window has a gradient at half the rate; what comes for it afterwards has none and leaves the rate."""
    giver, taker = loaded()
    alone, _ = loaded()
    for server in (giver, alone):
        for clock, group, rate in ((1, 0, 0.5), (1, 1, 0.5), (2, 0, 0.25)):
            server.frame(*frame(clock, group=group, groups=2, value=1.0 + clock + group, rate=rate), slot(clock))
    giver.now_s, taker.now_s = 7.5, 100.0
    giver.migration.give(MOVE, began_s=7.25)
    assert [call for call in giver.channel.calls if call[0] not in ("release", "publish")] == [
        ("retire", 0),
        ("parcel", 1, "SHARD"),
    ]
    assert not giver.protocol.holds(0)
    assert not giver.store.keys
    assert giver.store.newest == -1
    assert giver.migration.target(0) == 1
    [moved] = deliver(giver, taker)
    assert (moved.key, moved.epoch, moved.server, moved.seconds) == (0, 3, 1, 0.25)
    assert moved.num_bytes == giver.stats.moved_bytes > 2 * 4 * NUMEL
    values = [8.75] * NUMEL  # 10 - 0.5 * (2 + 3) / 2
    assert taker.channel.calls == [("host", 0, 4), ("publish", 0, 1, values)]
    for server in (taker, alone):
        server.frame(*frame(2, group=1, groups=2, value=0.0, presence=b"\0"), slot(9))
    # momentum 0.9 * 2.5 and the mean of 3 and 0
    assert taker.channel.calls[-1] == ("publish", 0, 2, pytest.approx([8.75 - 0.25 * 3.75] * NUMEL))
    assert taker.channel.calls[-1] == alone.channel.calls[-1]
    assert taker.channel.calls[-1][:3] == ("publish", 0, 2)
    assert giver.stats.pushed_weight + taker.stats.pushed_weight == 4.0
    assert giver.stats.applied_weight + taker.stats.applied_weight == 4.0
    assert giver.stats.num_moves == 1


def test_a_frame_keeps_its_slot_until_it_has_left() -> None:
    giver, taker = loaded()
    giver.frame(*frame(1, groups=2), slot(1))
    giver.frame(*frame(2, groups=2), slot(2))  # waits for the other group
    giver.channel.calls.clear()
    giver.migration.give(MOVE, began_s=0.0)
    giver.frame(*frame(3, groups=2), slot(3))
    # the first one is in the sum, so its slot is free before anything leaves
    assert giver.channel.calls == [
        ("release", 1),
        ("retire", 0),
        ("parcel", 1, "SHARD"),
        ("parcel", 1, "FRAME"),
        ("parcel", 1, "FRAME"),
    ]
    giver.migration.poll()
    assert len(giver.channel.calls) == 5
    giver.channel.parcels[2][3].done = True
    giver.migration.poll()
    assert giver.channel.calls[5:] == [("release", 3)]
    deliver(giver, taker)
    giver.migration.poll()
    giver.migration.poll()
    assert giver.channel.calls[5:] == [("release", 3), ("release", 2)]
    assert (giver.stats.num_pushes, giver.stats.num_relayed) == (1, 2)
    assert (taker.stats.num_pushes, taker.stats.num_relayed) == (2, 0)
    taker.frame(*frame(1, group=1, groups=2), slot(1))
    assert taker.protocol.version(0) == 1


def test_a_shard_that_comes_back_is_held_again() -> None:
    giver, taker = loaded()
    giver.migration.give(MOVE, began_s=0.0)
    deliver(giver, taker)
    taker.migration.give(Move(key=0, epoch=4, target=0, room=1), began_s=0.0)
    giver.frame(*frame(1), slot(1))  # goes round: the taker sends it back, after the shard
    back = taker.channel.parcels
    taker.channel.parcels = []
    deliver(giver, taker)
    taker.channel.parcels = back + taker.channel.parcels
    deliver(taker, giver)
    assert giver.migration.target(0) is None
    assert taker.migration.target(0) == 0
    assert giver.channel.calls[-1][:3] == ("publish", 0, 1)
    assert (giver.stats.num_pushes, giver.stats.num_relayed, taker.stats.num_relayed) == (1, 1, 1)


@pytest.mark.parametrize(
    "move", [MOVE, dataclasses.replace(MOVE, key=1, target=1), Move(key=0, epoch=1, target=2, room=0)]
)
def test_moves_of_what_is_not_here_are_refused(move: Move) -> None:
    giver, _ = loaded()
    if move is MOVE:
        giver.migration.give(move, began_s=0.0)
    with pytest.raises(ProtocolError, match=f"cannot give shard {move.key} to server {move.target}"):
        giver.migration.give(move, began_s=0.0)


def test_a_parcel_of_a_shard_that_is_here_is_refused() -> None:
    giver, taker = loaded()
    giver.migration.give(MOVE, began_s=0.0)
    _, head, body, _ = giver.channel.parcels[0]
    taker.migration.take(head[1:], body, began_s=0.0)
    with pytest.raises(ProtocolError, match=r"cannot take over shard 0: .* \[0, 1\] are here"):
        taker.migration.take(head[1:], body, began_s=0.0)


def test_a_parcel_of_no_shard_of_the_route_is_refused() -> None:
    giver, taker = loaded()
    giver.migration.give(MOVE, began_s=0.0)
    _, head, body, _ = giver.channel.parcels[0]
    with pytest.raises(ProtocolError, match="cannot take over shard 8: the route has 2 shards"):
        taker.migration.take(head[1:].replace(b'"key":0', b'"key":8'), body, began_s=0.0)


def test_arrays_that_do_not_fit_the_shard_are_refused() -> None:
    giver, taker = loaded()
    giver.migration.give(MOVE, began_s=0.0)
    _, head, body, _ = giver.channel.parcels[0]
    good = unpack_shard(head[1:], body).given
    shard = dataclasses.replace(SHARDS[0], server=1)
    values = np.zeros(NUMEL, np.float32)
    cases: list[tuple[ShardArrays, str]] = [
        (dataclasses.replace(good, arrays={}), "need values of 4 float32"),
        (dataclasses.replace(good, arrays={"values": values[1:]}), "need values of 4 float32"),
        (dataclasses.replace(good, arrays={"values": np.zeros(NUMEL)}), "need values of 4 float32"),
        (dataclasses.replace(good, arrays={"values": values, "other": values}), r"got \['other', 'values'\]"),
        (dataclasses.replace(good, presence=[]), "0 marks of presence"),
        (dataclasses.replace(good, arrays={"values": values, "sum": values[1:]}), "cannot go on from a sum"),
        (dataclasses.replace(good, arrays={"values": values, "rule/7/x": values}), "cannot restore an optimizer"),
    ]
    for given, message in cases:
        with pytest.raises(ProtocolError, match=message):
            taker.store.put_in(shard, make_rule(shard), given, version=1)
        assert list(taker.store.keys) == [1]
        assert taker.channel.calls == []
