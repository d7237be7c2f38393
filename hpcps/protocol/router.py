"""The route while it runs: where every shard is, which are on their way, and when to look whether they should move.

Runs on the first server; loads and news of moves go in, messages to servers and workers come out. Reads no clock and
decides nothing itself: `hpcps.policy.rebalance` does. A move: `Move` to the server that has the shard, `Moved` from the
one that got it, `RouteChange` to all workers. The new room is taken from the decision on; the old one is free once the
change is told.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpcps.config import RunConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Route
from hpcps.policy.rebalance import Rebalance, RebalanceDecision, RoutingFacts, ServerState, ShardState
from hpcps.policy.server_rate import NUM_LOOKS, EstimateRate, Look, RateEstimate, RateWithMore
from hpcps.protocol.control import DrainTo, Move, Moved, RouteChange, ServerFacts, ServerLoad
from hpcps.protocol.speeds import Report

__all__ = ["Router"]

MOST_UNDER_WAY = 2
"""Shards on their way at once: one is packed while the other is unpacked, and nobody waits for more than two. All that
is moved then slows training down by what it costs, but never halts it for longer than that."""

_MIN_PUSHES = 8
"""A server that took fewer in an interval says nothing about its rate."""

_FOLLOW_LOOKS = 3
"""So many looks long two servers count as known to be unequal: the first may fall into the middle of a change."""

_NEVER = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A move that was decided; its room is taken."""

    key: int
    source: int
    target: int
    room: int


