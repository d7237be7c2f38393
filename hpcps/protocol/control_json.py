"""Control messages as JSON text: every field is checked, and who sent it, before anybody acts on it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import get_args

from hpcps.errors import ProtocolError
from hpcps.protocol.control import (
    BarrierLeave,
    ControlMessage,
    DecodeCosts,
    GuardLevel,
    Move,
    Moved,
    Order,
    RouteChange,
    ServerFacts,
    ServerLoad,
)
from hpcps.protocol.fields import read_fields

__all__ = ["check_sender", "decode_control", "encode_control"]

_TYPES: dict[str, type[ControlMessage]] = {cls.__name__: cls for cls in get_args(ControlMessage)}
_FREE = ("sums", "cost_weights", "agreement")
"""Fields of any sign. The sums of what a script logs need not even be finite."""
_SAME_LENGTH = (("logged", "sums", "weights"), ("keys", "pushes"), ("keys", "servers", "rooms"), ("codecs", "elem_s"))
"""Lists of one message that belong together."""


def encode_control(message: ControlMessage) -> bytes:
    """A message as UTF-8 JSON."""
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return json.dumps([type(message).__name__, fields], separators=(",", ":")).encode()


def decode_control(data: bytes) -> ControlMessage:
    """Read and check a message.

    Raises:
        ProtocolError: no JSON, an unknown type, or a field that is missing, extra, of the wrong type or out of range.
    """
    try:
        name, fields = json.loads(data)
        message = read_fields(_TYPES[name], fields, free=_FREE)
        for names in _SAME_LENGTH:
            if fields.keys() >= set(names) and len({len(fields[each]) for each in names}) > 1:
                raise ValueError(f"fields {', '.join(names)} differ in length")
        if not all(map(math.isfinite, (*fields.get("cost_weights", ()), fields.get("agreement", 0.0)))):
            raise ValueError("field cost_weights or agreement is not finite")
        if len(fields.get("timed", ())) % 2:
            raise ValueError("field timed has an odd length, need pairs")
        return message
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(
            f"cannot read a control message of {len(data)} bytes: {error}; run the same hpcps on every rank"
        ) from error


def check_sender(message: ControlMessage, source: int, *, servers: Sequence[int], workers: Sequence[int]) -> None:
    """Refuse a message that speaks for somebody else, a decision that the coordinator did not take among them.

    Args:
        message: what came; one that names no sender is anybody's of the job.
        source: world rank that it came from.
        servers: world ranks of the servers.
        workers: world ranks of the workers.

    Raises:
        ProtocolError: it was for another rank to say.
    """
    if isinstance(message, Order | BarrierLeave | RouteChange | GuardLevel | Move):
        named: object = servers[0]
    elif isinstance(message, ServerFacts | ServerLoad | Moved | DecodeCosts):
        named = servers[message.server] if message.server < len(servers) else None
    else:
        named = getattr(message, "rank", source)
    if named != source or source not in (*servers, *workers):
        raise ProtocolError(
            f"cannot accept {type(message).__name__} from rank {source}: it is for rank {named} to say; run the same"
            " hpcps on every rank",
            rank=source,
        )
