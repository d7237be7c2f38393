"""Which codec a shard uses over a link, from measured costs. Pure: it may say none, and never says a codec that it
predicts to be slower than none.

Predicted cost of an exchange:

    encode_s + max(0, latency_s + wire_bytes / bytes_per_s - hidden_s) + decode_s

What the policy must remember travels in the decision (``ChoiceMemory``) and comes back with the next facts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcps.config import CompressionConfig
from hpcps.errors import PlanError
from hpcps.plan import Codec, CodecSpec
from hpcps.policy.link_estimate import LinkFacts

__all__ = ["ChoiceMemory", "CodecChoice", "CodecCost", "CodecDecision", "CodecFacts", "PredictedCost", "SetBack"]

NONE = CodecSpec(codec=Codec.NONE)

MIN_GAIN_S = 50e-6
"""Smaller gains are not worth an approximate gradient."""

KEEP_GAIN_PART = 0.5
"""A codec stays while it gains this part of what it had to gain to be taken."""

SLOWER_FRAC = 0.02
"""A switch is undone where exchanges take longer than before by more than this part: less is noise of the medians."""

FP16_ERROR = 2.0**-11
"""Largest relative error of a half: that of top-k where it sends all elements that are not zero."""

SURE_KEEP_PART = 49 / 50
"""Top-k sends at least this part of its aim where so many elements are not zero."""

PROBE_FRAC = 0.02
"""Part of the exchange time that steps sent with none to measure the link may take."""

MAX_WAIT_STEPS = 1 << 20
"""Longest wait between two probes, and longest a codec is kept away."""

_GAP_BASE_BITS = 7
"""Bits of a digit of a coded gap; ``cuda_src/elements.h``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """What a candidate costs for one shard.

    Args:
        spec: the candidate.
        encode_s: seconds on the worker, 0 or more.
        decode_s: seconds on the server, 0 or more.
        wire_bytes: payload as measured; None: predicted from the spec.
        error: relative L2 error as measured; None: not measured. Lossless codecs have 0 in any case.
    """

    spec: CodecSpec
    encode_s: float
    decode_s: float
    wire_bytes: int | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        fits = 0 <= self.encode_s < math.inf and 0 <= self.decode_s < math.inf
        if not fits or (self.wire_bytes or 0) < 0 or not (self.error or 0.0) >= 0:
            raise PlanError(
                f"cannot weigh codec {self.spec}: got {self.encode_s} s to encode, {self.decode_s} s to decode,"
                f" {self.wire_bytes} B, error {self.error}, need finite values of 0 or more; correct the measurement"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBack:
    """A codec that turned out slower than predicted: kept away until a step, for the ``count``-th time."""

    spec: CodecSpec
    until_step: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMemory:
    """What one decision leaves for the next one of the same shard and link. The default is that of the start.

    Args:
        spec: the codec in use.
        before: the codec before the last switch while that switch is yet to be judged; None: judged.
        switched_step: step of the last switch; None: there was none.
        set_backs: codecs that turned out slower, in the order in which they did.
        probe_step: first step at which the link may be probed.
        probe_steps: wait after the next probe.
        num_changes: changes of the link that were seen.
    """

    spec: CodecSpec = NONE
    before: CodecSpec | None = None
    switched_step: int | None = None
    set_backs: tuple[SetBack, ...] = ()
    probe_step: int = 0
    probe_steps: int = 1
    num_changes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecFacts:
    """State of one shard on one link.

    Args:
        now_step: the present step, 0 or more.
        numel: elements of the shard, at least 1.
        itemsize: bytes of one.
        link: what is known of the link.
        costs: of all candidates, each once, none among them.
        hidden_s: seconds of the transfer that go on while the worker computes anyway, 0 or more.
        density: part of the elements that are not zero, 0 to 1.
        measured_s: median exchange seconds since the last switch, the shard's part of them by its size; what is not
            predicted of an exchange, such as pulls, is in it; None: too few yet.
        measured_before_s: median exchange seconds of the last steps before it; None: unknown.
        memory: of the decision before.
    """

    now_step: int
    numel: int
    itemsize: int = 4
    link: LinkFacts
    costs: tuple[CodecCost, ...]
    hidden_s: float = 0.0
    density: float = 1.0
    measured_s: float | None = None
    measured_before_s: float | None = None
    memory: ChoiceMemory = ChoiceMemory()

    def __post_init__(self) -> None:
        specs = [cost.spec for cost in self.costs]
        if NONE not in specs or len(set(specs)) != len(specs):
            raise PlanError(
                f"cannot choose a codec: got candidates {', '.join(map(str, specs)) or 'none at all'}, need each once"
                " and none among them; correct the candidates"
            )
        if self.numel < 1 or not 0 <= self.density <= 1 or not self.hidden_s >= 0:
            raise PlanError(
                f"cannot choose a codec: got {self.numel} elements, density {self.density}, {self.hidden_s} s hidden,"
                " need at least 1, 0 to 1, and 0 or more; correct the facts"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCost:
    """A candidate with its predicted exchange. ``barred`` says why it may not be chosen; empty: it may."""

    spec: CodecSpec
    seconds: float
    wire_bytes: float
    barred: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecDecision:
    """The codec from this step on.

    Args:
        spec: the choice.
        switched: True where it differs from the one in use before.
        probe: True where this one step shall be sent with none, to measure the link.
        costs: predictions of all candidates, none first, then in order of preference.
        reason: why, with the numbers.
        memory: pass it in with the next facts.
    """

    spec: CodecSpec
    switched: bool
    probe: bool
    costs: tuple[PredictedCost, ...]
    reason: str
    memory: ChoiceMemory


class CodecChoice:
    """Choose the quickest codec, with a preference for none and for the one in use.

    A codec is left for another at most once in ``hold_steps`` steps. Two ways are always open: back to none from a
    codec that costs more, and back from a switch that turned out slower, after which the codec is kept away for a
    time that doubles at each relapse.
    """

    def __init__(self, config: CompressionConfig) -> None:
        self._config = config
        self._preference = {CodecSpec.parse(text): index for index, text in enumerate(config.auto_codecs)}

    def decide(self, facts: CodecFacts) -> CodecDecision:
        """Choose for the step ``facts.now_step`` and those after it, until asked again."""
        memory = self._judged(facts)
        costs = self._predict(facts, memory.set_backs)
        by_spec = {cost.spec: cost for cost in costs}
        target, why = self._target(facts, memory, by_spec)
        probe, memory = self._probe(facts, memory, target, by_spec)
        switched = target != facts.memory.spec
        if switched:
            back = memory.spec != facts.memory.spec
            before = None if back or target == NONE else memory.spec if memory.spec in by_spec else NONE
            memory = dataclasses.replace(memory, before=before, switched_step=facts.now_step)
        return CodecDecision(
            spec=target,
            switched=switched,
            probe=probe,
            costs=costs,
            reason=_reason(by_spec, target, facts.link) + why,
            memory=dataclasses.replace(memory, spec=target),
        )

    def _target(
        self, facts: CodecFacts, memory: ChoiceMemory, by_spec: Mapping[CodecSpec, PredictedCost]
    ) -> tuple[CodecSpec, str]:
        """The choice, and what kept it from being the best one."""
        none, current = by_spec[NONE], by_spec.get(memory.spec, by_spec[NONE])
        stays = not current.barred and current.seconds <= none.seconds
        kept = current.spec if stays else NONE
        was = facts.memory
        if memory.spec != was.spec:
            took, before = _ms(facts.measured_s), _ms(facts.measured_before_s)
            return kept, f"; {was.spec} took {took}, more than the {before} before it"
        if was.switched_step is not None and facts.now_step - was.switched_step < self._config.hold_steps:
            return kept, f"; held since step {was.switched_step}"
        if not facts.link.trusted:
            return kept, "; the link is not known well enough to switch"
        exchange_s = max(by_spec[NONE].seconds, facts.measured_s or 0.0)
        return self._best(tuple(by_spec.values()), current, stays=stays, exchange_s=exchange_s), ""

    def _predict(self, facts: CodecFacts, set_backs: Iterable[SetBack]) -> tuple[PredictedCost, ...]:
        """Predicted costs, none first, then in order of preference."""
        later = len(self._preference)

        def order(cost: CodecCost) -> tuple[bool, int, str]:
            return cost.spec != NONE, self._preference.get(cost.spec, later), str(cost.spec)

        predicted = []
        for cost in sorted(facts.costs, key=order):
            wire_bytes = cost.wire_bytes if cost.wire_bytes is not None else _expected_bytes(cost.spec, facts)
            transfer_s = max(0.0, facts.link.seconds(wire_bytes) - facts.hidden_s)
            predicted.append(
                PredictedCost(
                    spec=cost.spec,
                    seconds=cost.encode_s + transfer_s + cost.decode_s,
                    wire_bytes=wire_bytes,
                    barred=self._barred(cost, facts, set_backs),
                )
            )
        return tuple(predicted)

    def _barred(self, cost: CodecCost, facts: CodecFacts, set_backs: Iterable[SetBack]) -> str:
        """Why a candidate may not be chosen, or nothing."""
        if cost.spec == NONE:
            return ""
        bound = self._config.max_error
        if bound > 0 and not self._config.error_feedback:
            error = _error(cost, facts)
            if error is None or error > bound:
                shown = "not measured" if error is None else f"{error:.3g}"
                return f"its error is {shown}, the bound {bound:.3g}"
        for back in set_backs:
            if back.spec == cost.spec and facts.now_step < back.until_step:
                return f"it was slower than predicted, kept away until step {back.until_step}"
        return ""

    def _judged(self, facts: CodecFacts) -> ChoiceMemory:
        """The memory after the last switch was held against its measurement, where that can be done.

        Where the link changed since, there is no verdict, and what was slower may have another try after the hold.
        """
        memory, now = facts.memory, facts.now_step
        backs = memory.set_backs
        if facts.link.num_changes != memory.num_changes:
            soon = now + self._config.hold_steps
            backs = tuple(dataclasses.replace(back, until_step=min(back.until_step, soon)) for back in backs)
            return dataclasses.replace(memory, before=None, set_backs=backs)
        if memory.before is None or facts.measured_s is None or facts.measured_before_s is None:
            return memory
        others = tuple(back for back in backs if back.spec != memory.spec)
        if facts.measured_s <= (1 + SLOWER_FRAC) * facts.measured_before_s:
            return dataclasses.replace(memory, before=None, set_backs=others)
        count = 1 + sum(back.count for back in backs if back.spec == memory.spec)
        wait_steps = min(MAX_WAIT_STEPS, self._config.hold_steps << min(count, 20))
        back = SetBack(spec=memory.spec, until_step=now + wait_steps, count=count)
        return dataclasses.replace(memory, spec=memory.before, before=None, set_backs=(*others, back))

    def _best(
        self, costs: Iterable[PredictedCost], current: PredictedCost, *, stays: bool, exchange_s: float
    ) -> CodecSpec:
        """The choice where nothing holds it back."""
        none, *others = costs
        needed_s = max(self._config.min_gain_frac * exchange_s, MIN_GAIN_S)
        allowed = [cost for cost in others if not cost.barred and none.seconds - cost.seconds > needed_s]
        best = min(allowed, key=lambda cost: cost.seconds, default=none)  # the first of equals
        in_use = current.spec != NONE and stays and none.seconds - current.seconds > KEEP_GAIN_PART * needed_s
        if in_use and best.seconds >= (1 - self._config.switch_gain_frac) * current.seconds:
            return current.spec
        return best.spec

    def _probe(
        self,
        facts: CodecFacts,
        memory: ChoiceMemory,
        target: CodecSpec,
        by_spec: Mapping[CodecSpec, PredictedCost],
    ) -> tuple[bool, ChoiceMemory]:
        """Whether to send this step with none, and when to ask that again.

        Without it a codec with small frames would never learn that the link became quick. With none in use each
        step measures the link, so that none needs no probe.
        """
        now, hold_steps = facts.now_step, self._config.hold_steps
        ratio = by_spec[NONE].seconds / max(by_spec[target].seconds, 1e-12)
        cheap_steps = math.ceil(min(MAX_WAIT_STEPS, max(hold_steps, ratio / PROBE_FRAC)))
        if target != facts.memory.spec or target == NONE:
            return False, dataclasses.replace(
                memory, probe_step=now + cheap_steps, probe_steps=cheap_steps, num_changes=facts.link.num_changes
            )
        if facts.link.num_changes != memory.num_changes:  # what was known of the link is void
            soon = min(memory.probe_step, now + hold_steps)
            memory = dataclasses.replace(
                memory, probe_step=soon, probe_steps=cheap_steps, num_changes=facts.link.num_changes
            )
        if facts.link.trusted or now < memory.probe_step:
            return False, memory
        wait_steps = max(memory.probe_steps, cheap_steps)
        doubled = min(MAX_WAIT_STEPS, 2 * wait_steps)
        return True, dataclasses.replace(memory, probe_step=now + wait_steps, probe_steps=doubled)


def _error(cost: CodecCost, facts: CodecFacts) -> float | None:
    """Relative L2 error of a candidate, None where it is not known."""
    if cost.spec.lossless and not (cost.spec.codec is Codec.FP32 and facts.itemsize > 4):
        return 0.0
    sends_all = facts.density * facts.numel <= SURE_KEEP_PART * cost.spec.keep(facts.numel)
    if cost.spec.codec is Codec.TOPK and sends_all:
        return FP16_ERROR if cost.error is None else min(FP16_ERROR, cost.error)
    return cost.error


def _expected_bytes(spec: CodecSpec, facts: CodecFacts) -> float:
    """Expected payload of a candidate that was not measured.

    Top-k: where elements are sent at random with probability p, a gap has more than j digits of base 128 with
    probability (1 - p)^(128^j).
    """
    most = spec.wire_bytes(facts.numel, facts.itemsize)
    if spec.codec is not Codec.TOPK:
        return float(most)
    count = min(float(spec.keep(facts.numel)), facts.density * facts.numel)
    left_out = 1.0 - count / facts.numel
    digits = 1.0 + sum(left_out ** (1 << _GAP_BASE_BITS * digit) for digit in range(1, 5))
    return min(float(most), spec.wire_bytes(0) + count * (2.0 + digits))


def _reason(by_spec: Mapping[CodecSpec, PredictedCost], target: CodecSpec, link: LinkFacts) -> str:
    """One sentence with the numbers."""
    none_s = by_spec[NONE].seconds
    rate = _rate(link)
    if target != NONE:
        return f"{target}: {_ms(by_spec[target].seconds)} against {_ms(none_s)} of none at {rate}"
    others = [cost for cost in by_spec.values() if cost.spec != NONE]
    allowed = [cost for cost in others if not cost.barred]
    if allowed:
        best = min(allowed, key=lambda cost: cost.seconds)
        return f"none: the best other, {best.spec}, would take {_ms(best.seconds)} against {_ms(none_s)} at {rate}"
    if others:
        return f"none: {others[0].spec} is out, {others[0].barred}"
    return f"none: {_ms(none_s)} at {rate}, and there is no other candidate"


def _rate(link: LinkFacts) -> str:
    bits_per_s = 8 * link.bytes_per_s
    if math.isinf(bits_per_s):
        return "an unmeasured rate"
    return f"{bits_per_s / 1e9:.1f} Gb/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.1f} Mb/s"


def _ms(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds * 1e3:.3g} ms"
