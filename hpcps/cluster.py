"""What the machine is: devices, hosts, and which rank runs where. Facts only, no probing."""

from __future__ import annotations

from dataclasses import dataclass

from hpcps.errors import ConfigError

__all__ = ["Cluster", "Host", "RankPlace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine.

    Args:
        name: host name as the launcher knows it.
        num_cores: cores that this job may use there, at least 1.
        memory_bytes: memory of the host.
        gpus: model name of each visible GPU, empty on a CPU-only host.
    """

    name: str
    num_cores: int = 1
    memory_bytes: int = 0
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_cores < 1:
            raise ConfigError(
                f"cannot describe host {self.name!r}: {self.num_cores} cores, need at least 1; correct the host's facts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank runs: its world rank, its host, and its number among the host's ranks."""

    rank: int
    host: str
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All hosts of a job and the place of every rank, in rank order."""

    hosts: tuple[Host, ...]
    places: tuple[RankPlace, ...]

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if len(set(names)) != len(names):
            raise ConfigError(f"cannot describe a cluster: host names repeat in {names}; name each once")
        for index, place in enumerate(self.places):
            if place.rank != index or place.host not in names:
                raise ConfigError(
                    f"cannot describe a cluster: place {index} is rank {place.rank} on"
                    f" {place.host!r}, need rank {index} on one of {names}; list the ranks in order"
                )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)
