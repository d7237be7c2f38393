"""Where shards are, as workers know it: the first route from rules and servers' facts, alike on all, and its changes.

Refuses to measure or to move: servers tell what they can do, and the coordinator moves shards later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hpcps.config import RoutingConfig, RunConfig
from hpcps.errors import ConfigError, ProtocolError
from hpcps.plan import WIRE_DTYPES, Roles, Route, TensorSpec
from hpcps.policy.codec_rules import CodecRules
from hpcps.policy.routing import PlaceShards
from hpcps.protocol.control import RouteChange, ServerFacts

__all__ = ["check_servers", "place_shards", "rerouted", "with_rules"]


def place_shards(
    tensors: tuple[TensorSpec, ...], *, config: RunConfig, roles: Roles, facts: Mapping[int, ServerFacts]
) -> Route:
    """Cut the tensors into shards and give each a server.

    One process has nothing to send piece by piece, so it keeps each dtype in one shard.

    Args:
        tensors: the model's trainable tensors in registration order.
        config: the run's settings.
        roles: who serves and who works.
        facts: what each server can do, by index; nothing where there is but one.
    """
    shard_bytes = config.comm.shard_bytes
    if roles.embedded:
        shard_bytes = max(shard_bytes, sum(spec.numel * WIRE_DTYPES[spec.dtype] for spec in tensors))
    known = [facts[server] for server in sorted(facts)]
    return PlaceShards(
        len(roles.servers),
        shard_bytes=shard_bytes,
        rates=[each.bytes_per_s for each in known],
        servers=() if roles.embedded else config.routing.servers,
        memory=[each.memory_bytes for each in known],
    ).decide(tensors)


def with_rules(tensors: tuple[TensorSpec, ...], *, config: RunConfig, roles: Roles) -> tuple[TensorSpec, ...]:
    """Give each tensor the codec that the rules name; one process has no link, so it sends all as it is."""
    codecs = CodecRules(config.compression).decide(tensors)
    if roles.embedded:
        return tensors
    return tuple(dataclasses.replace(spec, codec=codec) for spec, codec in zip(tensors, codecs, strict=True))


def check_servers(servers: Sequence[int], *, route: Route, num_rooms: Sequence[int], routing: RoutingConfig) -> None:
    """Check that shards may move to these servers, and find room there.

    Args:
        servers: indices of servers.
        route: the route in force.
        num_rooms: rooms of each server.
        routing: the settings of moves.

    Raises:
        ConfigError: they may not, or do not.
    """
    number = route.num_servers
    if not servers or len(set(servers)) < len(servers) or not all(0 <= server < number for server in servers):
        raise ConfigError(
            f"cannot use servers {list(servers)}: need at least one, each once, from 0 to {number - 1}; correct"
            " the list"
        )
    loose = [shard for shard in route.shards if not shard.pinned]
    fixed = sum(shard.pinned and shard.server in servers for shard in route.shards)
    space = sum(num_rooms[server] for server in servers) - fixed
    if not routing.move and {shard.server for shard in loose} - set(servers):
        raise ConfigError(
            f"cannot use servers {list(servers)}: routing.move is off, so every shard stays where it is; switch it on"
        )
    if routing.move and space < len(loose):
        full = routing.spare_frac > 0 and sum(num_rooms) == len(route.shards)
        why = ", for windows with room to spare did not fit into shared memory" if full else ""
        remedy = "give the container more, or set comm.mode to p2p" if full else "raise routing.spare_frac"
        raise ConfigError(
            f"cannot use servers {list(servers)}: they have room for {space} shards, need {len(loose)}{why}; {remedy}"
            f" (routing.spare_frac is {routing.spare_frac:g})"
        )


def rerouted(route: Route, change: RouteChange, *, num_rooms: Sequence[int]) -> Route:
    """The route after a change.

    Args:
        route: the route in force.
        change: what the coordinator told.
        num_rooms: rooms of each server.

    Raises:
        ProtocolError: a shard, server or room does not exist.
    """
    fits = len(change.keys) == len(change.servers) == len(change.rooms)
    for key, server, room in zip(change.keys, change.servers, change.rooms, strict=False):
        fits = fits and 0 <= key < len(route.shards) and 0 <= server < len(num_rooms) and 0 <= room < num_rooms[server]
        if fits:
            route = route.moved(key, server=server, room=room, epoch=change.epoch)
    if not fits:
        raise ProtocolError(
            f"cannot follow a change of the route: {change}, need shards below {len(route.shards)} and rooms below"
            f" {list(num_rooms)}; run the same hpcps on every rank",
            op="move",
        )
    return route
