"""What a worker feeds to the choice of codecs: costs as measured, exchanges that count, one link's frames as one."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from hpcps.codec.costs import Trial
from hpcps.comm.channel import Counters
from hpcps.comm.link import LinkUse
from hpcps.config import CompressionConfig, RunConfig
from hpcps.plan import Codec, CodecSpec, Piece, Shard
from hpcps.policy.codec_choice import CodecChoice, CodecFacts
from hpcps.protocol.control import DecodeCosts
from hpcps.runtime import compression
from hpcps.runtime.compression import Compression
from hpcps.runtime.metrics import EventLog

NUMEL = 250_000
FP16 = CodecSpec.parse("fp16")


class Clock:
    """Moves on by what is being timed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A Compression over a link of a stated rate; trials take what the test states and are not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, bytes_per_s: float, **settings: object) -> None:
        self.bytes_per_s = bytes_per_s
        self.clock = Clock()
        self.events: list[dict[str, object]] = []
        self.num_trials = 0
        self.facts: list[CodecFacts] = []
        self._use = LinkUse()
        channel = SimpleNamespace(counters=Counters(), link_use=lambda server: self._use)
        events = EventLog(None, rank=1, role="worker")
        monkeypatch.setattr(events, "write", lambda event, **fields: self.events.append({"event": event, **fields}))
        given = {"rules": ("*=auto",), "auto_codecs": ("none", "fp16"), **settings}
        config = RunConfig(compression=CompressionConfig(**given))  # type: ignore[arg-type]
        self.compression = Compression(channel, config, events=events, clock=self.clock)  # type: ignore[arg-type]
        self.gradient = np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)
        monkeypatch.setattr(compression, "try_codec", self._try)
        decide = CodecChoice.decide

        def note(policy: CodecChoice, facts: CodecFacts) -> object:
            self.facts.append(facts)
            return decide(policy, facts)

        monkeypatch.setattr(CodecChoice, "decide", note)

    def _try(self, spec: CodecSpec, gradient: np.ndarray, *, clock: Clock) -> Trial:
        self.num_trials += 1
        return Trial(encode_s=1e-6, decode_s=1e-6, num_bytes=2 * gradient.size, error=1e-4)

    def step(
        self, shards: list[Shard], *, encode_s: float = 0.0, hidden_s: float = 0.0, **exchange: float
    ) -> list[Codec]:
        """One step; its exchange takes ``plain_s``, or ``encoded_s`` if a frame is encoded, 60 % more with a trial."""
        codecs, before = [], self.num_trials
        for shard in shards:
            encode = self.compression._states.get(shard.key)
            real = encode.encoder.encode if encode else None
            if encode and real:
                encode.encoder.encode = lambda gradient, real=real: self._slow(real, gradient, encode_s)  # type: ignore[method-assign]
            encoded = self.compression.encode(shard, self.gradient[: shard.numel])
            if encode and real:
                encode.encoder.encode = real  # type: ignore[method-assign]
            codecs.append(encoded.codec)
            size = encoded.payload.size + 200
            frames, num_bytes, busy_s = self._use
            self._use = LinkUse(frames + 1, num_bytes + size, busy_s + 20e-6 + size / self.bytes_per_s)
        took_s = exchange["encoded_s"] if Codec.FP16 in codecs else exchange["plain_s"]
        if self.num_trials > before:
            took_s *= 1.6
        self.compression.end_step(exchange_s=took_s, hidden_s=hidden_s)
        return codecs

    def _slow(self, encode: object, gradient: np.ndarray, encode_s: float) -> object:
        self.clock.now_s += encode_s
        return encode(gradient)  # type: ignore[operator]

    @property
    def switches(self) -> list[tuple[object, object]]:
        return [(event["key"], event["codec"]) for event in self.events if event["event"] == "codec"]


