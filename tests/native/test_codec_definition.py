"""Every codec against its definition, element by element in exact arithmetic: what is sent, decoded, left and added."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from codec_cases import CODECS, FLOAT_MAX, KINDS, LOSSY, bits, decode, encode, values

from hpcps.plan import Codec, CodecSpec

NUMEL = 600  # two blocks and a part of one


def nearest_half(v: float) -> float:
    """Python's own conversion, which raises beyond the range."""
    try:
        return struct.unpack("<e", struct.pack("<e", v))[0]
    except OverflowError:
        return math.copysign(65504, v)


def nearest_bfloat(v: float) -> float:
    """The nearer of the two neighbours, of equally near ones the even one."""
    (word,) = struct.unpack("<I", struct.pack("<f", abs(v)))
    choices = [upper for upper in (word >> 16, (word >> 16) + 1) if upper < 0x7F80]
    found = {upper: struct.unpack("<f", struct.pack("<I", upper << 16))[0] for upper in choices}
    best = min(choices, key=lambda upper: (abs(found[upper] - abs(v)), upper % 2))
    return math.copysign(found[best], v)


def int8_block(block: list[float]) -> list[float]:
    largest = max(abs(v) for v in block)
    if not all(map(math.isfinite, block)):
        return [math.nan] * len(block)
    if largest == 0:
        return [0.0] * len(block)
    exponent = -126
    while round(largest / 2.0**exponent) > 127:
        exponent += 1
    most = 63 if exponent == 122 else 127  # 64 * 2^122 is infinite
    return [max(-most, min(most, round(v / 2.0**exponent))) * 2.0**exponent for v in block]


def onebit_block(block: list[float]) -> list[float]:
    lanes = [np.float32(0)] * 32
    for at, v in enumerate(block):
        lanes[at % 32] = lanes[at % 32] + np.float32(abs(v))
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[at] + lanes[at + half] for at in range(half)]
    scale = float(lanes[0] / np.float32(len(block)))
    return [math.copysign(scale, v) if math.isfinite(scale) else math.nan for v in block]


def topk_elements(v: list[float], keep: int) -> list[float]:
    def size(at: int) -> float:
        return abs(v[at]) if math.isfinite(v[at]) else math.inf

    order = sorted((at for at in range(len(v)) if v[at] != 0), key=lambda at: (-size(at), at))
    sent = sorted(order[:keep])
    largest = max((abs(v[at]) for at in sent if math.isfinite(v[at])), default=0.0)
    exponent = max(-126, math.floor(math.log2(largest)) - 15) if largest >= 2.0**-126 else -126 if largest else 0
    decoded = [0.0] * len(v)
    for at in sent:
        finite = math.isfinite(v[at])
        decoded[at] = nearest_half(v[at] * 2.0**-exponent) * 2.0**exponent if finite else v[at]
    return decoded


def blocks_of(v: list[float]) -> list[list[float]]:
    return [v[begin : begin + 256] for begin in range(0, len(v), 256)]


def decoded_by_definition(spec: CodecSpec, v: list[float]) -> list[float]:
    if spec.codec is Codec.FP16:
        return [nearest_half(x) if math.isfinite(x) else x for x in v]
    if spec.codec is Codec.BF16:
        return [nearest_bfloat(x) if math.isfinite(x) else x for x in v]
    if spec.codec is Codec.INT8:
        return [x for block in blocks_of(v) for x in int8_block(block)]
    if spec.codec is Codec.ONEBIT:
        return [x for block in blocks_of(v) for x in onebit_block(block)]
    if spec.codec is Codec.TOPK:
        return topk_elements(v, spec.keep(len(v)))
    return v


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
@pytest.mark.parametrize("text", CODECS)
def test_what_is_decoded_and_left_follows_the_definition(codecs, text, kind):
    with np.errstate(all="ignore"):
        x, residual = values(kind, NUMEL), values("normal", NUMEL, 1) * np.float32(1e-3)
        v, old = x + residual, residual.copy()
        payload, num_not_finite = encode(codecs, text, x, residual)
        got = decode(codecs, text, payload, NUMEL)
        want = np.array(decoded_by_definition(CodecSpec.parse(text), v.tolist()), dtype=np.float32)
        left = v - want
    assert np.array_equal(got, want, equal_nan=True)
    assert num_not_finite == np.count_nonzero(~np.isfinite(v))
    assert np.array_equal(residual, np.where(np.isfinite(left), left, old))


