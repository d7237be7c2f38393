"""From a plan to the data plane: how many shards each server has room for."""

from __future__ import annotations

import pytest

from hpcps.config import CommConfig, RoutingConfig
from hpcps.plan import Piece, Roles, Route, Shard
from hpcps.runtime.wire import layout_of, rooms_per_server
from hpcps.update.rule import RuleSpec


def route(*servers: tuple[int, bool], num_servers: int = 2) -> Route:
    """Shards of four floats on these servers, pinned or not; each has the next room of its server."""
    shards = []
    for key, (server, pinned) in enumerate(servers):
        room = sum(other == server for other, _ in servers[:key])
        piece = Piece(tensor=0, start=4 * key, stop=4 * key + 4, offset=0)
        shards.append(
            Shard(
                key=key,
                server=server,
                dtype="float32",
                begin=4 * key,
                numel=4,
                pieces=(piece,),
                pinned=pinned,
                room=room,
            )
        )
    return Route(epoch=0, num_servers=num_servers, shards=tuple(shards))


FREE_0, FREE_1, PINNED_0 = (0, False), (1, False), (0, True)


@pytest.mark.parametrize(
    ("shards", "num_servers", "routing", "rooms"),
    [
        pytest.param([FREE_0] * 5, 1, RoutingConfig(), (5,), id="one server"),
        pytest.param([FREE_0] * 3 + [FREE_1] * 3, 2, RoutingConfig(move=False), (3, 3), id="nothing moves"),
        pytest.param([FREE_0] * 3 + [FREE_1] * 3, 2, RoutingConfig(spare_frac=0.0), (3, 3), id="no room to spare"),
        pytest.param([FREE_0] * 3 + [FREE_1] * 3, 2, RoutingConfig(), (6, 6), id="all fit on either"),
        pytest.param([FREE_0] * 3 + [FREE_1] * 3, 2, RoutingConfig(spare_frac=0.3), (4, 4), id="a third more"),
        pytest.param([FREE_0] * 3 + [FREE_1] * 3, 2, RoutingConfig(spare_frac=9.0), (6, 6), id="never more than all"),
        pytest.param([FREE_0] * 6, 3, RoutingConfig(), (6, 4, 4), id="all on the first at first"),
        pytest.param([FREE_0] * 7, 3, RoutingConfig(spare_frac=0.5), (7, 4, 4), id="rounded up"),
        pytest.param([PINNED_0] * 2 + [FREE_0] * 2 + [FREE_1] * 2, 2, RoutingConfig(), (6, 4), id="pinned beside"),
        pytest.param([PINNED_0] * 3 + [FREE_1], 2, RoutingConfig(), (4, 1), id="one that may move"),
        pytest.param([], 2, RoutingConfig(), (0, 0), id="no shards"),
    ],
)
def test_rooms_of_each_server(
    shards: list[tuple[int, bool]], num_servers: int, routing: RoutingConfig, rooms: tuple[int, ...]
) -> None:
    assert rooms_per_server(route(*shards, num_servers=num_servers), routing) == rooms


def test_the_data_plane_has_the_rooms_of_route_and_settings() -> None:
    rule = RuleSpec(kind="sgd", option_names=("lr",), options=((0.1,),), flags=((),))
    layout = layout_of(
        route(FREE_0, FREE_1, FREE_1),
        rule,
        roles=Roles(servers=(0, 1), workers=(2, 3)),
        config=CommConfig(num_slots=3, publish_buffers=4),
        routing=RoutingConfig(),
    )
    assert (layout.servers, layout.workers, layout.num_slots, layout.num_buffers) == ((0, 1), (2, 3), 3, 4)
    assert layout.num_rooms == (3, 3)
    assert [(shard.server, shard.room, shard.num_bytes) for shard in layout.shards] == [
        (0, 0, 16),
        (1, 0, 16),
        (1, 1, 16),
    ]
