"""The codecs of the device: payloads, residuals and sums bit for bit as those of the CPU, in any order of threads."""

from __future__ import annotations

import numpy as np
import pytest
from rigs import Rig

from hpcps import native
from hpcps.plan import Codec, CodecSpec

CODECS = list(Codec)
SIZES = (0, 1, 31, 32, 255, 256, 257, 2047, 2048, 2049, 4096, 9001)
GUARD = 64
"""Bytes around an output that must stay as they are."""


def numbers(seed: int, numel: int) -> np.ndarray:
    """Random numbers of many magnitudes, with runs of equal ones and of zeros."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(numel) * 10.0 ** rng.integers(-8, 4, numel)).astype(np.float32)
    values[rng.random(numel) < 0.1] = 0.25
    values[rng.random(numel) < 0.1] = -0.25
    begin = int(rng.integers(0, numel + 1))
    values[begin : begin + 300] = 0.0
    return values


def special(numel: int) -> np.ndarray:
    """Zeros of both signs, subnormals, the ends of the ranges of all formats, and what is not finite."""
    tiny = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 6e-8, -6.1e-5]
    large = [65504, 65519, 65520, -7e4, 3.38e38, -3.4e38, np.inf, -np.inf, np.nan]
    halfway = [1.9921875, 1.9921876, 127.5, -127.4, 2049, 1 + 2**-9, 1 + 3 * 2**-9]
    edges = np.array([*tiny, *large, *halfway], np.float32)
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    values[::7] = np.resize(edges, values[::7].size)
    return values


def near_the_end(numel: int) -> np.ndarray:
    """Magnitudes that int8 cuts: its elements would reach infinity."""
    rng = np.random.default_rng(numel)
    signs = rng.choice(np.array([1, -1], np.float32), numel)
    return (signs * np.finfo(np.float32).max * rng.uniform(0.98, 1.0, numel)).astype(np.float32)


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bits, where any NaN equals any other."""
    nan = np.isnan(want)
    bits = got.view(np.uint32)[~nan], want.view(np.uint32)[~nan]
    return bool(np.array_equal(np.isnan(got), nan) and np.array_equal(*bits))


