"""The codecs on device arrays: the payloads, residuals and sums of ``hpcps.native``, made by the CUDA kernels.

Arguments are those of ``native.encode``, ``decode`` and ``decode_accumulate``, with arrays on the device, of float32
only. A whole payload is made on the device, so nothing else need cross. Bits are the CPU's, except for the digits of a
NaN. A wrong kind of array is a ``TypeError``, a wrong size a ``ValueError``, each before any effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from hpcps.device.arrays import ArrayModule, DeviceArray, address_of, to_host
from hpcps.device.module import KernelModule
from hpcps.device.packed import DevicePacked, PackedSurvey
from hpcps.device.topk import DeviceTopk, Survey

__all__ = ["DeviceCodecs", "Encoding"]

_NAMES = ("none", "fp32", "fp16", "bf16", "int8", "onebit", "topk", "packed")
"""By the number on the wire (hpcps.plan.Codec)."""
_FP32, _INT8, _ONEBIT, _TOPK, _PACKED = 1, 4, 5, 6, 7
_BLOCK = 256
_WARPS, _TILE = 8, 2048
"""Blocks of a format and elements that one block of threads takes (cuda_src/kernels.cuh)."""
_THREADS = 256
_STATE_WORDS = 11
_MOST_TOPK_ELEMS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding under way on the device.

    Args:
        num_bytes: of the payload; -1 where the device will say.
        state: what the kernels leave; the first word is the bytes, the second the elements not finite.
    """

    num_bytes: int
    state: Any

    def wait(self) -> tuple[int, int]:
        """Bytes of the payload and number of elements that are not finite, once the device is done."""
        num_bytes, num_not_finite = to_host(self.state[:2]).tolist()
        return (num_bytes if self.num_bytes < 0 else self.num_bytes), num_not_finite


