"""Payloads that are no encoding: each is refused with its reason, or holds what it says; nothing else is touched."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from codec_cases import CODECS, decode, encode, values

from hpcps.plan import Codec, CodecSpec

NUMEL = 1000


def number(text: str) -> int:
    return int(CodecSpec.parse(text).codec)


def as_bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def refusal(codecs, codec: int, payload: np.ndarray, numel: int) -> str:
    """What decode says of a payload that it must refuse; checks that nothing was written."""
    out = np.full(numel, 7, dtype=np.float32)
    with pytest.raises(ValueError) as caught:
        codecs.decode(codec, payload, out)
    assert (out == 7).all()
    return str(caught.value)


def is_accepted(codecs, codec: int, payload: np.ndarray, numel: int) -> bool:
    """Whether the payload is decoded; one that is refused must leave the output as it was, in either call."""
    out = np.full(numel, 7, dtype=np.float32)
    acc = out.copy()
    good = encode(codecs, "fp16", values("normal", numel))[0]
    try:
        codecs.decode(codec, payload, out)
    except ValueError:
        assert (out == 7).all()
        with pytest.raises(ValueError, match=r"payloads\[1\]"):
            codecs.decode_accumulate(acc, [good, payload], [2, codec], [1.0, 1.0], assign=True)
        assert (acc == 7).all()
        return False
    codecs.decode_accumulate(acc, [payload], [codec], [1.0], assign=True)
    assert np.array_equal(acc, out, equal_nan=True)
    return True


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("change", [-NUMEL, -8, -4, -2, -1, 1, 2, 4, 8, NUMEL])
def test_a_payload_of_another_length_is_refused(codecs, text, change):
    payload = encode(codecs, text, values("normal", NUMEL))[0]
    wrong = np.resize(payload, max(0, payload.size + change))
    assert not is_accepted(codecs, number(text), wrong, NUMEL)


@pytest.mark.parametrize("text", CODECS)
def test_an_empty_payload_is_refused_and_an_empty_array_takes_only_its_own(codecs, text):
    empty = np.zeros(0, dtype=np.uint8)
    assert not is_accepted(codecs, number(text), empty, NUMEL)
    assert is_accepted(codecs, number(text), encode(codecs, text, np.zeros(0, np.float32))[0], 0)
    assert not is_accepted(codecs, number(text), np.zeros(17, dtype=np.uint8), 0)


LENGTHS = {
    "none": "none payload of 11 bytes, need 20 for 5 elements",
    "fp32": "fp32 payload of 11 bytes, need 20 for 5 elements",
    "fp16": "fp16 payload of 11 bytes, need 10 for 5 elements",
    "bf16": "bf16 payload of 11 bytes, need 10 for 5 elements",
    "int8": "int8 payload of 11 bytes, need 6 for 5 elements",
    "onebit": "onebit payload of 11 bytes, need 5 for 5 elements",
    "topk": "topk payload of 11 bytes, need at least 16 for its header",
    "packed": "packed payload of 11 bytes, need 1 for 5 elements",
}


@pytest.mark.parametrize("text", LENGTHS)
def test_the_message_says_what_was_got_and_what_is_needed(codecs, text):
    payload = np.zeros(11, dtype=np.uint8)
    assert LENGTHS[text] in refusal(codecs, number(text), payload, 5)
    good = encode(codecs, "fp16", np.ones(5, np.float32))[0]
    acc = np.ones(5, dtype=np.float32)
    with pytest.raises(ValueError) as caught:
        codecs.decode_accumulate(acc, [good, good, payload], [2, 2, number(text)], [1.0, 1.0, 1.0])
    assert LENGTHS[text] in str(caught.value)
    assert "payloads[2]" in str(caught.value)
    assert (acc == 1).all()


def topk(count: int, gaps: bytes, *, gap_bytes: int | None = None, exponent: int = 0, last: int = 0) -> np.ndarray:
    """A payload with these words in its header and a 1 for each element."""
    header = struct.pack("<2IiI", count, len(gaps) if gap_bytes is None else gap_bytes, exponent, last)
    return as_bytes(header + gaps + struct.pack("<e", 1) * min(count, 100))


DAMAGED = {
    "last word": (topk(1, b"\x05", last=1), "its last header word is 1, need 0"),
    "exponent too small": (topk(1, b"\x05", exponent=-127), "exponent -127, need -126 to 112"),
    "exponent too large": (topk(1, b"\x05", exponent=113), "exponent 113, need -126 to 112"),
    "too many values": (topk(51, b"\0" * 51), "51 values, need at most 50"),
    "a huge number of values": (topk(2**32 - 1, b"\0"), "4294967295 values, need at most 50"),
    "gap bytes beyond": (topk(1, b"\x05", gap_bytes=2), "need 20 for 1 values in 2 gap bytes"),
    "huge gap bytes": (topk(1, b"\x05", gap_bytes=2**32 - 1), "need 4294967313 for 1 values in 4294967295 gap bytes"),
    "fewer gaps than values": (topk(2, b"\x05"), "its 1 gap bytes are not 2 gaps"),
    "more gaps than values": (topk(1, b"\x05\x05"), "its 2 gap bytes are not 1 gaps"),
    "gaps without values": (topk(0, b"\x05"), "its 1 gap bytes are not 0 gaps"),
    "a gap cut off": (topk(1, b"\x85"), "its 1 gap bytes are not 1 gaps"),
    "the second gap cut off": (topk(2, b"\x05\x85"), "its 2 gap bytes are not 2 gaps"),
    "a gap of six digits": (topk(1, b"\x80\x80\x80\x80\x80\x00"), "its 6 gap bytes are not 1 gaps"),
    "the first beyond the end": (topk(1, b"\x32"), "element 50, need at most 49"),
    "the last beyond the end": (topk(2, b"\x30\x01"), "element 50, need at most 49"),
    "far beyond the end": (topk(1, b"\xff\xff\xff\xff\x7f"), "element 34359738367, need at most 49"),
    "beyond before cut off": (topk(2, b"\x32\x80"), "element 50, need at most 49"),
    "cut off after too many": (topk(3, b"\x00\x00\x80"), "its 3 gap bytes are not 3 gaps"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_topk_payload_is_refused_with_the_reason(codecs, case):
    payload, reason = DAMAGED[case]
    message = refusal(codecs, int(Codec.TOPK), payload, 50)
    assert f"topk payload of {payload.size} bytes" in message
    assert reason in message
    assert not is_accepted(codecs, int(Codec.TOPK), payload, 50)


def packed(counts: bytes, *blocks: bytes, num_values: int = 0) -> np.ndarray:
    """A payload with these counts and bitmaps, and a 1 for each value."""
    return as_bytes(counts + b"".join(blocks) + struct.pack("<f", 1) * num_values)


def bitmap(*elements: int) -> bytes:
    return sum(1 << element for element in elements).to_bytes(32, "little")


# of 266 elements: a block of 256 and one of 10
DAMAGED_PACKED = {
    "no counts": (packed(b"\0"), "need at least 2 for the counts of 266 elements"),
    "count of no encoder": (packed(b"\xf8\0"), "count 248 of block 0, need 0 to 247 or 255"),
    "largest of them": (packed(b"\xfe\0"), "count 254 of block 0, need 0 to 247 or 255"),
    "too large for a short block": (packed(b"\0\x02"), "count 2 of block 1, need 0 to 1 or 255"),
    "too short": (
        packed(b"\x02\0", bitmap(1, 2), num_values=1),
        "packed payload of 38 bytes, need 42 for 266 elements",
    ),
    "too long": (packed(b"\0\0", b"\0"), "packed payload of 3 bytes, need 2 for 266 elements"),
    "raw cut off": (packed(b"\0\xff", num_values=9), "packed payload of 38 bytes, need 42 for 266 elements"),
    "fewer marks": (packed(b"\x02\0", bitmap(7), num_values=2), "block 0 marks 1 elements, need 2"),
    "more marks": (packed(b"\0\x01", bitmap(7, 8), num_values=1), "block 1 marks 2 elements, need 1"),
    "no marks": (packed(b"\x01\0", bitmap(), num_values=1), "block 0 marks 0 elements, need 1"),
    "a mark beyond": (packed(b"\0\x01", bitmap(10), num_values=1), "block 1 marks elements beyond its 10"),
    "the last mark": (packed(b"\0\x01", bitmap(255), num_values=1), "block 1 marks elements beyond its 10"),
    "a mark beyond before too many": (packed(b"\0\x01", bitmap(1, 64), num_values=1), "elements beyond its 10"),
    "the first fault": (
        packed(b"\x01\x01", bitmap(1, 2), struct.pack("<f", 1), bitmap(), num_values=1),
        "block 0 marks 2 elements, need 1",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_PACKED)
def test_a_damaged_packed_payload_is_refused_with_the_reason(codecs, case):
    payload, reason = DAMAGED_PACKED[case]
    message = refusal(codecs, int(Codec.PACKED), payload, 266)
    assert f"packed payload of {payload.size} bytes" in message
    assert reason in message
    assert not is_accepted(codecs, int(Codec.PACKED), payload, 266)


def test_what_is_at_the_limits_of_packed_is_accepted(codecs):
    def elements(payload: np.ndarray) -> list[int]:
        assert is_accepted(codecs, int(Codec.PACKED), payload, 266)
        return np.flatnonzero(decode(codecs, "packed", payload, 266)).tolist()

    assert elements(packed(b"\0\0")) == []
    assert elements(packed(b"\0\x01", bitmap(9), num_values=1)) == [265]
    assert elements(packed(b"\x01\0", bitmap(255), num_values=1)) == [255]
    assert elements(packed(b"\xf7\0", bitmap(*range(9, 256)), num_values=247)) == list(range(9, 256))
    assert elements(packed(b"\xff\xff", num_values=266)) == list(range(266))


def test_what_is_at_the_limits_of_topk_is_accepted(codecs):
    def elements(payload: np.ndarray) -> dict[int, float]:
        out = decode(codecs, "topk", payload, 50)
        return {int(at): float(out[at]) for at in np.flatnonzero(out)}

    assert elements(topk(0, b"")) == {}
    assert elements(topk(1, b"\x31")) == {49: 1.0}
    assert elements(topk(50, b"\0" * 50)) == dict.fromkeys(range(50), 1.0)
    assert elements(topk(1, b"\x05", exponent=112)) == {5: 2.0**112}
    assert elements(topk(1, b"\x05", exponent=-126)) == {5: 2.0**-126}


def test_every_gap_at_the_end_of_its_digits_is_read(codecs):
    numel = 2_100_000
    for gap, digits in ((127, b"\x7f"), (128, b"\x80\x01"), (16_383, b"\xff\x7f"), (2_097_151, b"\xff\xff\x7f")):
        assert np.flatnonzero(decode(codecs, "topk", topk(1, digits), numel)).tolist() == [gap]


def test_random_bytes_never_do_harm(codecs):
    """With and without a header that fits; acc stands between two guards that must not change."""
    rng = np.random.default_rng(11)
    numel, accepted = 40, 0
    guarded = np.full(numel + 64, 7, dtype=np.float32)
    acc = guarded[32:-32]
    for _ in range(3000):
        codec = int(rng.integers(0, 8))
        length = int(rng.integers(0, 120))
        payload = rng.integers(0, 256, length, dtype=np.uint8)
        if length >= 16 and rng.random() < 0.8:
            count = (length - 16) // 3
            payload[16:] &= int(rng.choice([0x01, 0x03, 0x87]))
            payload[:16] = as_bytes(struct.pack("<4i", count, max(0, length - 16 - 2 * count), 3, 0))
        acc[:] = 7
        try:
            codecs.decode_accumulate(acc, [payload], [codec], [0.5])
            accepted += codec == Codec.TOPK
        except ValueError:
            assert (acc == 7).all()
    assert accepted > 20
    assert (guarded[:32] == 7).all()
    assert (guarded[-32:] == 7).all()


@pytest.mark.parametrize("text", ["int8", "onebit", "topk:0.05", "packed"])
def test_flipped_bits_are_refused_or_decoded(codecs, text):
    """A flip that keeps the form is another payload; it must not be refused by one call and taken by the other."""
    rng = np.random.default_rng(12)
    payload = encode(codecs, text, values("half_zeros", NUMEL) if text == "packed" else values("normal", NUMEL))[0]
    outcomes = set()
    for _ in range(400):
        damaged = payload.copy()
        for bit in rng.integers(0, min(8 * payload.size, 3000), rng.integers(1, 4)).tolist():
            damaged[bit // 8] ^= 1 << (bit % 8)
        outcomes.add(is_accepted(codecs, number(text), damaged, NUMEL))
    assert outcomes == ({True, False} if text in ("topk:0.05", "packed") else {True})


@pytest.mark.parametrize("numel", [10, 256, 300, 700])
def test_every_implementation_refuses_the_same_packed_payloads(numel):
    from hpcps import _codec_reference, native

    if not native.available():
        pytest.skip(native.why_not())
    rng = np.random.default_rng(14)
    same = 0
    for attempt in range(600):
        payload = encode(native, "packed", values("half_zeros", numel, attempt))[0]
        num_bits = 8 * min(payload.size, int(rng.choice([2, 40, payload.size])))
        for bit in rng.integers(0, num_bits, rng.integers(0, 4)).tolist():
            payload[bit // 8] ^= 1 << (bit % 8)
        if rng.random() < 0.1:
            payload = np.resize(payload, max(0, payload.size + int(rng.integers(-5, 5))))
        results = []
        for kernels in (native, _codec_reference):
            out = np.full(numel, 7, dtype=np.float32)
            try:
                kernels.decode(int(Codec.PACKED), payload, out)
                results.append(out.tobytes())
            except ValueError as error:
                results.append(str(error))
        assert results[0] == results[1]
        same += isinstance(results[0], bytes)
    assert 100 < same < 580


@pytest.mark.parametrize("numel", [40, 300])
def test_every_implementation_refuses_the_same_payloads(numel):
    from hpcps import _codec_reference, native

    if not native.available():
        pytest.skip(native.why_not())
    rng = np.random.default_rng(13)
    same = 0
    for _ in range(2000):
        count = int(rng.integers(0, 20))
        gap_bytes = count + int(rng.integers(0, 4))
        gaps = rng.choice([0, 1, 3, 9, 0x80, 0x81, 0xFF], gap_bytes, p=[0.3, 0.3, 0.15, 0.1, 0.05, 0.05, 0.05])
        header = struct.pack("<4i", count, gap_bytes, int(rng.integers(-128, 115)), int(rng.random() < 0.02))
        payload = as_bytes(header + gaps.astype(np.uint8).tobytes() + rng.bytes(2 * count + int(rng.random() < 0.02)))
        results = []
        for kernels in (native, _codec_reference):
            out = np.full(numel, 7, dtype=np.float32)
            try:
                kernels.decode(int(Codec.TOPK), payload, out)
                results.append(np.nan_to_num(out).tobytes())
            except ValueError as error:
                results.append(str(error))
        assert results[0] == results[1]
        same += isinstance(results[0], bytes)
    assert 100 < same < 1900
