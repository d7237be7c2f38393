"""The dense codecs in numpy, one chunk of elements at a time; ``cuda_src/elements.h`` defines the formats.

A chunk begins at a whole number of blocks. Nothing is checked here: ``_codec_reference`` has done it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK",
    "Bytes",
    "ENCODERS",
    "Floats",
    "RealArray",
    "half_bits",
    "int8_scales",
    "num_blocks",
    "of_half",
    "read_int8",
    "read_term",
]

RealArray: TypeAlias = npt.NDArray[np.floating[Any]]
Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Bits: TypeAlias = npt.NDArray[np.uint32]

BLOCK = 256
"""Elements that share a scale (int8, onebit)."""
_LANES = 32
_NONE, _FP32, _FP16, _BF16, _INT8, _ONEBIT = range(6)
_INT8_LARGEST = 249
"""Largest scale byte: of blocks that reach beyond 63.5 * 2^122."""
_HALF_MAX = np.float32(65504)
_FLOAT_MAX = np.finfo(np.float32).max
_SIZE_BITS = np.uint32(0x7FFFFFFF)
_INFINITY_BITS = np.uint32(0x7F800000)
_NAN_BITS = np.uint32(0x7FC00000)
_BFLOAT_MAX_BITS = np.uint32(0x7F7F0000)


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _as_blocks(v: Floats) -> Floats:
    """The elements of a chunk in rows of a block; zeros fill the last row."""
    missing = -v.size % BLOCK
    return (np.concatenate([v, np.zeros(missing, np.float32)]) if missing else v).reshape(-1, BLOCK)


def _put(out: Bytes, begin: int, values: npt.NDArray[Any]) -> None:
    """Write values as bytes from ``begin`` on, at any alignment."""
    out[begin : begin + values.nbytes] = values.view(np.uint8)


def _get(payload: Bytes, begin: int, num: int, dtype: str) -> npt.NDArray[Any]:
    """Read ``num`` values from ``begin`` on, at any alignment."""
    return payload[begin : begin + num * np.dtype(dtype).itemsize].view(dtype)


# --- encode: each writes the part of one chunk and returns what the decoder will read there ---------------------------


def half_bits(v: Floats) -> npt.NDArray[np.uint16]:
    """The halves that are sent: nearest, ties to even; a finite value beyond the range is the largest half."""
    half = np.clip(v, -_HALF_MAX, _HALF_MAX).astype(np.float16).view(np.uint16)
    not_finite = ~np.isfinite(v)
    if not_finite.any():
        bits = v[not_finite].view(np.uint32)
        nan = (bits & _SIZE_BITS) > _INFINITY_BITS
        kept = np.where(nan, np.uint32(0x7E00) | ((bits >> np.uint32(13)) & np.uint32(0x3FF)), np.uint32(0x7C00))
        half[not_finite] = (kept | ((bits >> np.uint32(16)) & np.uint32(0x8000))).astype(np.uint16)
    return half


def of_half(half: npt.NDArray[np.uint16]) -> Floats:
    value = half.view(np.float16).astype(np.float32)
    nan = np.isnan(value)
    if nan.any():  # a processor makes NaNs quiet, numpy keeps them as they are
        value.view(np.uint32)[nan] |= np.uint32(0x00400000)
    return value


def _bfloat_bits(v: Floats) -> npt.NDArray[np.uint16]:
    bits = v.view(np.uint32)
    size = bits & _SIZE_BITS
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    bfloat = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    bfloat = np.where(size > _BFLOAT_MAX_BITS, np.uint32(0x7F7F) | sign, bfloat)
    if (size >= _INFINITY_BITS).any():
        kept = (bits >> np.uint32(16)) | np.where(size > _INFINITY_BITS, np.uint32(0x40), np.uint32(0))
        bfloat = np.where(size >= _INFINITY_BITS, kept, bfloat)
    return bfloat.astype(np.uint16)


def _of_bfloat(bfloat: npt.NDArray[np.uint16]) -> Floats:
    return (bfloat.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _scale_bytes(largest: Bits) -> npt.NDArray[np.uint8]:
    over = (largest & np.uint32(0x007FFFFF)) >= np.uint32(0x007F0000)
    byte = np.maximum((largest >> np.uint32(23)).astype(np.int32) - 6 + over, 1)
    byte = np.where(largest == 0, 0, np.where(largest >= _INFINITY_BITS, 255, byte))
    return byte.astype(np.uint8)


def int8_scales(byte: Bytes) -> Floats:
    bits = byte.astype(np.uint32) << np.uint32(23)
    return np.where(byte == 255, _NAN_BITS, bits).view(np.float32)


def _encode_int8(v: Floats, out: Bytes, begin: int, numel: int) -> Floats:
    blocks = _as_blocks(v)
    byte = _scale_bytes((blocks.view(np.uint32) & _SIZE_BITS).max(axis=1))
    inverse = ((np.uint32(254) - np.minimum(byte, 254).astype(np.uint32)) << np.uint32(23)).view(np.float32)
    inverse = np.where((byte == 0) | (byte == 255), np.float32(0), inverse)
    q = np.rint(blocks * inverse[:, None])
    q[byte == 255] = 0
    huge = byte == _INT8_LARGEST
    q[huge] = np.clip(q[huge], -63, 63)  # 64 times its scale would be infinite
    q = q.astype(np.int8)
    first = begin // BLOCK
    out[first : first + byte.size] = byte
    _put(out, num_blocks(numel) + begin, q.reshape(-1)[: v.size])
    decoded: Floats = q * int8_scales(byte)[:, None]
    return decoded.reshape(-1)[: v.size]


def _onebit_scales(blocks: Floats, numel: int) -> Floats:
    """Scales of blocks that hold ``numel`` elements in all; `hpcps_onebit_scale` gives the order of the sums."""
    sizes = np.abs(blocks)
    lanes = sizes[:, :_LANES].copy()
    for at in range(_LANES, BLOCK, _LANES):
        lanes += sizes[:, at : at + _LANES]
    half = _LANES // 2
    while half:
        lanes[:, :half] += lanes[:, half : 2 * half]
        half //= 2
    counts = np.full(blocks.shape[0], BLOCK, dtype=np.float32)
    counts[-1:] = numel - (blocks.shape[0] - 1) * BLOCK
    mean: Floats = np.divide(lanes[:, 0], counts, dtype=np.float32)
    mean[~np.isfinite(mean)] = _NAN_BITS.view(np.float32)
    return mean


def _encode_onebit(v: Floats, out: Bytes, begin: int, numel: int) -> Floats:
    blocks = _as_blocks(v)
    scale = _onebit_scales(blocks, v.size)
    minus = np.signbit(v) & np.repeat(np.isfinite(scale), BLOCK)[: v.size]
    _put(out, 4 * (begin // BLOCK), scale)
    _put(out, 4 * num_blocks(numel) + begin // 8, np.packbits(minus, bitorder="little"))
    return _signed(scale, minus)


def _signed(scale: Floats, minus: npt.NDArray[np.bool_] | Bytes) -> Floats:
    """Elements of onebit blocks: the scale of the block with the sign of the element."""
    sign = minus.astype(np.uint32) << np.uint32(31)
    return (np.repeat(scale.view(np.uint32), BLOCK)[: sign.size] ^ sign).view(np.float32)


def _encode_none(v: RealArray, out: Bytes, begin: int, numel: int) -> RealArray:
    _put(out, begin * v.itemsize, v)
    return v


def _encode_fp32(v: RealArray, out: Bytes, begin: int, numel: int) -> RealArray:
    sent = v.astype(np.float32)
    beyond = np.isinf(sent) & np.isfinite(v)
    sent[beyond] = np.copysign(_FLOAT_MAX, sent[beyond])
    _put(out, 4 * begin, sent)
    return sent.astype(v.dtype)


def _encode_fp16(v: Floats, out: Bytes, begin: int, numel: int) -> Floats:
    half = half_bits(v)
    _put(out, 2 * begin, half)
    return of_half(half)


def _encode_bf16(v: Floats, out: Bytes, begin: int, numel: int) -> Floats:
    bfloat = _bfloat_bits(v)
    _put(out, 2 * begin, bfloat)
    return _of_bfloat(bfloat)


ENCODERS: tuple[Callable[[Any, Bytes, int, int], Any], ...] = (
    _encode_none,
    _encode_fp32,
    _encode_fp16,
    _encode_bf16,
    _encode_int8,
    _encode_onebit,
)
"""By the codec's number: writes the part of one chunk and returns what a decoder will read there.

