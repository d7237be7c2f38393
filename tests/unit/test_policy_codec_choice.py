"""The chooser by tables: costs like the measured ones, one shard of 4 MiB, links from 50 Mb/s to 40 Gb/s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcps.config import CompressionConfig
from hpcps.errors import PlanError
from hpcps.plan import CodecSpec
from hpcps.policy import ChoiceMemory, CodecChoice, CodecCost, CodecDecision, CodecFacts, LinkFacts, SetBack

NUMEL = 1 << 20
NS = {"none": (0.0, 0.0), "fp16": (0.45, 0.5), "int8": (0.5, 0.5), "topk:0.01": (0.8, 0.1), "fp32": (0.0, 0.0)}
ERRORS = {"none": 0.0, "fp16": 3e-4, "int8": 0.01, "topk:0.01": 0.9, "fp32": 0.0}
ALL = ("none", "fp16", "int8", "topk:0.01")
DENSE = ("none", "fp16", "int8")
LATENCY_S = 20e-6


def spec(text: str) -> CodecSpec:
    return CodecSpec.parse(text)


def cost(text: str, numel: int = NUMEL, *, wire_bytes: int | None = None, error: float | None = None) -> CodecCost:
    encode_ns, decode_ns = NS[text]
    return CodecCost(
        spec=spec(text),
        encode_s=encode_ns * 1e-9 * numel,
        decode_s=decode_ns * 1e-9 * numel,
        wire_bytes=wire_bytes,
        error=ERRORS[text] if error is None else error,
    )


def link(bits_per_s: float, *, trusted: bool = True, num_changes: int = 0, latency_s: float = LATENCY_S) -> LinkFacts:
    return LinkFacts(latency_s=latency_s, bytes_per_s=bits_per_s / 8, trusted=trusted, num_changes=num_changes)


def facts(bits_per_s: float = 1e9, codecs: tuple[str, ...] = ALL, **others: object) -> CodecFacts:
    values: dict[str, object] = {
        "now_step": 100,
        "numel": NUMEL,
        "link": link(bits_per_s),
        "costs": tuple(cost(text) for text in codecs),
    }
    return CodecFacts(**{**values, **others})


def decide(given: CodecFacts, **settings: object) -> CodecDecision:
    """The tables below are for a least gain of 3 %."""
    return CodecChoice(CompressionConfig(**{"min_gain_frac": 0.03, **settings})).decide(given)


def using(text: str, **others: object) -> ChoiceMemory:
    return ChoiceMemory(spec=spec(text), **others)


# rate, best of none, fp16 and int8, best of these and top-k
RATES = [
    (50e6, "int8", "topk:0.01"),
    (100e6, "int8", "topk:0.01"),
    (1e9, "int8", "topk:0.01"),
    (10e9, "int8", "topk:0.01"),
    (20e9, "int8", "topk:0.01"),
    (22e9, "int8", "topk:0.01"),
    (23e9, "none", "topk:0.01"),
    (25e9, "none", "topk:0.01"),
    (33e9, "none", "topk:0.01"),
    (36e9, "none", "none"),
    (40e9, "none", "none"),
]


@pytest.mark.parametrize(("bits_per_s", "dense", "with_topk"), RATES)
def test_choice_by_link_rate(bits_per_s: float, dense: str, with_topk: str) -> None:
    assert str(decide(facts(bits_per_s, DENSE)).spec) == dense
    assert str(decide(facts(bits_per_s)).spec) == with_topk


# rate, seconds hidden by compute, choice among none, fp16 and int8: what is hidden needs no codec
HIDDEN = [
    (1e9, 0.0, "int8"),
    (1e9, 0.010, "int8"),
    (1e9, 0.017, "fp16"),
    (1e9, 0.032, "fp16"),
    (1e9, 0.0330, "none"),
    (1e9, 0.5, "none"),
    (10e9, 0.0033, "none"),
]


@pytest.mark.parametrize(("bits_per_s", "hidden_s", "expected"), HIDDEN)
def test_what_compute_hides_needs_no_codec(bits_per_s: float, hidden_s: float, expected: str) -> None:
    assert str(decide(facts(bits_per_s, DENSE, hidden_s=hidden_s)).spec) == expected


def test_predicted_costs_and_reasons() -> None:
    decision = decide(facts(1e9, DENSE))
    assert [str(each.spec) for each in decision.costs] == ["none", "fp16", "int8"]
    wire = [4194304, 2097152, 1052672]
    assert [each.wire_bytes for each in decision.costs] == wire
    expected_s = [LATENCY_S + num * 8e-9 + sum(NS[name]) * 1e-9 * NUMEL for num, name in zip(wire, DENSE, strict=True)]
    assert [each.seconds for each in decision.costs] == pytest.approx(expected_s)
    assert decision.switched
    assert decision.memory.spec == decision.spec
    assert decision.reason == "int8: 9.49 ms against 33.6 ms of none at 1.0 Gb/s"
    assert decide(facts(40e9, DENSE)).reason == (
        "none: the best other, int8, would take 1.28 ms against 0.859 ms at 40.0 Gb/s"
    )
    assert decide(facts(50e6, ("none",))).reason == "none: 671 ms at 50.0 Mb/s, and there is no other candidate"


def test_ties_go_to_none_then_to_the_order_of_preference() -> None:
    free = tuple(CodecCost(spec=spec(text), encode_s=0, decode_s=0, wire_bytes=1000) for text in DENSE)
    assert str(decide(facts(costs=free)).spec) == "none"
    half = (replace(free[0], wire_bytes=10**6), *reversed(free[1:]))
    assert str(decide(facts(costs=half)).spec) == "fp16"
    assert str(decide(facts(costs=half), auto_codecs=("int8", "none", "fp16")).spec) == "int8"
    assert str(decide(facts(costs=half), auto_codecs=("none",)).spec) == "fp16"


# gain of fp16 over none in microseconds, exchange of none in microseconds, choice
GAINS = [
    (49, 500, "none"),
    (51, 500, "fp16"),
    (290, 10_000, "none"),
    (310, 10_000, "fp16"),
    (-1, 10_000, "none"),
]


@pytest.mark.parametrize(("gain_us", "none_us", "expected"), GAINS)
def test_none_is_left_for_a_gain_that_counts(gain_us: int, none_us: int, expected: str) -> None:
    costs = (timed("none", none_us), timed("fp16", none_us - gain_us))
    assert str(decide(facts(costs=costs)).spec) == expected


def timed(text: str, microseconds: float, *, error: float | None = None) -> CodecCost:
    """A candidate that takes so long apart from the latency of 20 us."""
    return CodecCost(spec=spec(text), encode_s=microseconds * 1e-6, decode_s=0.0, wire_bytes=0, error=error)


# codec in use, microseconds of none, fp16, int8, choice
HYSTERESIS = [
    ("fp16", 1000, 800, 780, "fp16"),
    ("fp16", 1000, 800, 740, "int8"),
    ("int8", 1000, 720, 750, "int8"),
    ("fp16", 1000, 970, 990, "fp16"),
    ("fp16", 1000, 976, 990, "none"),
    ("fp16", 1000, 976, 940, "int8"),
    ("fp16", 1000, 1010, 980, "none"),
    ("fp16", 1000, 1010, 500, "int8"),
    ("none", 1000, 960, 990, "none"),
    ("topk:0.01", 1000, 960, 990, "none"),
]


@pytest.mark.parametrize(("now", "none_us", "fp16_us", "int8_us", "expected"), HYSTERESIS)
def test_a_codec_in_use_is_kept_unless_another_gains_enough(
    now: str, none_us: int, fp16_us: int, int8_us: int, expected: str
) -> None:
    costs = (timed("none", none_us), timed("fp16", fp16_us), timed("int8", int8_us))
    decision = decide(facts(costs=costs, memory=using(now)))
    assert str(decision.spec) == expected
    assert decision.switched == (now != expected)


@pytest.mark.parametrize(("measured_s", "expected"), [(None, "fp16"), (0.0015, "fp16"), (0.0025, "none")])
def test_a_gain_is_held_against_the_whole_exchange(measured_s: float | None, expected: str) -> None:
    """0.2 of 1 ms that are predicted are much, of 2.5 ms that an exchange takes with its pulls they are not."""
    costs = (timed("none", 1000), timed("fp16", 800))
    assert str(decide(facts(costs=costs, measured_s=measured_s), min_gain_frac=0.1).spec) == expected


def test_one_switch_in_a_hold_but_back_to_none_at_once() -> None:
    quick = (timed("none", 1000), timed("fp16", 800), timed("int8", 300))
    since = using("fp16", switched_step=90)
    held = decide(facts(costs=quick, memory=since, now_step=109))
    assert (str(held.spec), held.switched) == ("fp16", False)
    assert held.reason == "fp16: 0.82 ms against 1.02 ms of none at 1.0 Gb/s; held since step 90"
    freed = decide(facts(costs=quick, memory=since, now_step=110))
    assert (str(freed.spec), freed.memory.switched_step, str(freed.memory.before)) == ("int8", 110, "fp16")
    slow = (timed("none", 700), timed("fp16", 800), timed("int8", 300))
    retreat = decide(facts(costs=slow, memory=since, now_step=91))
    assert (str(retreat.spec), retreat.switched, retreat.memory.before) == ("none", True, None)
    again = decide(facts(costs=quick, memory=retreat.memory, now_step=110))
    assert (str(again.spec), again.switched) == ("none", False)


def test_a_switch_that_turned_out_slower_is_undone_and_kept_away_for_longer_each_time() -> None:
    given = facts(1e9, DENSE, now_step=0)
    memory, until = ChoiceMemory(), []
    for _ in range(3):
        taken = decide(replace(given, memory=memory))
        assert (str(taken.spec), str(taken.memory.before)) == ("int8", "none")
        early = decide(replace(given, now_step=given.now_step + 4, memory=taken.memory))
        assert not early.switched
        judged_step = given.now_step + 5
        judged = decide(
            replace(given, now_step=judged_step, memory=early.memory, measured_s=0.05, measured_before_s=0.034)
        )
        assert (str(judged.spec), judged.switched) == ("none", True)
        assert judged.reason == (
            "none: the best other, fp16, would take 17.8 ms against 33.6 ms at 1.0 Gb/s;"
            " int8 took 50 ms, more than the 34 ms before it"
        )
        (back,) = judged.memory.set_backs
        until.append(back.until_step - judged_step)
        barred = {str(each.spec): each.barred for each in judged.costs}
        assert barred["int8"] == f"it was slower than predicted, kept away until step {back.until_step}"
        away = decide(replace(given, now_step=back.until_step - 1, memory=judged.memory))
        assert str(away.spec) == "fp16"
        memory, given = judged.memory, replace(given, now_step=back.until_step)
    assert until == [40, 80, 160]


def test_a_switch_that_held_its_promise_clears_the_codec() -> None:
    memory = using("int8", before=spec("none"), set_backs=(SetBack(spec=spec("int8"), until_step=90, count=3),))
    decision = decide(facts(1e9, DENSE, memory=memory, measured_s=0.01, measured_before_s=0.034))
    assert (str(decision.spec), decision.memory.before, decision.memory.set_backs) == ("int8", None, ())


@pytest.mark.parametrize(("measured_s", "undone"), [(0.0101, False), (0.01019, False), (0.01021, True)])
def test_a_switch_is_undone_beyond_the_noise_of_medians(measured_s: float, undone: bool) -> None:
    memory = using("int8", before=spec("none"), switched_step=95)
    decision = decide(facts(1e9, DENSE, memory=memory, measured_s=measured_s, measured_before_s=0.01))
    assert (decision.switched, len(decision.memory.set_backs)) == (undone, int(undone))


def test_after_a_bad_switch_the_codec_before_comes_back_if_it_beats_none() -> None:
    costs = (timed("none", 1000), timed("fp16", 800), timed("int8", 300))
    memory = using("int8", before=spec("fp16"), switched_step=95)
    decision = decide(facts(costs=costs, memory=memory, measured_s=9e-4, measured_before_s=8e-4))
    assert (str(decision.spec), decision.switched, decision.memory.before) == ("fp16", True, None)
    unsure = facts(costs=costs, memory=memory, measured_s=9e-4, measured_before_s=8e-4, link=link(1e9, trusted=False))
    assert (str(decide(unsure).spec), decide(unsure).probe) == ("fp16", False)
    costs = (timed("none", 700), *costs[1:])
    decision = decide(facts(costs=costs, memory=memory, measured_s=9e-4, measured_before_s=8e-4))
    assert str(decision.spec) == "none"


def test_a_change_of_the_link_voids_verdicts() -> None:
    backs = (
        SetBack(spec=spec("int8"), until_step=5000, count=7),
        SetBack(spec=spec("topk:0.01"), until_step=50, count=1),
    )
    memory = using("fp16", before=spec("none"), switched_step=95, set_backs=backs)
    given = facts(memory=memory, measured_s=2.0, measured_before_s=1.0, link=link(1e9, num_changes=1))
    decision = decide(given)
    assert (str(decision.spec), decision.memory.before, decision.memory.num_changes) == ("fp16", None, 1)
    assert [(back.until_step, back.count) for back in decision.memory.set_backs] == [(120, 7), (50, 1)]


def test_a_link_that_is_not_known_changes_nothing_and_asks_for_probes() -> None:
    unsure = link(1e9, trusted=False)
    start = decide(facts(link=unsure))
    assert (str(start.spec), start.switched, start.probe) == ("none", False, False)
    assert start.reason.endswith("at 1.0 Gb/s; the link is not known well enough to switch")
    memory = decide(facts(now_step=0, costs=(timed("none", 1980), timed("fp16", 980)))).memory
    assert (str(memory.spec), memory.probe_step) == ("fp16", 100)
    probes = []
    for now_step in range(1, 2000):
        decision = decide(
            facts(now_step=now_step, costs=(timed("none", 1980), timed("fp16", 980)), link=unsure, memory=memory)
        )
        memory = decision.memory
        assert str(decision.spec) == "fp16"
        if decision.probe:
            probes.append(now_step)
    assert probes == [100, 200, 400, 800, 1600]


def test_a_trusted_link_needs_no_probe_and_a_changed_one_is_probed_within_a_hold() -> None:
    costs = (timed("none", 1980), timed("fp16", 980))
    memory = using("fp16", probe_step=5000, probe_steps=9000)
    known = decide(facts(costs=costs, memory=replace(memory, probe_step=0)))
    assert not known.probe
    changed = decide(facts(costs=costs, memory=memory, link=link(1e9, trusted=False, num_changes=1)))
    assert (changed.probe, changed.memory.probe_step, changed.memory.probe_steps) == (False, 120, 100)
    due = decide(facts(costs=costs, memory=changed.memory, link=link(1e9, trusted=False, num_changes=1), now_step=120))
    assert (due.probe, due.memory.probe_step, due.memory.probe_steps) == (True, 220, 200)


def test_an_unmeasured_link_is_measured_with_none() -> None:
    nothing = LinkFacts(latency_s=0.0, bytes_per_s=float("inf"), trusted=False)
    decision = decide(facts(link=nothing, memory=using("int8")))
    assert (str(decision.spec), decision.probe) == ("none", False)
    assert "at an unmeasured rate; the link is not known" in decision.reason


# density, measured bytes, expected payload of top-k, 10486 elements of 1048576
TOPK_BYTES = [
    (1.0, None, 34_363),
    (0.5, None, 34_363),
    (0.001, None, 4_084),
    (0.0, None, 16),
    (0.001, 20_000, 20_000),
]


@pytest.mark.parametrize(("density", "measured", "expected"), TOPK_BYTES)
def test_payload_of_topk_follows_the_sparsity(density: float, measured: int | None, expected: int) -> None:
    decision = decide(facts(costs=(cost("none"), cost("topk:0.01", wire_bytes=measured)), density=density))
    assert decision.costs[1].wire_bytes == pytest.approx(expected, rel=0.001)
    assert decision.costs[1].wire_bytes <= spec("topk:0.01").wire_bytes(NUMEL)


# max_error, error feedback, density, choice at 1 Gb/s among all
BOUNDS = [
    (0.0, False, 1.0, "topk:0.01"),
    (0.02, True, 1.0, "topk:0.01"),
    (0.02, False, 1.0, "int8"),
    (0.02, False, 0.005, "topk:0.01"),
    (0.001, False, 1.0, "fp16"),
    (1e-5, False, 0.005, "none"),
]


@pytest.mark.parametrize(("max_error", "error_feedback", "density", "expected"), BOUNDS)
def test_a_bound_on_the_error_counts_without_feedback(
    max_error: float, error_feedback: bool, density: float, expected: str
) -> None:
    decision = decide(facts(density=density), max_error=max_error, error_feedback=error_feedback)
    assert str(decision.spec) == expected


def test_a_codec_out_of_bounds_is_left_at_once_and_an_unknown_error_is_out() -> None:
    bound = {"max_error": 0.005, "error_feedback": False}
    given = facts(codecs=("none", "int8"), memory=using("int8", switched_step=99))
    decision = decide(given, **bound)
    assert (str(decision.spec), decision.switched) == ("none", True)
    assert decision.reason.startswith("none: int8 is out, its error is 0.01, the bound 0.005")
    unknown = (cost("none"), replace(cost("fp16"), error=None), replace(cost("topk:0.01"), error=None))
    decision = decide(facts(costs=unknown), **bound)
    assert [each.barred for each in decision.costs[1:]] == ["its error is not measured, the bound 0.005"] * 2
    assert str(decide(facts(costs=unknown, density=0.001), **bound).spec) == "topk:0.01"


def test_fp32_is_lossless_for_float32_only() -> None:
    bound = {"max_error": 1e-9, "error_feedback": False}
    costs = (cost("none"), cost("fp32", error=1e-8))
    assert [each.barred for each in decide(facts(costs=costs), **bound).costs] == ["", ""]
    of_float64 = decide(facts(costs=costs, itemsize=8), **bound)
    assert of_float64.costs[1].barred == "its error is 1e-08, the bound 1e-09"
    assert str(decide(facts(costs=costs, itemsize=8)).spec) == "fp32"


BAD = [
    ({"costs": ()}, "cannot choose a codec: got candidates none at all, need each once and none among them"),
    ({"costs": (cost("fp16"),)}, "got candidates fp16, need each once"),
    ({"costs": (cost("none"), cost("none"))}, "got candidates none, none, need each once"),
    ({"numel": 0}, "got 0 elements"),
    ({"density": 1.5}, "density 1.5"),
    ({"hidden_s": -1.0}, "-1.0 s hidden"),
]


@pytest.mark.parametrize(("others", "text"), BAD)
def test_wrong_facts_are_refused(others: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        facts(**others)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "others", [{"encode_s": -1.0}, {"decode_s": float("nan")}, {"wire_bytes": -1}, {"error": -0.5}]
)
def test_wrong_costs_are_refused(others: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="cannot weigh codec fp16: got .* need finite values of 0 or more"):
        replace(cost("fp16"), **others)