class Router:
    """Route and moves of a job.

    Args:
        config: the run's settings.
        route: the route at the start.
        facts: what every server can do, in any order.
        num_rooms: rooms of each server.
        report: told of every decision (``route``) and every finished move (``moved``).

    Raises:
        ProtocolError: facts are missing or senseless, or a server has more shards than rooms.
    """

    def __init__(
        self,
        config: RunConfig,
        route: Route,
        *,
        facts: Sequence[ServerFacts],
        num_rooms: Sequence[int],
        report: Report,
    ) -> None:
        self.route = route
        self._report = report
        self._policy = Rebalance(config.routing)
        self._estimate, self._with_more = EstimateRate(), RateWithMore()
        by_server = sorted(facts, key=lambda fact: fact.server)
        numbers = list(range(route.num_servers))
        sane = all(0 < fact.bytes_per_s < math.inf for fact in by_server)
        if [fact.server for fact in by_server] != numbers or len(num_rooms) != len(numbers) or not sane:
            raise ProtocolError(
                f"cannot route {route.num_servers} servers: got facts of {[fact.server for fact in by_server]} with"
                f" rates {[fact.bytes_per_s for fact in by_server]}, and {len(num_rooms)} numbers of rooms; run the"
                " same hpcps on every rank"
            )
        self._rates = [fact.bytes_per_s for fact in by_server]
        self._memory = [fact.memory_bytes for fact in by_server]
        self._free = [set(range(count)) for count in num_rooms]
        for shard in route.shards:
            if shard.room not in self._free[shard.server]:
                raise ProtocolError(
                    f"cannot route shard {shard.key}: room {shard.room} of server {shard.server} is taken, or beyond"
                    f" its {num_rooms[shard.server]}; run the same hpcps on every rank",
                    key=shard.key,
                )
            self._free[shard.server].remove(shard.room)
        self._epoch = route.epoch
        self._allowed = set(config.routing.servers) or set(numbers)
        self._waiting: deque[_Planned] = deque()
        self._under_way: dict[int, tuple[_Planned, int]] = {}
        """By key, with the epoch."""
        self._looks: list[deque[Look]] = [deque(maxlen=NUM_LOOKS) for _ in numbers]
        self._pushes_per_step = [1.0] * len(route.shards)
        self._steps_s: dict[int, float] = {}
        self._fresh: set[int] = set()
        self._disturbed: list[set[int]] = [set() for _ in numbers]
        """By server: shards that came or went since its last report, which counts only part of their pushes."""
        self._num_looks = 0
        self._moved_at: dict[int, int] = {}
        """Look before the last move of each shard that moved."""
        self._unequal_at: dict[tuple[int, int], int] = {}
        """Look at which shards last moved from one server to another."""
        self._stuck: tuple[int, ...] = ()

    @property
    def at_rest(self) -> bool:
        """True while no move is under way or waits."""
        return not self._under_way and not self._waiting

    # --- events --------------------------------------------------------------------------------------

    def on_load(self, load: ServerLoad) -> list[tuple[int, Move]]:
        """A server's load. Once all that hold shards have told theirs, it is time for a look.

        Returns: messages, each with the index of the server that gets it.

        Raises:
            ProtocolError: the server, or a shard of it, does not exist.
        """
        self._check_servers([load.server], "a load")
        if len(load.keys) != len(load.pushes) or not all(0 <= key < len(self.route.shards) for key in load.keys):
            raise ProtocolError(
                f"cannot accept a load of server {load.server}: {len(load.pushes)} counts of pushes for shards"
                f" {load.keys}, need one each of 0 to {len(self.route.shards) - 1}; run the same hpcps on every rank"
            )
        self._take(load)
        self._fresh.add(load.server)
        if not {shard.server for shard in self.route.shards} <= self._fresh:
            return []
        self._fresh.clear()
        self._num_looks += 1
        return self._act(self._policy.decide(self._facts())) if self.at_rest else []

    def on_drain(self, message: DrainTo) -> list[tuple[int, Move]]:
        """From now on only these servers shall hold shards. Moves that have not begun are decided anew.

        Raises:
            ProtocolError: no server, or one that does not exist.
        """
        self._check_servers(message.servers, "a choice of servers")
        if not message.servers:
            raise ProtocolError(
                "cannot accept a choice of servers: got none, need at least one to hold the shards; name one"
            )
        self._allowed = set(message.servers)
        for planned in self._waiting:
            self._free[planned.target].add(planned.room)
        self._waiting.clear()
        return self._act(self._policy.decide(self._facts())) if self.at_rest else []

    def on_moved(self, message: Moved) -> tuple[list[RouteChange], list[tuple[int, Move]]]:
        """A shard is at its new server.

        Returns: what all workers must be told, and further moves.

        Raises:
            ProtocolError: no such move is under way.
        """
        planned, epoch = self._under_way.get(message.key, (None, 0))
        if planned is None or (epoch, planned.target) != (message.epoch, message.server):
            raise ProtocolError(
                f"cannot accept that shard {message.key} moved to server {message.server} in epoch {message.epoch}:"
                f" under way are {sorted(self._under_way)}; run the same hpcps on every rank",
                key=message.key,
                op="move",
            )
        del self._under_way[message.key]
        self._free[planned.source].add(self.route.shards[planned.key].room)
        self.route = self.route.moved(planned.key, server=planned.target, room=planned.room, epoch=epoch)
        self._moved_at[planned.key] = self._num_looks
        for server in (planned.source, planned.target):
            self._disturbed[server].add(planned.key)
        what: dict[str, object] = {"epoch": epoch, "key": planned.key, "server": planned.target}
        self._report("moved", {**what, "num_bytes": message.num_bytes, "seconds": message.seconds})
        change = RouteChange(epoch=epoch, keys=[planned.key], servers=[planned.target], rooms=[planned.room])
        if not self.at_rest:
            return [change], self._send()
        # the drained servers may hold shards that were on their way there
        return [change], self._act(self._policy.decide(self._facts(timed=False)))

    # --- inside --------------------------------------------------------------------------------------

    def _check_servers(self, servers: Sequence[int], what: str) -> None:
        if not all(0 <= server < self.route.num_servers for server in servers):
            raise ProtocolError(
                f"cannot accept {what}: got servers {list(servers)}, need 0 to {self.route.num_servers - 1}; run the"
                " same hpcps on every rank"
            )

    def _take(self, load: ServerLoad) -> None:
        """Learn a server's rate, and how often its shards are pushed.

        Every group pushes every shard once a step, so the most pushes of any shard are the steps of the interval.
        """
        server = load.server
        self._memory[server] = load.memory_bytes or self._memory[server]
        disturbed, self._disturbed[server] = self._disturbed[server], set()
        num_steps = max(load.pushes, default=0)
        if sum(load.pushes) < _MIN_PUSHES or load.raw_bytes <= 0 or load.busy_s <= 0:
            return
        self._looks[server].append(Look(byte_s=load.busy_s / load.raw_bytes, load=load.raw_bytes / num_steps))
        self._steps_s[server] = load.seconds / num_steps
        for key, pushes in zip(load.keys, load.pushes, strict=True):
            if self.route.shards[key].server == server and key not in disturbed:
                self._pushes_per_step[key] = pushes / num_steps

    def _rates_now(self) -> list[RateEstimate]:
        """Rate of each server; one that was never measured is as much off what it said of itself as the others are."""
        measured = {
            server: self._estimate.decide([look.byte_s for look in looks])
            for server, looks in enumerate(self._looks)
            if looks
        }
        ratios = [estimate.byte_s * self._rates[server] for server, estimate in measured.items()]
        ratio = statistics.median(ratios) if ratios else 1.0
        return [measured.get(server) or _unmeasured(ratio / rate) for server, rate in enumerate(self._rates)]

    def _facts(self, *, timed: bool = True) -> RoutingFacts:
        """What is known now; without the time of a step where nothing but emptying servers is asked for."""
        servers = tuple(
            ServerState(
                byte_s=rate.byte_s,
                error_frac=rate.error_frac,
                low_s=rate.low_s,
                high_s=rate.high_s,
                memory_bytes=self._memory[server],
                free_rooms=len(self._free[server]),
                allowed=server in self._allowed,
                more_byte_s=self._with_more.decide(list(looks)),
            )
            for server, (rate, looks) in enumerate(zip(self._rates_now(), self._looks, strict=True))
        )
        shards = tuple(
            ShardState(
                key=shard.key,
                num_bytes=shard.num_bytes,
                pushes_per_step=self._pushes_per_step[shard.key],
                server=shard.server,
                pinned=shard.pinned,
                looks_since_move=self._num_looks - self._moved_at.get(shard.key, -_NEVER),
            )
            for shard in self.route.shards
        )
        step_s = statistics.median(self._steps_s.values()) if timed and self._steps_s else 0.0
        known = [pair for pair, look in self._unequal_at.items() if self._num_looks - look <= _FOLLOW_LOOKS]
        return RoutingFacts(servers=servers, shards=shards, step_s=step_s, unequal=tuple(sorted(known)))

    def _act(self, decision: RebalanceDecision) -> list[tuple[int, Move]]:
        """Take the rooms of all moves and send the first."""
        for move in decision.moves:
            room = min(self._free[move.target])
            self._free[move.target].remove(room)
            self._waiting.append(_Planned(key=move.key, source=move.source, target=move.target, room=room))
            self._unequal_at[move.source, move.target] = self._num_looks
        if decision.moves or decision.stuck != self._stuck:
            self._report(
                "route",
                {
                    "look": self._num_looks,
                    "keys": [move.key for move in decision.moves],
                    "sources": [move.source for move in decision.moves],
                    "servers": [move.target for move in decision.moves],
                    "num_bytes": sum(self.route.shards[move.key].num_bytes for move in decision.moves),
                    "stuck": list(decision.stuck),
                    "reason": decision.reason,
                },
            )
        self._stuck = decision.stuck
        return self._send()

    def _send(self) -> list[tuple[int, Move]]:
        """Begin moves that wait, as many as may be under way."""
        messages = []
        while self._waiting and len(self._under_way) < MOST_UNDER_WAY:
            planned = self._waiting.popleft()
            self._epoch += 1
            self._under_way[planned.key] = (planned, self._epoch)
            move = Move(key=planned.key, epoch=self._epoch, target=planned.target, room=planned.room)
            messages.append((planned.source, move))
        return messages


def _unmeasured(byte_s: float) -> RateEstimate:
    """A server that has not worked yet: nothing is certain about it."""
    reason = "from what it did at the start"
    return RateEstimate(byte_s=byte_s, error_frac=1.0, low_s=0.0, high_s=math.inf, num_looks=0, reason=reason)