Arguments are the chunk, the whole payload, the chunk's first element and the number of elements in all.
"""


# --- decode -----------------------------------------------------------------------------------------------------------


def read_term(codec: int, payload: Bytes, begin: int, stop: int, numel: int, weight: Any) -> RealArray:
    """Weight times the decoded elements ``begin`` to ``stop`` of ``numel``, in the dtype of the weight; not int8."""
    num = stop - begin
    if codec == _ONEBIT:
        first = begin // BLOCK
        scale = _get(payload, 4 * first, num_blocks(stop) - first, "<f4")
        coded = payload[4 * num_blocks(numel) + begin // 8 :][: -(-num // 8)]
        return _signed(scale * weight, np.unpackbits(coded, count=num, bitorder="little"))
    if codec == _NONE:
        value: RealArray = _get(payload, begin * weight.itemsize, num, weight.dtype.str)
    elif codec == _FP32:
        value = _get(payload, 4 * begin, num, "<f4").astype(weight.dtype)
    elif codec == _FP16:
        value = of_half(_get(payload, 2 * begin, num, "<u2").astype(np.uint16))
    else:
        value = _of_bfloat(_get(payload, 2 * begin, num, "<u2").astype(np.uint16))
    term: RealArray = value * weight
    return term


def read_int8(payload: Bytes, begin: int, stop: int, numel: int) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """Scale bytes of the blocks of a chunk and their elements, one block a row; zeros fill the last row."""
    first, last = begin // BLOCK, num_blocks(stop)
    elements = np.zeros((last - first) * BLOCK, dtype=np.int32)
    elements[: stop - begin] = _get(payload, num_blocks(numel) + begin, stop - begin, "i1")
    return payload[first:last], elements.reshape(-1, BLOCK)
