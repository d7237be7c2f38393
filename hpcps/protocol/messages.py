"""Fields and byte layout of what crosses the wire. Every field that comes off it is checked here.

A push is one frame in one slot:

    | header, 128 B | options, float64 | presence, 1 B a piece | padding to 64 B | payload |

The payload is the group's mean gradient of one shard (or its first values), encoded as ``codec`` says;
``weight`` says how many samples it stands for. Words are little-endian. Nothing is unpickled or evaluated.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from dataclasses import dataclass

from hpcps.errors import ProtocolError
from hpcps.plan import Codec

__all__ = [
    "FrameShape",
    "HEADER_BYTES",
    "Kind",
    "MAGIC",
    "PROTOCOL_VERSION",
    "PushHeader",
]

MAGIC = 0x48505331
"""Reads "1SPH" in memory: first field of every frame."""
PROTOCOL_VERSION = 2
HEADER_BYTES = 128
ALIGN_BYTES = 64
"""A cache line: header, flags and payload never share one."""

_LAYOUT = struct.Struct("<IHBB iiiii i qqq ddd qqqq")


class Kind(enum.IntEnum):
    """What a frame is for."""

    INIT = 1
    GRADIENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PushHeader:
    """The header of one frame.

    Args:
        kind: first values or a gradient.
        codec: encoding of the payload.
        key: shard that the payload belongs to.
        route_epoch: epoch of the route in which the shard came to the server that the sender knows of.
        generation: generation of the sender's grouping.
        group: index of the sender's group, below ``num_groups``.
        num_groups: groups of that generation.
        sender: world rank of the sender.
        clock: step of the group, from 1; first values have 0.
        since_clock: the group's first step in this generation, from 1.
        base_version: version of the parameters that the gradient was computed on.
        weight: samples (or tokens) that the payload is the mean of, 0 or more.
        share_frac: the group's part of a full global batch, 0 to 1.
        sample_cost: mean cost of a sample of the payload, in units of a mean sample of the data; 1 where unknown.
        numel: elements of the shard.
        meta_bytes: bytes of options and presence, without padding.
        payload_bytes: bytes of the payload.
        checksum: of the payload, 0 where none was asked for.
    """

    kind: Kind
    codec: Codec = Codec.NONE
    key: int
    route_epoch: int
    generation: int
    group: int
    num_groups: int
    sender: int
    clock: int
    since_clock: int = 1
    base_version: int
    weight: float
    share_frac: float
    sample_cost: float = 1.0
    numel: int
    meta_bytes: int
    payload_bytes: int
    checksum: int = 0

    def pack(self) -> bytes:
        """The header as ``HEADER_BYTES`` bytes."""
        head = _LAYOUT.pack(MAGIC, PROTOCOL_VERSION, *(getattr(self, name) for name in _NAMES))
        return head.ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(data: bytes) -> PushHeader:
        """Read and check a header.

        Raises:
            ProtocolError: too short, wrong magic or version, or a field out of its range.
        """
        if len(data) < _LAYOUT.size:
            raise ProtocolError(
                f"cannot read a push header: got {len(data)} bytes, need {_LAYOUT.size}; the sender's frame is cut"
            )
        magic, version, *fields = _LAYOUT.unpack_from(data)
        if magic != MAGIC or version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"cannot read a push header: got magic {magic:#x} version {version}, need {MAGIC:#x} version"
                f" {PROTOCOL_VERSION}; run the same hpcps on every rank"
            )
        values = dict(zip(_NAMES, fields, strict=True))
        try:
            values["kind"], values["codec"] = Kind(values["kind"]), Codec(values["codec"])
        except ValueError as error:
            raise ProtocolError(f"cannot read a push header: {error}; run the same hpcps on every rank") from error
        header = PushHeader(**values)
        header._check()
        return header

    def _check(self) -> None:
        counts = (self.key, self.generation, self.group, self.sender, self.clock, self.numel, self.meta_bytes)
        fine = (
            min(counts) >= 0
            and self.group < self.num_groups
            and 0 <= self.weight < float("inf")
            and 0 <= self.share_frac <= 1
            and 0 <= self.sample_cost < float("inf")
            and self.payload_bytes >= 0
            and (self.codec is Codec.NONE if self.kind is Kind.INIT else 1 <= self.since_clock <= self.clock)
        )
        if not fine:
            raise ProtocolError(
                f"cannot accept a push header: {self} has a field out of range; run the same hpcps on every rank",
                rank=self.sender,
                key=self.key,
                op="push",
            )


_NAMES = (
    "kind",
    "codec",
    "key",
    "route_epoch",
    "generation",
    "group",
    "num_groups",
    "sender",
    "clock",
    "since_clock",
    "base_version",
    "weight",
    "share_frac",
    "sample_cost",
    "numel",
    "meta_bytes",
    "payload_bytes",
    "checksum",
)
assert {field.name for field in dataclasses.fields(PushHeader)} == set(_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameShape:
    """Sizes of the frames of one shard: all that a receiver needs to cut one up safely.

    Args:
        num_options: float64 option words (parameter groups times numeric options).
        num_pieces: pieces of the shard, one presence byte each.
        payload_bytes: largest payload.
    """

    num_options: int
    num_pieces: int
    payload_bytes: int

    @property
    def meta_bytes(self) -> int:
        """Bytes of options and presence."""
        return 8 * self.num_options + self.num_pieces

    @property
    def payload_offset(self) -> int:
        """Where the payload starts in a frame."""
        return HEADER_BYTES + -(-self.meta_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def pack_meta(self, options: tuple[float, ...], presence: bytes) -> bytes:
        """Options and presence, padded up to the payload."""
        if len(options) != self.num_options or len(presence) != self.num_pieces:
            raise ProtocolError(
                f"cannot pack a frame: got {len(options)} options and {len(presence)} presence bytes, need"
                f" {self.num_options} and {self.num_pieces}; the optimizer's options changed in number"
            )
        meta = struct.pack(f"<{self.num_options}d", *options) + presence
        return meta.ljust(self.payload_offset - HEADER_BYTES, b"\0")

    def unpack_meta(self, meta: bytes) -> tuple[tuple[float, ...], bytes]:
        """Options and presence of a frame.

        Raises:
            ProtocolError: the bytes are fewer than this shape needs.
        """
        if len(meta) < self.meta_bytes:
            raise ProtocolError(
                f"cannot read a frame: got {len(meta)} bytes of options, need {self.meta_bytes}; the sender's plan"
                " differs"
            )
        options = struct.unpack_from(f"<{self.num_options}d", meta)
        return options, bytes(meta[8 * self.num_options : self.meta_bytes])
