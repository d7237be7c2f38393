"""Accumulator: the bits of the mean, and when it copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcps import native
from hpcps.errors import ProtocolError
from hpcps.plan import Codec, CodecSpec
from hpcps.update.accumulator import Accumulator

DTYPES = ("float32", "float64")


def payloads(dtype: str, count: int, numel: int = 1000) -> list[np.ndarray]:
    rng = np.random.default_rng(17)
    return [rng.standard_normal(numel).astype(dtype) for _ in range(count)]


def raw(x: np.ndarray) -> np.ndarray:
    """A payload of codec none: the same memory as bytes."""
    return x.view(np.uint8)


def oracle(xs: list[np.ndarray], weights: list[float], total_weight: float) -> np.ndarray:
    """The same sum in plain numpy, each operation rounded to the dtype."""
    real = xs[0].dtype.type
    total = real(weights[0]) * xs[0]
    for x, weight in zip(xs[1:], weights[1:], strict=True):
        total += real(weight) * x
    return total * real(1.0 / total_weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("weights", "total_weight"),
    [([3.0, 5.0], 8.0), ([1 / 3, 7.0, 0.0, 2.5], 9.0), ([0.0, 1.0], 1.0), ([2.0], 3.0), ([1e-3] * 5, 5e-3)],
)
@pytest.mark.parametrize("settle_after", [(), (0,), (0, 1, 2)])
def test_the_mean_has_the_bits_of_plain_numpy(dtype, weights, total_weight, settle_after):
    xs = payloads(dtype, len(weights))
    accumulator = Accumulator(1000, dtype)
    for round_ in range(2):  # the second round must not see the first
        for index, (x, weight) in enumerate(zip(xs, weights, strict=True)):
            lent = x.copy()
            accumulator.add(raw(lent), weight)
            if index in settle_after:
                accumulator.settle()
                lent[:] = np.nan  # the caller uses its memory again
        last = max((index for index in settle_after if index < len(weights)), default=-1)
        assert accumulator.num_pending == len(weights) - 1 - last, round_
        result = accumulator.mean(total_weight)
        assert result.dtype == dtype
        assert result.tobytes() == oracle(xs, weights, total_weight).tobytes()
        assert accumulator.num_pending == 0


def test_a_single_payload_with_all_the_weight_is_not_copied():
    (x,) = payloads("float32", 1)
    before = x.copy()
    accumulator = Accumulator(1000, "float32")
    for _ in range(2):
        accumulator.add(raw(x), 4.0)
        assert accumulator.mean(4.0).ctypes.data == x.ctypes.data
    assert x.tobytes() == before.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_payloads_are_never_written(dtype):
    xs = payloads(dtype, 3)
    for x in xs:
        x.flags.writeable = False
    accumulator = Accumulator(1000, dtype)
    for x in xs:
        accumulator.add(raw(x), 1.0)
    result = accumulator.mean(3.0)
    assert not any(np.may_share_memory(result, x) for x in xs)
    accumulator.add(raw(xs[0]), 1.0)
    alone = accumulator.mean(2.0)  # alone, but not with all the weight
    assert not np.may_share_memory(alone, xs[0])


def test_own_memory_is_used_again_and_survives_one_add():
    xs = payloads("float32", 2)
    accumulator = Accumulator(1000, "float32")
    accumulator.add(raw(xs[0]), 1.0)
    accumulator.settle()
    first = accumulator.mean(1.0)
    kept = first.copy()
    accumulator.add(raw(xs[1]), 1.0)
    assert first.tobytes() == kept.tobytes()
    accumulator.settle()
    second = accumulator.mean(1.0)
    assert second is first
    assert second.tobytes() == xs[1].tobytes()


def test_settling_twice_or_with_nothing_changes_nothing():
    (x,) = payloads("float64", 1)
    accumulator = Accumulator(1000, "float64")
    accumulator.settle()
    accumulator.add(raw(x), 2.0)
    accumulator.settle()
    accumulator.settle()
    assert accumulator.num_pending == 0
    assert accumulator.mean(2.0).tobytes() == x.tobytes()


@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    settles=st.sets(st.integers(0, 5)),
    values=st.integers(-1000, 1000),
)
def test_equal_payloads_have_themselves_as_mean(weights, settles, values):
    """Integers are exact in float64 up to the last product, so only 1/total rounds."""
    accumulator = Accumulator(3, "float64")
    x = np.array([values, 0.0, -1.0])
    for index, weight in enumerate(weights):
        accumulator.add(raw(x.copy()), weight)
        if index in settles:
            accumulator.settle()
    np.testing.assert_allclose(accumulator.mean(sum(weights)), x, rtol=4e-16)


def encode(x: np.ndarray, text: str) -> np.ndarray:
    spec = CodecSpec.parse(text)
    out = np.empty(spec.wire_bytes(x.size), np.uint8)
    num_bytes, _ = native.encode(spec.codec, x, out, keep=spec.keep(x.size))
    return out[:num_bytes]


@pytest.mark.parametrize("text", ["fp16", "bf16", "int8", "onebit", "topk:0.1"])
def test_an_encoded_payload_that_stands_alone_has_what_it_says_as_mean(text):
    (x,) = payloads("float32", 1)
    payload = encode(x, text)
    decoded = np.empty_like(x)
    native.decode(CodecSpec.parse(text).codec, payload, decoded)
    accumulator = Accumulator(1000, "float32")
    for _ in range(2):
        accumulator.add(payload, 3.0, codec=CodecSpec.parse(text).codec)
        assert accumulator.mean(3.0).tobytes() == decoded.tobytes()


def test_payloads_of_several_codecs_go_into_one_mean():
    xs, texts = payloads("float32", 4), ("fp16", "int8", "topk:0.1", "none")
    weights = [1.0, 2.0, 3.0, 4.0]
    accumulator = Accumulator(1000, "float32")
    decoded = []
    for x, text, weight in zip(xs, texts, weights, strict=True):
        codec = CodecSpec.parse(text).codec
        payload = raw(x) if codec is Codec.NONE else encode(x, text)
        decoded.append(np.empty_like(x))
        native.decode(codec, payload, decoded[-1])
        accumulator.add(payload, weight, codec=codec)
    assert accumulator.mean(10.0).tobytes() == oracle(decoded, weights, 10.0).tobytes()
    assert accumulator.times == {}, "several codecs in a pass: whose time is it?"


def test_more_payloads_than_one_pass_takes_are_folded_on_the_way():
    count = 2 * Accumulator.max_pending + 1
    xs = payloads("float32", count)
    accumulator = Accumulator(1000, "float32")
    for x in xs:
        accumulator.add(raw(x), 1.0)
        assert accumulator.num_pending <= Accumulator.max_pending
    assert accumulator.num_pending == 1
    assert accumulator.mean(count).tobytes() == oracle(xs, [1.0] * count, count).tobytes()
    assert accumulator.times[Codec.NONE].num_elems == count * 1000


def test_what_does_not_fit_is_refused():
    accumulator = Accumulator(4, "float32")
    good = raw(np.ones(4, dtype=np.float32))
    for payload in (good[:12], raw(np.ones(4)), raw(np.ones(8, dtype=np.float32))[::2]):
        with pytest.raises(ProtocolError, match=r"cannot add a payload: \d+ bytes, need 16 for 4 elements of float32"):
            accumulator.add(payload, 1.0)
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ProtocolError, match="weight (-1.0|nan|inf), need a finite number of 0 or more"):
            accumulator.add(good, weight)
    assert accumulator.num_pending == 0


def test_bytes_that_are_no_encoding_are_refused_and_change_nothing():
    x = np.ones(4, dtype=np.float32)
    accumulator = Accumulator(4, "float32")
    accumulator.add(raw(x), 1.0)
    accumulator.settle()
    accumulator.add(np.zeros(7, np.uint8), 1.0, codec=Codec.FP16)
    with pytest.raises(ProtocolError, match="fp16.*7.*8.*run the same hpcps on every rank"):
        accumulator.mean(2.0)


def test_memory_at_any_address_will_do():
    x = np.arange(4, dtype=np.float32)
    odd = np.zeros(17, dtype=np.uint8)[1:]
    odd[:] = raw(x)
    accumulator = Accumulator(4, "float32")
    accumulator.add(odd, 2.0)
    assert accumulator.mean(2.0).tobytes() == x.tobytes()


def test_a_mean_of_nothing_or_over_no_weight_is_refused():
    accumulator = Accumulator(4, "float32")
    with pytest.raises(ProtocolError, match=r"cannot take a mean: 0 payloads pending, total weight 1\.0"):
        accumulator.mean(1.0)
    good = np.ones(4, dtype=np.float32)
    accumulator.add(raw(good), 1.0)
    for total_weight in (0.0, -1.0, float("nan"), float("inf"), 1e-39):
        with pytest.raises(ProtocolError, match="cannot take a mean: 1 payloads pending, total weight"):
            accumulator.mean(total_weight)
    assert accumulator.num_pending == 1
    assert accumulator.mean(1.0).ctypes.data == good.ctypes.data
