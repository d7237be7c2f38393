"""What the server's state machine asks its runtime to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Accumulate", "Action", "Close", "Load", "Notify", "Refuse"]

Token: TypeAlias = Any
"""The runtime's own handle of a frame (its slot); the protocol hands it back untouched."""


@dataclass(frozen=True, slots=True)
class Load:
    """Take the frame's payload as the shard's first values; the version is 0; free the slot."""

    key: int
    token: Token


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the frame's payload times ``weight`` to the shard's window; then free the slot.

    For the metrics: ``staleness`` is the versions between the gradient's parameters and the shard's when it was let in,
    ``offset_s`` the seconds since the window opened that it was for, ``late`` that it missed that window.
    """

    key: int
    token: Token
    weight: float
    staleness: int
    offset_s: float = 0.0
    late: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """Divide the window's sum by ``total_weight``, update the shard, publish ``version``.

    A ``total_weight`` of 0 means: nothing to learn from, publish the values as they are.
    ``lr_scale`` multiplies the learning rate. ``num_pushes`` is for the metrics.
    """

    key: int
    version: int
    total_weight: float
    lr_scale: float
    num_pushes: int


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell the workers of each group which of its clocks is settled (applied or refused)."""

    key: int
    version: int
    clocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Free the slot without use, count and log the reason.

    ``dropped_in_a_row`` is 0, or for a push over the cap of staleness how many of its group were in a row.
    """

    key: int
    token: Token
    reason: str
    dropped_in_a_row: int = 0


Action: TypeAlias = Load | Accumulate | Close | Notify | Refuse
