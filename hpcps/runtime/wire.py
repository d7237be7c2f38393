"""From a plan to what the channel and the protocol need of it, the same on servers and workers."""

from __future__ import annotations

import dataclasses
import json
import math

from hpcps.comm.layout import Layout, ShardRoom
from hpcps.config import CommConfig, RoutingConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Piece, Roles, Route, Shard, TensorSpec
from hpcps.protocol.messages import FrameShape
from hpcps.update.rule import RuleSpec

__all__ = ["frame_shape", "layout_of", "rooms_per_server", "route_from_json", "tensors_from_json", "to_json"]


def frame_shape(shard: Shard, rule: RuleSpec) -> FrameShape:
    """Sizes of the frames of a shard."""
    return FrameShape(
        num_options=len(rule.option_names) * len(rule.options),
        num_pieces=len(shard.pieces),
        payload_bytes=shard.num_bytes,
    )


def rooms_per_server(route: Route, routing: RoutingConfig) -> tuple[int, ...]:
    """Shards that each server has room for: its own, and where shards may move as many as its spare part allows."""
    own = [len(route.of_server(server)) for server in range(route.num_servers)]
    free = sum(not shard.pinned for shard in route.shards)
    if route.num_servers == 1 or not routing.move or routing.spare_frac == 0:
        return tuple(own)
    share = min(free, math.ceil(free / route.num_servers * (1 + routing.spare_frac)))
    pinned = [sum(shard.pinned for shard in route.of_server(server)) for server in range(route.num_servers)]
    return tuple(max(mine - fixed, share) + fixed for mine, fixed in zip(own, pinned, strict=True))


def layout_of(route: Route, rule: RuleSpec, *, roles: Roles, config: CommConfig, routing: RoutingConfig) -> Layout:
    """The data plane of a job."""
    return Layout(
        servers=roles.servers,
        workers=roles.workers,
        shards=tuple(
            ShardRoom(
                server=shard.server,
                num_bytes=shard.num_bytes,
                head_bytes=frame_shape(shard, rule).payload_offset,
                room=shard.room,
            )
            for shard in route.shards
        ),
        num_slots=config.num_slots,
        num_buffers=config.publish_buffers,
        num_rooms=rooms_per_server(route, routing),
    )


def to_json(value: Route | tuple[TensorSpec, ...]) -> str:
    """A route or the tensors as text."""
    if isinstance(value, Route):
        return json.dumps(dataclasses.asdict(value))
    return json.dumps([dataclasses.asdict(spec) for spec in value])


def route_from_json(text: str) -> Route:
    """Read a route.

    Raises:
        ProtocolError: the text is no route.
    """
    try:
        fields = json.loads(text)
        shards = tuple(
            Shard(**{**shard, "pieces": tuple(Piece(**piece) for piece in shard["pieces"])})
            for shard in fields["shards"]
        )
        return Route(epoch=fields["epoch"], num_servers=fields["num_servers"], shards=shards)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"cannot read a route: {error}; run the same hpcps on every rank") from error


def tensors_from_json(text: str) -> tuple[TensorSpec, ...]:
    """Read the tensors.

    Raises:
        ProtocolError: the text is no list of tensors.
    """
    try:
        return tuple(TensorSpec(**fields) for fields in json.loads(text))
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"cannot read the tensors: {error}; run the same hpcps on every rank") from error