class DeviceCodecs:
    """Codecs on one device.

    Args:
        xp: ``cupy``; or ``numpy``, with a module that runs the kernels on the host.
        module: the kernels.
    """

    def __init__(self, xp: ArrayModule, module: KernelModule) -> None:
        self._xp = xp
        self._encoders = {
            codec: module.get_function(f"hpcps_encode_{'fp32' if codec <= _FP32 else _NAMES[codec]}_kernel")
            for codec in range(_TOPK)
        }
        self._combine = module.get_function("hpcps_combine_kernel")
        self._topk = DeviceTopk(xp, module)
        self._packed = DevicePacked(xp, module)

    def encode(
        self, codec: int, x: DeviceArray, out: DeviceArray, *, residual: DeviceArray | None = None, keep: int = 0
    ) -> tuple[int, int]:
        """Encode x + residual and leave in the residual what was lost; waits for the device.

        Args:
            codec: its number on the wire.
            x: float32, on the device.
            out: uint8, room for the largest payload.
            residual: float32, as many as x; null for none.
            keep: elements that top-k sends, 1 to x.size.

        Returns:
            Bytes written to out; elements that were not finite.
        """
        return self.begin(codec, x, out, residual=residual, keep=keep).wait()

    def begin(
        self, codec: int, x: DeviceArray, out: DeviceArray, *, residual: DeviceArray | None = None, keep: int = 0
    ) -> Encoding:
        """Start to encode on the current stream; arguments as in `encode`."""
        _check_encode(codec, x, out, residual, keep)
        state = self._xp.zeros(_STATE_WORDS, np.uint64)
        owed = np.uint64(0) if residual is None else residual
        if codec == _TOPK:
            self._topk.encode(x, out, owed, keep, state)
            return Encoding(-1, state)
        if codec == _PACKED:
            self._packed.encode(x, out, owed, state)
            return Encoding(-1, state)
        per_block = _WARPS * _BLOCK if codec in (_INT8, _ONEBIT) else _TILE
        grid = (max(1, -(-x.size // per_block)),)
        self._encoders[codec](grid, (_THREADS,), (x, owed, out, np.int64(x.size), state))
        return Encoding(_wire_bytes(codec, x.size, keep), state)

    def decode(self, codec: int, payload: DeviceArray, out: DeviceArray) -> None:
        """Write the elements that a payload holds; errors as in `decode_accumulate`.

        Args:
            codec: its number on the wire.
            payload: uint8.
            out: float32.
        """
        self._accumulate("decode", out, [payload], [codec], [1.0], assign=True)

    def decode_accumulate(
        self,
        acc: DeviceArray,
        payloads: Sequence[DeviceArray],
        codecs: Sequence[int],
        weights: Sequence[float],
        *,
        assign: bool = False,
    ) -> None:
        """Do ``acc += sum of weights[i] * decoded(payloads[i])``, added in this order, on the current stream.

        Neighbours that are dense go in one pass over memory. Waits for the device where a payload is top-k or packed,
        to see whether it is sound.

        Args:
            acc: float32.
            payloads: uint8, at least one.
            codecs: their numbers on the wire.
            weights: their factors, rounded to float32.
            assign: assign the sum instead.

        Raises:
            ValueError: a payload is no encoding of acc.size elements; nothing is changed.
        """
        self._accumulate("decode_accumulate", acc, payloads, codecs, weights, assign=assign)

    def _accumulate(
        self,
        op: str,
        acc: DeviceArray,
        payloads: Sequence[DeviceArray],
        codecs: Sequence[int],
        weights: Sequence[float],
        *,
        assign: bool,
    ) -> None:
        _check_terms(op, acc, payloads, codecs, weights)
        surveys = {
            index: (self._topk if codec == _TOPK else self._packed).survey(payload, acc.size)
            for index, (payload, codec) in enumerate(zip(payloads, codecs, strict=True))
            if codec in (_TOPK, _PACKED)
        }
        for index, survey in surveys.items():
            fault = survey.fault()
            if fault:
                raise ValueError(f"cannot {op} {_which(op, index)}: {fault}; the payload or its codec is wrong")
        with np.errstate(over="ignore"):
            factors = [np.float32(weight) for weight in weights]
        for sparse, group in groupby(range(len(payloads)), lambda index: index in surveys):
            indices = list(group)
            if sparse:
                self._add_sparse(acc, [(surveys[index], factors[index]) for index in indices], assign)
            else:
                self._add_dense(acc, [(payloads[i], codecs[i], factors[i]) for i in indices], assign)
            assign = False

    def _add_sparse(
        self, acc: DeviceArray, terms: list[tuple[Survey | PackedSurvey, np.float32]], assign: bool
    ) -> None:
        for survey, weight in terms:
            if isinstance(survey, PackedSurvey):
                self._packed.add(acc, survey, weight, assign=assign)
            else:
                self._topk.add(acc, survey, weight, assign=assign)
            assign = False

    def _add_dense(self, acc: DeviceArray, terms: list[tuple[DeviceArray, int, np.float32]], assign: bool) -> None:
        words = np.empty(2 * len(terms), np.uint64)
        words[0::2] = [address_of(payload) for payload, _, _ in terms]
        words[1::2] = [codec << 32 | int(weight.view(np.uint32)) for _, codec, weight in terms]
        grid = (max(1, -(-acc.size // (_WARPS * _BLOCK))),)
        args = (acc, np.int64(acc.size), self._xp.asarray(words), np.int32(len(terms)), np.int32(assign))
        self._combine(grid, (_THREADS,), args)


# --- checks -----------------------------------------------------------------------------------------------------------


def _wire_bytes(codec: int, numel: int, keep: int) -> int:
    """Bytes of the payload; of top-k and packed the most that it can have."""
    num_blocks = -(-numel // _BLOCK)
    if codec == _TOPK:
        return 16 + min(5 * keep, keep + numel // 127) + 2 * keep
    if codec == _PACKED:
        return 4 * numel + num_blocks
    return (4 * numel, 4 * numel, 2 * numel, 2 * numel, num_blocks + numel, 4 * num_blocks + -(-numel // 8))[codec]


def _check_codec(op: str, codec: int) -> None:
    if not 0 <= codec < len(_NAMES):
        raise ValueError(f"cannot {op}: unknown codec {codec}, need 0 to {len(_NAMES) - 1}; correct it")


def _check_array(what: str, array: DeviceArray, dtype: type) -> None:
    if array.ndim != 1:
        raise TypeError(f"cannot {what}: {array.ndim} dimensions, need 1; flatten it first")
    if array.dtype != dtype:
        raise TypeError(f"cannot {what}: dtype {array.dtype}, need {np.dtype(dtype)}; convert it, or use the host")
    if not array.flags.c_contiguous:
        raise TypeError(f"cannot {what}: its elements are not contiguous; pass a contiguous array")


def _check_encode(codec: int, x: DeviceArray, out: DeviceArray, residual: DeviceArray | None, keep: int) -> None:
    _check_codec("encode", codec)
    _check_array("encode x", x, np.float32)
    _check_array("encode out", out, np.uint8)
    if residual is not None:
        _check_array("encode residual", residual, np.float32)
        if residual.size != x.size:
            raise ValueError(f"cannot encode residual: {residual.size} elements, x has {x.size}; pass as many")
    if codec == _TOPK:
        if not min(1, x.size) <= keep <= x.size:
            raise ValueError(f"cannot encode x as topk: keep is {keep}, need {min(1, x.size)} to {x.size}; correct it")
        if x.size > _MOST_TOPK_ELEMS:
            raise ValueError(f"cannot encode x as topk: {x.size} elements, need at most {_MOST_TOPK_ELEMS}; split it")
    need = _wire_bytes(codec, x.size, keep)
    if out.size < need:
        raise ValueError(f"cannot encode out: {out.size} bytes, need {need} for {_NAMES[codec]}; make it larger")


def _which(op: str, index: int) -> str:
    return "payload" if op == "decode" else f"payloads[{index}]"


def _check_terms(
    op: str, acc: DeviceArray, payloads: Sequence[DeviceArray], codecs: Sequence[int], weights: Sequence[float]
) -> None:
    _check_array(f"{op} {'out' if op == 'decode' else 'acc'}", acc, np.float32)
    if not payloads or not len(payloads) == len(codecs) == len(weights):
        raise ValueError(
            f"cannot {op} payloads: {len(payloads)} payloads, {len(codecs)} codecs and {len(weights)} weights, need as"
            " many of each and at least 1; correct the lists"
        )
    for index, (payload, codec) in enumerate(zip(payloads, codecs, strict=True)):
        _check_codec(f"{op} {_which(op, index)}", codec)
        _check_array(f"{op} {_which(op, index)}", payload, np.uint8)
        if codec in (_TOPK, _PACKED):
            continue
        need = _wire_bytes(codec, acc.size, 0)
        if payload.size != need:
            raise ValueError(
                f"cannot {op} {_which(op, index)}: {_NAMES[codec]} payload of {payload.size} bytes, need {need} for"
                f" {acc.size} elements; the payload or its codec is wrong"
            )
