"""Stands in for the policy of moves: shards go anywhere, all the time, wherever there is room."""

from __future__ import annotations

import random

from hpcps.config import RoutingConfig
from hpcps.policy.rebalance import RebalanceDecision, RoutingFacts, ShardMove

__all__ = ["WHERE", "Wander"]

WHERE = "hpcps.protocol.router.Rebalance"
"""The name to put it under."""


class Wander:
    """Moves up to two shards at each look, and again when they are there."""

    seed = 0

    def __init__(self, config: RoutingConfig) -> None:
        self._rng = random.Random(self.seed)
        self._num_moving = 2 if config.move else 0

    def decide(self, facts: RoutingFacts) -> RebalanceDecision:
        moves = []
        free = [server.free_rooms for server in facts.servers]
        for shard in self._rng.sample(facts.shards, min(self._num_moving, len(facts.shards))):
            targets = [index for index, rooms in enumerate(free) if rooms and index != shard.server]
            if targets:
                target = self._rng.choice(targets)
                free[target] -= 1
                moves.append(ShardMove(key=shard.key, source=shard.server, target=target))
        return RebalanceDecision(moves=tuple(moves), reason="for a change")
