"""Groups partition the workers; routes cover each element once; roles cover the ranks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.cluster import Cluster, Host, RankPlace
from hpcps.plan import TensorSpec, digest
from hpcps.policy import GroupWorkers, PlaceRoles, PlaceShards
from hpcps.units import GiB

speeds_by_rank = st.dictionaries(
    st.integers(0, 200), st.one_of(st.sampled_from([1.0, 2.0, 3.0]), st.floats(0.1, 100.0)), min_size=1, max_size=30
)
tensor_lists = st.lists(
    st.builds(
        lambda numel, dtype, group, codec: TensorSpec(
            name="t", numel=numel, dtype=dtype, param_group=group, codec=codec
        ),
        st.one_of(st.integers(0, 5), st.integers(0, 60_000)),
        st.sampled_from(["float32", "float64"]),
        st.integers(0, 2),
        st.sampled_from(["none", "fp16", "auto"]),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(speeds=speeds_by_rank, mode=st.sampled_from(["sync", "async", "hybrid"]), size=st.integers(0, 6))
def test_groups_partition_the_workers(speeds: dict[int, float], mode: str, size: int) -> None:
    grouping = GroupWorkers(mode, size).decide(speeds, generation=3).grouping
    assert grouping.generation == 3
    assert [group.index for group in grouping.groups] == list(range(len(grouping.groups)))
    assert sorted(rank for group in grouping.groups for rank in group.workers) == sorted(speeds)
    assert all(group.workers == tuple(sorted(group.workers)) for group in grouping.groups)
    for faster, slower in zip(grouping.groups, grouping.groups[1:], strict=False):
        assert min(speeds[rank] for rank in faster.workers) >= max(speeds[rank] for rank in slower.workers)
    if mode == "hybrid" and size != 1 and len(speeds) > 1:
        assert min(len(group.workers) for group in grouping.groups) >= 2
    if mode == "hybrid" and size > 1:
        assert max(len(group.workers) for group in grouping.groups) <= size + 1
    backwards = dict(reversed(list(speeds.items())))
    assert digest(GroupWorkers(mode, size).decide(backwards, generation=3).grouping) == digest(grouping)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    tensors=tensor_lists,
    num_servers=st.integers(1, 6),
    shard_bytes=st.sampled_from([1024, 1030, 65_536, 4 * 1024 * 1024]),
)
def test_routes_cover_each_element_once(tensors: list[TensorSpec], num_servers: int, shard_bytes: int) -> None:
    route = PlaceShards(num_servers, shard_bytes=shard_bytes).decide(tensors)
    reached = dict.fromkeys(range(len(tensors)), 0)
    flat = {(spec.dtype, spec.codec): 0 for spec in tensors}
    for shard in route.shards:
        assert shard.begin == flat[shard.dtype, shard.codec]
        assert 1 <= shard.numel
        assert shard.num_bytes <= shard_bytes
        offset = 0
        for piece in shard.pieces:
            assert piece.offset == offset
            assert piece.start == reached[piece.tensor]
            assert piece.numel >= 1
            assert (tensors[piece.tensor].dtype, tensors[piece.tensor].codec) == (shard.dtype, shard.codec)
            reached[piece.tensor] = piece.stop
            offset += piece.numel
        assert offset == shard.numel
        flat[shard.dtype, shard.codec] += shard.numel
    firsts = [shard.pieces[0].tensor for shard in route.shards]
    assert firsts == sorted(firsts)
    assert reached == {index: spec.numel for index, spec in enumerate(tensors)}
    loads = [sum(shard.num_bytes for shard in route.of_server(server)) for server in range(num_servers)]
    assert sum(loads) == sum(shard.num_bytes for shard in route.shards)
    largest = max((shard.num_bytes for shard in route.shards), default=0)
    assert max(loads) - min(loads) <= largest


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    num_shards=st.integers(0, 60),
    pins=st.lists(st.integers(0, 5), max_size=6),
    rates=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6),
    shrink=st.integers(1, 3),
)
def test_no_server_ends_much_later_than_it_must(
    num_shards: int, pins: list[int], rates: list[float], shrink: int
) -> None:
    num_servers = len(rates)
    servers = tuple(range(0, num_servers, shrink))
    free = [TensorSpec(name="w", numel=num_shards * 256, dtype="float32", param_group=0)]
    chosen = [
        TensorSpec(name="p", numel=256, dtype="float32", param_group=0, server=pin) for pin in pins if pin < num_servers
    ]
    route = PlaceShards(num_servers, shard_bytes=1024, rates=rates, servers=servers).decide([*free, *chosen])
    held = [len(route.of_server(server)) for server in range(num_servers)]
    pinned = [sum(shard.pinned for shard in route.of_server(server)) for server in range(num_servers)]
    assert pinned == [sum(spec.server == server for spec in chosen) for server in range(num_servers)]
    assert sum(held) == num_shards + len(chosen)
    assert all(held[server] == pinned[server] for server in range(num_servers) if server not in servers)
    for server in range(num_servers):
        assert sorted(shard.room for shard in route.of_server(server)) == list(range(held[server]))
    # within the noise that counts as equal, no free shard would be through sooner elsewhere
    for source in servers:
        if held[source] > pinned[source]:
            ends = [(held[server] + (server != source)) / rates[server] for server in servers]
            assert held[source] / rates[source] <= min(ends) * 1.25**2 * (1 + 1e-9)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(tensors=tensor_lists, num_servers=st.integers(1, 6))
def test_shards_of_a_space_are_even_and_reach_every_server(tensors: list[TensorSpec], num_servers: int) -> None:
    route = PlaceShards(num_servers, shard_bytes=4 * 1024 * 1024).decide(tensors)
    for space in {(spec.dtype, spec.codec) for spec in tensors}:
        sizes = [shard.numel for shard in route.shards if (shard.dtype, shard.codec) == space]
        num_bytes = sum(shard.num_bytes for shard in route.shards if (shard.dtype, shard.codec) == space)
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        if num_bytes >= num_servers * 65_536:
            assert len(sizes) >= num_servers


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    hosts=st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(1, 4)), min_size=1, max_size=6),
    server_num=st.integers(1, 4),
)
def test_roles_cover_the_ranks_and_spare_gpus(hosts: list[tuple[bool, int, int]], server_num: int) -> None:
    described = tuple(
        Host(name=f"h{index}", memory_bytes=memory * GiB, gpus=("A100",) if gpu else ())
        for index, (gpu, memory, _) in enumerate(hosts)
    )
    slots = [(index, local) for index, (_, _, ranks) in enumerate(hosts) for local in range(ranks)]
    places = tuple(RankPlace(rank=rank, host=f"h{host}", local_rank=local) for rank, (host, local) in enumerate(slots))
    cluster = Cluster(hosts=described, places=places)
    if cluster.world_size <= server_num:
        return
    roles = PlaceRoles(server_num, cluster.world_size - server_num).decide(cluster).roles
    assert len(roles.servers) == server_num
    assert sorted(roles.servers + roles.workers) == list(range(cluster.world_size))
    has_gpu = {host.name: bool(host.gpus) for host in described}
    num_cpu_ranks = sum(not has_gpu[place.host] for place in places)
    num_cpu_servers = sum(not has_gpu[places[rank].host] for rank in roles.servers)
    assert num_cpu_servers == min(server_num, num_cpu_ranks)
