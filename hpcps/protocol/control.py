"""Control messages: small, rare, two-sided. JSON text in, frozen dataclasses out, every field checked."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TypeAlias, get_type_hints

from hpcps.errors import ProtocolError

__all__ = [
    "BarrierEnter",
    "BarrierLeave",
    "ControlMessage",
    "DecodeCosts",
    "Done",
    "EndOfData",
    "JoinGroup",
    "LoaderOpen",
    "Order",
    "OrderRequest",
    "Register",
    "RegisterReply",
    "decode_control",
    "encode_control",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Worker to every server: the plan's digest; the first worker adds the plan itself.

    Args:
        rank: world rank of the worker.
        digest: hash of route and rule.
        route: JSON of the route, empty from all but the first worker.
        tensors: JSON of the tensors, likewise.
        rule: JSON of the server-side rule, likewise.
    """

    rank: int
    digest: str
    route: str
    tensors: str
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterReply:
    """Server to worker: empty refusal means that the data path may be opened."""

    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGroup:
    """Worker to every server: from now on a member of this group, so tell it that group's clocks."""

    rank: int
    generation: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCosts:
    """Server to worker: what adding one element of a payload takes there.

    Args:
        server: index of the server.
        codecs: numbers of the codecs that were measured, each once.
        elem_s: seconds an element, for each of them.
    """

    server: int
    codecs: list[int]
    elem_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOpen:
    """Worker to coordinator: a loader with this many samples and this global batch."""

    rank: int
    loader: int
    num_samples: int
    global_batch: int
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRequest:
    """Worker to coordinator: the batch at a position, with what was measured since the last request.

    Args:
        rank: world rank of the worker.
        loader: index of the loader.
        epoch: epoch, from 0.
        index: batch of the epoch, from 0.
        num_epochs: epochs that the job runs, 0 if unknown.
        timed: pairs (samples, seconds) of finished steps, flattened.
        logged: names of logged values.
        sums: weighted sum of each logged value.
        weights: weight of each logged value.
        staleness: largest staleness seen in those steps, in versions.
    """

    rank: int
    loader: int
    epoch: int
    index: int
    num_epochs: int
    timed: list[float]
    logged: list[str]
    sums: list[float]
    weights: list[float]
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Coordinator to worker: which samples of the epoch's permutation are its own in one batch.

    Args:
        loader: index of the loader.
        epoch: epoch of the batch.
        index: batch of the epoch.
        end: the epoch is over for this group; the other fields are void.
        start: position of the worker's first sample in the permutation.
        count: the worker's samples, may be 0.
        group_count: samples of the whole group in this batch.
        num_idle: members of the group without a sample in it.
        share_frac: the group's part of a full global batch.
        generation: grouping that this batch belongs to.
        groups: that grouping's groups as lists of world ranks; empty where the worker has been told before.
    """

    loader: int
    epoch: int
    index: int
    end: bool
    start: int
    count: int
    group_count: int
    num_idle: int
    share_frac: float
    generation: int
    groups: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfData:
    """Group's first worker to every server: no push after this clock until a later one comes."""

    generation: int
    group: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierEnter:
    """Worker to coordinator: arrived at the n-th barrier."""

    rank: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierLeave:
    """Coordinator to workers: all have arrived."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Worker to every server: will send nothing more."""

    rank: int


ControlMessage: TypeAlias = (
    Register
    | RegisterReply
    | JoinGroup
    | DecodeCosts
    | LoaderOpen
    | OrderRequest
    | Order
    | EndOfData
    | BarrierEnter
    | BarrierLeave
    | Done
)
_TYPES: dict[str, type[ControlMessage]] = {
    cls.__name__: cls
    for cls in (
        Register,
        RegisterReply,
        JoinGroup,
        DecodeCosts,
        LoaderOpen,
        OrderRequest,
        Order,
        EndOfData,
        BarrierEnter,
        BarrierLeave,
        Done,
    )
}
_FIELDS = {name: get_type_hints(cls) for name, cls in _TYPES.items()}


def encode_control(message: ControlMessage) -> bytes:
    """A message as UTF-8 JSON."""
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return json.dumps([type(message).__name__, fields], separators=(",", ":")).encode()


def decode_control(data: bytes) -> ControlMessage:
    """Read and check a message.

    Raises:
        ProtocolError: no JSON, an unknown type, or a field that is missing, extra or of the wrong type.
    """
    try:
        name, fields = json.loads(data)
        hints = _FIELDS[name]
        if set(fields) != set(hints):
            raise ValueError(f"fields {sorted(set(fields) ^ set(hints))} missing or unknown")
        for field, hint in hints.items():
            if not _fits(fields[field], hint):
                raise ValueError(f"field {field} is {fields[field]!r}, need {hint}")
        return _TYPES[name](**fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(
            f"cannot read a control message of {len(data)} bytes: {error}; run the same hpcps on every rank"
        ) from error


def _fits(value: object, hint: object) -> bool:
    if hint is int:
        return type(value) is int
    if hint is float:
        return type(value) in (int, float)
    if hint in (bool, str):
        return type(value) is hint
    if hint == list[list[int]]:
        return isinstance(value, list) and all(_fits(item, list[int]) for item in value)
    inner = {list[int]: int, list[float]: float, list[str]: str}
    return isinstance(value, list) and all(_fits(item, inner.get(hint)) for item in value)  # type: ignore[call-overload]