@pytest.mark.parametrize("text", ["packed", *LOSSY])
def test_a_residual_that_is_not_finite_becomes_zero_where_the_sum_is_not_finite(codecs, text):
    x = np.ones(NUMEL, dtype=np.float32)
    residual = np.zeros(NUMEL, dtype=np.float32)
    residual[[3, 300, 301]] = np.inf, np.nan, -np.inf
    num_not_finite = encode(codecs, text, x, residual)[1]
    assert num_not_finite == 3
    assert np.isfinite(residual).all()
    assert not residual[[3, 300, 301]].any()


def test_a_sum_beyond_the_range_counts_as_not_finite(codecs):
    x = np.full(4, FLOAT_MAX)
    for text in ("none", "packed", *LOSSY):
        residual = np.array([FLOAT_MAX, 0, 0, 0], dtype=np.float32)
        payload, num_not_finite = encode(codecs, text, x, residual)
        assert num_not_finite == 1
        assert residual[0] == FLOAT_MAX
        assert not np.isfinite(decode(codecs, text, payload, 4)[0])


def test_a_onebit_block_whose_sum_overflows_is_not_sent_and_stays_in_the_residual(codecs):
    x = np.full(512, -FLOAT_MAX)
    x[256:] = -2
    residual = np.full_like(x, 0.5)
    payload, num_not_finite = encode(codecs, "onebit", x, residual)
    got = decode(codecs, "onebit", payload, 512)
    assert num_not_finite == 0
    assert np.isnan(got[:256]).all()
    assert (residual[:256] == 0.5).all()
    assert (got[256:] == -1.5).all()
    assert not residual[256:].any()


def test_bytes_of_small_payloads(codecs):
    """Written out: another version must read them."""
    x = np.array([1, -2, 0, 130], dtype=np.float32)
    want = {
        "none": struct.pack("<4f", *x),
        "fp32": struct.pack("<4f", *x),
        "fp16": bytes.fromhex("003c00c000001058"),
        "bf16": bytes.fromhex("803f00c000000243"),
        "int8": bytes([128, 0, 255, 0, 65]),  # scale 2: 0.5 and -1 of it are rounded to even
        "onebit": struct.pack("<f", 33.25) + b"\x02",
        "packed": b"\xff" + struct.pack("<4f", *x),
        "topk:0.5": struct.pack("<4i", 2, 2, -8, 0) + b"\x01\x01" + struct.pack("<2e", -512, 33280),
    }
    assert {text: encode(codecs, text, x)[0].tobytes() for text in want} == want


def test_bytes_of_packed_blocks(codecs):
    """A bitmap for 247 of 256 at most, no bytes for none; the last block has 11 elements."""
    x = np.zeros(3 * 256 + 11, dtype=np.float32)
    x[:248], x[512:759], x[[770, 771]] = 5, 7, [-0.0, np.nan]
    bitmaps = b"\xff" * 30 + b"\x7f\0", b"\x0c" + bytes(31)
    want = b"\xff\0\xf7\x02" + x[:256].tobytes() + bitmaps[0] + x[512:759].tobytes()
    want += bitmaps[1] + x[[770, 771]].tobytes()
    payload, num_not_finite = encode(codecs, "packed", x)
    assert payload.tobytes() == want
    assert num_not_finite == 1


@pytest.mark.parametrize(("numel", "most"), [(1, 0), (9, 0), (10, 1), (11, 2), (255, 246), (256, 247)])
def test_a_bitmap_is_sent_where_it_is_shorter(codecs, numel, most):
    for count in range(numel + 1):
        want = (0, 1) if count == 0 else (count, 33 + 4 * count) if count <= most else (255, 1 + 4 * numel)
        for ends in (slice(numel - count, None), slice(0, count)):
            x = np.zeros(numel, dtype=np.float32)
            x[ends] = 1
            payload, _ = encode(codecs, "packed", x)
            assert (payload[0], payload.size) == want
            assert np.array_equal(decode(codecs, "packed", payload, numel), x)


def test_zeros_keep_their_sign_in_the_residual_of_topk(codecs):
    """More is asked for than is not zero, of so many that the built kernels take a sample."""
    numel = 70_003
    x, residual = np.full(numel, -0.0, dtype=np.float32), np.full(numel, -0.0, dtype=np.float32)
    x[::10], x[::5000] = 3, np.inf
    encode(codecs, "topk:0.2", x, residual)
    assert not residual.any()
    assert np.signbit(residual[x == 0]).all()


