"""Windows and staleness: what holds for all settings and facts."""

from __future__ import annotations

import math
import random
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import StalenessConfig, WindowConfig
from hpcps.plan import Shard
from hpcps.policy import StalenessPolicy, WindowFacts, WindowPolicy
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.server import ServerProtocol

window_configs = st.builds(
    lambda quorum, deadline, fixed, k, history: WindowConfig(
        quorum_frac=quorum, deadline=deadline, fixed_s=fixed, mad_k=k, min_history=history
    ),
    st.floats(0.01, 1.0),
    st.sampled_from(["mad", "fixed"]),
    st.floats(0.001, 10.0),
    st.floats(0.0, 10.0),
    st.integers(1, 10),
)
staleness_configs = st.builds(
    lambda decay, rate, cap, over: StalenessConfig(decay=decay, rate=rate, cap=cap, over_cap=over),
    st.sampled_from(["none", "inverse", "exponential"]),
    st.floats(0.01, 5.0),
    st.integers(0, 20),
    st.sampled_from(["drop", "clamp"]),
)


@settings(deadline=None, max_examples=500, derandomize=True)
@given(
    config=window_configs,
    arrived=st.integers(0, 20),
    live=st.integers(0, 20),
    waited_s=st.floats(0.0, 20.0),
    offsets_s=st.lists(st.floats(0.0, 10.0), max_size=12),
    step_s=st.sampled_from([0.0, 0.001, 0.5, 5.0]),
    lapped=st.booleans(),
    queued=st.sampled_from([0, 0, 3]),
    level=st.integers(0, 3),
)
def test_a_window_closes_when_all_are_in_or_at_the_deadline_with_a_quorum(
    config: WindowConfig,
    arrived: int,
    live: int,
    waited_s: float,
    offsets_s: list[float],
    step_s: float,
    lapped: bool,
    queued: int,
    level: int,
) -> None:
    policy = WindowPolicy(config)

    def ask(now_s: float, num_queued: int) -> tuple[bool, float | None]:
        facts = WindowFacts(
            num_arrived=arrived,
            num_live=live,
            opened_s=100.0,
            now_s=now_s,
            offsets_s=tuple(offsets_s),
            step_s=step_s,
            slowest_s=3 * step_s,
            num_queued=num_queued,
            lapped=lapped,
            level=level,
        )
        decision = policy.decide(facts)
        return decision.close, decision.deadline_s

    close, deadline_s = ask(100.0 + waited_s, queued)
    has_quorum = arrived >= math.ceil(config.quorum_frac * live - 1e-9)
    stuck_s = 100.0 + max(30 * step_s, 5.0)
    is_stuck = lapped and 100.0 + waited_s >= stuck_s
    if close:
        assert arrived >= 1
        assert arrived >= live or is_stuck or (has_quorum and level < 2)
        assert arrived >= live or not queued
        assert deadline_s is None
    if arrived >= max(live, 1):
        assert close
    if deadline_s is not None and not queued:
        assert 100.0 + waited_s < deadline_s
        assert deadline_s <= (stuck_s if lapped else math.inf)
        closes_then, asks_again_s = ask(deadline_s, 0)
        assert closes_then == ((has_quorum and level < 2) or (lapped and deadline_s >= stuck_s))
        assert closes_then or asks_again_s is None or asks_again_s > deadline_s
    if deadline_s is not None and queued and deadline_s <= 100.0 + waited_s:
        assert ask(100.0 + waited_s, 0)[0], "it would close but for what is queued"
    # whoever waits in line for a window is not kept for ever
    if arrived and lapped:
        assert ask(stuck_s, 0)[0]


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    config=st.builds(lambda k: WindowConfig(deadline="mad", mad_k=k, min_history=4), st.floats(0.0, 10.0)),
    offsets_s=st.lists(st.floats(0.0, 100.0), min_size=4, max_size=64),
    step_s=st.sampled_from([0.0, 0.0005, 0.5, 50.0]),
)
def test_the_deadline_lies_in_sane_bounds(config: WindowConfig, offsets_s: list[float], step_s: float) -> None:
    """Above 0, no longer than a step and no longer than the last arrival needs, and the same for any order of them."""

    def wait_s(offsets: list[float]) -> float:
        facts = WindowFacts(
            num_arrived=1,
            num_live=4,
            opened_s=0.0,
            now_s=0.0,
            offsets_s=tuple(offsets),
            step_s=step_s,
            slowest_s=step_s,
        )
        deadline_s = WindowPolicy(config).decide(facts).deadline_s
        assert deadline_s is not None
        return deadline_s

    wait = wait_s(offsets_s)
    median_s = statistics.median(offsets_s)
    spread_s = max(statistics.median(abs(offset - median_s) for offset in offsets_s), 0.05 * median_s, 0.001)
    assert 0.001 <= wait
    assert wait <= max(0.001, median_s + 4 * config.mad_k * spread_s) * (1 + 1e-9)
    if step_s:
        assert wait <= max(step_s, 0.001)
    assert wait == wait_s(sorted(offsets_s)) == wait_s(offsets_s[::-1])


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    before_s=st.floats(0.001, 1.0),
    after_s=st.floats(0.001, 1.0),
    jitter=st.floats(0.0, 0.2),
    seed=st.integers(0, 2**32),
)
def test_the_deadline_follows_the_arrivals_within_64_windows(
    before_s: float, after_s: float, jitter: float, seed: int
) -> None:
    """Group 1 comes so long after group 0; from some window on, another time. Steps take 10 s."""
    rng = random.Random(seed)
    shard = Shard(key=0, server=0, dtype="float32", begin=0, numel=4, pieces=())
    protocol = ServerProtocol(
        [shard],
        window=WindowConfig(quorum_frac=0.5, deadline="mad", mad_k=3.0),
        staleness=StalenessConfig(),
        num_workers=2,
        adaptive=False,
    )
    clock = 0

    def push(group: int, at_s: float) -> None:
        while protocol.next_deadline_s is not None and protocol.next_deadline_s <= at_s:
            protocol.on_timer(now_s=protocol.next_deadline_s)
        protocol.on_push(_push(group, clock, version=max(0, protocol.version(0))), None, now_s=at_s)

    def window(offset_s: float) -> float:
        """One step of both groups; the time that the window would have waited."""
        nonlocal clock
        clock += 1
        push(0, 10.0 * clock)
        deadline_s = protocol.next_deadline_s
        assert deadline_s is not None
        push(1, 10.0 * clock + offset_s * (1 + jitter * rng.random()))
        return deadline_s - 10.0 * clock

    push(0, 0.0)
    for offset_s in (before_s, after_s):
        for _ in range(64):
            window(offset_s)
        wait = window(offset_s)
        most_s = offset_s * (1 + jitter) + 3 * max(0.05 * 1.2 * offset_s, jitter * offset_s, 0.001)
        assert offset_s <= wait <= most_s + 1e-9


def _push(group: int, clock: int, *, version: int) -> PushHeader:
    return PushHeader(
        kind=Kind.GRADIENT if clock else Kind.INIT,
        key=0,
        route_epoch=0,
        generation=0,
        group=group,
        num_groups=2,
        sender=group + 1,
        clock=clock,
        since_clock=1,
        base_version=version,
        weight=float(clock > 0),
        share_frac=0.5,
        numel=4,
        meta_bytes=0,
        payload_bytes=16,
    )


@settings(deadline=None, max_examples=300, derandomize=True)
@given(config=staleness_configs, staleness=st.integers(0, 1000))
def test_factors_fall_with_staleness_and_stay_in_range(config: StalenessConfig, staleness: int) -> None:
    policy = StalenessPolicy(config)
    now, later = policy.decide(staleness), policy.decide(staleness + 1)
    assert policy.decide(0).factor == 1.0
    assert later.factor <= now.factor
    assert now.accept == (now.factor > 0)
    assert now.accept or (config.over_cap == "drop" and staleness > config.cap > 0)
