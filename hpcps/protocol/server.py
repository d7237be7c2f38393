"""The server's half of the protocol: which push counts, how much, and when a shard moves on.

Refuses to hold arrays or read a clock: headers and times go in, actions come out. A shard has at most
one push of each group in its window. A group that comes round again before the window closed either
closes it (quorum reached: the others are the late ones) or waits in its slot, and so is held back by
its own credits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcps.config import StalenessConfig, WindowConfig
from hpcps.plan import Shard
from hpcps.policy.staleness import StalenessPolicy
from hpcps.policy.window import WindowFacts, WindowPolicy
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify, Refuse, Token
from hpcps.protocol.messages import Kind, PushHeader

__all__ = ["ServerProtocol"]

_OFFSETS_KEPT = 64
"""Arrival offsets that the deadline's median is taken over."""


@dataclass(slots=True)
class _Window:
    """Pushes of one shard that will make its next version."""

    opened_s: float = 0.0
    groups: dict[int, int] = field(default_factory=dict)
    """Clock of the push of each group in the window."""
    weight: float = 0.0
    decayed: float = 0.0
    share_frac: float = 0.0
    deadline_s: float | None = None


@dataclass(slots=True)
class _Key:
    """What the server remembers of one shard."""

    version: int = -1
    """-1 until the first values are in."""
    received: dict[int, int] = field(default_factory=dict)
    """Newest clock received from each group."""
    settled: dict[int, int] = field(default_factory=dict)
    """Newest clock of each group that was applied or refused."""
    window: _Window = field(default_factory=_Window)
    missed: tuple[float, frozenset[int]] = (0.0, frozenset())
    """Opening time of the last window and the groups it closed with."""
    offsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=_OFFSETS_KEPT))
    held: deque[tuple[PushHeader, Token]] = field(default_factory=deque)
    """Pushes of groups that have one in the window already."""
    early: dict[tuple[int, int], tuple[PushHeader, Token]] = field(default_factory=dict)
    """By (group, clock): pushes that overtook the one before them."""


