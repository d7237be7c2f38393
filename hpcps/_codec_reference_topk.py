"""Top-k in numpy: which elements are sent, and their coding; ``ext/topk.cpp`` defines both.

Sent are the first ``keep`` elements in the order size descending, index ascending, without zeros. Infinity and NaN
have the same size, above all others. That is exact, so it does not matter how they are found.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcps._codec_reference_dense import Bytes, Floats, half_bits, of_half

__all__ = ["decode_topk", "encode_topk", "most_bytes", "topk_fault"]

Indices: TypeAlias = npt.NDArray[np.int64]

_HEADER_BYTES = 16
_GAP_BYTES = 5
_DIGIT_BITS, _DIGIT, _MORE = 7, 0x7F, 0x80
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 112
_SIZE_BITS, _INFINITY_BITS = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_CHUNK_ELEMS = 1 << 14
_SAMPLE_ELEMS = 1 << 15
"""Elements that the first threshold is guessed from; more make the guess better, not the result."""


def most_bytes(numel: int, keep: int) -> int:
    """Largest payload where ``keep`` of ``numel`` elements are asked for; the same as `CodecSpec.wire_bytes`."""
    most = keep * 51 // 50
    return _HEADER_BYTES + min(_GAP_BYTES * most, most + numel // 127) + 2 * most


def encode_topk(x: Floats, out: Bytes, residual: Floats | None, keep: int) -> tuple[int, int]:
    """Write the payload, leave the residual; returns bytes written and elements that are not finite."""
    least = _guess(x, residual, keep)
    index, not_finite, old = _add_residual(x, residual, least)
    v = x if residual is None else residual  # from here on it holds the sum
    if index.size < keep and least > 1:  # the sample misled
        index = np.flatnonzero(v)
    index = _largest(index, v[index], keep)
    sent = v[index]
    exponent = _exponent(sent)
    half = half_bits(sent * _power_of_two(-exponent))
    if residual is not None:
        residual[index] = sent - of_half(half) * _power_of_two(exponent)
        residual[not_finite] = np.where(np.isfinite(old), old, np.float32(0))
    return _write(out, index, half, exponent), not_finite.size


def decode_topk(payload: Bytes) -> tuple[Indices, Floats]:
    """Which elements a valid payload holds, in ascending order, and their values."""
    gap_bytes = int(payload[4:8].view("<u4")[0])
    exponent = int(payload[8:12].view("<i4")[0])
    gaps = _read_gaps(payload[_HEADER_BYTES : _HEADER_BYTES + gap_bytes])
    half = payload[_HEADER_BYTES + gap_bytes :].view("<u2")
    return np.cumsum(gaps + 1) - 1, of_half(half) * _power_of_two(exponent)


# --- selection --------------------------------------------------------------------------------------------------------


def _sizes(v: Floats) -> npt.NDArray[np.uint32]:
    sizes: npt.NDArray[np.uint32] = np.minimum(v.view(np.uint32) & _SIZE_BITS, _INFINITY_BITS)
    return sizes


def _guess(x: Floats, residual: Floats | None, keep: int) -> int:
    """A size that rather more than ``keep`` elements reach, at least 1, from elements at equal distances."""
    step = max(1, x.size // _SAMPLE_ELEMS)
    sample = x[::step] if residual is None else x[::step] + residual[::step]
    expected = keep / step
    rank = math.ceil(1.2 * expected + 4 * math.sqrt(expected)) + 8
    if step == 1 or rank >= sample.size:
        return 1
    return max(1, int(np.partition(_sizes(np.ascontiguousarray(sample)), sample.size - rank)[sample.size - rank]))


def _add_residual(x: Floats, residual: Floats | None, least: int) -> tuple[Indices, Indices, Floats]:
    """Turn the residual into x + residual, in one pass.

    Returns: indices of the elements of at least that size; of those that are not finite, and the residuals there.
    """
    reached, not_finite, old = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for begin in range(0, x.size, _CHUNK_ELEMS):
        v = x[begin : begin + _CHUNK_ELEMS]
        if residual is not None:
            v = v + residual[begin : begin + _CHUNK_ELEMS]
        index = np.flatnonzero((v.view(np.uint32) & _SIZE_BITS) >= least)
        reached.append(index + begin)
        wrong = index[~np.isfinite(v[index])]
        if wrong.size:
            not_finite.append(wrong + begin)
        if residual is not None:
            old.append(residual[wrong + begin])
            residual[begin : begin + v.size] = v
    return np.concatenate(reached), np.concatenate(not_finite), np.concatenate(old)


def _largest(index: Indices, values: Floats, keep: int) -> Indices:
    """The ``keep`` largest of some elements; the first ones of those that are equally large."""
    if index.size <= keep:
        return index
    sizes = _sizes(values)
    cut = np.partition(sizes, sizes.size - keep)[sizes.size - keep]
    taken = sizes > cut
    equal = np.flatnonzero(sizes == cut)
    taken[equal[: keep - np.count_nonzero(taken)]] = True
    chosen: Indices = index[taken]
    return chosen


def _exponent(sent: Floats) -> int:
    """Power of two that brings the largest finite element to 2^15 or just above."""
    sizes = _sizes(sent)
    largest = int(sizes[sizes < _INFINITY_BITS].max(initial=0))
    return max(_SMALLEST_EXPONENT, (largest >> 23) - 127 - 15) if largest else 0


def _power_of_two(exponent: int) -> np.float32:
    return np.float32(math.ldexp(1, exponent))


# --- coding -----------------------------------------------------------------------------------------------------------


def _write(out: Bytes, index: Indices, half: npt.NDArray[np.uint16], exponent: int) -> int:
    gaps = np.diff(index, prepend=-1) - 1
    num_digits = np.ones(gaps.size, dtype=np.int64)
    for digit in range(1, _GAP_BYTES):
        num_digits += gaps >> (_DIGIT_BITS * digit) > 0
    ends = np.cumsum(num_digits)
    gap_bytes = int(ends[-1]) if gaps.size else 0
    header = np.array([gaps.size, gap_bytes, exponent, 0], dtype="<i8").astype("<u4")
    out[:_HEADER_BYTES] = header.view(np.uint8)
    coded = out[_HEADER_BYTES : _HEADER_BYTES + gap_bytes]
    starts = ends - num_digits
    for digit in range(int(num_digits.max(initial=0))):
        has = np.flatnonzero(num_digits > digit)
        more = np.where(num_digits[has] > digit + 1, _MORE, 0)
        coded[starts[has] + digit] = (gaps[has] >> (_DIGIT_BITS * digit)) & _DIGIT | more
    num_bytes = _HEADER_BYTES + gap_bytes + half.nbytes
    out[_HEADER_BYTES + gap_bytes : num_bytes] = half.view(np.uint8)
    return num_bytes


def _read_gaps(coded: Bytes) -> Indices:
    """Gaps that are coded whole, each in at most 5 digits."""
    last = np.flatnonzero(coded < _MORE)
    first = np.concatenate([np.zeros(min(1, last.size), np.int64), last[:-1] + 1])
    num_digits = last - first + 1
    gaps = np.zeros(last.size, dtype=np.int64)
    for digit in range(int(num_digits.max(initial=0))):
        has = np.flatnonzero(num_digits > digit)
        gaps[has] |= (coded[first[has] + digit].astype(np.int64) & _DIGIT) << (_DIGIT_BITS * digit)
    return gaps


def topk_fault(payload: Bytes, numel: int) -> str:
    """What is wrong with a payload of ``numel`` elements; empty where nothing is."""
    what = f"topk payload of {payload.size} bytes"
    if payload.size < _HEADER_BYTES:
        return f"{what}, need at least {_HEADER_BYTES} for its header"
    count, gap_bytes, _, last = payload[:_HEADER_BYTES].view("<u4").tolist()
    exponent = int(payload[8:12].view("<i4")[0])
    damaged = f"{what} for {numel} elements is damaged: "
    if last:
        return f"{damaged}its last header word is {last}, need 0"
    if not _SMALLEST_EXPONENT <= exponent <= _LARGEST_EXPONENT:
        return f"{damaged}exponent {exponent}, need {_SMALLEST_EXPONENT} to {_LARGEST_EXPONENT}"
    if count > numel:
        return f"{damaged}{count} values, need at most {numel}"
    need = _HEADER_BYTES + gap_bytes + 2 * count
    if payload.size != need:
        return f"{what}, need {need} for {count} values in {gap_bytes} gap bytes"
    return _gap_fault(payload[_HEADER_BYTES : _HEADER_BYTES + gap_bytes], count, numel, damaged)


def _gap_fault(coded: Bytes, count: int, numel: int, damaged: str) -> str:
    not_gaps = f"{damaged}its {coded.size} gap bytes are not {count} gaps"
    last = np.flatnonzero(coded < _MORE)[:count]
    num_digits = np.diff(last, prepend=-1)
    too_long = np.flatnonzero(num_digits > _GAP_BYTES)
    whole = int(too_long[0]) if too_long.size else last.size  # gaps that can be read, from the first on
    gaps = _read_gaps(coded[: int(last[whole - 1]) + 1] if whole else coded[:0])
    elements: npt.NDArray[Any] = np.cumsum(gaps.astype(np.uint64) + np.uint64(1)) - np.uint64(1)
    beyond = np.flatnonzero(elements >= numel)
    if beyond.size:
        return f"{damaged}element {elements[beyond[0]]}, need at most {numel - 1}"
    if whole < count or (int(last[-1]) + 1 if count else 0) != coded.size:
        return not_gaps
    return ""
