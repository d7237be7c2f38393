"""The kernels of ``hpcps.native`` in numpy: same arguments, same checks, same bits as the built ones.

Stands in where the package was built without a compiler, and tells the tests what is right.
It refuses what the built kernels refuse, with the same exception types and messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcps._native_checks import RealArray, check_bytes, check_input, check_written

__all__ = ["accumulate", "assign", "checksum", "combine", "isa", "scale"]

Words: TypeAlias = npt.NDArray[np.uint64]

isa = "numpy"

_CHUNK_ELEMS = 1 << 14
"""Elements handled at a time, so that temporaries stay in the second-level cache (at most 128 KiB)."""

# Constants of the checksum; ext/checksum.cpp defines the algorithm and has the same ones.
_START = 0xC0AC29B7C97C50DD
_EVEN_START, _EVEN_STEP = 0x243F6A8885A308D3, 0x13198A2E03707345
_ODD_START, _ODD_STEP = 0xA4093822299F31D1, 0x082EFA98EC4E6C89
_MIX_LENGTH, _MIX_LAST = 0x452821E638D01377, 0xBE5466CF34E90C6D
_MASK_64 = (1 << 64) - 1
_BLOCK_BYTES = 16
_LOW_HALF, _HALF_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)


def accumulate(acc: RealArray, x: RealArray, weight: float) -> None:
    """Do ``acc += weight * x``."""
    check_written(acc, "accumulate acc")
    check_input(x, "accumulate x", acc)
    _accumulate(acc, x, weight)


def assign(out: RealArray, x: RealArray, weight: float) -> None:
    """Do ``out = weight * x``."""
    check_written(out, "assign out")
    check_input(x, "assign x", out)
    with np.errstate(all="ignore"):
        np.multiply(x, out.dtype.type(weight), out=out)


def combine(out: RealArray, xs: list[Any], weights: Sequence[float]) -> None:
    """Do ``out = weights[0] * xs[0] + weights[1] * xs[1] + ...``, added in this order."""
    check_written(out, "combine out")
    if not xs or len(xs) != len(weights):
        raise ValueError(
            f"cannot combine xs: {len(xs)} arrays and {len(weights)} weights, need as many of both and"
            " at least 1; correct the lists"
        )
    for index, x in enumerate(xs):
        check_input(x, f"combine xs[{index}]", out)
    with np.errstate(all="ignore"):
        np.multiply(xs[0], out.dtype.type(weights[0]), out=out)
    for x, weight in zip(xs[1:], weights[1:], strict=True):
        _accumulate(out, x, weight)


def scale(x: RealArray, weight: float) -> None:
    """Do ``x *= weight``."""
    check_written(x, "scale x")
    with np.errstate(all="ignore"):
        np.multiply(x, x.dtype.type(weight), out=x)


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """The 63-bit checksum of bytes."""
    check_bytes(data, "checksum data")
    num_blocks, num_tail = divmod(data.size, _BLOCK_BYTES)
    whole = data[: num_blocks * _BLOCK_BYTES].view("<u8")
    total = _START
    for begin in range(0, num_blocks, _CHUNK_ELEMS):
        total += _sum_blocks(whole[2 * begin : 2 * (begin + _CHUNK_ELEMS)], begin)
    if num_tail:
        tail = np.zeros(_BLOCK_BYTES, dtype=np.uint8)
        tail[:num_tail] = data[-num_tail:]
        total += _sum_blocks(tail.view("<u8"), num_blocks)
    return _finish(total & _MASK_64, data.size)


def _accumulate(acc: RealArray, x: RealArray, weight: float) -> None:
    product = np.empty(min(acc.size, _CHUNK_ELEMS), dtype=acc.dtype)
    with np.errstate(all="ignore"):
        factor = acc.dtype.type(weight)
        for begin in range(0, acc.size, _CHUNK_ELEMS):
            part = acc[begin : begin + _CHUNK_ELEMS]
            np.multiply(x[begin : begin + _CHUNK_ELEMS], factor, out=product[: part.size])
            part += product[: part.size]


def _sum_blocks(words: Words, first_block: int) -> int:
    """Sum of the terms of consecutive blocks, modulo 2^64."""
    index = np.arange(words.size // 2, dtype=np.uint64)
    even = words[0::2] ^ _keys(index, first_block, _EVEN_START, _EVEN_STEP)
    odd = words[1::2] ^ _keys(index, first_block, _ODD_START, _ODD_STEP)
    low = even * odd
    return int((low ^ _high_product(even, odd)).sum(dtype=np.uint64))


def _keys(index: Words, first_block: int, start: int, step: int) -> Words:
    keys: Words = index * np.uint64(step) + np.uint64((start + first_block * step) & _MASK_64)
    return keys


def _high_product(a: Words, b: Words) -> Words:
    """Upper 64 bits of the 128-bit products, from products of 32-bit halves that cannot overflow."""
    a_low, a_high = a & _LOW_HALF, a >> _HALF_BITS
    b_low, b_high = b & _LOW_HALF, b >> _HALF_BITS
    middle = a_high * b_low + ((a_low * b_low) >> _HALF_BITS)
    other = a_low * b_high + (middle & _LOW_HALF)
    high: Words = a_high * b_high + (middle >> _HALF_BITS) + (other >> _HALF_BITS)
    return high


def _finish(total: int, num_bytes: int) -> int:
    total ^= (num_bytes * _MIX_LENGTH) & _MASK_64
    total ^= total >> 32
    total = (total * _MIX_LAST) & _MASK_64
    total ^= total >> 29
    total = (total * _MIX_LENGTH) & _MASK_64
    total ^= total >> 32
    return total & (_MASK_64 >> 1)
