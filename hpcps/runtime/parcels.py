"""What one server sends to another, as bytes: a shard with all that belongs to it, or a frame that is sent on.

    head   | kind, 1 B | a shard: JSON of its state and of the arrays' names, dtypes and shapes; a frame: its own head |
    body   a shard: the arrays, each from a multiple of 64 B on; a frame: its payload

Every length, name and type is checked before an array is cut out. Nothing is unpickled or evaluated.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpcps.comm.channel import Array, Bytes
from hpcps.errors import ProtocolError
from hpcps.protocol.fields import read_fields
from hpcps.protocol.key_state import KeyState
from hpcps.runtime.shard_store import ShardArrays

__all__ = [
    "Kind",
    "ShardParcel",
    "pack_arrays",
    "pack_frame",
    "pack_shard",
    "unpack_arrays",
    "unpack_head",
    "unpack_shard",
]

_ALIGN_BYTES = 64
_DTYPES = ("float32", "float64", "int32", "int64", "uint8", "bool")


class Kind(enum.IntEnum):
    """What a parcel holds."""

    SHARD = 1
    FRAME = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParcel:
    """A shard on its way.

    Args:
        key: the shard.
        epoch: epoch of the route in which the receiver has it.
        room: its room there.
        began_s: seconds that the giving server spent on it before it sent it off.
        state: what the protocol knows.
        given: the rest.
    """

    key: int
    epoch: int
    room: int
    began_s: float
    state: KeyState
    given: ShardArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What stands in the head of a shard's parcel besides the state."""

    key: int
    epoch: int
    room: int
    began_s: float
    presence: list[int]
    options: list[float]
    options_clock: int
    window_bytes: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


def pack_frame(head: bytes) -> bytes:
    """The head of a parcel that holds a frame; its body is the payload."""
    return bytes([Kind.FRAME]) + head


def pack_shard(parcel: ShardParcel) -> tuple[bytes, Bytes]:
    """Head and body of a parcel that holds a shard."""
    given = parcel.given
    names, dtypes, shapes, body = pack_arrays(given.arrays)
    head = _Head(
        key=parcel.key,
        epoch=parcel.epoch,
        room=parcel.room,
        began_s=parcel.began_s,
        presence=given.presence,
        options=given.options,
        options_clock=given.options_clock,
        window_bytes=given.window_bytes,
        names=names,
        dtypes=dtypes,
        shapes=shapes,
    )
    text = json.dumps([dataclasses.asdict(head), dataclasses.asdict(parcel.state)], separators=(",", ":"))
    return bytes([Kind.SHARD]) + text.encode(), body


def unpack_head(head: bytes) -> tuple[Kind, bytes]:
    """Kind of a parcel, and the rest of its head.

    Raises:
        ProtocolError: an unknown kind.
    """
    try:
        return Kind(head[0]), head[1:]
    except (ValueError, IndexError) as error:
        raise _unreadable(head, f"{error}") from error


def unpack_shard(head: bytes, body: Bytes) -> ShardParcel:
    """Read what `pack_shard` wrote, without the kind; the arrays are views of the body.

    Raises:
        ProtocolError: something is missing, extra, of the wrong type, or does not fit the body.
    """
    try:
        first, second = json.loads(head)
        found, state = read_fields(_Head, first), read_fields(KeyState, second)
        arrays = unpack_arrays(found.names, found.dtypes, found.shapes, body)
        fine = min(found.key, found.epoch, found.room, found.window_bytes, found.options_clock + 1) >= 0
        if not fine or not all(math.isfinite(number) for number in (found.began_s, *found.options)):
            raise ValueError(f"a number is out of range in {first}")
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(head, f"{error}") from error
    given = ShardArrays(
        arrays=arrays,
        presence=found.presence,
        options=found.options,
        options_clock=found.options_clock,
        window_bytes=found.window_bytes,
    )
    return ShardParcel(
        key=found.key, epoch=found.epoch, room=found.room, began_s=found.began_s, state=state, given=given
    )


def pack_arrays(arrays: Mapping[str, Array]) -> tuple[list[str], list[str], list[list[int]], Bytes]:
    """Names, dtypes and shapes of arrays, and all of their bytes.

    Raises:
        ProtocolError: an array has a dtype that does not travel.
    """
    for name, array in arrays.items():
        if str(array.dtype) not in _DTYPES:
            raise ProtocolError(
                f"cannot send {name!r} to another server: its dtype is {array.dtype}, need one of {', '.join(_DTYPES)}"
            )
    body = np.zeros(sum(_padded(array.nbytes) for array in arrays.values()), np.uint8)
    at = 0
    for array in arrays.values():
        body[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _padded(array.nbytes)
    shapes = [list(array.shape) for array in arrays.values()]
    return list(arrays), [str(array.dtype) for array in arrays.values()], shapes, body


def unpack_arrays(names: list[str], dtypes: list[str], shapes: list[list[int]], body: Bytes) -> dict[str, Array]:
    """Cut arrays out of their bytes.

    Raises:
        ValueError: the lists differ in length, a name stands twice, a dtype does not travel, or the bytes do not fit.
    """
    if not len(set(names)) == len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes of arrays")
    arrays: dict[str, Array] = {}
    at = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype not in _DTYPES or any(length < 0 for length in shape):
            raise ValueError(f"array {name!r} of {dtype} {shape}")
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if at + num_bytes > body.size:
            raise ValueError(f"array {name!r} ends at byte {at + num_bytes} of {body.size}")
        arrays[name] = body[at : at + num_bytes].view(dtype).reshape(shape)
        at += _padded(num_bytes)
    if at != body.size:
        raise ValueError(f"{body.size} bytes of arrays, need {at}")
    return arrays


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _unreadable(head: bytes, why: str) -> ProtocolError:
    return ProtocolError(
        f"cannot read a parcel with a head of {len(head)} bytes: {why}; run the same hpcps on every rank", op="move"
    )
