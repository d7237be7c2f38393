"""What the coordinator's runtime sends whom when shards move, and until when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcps.config import RoutingConfig, RunConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Roles, Route, Shard
from hpcps.protocol.control import ControlMessage, Done, DrainTo, Move, Moved, Register, RouteChange, ServerFacts
from hpcps.protocol.control_json import decode_control
from hpcps.runtime.coordination import Coordination
from hpcps.runtime.metrics import EventLog

ROLES = Roles(servers=(0, 1, 2), workers=(3, 4))
ROUTE = Route(
    epoch=0,
    num_servers=3,
    shards=tuple(
        Shard(key=key, server=server, dtype="float32", begin=4 * key, numel=4, pieces=(), room=room)
        for key, (server, room) in enumerate([(0, 0), (0, 1), (1, 0)])
    ),
)
FACTS = [ServerFacts(server=server, bytes_per_s=1e9, memory_bytes=0) for server in range(3)]


class Bench:
    """A coordination whose messages are kept."""

    def __init__(self, roles: Roles = ROLES) -> None:
        self.sent: list[tuple[int, ControlMessage]] = []
        channel = SimpleNamespace(rank=0, send=lambda rank, data: self.sent.append((rank, decode_control(data))))
        config = RunConfig(server_num=len(roles.servers), routing=RoutingConfig(spare_frac=2.0))
        events = EventLog(None, rank=0, role="server")
        self.coordination = Coordination(channel, config, roles=roles, events=events)  # type: ignore[arg-type]

    def open(self) -> None:
        for facts in FACTS:
            assert not self.coordination.has_facts
            self.coordination.on_message(facts)
        assert self.coordination.has_facts
        self.coordination.open(ROUTE, (3, 3, 3))

    def take(self) -> list[tuple[int, ControlMessage]]:
        sent, self.sent = self.sent, []
        return sent


def moved(move: Move) -> Moved:
    return Moved(key=move.key, epoch=move.epoch, server=move.target, num_bytes=64, seconds=0.5)


def test_moves_go_to_the_giver_and_changes_to_the_workers() -> None:
    bench = Bench()
    bench.open()
    coordination = bench.coordination
    assert coordination.at_rest
    coordination.on_message(DrainTo(rank=3, servers=[2]))
    own = coordination.take_own_moves()
    assert [move.key for move in own] == [0, 1], "two at once, both of this server"
    assert (coordination.take_own_moves(), bench.take(), coordination.at_rest) == ([], [], False)
    coordination.on_message(moved(own[0]))
    sent = bench.take()
    assert [(rank, type(message)) for rank, message in sent] == [(3, RouteChange), (4, RouteChange), (1, Move)]
    change, last = sent[0][1], sent[2][1]
    assert change == sent[1][1] == RouteChange(epoch=own[0].epoch, keys=[0], servers=[2], rooms=[own[0].room])
    assert isinstance(last, Move)
    assert (last.key, last.target) == (2, 2)
    coordination.on_message(moved(own[1]))
    assert not coordination.at_rest
    coordination.on_message(moved(last))
    assert coordination.at_rest


def test_no_move_begins_once_a_worker_is_done() -> None:
    bench = Bench()
    bench.open()
    coordination = bench.coordination
    coordination.on_message(DrainTo(rank=3, servers=[2]))
    moves = [*coordination.take_own_moves(), *(message for _, message in bench.take() if isinstance(message, Move))]
    assert len(moves) == 2
    coordination.on_done(Done(rank=4))
    for move in moves:
        coordination.on_message(moved(move))
    assert coordination.at_rest, "the third shard stays"
    assert coordination.take_own_moves() == []
    assert {rank for rank, _ in bench.take()} == {3}, "who is done needs no route"
    coordination.on_message(DrainTo(rank=3, servers=[0]))
    assert bench.take() == []
    assert coordination.at_rest


def test_news_of_a_route_that_there_is_not_are_refused() -> None:
    bench = Bench()
    with pytest.raises(ProtocolError, match="cannot accept DrainTo: there is no route between 3 servers yet"):
        bench.coordination.on_message(DrainTo(rank=3, servers=[2]))


def test_a_single_server_needs_no_facts() -> None:
    bench = Bench(Roles(servers=(0,), workers=(1,)))
    assert bench.coordination.has_facts
    bench.coordination.open(Route(epoch=0, num_servers=1, shards=()), (0,))
    with pytest.raises(ProtocolError, match="cannot accept Moved: there is no route between 1 servers"):
        bench.coordination.on_message(Moved(key=0, epoch=1, server=0, num_bytes=0, seconds=0.0))


def test_what_is_no_business_of_a_coordinator_is_refused() -> None:
    message = Register(rank=3, digest="", route="", tensors="", rule="")
    with pytest.raises(ProtocolError, match="cannot accept Register on a server"):
        Bench().coordination.on_message(message)
