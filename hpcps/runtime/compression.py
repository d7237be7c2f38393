"""Compression on a worker: an encoder for each shard that it owns, and the choice where the rule says ``auto``.

When what happens to the shards under ``auto``:

    step 3 + i      shard i tries all candidates on its gradient: encode, decode, bytes, error
    each step       encode seconds and payload of the codec in use; what each link carried in what time
    every 5 steps   once all are tried the policy chooses; a switch is an event, and what is owed is owed on

Shards are judged together, because they share the exchange that is timed; one in which a shard was tried is not timed.
Refuses to weigh costs: `CodecChoice` does.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hpcps.codec.costs import Trial, try_codec
from hpcps.codec.encoder import Encoded, ShardEncoder, fits, nothing
from hpcps.comm.channel import Array, Channel
from hpcps.config import CompressionConfig, RunConfig
from hpcps.plan import Codec, CodecSpec, Shard
from hpcps.policy.codec_choice import ChoiceMemory, CodecChoice, CodecCost, CodecDecision, CodecFacts
from hpcps.policy.codec_rules import auto_candidates
from hpcps.policy.link_estimate import LinkFacts
from hpcps.protocol.control import DecodeCosts
from hpcps.runtime.link_watch import LinkWatch
from hpcps.runtime.metrics import EventLog

__all__ = ["AUTO", "Compression"]

logger = logging.getLogger(__name__)

AUTO = "auto"
NONE = CodecSpec(codec=Codec.NONE)

_FIRST_TRIAL_STEP = 3
_TRIAL_STEPS = 512
"""Steps between two trials of a shard: gradients and machines change slowly."""
_CHOICE_STEPS = 5
_KEPT = 9
"""Measurements that a median is taken over."""
_ENOUGH = 5
"""Exchanges under a codec before they are held against those before."""


@dataclass(slots=True)
class _Auto:
    """What a choice of one shard rests on."""

    candidates: tuple[CodecSpec, ...]
    memory: ChoiceMemory = field(default_factory=ChoiceMemory)
    trials: dict[CodecSpec, Trial] = field(default_factory=dict)
    density: float = 1.0
    encode_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_bytes: int = 0
    exchange_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    before_s: float | None = None
    next_trial_step: int = 0
    probing: bool = False

    @property
    def ready(self) -> bool:
        """True once all candidates were tried, and what a switch will be held against is known."""
        return len(self.trials) + 1 >= len(self.candidates) and len(self.exchange_s) >= _ENOUGH


@dataclass(slots=True)
class _State:
    """One shard."""

    shard: Shard
    encoder: ShardEncoder
    auto: _Auto | None
    step: int = 0
    """The last step in which it was encoded here."""


@dataclass(slots=True)
class _Link:
    """The way to one server."""

    watch: LinkWatch = field(default_factory=LinkWatch)
    raw_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """What the mean frame of the last steps would have held without a codec: the size that trust is asked for."""
    decode_s: dict[int, float] = field(default_factory=dict)
    """Seconds an element by codec, as the server measured."""


class Compression:
    """Encoders and choices of one worker.

    Args:
        channel: the worker's channel, asked what its links carried.
        config: the run's settings.
        events: where switches and not finite gradients are noted.
        clock: seconds, rising.
    """

    def __init__(
        self,
        channel: Channel,
        config: RunConfig,
        *,
        events: EventLog,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.share_frac = 1.0
        """The group's part of a full batch in the last push."""
        self._channel = channel
        self._config: CompressionConfig = config.compression
        self._events = events
        self._clock = clock
        self._choice = CodecChoice(self._config)
        self._states: dict[int, _State] = {}
        self._links: dict[int, _Link] = {}
        self._step = 1
        self._learned_steps = 1
        """Counts only the steps that choices rest on."""
        self._trial_in_step = False
        self._raw_bytes = 0
        self._reported: dict[str, int] = {}
        self._told_not_finite = False
        self._pinned: CodecSpec | None = None

    # --- one step ----------------------------------------------------------------------------------

    def encode(self, shard: Shard, gradient: Array, *, counts: bool = True) -> Encoded:
        """The payload of this step's push; valid until the next call for the shard.

        Args:
            shard: one that this worker owns.
            gradient: of its size and dtype.
            counts: False for one of weight 0: nothing of it is sent, and what is owed waits for one that counts.
        """
        self._raw_bytes += shard.num_bytes
        if not counts:
            return nothing(gradient)
        state = self._states.get(shard.key) or self._open(shard)
        state.step = self._step
        auto = state.auto if self._pinned is None else None
        if auto is not None and self._learned_steps >= auto.next_trial_step:
            self._try(state, auto, gradient)
        began_s = self._clock()
        encoded = state.encoder.encode(gradient)
        if auto is not None and not auto.probing:
            auto.encode_s.append(self._clock() - began_s)
            auto.num_bytes = encoded.payload.size
        if encoded.num_not_finite:
            self._note_not_finite(shard, encoded.num_not_finite)
        return encoded

    def end_step(self, *, exchange_s: float, hidden_s: float) -> None:
        """The parameters of the next step are there: learn from this one, and choose.

        Args:
            exchange_s: from the first push to the last pull that was waited for.
            hidden_s: seconds of the step in which transfers went on while the worker did something else.
        """
        pushed = [state for state in self._states.values() if state.step == self._step]
        chosen = [(state, state.auto) for state in pushed if state.auto is not None]
        for server in {state.shard.server for state, _ in chosen}:
            self._note_link(server, [state.shard.num_bytes for state in pushed if state.shard.server == server])
        if self._pinned is None:
            self._learn(chosen, exchange_s)
            if self._learned_steps % _CHOICE_STEPS == 0 and all(auto.ready for _, auto in chosen):
                self._choose_all(chosen, hidden_s, num_elems=max(1, sum(state.shard.numel for state in pushed)))
            self._learned_steps += 1
        self._trial_in_step = False
        self._step += 1

    def volume(self) -> dict[str, int]:
        """Bytes since the last call: put into servers' memory, read from it, and what plain payloads would have been.

        A push that is still on its way counts in the step in which it leaves.
        """
        counters = self._channel.counters
        total = {
            "push_bytes": counters.pushed_bytes,
            "pull_bytes": counters.pulled_bytes,
            "raw_bytes": self._raw_bytes,
        }
        fresh = {name: num_bytes - self._reported.get(name, 0) for name, num_bytes in total.items()}
        self._reported = total
        return fresh

    def on_decode_costs(self, costs: DecodeCosts) -> None:
        """A server says what decoding takes there."""
        link = self._links.setdefault(costs.server, _Link())
        link.decode_s = dict(zip(costs.codecs, costs.elem_s, strict=True))

    def pin(self, spec: CodecSpec | None) -> None:
        """Encode all shards under ``auto`` with one codec, learning nothing meanwhile; None: choose again.

        A shard that the codec cannot encode in its own bytes is sent as it is.
        """
        self._pinned = spec
        for state in self._states.values():
            if state.auto is not None:
                state.auto.probing = False
                self._use(state, state.auto.memory.spec if spec is None else spec)

    def reroute(self, shard: Shard) -> None:
        """A shard is on another server: what is owed stays, what the choice learned on the old link does not."""
        self._links.setdefault(shard.server, _Link())
        state = self._states.get(shard.key)
        if state is not None:
            state.shard = shard
            if state.auto is not None:
                state.auto.exchange_s.clear()
                state.auto.before_s = None

    # --- regrouping --------------------------------------------------------------------------------

    def may_owe(self, shard: Shard) -> bool:
        """True if some worker may hold a residual of the shard; the same on all workers."""
        return self._config.error_feedback and shard.codec not in ("none", "packed")

    def take_owed(self, shard: Shard) -> Array:
        """What the group of this worker owes of a shard, by its part of a batch; it owes nothing any more."""
        state = self._states.get(shard.key)
        residual = state.encoder.feedback.take() if state is not None else None
        if residual is None:
            return np.zeros(shard.numel, shard.dtype)
        residual *= residual.dtype.type(self.share_frac)
        return residual

    def owe(self, shard: Shard, residual: Array) -> None:
        """Owe this from now on; the array is this object's."""
        state = self._states.get(shard.key) or self._open(shard)
        state.encoder.feedback.owe(residual)

    # --- inside ------------------------------------------------------------------------------------

    def _open(self, shard: Shard) -> _State:
        """Start to own a shard."""
        encoder = ShardEncoder(shard.numel, shard.dtype, feedback=self._config.error_feedback)
        auto = None
        if shard.codec == AUTO:
            candidates = tuple(
                spec
                for spec in auto_candidates(self._config, shard.dtype)
                if fits(spec, numel=shard.numel, dtype=shard.dtype)
            )
            auto = _Auto(candidates, next_trial_step=max(_FIRST_TRIAL_STEP, self._learned_steps) + len(self._states))
        self._links.setdefault(shard.server, _Link())
        state = self._states[shard.key] = _State(shard, encoder, auto)
        self._use(state, CodecSpec.parse(shard.codec) if auto is None else self._pinned or NONE)
        return state

    @staticmethod
    def _use(state: _State, spec: CodecSpec) -> None:
        """Encode a shard with a codec, or not at all where that would only make it larger."""
        shard = state.shard
        usable = fits(spec, numel=shard.numel, dtype=shard.dtype)
        if not usable:
            logger.info("shard %d is sent as it is: %s would be larger than %d B", shard.key, spec, shard.num_bytes)
        state.encoder.use(spec if usable else NONE)

    def _try(self, state: _State, auto: _Auto, gradient: Array) -> None:
        """Try all candidates on a gradient; one that is not finite says nothing, the next step's may."""
        if not np.isfinite(gradient).all():
            return
        auto.next_trial_step = self._learned_steps + _TRIAL_STEPS
        self._trial_in_step = True
        auto.density = np.count_nonzero(gradient) / gradient.size
        for spec in auto.candidates:
            if spec != NONE:
                auto.trials[spec] = try_codec(spec, gradient, clock=self._clock)

    def _note_link(self, server: int, raw_bytes: list[int]) -> None:
        """Take in what the link carried in this step: the mean frame of it, and that of the gradients as they are."""
        link, use = self._links[server], self._channel.link_use(server)
        link.raw_bytes.append(sum(raw_bytes) // len(raw_bytes))
        link.watch.look(use, number=self._learned_steps, counts=self._pinned is None)

    def _learn(self, chosen: list[tuple[_State, _Auto]], exchange_s: float) -> None:
        """Take in the time of an exchange, if it was one of the codecs in use and nothing else."""
        probed = any(auto.probing for _, auto in chosen)
        for state, auto in chosen:
            if auto.probing:
                auto.probing = False
                state.encoder.use(auto.memory.spec)
            if not probed and not self._trial_in_step:
                auto.exchange_s.append(exchange_s)

    def _choose_all(self, chosen: list[tuple[_State, _Auto]], hidden_s: float, *, num_elems: int) -> None:
        """Choose for all shards.

        Args:
            chosen: those under ``auto`` that were pushed.
            hidden_s: seconds of the step in which transfers went on behind something else.
            num_elems: of all shards that were pushed: a shard has the part of the seconds that it has of them.
        """
        known = {}
        for server in {state.shard.server for state, _ in chosen}:
            link = self._links[server]
            known[server] = link.watch.estimate.facts(round(statistics.fmean(link.raw_bytes)))
        for state, auto in chosen:
            if known[state.shard.server].num_transfers:
                part = state.shard.numel / num_elems
                self._choose(state, auto, known[state.shard.server], hidden_s=hidden_s * part, part=part)
        probed = {state.shard.server for state, auto in chosen if auto.probing}
        for state, auto in chosen:
            if state.shard.server in probed:  # all of a link together: a mean frame of many codecs measures nothing
                auto.probing = True
                state.encoder.use(NONE)

    def _choose(self, state: _State, auto: _Auto, known: LinkFacts, *, hidden_s: float, part: float) -> None:
        link = self._links[state.shard.server]
        exchange_s = statistics.median(auto.exchange_s)
        facts = CodecFacts(
            now_step=self._learned_steps,
            numel=state.shard.numel,
            itemsize=state.shard.itemsize,
            link=known,
            costs=tuple(self._cost(spec, state, auto, link) for spec in auto.candidates),
            hidden_s=hidden_s,
            density=auto.density,
            measured_s=exchange_s * part,
            measured_before_s=None if auto.before_s is None else auto.before_s * part,
            memory=auto.memory,
        )
        decision = self._choice.decide(facts)
        if decision.switched:
            self._note_switch(state, auto, decision, link_rate=known.bytes_per_s)
            auto.before_s = exchange_s
            auto.exchange_s.clear()
            auto.encode_s.clear()
        auto.memory = decision.memory
        auto.probing = decision.probe
        state.encoder.use(decision.spec)

    def _cost(self, spec: CodecSpec, state: _State, auto: _Auto, link: _Link) -> CodecCost:
        """What is known of a candidate: of the one in use as it runs, of the others from their trial."""
        numel = state.shard.numel
        if spec == NONE:
            return CodecCost(spec=spec, encode_s=0.0, decode_s=link.decode_s.get(spec.codec, 0.0) * numel)
        trial = auto.trials[spec]
        in_use = spec == auto.memory.spec and len(auto.encode_s) >= _ENOUGH
        return CodecCost(
            spec=spec,
            encode_s=statistics.median(auto.encode_s) if in_use else trial.encode_s,
            decode_s=link.decode_s.get(spec.codec, trial.decode_s / numel) * numel,
            wire_bytes=auto.num_bytes if in_use else trial.num_bytes,
            error=trial.error,
        )

    def _note_switch(self, state: _State, auto: _Auto, decision: CodecDecision, *, link_rate: float) -> None:
        logger.info("shard %d: %s", state.shard.key, decision.reason)
        self._events.write(
            "codec",
            step=self._step,
            key=state.shard.key,
            server=state.shard.server,
            codec=str(decision.spec),
            codec_before=str(auto.memory.spec),
            predicted_s={str(cost.spec): cost.seconds for cost in decision.costs},
            wire_bytes={str(cost.spec): round(cost.wire_bytes) for cost in decision.costs},
            link_bytes_per_s=link_rate,
            reason=decision.reason,
        )

    def _note_not_finite(self, shard: Shard, count: int) -> None:
        self._events.write("not_finite", step=self._step, key=shard.key, num_elems=count)
        if not self._told_not_finite:
            self._told_not_finite = True
            logger.warning(
                "the gradient of shard %d has %d elements that are not finite; they are sent as such and never owed",
                shard.key,
                count,
            )
