"""When a shard goes to another server: off servers that shall be empty, and off one that holds the others up.

Decides which shards move where, as many as pay. That they go two at a time, so that no step waits for all of them, is
the router's part (`hpcps.protocol.router`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcps.config import RoutingConfig
from hpcps.policy.routing import HELD_COPIES
from hpcps.units import format_bytes, format_seconds

__all__ = ["Rebalance", "RebalanceDecision", "RoutingFacts", "ServerState", "ShardMove", "ShardState"]

BUSY_FRAC = 0.05
"""Servers that work for less than this part of a step hold nobody up."""

SURE = 6.0
"""Standard errors that make a difference certain. Measured, with looks that are off by a standard deviation of 10 or
20 %: 2 false alarms in 440 times 500 looks at 2 to 8 servers, and one that slows down four times is found at the second
look."""

SURE_AGAIN = 2.0
"""Standard errors that suffice between two servers that are known to be unequal: only how much is to be found."""

STATE_COPIES = 4
"""What travels with a shard, in its own bytes: values, at most two moments of the optimizer, the sum of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """One server.

    Args:
        byte_s: seconds that a byte of gradients takes there, above 0.
        error_frac: standard error of that, as part of it.
        low_s: the lesser of what the newest two looks say it takes; 0 where there are no two.
        high_s: the larger of them; infinite where there are no two.
        memory_bytes: memory that it may still use, 0: unknown.
        free_rooms: shards that it has room for.
        allowed: it shall hold shards.
        more_byte_s: seconds that a byte takes there if it gets more than it holds; 0: no more than now.
    """

    byte_s: float
    error_frac: float
    low_s: float
    high_s: float
    memory_bytes: int
    free_rooms: int
    allowed: bool = True
    more_byte_s: float = 0.0

    def seconds(self, load: float, *, more: bool) -> float:
        """What so many bytes of gradients take; ``more``: than it holds now."""
        return load * (max(self.byte_s, self.more_byte_s) if more else self.byte_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """One shard.

    Args:
        key: its key.
        num_bytes: bytes of its values.
        pushes_per_step: gradients that come for it in a step.
        server: index of the server that holds it.
        pinned: the user chose that server.
        looks_since_move: looks since it came there, the present one included; large if it never moved.
    """

    key: int
    num_bytes: int
    pushes_per_step: float
    server: int
    pinned: bool
    looks_since_move: int

    @property
    def load(self) -> float:
        """Gradient bytes a step."""
        return self.num_bytes * self.pushes_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingFacts:
    """What is known at a look.

    Args:
        servers: all servers, in order of their index.
        shards: all shards, in order of their key.
        step_s: seconds of a step; 0: unknown, then only servers that shall be empty are relieved.
        unequal: source and target of moves at one of the last looks: the one was found to take longer than the other.
    """

    servers: tuple[ServerState, ...]
    shards: tuple[ShardState, ...]
    step_s: float
    unequal: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMove:
    """A shard goes from one server to another."""

    key: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceDecision:
    """The moves in the order in which they help most, and why.

    Args:
        moves: may be none.
        reason: what they are for, or why there are none.
        stuck: keys of shards that should leave their server and cannot.
    """

    moves: tuple[ShardMove, ...]
    reason: str
    stuck: tuple[int, ...] = ()


class _Plan:
    """Where shards would be after the moves so far."""

    def __init__(self, facts: RoutingFacts) -> None:
        self.servers = facts.servers
        self._unequal = facts.unequal
        self.allowed = [index for index, server in enumerate(facts.servers) if server.allowed]
        self._largest = max((shard.num_bytes for shard in facts.shards), default=0)
        self.rooms = [server.free_rooms for server in facts.servers]
        self.memory = [server.memory_bytes for server in facts.servers]
        self.loads = [0.0] * len(facts.servers)
        for shard in facts.shards:
            self.loads[shard.server] += shard.load
        self.first_loads = list(self.loads)
        self.moves: list[ShardMove] = []

    def seconds(self, server: int) -> float:
        """What a step's gradients take there."""
        return self._seconds(server, self.loads[server])

    @property
    def longest(self) -> int:
        """The server that takes longest."""
        return max(range(len(self.servers)), key=lambda server: (self.seconds(server), -server))

    def fits(self, num_bytes: int, target: int) -> bool:
        """True if the target has room and memory for a shard of that size."""
        known = self.servers[target].memory_bytes > 0
        return self.rooms[target] > 0 and (not known or num_bytes * HELD_COPIES <= self.memory[target])

    def those_that_fit(self, shards: Sequence[ShardState], target: int) -> Sequence[ShardState]:
        """The shards for which the target has room and memory, in the order given."""
        if self.fits(self._largest, target):
            return shards
        return [shard for shard in shards if self.fits(shard.num_bytes, target)]

    def surely_longer(self, source: int, target: int) -> bool:
        """True if the source takes longer than the target beyond doubt, as things are now."""
        if self.first_loads[target] == 0:
            return self.first_loads[source] > 0
        slow, quick = self.servers[source], self.servers[target]
        more = self.first_loads[source] / self.first_loads[target]
        ratio = more * slow.byte_s / quick.byte_s
        sure = SURE_AGAIN if (source, target) in self._unequal else SURE
        doubt = math.exp(sure * math.hypot(slow.error_frac, quick.error_frac))
        return ratio > doubt and more * slow.low_s >= math.sqrt(ratio) * quick.high_s

    def after(self, shard: ShardState, target: int) -> tuple[float, float]:
        """The longer time of the two servers once the shard has moved, and the target's."""
        left_s = self._seconds(shard.server, self.loads[shard.server] - shard.load)
        there_s = self._seconds(target, self.loads[target] + shard.load)
        return max(left_s, there_s), there_s

    def even(self, source: int, target: int) -> float:
        """Bytes a step that both servers would take the same time with, if they went from the one to the other."""
        slow, quick = self.servers[source], self.servers[target]
        there_s = quick.seconds(self.loads[target], more=True)
        return (self.seconds(source) - there_s) / (slow.byte_s + quick.seconds(1.0, more=True))

    def _seconds(self, server: int, load: float) -> float:
        return self.servers[server].seconds(load, more=load > self.first_loads[server])

    def move(self, shard: ShardState, target: int) -> None:
        """Move a shard that is still at its first place."""
        self.loads[shard.server] -= shard.load
        self.loads[target] += shard.load
        self.rooms[target] -= 1
        self.memory[target] -= shard.num_bytes * HELD_COPIES
        self.moves.append(ShardMove(key=shard.key, source=shard.server, target=target))


class Rebalance:
    """Choose the shards that move.

    A server's time is the gradient bytes of a step times its seconds a byte; the longest is what a step waits for.

    - A server that is not allowed is emptied first: the largest shards first, each to the allowed server that takes
      least with it. No gain is asked for.
    - Else, one shard after the other goes from the longest server to where the longer of the two is then shortest, of
      like targets to the one that takes least, as long as that helps. The moves are cut off where they gain most over
      ``horizon_steps`` less what they cost, and are made if the longest time then falls by ``min_gain_frac``.
    - Nothing moves between two servers unless the one takes longer than the other beyond doubt: by six standard
      errors (two, if shards went from the one to the other just before), and by each of the newest two looks at both at
      least half as much, on a logarithmic scale. Nothing moves at all while the longest takes less than a twentieth of
      a step.
    - A server that was slower when it held more is taken to be so again if it gets more.
    - A shard that moved stays for ``hold_intervals`` looks. A pinned one never moves.
    - A move costs four times the shard's bytes at both ends' rates.

    Args:
        config: how much a move must gain.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config

    def decide(self, facts: RoutingFacts) -> RebalanceDecision:
        """Choose the moves of one look."""
        plan = _Plan(facts)
        stuck = self._empty(plan, facts)
        if plan.moves:
            targets = sorted({move.target for move in plan.moves})
            return RebalanceDecision(
                moves=tuple(plan.moves),
                reason=f"only servers {plan.allowed} shall hold shards; to {targets}",
                stuck=stuck,
            )
        if stuck:
            return RebalanceDecision(
                moves=(),
                reason=f"servers {plan.allowed} have no room or memory for shards {list(stuck)}",
                stuck=stuck,
            )
        why_not = self._why_not(plan, facts)
        return RebalanceDecision(moves=(), reason=why_not) if why_not else self._relieve(plan, facts)

    def _empty(self, plan: _Plan, facts: RoutingFacts) -> tuple[int, ...]:
        """Plan the moves off servers that are not allowed; returns the keys that have no place to go."""
        stuck = []
        leaving = [shard for shard in facts.shards if not facts.servers[shard.server].allowed and not shard.pinned]
        for shard in sorted(leaving, key=lambda shard: (-shard.load, shard.key)):
            able = [server for server in plan.allowed if plan.fits(shard.num_bytes, server)]
            if able:
                costs = {server: plan.after(shard, server)[1] for server in able}
                plan.move(shard, min(able, key=lambda server: (costs[server], server)))
            else:
                stuck.append(shard.key)
        return tuple(sorted(stuck))

    def _why_not(self, plan: _Plan, facts: RoutingFacts) -> str:
        """Why nobody needs to be relieved; empty: somebody may."""
        if not self._config.move:
            return "routing.move is off"
        if facts.step_s <= 0:
            return "no step was timed yet"
        longest_s = plan.seconds(plan.longest)
        if longest_s < BUSY_FRAC * facts.step_s:
            return f"servers take {longest_s / facts.step_s:.1%} of a step and hold nobody up"
        return ""

    def _relieve(self, plan: _Plan, facts: RoutingFacts) -> RebalanceDecision:
        before_s = plan.seconds(plan.longest)
        source = plan.longest
        gains, costs = self._go_on(plan, facts, before_s)
        if not gains:
            return RebalanceDecision(moves=(), reason=f"no shard can leave server {source} to anyone's gain")
        horizon = self._config.horizon_steps
        earned = [gain_s * horizon - cost_s for gain_s, cost_s in zip(gains, costs, strict=True)]
        best = earned.index(max(earned))
        told = (
            f"server {source} takes {format_seconds(before_s)} of a step of {format_seconds(facts.step_s)};"
            f" {best + 1} shards elsewhere save {gains[best] / before_s:.0%} of it"
        )
        if gains[best] < self._config.min_gain_frac * before_s:
            return RebalanceDecision(moves=(), reason=f"{told}, need {self._config.min_gain_frac:.0%}")
        if earned[best] <= 0:
            cost = format_seconds(costs[best])
            return RebalanceDecision(moves=(), reason=f"{told} and cost {cost}, more than {horizon} steps would save")
        moves = tuple(plan.moves[: best + 1])
        size = format_bytes(sum(facts.shards[move.key].num_bytes for move in moves))
        return RebalanceDecision(moves=moves, reason=f"{told} and cost {format_seconds(costs[best])} ({size})")

    def _go_on(self, plan: _Plan, facts: RoutingFacts, before_s: float) -> tuple[list[float], list[float]]:
        """Plan one move after the other while it helps.

        Returns: after each move, the seconds of a step saved so far and the seconds that the moves cost so far.
        """
        hold = self._config.hold_intervals
        movable: list[list[ShardState]] = [[] for _ in facts.servers]
        for shard in facts.shards:
            if not shard.pinned and shard.looks_since_move > hold and shard.load > 0:
                movable[shard.server].append(shard)
        for shards in movable:
            shards.sort(key=lambda shard: (shard.load, shard.num_bytes, -shard.key))
        gains: list[float] = []
        costs: list[float] = []
        while True:
            source = plan.longest
            found = self._next(plan, movable[source], source)
            if found is None:
                return gains, costs
            shard, target = found
            movable[source].remove(shard)
            plan.move(shard, target)
            both_s = facts.servers[source].byte_s + facts.servers[target].byte_s
            gains.append(before_s - plan.seconds(plan.longest))
            costs.append((costs[-1] if costs else 0.0) + STATE_COPIES * shard.num_bytes * both_s)

    def _next(self, plan: _Plan, shards: Sequence[ShardState], source: int) -> tuple[ShardState, int] | None:
        """The move from a server that leaves the longer of the two ends shortest; None: no move helps."""
        best: tuple[float, float, int, int, ShardState] | None = None
        for target in plan.allowed:
            if target == source or not plan.surely_longer(source, target):
                continue
            able = plan.those_that_fit(shards, target)
            # the longer end falls with the load moved until both are equal, and rises from there on
            above = bisect.bisect_left(able, plan.even(source, target), key=lambda shard: shard.load)
            for shard in able[max(0, above - 1) : above + 1]:
                this = (*plan.after(shard, target), shard.key, target, shard)
                best = this if best is None or this[:4] < best[:4] else best
        if best is None or best[0] >= plan.seconds(source) * (1 - 1e-9):
            return None
        return best[4], best[3]