def test_gaps_have_digits_of_seven_bits(codecs):
    x = np.zeros(3_000_000, dtype=np.float32)
    gaps = (0, 127, 128, 16_383, 16_384, 2_097_151)
    index = np.cumsum(np.array(gaps) + 1) - 1
    x[index] = 1, 2, 3, 4, 5, -6
    payload = encode(codecs, "topk:0.01", x)[0].tobytes()
    coded = bytes.fromhex("00 7f 8001 ff7f 808001 ffff7f")
    assert payload == struct.pack("<4i", 6, 12, -13, 0) + coded + struct.pack("<6e", *(x[index] * 2.0**13))


@pytest.mark.parametrize("numel", [0, 1])
@pytest.mark.parametrize("text", CODECS)
def test_the_smallest_arrays(codecs, text, numel):
    x = np.full(numel, 3, dtype=np.float32)
    payload, num_not_finite = encode(codecs, text, x)
    assert num_not_finite == 0
    assert payload.size == CodecSpec.parse(text).wire_bytes(numel)
    assert decode(codecs, text, payload, numel).tolist() == [3.0] * numel


# --- decode_accumulate ------------------------------------------------------------------------------------------------


def added_by_definition(acc: np.ndarray, terms: list[tuple[str, np.ndarray, float, np.ndarray]], assign: bool):
    """Term after term, except that runs of int8 are left to the tests that have no runs."""
    total = acc.copy()
    for index, (text, payload, weight, decoded) in enumerate(terms):
        held = np.ones(acc.size, dtype=bool)
        term = np.float32(weight) * decoded
        if text.startswith("topk"):
            held = sent_elements(payload, acc.size)
        if text == "packed":
            held = packed_elements(payload, acc.size)
        if text.startswith("topk") or text == "packed":
            term = np.where(held, term, np.float32(0))
        total = term if assign and index == 0 else np.where(held, total + term, total)
    return total


def sent_elements(payload: np.ndarray, numel: int) -> np.ndarray:
    """Which elements a payload of top-k holds, read byte by byte."""
    count, gap_bytes, _, _ = struct.unpack("<4i", payload[:16].tobytes())
    held, at, gap, shift = np.zeros(numel, dtype=bool), -1, 0, 0
    for byte in payload[16 : 16 + gap_bytes].tolist():
        gap |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            at += gap + 1
            held[at] = True
            gap = shift = 0
    assert held.sum() == count
    return held


