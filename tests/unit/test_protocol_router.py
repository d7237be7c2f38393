"""The router by tables: loads and news of moves in, messages out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hpcps.config import RoutingConfig, RunConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Route, TensorSpec
from hpcps.policy import PlaceShards
from hpcps.protocol.control import DrainTo, Move, Moved, RouteChange, ServerFacts, ServerLoad
from hpcps.protocol.router import Router

SHARD_BYTES = 1 << 20
STEPS = 50


def make_route(num_servers: int, num_shards: int, *, servers: Sequence[int] = (), pins: Sequence[int] = ()) -> Route:
    tensors = [TensorSpec(name="w", numel=num_shards * SHARD_BYTES // 4, dtype="float32", param_group=0)]
    tensors += [
        TensorSpec(name="p", numel=SHARD_BYTES // 4, dtype="float32", param_group=0, server=pin) for pin in pins
    ]
    return PlaceShards(num_servers, shard_bytes=SHARD_BYTES, servers=servers).decide(tensors)


class Cluster:
    """A router and what it is told and tells; loads follow from rates in ns a byte."""

    def __init__(
        self,
        route: Route,
        *,
        rooms: int = 99,
        routing: RoutingConfig | None = None,
        rates: Sequence[float] = (),
        memory: int = 0,
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        num_servers = route.num_servers
        self.router = Router(
            replace(RunConfig(), server_num=num_servers, routing=routing or RoutingConfig()),
            route,
            facts=[
                ServerFacts(server=server, bytes_per_s=rates[server] if rates else 1e9, memory_bytes=memory)
                for server in reversed(range(num_servers))
            ],
            num_rooms=[rooms] * num_servers,
            report=lambda name, fields: self.events.append((name, fields)),
        )

    def load(self, server: int, byte_ns: float, /, **fields: Any) -> list[tuple[int, Move]]:
        keys = [shard.key for shard in self.router.route.of_server(server)]
        raw_bytes = len(keys) * SHARD_BYTES * STEPS
        load = ServerLoad(
            server=server,
            version=0,
            seconds=0.1 * STEPS,
            busy_s=byte_ns * 1e-9 * raw_bytes,
            cpu_s=1.0,
            raw_bytes=raw_bytes,
            keys=keys,
            pushes=[STEPS] * len(keys),
            queue=0,
            memory_bytes=0,
            num_pushes=len(keys) * STEPS,
            num_late=0,
            offset_s=0.0,
            staleness=0.0,
            agreement=1.0,
        )
        return self.router.on_load(replace(load, **fields))

    def look(self, *byte_ns: float) -> list[tuple[int, Move]]:
        """All servers that hold shards report."""
        messages = []
        for server, rate in enumerate(byte_ns):
            if self.router.route.of_server(server):
                messages += self.load(server, rate)
        return messages

    def finish(self, move: Move) -> tuple[list[RouteChange], list[tuple[int, Move]]]:
        return self.router.on_moved(
            Moved(key=move.key, epoch=move.epoch, server=move.target, num_bytes=4 * SHARD_BYTES, seconds=0.01)
        )

    def finish_all(self, messages: list[tuple[int, Move]]) -> int:
        """Finish moves until none is under way; returns how many there were."""
        waiting, count = list(messages), 0
        while waiting:
            _, move = waiting.pop(0)
            waiting += self.finish(move)[1]
            count += 1
        assert self.router.at_rest
        return count

    def counts(self) -> list[int]:
        return [len(self.router.route.of_server(server)) for server in range(self.router.route.num_servers)]


def test_a_slow_server_is_relieved_step_by_step() -> None:
    cluster = Cluster(make_route(2, 8))
    assert [cluster.look(1, 1) for _ in range(3)] == [[], [], []]
    assert cluster.look(1, 4) == []  # it might have been frozen for a moment
    assert cluster.load(0, 1) == []  # not all have reported
    messages = cluster.load(1, 4)
    assert messages == [(1, Move(key=1, epoch=1, target=0, room=4)), (1, Move(key=3, epoch=2, target=0, room=5))]
    assert not cluster.router.at_rest
    assert cluster.router.route.shards[1].server == 1  # until it has arrived
    # the second is there first
    change, further = cluster.finish(messages[1][1])
    assert change == [RouteChange(epoch=2, keys=[3], servers=[0], rooms=[5])]
    assert further == [(1, Move(key=7, epoch=3, target=0, room=6))]
    shard = cluster.router.route.shards[3]
    assert (shard.server, shard.room, shard.epoch, cluster.router.route.epoch) == (0, 5, 2, 2)
    change, further = cluster.finish(messages[0][1])
    assert change == [RouteChange(epoch=1, keys=[1], servers=[0], rooms=[4])]
    assert further == [] and not cluster.router.at_rest
    assert cluster.finish_all([(1, Move(key=7, epoch=3, target=0, room=6))]) == 1
    assert (cluster.counts(), cluster.router.route.epoch) == ([7, 1], 3)
    (route_event, route_fields), *moved = cluster.events
    assert (route_event, route_fields["keys"], route_fields["sources"]) == ("route", [1, 3, 7], [1, 1, 1])
    assert (route_fields["servers"], route_fields["num_bytes"], route_fields["look"]) == ([0] * 3, 3 * SHARD_BYTES, 5)
    assert route_fields["reason"].startswith("server 1 takes 16.8 ms of a step of 100.0 ms")
    assert moved[:2] == [
        ("moved", {"epoch": 2, "key": 3, "server": 0, "num_bytes": 4 * SHARD_BYTES, "seconds": 0.01}),
        ("moved", {"epoch": 1, "key": 1, "server": 0, "num_bytes": 4 * SHARD_BYTES, "seconds": 0.01}),
    ]


def test_no_more_than_two_are_under_way_and_rooms_come_free_late() -> None:
    cluster = Cluster(make_route(2, 16), rooms=14)
    for _ in range(2):
        messages = cluster.look(1, 4)
    assert [move.room for _, move in messages] == [8, 9]
    rooms, seen = [], list(messages)
    while seen:
        _, move = seen.pop(0)
        rooms.append(move.room)
        _, further = cluster.finish(move)
        assert len(further) <= 1
        seen += further
    assert rooms == [8, 9, 10, 11, 12]
    assert cluster.counts() == [13, 3]
    # what left has given its rooms back
    for _ in range(9):
        messages = cluster.look(4, 1)
        if messages:
            break
    assert [move.room for _, move in messages] == [0, 1]


def test_no_look_decides_while_shards_are_under_way() -> None:
    cluster = Cluster(make_route(2, 16))
    cluster.look(1, 4)
    messages = cluster.look(1, 4)
    assert len(messages) == 2
    assert cluster.look(9, 1) == cluster.look(9, 1) == []
    assert len([event for event, _ in cluster.events if event == "route"]) == 1
    assert cluster.finish_all(messages) == 5


def test_a_shard_that_moved_stays_for_three_looks() -> None:
    cluster = Cluster(make_route(2, 4), routing=RoutingConfig(hold_intervals=3))
    cluster.look(1, 4)
    assert cluster.finish_all(cluster.look(1, 4)) == 1
    moved = cluster.events[0][1]["keys"]
    quiet = 0
    while not (messages := cluster.look(9, 1)):
        quiet += 1
    assert quiet == 1  # the other ones may go at once
    assert moved[0] not in {move.key for _, move in messages}


def test_draining_empties_a_server_and_adding_one_relieves_the_others() -> None:
    cluster = Cluster(make_route(3, 12, servers=(0, 1)), routing=RoutingConfig(servers=(0, 1)))
    assert cluster.counts() == [6, 6, 0]
    for _ in range(4):
        assert cluster.look(1, 1) == []  # the third may not hold shards yet
    messages = cluster.router.on_drain(DrainTo(rank=5, servers=[0, 1, 2]))
    assert {move.target for _, move in messages} == {2}
    cluster.finish_all(messages)
    assert cluster.counts() == [4, 4, 4]
    cluster.events.clear()
    assert cluster.finish_all(cluster.router.on_drain(DrainTo(rank=5, servers=[2, 0]))) == 4
    assert cluster.counts() == [6, 0, 6]
    assert cluster.events[0][1]["reason"] == "only servers [0, 2] shall hold shards; to [0, 2]"
    for _ in range(4):
        assert cluster.look(1, 1, 1) == []


def test_what_was_found_slow_is_relieved_further_on_less_proof() -> None:
    cluster = Cluster(make_route(2, 64))
    for _ in range(4):
        cluster.look(1, 1)
    assert cluster.look(1, 2.5) == []
    assert cluster.finish_all(cluster.look(1, 2.5)) == 14
    assert cluster.look(1, 3.2) == []
    assert cluster.finish_all(cluster.look(1, 3.2)) == 3  # far too little to tell, were it the first that is heard
    assert cluster.counts() == [49, 15]


def test_a_change_within_an_interval_is_not_mistaken_for_a_lesser_one() -> None:
    cluster = Cluster(make_route(2, 64))
    for _ in range(4):
        cluster.look(1, 1)
    assert cluster.look(1, 2.5) == []
    assert cluster.finish_all(cluster.look(1, 4)) == 19
    assert [cluster.look(1, 4) for _ in range(9)] == [[]] * 9


def test_it_is_not_known_for_long_which_server_is_slow() -> None:
    cluster = Cluster(make_route(2, 64))
    for _ in range(2):
        cluster.finish_all(cluster.look(1, 4))
    seen = []
    for _ in range(5):
        seen.append(cluster.router._facts().unequal)
        cluster.look(1, 4)
    assert seen == [((1, 0),)] * 4 + [()]


def test_draining_needs_no_look() -> None:
    cluster = Cluster(make_route(3, 9), rates=(1e9, 1e9, 4e9))
    assert cluster.finish_all(cluster.router.on_drain(DrainTo(rank=5, servers=[1, 2]))) == 3
    assert cluster.counts() == [0, 3, 6]  # by what they said of themselves


def test_another_word_while_shards_are_under_way() -> None:
    cluster = Cluster(make_route(3, 18))
    messages = cluster.router.on_drain(DrainTo(rank=5, servers=[0, 1]))
    assert [(move.key, move.target) for _, move in messages] == [(2, 0), (5, 1)]
    assert cluster.router.on_drain(DrainTo(rank=5, servers=[1, 2])) == []  # two are on their way
    first, further = cluster.finish(messages[0][1])
    assert (first[0].servers, further) == ([0], [])  # the others of server 2 stay now
    _, further = cluster.finish(messages[1][1])
    assert {source for source, _ in further} == {0}
    assert cluster.finish_all(further) == 7
    assert cluster.counts()[0] == 0


def test_pinned_shards_and_those_without_room_stay() -> None:
    cluster = Cluster(make_route(2, 6, pins=[1]), rooms=5)
    messages = cluster.router.on_drain(DrainTo(rank=5, servers=[0]))
    assert cluster.finish_all(messages) == 1
    assert cluster.counts() == [5, 2]
    assert [fields["stuck"] for name, fields in cluster.events if name == "route"] == [[4]]
    cluster.events.clear()
    assert cluster.look(1, 1) == [] == cluster.look(1, 1)
    assert cluster.events == []  # told once
    assert cluster.finish_all(cluster.router.on_drain(DrainTo(rank=5, servers=[0, 1]))) == 1  # balance is back
    assert cluster.events[0][1]["stuck"] == []


def test_a_server_without_news_keeps_its_rate() -> None:
    cluster = Cluster(make_route(2, 8))
    for _ in range(3):
        cluster.look(1, 1)
    for _ in range(3):
        assert cluster.load(0, 1) == []
        assert cluster.load(1, 9, pushes=[1, 0, 0, 0]) == []  # too few to tell
        assert cluster.load(0, 1) == []
        assert cluster.load(1, 9, busy_s=0.0) == []


def test_what_came_within_an_interval_is_not_taken_for_rare() -> None:
    cluster = Cluster(make_route(2, 8))
    cluster.look(1, 4)
    cluster.finish_all(cluster.look(1, 4))
    partial = [STEPS if shard.epoch == 0 else 3 for shard in cluster.router.route.of_server(0)]
    cluster.load(0, 1, pushes=partial)
    assert all(state.pushes_per_step == 1.0 for state in cluster.router._facts().shards)
    cluster.load(0, 1, pushes=[STEPS // 2, *[STEPS] * 6])
    assert cluster.router._facts().shards[0].pushes_per_step == 0.5


def test_a_server_that_never_worked_is_as_much_off_its_word_as_the_others() -> None:
    cluster = Cluster(make_route(3, 12, servers=(0, 1)), rates=(1e9, 1e9, 2e9))
    for _ in range(2):
        cluster.look(3, 3)
    rate = cluster.router._facts().servers[2]
    assert rate.byte_s == pytest.approx(1.5e-9)


def test_memory_is_what_was_told_last() -> None:
    cluster = Cluster(make_route(2, 8), memory=8 * SHARD_BYTES)
    cluster.look(1, 4)
    assert cluster.load(0, 1) == []
    messages = cluster.load(1, 4)
    assert cluster.finish_all(messages) == 1
    cluster.load(0, 1, memory_bytes=77)
    assert cluster.router._facts().servers[0].memory_bytes == 77


# what is wrong, facts of servers, rates, rooms, error
WRONG = [
    ([0], 1e9, [9, 9], r"cannot route 2 servers: got facts of \[0\]"),
    ([0, 0], 1e9, [9, 9], r"got facts of \[0, 0\]"),
    ([0, 1], 0.0, [9, 9], r"with rates \[0.0, 0.0\]"),
    ([0, 1], float("inf"), [9, 9], r"with rates \[inf, inf\]"),
    ([0, 1], 1e9, [9], "and 1 numbers of rooms; run the same hpcps"),
    ([0, 1], 1e9, [2, 1], "cannot route shard 3: room 1 of server 1 is taken, or beyond its 1"),
]


@pytest.mark.parametrize(("servers", "rate", "rooms", "error"), WRONG)
def test_a_senseless_start_is_refused(servers: list[int], rate: float, rooms: list[int], error: str) -> None:
    facts = [ServerFacts(server=server, bytes_per_s=rate, memory_bytes=0) for server in servers]
    with pytest.raises(ProtocolError, match=error):
        Router(RunConfig(), make_route(2, 4), facts=facts, num_rooms=rooms, report=lambda name, fields: None)


def test_two_shards_in_one_room_are_refused() -> None:
    route = make_route(1, 2).moved(1, server=0, room=0, epoch=0)
    facts = [ServerFacts(server=0, bytes_per_s=1e9, memory_bytes=0)]
    with pytest.raises(ProtocolError, match="cannot route shard 1: room 0 of server 0 is taken"):
        Router(RunConfig(), route, facts=facts, num_rooms=[9], report=lambda name, fields: None)


def test_messages_that_make_no_sense_are_refused() -> None:
    cluster = Cluster(make_route(2, 8))
    with pytest.raises(ProtocolError, match=r"cannot accept a load: got servers \[2\], need 0 to 1"):
        cluster.load(0, 1, server=2)
    with pytest.raises(
        ProtocolError, match=r"cannot accept a load of server 0: 1 counts of pushes for shards \[0, 8\]"
    ):
        cluster.load(0, 1, keys=[0, 8], pushes=[1])
    with pytest.raises(ProtocolError, match=r"for shards \[-1\], need one each of 0 to 7"):
        cluster.load(0, 1, keys=[-1], pushes=[1])
    with pytest.raises(ProtocolError, match=r"cannot accept a choice of servers: got servers \[0, 7\], need 0 to 1"):
        cluster.router.on_drain(DrainTo(rank=3, servers=[0, 7]))
    with pytest.raises(ProtocolError, match="cannot accept a choice of servers: got none"):
        cluster.router.on_drain(DrainTo(rank=3, servers=[]))
    move = Move(key=1, epoch=1, target=0, room=4)
    with pytest.raises(ProtocolError, match=r"shard 1 moved to server 0 in epoch 1: under way are \[\]") as caught:
        cluster.finish(move)
    assert caught.value.key == 1
    cluster.look(1, 4)
    messages = cluster.look(1, 4)
    for wrong in (replace(messages[0][1], epoch=9), replace(messages[0][1], target=1)):
        with pytest.raises(ProtocolError, match=r"under way are \[1, 3\]"):
            cluster.finish(wrong)
