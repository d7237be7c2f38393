"""ShardEncoder, ErrorFeedback, fits and try_codec: what is sent, what is owed, and when a codec is left out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpcps import native
from hpcps.codec.costs import try_codec
from hpcps.codec.encoder import Encoded, ShardEncoder, fits, nothing, plain
from hpcps.codec.error_feedback import ErrorFeedback
from hpcps.errors import ConfigError
from hpcps.plan import Codec, CodecSpec

NUMEL = 1000
LOSSY = ("fp16", "bf16", "int8", "onebit", "topk:0.05")


def dense(seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(NUMEL).astype(dtype)


def sparse(seed: int = 0) -> np.ndarray:
    x = dense(seed)
    x[np.random.default_rng(seed).random(NUMEL) < 0.9] = 0
    return x


def encoder(text: str, *, feedback: bool = True, dtype: str = "float32") -> ShardEncoder:
    made = ShardEncoder(NUMEL, dtype, feedback=feedback)
    made.use(CodecSpec.parse(text))
    return made


def decoded(encoded: Encoded, dtype: str = "float32") -> np.ndarray:
    out = np.empty(NUMEL, dtype)
    native.decode(encoded.codec, encoded.payload, out)
    return out


# codec         1      9     10   1000   elements of float32; 1000 of float64
FITS = {
    "none":   (True, True, True, True, True),
    "fp32":   (True, True, True, True, True),
    "fp16":   (True, True, True, True, False),
    "bf16":   (True, True, True, True, False),
    "int8":   (True, True, True, True, False),
    "onebit": (False, True, True, True, False),
    "packed": (True, True, True, True, False),
    "topk:0.01": (False, True, True, True, False),
    "topk:1": (False, False, False, True, False),
}  # fmt: skip


@pytest.mark.parametrize("text", FITS)
def test_a_codec_fits_where_no_payload_is_longer_than_the_shard(text: str) -> None:
    spec = CodecSpec.parse(text)
    found = [fits(spec, numel=numel, dtype="float32") for numel in (1, 9, 10, 1000)]
    assert (*found, fits(spec, numel=1000, dtype="float64")) == FITS[text]


@pytest.mark.parametrize(("text", "dtype"), [("fp16", "float64"), ("int8", "float64"), ("packed", "float64")])
def test_a_codec_that_does_not_fit_is_refused_and_the_one_in_use_stays(text: str, dtype: str) -> None:
    made = encoder("none", dtype=dtype)
    with pytest.raises(ConfigError, match=f"^cannot encode 1000 elements of {dtype} as {text}: it would take up to"):
        made.use(CodecSpec.parse(text))
    assert str(made.spec) == "none"


@pytest.mark.parametrize("text", ["none", "fp32"])
def test_values_that_are_sent_as_they_are_stay_in_their_memory(text: str) -> None:
    x = dense()
    encoded = encoder(text).encode(x)
    assert encoded.codec is Codec.NONE
    assert np.shares_memory(encoded.payload, x)
    assert plain(x).payload.tobytes() == encoded.payload.tobytes() == x.tobytes()


@pytest.mark.parametrize("text", LOSSY)
def test_what_is_not_sent_is_owed_until_a_step_without_a_codec(text: str) -> None:
    made, xs = encoder(text), [dense(seed) for seed in range(4)]
    arrived = [decoded(made.encode(x)) for x in xs[:3]]
    assert made.feedback.owes
    made.use(CodecSpec(codec=Codec.NONE))
    arrived.append(decoded(made.encode(xs[3])))
    assert not made.feedback.owes
    assert np.abs(np.sum(arrived, axis=0) - np.sum(xs, axis=0)).max() < 1e-5


@pytest.mark.parametrize("text", LOSSY)
def test_without_feedback_nothing_is_owed(text: str) -> None:
    made = encoder(text, feedback=False)
    first, second = (made.encode(dense()).payload.tobytes() for _ in range(2))
    assert first == second
    assert not made.feedback.owes


def test_a_switch_to_another_codec_keeps_what_is_owed() -> None:
    texts = ("topk:0.05", "int8", "onebit", "fp16", "packed", "bf16", "none")
    made, total, arrived = encoder("none"), np.zeros(NUMEL), np.zeros(NUMEL)
    for seed, text in enumerate(texts):
        made.use(CodecSpec.parse(text))
        total += dense(seed)
        arrived += decoded(made.encode(dense(seed)))
    assert np.abs(arrived - total).max() < 1e-5
    assert not made.feedback.owes


def test_fp32_of_float64_owes_the_digits_that_it_drops() -> None:
    made, x = encoder("fp32", dtype="float64"), dense(dtype="float64")
    arrived = decoded(made.encode(x), "float64")
    residual = made.feedback.take()
    assert residual is not None and residual.any()
    assert np.array_equal(arrived + residual, x)


# --- packed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", [False, True])
def test_packed_sends_less_where_there_are_zeros_and_owes_nothing(feedback: bool) -> None:
    made, x = encoder("packed", feedback=feedback), sparse()
    x[3] = -0.0
    encoded = made.encode(x)
    assert encoded.codec is Codec.PACKED
    assert encoded.payload.size == 4 + 4 * 32 + 4 * np.count_nonzero(x.view(np.uint32)) < x.nbytes / 4
    assert decoded(encoded).tobytes() == x.tobytes()
    assert not made.feedback.owes


@pytest.mark.parametrize("feedback", [False, True])
def test_packed_is_left_out_where_it_saves_nothing(feedback: bool) -> None:
    made, x = encoder("packed", feedback=feedback), dense()
    x[5] = np.inf
    encoded = made.encode(x)
    assert (encoded.codec, encoded.num_not_finite) == (Codec.NONE, 1)
    assert np.shares_memory(encoded.payload, x)
    assert made.encode(sparse()).codec is Codec.PACKED


def test_packed_is_left_out_from_the_very_byte_on() -> None:
    """999 elements of 1000 in four blocks: 4 counts more; with one more zero, in a short block, as many bytes."""
    for zeros, want in ((8, Codec.NONE), (9, Codec.NONE), (10, Codec.PACKED)):
        x = np.ones(NUMEL, np.float32)
        x[-zeros:] = 0
        size = 4 + 4 * NUMEL if zeros == 8 else 4 + 3 * 1024 + 32 + 4 * (232 - zeros)
        encoded = encoder("packed").encode(x)
        assert encoded.codec is want
        assert encoded.payload.size == min(size, 4 * NUMEL)


@pytest.mark.parametrize("make", [sparse, dense])
def test_packed_pays_what_is_owed(make) -> None:
    made, x = encoder("int8"), make(1)
    first = decoded(made.encode(x))
    made.use(CodecSpec.parse("packed"))
    encoded = made.encode(x)
    assert encoded.codec is (Codec.NONE if make is dense else Codec.PACKED)
    assert not np.shares_memory(encoded.payload, x)
    assert np.array_equal(decoded(encoded), x + (x - first))
    assert not made.feedback.owes
    assert decoded(made.encode(x)).tobytes() == x.tobytes()


# --- error feedback ---------------------------------------------------------------------------------------------------


def test_what_is_owed_can_be_handed_over() -> None:
    feedback, out = ErrorFeedback(NUMEL, "float32"), np.zeros(4 * NUMEL, np.uint8)
    assert feedback.take() is None
    feedback.encode(CodecSpec.parse("onebit"), dense(), out)
    owed = feedback.take()
    assert owed is not None and owed.any()
    assert not feedback.owes
    feedback.owe(owed.copy())
    assert feedback.owes
    num_bytes, _ = feedback.encode(CodecSpec.parse("none"), dense(1), out)
    assert np.array_equal(out[:num_bytes].view(np.float32), dense(1) + owed)
    assert not feedback.owes


def test_owing_nothing_is_not_owing() -> None:
    feedback = ErrorFeedback(NUMEL, "float32")
    feedback.owe(np.zeros(NUMEL, np.float32))
    assert not feedback.owes


# --- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*LOSSY, "none", "packed"])
def test_a_trial_tells_seconds_bytes_and_error_and_changes_nothing(text: str) -> None:
    x, ticks = sparse(), itertools.count()
    before, spec = x.copy(), CodecSpec.parse(text)
    trial = try_codec(spec, x, clock=lambda: float(next(ticks)))
    assert (trial.encode_s, trial.decode_s) == (1.0, 1.0)
    encoded = encoder(text).encode(x)
    assert trial.num_bytes == encoded.payload.size
    error = np.linalg.norm(decoded(encoded) - x) / np.linalg.norm(x)
    assert trial.error == pytest.approx(float(error), rel=1e-5)
    assert (trial.error == 0) == spec.lossless
    assert np.array_equal(x, before)


def test_a_trial_of_nothing_or_of_what_is_not_finite_has_no_error() -> None:
    zeros = np.zeros(NUMEL, np.float32)
    assert try_codec(CodecSpec.parse("int8"), zeros).error == 0
    assert try_codec(CodecSpec.parse("packed"), zeros).num_bytes == 4
    zeros[0] = np.nan
    assert try_codec(CodecSpec.parse("onebit"), zeros).error == 0


def test_values_that_do_not_count_become_a_payload_of_no_elements() -> None:
    encoded = nothing(dense())
    assert (encoded.codec, encoded.payload.size) == (Codec.TOPK, 16)
    acc = dense(1)
    native.decode_accumulate(acc, [encoded.payload], [encoded.codec], [2.0])
    assert acc.tobytes() == dense(1).tobytes()
    few, double = dense()[:4], dense(dtype="float64")
    assert (nothing(few).codec, nothing(few).payload.tobytes()) == (Codec.NONE, few.tobytes())
    assert nothing(double).codec is Codec.NONE
