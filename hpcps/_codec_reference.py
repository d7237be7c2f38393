"""The codecs of ``hpcps.native`` in numpy: same arguments, same checks, same payloads and residuals as the built ones.

``cuda_src/elements.h`` and ``ext/codec.h`` define them. What the built module refuses is refused here with the same
exception types and messages. Slower, and in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcps._codec_reference_dense import (
    BLOCK,
    ENCODERS,
    Bytes,
    Floats,
    RealArray,
    int8_scales,
    num_blocks,
    read_int8,
    read_term,
)
from hpcps._codec_reference_packed import decode_packed, encode_packed, packed_fault
from hpcps._codec_reference_topk import decode_topk, encode_topk, most_bytes, topk_fault
from hpcps._native_checks import check_apart, check_bytes, check_input, check_real, check_writable, check_written

__all__ = ["decode", "decode_accumulate", "encode", "num_threads", "set_num_threads"]

_NAMES = ("none", "fp32", "fp16", "bf16", "int8", "onebit", "topk", "packed")
_NONE, _FP32, _FP16, _BF16, _INT8, _ONEBIT, _TOPK, _PACKED = range(len(_NAMES))
_CHUNK_ELEMS = 1 << 14
"""Elements handled at a time, whole blocks, so that temporaries stay in the second-level cache."""
_TOPK_MOST_ELEMS = 0xFFFFFFFF
_MOST_THREADS = 4096

_num_threads = 1


def encode(
    codec: int, x: RealArray, out: Bytes, *, residual: RealArray | None = None, keep: int = 0
) -> tuple[int, int]:
    """Encode x + residual, leave what was lost in the residual; returns bytes written and elements not finite."""
    _check_encode(codec, x, out, residual, keep)
    with np.errstate(all="ignore"):
        if codec == _TOPK:
            return encode_topk(x, out, residual, keep)
        if codec == _PACKED:
            return encode_packed(x, out, residual)
        num_not_finite = 0
        for begin in range(0, x.size, _CHUNK_ELEMS):
            v = x[begin : begin + _CHUNK_ELEMS]
            if residual is not None:
                v = v + residual[begin : begin + _CHUNK_ELEMS]
            decoded = ENCODERS[codec](v, out, begin, x.size)
            num_not_finite += v.size - int(np.count_nonzero(np.isfinite(v)))
            if residual is not None:
                _leave(residual[begin : begin + v.size], v - decoded)
    return _payload_bytes(codec, x.size, x.itemsize), num_not_finite


def _leave(residual: RealArray, rest: RealArray) -> None:
    """Store what was not sent; where that is not finite, keep the old residual, or 0 where that is not finite."""
    lost = ~np.isfinite(rest)
    if lost.any():
        old = residual[lost]
        rest[lost] = np.where(np.isfinite(old), old, 0)
    residual[:] = rest


def decode(codec: int, payload: Bytes, out: RealArray) -> None:
    """Write the elements that a payload holds."""
    _check_decode(codec, payload, out)
    if codec == _NONE or (codec == _FP32 and out.dtype == np.float32):
        out.view(np.uint8)[:] = payload  # as it is: a product with 1 would change the bits of some NaNs
        return
    if codec == _PACKED:
        out.fill(0)
        for begin, held, value in decode_packed(payload, out.size):
            out[begin : begin + held.size][held] = value
        return
    with np.errstate(all="ignore"):
        _accumulate(out, [payload], [codec], [out.dtype.type(1)], True)


def decode_accumulate(
    acc: RealArray, payloads: list[Any], codecs: Sequence[int], weights: Sequence[float], *, assign: bool = False
) -> None:
    """Do ``acc += sum of weights[i] * decoded(payloads[i])``, added in this order, or assign that sum."""
    _check_accumulate(acc, payloads, codecs, weights)
    with np.errstate(all="ignore"):
        _accumulate(acc, payloads, codecs, [acc.dtype.type(weight) for weight in weights], assign)


def _accumulate(acc: RealArray, payloads: list[Bytes], codecs: Sequence[int], weights: list[Any], assign: bool) -> None:
    terms = list(zip(codecs, payloads, weights, strict=True))
    for sparse, group in groupby(terms, lambda term: term[0] in (_TOPK, _PACKED)):
        if sparse:
            for codec, payload, weight in group:
                if assign:
                    acc.fill(0)
                (_add_topk if codec == _TOPK else _add_packed)(acc, payload, weight, assign)
                assign = False
        else:
            _add_dense(acc, list(group), assign)
            assign = False


def _add_topk(acc: Floats, payload: Bytes, weight: np.float32, assign: bool) -> None:
    index, value = decode_topk(payload)
    acc[index] = value * weight if assign else acc[index] + value * weight


def _add_packed(acc: Floats, payload: Bytes, weight: np.float32, assign: bool) -> None:
    for begin, held, value in decode_packed(payload, acc.size):
        part = acc[begin : begin + held.size]
        part[held] = value * weight if assign else part[held] + value * weight


def _add_dense(acc: RealArray, terms: list[tuple[int, Bytes, Any]], assign: bool) -> None:
    # payloads of int8 with the same bits of weight are summed as integers where their scales allow it
    keys = [term[2].tobytes() if term[0] == _INT8 else index for index, term in enumerate(terms)]
    runs = [[term for _, term in run] for _, run in groupby(zip(keys, terms, strict=True), lambda each: each[0])]
    for begin in range(0, acc.size, _CHUNK_ELEMS):
        part = acc[begin : begin + _CHUNK_ELEMS]
        stop = begin + part.size
        if assign:
            part.fill(-0.0)  # adding to -0 gives the term itself, also where that is +0 or -0
        for run in runs:
            codec, payload, weight = run[0]
            if codec == _INT8:
                _add_int8(part, (read_int8(each[1], begin, stop, acc.size) for each in run), weight)
            else:
                part += read_term(codec, payload, begin, stop, acc.size, weight)


def _add_int8(part: Floats, payloads: Iterator[tuple[Bytes, npt.NDArray[np.int32]]], weight: np.float32) -> None:
    """Add the payloads of a run; in each block those that follow each other with one scale byte go in together."""
    scale, total = next(payloads)
    for next_scale, elements in payloads:
        changed = scale != next_scale
        if changed.any():
            there = np.repeat(changed, BLOCK)[: part.size]
            part[there] += _int8_term(scale, total, weight, part.size)[there]
            total[changed] = 0
            scale = next_scale
        total += elements
    part += _int8_term(scale, total, weight, part.size)


def _int8_term(scale: Bytes, total: npt.NDArray[np.int32], weight: np.float32, numel: int) -> Floats:
    factor = int8_scales(scale) * weight
    return (total.astype(np.float32) * factor[:, None]).reshape(-1)[:numel]


def _most_bytes(codec: int, numel: int, itemsize: int, keep: int) -> int:
    """Most bytes of a payload."""
    if codec == _TOPK:
        return most_bytes(numel, keep)
    return 4 * numel + num_blocks(numel) if codec == _PACKED else _payload_bytes(codec, numel, itemsize)


def _payload_bytes(codec: int, numel: int, itemsize: int) -> int:
    """Bytes of a payload of a codec that always has as many."""
    blocks = num_blocks(numel)
    return (itemsize * numel, 4 * numel, 2 * numel, 2 * numel, blocks + numel, 4 * blocks + -(-numel // 8))[codec]


def _check_codec(codec: int, what: str) -> None:
    if not 0 <= codec < len(_NAMES):
        raise ValueError(
            f"cannot {what}: unknown codec {int(codec)}, need 0 to {len(_NAMES) - 1}; see hpcps.plan.Codec"
        )


def _check_dtype(array: RealArray, what: str, codec: int) -> None:
    if array.dtype == np.float64 and codec not in (_NONE, _FP32):
        raise TypeError(f"cannot {what}: dtype float64, codec {_NAMES[codec]} needs float32; convert it first")


def _check_keep(codec: int, numel: int, keep: int) -> None:
    if codec != _TOPK:
        if keep:
            raise ValueError(f"cannot encode x: keep is {keep}, codec {_NAMES[codec]} takes none; leave it out")
        return
    if numel > _TOPK_MOST_ELEMS:
        raise ValueError(
            f"cannot encode x: {numel} elements, topk takes at most {_TOPK_MOST_ELEMS}; cut it into shards"
        )
    if not min(1, numel) <= keep <= numel:
        raise ValueError(
            f"cannot encode x: keep is {keep}, topk of {numel} elements needs {min(1, numel)} to {numel};"
            " see CodecSpec.keep"
        )


def _check_encode(codec: int, x: RealArray, out: Bytes, residual: RealArray | None, keep: int) -> None:
    _check_codec(codec, "encode x")
    check_real(x, "encode x")
    _check_dtype(x, "encode x", codec)
    _check_keep(codec, x.size, keep)
    check_bytes(out, "encode out")
    check_writable(out, "encode out")
    need = _most_bytes(codec, x.size, x.itemsize, keep)
    if out.size < need:
        raise ValueError(
            f"cannot encode out: {out.size} bytes, need {need} for {x.size} elements with {_NAMES[codec]};"
            " see CodecSpec.wire_bytes"
        )
    check_apart(out, "encode out", x, "x")
    if residual is not None:
        check_input(residual, "encode residual", x, "x")
        check_writable(residual, "encode residual")
        check_apart(residual, "encode residual", out, "out")


def _check_payload(payload: Bytes, what: str, codec: int, written: RealArray) -> None:
    if codec == _TOPK:
        fault = topk_fault(payload, written.size)
    elif codec == _PACKED:
        fault = packed_fault(payload, written.size)
    else:
        need = _payload_bytes(codec, written.size, written.itemsize)
        fault = f"{_NAMES[codec]} payload of {payload.size} bytes, need {need} for {written.size} elements"
        fault = "" if payload.size == need else fault
    if fault:
        raise ValueError(f"cannot {what}: {fault}; the payload is damaged or of another array")


def _check_decode(codec: int, payload: Bytes, out: RealArray) -> None:
    _check_codec(codec, "decode payload")
    check_written(out, "decode out")
    _check_dtype(out, "decode out", codec)
    check_bytes(payload, "decode payload")
    check_apart(payload, "decode payload", out, "out")
    _check_payload(payload, "decode payload", codec, out)


def _check_accumulate(acc: RealArray, payloads: list[Any], codecs: Sequence[int], weights: Sequence[float]) -> None:
    check_written(acc, "decode_accumulate acc")
    if not payloads or not len(payloads) == len(codecs) == len(weights):
        raise ValueError(
            f"cannot decode_accumulate payloads: {len(payloads)} payloads, {len(codecs)} codecs and {len(weights)}"
            " weights, need as many of each and at least 1; correct the lists"
        )
    names = [f"decode_accumulate payloads[{index}]" for index in range(len(payloads))]
    for what, codec, payload in zip(names, codecs, payloads, strict=True):
        _check_codec(codec, what)
        _check_dtype(acc, "decode_accumulate acc", codec)
        check_bytes(payload, what)
        check_apart(payload, what, acc, "acc")
    for what, codec, payload in zip(names, codecs, payloads, strict=True):
        _check_payload(payload, what, codec, acc)


def set_num_threads(number: int) -> None:
    """Only kept: numpy works in one thread."""
    global _num_threads
    if not 1 <= number <= _MOST_THREADS:
        raise ValueError(
            f"cannot set the number of threads: {number}, need 1 to {_MOST_THREADS};"
            " set it to the cores of this process"
        )
    _num_threads = number


def num_threads() -> int:
    """The number that was set last, 1 before."""
    return _num_threads
