"""The checksum: one definition, three ways to compute it, and the damage it must find."""

from __future__ import annotations

import numpy as np
import pytest

from hpcps import _native_reference, native

BUILT = pytest.param(
    native.checksum,
    id="built",
    marks=pytest.mark.skipif(not native.available(), reason=native.why_not() or "built kernels are there"),
)
REFERENCE = pytest.param(_native_reference.checksum, id="numpy")


@pytest.fixture(params=[BUILT, REFERENCE])
def checksum(request):
    return request.param


def by_definition(data: bytes) -> int:
    """The definition in ext/checksum.cpp, word by word in Python integers."""
    mask = 2**64 - 1
    total = 0xC0AC29B7C97C50DD
    for block, begin in enumerate(range(0, len(data), 16)):
        words = data[begin : begin + 16].ljust(16, b"\0")
        even = int.from_bytes(words[:8], "little") ^ ((0x243F6A8885A308D3 + block * 0x13198A2E03707345) & mask)
        odd = int.from_bytes(words[8:], "little") ^ ((0xA4093822299F31D1 + block * 0x082EFA98EC4E6C89) & mask)
        product = even * odd
        total += (product >> 64) ^ (product & mask)
    total = (total & mask) ^ (len(data) * 0x452821E638D01377 & mask)
    total ^= total >> 32
    total = total * 0xBE5466CF34E90C6D & mask
    total ^= total >> 29
    total = total * 0x452821E638D01377 & mask
    total ^= total >> 32
    return total & (2**63 - 1)


def random_bytes(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


@pytest.mark.parametrize("length", [*range(70), 1000, 16 * 16384 - 1, 16 * 16384, 16 * 16384 + 17, 300_001])
def test_every_length_follows_the_definition(checksum, length):
    data = random_bytes(length, length)
    assert checksum(data) == by_definition(data.tobytes())


VALUES = [
    (b"", 3830158927760372963),
    (b"\0", 1941300250572649631),
    (b"a", 2963375300651467526),
    (bytes(16), 7734522865704888628),
    (bytes(range(256)), 999908273987048533),
]


@pytest.mark.parametrize(("data", "want"), VALUES)
def test_known_values_stay(checksum, data, want):
    """Written out, so that a change of the algorithm, which breaks mixed versions, cannot go unseen."""
    assert checksum(np.frombuffer(data, dtype=np.uint8)) == want


def test_any_alignment_gives_the_same_value(checksum):
    data = random_bytes(1, 1000)
    want = checksum(data)
    for shift in range(1, 17):
        moved = np.zeros(1000 + shift, dtype=np.uint8)
        moved[shift:] = data
        assert checksum(moved[shift:]) == want


def test_every_single_flipped_bit_is_found(checksum):
    data = random_bytes(2, 100)
    values = {checksum(data)}
    for bit in range(800):
        damaged = data.copy()
        damaged[bit // 8] ^= 1 << (bit % 8)
        values.add(checksum(damaged))
    assert len(values) == 801


@pytest.mark.parametrize("bit", [0, 31, 62, 63])
def test_the_same_bit_flipped_in_any_two_words_is_found(bit):
    """Also in constant data, where a weak sum would let the two changes cancel."""
    for fill in (0.0, 1.0):
        data = np.full(64, fill, dtype=np.float64)
        values = set()
        for first in range(64):
            for second in range(first + 1, 64):
                words = data.view(np.uint64).copy()
                words[[first, second]] ^= np.uint64(1 << bit)
                values.add(native.checksum(words.view(np.uint8)))
        assert len(values) == 64 * 63 // 2


def test_swapped_words_and_blocks_are_found(checksum):
    words = np.random.default_rng(3).integers(0, 2**63, 32, dtype=np.int64)
    values = {checksum(words.view(np.uint8))}
    for first in range(32):
        for second in range(first + 1, 32):
            swapped = words.copy()
            swapped[[first, second]] = words[[second, first]]
            values.add(checksum(swapped.view(np.uint8)))
    assert len(values) == 1 + 32 * 31 // 2


def test_zero_payloads_of_different_lengths_differ(checksum):
    assert len({checksum(np.zeros(length, dtype=np.uint8)) for length in range(300)}) == 300


def test_a_changed_bit_changes_half_of_the_value(checksum):
    data = random_bytes(4, 64)
    want = checksum(data)
    changed = []
    for bit in range(512):
        damaged = data.copy()
        damaged[bit // 8] ^= 1 << (bit % 8)
        changed.append((checksum(damaged) ^ want).bit_count())
    assert 30 < np.mean(changed) < 33
    assert min(changed) >= 12


def test_values_fit_a_signed_field(checksum):
    values = [checksum(random_bytes(seed, 40)) for seed in range(200)]
    assert 0 <= min(values) and max(values) < 2**63
    assert max(values) > 2**62


def test_wrong_arrays_are_refused(checksum):
    with pytest.raises(TypeError, match="cannot checksum data: dtype float32, need uint8; view it as uint8"):
        checksum(np.zeros(4, dtype=np.float32))
    with pytest.raises(TypeError, match="cannot checksum data: its elements are not contiguous"):
        checksum(np.zeros(8, dtype=np.uint8)[::2])
    with pytest.raises(TypeError, match="cannot checksum data: 2 dimensions, need 1; flatten it first"):
        checksum(np.zeros((2, 4), dtype=np.uint8))