def same_payload(codec: Codec, got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bytes, where any NaN equals any other."""
    if codec is Codec.PACKED:
        floats = [np.resize(each, each.size // 4 * 4).view(np.float32) for each in (got, want)]
        return got.size == want.size and same_bits(*floats)
    if codec in (Codec.NONE, Codec.FP32):
        return same_bits(got.view(np.float32), want.view(np.float32))
    if codec is Codec.FP16:
        got, want = got.view(np.float16), want.view(np.float16)
        return bool(np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got), np.signbit(want)))
    if codec is Codec.BF16:
        got, want = (each.view(np.uint16).astype(np.uint32) << np.uint32(16) for each in (got, want))
        return same_bits(got.view(np.float32), want.view(np.float32))
    return bool(np.array_equal(got, want))


def keep_of(codec: Codec, numel: int, frac: float = 0.03) -> int:
    return CodecSpec(codec=codec, keep_frac=frac).keep(numel) if codec is Codec.TOPK else 0


def room_of(codec: Codec, numel: int, keep: int) -> int:
    """Bytes of the largest payload."""
    frac = min(1.0, (keep + 1) / max(1, numel)) if codec is Codec.TOPK else 0.0
    return CodecSpec(codec=codec, keep_frac=frac).wire_bytes(numel)


def encode_both(rig: Rig, codec: Codec, x: np.ndarray, residual: np.ndarray | None, *, keep: int, offset: int = 0):
    """Payload, residual and count of the CPU and of the device; checks that the device writes nowhere else."""
    room = room_of(codec, x.size, keep)
    expected = np.zeros(room, np.uint8)
    left = None if residual is None else residual.copy()
    num_bytes, num_not_finite = native.encode(codec, x, expected, residual=left, keep=keep)
    whole = rig.to_device(np.full(offset + room + 2 * GUARD, 0xA5, np.uint8))
    out = whole[GUARD + offset : GUARD + offset + room]
    owed = None if residual is None else rig.to_device(residual)
    got_bytes, got_not_finite = rig.codecs.encode(codec, rig.to_device(x), out, residual=owed, keep=keep)
    assert (got_bytes, got_not_finite) == (num_bytes, num_not_finite)
    host = rig.to_host(whole)
    begin = GUARD + offset
    assert (host[:begin] == 0xA5).all() and (host[begin + num_bytes :] == 0xA5).all(), "wrote outside the payload"
    got_left = None if owed is None else rig.to_host(owed)
    return (host[begin : begin + num_bytes].copy(), got_left), (expected[:num_bytes], left)


def check_encode(rig: Rig, codec: Codec, x: np.ndarray, residual: np.ndarray | None, *, keep: int, offset: int = 0):
    (payload, left), (expected, expected_left) = encode_both(rig, codec, x, residual, keep=keep, offset=offset)
    assert same_payload(codec, payload, expected)
    assert residual is None or same_bits(left, expected_left)
    return expected


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_encode_has_the_bits_of_the_cpu(rig, codec, numel):
    for seed in range(3):
        x, residual = numbers(seed, numel), numbers(seed + 50, numel) * np.float32(0.1)
        for owed in (None, residual):
            check_encode(rig, codec, x, owed, keep=keep_of(codec, numel))


@pytest.mark.parametrize("codec", CODECS)
def test_encode_of_special_values(rig, codec):
    for numel in (23, 700, 5000):
        x = special(numel)
        keep = keep_of(codec, numel, 0.5)
        check_encode(rig, codec, x, None, keep=keep)
        check_encode(rig, codec, x, np.roll(special(numel), 3), keep=keep)
        check_encode(rig, codec, near_the_end(numel), numbers(2, numel), keep=keep)
        check_encode(rig, codec, np.zeros(numel, np.float32), np.zeros(numel, np.float32), keep=keep)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_payloads_stand_at_any_address(rig, codec, offset):
    x = numbers(offset, 1030)
    payload = check_encode(rig, codec, x, None, keep=keep_of(codec, x.size), offset=offset)
    room = np.zeros(payload.size + 32, np.uint8)
    begin = -room.ctypes.data % 16 + offset
    room[begin : begin + payload.size] = payload
    acc, expected = numbers(9, x.size), numbers(9, x.size)
    native.decode_accumulate(expected, [payload], [codec], [0.7])
    device = rig.to_device(acc)
    rig.codecs.decode_accumulate(device, [rig.to_device(room[begin : begin + payload.size])], [codec], [0.7])
    assert same_bits(rig.to_host(device), expected)


@pytest.mark.parametrize("keep", [1, 2, 49, 50, 51, 200, 999, 1000])
def test_topk_of_ties_takes_the_first(rig, keep):
    rng = np.random.default_rng(keep)
    few = rng.choice(np.array([0, 0.5, -0.5, 3, 2**-30, np.inf], np.float32), 1000)
    check_encode(rig, Codec.TOPK, few, np.zeros(1000, np.float32), keep=keep)
    check_encode(rig, Codec.TOPK, np.full(1000, -2.5, np.float32), None, keep=keep)
    check_encode(rig, Codec.TOPK, np.full(1000, np.nan, np.float32), np.ones(1000, np.float32), keep=keep)


def test_topk_gaps_of_every_length(rig):
    numel = 1 << 20 if rig.name == "shim" else (1 << 28) + 20_500  # gaps of up to 3 bytes, of up to 5
    x = np.zeros(numel, np.float32)
    x[[5, 6, 134, 135 + 127, 17_000, 20_000, numel - 1]] = [1, -2, 3, 4, -5, 6, 1e-3]
    x[20_001:20_200:2] = 0.5
    check_encode(rig, Codec.TOPK, x, None, keep=107)


def payloads_of(codecs: list[Codec], numel: int, seed: int) -> list[np.ndarray]:
    """One payload of the CPU for each codec."""
    found = []
    for index, codec in enumerate(codecs):
        x, keep = numbers(seed + index // 2, numel), keep_of(codec, numel)
        out = np.zeros(room_of(codec, numel, keep), np.uint8)
        num_bytes, _ = native.encode(codec, x, out, keep=keep)
        found.append(out[:num_bytes].copy())
    return found


MIXES = [
    *([codec] for codec in CODECS),
    [Codec.INT8] * 5,
    [Codec.FP16, Codec.FP16, Codec.BF16, Codec.ONEBIT, Codec.FP32, Codec.INT8, Codec.INT8, Codec.NONE],
    [Codec.TOPK, Codec.TOPK, Codec.FP16],
    [Codec.INT8, Codec.INT8, Codec.TOPK, Codec.INT8, Codec.INT8],
    [Codec.PACKED, Codec.PACKED, Codec.TOPK, Codec.PACKED, Codec.FP16],
]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("codecs", MIXES, ids=lambda codecs: "-".join(codec.name.lower() for codec in codecs))
def test_sums_have_the_bits_of_the_cpu(rig, codecs, assign):
    for numel in (1, 255, 257, 2049, 5000):
        payloads = payloads_of(codecs, numel, seed=numel)
        for weights in ([1.0] * len(codecs), [0.5, 0.5, -1 / 3, -1 / 3, 0.0, 1e-30, 7, 7][: len(codecs)]):
            start = numbers(77, numel)
            expected = start.copy()
            native.decode_accumulate(expected, payloads, codecs, weights, assign=assign)
            acc = rig.to_device(start)
            device = [rig.to_device(payload) for payload in payloads]
            rig.codecs.decode_accumulate(acc, device, codecs, weights, assign=assign)
            assert same_bits(rig.to_host(acc), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_decode_gives_the_values(rig, codec):
    for numel in (0, 1, 300, 4097):
        (payload,) = payloads_of([codec], numel, seed=3)
        expected = np.full(numel, 9, np.float32)
        native.decode(codec, payload, expected)
        out = rig.to_device(np.full(numel, 9, np.float32))
        rig.codecs.decode(codec, rig.to_device(payload), out)
        assert same_bits(rig.to_host(out), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_random_bytes_are_refused_or_decoded_as_on_the_cpu(rig, codec):
    rng = np.random.default_rng(11)
    numel = 600
    (sound,) = payloads_of([codec], numel, seed=1)  # packed: two bitmaps and a block as it is
    refused = decoded = 0
    for _ in range(60):
        payload = sound.copy()
        if codec not in (Codec.TOPK, Codec.PACKED):
            payload[:] = rng.integers(0, 256, payload.size)
        elif codec is Codec.PACKED and rng.random() < 0.4:
            payload[rng.integers(0, 3 + 32)] ^= 1 << rng.integers(0, 8)
        elif rng.random() < 0.7:
            payload[rng.integers(0, payload.size, rng.integers(1, 4))] = rng.integers(0, 256)
        else:
            payload = payload[: rng.integers(0, payload.size)]
        expected, acc = numbers(1, numel), rig.to_device(numbers(1, numel))
        try:
            native.decode_accumulate(expected, [payload], [codec], [0.5])
        except ValueError:
            refused += 1
            message = rf"cannot decode_accumulate payloads\[0\]: {codec.name.lower()} payload of "
            with pytest.raises(ValueError, match=message):
                rig.codecs.decode_accumulate(acc, [rig.to_device(payload)], [codec], [0.5])
        else:
            decoded += 1
            rig.codecs.decode_accumulate(acc, [rig.to_device(payload)], [codec], [0.5])
        assert same_bits(rig.to_host(acc), expected)
    assert (refused > 20 and decoded > 5) if codec in (Codec.TOPK, Codec.PACKED) else refused == 0


def header(count: int, gap_bytes: int, exponent: int, last: int = 0) -> bytes:
    return np.array([count, gap_bytes, exponent, last], dtype=np.int64).astype("<u4").tobytes()


TOPK_FAULTS = [
    (b"", "topk payload of 0 bytes, need at least 16 for its header"),
    (b"123456789012345", "topk payload of 15 bytes, need at least 16 for its header"),
    (header(0, 0, 0, 7), "is damaged: its last header word is 7, need 0"),
    (header(0, 0, 113), "is damaged: exponent 113, need -126 to 112"),
    (header(0, 0, -127), "is damaged: exponent -127, need -126 to 112"),
    (header(11, 0, 0), "is damaged: 11 values, need at most 10"),
    (header(1, 1, 0) + b"\x00", "topk payload of 17 bytes, need 19 for 1 values in 1 gap bytes"),
    (header(1, 1, 0) + b"\x0a\x00\x3c", "is damaged: its 1 gap bytes are not 1 gaps in 10 elements"),
    (header(2, 2, 0) + b"\x05\x04\x00\x3c\x00\x3c", "is damaged: its 2 gap bytes are not 2 gaps in 10 elements"),
    (header(1, 2, 0) + b"\x00\x00\x00\x3c", "is damaged: its 2 gap bytes are not 1 gaps in 10 elements"),
    (header(1, 1, 0) + b"\x80\x00\x3c", "is damaged: its 1 gap bytes are not 1 gaps in 10 elements"),
    (header(1, 6, 0) + b"\x80\x80\x80\x80\x80\x00\x00\x3c", "its 6 gap bytes are not 1 gaps in 10 elements"),
    (header(1, 5, 0) + b"\xff\xff\xff\xff\x7f\x00\x3c", "its 5 gap bytes are not 1 gaps in 10 elements"),
]


@pytest.mark.parametrize(("payload", "message"), TOPK_FAULTS)
def test_damaged_topk_payloads_are_refused_before_any_effect(rig, payload, message):
    damaged, start = np.frombuffer(payload, np.uint8), np.arange(10, dtype=np.float32)
    with pytest.raises(ValueError, match="topk payload"):
        native.decode_accumulate(start.copy(), [damaged], [Codec.TOPK], [1.0])
    acc = rig.to_device(start)
    sound = rig.to_device(np.ones(10, np.float32).view(np.uint8))
    with pytest.raises(ValueError) as error:
        rig.codecs.decode_accumulate(acc, [sound, rig.to_device(damaged)], [Codec.FP32, Codec.TOPK], [1.0, 1.0])
    assert str(error.value).startswith("cannot decode_accumulate payloads[1]: topk payload")
    assert message in str(error.value)
    assert np.array_equal(rig.to_host(acc), start)


def bitmap(*elements: int) -> bytes:
    return sum(1 << element for element in elements).to_bytes(32, "little")


# of 266 elements: a block of 256 and one of 10
PACKED_FAULTS = [
    (b"\0", "packed payload of 1 bytes, need at least 2 for the counts of 266 elements"),
    (b"\xf8\xf8", "is damaged: count 248 of block 0, need 0 to 247 or 255"),
    (b"\0\x02", "is damaged: count 2 of block 1, need 0 to 1 or 255"),
    (b"\0\0\0", "packed payload of 3 bytes, need 2 for 266 elements"),
    (b"\0\xff" + bytes(36), "packed payload of 38 bytes, need 42 for 266 elements"),
    (b"\x02\x01" + bitmap(7) + bytes(8) + bitmap() + bytes(4), "block 0 does not mark as many elements as its count"),
    (b"\0\x01" + bitmap(7, 8) + bytes(4), "block 1 does not mark as many elements as its count says"),
    (b"\0\x01" + bitmap(10) + bytes(4), "block 1 does not mark as many elements as its count says"),
    (b"\0\x01" + bitmap(255) + bytes(4), "block 1 does not mark as many elements as its count says"),
]


@pytest.mark.parametrize(("payload", "message"), PACKED_FAULTS)
def test_damaged_packed_payloads_are_refused_before_any_effect(rig, payload, message):
    damaged, start = np.frombuffer(payload, np.uint8), np.arange(266, dtype=np.float32)
    with pytest.raises(ValueError, match="packed payload"):
        native.decode_accumulate(start.copy(), [damaged], [Codec.PACKED], [1.0])
    acc = rig.to_device(start)
    sound = rig.to_device(np.ones(266, np.float32).view(np.uint8))
    with pytest.raises(ValueError) as error:
        rig.codecs.decode_accumulate(acc, [sound, rig.to_device(damaged)], [Codec.FP32, Codec.PACKED], [1.0, 1.0])
    assert str(error.value).startswith("cannot decode_accumulate payloads[1]: packed payload")
    assert message in str(error.value)
    assert np.array_equal(rig.to_host(acc), start)


def test_packed_blocks_of_every_density(rig):
    """Around 247 of 256, from which on a block is sent as it is; and a last block too short for a bitmap."""
    rng, numel = np.random.default_rng(8), 12 * 256 + 8
    x = rng.standard_normal(numel).astype(np.float32)
    for block, count in enumerate((0, 1, 8, 128, 246, 247, 248, 249, 255, 256, 0, 32)):
        x[256 * block : 256 * (block + 1)][rng.permutation(256)[count:]] = 0
    payload = check_encode(rig, Codec.PACKED, x, None, keep=0)
    assert payload[:13].tolist() == [0, 1, 8, 128, 246, 247, 255, 255, 255, 255, 0, 32, 255]
    check_encode(rig, Codec.PACKED, x, np.zeros_like(x), keep=0)
    check_encode(rig, Codec.PACKED, x, x[::-1].copy(), keep=0)
    for assign in (False, True):
        acc, expected = rig.to_device(numbers(5, numel)), numbers(5, numel)
        native.decode_accumulate(expected, [payload], [Codec.PACKED], [-0.3], assign=assign)
        rig.codecs.decode_accumulate(acc, [rig.to_device(payload)], [Codec.PACKED], [-0.3], assign=assign)
        assert same_bits(rig.to_host(acc), expected)


def test_wrong_arguments_are_refused(rig):
    put, codecs = rig.to_device, rig.codecs
    x, out = put(np.zeros(300, np.float32)), put(np.zeros(3000, np.uint8))
    wide = put(np.zeros(300, np.float64))
    with pytest.raises(ValueError, match=r"^cannot encode: unknown codec 8, need 0 to 7; correct it$"):
        codecs.encode(8, x, out)
    with pytest.raises(TypeError, match=r"^cannot encode x: dtype float64, need float32; convert it, or use the host$"):
        codecs.encode(Codec.NONE, wide, out)
    with pytest.raises(ValueError, match=r"^cannot encode residual: 299 elements, x has 300; pass as many$"):
        codecs.encode(Codec.FP16, x, out, residual=x[:299])
    with pytest.raises(ValueError, match=r"^cannot encode out: 301 bytes, need 302 for int8; make it larger$"):
        codecs.encode(Codec.INT8, x, out[:301])
    with pytest.raises(ValueError, match=r"^cannot encode x as topk: keep is 301, need 1 to 300; correct it$"):
        codecs.encode(Codec.TOPK, x, out, keep=301)
    with pytest.raises(ValueError, match=r"^cannot decode payload: fp16 payload of 9 bytes, need 600 for 300 elements"):
        codecs.decode(Codec.FP16, out[:9], x)
    with pytest.raises(ValueError, match=r"^cannot decode_accumulate payloads: 1 payloads, 2 codecs and 1 weights"):
        codecs.decode_accumulate(x, [out[:600]], [2, 2], [1.0])
    with pytest.raises(TypeError, match=r"^cannot decode_accumulate payloads\[0\]: dtype float32, need uint8"):
        codecs.decode_accumulate(x, [x], [Codec.FP32], [1.0])


def test_an_encoding_can_be_waited_for_later(rig):
    x = numbers(4, 3000)
    out = rig.to_device(np.zeros(6000, np.uint8)), rig.to_device(np.zeros(20000, np.uint8))
    device = rig.to_device(x)
    under_way = [
        rig.codecs.begin(Codec.FP16, device, out[0]),
        rig.codecs.begin(Codec.TOPK, device, out[1], keep=30),
    ]
    expected = np.zeros(20000, np.uint8)
    assert under_way[0].wait() == (6000, 0)
    assert under_way[1].wait() == native.encode(Codec.TOPK, x, expected, keep=30)
    num_bytes = under_way[1].wait()[0]
    assert np.array_equal(rig.to_host(out[1])[:num_bytes], expected[:num_bytes])
