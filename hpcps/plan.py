"""What was decided: roles, shards, routes, groups, codecs. Frozen values with a digest, no decisions.

Flat space: the trainable tensors of one wire dtype, one codec rule and one server of the user's choice (mostly none),
laid end to end in registration order.
A shard is one range of that space. It is the unit of allreduce, push, window, version and pull,
so a shard is also the bucket of the data path.

    tensors   |--a--|------b------|-c-|
    shards    |---0----|----1----|--2-|      pieces of shard 0: a[0:], b[:3]
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass
from typing import TypeAlias

from hpcps.errors import ConfigError, PlanError

__all__ = [
    "Codec",
    "CodecSpec",
    "Group",
    "Grouping",
    "Piece",
    "Roles",
    "Route",
    "Shard",
    "Space",
    "TensorSpec",
    "WIRE_DTYPES",
    "digest",
]

Space: TypeAlias = tuple[str, str, int]
"""Wire dtype, codec rule, and the server that the user chose or -1."""

WIRE_DTYPES = {"float32": 4, "float64": 8}
"""Dtypes that gradients and parameters have on the wire and on servers, with their bytes."""


class Codec(enum.IntEnum):
    """How a payload is encoded; the number is the one on the wire. ``cuda_src/elements.h`` has the formats."""

    NONE = 0
    """The values as they are, in the shard's dtype."""
    FP32 = 1
    FP16 = 2
    BF16 = 3
    INT8 = 4
    ONEBIT = 5
    TOPK = 6
    PACKED = 7
    """The values without the zeros."""


_BLOCK = 256
"""Elements that share a scale (int8, onebit) or a count (packed)."""
_TOPK_HEADER_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec with its setting, and what others must know of it without running it.

    Args:
        codec: which.
        keep_frac: part of the elements that top-k sends, above 0 to 1; 0 for all other codecs.
    """

    codec: Codec
    keep_frac: float = 0.0

    def __post_init__(self) -> None:
        fits = 0 < self.keep_frac <= 1 if self.codec is Codec.TOPK else self.keep_frac == 0
        if not fits:
            raise ConfigError(
                f"cannot use codec {self.codec.name.lower()} with part {self.keep_frac:g}: need above 0 to 1 for topk"
                " and none for the others; write for example topk:0.01"
            )

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Read ``none``, ``fp32``, ``fp16``, ``bf16``, ``int8``, ``onebit``, ``packed``, ``topk`` or ``topk:0.05``.

        Raises:
            ConfigError: anything else.
        """
        name, colon, part = text.strip().lower().partition(":")
        try:
            codec = Codec[name.upper()]
            keep_frac = float(part) if colon else 0.01 if codec is Codec.TOPK else 0.0
        except (KeyError, ValueError):
            names = ", ".join(each.name.lower() for each in Codec)
            raise ConfigError(f"cannot read codec {text!r}: need one of {names}; write for example topk:0.01") from None
        return cls(codec=codec, keep_frac=keep_frac)

    def __str__(self) -> str:
        name = self.codec.name.lower()
        return f"{name}:{self.keep_frac!r}" if self.codec is Codec.TOPK else name

    @property
    def lossless(self) -> bool:
        """True if what is decoded equals what was encoded, bit for bit (fp32: of a float32 shard)."""
        return self.codec in (Codec.NONE, Codec.FP32, Codec.PACKED)

    @property
    def sums_while_encoded(self) -> bool:
        """True if payloads with equal scales can be added without decoding them."""
        return self.codec is Codec.INT8

    def keep(self, numel: int) -> int:
        """Elements that top-k aims at, at least 1 of any; 0 for all other codecs."""
        return min(numel, max(1, round(self.keep_frac * numel))) if self.keep_frac else 0

    def wire_bytes(self, numel: int, itemsize: int = 4) -> int:
        """Largest payload of so many elements.

        Args:
            numel: elements, 0 or more.
            itemsize: bytes of an element of the shard; only none follows it.
        """
        num_blocks = -(-numel // _BLOCK)
        if self.codec is Codec.NONE:
            return numel * itemsize
        if self.codec is Codec.FP32:
            return numel * 4
        if self.codec in (Codec.FP16, Codec.BF16):
            return numel * 2
        if self.codec is Codec.INT8:
            return num_blocks + numel
        if self.codec is Codec.ONEBIT:
            return 4 * num_blocks + -(-numel // 8)
        if self.codec is Codec.TOPK:
            most = self.keep(numel) * 51 // 50  # 2 % more than asked
            gap_bytes = min(5 * most, most + numel // 127)
            return _TOPK_HEADER_BYTES + gap_bytes + 2 * most
        return numel * 4 + num_blocks  # packed: at worst all blocks as they are, with a count each


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
        codec: the codec that its rule names, in its one spelling (``str`` of a ``CodecSpec``), or ``auto``.
        server: index of the server that the user chose for it, -1: any.
    """

    name: str
    numel: int
    dtype: str
    param_group: int
    codec: str = "none"
    server: int = -1

    @property
    def space(self) -> Space:
        """The flat space that it lies in."""
        return self.dtype, self.codec, self.server


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
    """One range of a flat space.

    Args:
        key: index of the shard in its route.
        server: index among the servers (not a world rank).
        dtype: wire dtype.
        begin: first element in its flat space.
        numel: elements, at least 1.
        pieces: what the range holds, in order of offset.
        codec: the rule of that space, see ``TensorSpec``.
        pinned: the user chose its server, so it never moves.
        room: where it lies on its server; every server has rooms of one size, numbered from 0.
        epoch: epoch of the route in which it came to this server.
    """

    key: int
    server: int
    dtype: str
    begin: int
    numel: int
    pieces: tuple[Piece, ...]
    codec: str = "none"
    pinned: bool = False
    room: int = 0
    epoch: int = 0

    @property
    def space(self) -> Space:
        """The flat space that it is cut from."""
        return self.dtype, self.codec, self.server if self.pinned else -1

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

    def moved(self, key: int, *, server: int, room: int, epoch: int) -> Route:
        """The route in which a shard is elsewhere."""
        shards = list(self.shards)
        shards[key] = dataclasses.replace(shards[key], server=server, room=room, epoch=epoch)
        return Route(epoch=max(epoch, self.epoch), num_servers=self.num_servers, shards=tuple(shards))

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
