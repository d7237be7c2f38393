"""The chooser never predicts worse than none, says the same again, and finds its way on links that it must measure."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import CompressionConfig
from hpcps.plan import CodecSpec
from hpcps.policy import (
    ChoiceMemory,
    CodecChoice,
    CodecCost,
    CodecFacts,
    LinkEstimate,
    LinkFacts,
    SetBack,
)

SPECS = [CodecSpec.parse(text) for text in ("none", "fp16", "int8", "topk:0.01", "bf16", "onebit")]
NONE, FP16, INT8, TOPK = SPECS[:4]

times_s = st.one_of(st.just(0.0), st.floats(1e-7, 1.0))
links = st.builds(
    LinkFacts,
    latency_s=times_s,
    bytes_per_s=st.floats(1e3, 1e12),
    trusted=st.booleans(),
    num_changes=st.integers(0, 1),
)
memories = st.builds(
    ChoiceMemory,
    spec=st.sampled_from(SPECS),
    before=st.one_of(st.none(), st.sampled_from(SPECS)),
    switched_step=st.one_of(st.none(), st.integers(0, 100)),
    set_backs=st.lists(
        st.builds(SetBack, spec=st.sampled_from(SPECS), until_step=st.integers(0, 200), count=st.integers(1, 30)),
        max_size=3,
        unique_by=lambda back: back.spec,
    ).map(tuple),
    probe_step=st.integers(0, 200),
    probe_steps=st.integers(1, 100),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[CompressionConfig, CodecFacts]:
    others = draw(st.lists(st.sampled_from(SPECS[1:]), unique=True))
    costs = [
        CodecCost(
            spec=spec,
            encode_s=draw(times_s),
            decode_s=draw(times_s),
            wire_bytes=draw(st.one_of(st.none(), st.integers(0, 10**8))),
            error=draw(st.one_of(st.none(), st.floats(0, 1))),
        )
        for spec in [NONE, *others]
    ]
    facts = CodecFacts(
        now_step=draw(st.integers(0, 300)),
        numel=draw(st.integers(1, 10**7)),
        itemsize=draw(st.sampled_from([4, 8])),
        link=draw(links),
        costs=tuple(draw(st.permutations(costs))),
        hidden_s=draw(times_s),
        density=draw(st.floats(0, 1)),
        measured_s=draw(st.one_of(st.none(), times_s)),
        measured_before_s=draw(st.one_of(st.none(), times_s)),
        memory=draw(memories),
    )
    config = CompressionConfig(
        min_gain_frac=draw(st.sampled_from([0.0, 0.03, 0.5])),
        switch_gain_frac=draw(st.sampled_from([0.0, 0.1])),
        hold_steps=draw(st.integers(1, 40)),
        max_error=draw(st.sampled_from([0.0, 0.05])),
        error_feedback=draw(st.booleans()),
    )
    return config, facts


@settings(deadline=None, max_examples=1000, derandomize=True)
@given(case=cases())
def test_the_choice_is_never_predicted_to_be_worse_than_none(case: tuple[CompressionConfig, CodecFacts]) -> None:
    config, facts = case
    decision = CodecChoice(config).decide(facts)
    costs = {cost.spec: cost for cost in decision.costs}
    assert next(iter(costs)) == NONE
    assert set(costs) == {cost.spec for cost in facts.costs}
    assert costs[decision.spec].seconds <= costs[NONE].seconds
    assert not costs[decision.spec].barred
    assert decision.memory.spec == decision.spec
    assert decision.switched == (decision.spec != facts.memory.spec)
    assert not (decision.probe and (decision.spec == NONE or decision.switched or facts.link.trusted))
    if decision.switched and decision.spec != NONE and decision.memory.before is not None:
        gain_s = costs[NONE].seconds - costs[decision.spec].seconds
        assert gain_s > max(config.min_gain_frac * costs[NONE].seconds, 50e-6)
        since = facts.memory.switched_step
        assert facts.link.trusted
        assert since is None or facts.now_step - since >= config.hold_steps


@settings(deadline=None, max_examples=300, derandomize=True)
@given(case=cases(), order=st.randoms(use_true_random=False))
def test_the_same_facts_give_the_same_decision(
    case: tuple[CompressionConfig, CodecFacts], order: random.Random
) -> None:
    config, facts = case
    costs = list(facts.costs)
    order.shuffle(costs)
    again = CodecFacts(**{name: getattr(facts, name) for name in CodecFacts.__slots__} | {"costs": tuple(costs)})
    policy = CodecChoice(config)
    assert policy.decide(facts) == policy.decide(again) == CodecChoice(config).decide(facts)


NS = {NONE: (0.0, 0.0), FP16: (0.45, 0.5), INT8: (0.5, 0.5), TOPK: (0.8, 0.1)}
"""Nanoseconds an element to encode and to decode."""


@dataclass
class Exchange:
    """A worker, a link and a server whose real costs the policy learns only by what it sends."""

    numel: int
    specs: tuple[CodecSpec, ...]
    bytes_per_s: float
    rng: random.Random
    latency_s: float = 30e-6
    bias: dict[CodecSpec, float] = field(default_factory=dict)
    """Seconds that a codec really takes on top of what was measured beforehand."""
    memory: ChoiceMemory = field(default_factory=ChoiceMemory)
    estimate: LinkEstimate = field(default_factory=LinkEstimate)
    seen_s: list[float] = field(default_factory=list)
    before_s: float | None = None
    switches: int = 0

    def costs(self) -> tuple[CodecCost, ...]:
        return tuple(
            CodecCost(spec=spec, encode_s=enc * 1e-9 * self.numel, decode_s=dec * 1e-9 * self.numel)
            for spec, (enc, dec) in ((spec, NS[spec]) for spec in self.specs)
        )

    def real_s(self, spec: CodecSpec) -> float:
        """Exchange without noise."""
        enc, dec = NS[spec]
        num_bytes = spec.wire_bytes(self.numel)
        transfer_s = self.latency_s + num_bytes / self.bytes_per_s
        return (enc + dec) * 1e-9 * self.numel + transfer_s + self.bias.get(spec, 0.0)

    def step(self, policy: CodecChoice, now_step: int) -> float:
        decision = policy.decide(
            CodecFacts(
                now_step=now_step,
                numel=self.numel,
                link=self.estimate.facts(NONE.wire_bytes(self.numel)),
                costs=self.costs(),
                measured_s=statistics.median(self.seen_s[-8:]) if len(self.seen_s) >= 5 else None,
                measured_before_s=self.before_s,
                memory=self.memory,
            )
        )
        if decision.switched:
            self.switches += 1
            self.before_s = statistics.median(self.seen_s[-8:]) if len(self.seen_s) >= 3 else None
            self.seen_s = []
        self.memory = decision.memory
        sent = NONE if decision.probe else decision.spec
        noise = 1.0 + 0.05 * abs(self.rng.gauss(0, 1)) + (2.0 if self.rng.random() < 0.03 else 0.0)
        num_bytes = sent.wire_bytes(self.numel)
        self.estimate.add(num_bytes, (self.latency_s + num_bytes / self.bytes_per_s) * noise, step=now_step)
        if not decision.probe:
            self.seen_s.append(self.real_s(sent) * noise)
        return self.real_s(sent)


RATES = [50e6, 200e6, 1e9, 3e9, 10e9, 20e9, 25e9, 30e9, 35e9, 40e9]


@pytest.mark.parametrize("codecs", [("none", "fp16", "int8"), ("none", "fp16", "int8", "topk:0.01")])
@pytest.mark.parametrize("numel", [1 << 14, 1 << 20])
def test_on_a_link_that_it_measures_auto_is_close_to_the_best(numel: int, codecs: tuple[str, ...]) -> None:
    for rate in RATES:
        specs = tuple(CodecSpec.parse(text) for text in codecs)
        exchange = Exchange(numel=numel, specs=specs, bytes_per_s=rate / 8, rng=random.Random(7))
        policy = CodecChoice(CompressionConfig(auto_codecs=codecs))
        spent_s = [exchange.step(policy, step) for step in range(500)]
        steady_s = statistics.fmean(spent_s[20:])
        best_s = min(exchange.real_s(spec) for spec in specs)
        assert steady_s <= 1.02 * exchange.real_s(NONE), (rate, exchange.memory)
        assert steady_s <= 1.05 * best_s + 50e-6, (rate, exchange.memory)
        assert exchange.switches <= 6, rate


@pytest.mark.parametrize(("first", "then"), [(40e9, 1e9), (1e9, 40e9), (100e6, 10e9), (1e9, 200e6)])
def test_it_follows_a_link_that_changes(first: float, then: float) -> None:
    exchange = Exchange(numel=1 << 20, specs=(NONE, FP16, INT8), bytes_per_s=first / 8, rng=random.Random(3))
    policy = CodecChoice(CompressionConfig())
    for step in range(100):
        exchange.step(policy, step)
    exchange.bytes_per_s = then / 8
    spent_s = [exchange.step(policy, step) for step in range(100, 400)]
    best_s = min(exchange.real_s(spec) for spec in exchange.specs)
    assert statistics.fmean(spent_s[60:]) <= 1.05 * best_s, exchange.memory


def test_a_codec_that_is_slower_than_it_was_measured_costs_little_in_the_long_run() -> None:
    exchange = Exchange(numel=1 << 20, specs=(NONE, INT8), bytes_per_s=1e9 / 8, rng=random.Random(5))
    exchange.bias = {INT8: 0.040}
    assert exchange.real_s(INT8) > 1.4 * exchange.real_s(NONE)
    policy = CodecChoice(CompressionConfig())
    spent_s = [exchange.step(policy, step) for step in range(2000)]
    assert statistics.fmean(spent_s) <= 1.02 * exchange.real_s(NONE)
    assert exchange.memory.set_backs[0].count >= 4
