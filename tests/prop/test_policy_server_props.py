"""Windows and staleness: what holds for all settings and facts."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import StalenessConfig, WindowConfig
from hpcps.policy import StalenessPolicy, WindowFacts, WindowPolicy

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
)
def test_a_window_closes_when_all_are_in_or_at_the_deadline_with_a_quorum(
    config: WindowConfig, arrived: int, live: int, waited_s: float, offsets_s: list[float]
) -> None:
    policy = WindowPolicy(config)

    def ask(now_s: float) -> tuple[bool, float | None]:
        facts = WindowFacts(num_arrived=arrived, num_live=live, opened_s=100.0, now_s=now_s, offsets_s=tuple(offsets_s))
        decision = policy.decide(facts)
        return decision.close, decision.deadline_s

    close, deadline_s = ask(100.0 + waited_s)
    has_quorum = arrived >= min(live, max(1.0, config.quorum_frac * live - 1e-6))
    if close:
        assert arrived >= 1
        assert has_quorum or arrived >= live
        assert deadline_s is None
    if arrived >= max(live, 1):
        assert close
    if deadline_s is not None:
        assert deadline_s > 100.0 + waited_s
        closes_then, asks_again_s = ask(deadline_s)
        assert asks_again_s is None
        assert closes_then == (arrived >= math.ceil(config.quorum_frac * live - 1e-9))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(config=staleness_configs, staleness=st.integers(0, 1000))
def test_factors_fall_with_staleness_and_stay_in_range(config: StalenessConfig, staleness: int) -> None:
    policy = StalenessPolicy(config)
    now, later = policy.decide(staleness), policy.decide(staleness + 1)
    assert policy.decide(0).factor == 1.0
    assert later.factor <= now.factor
    assert now.accept == (now.factor > 0)
    assert now.accept or (config.over_cap == "drop" and staleness > config.cap > 0)
