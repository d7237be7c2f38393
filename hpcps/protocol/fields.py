"""Reads frozen dataclasses from JSON values, every field checked. It guesses at nothing that is wrong."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TypeVar, get_type_hints

__all__ = ["read_fields"]

_Value = TypeVar("_Value")

_LARGEST = 1 << 62
"""Of whole numbers: any count or size fits, and arithmetic in floats does."""

_known_hints: dict[type, dict[str, object]] = {}
"""Looking them up takes longer than reading a message."""


def read_fields(cls: type[_Value], fields: object, *, free: Collection[str] | None = None) -> _Value:
    """Make a value of a dataclass whose fields are numbers, text, or lists of them.

    Args:
        cls: the dataclass.
        fields: what was read.
        free: fields that may hold any number; those of all others are finite and 0 or more. None: all may.

    Raises:
        ValueError: ``fields`` is no object, or one of them is missing, extra, of the wrong type or out of range.
    """
    if cls not in _known_hints:
        _known_hints[cls] = get_type_hints(cls)
    hints = _known_hints[cls]
    if not isinstance(fields, dict):
        raise ValueError(f"got {type(fields).__name__}, need an object of {', '.join(hints)}")
    if set(fields) != set(hints):
        raise ValueError(f"fields {sorted(set(fields) ^ set(hints))} missing or unknown")
    for field, hint in hints.items():
        if not _fits(fields[field], hint):
            raise ValueError(f"field {field} is {fields[field]!r}, need {hint}")
        if free is not None and field not in free and not _in_range(fields[field]):
            raise ValueError(f"field {field} is {fields[field]!r}, need finite numbers of 0 or more")
    return cls(**fields)


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


def _in_range(value: object) -> bool:
    if isinstance(value, list):
        return all(_in_range(item) for item in value)
    if isinstance(value, int):
        return 0 <= value <= _LARGEST
    return not isinstance(value, float) or 0 <= value < math.inf
