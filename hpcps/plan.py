"""What was decided: roles, shards, routes, groups. Frozen values with a digest, no decisions.

Flat space: the trainable tensors of one wire dtype, laid end to end in registration order.
A shard is one range of that space. It is the unit of allreduce, push, window, version and pull,
so a shard is also the bucket of the data path.

    tensors   |--a--|------b------|-c-|
    shards    |---0----|----1----|--2-|      pieces of shard 0: a[0:], b[:3]
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from hpcps.errors import PlanError

__all__ = ["Group", "Grouping", "Piece", "Roles", "Route", "Shard", "TensorSpec", "WIRE_DTYPES", "digest"]

WIRE_DTYPES = {"float32": 4, "float64": 8}
"""Dtypes that gradients and parameters have on the wire and on servers, with their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """World ranks of servers and of workers, each in ascending order.

    In a world of one, rank 0 is both: the embedded form.
    """

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def embedded(self) -> bool:
        """True where one process is server and worker."""
        return self.servers == self.workers

    def is_server(self, rank: int) -> bool:
        """True if the rank serves."""
        return rank in self.servers


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One trainable tensor as the servers know it.

    Args:
        name: its first name in the model.
        numel: number of real elements (a complex element counts twice), may be 0.
        dtype: wire dtype, a key of ``WIRE_DTYPES``.
        param_group: index of the optimizer's parameter group.
    """

    name: str
    numel: int
    dtype: str
    param_group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements ``start:stop`` of a tensor, standing at ``offset`` in a shard."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One range of the flat space of a dtype.

    Args:
        key: index of the shard in its route.
        server: index among the servers (not a world rank).
        dtype: wire dtype.
        begin: first element in the flat space of that dtype.
        numel: elements, at least 1.
        pieces: what the range holds, in order of offset.
    """

    key: int
    server: int
    dtype: str
    begin: int
    numel: int
    pieces: tuple[Piece, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return WIRE_DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole shard."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which server holds which shard. ``shards[k].key == k``."""

    epoch: int
    num_servers: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        for index, shard in enumerate(self.shards):
            if shard.key != index or not 0 <= shard.server < self.num_servers:
                raise PlanError(
                    f"cannot build a route: shard {index} has key {shard.key} on server"
                    f" {shard.server} of {self.num_servers}; keys count from 0, servers lie in range"
                )

    def of_server(self, server: int) -> tuple[Shard, ...]:
        """The shards of one server, in key order."""
        return tuple(shard for shard in self.shards if shard.server == server)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Workers that step together. ``workers`` are world ranks in ascending order."""

    index: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """A partition of the workers into groups. A new grouping has the next generation."""

    generation: int
    groups: tuple[Group, ...]

    def group_of(self, rank: int) -> Group:
        """The group of a worker.

        Raises:
            PlanError: the rank is in no group.
        """
        for group in self.groups:
            if rank in group.workers:
                return group
        raise PlanError(
            f"cannot find the group of rank {rank}: generation {self.generation} has"
            f" {[group.workers for group in self.groups]}; the rank is no worker",
            rank=rank,
        )


def digest(plan: object) -> str:
    """Hash a plan (any dataclass of this module) so that ranks can compare it."""
    if not dataclasses.is_dataclass(plan) or isinstance(plan, type):
        raise PlanError(f"cannot hash {type(plan).__name__}: need a plan value; pass a dataclass of hpcps.plan")
    text = json.dumps(dataclasses.asdict(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
