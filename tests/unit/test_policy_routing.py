"""Cutting and placing shards, by tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcps.errors import ConfigError, DataError, PlanError
from hpcps.plan import Piece, Route, Shard, TensorSpec
from hpcps.policy import PlaceShards
from hpcps.policy.routing import HELD_COPIES, even_rates
from hpcps.units import KiB


def tensor(
    name: str, numel: int, dtype: str = "float32", *, param_group: int = 0, codec: str = "none", server: int = -1
) -> TensorSpec:
    return TensorSpec(name=name, numel=numel, dtype=dtype, param_group=param_group, codec=codec, server=server)


def shard_counts(route: Route) -> list[int]:
    return [len(route.of_server(server)) for server in range(route.num_servers)]


def piece(tensor: int, start: int, stop: int, offset: int) -> Piece:
    return Piece(tensor=tensor, start=start, stop=stop, offset=offset)


def test_small_tensors_share_a_shard_and_a_big_one_is_cut() -> None:
    tensors = [tensor("a", 100), tensor("none", 0), tensor("b", 500, param_group=1), tensor("c", 168)]
    route = PlaceShards(2, shard_bytes=1024).decide(tensors)
    assert route == Route(
        epoch=0,
        num_servers=2,
        shards=(
            Shard(
                key=0,
                server=0,
                dtype="float32",
                begin=0,
                numel=256,
                pieces=(piece(0, 0, 100, 0), piece(2, 0, 156, 100)),
            ),
            Shard(key=1, server=1, dtype="float32", begin=256, numel=256, pieces=(piece(2, 156, 412, 0),)),
            Shard(
                key=2,
                server=0,
                dtype="float32",
                begin=512,
                numel=256,
                pieces=(piece(2, 412, 500, 0), piece(3, 0, 168, 88)),
                room=1,
            ),
        ),
    )


def test_each_dtype_has_its_own_flat_space() -> None:
    tensors = [tensor("w", 10, "float64"), tensor("a", 3), tensor("v", 2, "float64")]
    route = PlaceShards(1, shard_bytes=4096).decide(tensors)
    assert [(shard.dtype, shard.begin, shard.numel, shard.pieces) for shard in route.shards] == [
        ("float64", 0, 12, (piece(0, 0, 10, 0), piece(2, 0, 2, 10))),
        ("float32", 0, 3, (piece(1, 0, 3, 0),)),
    ]


def test_each_codec_rule_has_its_own_flat_space() -> None:
    tensors = [
        tensor("a", 3, codec="fp16"),
        tensor("b", 400),
        tensor("c", 5, codec="fp16"),
        tensor("d", 2, "float64"),
        tensor("e", 300),
        tensor("f", 7, codec="auto"),
    ]
    route = PlaceShards(1, shard_bytes=1600).decide(tensors)
    got = [(s.key, s.dtype, s.codec, s.begin, s.numel, s.pieces) for s in route.shards]
    assert got == [
        (0, "float32", "fp16", 0, 8, (piece(0, 0, 3, 0), piece(2, 0, 5, 3))),
        (1, "float32", "none", 0, 350, (piece(1, 0, 350, 0),)),
        (2, "float32", "none", 350, 350, (piece(1, 350, 400, 0), piece(4, 0, 300, 50))),
        (3, "float64", "none", 0, 2, (piece(3, 0, 2, 0),)),
        (4, "float32", "auto", 0, 7, (piece(5, 0, 7, 0),)),
    ]


def test_one_rule_for_all_cuts_and_places_as_none_does() -> None:
    sizes = [100, 0, 500, 168, 9000]
    plain = PlaceShards(3, shard_bytes=4096).decide([tensor("t", size) for size in sizes])
    ruled = PlaceShards(3, shard_bytes=4096).decide([tensor("t", size, codec="int8") for size in sizes])
    assert {shard.codec for shard in ruled.shards} == {"int8"}
    assert tuple(replace(shard, codec="none") for shard in ruled.shards) == plain.shards


# servers, shard_bytes, bytes of one float32 tensor, sizes of the shards in bytes, their servers
CUTS = [
    (4, 4096 * KiB, 60 * KiB, [60 * KiB], [0]),
    (4, 4096 * KiB, 256 * KiB, [64 * KiB] * 4, [0, 1, 2, 3]),
    (4, 4096 * KiB, 200 * KiB, [68264, 68268, 68268], [2, 0, 1]),
    (2, 100 * KiB, 300 * KiB, [100 * KiB] * 3, [0, 1, 0]),
    (2, 100 * KiB, 304 * KiB, [76 * KiB] * 4, [0, 1, 0, 1]),
    (9, 4096 * KiB, 8, [8], [0]),
]


@pytest.mark.parametrize(("num_servers", "shard_bytes", "num_bytes", "sizes", "servers"), CUTS)
def test_cut_table(num_servers: int, shard_bytes: int, num_bytes: int, sizes: list[int], servers: list[int]) -> None:
    route = PlaceShards(num_servers, shard_bytes=shard_bytes).decide([tensor("w", num_bytes // 4)])
    assert [shard.num_bytes for shard in route.shards] == sizes
    assert [shard.server for shard in route.shards] == servers


def test_larger_shards_are_placed_first() -> None:
    tensors = [tensor("a", 256), tensor("d", 384, "float64")]
    route = PlaceShards(2, shard_bytes=1024).decide(tensors)
    assert [(shard.num_bytes, shard.server) for shard in route.shards] == [(1024, 0), (1024, 1), (1024, 0), (1024, 1)]
    route = PlaceShards(2, shard_bytes=8192).decide([*tensors, tensor("e", 1, "float64")])
    assert [(shard.num_bytes, shard.server) for shard in route.shards] == [(1024, 1), (3080, 0)]


@pytest.mark.parametrize("tensors", [[], [tensor("empty", 0)]])
def test_a_model_without_elements_has_an_empty_route(tensors: list[TensorSpec]) -> None:
    assert PlaceShards(3, shard_bytes=4096).decide(tensors) == Route(epoch=0, num_servers=3, shards=())


def test_tensors_without_a_wire_form_are_refused() -> None:
    with pytest.raises(DataError, match="cannot route tensor 'h': got 4 elements of float16, need 0 or more of float"):
        PlaceShards(1, shard_bytes=4096).decide([tensor("h", 4, "float16")])
    with pytest.raises(DataError, match="cannot route tensor 'n': got -1 elements"):
        PlaceShards(1, shard_bytes=4096).decide([tensor("n", -1)])


# measured rates, what counts
RATES = [
    ([2.0, 2.0], [2.0, 2.0]),
    ([2.0, 2.5], [2.25, 2.25]),  # just within a factor of 1.25
    ([2.0, 2.51], [2.0, 2.51]),
    ([1.0, 4.0, 3.6, 1.1], [1.05, 3.8, 3.8, 1.05]),
    ([1.5, 1.0, 1.2], [1.35, 1.0, 1.35]),  # chained: the third is like both others, the quickest decides
]


@pytest.mark.parametrize(("rates", "even"), RATES)
def test_like_rates_count_as_equal(rates: list[float], even: list[float]) -> None:
    assert even_rates(rates) == pytest.approx(even)


# bytes a second of each server, servers in use, shards of each, of 64 equal ones
SPLITS = [
    ((1e9, 1e9), (), [32, 32]),
    ((1.2e9, 1e9), (), [32, 32]),
    ((4e9, 1e9), (), [52, 12]),
    ((3e9, 2e9, 1e9), (), [33, 21, 10]),
    ((), (0, 2), [32, 0, 32]),
    ((1e9, 9e9, 3e9), (2, 0), [16, 0, 48]),
]


@pytest.mark.parametrize(("rates", "servers", "counts"), SPLITS)
def test_shards_are_split_by_rate(rates: tuple[float, ...], servers: tuple[int, ...], counts: list[int]) -> None:
    policy = PlaceShards(len(counts), shard_bytes=1024, rates=rates, servers=servers)
    route = policy.decide([tensor("w", 64 * 256)])
    assert shard_counts(route) == counts
    assert not any(shard.pinned for shard in route.shards)


def test_noise_of_rates_changes_nothing() -> None:
    tensors = [tensor("a", 70_000), tensor("b", 333, "float64"), tensor("c", 20_000, codec="fp16")]
    plain = PlaceShards(3, shard_bytes=4096).decide(tensors)
    assert PlaceShards(3, shard_bytes=4096, rates=(1.01e9, 0.9e9, 1.1e9), memory=(0, 0, 0)).decide(tensors) == plain


def test_rooms_are_numbered_by_server_in_key_order() -> None:
    route = PlaceShards(3, shard_bytes=1024, rates=(3e9, 1e9, 1e9)).decide([tensor("w", 15 * 256)])
    for server in range(3):
        assert [shard.room for shard in route.of_server(server)] == list(range(len(route.of_server(server))))
    assert shard_counts(route) == [9, 3, 3]


def test_chosen_servers_get_shards_of_their_own_that_never_move() -> None:
    tensors = [tensor("a", 512), tensor("e", 600, server=1), tensor("b", 256), tensor("f", 40, server=1)]
    route = PlaceShards(2, shard_bytes=1024).decide(tensors)
    got = [(s.key, s.server, s.pinned, s.room, s.begin, s.numel, s.pieces) for s in route.shards]
    assert got == [
        (0, 0, False, 0, 0, 256, (piece(0, 0, 256, 0),)),
        (1, 0, False, 1, 256, 256, (piece(0, 256, 512, 0),)),
        (2, 1, True, 0, 0, 213, (piece(1, 0, 213, 0),)),
        (3, 1, True, 1, 213, 213, (piece(1, 213, 426, 0),)),
        (4, 1, True, 2, 426, 214, (piece(1, 426, 600, 0), piece(3, 0, 40, 174))),
        (5, 0, False, 2, 512, 256, (piece(2, 0, 256, 0),)),
    ]
    assert [shard.space for shard in route.shards[1:3]] == [("float32", "none", -1), ("float32", "none", 1)]


def test_a_chosen_server_needs_only_as_many_shards_as_the_limit_asks() -> None:
    route = PlaceShards(4, shard_bytes=4096 * KiB).decide([tensor("e", 256 * KiB, server=3)])
    assert [(shard.server, shard.num_bytes) for shard in route.shards] == [(3, 1024 * KiB)]
    route = PlaceShards(4, shard_bytes=4096 * KiB, servers=(0, 1)).decide([tensor("e", 4, server=3)])
    assert [shard.server for shard in route.shards] == [3]  # the user's word counts more than routing.servers


def test_memory_bounds_what_a_server_gets() -> None:
    room = HELD_COPIES * 1024
    route = PlaceShards(3, shard_bytes=1024, memory=(2 * room, 0, room - 1)).decide([tensor("w", 9 * 256)])
    assert shard_counts(route) == [2, 7, 0]


def test_a_shard_that_fits_nowhere_is_refused() -> None:
    policy = PlaceShards(2, shard_bytes=1024 * KiB, memory=(2048 * KiB, 3072 * KiB))
    need = "cannot place shard 0 \\(from tensor 'w'\\): needs 4.0 MiB for 512.0 KiB of values, most free is 3.0 MiB"
    with pytest.raises(PlanError, match=need + " \\(server 1\\); give the servers more memory") as caught:
        policy.decide([tensor("w", 256 * KiB)])
    assert caught.value.key == 0


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot accept routing.servers: got \\[0, 2\\], need numbers from 0 to 1"):
        PlaceShards(2, shard_bytes=4096, servers=(0, 2))
    with pytest.raises(DataError, match="cannot route tensor 'e': got server 2, need one below 2"):
        PlaceShards(2, shard_bytes=4096).decide([tensor("e", 4, server=2)])
    with pytest.raises(ConfigError, match="cannot accept server_num: got 0"):
        PlaceShards(0, shard_bytes=4096)
    with pytest.raises(ConfigError, match=r"cannot accept comm.shard_bytes: got 4 B, need at least 8 B"):
        PlaceShards(1, shard_bytes=4)
