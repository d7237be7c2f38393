"""Roles of ranks, by tables."""

from __future__ import annotations

import pytest

from hpcps.cluster import Cluster, Host, RankPlace
from hpcps.errors import ConfigError, LaunchError
from hpcps.policy import PlaceRoles
from hpcps.units import GiB


def cluster_of(hosts: dict[str, tuple[int, int]], rank_hosts: str) -> Cluster:
    """Hosts as name to (GPUs, memory in GiB); rank_hosts names the host of each rank, by words."""
    places: list[RankPlace] = []
    for rank, name in enumerate(rank_hosts.split()):
        local_rank = sum(place.host == name for place in places)
        places.append(RankPlace(rank=rank, host=name, local_rank=local_rank))
    described = tuple(
        Host(name=name, memory_bytes=memory * GiB, gpus=("V100",) * gpus) for name, (gpus, memory) in hosts.items()
    )
    return Cluster(hosts=described, places=tuple(places))


GPU = {"g1": (4, 512), "g2": (4, 512)}
MIXED = {"g1": (4, 1024), "g2": (4, 1024), "c1": (0, 128), "c2": (0, 256)}
ALIKE = {"c1": (0, 250), "c2": (0, 256), "g1": (1, 512)}

# hosts, host of each rank, servers wanted, server ranks
PLACES = [
    ({"a": (0, 8)}, "a a a", 1, (0,)),
    ({"a": (0, 8)}, "a a a a", 2, (0, 1)),
    (MIXED, "g1 g1 g2 c1 c2", 1, (4,)),
    (MIXED, "g1 g1 g2 c1 c2", 2, (3, 4)),
    (MIXED, "c1 c1 c2 c2 g1", 2, (2, 3)),
    (MIXED, "c1 c2 g1 g1 g2", 3, (0, 1, 2)),
    (ALIKE, "c1 c1 c2 c2 g1 g1", 2, (0, 2)),
    (ALIKE, "c1 c1 c2 c2 g1 g1", 3, (0, 1, 2)),
    (GPU, "g1 g1 g2 g2", 2, (0, 2)),
]


@pytest.mark.parametrize(("hosts", "rank_hosts", "server_num", "servers"), PLACES)
def test_placement_table(
    hosts: dict[str, tuple[int, int]], rank_hosts: str, server_num: int, servers: tuple[int, ...]
) -> None:
    cluster = cluster_of(hosts, rank_hosts)
    decision = PlaceRoles(server_num, 0).decide(cluster)
    assert decision.roles.servers == servers
    assert decision.roles.workers == tuple(rank for rank in range(cluster.world_size) if rank not in servers)
    assert not decision.roles.embedded
    assert f"{servers[0]} on {cluster.places[servers[0]].host}" in decision.reason


@pytest.mark.parametrize(("server_num", "worker_num"), [(1, 0), (1, 1), (2, 6)])
def test_a_world_of_one_is_both(server_num: int, worker_num: int) -> None:
    decision = PlaceRoles(server_num, worker_num).decide(cluster_of({"a": (0, 8)}, "a"))
    assert decision.roles.embedded
    assert decision.roles.servers == (0,)
    assert ("asked: 2 servers, 6 workers" in decision.reason) is (server_num == 2)


# endpoints, servers wanted, server ranks, in a job of "c1 c1 c2 c2 g1 g1"
ENDPOINTS = [
    (("g1",), 1, (4,)),
    (("g1:7000",), 1, (4,)),
    (("g1:7000", "c2:7001"), 2, (2, 4)),
    (("g1:7000", "g1:7001"), 2, (4, 5)),
    (("c2",), 2, (2, 3)),
    (("c2", "c1"), 3, (0, 2, 3)),
    (("c2.cluster.local",), 1, (2,)),
]


@pytest.mark.parametrize(("endpoints", "server_num", "servers"), ENDPOINTS)
def test_endpoint_table(endpoints: tuple[str, ...], server_num: int, servers: tuple[int, ...]) -> None:
    cluster = cluster_of(ALIKE, "c1 c1 c2 c2 g1 g1")
    assert PlaceRoles(server_num, 0, server_endpoints=endpoints).decide(cluster).roles.servers == servers


def test_addresses_are_compared_whole() -> None:
    cluster = cluster_of({"10.0.0.1": (0, 8), "10.0.0.2": (0, 8)}, "10.0.0.1 10.0.0.2")
    assert PlaceRoles(1, 0, server_endpoints=("10.0.0.2:99",)).decide(cluster).roles.servers == (1,)
    with pytest.raises(LaunchError, match=r"cannot find the host of server endpoint '10.0.0.3'"):
        PlaceRoles(1, 0, server_endpoints=("10.0.0.3",)).decide(cluster)


def test_worker_endpoints_keep_servers_off_their_hosts() -> None:
    cluster = cluster_of(ALIKE, "c1 c2 g1")
    decision = PlaceRoles(1, 2, worker_endpoints=("c1:1", "c2:1")).decide(cluster)
    assert decision.roles.servers == (2,)
    with pytest.raises(LaunchError, match=r"cannot place worker rank 2 on 'g1': worker endpoints allow \['c1'\]"):
        PlaceRoles(1, 2, server_endpoints=("c2",), worker_endpoints=("c1",)).decide(cluster)


# servers, workers, server endpoints, message, in a job of 8 ranks on a and b
REFUSED = [
    (2, 5, (), r"got 8 ranks, need 5 workers \+ 2 servers = 7; start 7 ranks or change --worker-num"),
    (2, 7, (), r"got 8 ranks, need 7 workers \+ 2 servers = 9; start 9 ranks"),
    (8, 0, (), r"got 8 ranks for 8 servers, need at least 1 more to train; start 9 ranks or more"),
    (1, 0, ("a", "b"), r"got 2 server endpoints, need at most 1; pass --server-num 2"),
    (1, 0, ("zz:1",), r"cannot find the host of server endpoint 'zz:1': the job has \['a', 'b'\]"),
    (5, 0, ("a",), r"cannot place server 4 on 'a': no rank of the job is free there"),
]


@pytest.mark.parametrize(("server_num", "worker_num", "endpoints", "message"), REFUSED)
def test_refusal_table(server_num: int, worker_num: int, endpoints: tuple[str, ...], message: str) -> None:
    cluster = cluster_of({"a": (0, 8), "b": (0, 8)}, "a a a a b b b b")
    with pytest.raises(LaunchError, match=message):
        PlaceRoles(server_num, worker_num, server_endpoints=endpoints).decide(cluster)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot accept server_num and worker_num: got 0 and -1"):
        PlaceRoles(0, -1)
