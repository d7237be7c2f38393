"""Rates of servers from looks at their load, and which shards move on them, by tables."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from hpcps.config import RoutingConfig
from hpcps.policy import (
    EstimateRate,
    Look,
    RateWithMore,
    Rebalance,
    RebalanceDecision,
    RoutingFacts,
    ServerState,
    ShardMove,
    ShardState,
)
from hpcps.policy.rebalance import SURE
from hpcps.policy.routing import HELD_COPIES
from hpcps.units import MiB

NS = 1e-9


# looks in ns a byte, the newest last; estimate; looks it rests on; standard error; the newest two
LOOKS = [
    ([2.0], 2.0, 1, 0.1, 0.0, math.inf),
    ([2.0, 2.0], 2.0, 2, 0.0667, 2.0, 2.0),
    ([2.0] * 16, 2.0, 16, 0.00625, 2.0, 2.0),
    ([2.0] * 64, 2.0, 16, 0.00625, 2.0, 2.0),
    ([1.0] * 8 + [4.0], 4.0, 1, 0.0866, 1.0, 4.0),  # one look may be a freeze
    ([1.0] * 8 + [2.5, 4.0], 4.0, 1, 0.097, 2.5, 4.0),  # slowed in the middle of an interval
    ([1.0] * 8 + [2.5, 4.0, 4.0, 4.0], 4.0, 2, 0.0645, 4.0, 4.0),
    ([1.0] * 8 + [30.0, 1.0], 1.0, 1, 0.097, 1.0, 30.0),
    ([1.0, 1.1, 0.9, 1.05, 0.95, 1.1], 1.0247, 6, 0.0515, 0.95, 1.1),
    ([1.0] * 40 + [1.1] * 4, 1.1, 3, 0.0144, 1.1, 1.1),
]


@pytest.mark.parametrize(("looks", "byte_s", "num_looks", "error", "low_s", "high_s"), LOOKS)
def test_estimates(
    looks: list[float], byte_s: float, num_looks: int, error: float, low_s: float, high_s: float
) -> None:
    rate = EstimateRate().decide([look * NS for look in looks])
    assert rate.byte_s == pytest.approx(byte_s * NS, rel=1e-3)
    assert (rate.num_looks, rate.low_s, rate.high_s) == (
        num_looks,
        pytest.approx(low_s * NS),
        pytest.approx(high_s * NS),
    )
    assert rate.error_frac == pytest.approx(error, rel=0.02)
    assert rate.reason.startswith(f"{num_looks} of {len(looks)} looks, noise ")


# load and ns a byte of each look, the newest last; ns a byte with more, 0: unknown
WITH_MORE = [
    ([], 0.0),
    ([(32, 1.0)], 0.0),
    ([(32, 1.0), (32, 4.0), (32, 4.0)], 0.0),  # no larger load was seen
    ([(32, 4.0), (32, 4.0), (13, 1.0)], 4.0),
    ([(32, 10.0), (13, 1.0), (13, 1.0), (13, 1.0)], 0.0),  # one look may be of a freeze
    ([(32, 1.0), (32, 4.0), (32, 4.0), (32, 4.4), (20, 3.0), (13, 1.0), (13, 1.0)], 4.0),  # the last three with more
    ([(32, 4.0), (32, 4.0), (13, 4.0), (13, 1.0)], 4.0),  # one look may be of both loads
    ([(32, 4.0), (32, 4.0), (13, 4.0), (13, 3.9), (13, 1.0)], 0.0),  # it was as slow at this load too
    ([(32, 1.0), (32, 1.0), (13, 1.0), (13, 1.0)], 0.0),  # as quick with more
    ([(14, 4.0), (14, 4.0), (13, 1.0)], 0.0),  # hardly more
    ([(32, 4.0)] * 2 + [(13, 1.0)] * 16, 4.0),
    ([(32, 4.0)] * 2 + [(13, 1.0)] * 17, 0.0),  # long ago
    ([(32, 4.0)] * 2 + [(13, 1.0)] * 17 + [(32, 4.0)] + [(13, 1.0)] * 32, 4.0),  # it came back
    ([(32, 4.0)] * 2 + [(13, 1.0)] * 17 + [(32, 4.0)] + [(13, 1.0)] * 33, 0.0),
]


@pytest.mark.parametrize(("looks", "byte_s"), WITH_MORE)
def test_rates_with_more(looks: list[tuple[float, float]], byte_s: float) -> None:
    seen = [Look(byte_s=ns * NS, load=load) for load, ns in looks]
    assert RateWithMore().decide(seen) == pytest.approx(byte_s * NS)


def test_a_server_that_was_slower_with_more_gets_what_it_can_take_then() -> None:
    quick, limited = server(), server()
    limited = replace(limited, more_byte_s=4 * NS)
    assert len(decide([quick, server()], shards(60, 4)).moves) == 28
    moves = decide([quick, limited], shards(60, 4)).moves
    assert len(moves) == 8, "then 52 at 1 and 12 at 4"
    assert decide([quick, limited], shards(51, 13)).moves == ()


@pytest.mark.parametrize("noise", [0.03, 0.1, 0.2])
def test_the_error_is_not_understated(noise: float) -> None:
    rng = random.Random(f"error {noise}")
    outside = 0
    for _ in range(300):
        rate = EstimateRate().decide([math.exp(rng.gauss(0, noise)) for _ in range(rng.randint(2, 16))])
        outside += abs(math.log(rate.byte_s)) > SURE * rate.error_frac
    assert outside <= (1 if noise <= 0.1 else 9)  # more noise than is assumed before there are looks


def server(
    byte_ns: float = 1.0,
    *,
    rooms: int = 99,
    allowed: bool = True,
    memory: int = 0,
    error: float = 0.0,
    low: float = 0.0,
    high: float = 0.0,
) -> ServerState:
    return ServerState(
        byte_s=byte_ns * NS,
        error_frac=error,
        low_s=(low or byte_ns) * NS,
        high_s=(high or byte_ns) * NS,
        memory_bytes=memory,
        free_rooms=rooms,
        allowed=allowed,
    )


def shards(*held: int, size: int = MiB, pushes: float = 1.0, looks: int = 1 << 30) -> list[ShardState]:
    """So many equal shards on each server, keys in order."""
    servers = [index for index, count in enumerate(held) for _ in range(count)]
    return [
        ShardState(key=key, num_bytes=size, pushes_per_step=pushes, server=at, pinned=False, looks_since_move=looks)
        for key, at in enumerate(servers)
    ]


def with_fields(shard: ShardState, **fields: object) -> ShardState:
    names = ("key", "num_bytes", "pushes_per_step", "server", "pinned", "looks_since_move")
    return ShardState(**{**{name: getattr(shard, name) for name in names}, **fields})  # type: ignore[arg-type]


def decide(
    servers: list[ServerState], held: list[ShardState], *, step_s: float = 0.1, config: RoutingConfig | None = None
) -> RebalanceDecision:
    facts = RoutingFacts(servers=tuple(servers), shards=tuple(held), step_s=step_s)
    return Rebalance(config or RoutingConfig()).decide(facts)


def ends(decision: RebalanceDecision) -> list[tuple[int, int, int]]:
    return [(move.key, move.source, move.target) for move in decision.moves]


# ns a byte of each server, shards of 1 MiB on each, shards on each after the moves, beginning of the reason
BALANCES = [
    ([1, 1], [8, 8], [8, 8], "no shard can leave server 0 to anyone's gain"),
    ([1, 1], [6, 5], [6, 5], "no shard can leave server 0 to anyone's gain"),
    ([1, 1], [6, 4], [5, 5], "server 0 takes 6.3 ms of a step of 100.0 ms; 1 shards elsewhere save 17% of it"),
    ([1, 4], [32, 32], [51, 13], "server 1 takes 134.2 ms of a step of 200.0 ms; 19 shards elsewhere save 59% of it"),
    ([1, 1, 1], [30, 30, 0], [20, 20, 20], "server 0 takes 31.5 ms"),
    ([4, 4, 1], [10, 10, 10], [5, 5, 20], "server 0 takes 41.9 ms"),
    ([1, 1.05], [40, 40], [40, 40], "server 1 takes 44.0 ms of a step of 200.0 ms; 1 shards elsewhere save 2% of it"),
    ([1, 1], [3, 1], [3, 1], "servers take 3.1% of a step and hold nobody up"),
]


@pytest.mark.parametrize(("rates", "held", "after", "reason"), BALANCES)
def test_balances(rates: list[float], held: list[int], after: list[int], reason: str) -> None:
    step_s = 0.2 if max(held) > 30 else 0.1
    decision = decide([server(rate) for rate in rates], shards(*held), step_s=step_s)
    counts = list(held)
    for move in decision.moves:
        counts[move.source] -= 1
        counts[move.target] += 1
    assert counts == after
    assert decision.reason.startswith(reason), decision.reason
    assert decision.stuck == ()


def test_the_reason_tells_gain_and_cost() -> None:
    decision = decide([server(1), server(2)], shards(20, 20))
    assert decision.reason == (
        "server 1 takes 41.9 ms of a step of 100.0 ms; 7 shards elsewhere save 32% of it and cost 88.1 ms (7.0 MiB)"
    )


def test_the_shard_that_evens_out_best_goes() -> None:
    sizes = [MiB, 6 * MiB, 3 * MiB, 4 * MiB, 2 * MiB]
    held = [with_fields(shard, num_bytes=size) for shard, size in zip(shards(5, 0), sizes, strict=True)]
    assert ends(decide([server(), server()], held)) == [(1, 0, 1), (4, 0, 1)]


def test_a_shard_that_is_pushed_often_counts_more() -> None:
    held = [with_fields(shard, pushes_per_step=9.0 if shard.key == 1 else 3.0) for shard in shards(4, 0)]
    assert ends(decide([server(), server()], held, step_s=0.05)) == [(1, 0, 1)]
    held = [with_fields(shard, pushes_per_step=0.0 if shard.key else 9.0) for shard in shards(4, 0)]
    assert ends(decide([server(), server()], held, step_s=0.05)) == []


def test_noise_moves_nothing() -> None:
    held = shards(20, 20)
    for error, other, moves in ((0.08, 0.08, True), (0.08, 0.09, False), (0.0, 0.12, False), (0.11, 0.0, True)):
        decision = decide([server(1, error=error), server(2, error=other)], held)
        assert bool(decision.moves) is moves, (error, other)
    facts = RoutingFacts(
        servers=(server(1, error=0.1), server(2, error=0.2)), shards=tuple(held), step_s=0.1, unequal=((1, 0),)
    )
    assert Rebalance(RoutingConfig()).decide(facts).moves  # it is known that they differ
    assert not Rebalance(RoutingConfig()).decide(replace(facts, unequal=((0, 1),))).moves
    # the newest looks say at least a factor of 1.42, the root of 2: one of the servers alone may have been frozen
    assert decide([server(1, high=1.05), server(2, low=1.5)], held).moves
    decision = decide([server(1, high=1.06), server(2, low=1.49)], held)
    assert (decision.moves, decision.reason) == ((), "no shard can leave server 1 to anyone's gain")
    # an empty server is quicker beyond doubt, whatever its rate
    unknown = ServerState(byte_s=NS, error_frac=1.0, low_s=0.0, high_s=math.inf, memory_bytes=0, free_rooms=99)
    assert len(decide([server(2, error=1.0), unknown], shards(20, 0)).moves) == 13
    assert decide([server(2), unknown], shards(20, 1)).moves == ()


def test_a_move_must_earn_its_cost() -> None:
    config = RoutingConfig(horizon_steps=10)
    slow = [server(1), server(1)]
    assert decide(slow, shards(20, 10), config=config, step_s=0.02).moves
    decision = decide(slow, shards(20, 10), config=RoutingConfig(horizon_steps=8), step_s=0.02)
    assert decision.moves == ()
    assert decision.reason.endswith("3 shards elsewhere save 15% of it and cost 25.2 ms, more than 8 steps would save")


def test_a_move_must_gain_enough() -> None:
    config = RoutingConfig(min_gain_frac=0.35)
    decision = decide([server(1), server(2)], shards(20, 20), config=config)
    assert decision.moves == () and decision.reason.endswith("7 shards elsewhere save 32% of it, need 35%")


def test_what_moved_stays_for_a_while_and_what_is_pinned_for_good() -> None:
    config = RoutingConfig(hold_intervals=3)
    held = shards(20, 20)
    fresh = [with_fields(shard, looks_since_move=3) for shard in held]
    assert decide([server(1), server(2)], fresh, config=config).moves == ()
    ripe = [with_fields(shard, looks_since_move=4) for shard in held]
    assert len(decide([server(1), server(2)], ripe, config=config).moves) == 7
    pinned = [with_fields(shard, pinned=shard.key % 4 != 0) for shard in held]
    assert {move.key for move in decide([server(1), server(2)], pinned).moves} == {20, 24, 28, 32, 36}


def test_rooms_and_memory_bound_what_moves() -> None:
    assert len(decide([server(1, rooms=3), server(2)], shards(20, 20)).moves) == 3
    assert len(decide([server(1, rooms=0), server(2)], shards(20, 20)).moves) == 0
    need = HELD_COPIES * MiB
    assert len(decide([server(1, memory=3 * need), server(2)], shards(20, 20)).moves) == 3
    # the large ones do not fit, the small ones do
    held = [with_fields(shard, num_bytes=MiB // 2 if shard.key >= 36 else MiB) for shard in shards(20, 20)]
    decision = decide([server(1, memory=need - 1), server(2)], held, config=RoutingConfig(min_gain_frac=0))
    assert len(decision.moves) == 1 and decision.moves[0].key >= 36


def test_nothing_moves_where_it_must_not() -> None:
    held = shards(20, 20)
    assert decide([server(1), server(2)], held, config=RoutingConfig(move=False)).reason == "routing.move is off"
    assert decide([server(1), server(2)], held, step_s=0.0).reason == "no step was timed yet"
    assert decide([server(), server()], []).moves == ()


def test_a_server_that_shall_hold_nothing_is_emptied_first() -> None:
    servers = [server(1), server(1), server(1, allowed=False)]
    held = [*shards(1, 0, 3), *shards(0, 0, 0, 0)]
    held = [with_fields(shard, num_bytes=size * MiB) for shard, size in zip(held, (5, 1, 2, 4), strict=True)]
    decision = decide(servers, held, step_s=0.0, config=RoutingConfig(min_gain_frac=0.9, hold_intervals=9))
    assert ends(decision) == [(3, 2, 1), (2, 2, 1), (1, 2, 0)]
    assert decision.reason == "only servers [0, 1] shall hold shards; to [0, 1]"
    assert ShardMove(key=3, source=2, target=1) in decision.moves


def test_what_cannot_leave_is_named() -> None:
    servers = [server(1, rooms=1), server(1, allowed=False)]
    pinned = with_fields(shards(0, 4)[0], pinned=True)
    decision = decide(servers, [pinned, *shards(0, 4)[1:]])
    assert (ends(decision), decision.stuck) == ([(1, 1, 0)], (2, 3))
    decision = decide([server(1, rooms=0), server(1, allowed=False)], [pinned, *shards(0, 4)[1:]])
    assert (decision.moves, decision.stuck) == ((), (1, 2, 3))
    assert decision.reason == "servers [0] have no room or memory for shards [1, 2, 3]"
    assert decide(servers, [pinned]).stuck == ()


def test_nothing_goes_back_to_an_emptied_server() -> None:
    decision = decide([server(9), server(3), server(1, allowed=False)], shards(20, 0, 0))
    assert {move.target for move in decision.moves} == {1}
