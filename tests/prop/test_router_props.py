"""The router under any order of loads, wishes and news: every shard is in one place, no room holds two."""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcps.config import RoutingConfig, RunConfig
from hpcps.plan import Route, TensorSpec
from hpcps.policy import PlaceShards
from hpcps.protocol.control import DrainTo, Move, Moved, RouteChange, ServerFacts, ServerLoad
from hpcps.protocol.router import MOST_UNDER_WAY, Router

STEPS = 20


class Routing(RuleBasedStateMachine):
    """Servers as the messages make them, beside the router's own picture."""

    router: Router
    held: dict[int, tuple[int, int]]
    """Server and room of every shard, by the messages alone."""
    under_way: dict[int, tuple[int, Move]]
    worker_route: Route

    @initialize(
        num_shards=st.integers(1, 24),
        num_servers=st.integers(1, 4),
        pins=st.lists(st.integers(0, 3), max_size=3),
        spare=st.integers(0, 8),
        hold=st.integers(0, 3),
        first=st.integers(1, 4),
    )
    def start(self, num_shards: int, num_servers: int, pins: list[int], spare: int, hold: int, first: int) -> None:
        tensors = [TensorSpec(name="w", numel=256 * num_shards, dtype="float32", param_group=0)]
        tensors += [
            TensorSpec(name="p", numel=256, dtype="float32", param_group=0, server=pin % num_servers) for pin in pins
        ]
        servers = tuple(range(min(first, num_servers)))
        route = PlaceShards(num_servers, shard_bytes=1024, servers=servers).decide(tensors)
        self.num_servers = num_servers
        self.num_rooms = [len(route.of_server(server)) + spare for server in range(num_servers)]
        self.router = Router(
            RunConfig(routing=RoutingConfig(servers=servers, hold_intervals=hold)),
            route,
            facts=[ServerFacts(server=server, bytes_per_s=1e6, memory_bytes=0) for server in range(num_servers)],
            num_rooms=self.num_rooms,
            report=lambda name, fields: None,
        )
        self.worker_route = route
        self.allowed = set(servers)
        self.held = {shard.key: (shard.server, shard.room) for shard in route.shards}
        self.under_way = {}
        self.epoch = 0

    def take(self, messages: list[tuple[int, Move]]) -> None:
        """Orders to servers: each goes to the one that has the shard, into a room that is free."""
        for server, move in messages:
            assert self.held[move.key][0] == server != move.target
            assert move.key not in self.under_way
            assert 0 <= move.room < self.num_rooms[move.target]
            taken = [*self.held.values(), *((each.target, each.room) for _, each in self.under_way.values())]
            assert (move.target, move.room) not in taken
            assert not self.worker_route.shards[move.key].pinned
            assert move.target in self.allowed
            assert move.epoch == self.epoch + 1
            self.epoch = move.epoch
            self.under_way[move.key] = (server, move)

    @rule(server=st.integers(0, 3), byte_ns=st.sampled_from([1e3, 1.2e3, 4e3]), rare=st.booleans())
    def load(self, server: int, byte_ns: float, rare: bool) -> None:
        server %= self.num_servers
        keys = [key for key, (holder, _) in sorted(self.held.items()) if holder == server]
        if not keys:
            return
        raw_bytes = sum(self.worker_route.shards[key].num_bytes for key in keys) * STEPS
        self.take(
            self.router.on_load(
                ServerLoad(
                    server=server,
                    version=0,
                    seconds=1.0,
                    busy_s=byte_ns * 1e-9 * raw_bytes,
                    cpu_s=1.0,
                    raw_bytes=raw_bytes,
                    keys=keys,
                    pushes=[1 if rare and key % 3 == 0 else STEPS for key in keys],
                    queue=0,
                    memory_bytes=0,
                    num_pushes=1,
                    num_late=0,
                    offset_s=0.0,
                    staleness=0.0,
                    agreement=1.0,
                )
            )
        )

    @rule(slow=st.integers(0, 3))
    def look_twice(self, slow: int) -> None:
        """Two looks that agree, so that something moves."""
        for _ in range(2):
            for server in range(self.num_servers):
                self.load(server, 8e3 if server == slow else 1e3, False)

    @rule(servers=st.sets(st.integers(0, 3), min_size=1))
    def drain(self, servers: set[int]) -> None:
        self.allowed = {server % self.num_servers for server in servers}
        self.take(self.router.on_drain(DrainTo(rank=9, servers=sorted(self.allowed))))

    @precondition(lambda self: self.under_way)
    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        key = sorted(self.under_way)[pick % len(self.under_way)]
        _, move = self.under_way.pop(key)
        self.held[key] = (move.target, move.room)
        changes, messages = self.router.on_moved(
            Moved(key=key, epoch=move.epoch, server=move.target, num_bytes=1, seconds=0.0)
        )
        for change in changes:
            self.tell_workers(change)
        self.take(messages)

    def tell_workers(self, change: RouteChange) -> None:
        for key, server, room in zip(change.keys, change.servers, change.rooms, strict=True):
            self.worker_route = self.worker_route.moved(key, server=server, room=room, epoch=change.epoch)

    @rule()
    def finish_all(self) -> None:
        """Everything that is under way arrives: then no server that shall be empty could have been emptied further."""
        while self.under_way:
            self.finish(0)
        assert self.router.at_rest
        left = [shard for shard in self.router.route.shards if shard.server not in self.allowed and not shard.pinned]
        rooms_left = sum(
            self.num_rooms[server] - sum(holder == server for holder, _ in self.held.values())
            for server in self.allowed
        )
        assert not left or rooms_left == 0

    @invariant()
    def all_pictures_agree(self) -> None:
        if not hasattr(self, "held"):
            return
        route = self.router.route
        assert {shard.key: (shard.server, shard.room) for shard in route.shards} == self.held
        assert self.worker_route.shards == route.shards
        assert len(set(self.held.values())) == len(self.held)
        assert len(self.under_way) <= MOST_UNDER_WAY
        assert route.epoch <= self.epoch
        assert self.router.at_rest or self.under_way
        epochs = [shard.epoch for shard in route.shards if shard.epoch]
        assert len(set(epochs)) == len(epochs)
        assert all(
            dataclasses.replace(shard, server=0, room=0, epoch=0)
            == dataclasses.replace(same, server=0, room=0, epoch=0)
            for shard, same in zip(route.shards, self.worker_route.shards, strict=True)
        )


Routing.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=40, derandomize=True)
TestRouting = Routing.TestCase
