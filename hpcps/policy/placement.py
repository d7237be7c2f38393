"""Which ranks serve and which train. Facts about hosts in, roles out; probes and starts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from hpcps.cluster import Cluster, Host, RankPlace
from hpcps.errors import ConfigError, LaunchError
from hpcps.plan import Roles

__all__ = ["PlaceRoles", "RolesDecision"]

LIKE_MEMORY_FRAC = 0.9
"""Hosts with at least this part of the larger one's memory count as alike: nodes of one batch differ by
what their firmware keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesDecision:
    """The roles, and why these ranks serve."""

    roles: Roles
    reason: str


class PlaceRoles:
    """Choose the servers' ranks; all other ranks are workers.

    A world of one is both. Otherwise servers go to hosts without a GPU, then to hosts with the most
    memory; over hosts that are alike they are spread by local rank, and ties go to the lower rank.

    Args:
        server_num: ranks that serve, at least 1.
        worker_num: ranks that train; 0: all that do not serve.
        server_endpoints: host or host:port of the servers in order; fewer than servers go round.
        worker_endpoints: host or host:port of the workers; no worker may be elsewhere.
    """

    def __init__(
        self,
        server_num: int,
        worker_num: int,
        *,
        server_endpoints: tuple[str, ...] = (),
        worker_endpoints: tuple[str, ...] = (),
    ) -> None:
        if server_num < 1 or worker_num < 0:
            raise ConfigError(
                f"cannot accept server_num and worker_num: got {server_num} and {worker_num},"
                " need at least 1 and 0 or more; correct them"
            )
        self._server_num = server_num
        self._worker_num = worker_num
        self._server_endpoints = server_endpoints
        self._worker_endpoints = worker_endpoints

    def decide(self, cluster: Cluster) -> RolesDecision:
        """Choose the roles.

        Raises:
            LaunchError: ranks and requested roles do not add up, no worker is left, or an endpoint
                names a host that this job has not got or that has no rank free.
        """
        if cluster.world_size == 1:
            asked = f" (asked: {self._server_num} servers, {self._worker_num} workers)" if self._asks_for_more else ""
            return RolesDecision(
                roles=Roles(servers=(0,), workers=(0,)), reason=f"one rank: server and worker in one process{asked}"
            )
        self._check_sum(cluster.world_size)
        worker_hosts = {_find_host(endpoint, cluster, "worker") for endpoint in self._worker_endpoints}
        if self._server_endpoints:
            servers, how = self._by_endpoints(cluster), "hosts given by server_endpoints"
        else:
            order = _by_preference(cluster, worker_hosts)
            servers = [place.rank for place in order[: self._server_num]]
            how = "hosts without a GPU first, then most memory, then lowest rank"
        roles = Roles(
            servers=tuple(sorted(servers)),
            workers=tuple(rank for rank in range(cluster.world_size) if rank not in servers),
        )
        _check_workers(roles, cluster, worker_hosts)
        names = ", ".join(f"{rank} on {cluster.places[rank].host}" for rank in roles.servers)
        return RolesDecision(roles=roles, reason=f"servers: ranks {names}; {how}")

    @property
    def _asks_for_more(self) -> bool:
        return self._server_num > 1 or self._worker_num > 1

    def _check_sum(self, world_size: int) -> None:
        if self._worker_num == 0 and world_size <= self._server_num:
            raise LaunchError(
                f"cannot place roles: got {world_size} ranks for {self._server_num} servers, need at least 1 more"
                f" to train; start {self._server_num + 1} ranks or more, or lower --server-num"
            )
        need = self._server_num + self._worker_num
        if self._worker_num > 0 and world_size != need:
            raise LaunchError(
                f"cannot place roles: got {world_size} ranks, need {self._worker_num} workers + {self._server_num}"
                f" servers = {need}; start {need} ranks or change --worker-num or --server-num"
            )

    def _by_endpoints(self, cluster: Cluster) -> list[int]:
        """A rank for each server: the first free one on the host that its endpoint names."""
        endpoints = self._server_endpoints
        if len(endpoints) > self._server_num:
            raise LaunchError(
                f"cannot place servers: got {len(endpoints)} server endpoints, need at most {self._server_num};"
                f" pass --server-num {len(endpoints)} or fewer endpoints"
            )
        servers: list[int] = []
        for index in range(self._server_num):
            endpoint = endpoints[index % len(endpoints)]
            host = _find_host(endpoint, cluster, "server")
            free = [
                (place.local_rank, place.rank)
                for place in cluster.places
                if place.host == host and place.rank not in servers
            ]
            if not free:
                raise LaunchError(
                    f"cannot place server {index} on {endpoint!r}: no rank of the job is free there, need 1;"
                    " start more ranks on that host or name other endpoints"
                )
            servers.append(min(free)[1])
        return servers


def _find_host(endpoint: str, cluster: Cluster, role: str) -> str:
    """The host that an endpoint names, also where one of the two names lacks its domain."""
    names = [host.name for host in cluster.hosts]
    host, colon, port = endpoint.rpartition(":")
    wanted = host.strip("[]") if colon and port.isdigit() and endpoint not in names else endpoint
    if wanted in names:
        return wanted
    alike = [
        name for name in names if name.split(".")[0] == wanted.split(".")[0] and ("." not in name or "." not in wanted)
    ]
    if len(alike) == 1:
        return alike[0]
    raise LaunchError(
        f"cannot find the host of {role} endpoint {endpoint!r}: the job has {names}, need one of these;"
        f" correct --{role}-endpoints or start ranks there"
    )


def _by_preference(cluster: Cluster, worker_hosts: set[str]) -> list[RankPlace]:
    """Ranks in the order in which they are taken as servers."""
    tiers = _memory_tiers(cluster.hosts)
    gpus = {host.name: bool(host.gpus) for host in cluster.hosts}
    return sorted(
        cluster.places,
        key=lambda place: (
            place.host in worker_hosts,
            gpus[place.host],
            tiers[place.host],
            place.local_rank,
            place.rank,
        ),
    )


def _memory_tiers(hosts: tuple[Host, ...]) -> dict[str, int]:
    """Tier of each host by memory, 0 the largest; a tier ends below 0.9 of its first host's memory."""
    tiers: dict[str, int] = {}
    tier, first_bytes = -1, 0
    for host in sorted(hosts, key=lambda host: (-host.memory_bytes, host.name)):
        if tier < 0 or host.memory_bytes < LIKE_MEMORY_FRAC * first_bytes:
            tier, first_bytes = tier + 1, host.memory_bytes
        tiers[host.name] = tier
    return tiers


def _check_workers(roles: Roles, cluster: Cluster, worker_hosts: set[str]) -> None:
    """Workers stand where worker_endpoints allow."""
    for rank in roles.workers:
        host = cluster.places[rank].host
        if worker_hosts and host not in worker_hosts:
            raise LaunchError(
                f"cannot place worker rank {rank} on {host!r}: worker endpoints allow {sorted(worker_hosts)};"
                " add the host to --worker-endpoints or start no rank there",
                rank=rank,
            )