class ServerProtocol:
    """State of one server's shards.

    Args:
        shards: the shards that this server holds.
        window: when windows close.
        staleness: what late pushes count.
        num_workers: workers of the job; there are no more groups than that.
        adaptive: the optimizer is scale-free in the gradient, so a decay acts on the learning rate.
        overlap: versions that every gradient is late by choice; only what comes on top decays.
        route_epoch: epoch of the route in force.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        window: WindowConfig,
        staleness: StalenessConfig,
        num_workers: int,
        adaptive: bool,
        overlap: int = 0,
        route_epoch: int = 0,
    ) -> None:
        self._keys = {shard.key: _Key() for shard in shards}
        self._numel = {shard.key: shard.numel for shard in shards}
        self._window_policy = WindowPolicy(window)
        self._staleness_policy = StalenessPolicy(staleness)
        self._num_workers = num_workers
        self._adaptive = adaptive
        self._overlap = overlap
        self._route_epoch = route_epoch
        self.generation = 0
        self._num_groups = 0
        self._ended: dict[int, int] = {}
        self._ended_ahead: dict[tuple[int, int], int] = {}

    def version(self, key: int) -> int:
        """Version of a shard, -1 before its first values."""
        return self._keys[key].version

    @property
    def loaded(self) -> bool:
        """True once every shard has its first values."""
        return all(state.version >= 0 for state in self._keys.values())

    @property
    def next_deadline_s(self) -> float | None:
        """When ``on_timer`` wants to be called, None for never."""
        deadlines = [state.window.deadline_s for state in self._keys.values() if state.window.deadline_s is not None]
        return min(deadlines, default=None)

    def on_push(self, header: PushHeader, token: Token, *, now_s: float) -> list[Action]:
        """A frame has arrived."""
        key = header.key
        state = self._keys.get(key)
        if state is None or header.route_epoch != self._route_epoch or header.numel != self._numel[key]:
            return [Refuse(key, token, f"wrong route: epoch {header.route_epoch}, need {self._route_epoch}")]
        if header.kind is Kind.INIT:
            return self._load(state, header, token)
        if state.version < 0:
            return [Refuse(key, token, "no first values yet")]
        if not 0 < header.num_groups <= self._num_workers:
            return [Refuse(key, token, f"{header.num_groups} groups of {self._num_workers} workers")]
        actions: list[Action] = []
        if header.generation > self.generation:
            actions += self._regroup(header, now_s=now_s)
        self._num_groups = self._num_groups or header.num_groups
        if header.generation < self.generation or header.num_groups != self._num_groups:
            return [*actions, Refuse(key, token, f"old grouping: generation {header.generation}")]
        if header.clock <= state.received.get(header.group, 0):
            return [*actions, Refuse(key, token, f"duplicate: clock {header.clock}")]
        if header.clock > state.received.get(header.group, 0) + 1:
            if (header.group, header.clock) in state.early:
                return [*actions, Refuse(key, token, f"duplicate: clock {header.clock}")]
            state.early[header.group, header.clock] = (header, token)
            return actions
        following: tuple[PushHeader, Token] | None = (header, token)
        while following is not None:
            actions += self._take(state, *following, now_s=now_s)
            following = state.early.pop((header.group, state.received[header.group] + 1), None)
        return actions

    def _take(self, state: _Key, header: PushHeader, token: Token, *, now_s: float) -> list[Action]:
        """The next push of a group: into the window, or held until there is a new one."""
        actions: list[Action] = []
        state.received[header.group] = header.clock
        if header.group in state.window.groups and self._quorum_reached(state):
            actions += self._close(header.key, state)
            actions += self._drain(state, now_s=now_s)
        if header.group in state.window.groups or any(each.group == header.group for each, _ in state.held):
            state.held.append((header, token))
        else:
            actions += self._admit(state, header, token, now_s=now_s)
        return actions + self._settle(header.key, state, now_s=now_s)

    def on_timer(self, *, now_s: float) -> list[Action]:
        """Time has passed: close what is due."""
        return [action for key, state in self._keys.items() for action in self._settle(key, state, now_s=now_s)]

    def on_end_of_data(self, group: int, clock: int, *, generation: int, now_s: float) -> list[Action]:
        """A group sends nothing after ``clock`` until a later push says otherwise: wait for it no longer."""
        if generation > self.generation:
            self._ended_ahead[generation, group] = clock
        if generation != self.generation:
            return []
        self._ended[group] = clock
        return self.on_timer(now_s=now_s)

    def settled(self, key: int) -> Notify:
        """The notice that a newly joined worker needs."""
        state = self._keys[key]
        return Notify(key, state.version, tuple(sorted(state.settled.items())))

    def _load(self, state: _Key, header: PushHeader, token: Token) -> list[Action]:
        if state.version >= 0:
            return [Refuse(header.key, token, "first values are in already")]
        state.version = 0
        return [Load(header.key, token), self.settled(header.key)]

    def _regroup(self, header: PushHeader, *, now_s: float) -> list[Action]:
        """A new grouping begins: what the old one left open is closed as it stands.

        Workers regroup together, between two steps: all groups' first push of a generation has the same clock. This
        push need not be one of those: it may have overtaken them.
        """
        actions: list[Action] = []
        for key, state in self._keys.items():
            while state.window.groups:
                actions += self._close(key, state)
                actions += self._drain(state, now_s=now_s)
            state.received = dict.fromkeys(range(header.num_groups), header.since_clock - 1)
            state.settled = dict(state.received)
        self.generation = header.generation
        self._num_groups = header.num_groups
        ahead, self._ended_ahead = self._ended_ahead, {}
        self._ended = {group: clock for (generation, group), clock in ahead.items() if generation == self.generation}
        return actions

    def _admit(self, state: _Key, header: PushHeader, token: Token, *, now_s: float) -> list[Action]:
        staleness = state.version - header.base_version
        decision = self._staleness_policy.decide(min(staleness, max(0, staleness - self._overlap)))
        if not decision.accept:
            state.settled[header.group] = header.clock
            return [Refuse(header.key, token, decision.reason), self.settled(header.key)]
        window = state.window
        late_since_s, had = state.missed
        if not window.groups:
            window.opened_s = now_s
        if had and header.group not in had:
            state.offsets_s.append(now_s - late_since_s)
        elif window.groups:
            state.offsets_s.append(now_s - window.opened_s)
        window.groups[header.group] = header.clock
        window.weight += header.weight
        window.decayed += header.weight * decision.factor
        window.share_frac += header.share_frac
        return [Accumulate(header.key, token, header.weight * decision.factor, staleness)]

    def _settle(self, key: int, state: _Key, *, now_s: float) -> list[Action]:
        """Close the window if it is due, let held pushes in, and again."""
        actions: list[Action] = []
        while state.window.groups:
            decision = self._window_policy.decide(self._facts(state, now_s=now_s))
            state.window.deadline_s = decision.deadline_s
            held_back = any(header.group in state.window.groups for header, _ in state.held)
            if not decision.close and not (held_back and self._quorum_reached(state)):
                break
            actions += self._close(key, state)
            actions += self._drain(state, now_s=now_s)
        return actions

    def _drain(self, state: _Key, *, now_s: float) -> list[Action]:
        """Let held pushes into the new window, in order of arrival, one a group."""
        actions: list[Action] = []
        waiting, state.held = state.held, deque()
        for header, token in waiting:
            if header.group in state.window.groups:
                state.held.append((header, token))
            else:
                actions += self._admit(state, header, token, now_s=now_s)
        return actions

    def _close(self, key: int, state: _Key) -> list[Action]:
        window = state.window
        fraction = min(1.0, window.share_frac)
        if abs(fraction - 1) < 1e-9:
            fraction = 1.0
        total, scale = window.weight, fraction
        if self._adaptive and window.weight > 0:
            total, scale = window.decayed, fraction * window.decayed / window.weight
        state.version += 1
        state.settled.update(window.groups)
        state.missed = (window.opened_s, frozenset(window.groups))
        state.window = _Window()
        return [Close(key, state.version, total, scale, len(window.groups)), self.settled(key)]

    def _facts(self, state: _Key, *, now_s: float) -> WindowFacts:
        return WindowFacts(
            num_arrived=len(state.window.groups),
            num_live=self._num_live(state),
            opened_s=state.window.opened_s,
            now_s=now_s,
            offsets_s=tuple(state.offsets_s),
        )

    def _num_live(self, state: _Key) -> int:
        """Groups in the window, and groups that still owe a push."""
        return sum(
            group in state.window.groups or self._ended.get(group, -1) != state.received.get(group, 0)
            for group in range(self._num_groups)
        )

    def _quorum_reached(self, state: _Key) -> bool:
        return self._window_policy.decide(self._facts(state, now_s=float("inf"))).close
