"""What holds of every codec for any input: nothing is lost, bounds bound, damage is refused."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from codec_cases import CODECS, IMPLEMENTATIONS, LOSSY, bits, decode, encode, values
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpcps.plan import Codec, CodecSpec

each_implementation = pytest.mark.parametrize("codecs", IMPLEMENTATIONS)
few = settings(max_examples=60, deadline=None, derandomize=True)

numbers = st.floats(width=32)
finite_numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate_numbers = st.floats(-1000, 1000, width=32)
texts = st.sampled_from(CODECS)
lossy_texts = st.sampled_from(LOSSY)

VARIABLE = (Codec.TOPK, Codec.PACKED)
"""Codecs whose payloads are shorter for some elements than for others."""


def floats(elements: st.SearchStrategy[float] = numbers) -> st.SearchStrategy[np.ndarray]:
    """Arrays of up to a few blocks, with more repeated elements than chance would give."""
    return arrays(np.float32, st.integers(0, 700), elements=elements, fill=elements)


@st.composite
def pairs(draw: st.DrawFn, elements: st.SearchStrategy[float] = numbers) -> tuple[np.ndarray, np.ndarray]:
    """An array and a finite residual of it."""
    x = draw(floats(elements))
    kind = st.sampled_from([moderate_numbers, finite_numbers])
    residual = draw(kind.flatmap(lambda each: arrays(np.float32, x.size, elements=each, fill=each)))
    return x, residual


def total(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x + residual


def held(payload: np.ndarray) -> np.ndarray:
    """Indices of the elements that a payload of top-k holds."""
    count, gap_bytes = payload[:8].view("<u4").tolist()
    found, at, gap, shift = [], -1, 0, 0
    for byte in payload[16 : 16 + gap_bytes].tolist():
        gap |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            at += gap + 1
            found.append(at)
            gap = shift = 0
    assert len(found) == count
    return np.array(found, dtype=np.int64)


@each_implementation
@few
@given(pair=pairs(), text=texts)
def test_the_payload_is_never_longer_than_promised_and_is_always_decodable(
    codecs: ModuleType, pair: tuple[np.ndarray, np.ndarray], text: str
) -> None:
    x, residual = pair
    v = total(x, residual)
    spec = CodecSpec.parse(text)
    payload, num_not_finite = encode(codecs, text, x, residual)  # checks the bytes behind it as well
    assert payload.size <= spec.wire_bytes(x.size)
    assert num_not_finite == np.count_nonzero(~np.isfinite(v))
    if spec.codec not in VARIABLE:
        assert payload.size == spec.wire_bytes(x.size)
    decode(codecs, text, payload, x.size)


@each_implementation
@few
@given(pair=pairs(finite_numbers), text=lossy_texts)
def test_what_is_sent_and_what_stays_is_what_there_was(
    codecs: ModuleType, pair: tuple[np.ndarray, np.ndarray], text: str
) -> None:
    x, residual = pair
    v = total(x, residual)
    payload, _ = encode(codecs, text, x, residual)
    got = decode(codecs, text, payload, x.size)
    sent = np.isfinite(v) & np.isfinite(got)
    wide_v, wide_got, wide_left = (array[sent].astype(np.float64) for array in (v, got, residual))
    error = np.abs(wide_got + wide_left - wide_v)
    larger = np.maximum(np.abs(wide_v), np.abs(wide_got))
    ulp = np.ldexp(1.0, np.maximum(np.frexp(larger)[1] - 24, -149))
    assert (error <= ulp).all()
    if text == "fp16":
        error = error[np.abs(wide_v) <= 65504]
    if text != "onebit":
        assert not error.any()


@each_implementation
@few
@given(pair=pairs(), text=texts)
def test_what_is_not_finite_never_enters_a_residual(
    codecs: ModuleType, pair: tuple[np.ndarray, np.ndarray], text: str
) -> None:
    x, residual = pair
    v, old = total(x, residual), residual.copy()
    encode(codecs, text, x, residual)
    assert np.isfinite(residual).all()
    assert np.array_equal(residual[~np.isfinite(v)], old[~np.isfinite(v)])


@each_implementation
@few
@given(pair=pairs(), text=texts)
def test_what_is_not_finite_stays_visible_and_what_is_finite_stays_finite(
    codecs: ModuleType, pair: tuple[np.ndarray, np.ndarray], text: str
) -> None:
    x, residual = pair
    v = total(x, residual)
    spec = CodecSpec.parse(text)
    payload, _ = encode(codecs, text, x, residual)
    got, wrong = decode(codecs, text, payload, x.size), ~np.isfinite(v)
    if spec.codec is Codec.TOPK:
        assert np.count_nonzero(~np.isfinite(got)) == min(wrong.sum(), spec.keep(x.size))
        assert not (~np.isfinite(got) & ~wrong).any()
        return
    assert not np.isfinite(got[wrong]).any()
    for begin in range(0, x.size, 256):
        block = slice(begin, begin + 256)
        if text in ("int8", "onebit") and wrong[block].any():
            assert np.isnan(got[block]).all()
        elif text != "onebit" or np.abs(v[block]).max() < 1e36:  # the sum of 256 of them is finite
            assert np.array_equal(np.isfinite(got[block]), ~wrong[block])


@each_implementation
@few
@given(x=floats(finite_numbers))
def test_errors_are_as_small_as_the_formats_allow(codecs: ModuleType, x: np.ndarray) -> None:
    wide, sizes = x.astype(np.float64), np.abs(x.astype(np.float64))

    def error(text: str) -> np.ndarray:
        return np.abs(decode(codecs, text, encode(codecs, text, x)[0], x.size) - wide)

    within, ordinary = sizes <= 65504, sizes < 3.38e38  # the last binade of floats has no room to round up
    assert (error("fp16")[within] <= np.maximum(sizes * 2.0**-11, 2.0**-25)[within]).all()
    assert (error("bf16")[ordinary] <= np.maximum(sizes * 2.0**-8, 2.0**-134)[ordinary]).all()
    largest = np.repeat([sizes[begin : begin + 256].max() for begin in range(0, x.size, 256)], 256)[: x.size]
    assert (error("int8") <= np.maximum(largest / np.where(largest < 3.38e38, 127, 63), 2.0**-127)).all()


@each_implementation
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), numel=st.integers(1, 3000), text=lossy_texts, gain=st.sampled_from([1e-6, 1.0, 1e4]))
def test_over_many_steps_everything_arrives(codecs: ModuleType, seed: int, numel: int, text: str, gain: float) -> None:
    """The sum of what was decoded and the last residual are the sum of what was put in, up to its roundings."""
    rng = np.random.default_rng(seed)
    residual = np.zeros(numel, dtype=np.float32)
    put_in, arrived, largest = np.zeros(numel), np.zeros(numel), 0.0
    num_steps = 40
    for _ in range(num_steps):
        x = (gain * rng.standard_normal(numel)).astype(np.float32)
        put_in += x
        arrived += decode(codecs, text, encode(codecs, text, x, residual)[0], numel)
        largest = max(largest, float(np.abs(x).max()), float(np.abs(residual).max()))
    assert np.abs(arrived + residual - put_in).max() <= num_steps * largest * 2.0**-22


@each_implementation
@pytest.mark.parametrize("text", ["int8", "topk:0.05", "fp16", "bf16"])
def test_over_many_steps_whole_numbers_arrive_exactly(codecs: ModuleType, text: str) -> None:
    """Sums of whole numbers below 2^24 have no roundings, so nothing at all may be missing."""
    rng = np.random.default_rng(21)
    residual = np.zeros(5000, dtype=np.float32)
    put_in, arrived = np.zeros(5000), np.zeros(5000)
    for _ in range(50):
        x = rng.integers(-30_000, 30_000, 5000).astype(np.float32)
        put_in += x
        arrived += decode(codecs, text, encode(codecs, text, x, residual)[0], 5000)
    assert np.array_equal(arrived + residual, put_in)
    assert residual.any()


@each_implementation
@few
@given(data=st.data(), numel=st.integers(0, 700), assign=st.booleans())
def test_one_call_for_many_payloads_equals_a_call_for_each(
    codecs: ModuleType, data: st.DataObject, numel: int, assign: bool
) -> None:
    """Weights of int8 all differ here: equal ones may be summed as integers first."""
    chosen = data.draw(st.lists(texts, min_size=1, max_size=6))
    weights = data.draw(st.lists(moderate_numbers, min_size=len(chosen), max_size=len(chosen), unique=True))
    numbers_of = [int(CodecSpec.parse(text).codec) for text in chosen]
    payloads = [encode(codecs, text, values("not_finite", numel, seed))[0] for seed, text in enumerate(chosen)]
    together = values("negative_zeros", numel)
    apart = together.copy()
    codecs.decode_accumulate(together, payloads, numbers_of, weights, assign=assign)
    for index in range(len(chosen)):
        one = slice(index, index + 1)
        codecs.decode_accumulate(apart, payloads[one], numbers_of[one], weights[one], assign=assign and index == 0)
    assert np.array_equal(bits(together), bits(apart))


@each_implementation
@few
@given(data=st.binary(max_size=200), numel=st.integers(0, 100), codec=st.integers(0, 7))
def test_any_bytes_are_decoded_or_refused_without_effect(
    codecs: ModuleType, data: bytes, numel: int, codec: int
) -> None:
    acc = np.full(numel, 7, dtype=np.float32)
    try:
        codecs.decode_accumulate(acc, [np.frombuffer(data, dtype=np.uint8)], [codec], [1.0], assign=True)
    except ValueError as error:
        assert Codec(codec).name.lower() in str(error)
        assert (acc == 7).all()
    else:
        assert codec in VARIABLE or len(data) == CodecSpec.parse(Codec(codec).name).wire_bytes(numel)


@each_implementation
@few
@given(
    x=floats(finite_numbers),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(-3, 3),
)
def test_a_damaged_topk_payload_is_refused_without_effect_or_holds_what_it_says(
    codecs: ModuleType, x: np.ndarray, changes: list[tuple[int, int]], cut: int
) -> None:
    payload, _ = encode(codecs, "topk:0.2", x)
    damaged = np.resize(payload, max(0, payload.size + cut))
    for at, byte in changes:
        if damaged.size:
            damaged[at % damaged.size] = byte
    out = np.full(x.size, 7, dtype=np.float32)
    try:
        codecs.decode(int(Codec.TOPK), damaged, out)
    except ValueError:
        assert (out == 7).all()
    else:
        index = held(damaged)
        assert index.size <= x.size
        assert not np.delete(out, index).any()


@each_implementation
@few
@given(x=floats(st.sampled_from([0.0, -0.0, 1.0, -1e-45, 3e38, float("nan"), float("inf")])), data=st.data())
def test_packed_keeps_every_bit_and_sends_no_more_than_it_must(
    codecs: ModuleType, x: np.ndarray, data: st.DataObject
) -> None:
    for begin in range(0, x.size, 256):  # blocks with few that are not zero too
        x[begin : begin + 256][: data.draw(st.integers(0, 256))] = 0
    payload, _ = encode(codecs, "packed", x)
    blocks = [x[begin : begin + 256].view(np.uint32) for begin in range(0, x.size, 256)]
    count = [np.count_nonzero(block) for block in blocks]
    least = [1 + (min(32 + 4 * c, 4 * block.size) if c else 0) for c, block in zip(count, blocks, strict=True)]
    assert payload.size == sum(least)
    assert decode(codecs, "packed", payload, x.size).tobytes() == x.tobytes()


# --- top-k ------------------------------------------------------------------------------------------------------------


@each_implementation
@few
@given(x=floats(), keep=st.integers(1, 700))
def test_topk_sends_the_largest_and_of_equal_ones_the_first(codecs: ModuleType, x: np.ndarray, keep: int) -> None:
    keep = min(keep, x.size)
    out = np.zeros(16 + 7 * keep, dtype=np.uint8)
    num_bytes, _ = codecs.encode(int(Codec.TOPK), x, out, keep=keep)
    size = np.where(np.isfinite(x), np.abs(x), np.inf)
    order = np.argsort(-size, kind="stable")[: min(keep, np.count_nonzero(x))]
    assert held(out[:num_bytes]).tolist() == sorted(order.tolist())


@each_implementation
@pytest.mark.parametrize("keep", [1, 20, 2000, 20_000, 190_000])
def test_topk_sends_what_was_asked_within_2_percent(codecs: ModuleType, keep: int) -> None:
    for kind in ("normal", "tiny_to_huge", "ties"):
        x = values(kind, 200_000)
        out = np.zeros(CodecSpec(codec=Codec.TOPK, keep_frac=keep / x.size).wire_bytes(x.size), dtype=np.uint8)
        num_bytes, _ = codecs.encode(int(Codec.TOPK), x, out, keep=keep)
        count = int(out[:4].view("<u4")[0])
        assert 0.98 * keep <= count <= keep * 51 // 50
        assert num_bytes <= out.size


def sampled(numel: int) -> np.ndarray:
    """The elements that the built kernels guess their first threshold from (guess_threshold in ext/topk.cpp)."""
    stride = numel // 4096
    line = np.arange(4096, dtype=np.uint64)
    first = line * stride + ((line * 2654435761 & 0xFFFFFFFF) >> 4) % (stride - 15)
    return (first[:, None] + np.arange(16, dtype=np.uint64)).ravel()


def misleading(numel: int, keep: int) -> dict[str, np.ndarray]:
    """Arrays of which a sample at equal distances, or from the beginning, tells little."""
    rng = np.random.default_rng(22)
    small = rng.random(numel).astype(np.float32)
    arranged = {"ascending": np.sort(small), "descending": np.sort(small)[::-1].copy()}
    for step in (2, 3, 6, 16, 64, 100, 256, 4096):  # the numpy reference looks at every 6th
        for name, gain in (("large", 1000), ("small", 1e-3)):
            arranged[f"{name} at every {step}"] = small.copy()
            arranged[f"{name} at every {step}"][::step] *= gain
    for name, gain in (("large", 1000), ("small", 1e-3)):
        arranged[f"{name} where the sample looks"] = small.copy()
        arranged[f"{name} where the sample looks"][sampled(numel)] *= gain
    for name, begin in (("first", 0), ("last", numel - keep)):
        arranged[f"the {name} ones"] = small.copy()
        arranged[f"the {name} ones"][begin : begin + keep] += 5
    arranged["a few not zero"] = np.zeros(numel, dtype=np.float32)
    arranged["a few not zero"][rng.choice(numel, keep // 2, replace=False)] = -1
    for x in list(arranged.values()):
        x[rng.choice(numel, 5, replace=False)] = np.array([np.nan, np.inf, -np.inf, np.nan, np.inf])
    return arranged


@each_implementation
@pytest.mark.parametrize("fed", [False, True], ids=["plain", "residual"])
def test_no_arrangement_of_the_elements_misleads_topk(codecs: ModuleType, fed: bool) -> None:
    numel, keep = 200_000, 2000
    for name, x in misleading(numel, keep).items():
        residual = np.full(numel, 2.0**-20, dtype=np.float32) if fed else None
        v = total(x, residual) if residual is not None else x
        payload, num_not_finite = encode(codecs, "topk:0.01", x, residual)
        size = np.where(np.isfinite(v), np.abs(v), np.inf)
        order = np.argsort(-size, kind="stable")[: min(keep, np.count_nonzero(v))]
        assert np.array_equal(held(payload), np.sort(order)), name
        assert num_not_finite == 5, name
        if residual is not None:
            got = decode(codecs, "topk:0.01", payload, numel)
            finite = np.isfinite(v)
            assert np.array_equal((got + residual)[finite], v[finite]), name
            assert (residual[~finite] == 2.0**-20).all(), name