def packed_elements(payload: np.ndarray, numel: int) -> np.ndarray:
    """Which elements a packed payload holds, read block by block."""
    held, at = np.zeros(numel, dtype=bool), -(-numel // 256)
    for block in range(at):
        part, count = held[256 * block : 256 * block + 256], int(payload[block])
        part[:] = count == 255
        if 0 < count < 255:
            part[:] = np.unpackbits(payload[at : at + 32], bitorder="little")[: part.size]
            at += 32
        at += 4 * int(part.sum())
    assert at == payload.size
    return held


MIXED = (
    ("int8", 0.3),
    ("fp16", 0.3),
    ("int8", -0.5),
    ("packed", 0.3),
    ("topk:0.2", 0.25),
    ("topk:0.01", -1 / 3),
    ("onebit", 1 / 7),
    ("bf16", 1e-3),
    ("packed", -1 / 7),
    ("fp32", 2.0),
    ("none", -1.0),
    ("int8", 1 / 3),
)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("numel", [1, 257, 40_001])
@pytest.mark.parametrize("first", range(len(MIXED)))
def test_payloads_of_any_codecs_are_added_in_the_order_given(codecs, first, numel, assign):
    order = MIXED[first:] + MIXED[:first]
    terms = []
    for seed, (text, weight) in enumerate(order):
        kind = "blocks_of_zeros" if text == "packed" else "normal"
        payload = encode(codecs, text, values(kind, numel, seed))[0]
        terms.append((text, payload, weight, decode(codecs, text, payload, numel)))
    acc = values("negative_zeros", numel)
    want = added_by_definition(acc, terms, assign)
    numbers = [int(CodecSpec.parse(text).codec) for text, _ in order]
    codecs.decode_accumulate(acc, [term[1] for term in terms], numbers, [weight for _, weight in order], assign=assign)
    assert np.array_equal(bits(acc), bits(want))


@pytest.mark.parametrize("text", CODECS)
def test_assigning_does_not_read_what_was_there(codecs, text):
    x = values("negative_zeros", 1000)
    payload = encode(codecs, text, x)[0]
    acc = np.full(1000, np.nan, dtype=np.float32)
    codecs.decode_accumulate(acc, [payload], [int(CodecSpec.parse(text).codec)], [1.0], assign=True)
    assert np.array_equal(bits(acc), bits(decode(codecs, text, payload, 1000)))
    again = acc.copy()
    codecs.decode_accumulate(acc, [payload], [int(CodecSpec.parse(text).codec)], [1.0])
    assert np.array_equal(acc, again * 2)


def int8_payload(scale_bytes: list[int], elements: np.ndarray) -> np.ndarray:
    return np.concatenate([np.array(scale_bytes, np.uint8), elements.astype(np.int8).view(np.uint8)])


# scale bytes of three blocks in four payloads; the weights make runs {0, 1, 2} and {3}
SCALES = ([120, 120, 121], [120, 121, 121], [120, 120, 121], [120, 120, 120])
RUN_WEIGHTS = (0.3, 0.3, 0.3, 0.1)
# which payloads are summed as integers, block by block
RUNS = (((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,)), ((0, 1, 2), (3,)))


@pytest.mark.parametrize("assign", [False, True])
def test_int8_payloads_of_equal_weight_and_scale_are_summed_as_integers(codecs, assign):
    rng = np.random.default_rng(9)
    elements = rng.integers(-127, 128, (4, NUMEL))
    payloads = [int8_payload(scales, row) for scales, row in zip(SCALES, elements, strict=True)]
    acc = values("normal", NUMEL)
    want = acc.copy()
    for block, runs in enumerate(RUNS):
        at = slice(256 * block, 256 * block + 256)
        for number, run in enumerate(runs):
            factor = np.float32(RUN_WEIGHTS[run[0]]) * np.float32(2.0 ** (SCALES[run[0]][block] - 127))
            term = factor * elements[list(run), at].sum(axis=0).astype(np.float32)
            want[at] = term if assign and number == 0 else want[at] + term
    codecs.decode_accumulate(acc, payloads, [4] * 4, list(RUN_WEIGHTS), assign=assign)
    assert np.array_equal(bits(acc), bits(want))


def test_another_codec_or_weight_between_ends_a_run_of_int8(codecs):
    """With 0.1 as weight, a sum of three terms differs from three times the term in most elements."""
    elements = np.arange(256) - 128
    payload = int8_payload([127], elements)
    zeros = encode(codecs, "fp16", np.zeros(256, dtype=np.float32))[0]
    once, apart = np.zeros(256, np.float32), np.zeros(256, np.float32)
    codecs.decode_accumulate(once, [payload] * 3, [4] * 3, [0.1] * 3)
    codecs.decode_accumulate(apart, [payload, zeros, payload, zeros, payload], [4, 2, 4, 2, 4], [0.1] * 5)
    term = np.float32(0.1) * elements.astype(np.float32)
    assert np.array_equal(once, np.float32(0.1) * (3 * elements).astype(np.float32))
    assert np.array_equal(apart, term + term + term)
    assert not np.array_equal(once, apart)


def test_many_int8_payloads_do_not_overflow_their_sum(codecs):
    payload = int8_payload([127, 127], np.full(300, -128))
    acc = np.zeros(300, dtype=np.float32)
    codecs.decode_accumulate(acc, [payload] * 1000, [4] * 1000, [1.0] * 1000)
    assert (acc == -128_000).all()


def test_weights_that_float32_cannot_tell_apart_are_equal(codecs):
    payload = int8_payload([127], np.arange(256) - 128)
    acc, other = np.zeros(256, np.float32), np.zeros(256, np.float32)
    codecs.decode_accumulate(acc, [payload] * 3, [4] * 3, [0.1, 0.1 + 1e-12, 0.1 - 1e-12])
    codecs.decode_accumulate(other, [payload] * 3, [4] * 3, [0.1] * 3)
    assert np.array_equal(acc, other)


@pytest.mark.parametrize("text", ["none", "fp32"])
def test_float64_is_added_with_weights_of_float64(codecs, text):
    x = np.random.default_rng(6).standard_normal(1000)
    payload = encode(codecs, text, x)[0]
    acc = np.full(1000, 0.1)
    want = acc + decode(codecs, text, payload, 1000, "float64") * (1 / 3)
    codecs.decode_accumulate(acc, [payload], [int(CodecSpec.parse(text).codec)], [1 / 3])
    assert np.array_equal(acc, want)
