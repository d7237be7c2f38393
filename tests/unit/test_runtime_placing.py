"""Where shards are, as a worker knows it: the facts that place them, and changes that fit the plan or are refused."""

from __future__ import annotations

import dataclasses

import pytest

from hpcps.config import CommConfig, CompressionConfig, RoutingConfig, RunConfig
from hpcps.errors import ConfigError, ProtocolError
from hpcps.plan import Roles, TensorSpec
from hpcps.protocol.control import RouteChange, ServerFacts
from hpcps.runtime.placing import check_servers, place_shards, rerouted, with_rules
from hpcps.runtime.wire import rooms_per_server

TENSORS = tuple(TensorSpec(name=f"t{index}", numel=256, dtype="float32", param_group=0) for index in range(6))
ROLES = Roles(servers=(0, 1, 2), workers=(3, 4))
ALONE = Roles(servers=(0,), workers=(0,))
CONFIG = RunConfig(comm=CommConfig(shard_bytes=1024))


def facts(*rates: float, memory_bytes: int = 0) -> dict[int, ServerFacts]:
    return {
        index: ServerFacts(server=index, bytes_per_s=rate, memory_bytes=memory_bytes)
        for index, rate in enumerate(rates)
    }


# rates, servers at first; shards of each server
PLACES: list[tuple[tuple[float, ...], tuple[int, ...], list[int]]] = [
    ((1e9, 1e9, 1e9), (), [2, 2, 2]),
    ((4e9, 1e9, 1e9), (), [4, 1, 1]),
    ((1e9, 1e9, 1e9), (0, 2), [3, 0, 3]),
]


@pytest.mark.parametrize(("rates", "servers", "counts"), PLACES)
def test_shards_follow_the_servers_rates(rates: tuple[float, ...], servers: tuple[int, ...], counts: list[int]) -> None:
    config = dataclasses.replace(CONFIG, routing=RoutingConfig(servers=servers))
    route = place_shards(TENSORS, config=config, roles=ROLES, facts=facts(*rates))
    assert [len(route.of_server(server)) for server in range(3)] == counts


def test_one_process_keeps_each_dtype_in_one_shard_as_it_is() -> None:
    config = dataclasses.replace(CONFIG, compression=CompressionConfig(rules=("*=fp16",)))
    assert [len(place_shards(TENSORS, config=config, roles=roles, facts={}).shards) for roles in (ALONE,)] == [1]
    assert {spec.codec for spec in with_rules(TENSORS, config=config, roles=ALONE)} == {"none"}
    assert {spec.codec for spec in with_rules(TENSORS, config=config, roles=ROLES)} == {"fp16"}


def test_a_change_says_where_shards_are() -> None:
    route = place_shards(TENSORS, config=CONFIG, roles=ROLES, facts=facts(1e9, 1e9, 1e9))
    change = RouteChange(epoch=4, keys=[0, 5], servers=[1, 0], rooms=[3, 2])
    after = rerouted(route, change, num_rooms=(4, 4, 4))
    assert after.epoch == 4
    assert [(shard.server, shard.room, shard.epoch) for shard in (after.shards[0], after.shards[5])] == [
        (1, 3, 4),
        (0, 2, 4),
    ]
    assert after.shards[1:5] == route.shards[1:5]


WRONG = [
    ([6], [0], [0]),
    ([-1], [0], [0]),
    ([0], [3], [0]),
    ([0], [-1], [0]),
    ([0], [1], [4]),
    ([0], [1], [-1]),
    ([0, 1], [1], [0]),
    ([0], [1], [0, 1]),
    ([7, 0], [1, 1], [0, 1]),
]


@pytest.mark.parametrize(("keys", "servers", "rooms"), WRONG)
def test_a_change_that_does_not_fit_is_refused(keys: list[int], servers: list[int], rooms: list[int]) -> None:
    route = place_shards(TENSORS, config=CONFIG, roles=ROLES, facts=facts(1e9, 1e9, 1e9))
    with pytest.raises(ProtocolError, match="cannot follow a change of the route"):
        rerouted(route, RouteChange(epoch=1, keys=keys, servers=servers, rooms=rooms), num_rooms=(4, 4, 4))


def test_pinned_shards_take_room_where_they_are() -> None:
    """Two of six tensors are the user's on server 2, whose rooms are two for them and three for others."""
    routing = RoutingConfig(spare_frac=1.0)
    specs = tuple(dataclasses.replace(spec, server=2 if index in (1, 4) else -1) for index, spec in enumerate(TENSORS))
    route = place_shards(specs, config=CONFIG, roles=ROLES, facts=facts(1e9, 1e9, 1e9))
    rooms = rooms_per_server(route, routing)
    assert (rooms, sum(shard.pinned for shard in route.shards)) == ((3, 3, 5), 2)
    check_servers([0, 1], route=route, num_rooms=rooms, routing=routing)
    check_servers([2, 0], route=route, num_rooms=rooms, routing=routing)
    with pytest.raises(ConfigError, match=r"cannot use servers \[2\]: they have room for 3 shards, need 4"):
        check_servers([2], route=route, num_rooms=rooms, routing=routing)


def test_servers_that_hold_everything_already_are_fine_without_moves() -> None:
    routing = RoutingConfig(move=False, servers=(0, 2))
    config = dataclasses.replace(CONFIG, routing=routing)
    route = place_shards(TENSORS, config=config, roles=ROLES, facts=facts(1e9, 1e9, 1e9))
    rooms = rooms_per_server(route, routing)
    check_servers([0, 1, 2], route=route, num_rooms=rooms, routing=routing)
    with pytest.raises(ConfigError, match="routing.move is off, so every shard stays where it is"):
        check_servers([0, 1], route=route, num_rooms=rooms, routing=routing)