def shard(key: int, numel: int = NUMEL, codec: str = "auto") -> Shard:
    piece = Piece(tensor=key, start=0, stop=numel, offset=0)
    return Shard(key=key, server=0, dtype="float32", begin=0, numel=numel, pieces=(piece,), codec=codec)


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_a_switch_that_made_exchanges_slower_is_undone(num_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is wrong: with fp16 an exchange takes 30 % more. Slow steps with trials are no excuse."""
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    shards = [shard(key) for key in range(num_shards)]
    used = [Codec.FP16 in bench.step(shards, plain_s=0.010, encoded_s=0.013) for _ in range(400)]
    assert any(used), "it was tried"
    assert sum(used) < 40, "and given up, for longer each time"


def test_a_switch_that_paid_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    used = [Codec.FP16 in bench.step([shard(0), shard(1)], plain_s=0.010, encoded_s=0.006) for _ in range(100)]
    assert all(used[20:])
    assert bench.switches == [(0, "fp16"), (1, "fp16")]


def test_all_shards_of_a_worker_are_tried_before_one_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    shards = [shard(key) for key in range(12)]
    for _ in range(19):
        bench.step(shards, plain_s=0.010, encoded_s=0.006)
    assert bench.switches == []
    bench.step(shards, plain_s=0.010, encoded_s=0.006)
    assert [key for key, _ in bench.switches] == list(range(12))


def test_a_shard_without_gradients_keeps_no_other_from_being_chosen_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    zeros = shard(1, 1000)
    bench.gradient[:1000] = 0.0
    for _ in range(30):
        codecs = bench.step([shard(0), zeros], plain_s=0.010, encoded_s=0.006)
    assert codecs[0] is Codec.FP16


def test_a_gradient_that_is_not_finite_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    bench.gradient[7] = np.inf
    for _ in range(10):
        bench.step([shard(0)], plain_s=0.010, encoded_s=0.006)
    assert bench.num_trials == 0
    bench.gradient[7] = 1.0
    for _ in range(10):
        bench.step([shard(0)], plain_s=0.010, encoded_s=0.006)
    assert bench.num_trials == 1
    assert bench.switches == [(0, "fp16")]


def test_small_frames_beside_a_large_shard_do_not_hide_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=1e6)
    shards = [shard(0), *(shard(key, 100, "none") for key in range(1, 6))]
    for _ in range(30):
        codecs = bench.step(shards, plain_s=1.0, encoded_s=0.5)
    assert codecs == [Codec.FP16, *[Codec.NONE] * 5]


def test_encoding_that_takes_longer_than_in_the_trial_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    for _ in range(20):
        bench.step([shard(0)], plain_s=0.010, encoded_s=0.010)
    assert bench.switches == [(0, "fp16")]
    for _ in range(20):
        bench.step([shard(0)], plain_s=0.010, encoded_s=0.010, encode_s=0.02)
    assert bench.switches == [(0, "fp16"), (0, "none")]


def test_what_a_server_says_of_decoding_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    bench.compression.on_decode_costs(DecodeCosts(server=0, codecs=[0, 2], elem_s=[1e-9, 1e-6]))
    for _ in range(30):
        bench.step([shard(0)], plain_s=0.010, encoded_s=0.010)
    assert bench.switches == []
    costs = {str(cost.spec): cost.decode_s for cost in bench.facts[-1].costs}
    assert costs == {"none": pytest.approx(NUMEL * 1e-9), "fp16": pytest.approx(NUMEL * 1e-6)}


def test_transfers_behind_compute_are_shared_out_over_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    shards = [shard(0, 60_000), shard(1, 180_000, "none")]
    for _ in range(10):
        bench.step(shards, plain_s=0.010, encoded_s=0.010, hidden_s=0.004)
    assert bench.facts[-1].hidden_s == pytest.approx(0.001)


def test_a_pinned_codec_holds_whatever_was_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    for _ in range(20):
        bench.step([shard(0)], plain_s=0.010, encoded_s=0.006)
    state = bench.compression._states[0]
    assert state.auto is not None
    state.auto.probing = True
    bench.compression.pin(CodecSpec.parse("int8"))
    num_choices = len(bench.facts)
    pinned = [bench.step([shard(0), shard(7)], plain_s=0.010, encoded_s=0.006) for _ in range(50)]
    assert pinned == [[Codec.INT8, Codec.INT8]] * 50
    assert len(bench.facts) == num_choices
    bench.compression.pin(None)
    assert bench.step([shard(0)], plain_s=0.010, encoded_s=0.006) == [Codec.FP16]
    for _ in range(10):
        bench.step([shard(0)], plain_s=0.010, encoded_s=0.006)
    assert bench.facts[-1].link.trusted, "pinned steps do not age what is known of the link"


def test_a_shard_on_another_server_is_chosen_for_by_that_servers_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is owed stays; how long exchanges took with the old server says nothing of the new one."""
    bench = Bench(monkeypatch, bytes_per_s=200e6)
    for _ in range(30):
        bench.step([shard(0), shard(1)], plain_s=0.010, encoded_s=0.006)
    state = bench.compression._states[0]
    owed = state.encoder.feedback._residual
    assert owed is not None
    assert np.abs(owed).max() > 0
    owed = owed.copy()
    moved = dataclasses.replace(shard(0), server=1)
    bench.compression.reroute(moved)
    bench.compression.reroute(dataclasses.replace(shard(9), server=2))  # pushed by another worker
    assert np.array_equal(owed, state.encoder.feedback._residual)  # type: ignore[arg-type]
    num_choices = len(bench.facts)
    bench.compression.on_decode_costs(DecodeCosts(server=1, codecs=[int(Codec.FP16)], elem_s=[5e-9]))
    for _ in range(4):
        bench.step([moved, shard(1)], plain_s=0.010, encoded_s=0.006)
    assert len(bench.facts) == num_choices, "five exchanges with the new server come first"
    for _ in range(6):
        bench.step([moved, shard(1)], plain_s=0.010, encoded_s=0.006)
    facts = bench.facts[num_choices]
    assert facts.measured_before_s is None
    [cost] = [cost for cost in facts.costs if cost.spec == FP16]
    assert cost.decode_s == pytest.approx(5e-9 * NUMEL)
