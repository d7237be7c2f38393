"""Packed in numpy: values without the zeros; ``cuda_src/elements.h`` defines the format.

| counts, one byte a block | blocks in order: nothing, | bitmap | values | or | values |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcps._codec_reference_dense import BLOCK, Bytes, Floats, num_blocks

__all__ = ["decode_packed", "encode_packed", "packed_fault"]

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_BITMAP_BYTES = 32
_RAW = 255
"""Count of a block that is sent as it is."""
_CHUNK_BLOCKS = 64
"""Blocks handled at a time, so that temporaries stay in the second-level cache."""
_IN_BITMAP = np.arange(_BITMAP_BYTES)


def encode_packed(x: Floats, out: Bytes, residual: Floats | None) -> tuple[int, int]:
    """Write the payload, leave the residual; returns bytes written and elements that are not finite."""
    at, num_not_finite = num_blocks(x.size), 0
    for first in range(0, num_blocks(x.size), _CHUNK_BLOCKS):
        part = slice(first * BLOCK, (first + _CHUNK_BLOCKS) * BLOCK)
        v = x[part] if residual is None else x[part] + residual[part]
        not_zero = _in_blocks(v.view(np.uint32) != 0)
        num_not_zero, lengths = not_zero.sum(axis=1), _lengths(v.size)
        counts = np.where(num_not_zero <= _most(lengths), num_not_zero, _RAW).astype(np.uint8)
        raw = counts == _RAW
        sent = (not_zero | raw[:, None]).reshape(-1)[: v.size]
        is_bitmap, at_bitmaps = _places(counts, lengths)
        coded = out[at : at + is_bitmap.size]
        coded[~is_bitmap] = v[sent].view(np.uint8)
        coded[at_bitmaps] = np.packbits(not_zero[(counts > 0) & ~raw], axis=1, bitorder="little")
        out[first : first + counts.size] = counts
        at += coded.size
        finite = np.isfinite(v)
        num_not_finite += v.size - int(np.count_nonzero(finite))
        if residual is not None:
            old = residual[part]
            residual[part] = np.where(finite | ~np.isfinite(old), np.float32(0), old)
    return at, num_not_finite


def decode_packed(payload: Bytes, numel: int) -> Iterator[tuple[int, Flags, Floats]]:
    """Read a valid payload in stretches: first element of each, which elements it holds, and their values."""
    lengths = _lengths(numel)
    end = lengths.size
    for first in range(0, lengths.size, _CHUNK_BLOCKS):
        length = lengths[first : first + _CHUNK_BLOCKS]
        counts = payload[first : first + length.size]
        is_bitmap, at_bitmaps = _places(counts, length)
        begin, end = end, end + is_bitmap.size
        coded = payload[begin:end]
        held = np.zeros((counts.size, BLOCK), np.bool_)
        held[counts == _RAW] = True
        held[(counts > 0) & (counts < _RAW)] = np.unpackbits(coded[at_bitmaps], axis=1, bitorder="little")
        yield first * BLOCK, held.reshape(-1)[: int(length.sum())], coded[~is_bitmap].view("<f4")


def packed_fault(payload: Bytes, numel: int) -> str:
    """What is wrong with a payload of ``numel`` elements; empty where nothing is."""
    what, blocks = f"packed payload of {payload.size} bytes", num_blocks(numel)
    if payload.size < blocks:
        return f"{what}, need at least {blocks} for the counts of {numel} elements"
    damaged = f"{what} for {numel} elements is damaged: "
    counts, lengths = payload[:blocks].astype(np.int64), _lengths(numel)
    wrong = np.flatnonzero((counts > _most(lengths)) & (counts != _RAW))
    if wrong.size:
        block = int(wrong[0])
        return f"{damaged}count {counts[block]} of block {block}, need 0 to {_most(lengths)[block]} or {_RAW}"
    sizes = _sizes(counts, lengths)
    need = blocks + int(sizes.sum())
    if payload.size != need:
        return f"{what}, need {need} for {numel} elements"
    starts = blocks + np.cumsum(sizes) - sizes
    for block in np.flatnonzero((counts > 0) & (counts < _RAW)).tolist():
        bitmap = payload[starts[block] : starts[block] + _BITMAP_BYTES]
        marked = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
        if marked.size and marked[-1] >= lengths[block]:
            return f"{damaged}block {block} marks elements beyond its {lengths[block]}"
        if marked.size != counts[block]:
            return f"{damaged}block {block} marks {marked.size} elements, need {counts[block]}"
    return ""


def _lengths(numel: int) -> Ints:
    """Elements of each block."""
    lengths = np.full(num_blocks(numel), BLOCK)
    lengths[-1:] = numel - (lengths.size - 1) * BLOCK
    return lengths


def _most(lengths: Ints) -> Ints:
    """Most elements that are sent with a bitmap: 32 + 4 * count < 4 * length."""
    most: Ints = np.maximum(lengths - _BITMAP_BYTES // 4 - 1, 0)
    return most


def _sizes(counts: npt.NDArray[Any], lengths: Ints) -> Ints:
    """Bytes of each block."""
    some = np.where(counts == _RAW, 4 * lengths, _BITMAP_BYTES + 4 * counts.astype(np.int64))
    sizes: Ints = np.where(counts == 0, 0, some)
    return sizes


def _places(counts: Bytes, lengths: Ints) -> tuple[Flags, Ints]:
    """Which bytes of some blocks are of bitmaps; and where those are, one bitmap a row."""
    sizes = _sizes(counts, lengths)
    starts = (np.cumsum(sizes) - sizes)[(counts > 0) & (counts < _RAW)]
    at_bitmaps: Ints = starts[:, None] + _IN_BITMAP
    is_bitmap = np.zeros(int(sizes.sum()), np.bool_)
    is_bitmap[at_bitmaps] = True
    return is_bitmap, at_bitmaps


def _in_blocks(flags: Flags) -> Flags:
    """Flags in rows of a block; False fills the last row."""
    whole = np.zeros(num_blocks(flags.size) * BLOCK, np.bool_)
    whole[: flags.size] = flags
    return whole.reshape(-1, BLOCK)
