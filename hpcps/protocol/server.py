"""The server's half of the protocol: which push counts, how much, and when a shard moves on.

Refuses to hold arrays or read a clock: headers and times go in, actions come out. A shard has at most
one push of each group in its window. A group that comes round again before the window closed either
closes it (quorum reached: the others are the late ones) or waits in its slot, and so is held back by
its own credits. A shard may go to another server at any time (`hand_over`, `take_over`): what counts and
what is a duplicate goes with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hpcps.config import StalenessConfig, WindowConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Shard
from hpcps.policy.staleness import StalenessPolicy
from hpcps.policy.window import WindowFacts, WindowPolicy
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify, Refuse, Token
from hpcps.protocol.arrivals import GroupCounts, Paces
from hpcps.protocol.key_state import KeyState
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.shard_state import ShardState, Window, taken

__all__ = ["ServerProtocol"]


class ServerProtocol:
    """State of one server's shards.

    Args:
        shards: the shards that this server holds.
        window: when windows close.
        staleness: what late pushes count.
        num_workers: workers of the job; there are no more groups than that.
        adaptive: the optimizer is scale-free in the gradient, so a decay acts on the learning rate.
        overlap: versions that every gradient is late by choice; only what comes on top decays.

    Attributes:
        num_queued: frames that have come and are still to be told of; the runtime keeps it. Nothing closes early
            while there are some, and ``next_deadline_s`` is then due at once.
        counts: what became of each group's pushes, by generation and group.
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
    ) -> None:
        self._keys = {shard.key: ShardState(shard) for shard in shards}
        self._window_policy = WindowPolicy(window)
        self._staleness_policy = StalenessPolicy(staleness)
        self._num_workers = num_workers
        self._adaptive = adaptive
        self._overlap = overlap
        self.generation = 0
        self._since_clock = 1
        self._num_groups = 0
        self._ended: dict[int, int] = {}
        self._ended_ahead: dict[tuple[int, int], int] = {}
        self._guard_level = 0
        self.num_queued = 0
        self.counts: dict[tuple[int, int], GroupCounts] = {}

    def version(self, key: int) -> int:
        """Version of a shard, -1 before its first values."""
        return self._keys[key].version

    def holds(self, key: int) -> bool:
        """True while the shard is here."""
        return key in self._keys

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
        if state is None:
            return [Refuse(key, token, f"wrong route: shard {key} is not here")]
        if header.route_epoch > state.shard.epoch or header.numel != state.shard.numel:
            got, have = f"{header.route_epoch}, {header.numel}", f"{state.shard.epoch} and {state.shard.numel}"
            return [Refuse(key, token, f"wrong route: epoch {got} elements, have epoch {have} elements")]
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

    def _take(self, state: ShardState, header: PushHeader, token: Token, *, now_s: float) -> list[Action]:
        """The next push of a group: into the window, or held until there is a new one."""
        actions: list[Action] = []
        state.received[header.group] = header.clock
        state.paces.came(header.group, now_s=now_s)
        if header.group in state.window.groups or any(each.group == header.group for each, _ in state.held):
            state.held.append((header, token))
        else:
            actions += self._admit(state, header, token, now_s=now_s)
        return actions + self._settle(state, now_s=now_s)

    def on_timer(self, *, now_s: float) -> list[Action]:
        """Time has passed: close what is due."""
        return [action for state in self._keys.values() for action in self._settle(state, now_s=now_s)]

    def set_guard(self, level: int, *, now_s: float) -> list[Action]:
        """How close to sync windows have to be from now on, see ``policy.window``: those that are due now close."""
        self._guard_level = level
        return self.on_timer(now_s=now_s)

    def on_end_of_data(self, group: int, clock: int, *, generation: int, now_s: float) -> list[Action]:
        """A group sends nothing after ``clock`` until a later push says otherwise: wait for it no longer."""
        self._note_end(generation, group, clock)
        return self.on_timer(now_s=now_s) if generation == self.generation else []

    def hand_over(self, key: int, *, now_s: float) -> tuple[KeyState, list[Token]]:
        """Give a shard away; it is here no longer.

        Returns:
            What the new server must know, and the frames of this shard that wait here: it must get them again.
        """
        state = self._keys.pop(key)
        window = state.window
        missed_since_s, missed = state.missed
        ended = [(self.generation, group, clock) for group, clock in self._ended.items()]
        ended += [(generation, group, clock) for (generation, group), clock in self._ended_ahead.items()]
        given = KeyState(
            version=state.version,
            generation=self.generation,
            num_groups=self._num_groups,
            since_clock=self._since_clock,
            settled=[list(pair) for pair in sorted(state.settled.items())],
            window=[list(pair) for pair in sorted(window.groups.items())],
            weight=window.weight,
            decayed=window.decayed,
            share_frac=window.share_frac,
            window_age_s=max(0.0, now_s - window.opened_s) if window.groups else 0.0,
            missed=sorted(missed),
            missed_age_s=max(0.0, now_s - missed_since_s) if missed else 0.0,
            offsets_s=list(state.offsets_s),
            ended=[list(end) for end in sorted(ended)],
        )
        return given, [token for _, token in state.held] + [state.early[name][1] for name in sorted(state.early)]

    def take_over(self, shard: Shard, given: KeyState, *, now_s: float) -> list[Action]:
        """Hold a shard from now on, as another server left it.

        The two may be of different generations. Workers flush before they regroup, so where this server is ahead,
        all that the old grouping sent is settled, and the groups of the new one begin at its first clock.

        Raises:
            ProtocolError: the shard is here already, or the servers count other groups in one generation.
        """
        ahead = given.generation > self.generation
        same = given.generation == self.generation and 0 not in (given.num_groups, self._num_groups)
        if shard.key in self._keys or (same and given.num_groups != self._num_groups):
            raise ProtocolError(
                f"cannot take over shard {shard.key}: {given.num_groups} groups of generation {given.generation}, have"
                f" {sorted(self._keys)} and {self._num_groups} groups of generation {self.generation}; run the same"
                " hpcps on every rank",
                key=shard.key,
                op="move",
            )
        actions: list[Action] = []
        if ahead:
            actions += self._begin(given.generation, given.num_groups, since_clock=given.since_clock, now_s=now_s)
        elif given.generation == self.generation:
            self._num_groups = self._num_groups or given.num_groups
        state = self._keys[shard.key] = taken(shard, given, now_s=now_s)
        for generation, group, clock in given.ended:
            self._note_end(generation, group, clock)
        if given.generation < self.generation:
            actions += self._restart(state, now_s=now_s)
        if state.version >= 0:
            actions.append(self.settled(shard.key))
        return [*actions, *self.on_timer(now_s=now_s)]

    def settled(self, key: int) -> Notify:
        """The notice that a newly joined worker needs."""
        state = self._keys[key]
        return Notify(key, state.version, tuple(sorted(state.settled.items())))

    def _load(self, state: ShardState, header: PushHeader, token: Token) -> list[Action]:
        if state.version >= 0:
            return [Refuse(header.key, token, "first values are in already")]
        state.version = 0
        return [Load(header.key, token), self.settled(header.key)]

    def _regroup(self, header: PushHeader, *, now_s: float) -> list[Action]:
        """A new grouping begins with this push, which need not be the first of it: it may have overtaken that."""
        return self._begin(header.generation, header.num_groups, since_clock=header.since_clock, now_s=now_s)

    def _begin(self, generation: int, num_groups: int, *, since_clock: int, now_s: float) -> list[Action]:
        """A new grouping begins: what the old one left open is closed as it stands.

        Workers regroup together, between two steps: all groups' first push of a generation has the same clock.
        """
        self.generation, self._num_groups, self._since_clock = generation, num_groups, since_clock
        known, self._ended, self._ended_ahead = self._ended_ahead, {}, {}
        for (ended_generation, group), clock in known.items():
            self._note_end(ended_generation, group, clock)
        return [action for state in self._keys.values() for action in self._restart(state, now_s=now_s)]

    def _restart(self, state: ShardState, *, now_s: float) -> list[Action]:
        """Close what an older grouping left open of a shard; its groups are those of the grouping in force."""
        actions: list[Action] = []
        while state.window.groups:
            actions += self._close(state)
            actions += self._drain(state, now_s=now_s)
        state.received = dict.fromkeys(range(self._num_groups), self._since_clock - 1)
        state.settled = dict(state.received)
        state.missed = (0.0, frozenset())
        state.paces = Paces()
        return actions

    def _note_end(self, generation: int, group: int, clock: int) -> None:
        """A group ends after a clock; of two such messages the later clock counts, whichever came last."""
        if generation > self.generation:
            known = self._ended_ahead.get((generation, group), 0)
            self._ended_ahead[generation, group] = max(known, clock)
        elif generation == self.generation:
            self._ended[group] = max(self._ended.get(group, 0), clock)

    def _admit(
        self, state: ShardState, header: PushHeader, token: Token, *, now_s: float, waited: bool = False
    ) -> list[Action]:
        """Let a push into the window, unless it is too stale; one that waited here for its turn tells of no arrival."""
        counts = self.counts.setdefault((header.generation, header.group), GroupCounts())
        staleness = state.version - header.base_version
        decision = self._staleness_policy.decide(min(staleness, max(0, staleness - self._overlap)))
        if not decision.accept:
            state.settled[header.group] = header.clock
            return [Refuse(header.key, token, decision.reason, counts.drop()), self.settled(header.key)]
        window = state.window
        late_since_s, had = state.missed
        if not window.groups:
            window.opened_s = now_s
        late = bool(had) and header.group not in had
        offset_s = now_s - (late_since_s if late else window.opened_s)
        if (late or window.groups) and not waited:
            state.offsets_s.append(offset_s)
        counts.let_in(decision.factor, late=late)
        window.groups[header.group] = header.clock
        window.weight += header.weight
        window.decayed += header.weight * decision.factor
        window.share_frac += header.share_frac
        return [Accumulate(header.key, token, header.weight * decision.factor, staleness, offset_s, late)]

    def _settle(self, state: ShardState, *, now_s: float) -> list[Action]:
        """Close the window if it is due, let held pushes in, and again."""
        actions: list[Action] = []
        while state.window.groups:
            decision = self._window_policy.decide(self._facts(state, now_s=now_s))
            state.window.deadline_s = decision.deadline_s
            if not decision.close:
                break
            actions += self._close(state)
            actions += self._drain(state, now_s=now_s)
        return actions

    def _drain(self, state: ShardState, *, now_s: float) -> list[Action]:
        """Let held pushes into the new window, in order of arrival, one a group."""
        actions: list[Action] = []
        waiting, state.held = state.held, deque()
        for header, token in waiting:
            if header.group in state.window.groups:
                state.held.append((header, token))
            else:
                actions += self._admit(state, header, token, now_s=now_s, waited=True)
        return actions

    def _close(self, state: ShardState) -> list[Action]:
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
        state.window = Window()
        key = state.shard.key
        return [Close(key, state.version, total, scale, len(window.groups)), self.settled(key)]

    def _facts(self, state: ShardState, *, now_s: float) -> WindowFacts:
        live = self._live(state)
        step_s, slowest_s = state.paces.of(live)
        return WindowFacts(
            num_arrived=len(state.window.groups),
            num_live=len(live),
            opened_s=state.window.opened_s,
            now_s=now_s,
            offsets_s=tuple(state.offsets_s),
            step_s=step_s,
            slowest_s=slowest_s,
            num_queued=self.num_queued,
            lapped=any(header.group in state.window.groups for header, _ in state.held),
            level=self._guard_level,
        )

    def _live(self, state: ShardState) -> list[int]:
        """Groups in the window, and groups that still owe a push."""
        return [
            group
            for group in range(self._num_groups)
            if group in state.window.groups or self._ended.get(group, -1) != state.received.get(group, 0)
        ]
