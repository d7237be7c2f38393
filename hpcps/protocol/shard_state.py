"""What a server remembers of one shard between pushes, and how it takes over what another server remembered."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcps.plan import Shard
from hpcps.protocol.actions import Token
from hpcps.protocol.arrivals import Paces
from hpcps.protocol.key_state import KeyState
from hpcps.protocol.messages import PushHeader

__all__ = ["ShardState", "Window", "taken"]

OFFSETS_KEPT = 64
"""Arrival offsets that the deadline's median is taken over."""


@dataclass(slots=True)
class Window:
    """Pushes of one shard that will make its next version."""

    opened_s: float = 0.0
    groups: dict[int, int] = field(default_factory=dict)
    """Clock of the push of each group in the window."""
    weight: float = 0.0
    decayed: float = 0.0
    share_frac: float = 0.0
    deadline_s: float | None = None


@dataclass(slots=True)
class ShardState:
    """What the server remembers of one shard."""

    shard: Shard
    version: int = -1
    """-1 until the first values are in."""
    received: dict[int, int] = field(default_factory=dict)
    """Newest clock received from each group."""
    settled: dict[int, int] = field(default_factory=dict)
    """Newest clock of each group that was applied or refused."""
    window: Window = field(default_factory=Window)
    missed: tuple[float, frozenset[int]] = (0.0, frozenset())
    """Opening time of the last window and the groups it closed with."""
    offsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=OFFSETS_KEPT))
    paces: Paces = field(default_factory=Paces)
    held: deque[tuple[PushHeader, Token]] = field(default_factory=deque)
    """Pushes of groups that have one in the window already."""
    early: dict[tuple[int, int], tuple[PushHeader, Token]] = field(default_factory=dict)
    """By (group, clock): pushes that overtook the one before them."""


def taken(shard: Shard, given: KeyState, *, now_s: float) -> ShardState:
    """A shard as another server left it, on this server's clock."""
    settled = dict(_pairs(given.settled))
    in_window = dict(_pairs(given.window))
    return ShardState(
        shard,
        version=given.version,
        received=settled | in_window,
        settled=settled,
        window=Window(
            opened_s=now_s - given.window_age_s,
            groups=in_window,
            weight=given.weight,
            decayed=given.decayed,
            share_frac=given.share_frac,
        ),
        missed=(now_s - given.missed_age_s, frozenset(given.missed)),
        offsets_s=deque(given.offsets_s, maxlen=OFFSETS_KEPT),
    )


def _pairs(lists: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(group, clock) for group, clock in lists]
