"""Top-k on the device: the sequence of kernels that makes a payload, and the one that reads it.

``cuda_src/topk.cuh`` says what each kernel does. Nothing is read back between the kernels of an encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcps.device.arrays import ArrayModule, DeviceArray, to_host
from hpcps.device.module import KernelModule

__all__ = ["DeviceTopk", "Survey"]

_KERNELS = ("histogram", "choose", "count", "compact", "measure", "write", "survey", "check", "add")
_THREADS = 256
_TILE, _BINS, _NUM_LEVELS = 2048, 2048, 3
_HEADER_BYTES = 16
_HISTOGRAM_BLOCKS = 512
"""Most blocks of the histogram, each of which adds up 2048 bins at its end: about 4 a multiprocessor of large GPUs."""
_STATE_SCANNED, _STATE_GAP_BYTES = 9, 10
_READ_SOUND, _READ_COUNT, _READ_SPAN, _READ_WORDS = 4, 6, 7, 8
"""Words of the states in ``cuda_src``."""
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 112


def _num_tiles(numel: int) -> int:
    return max(1, -(-numel // _TILE))


@dataclass(frozen=True, slots=True)
class Survey:
    """What the device found in a payload, before anything is done with it.

    Args:
        payload: uint8.
        numel: elements that it should encode.
        tile_counts: gaps before each tile of gap bytes.
        tile_spans: elements before each tile.
        state: the header's words and the verdict.
    """

    payload: DeviceArray
    numel: int
    tile_counts: Any
    tile_spans: Any
    state: Any

    def fault(self) -> str:
        """What is wrong with the payload, empty where nothing is; waits for the device."""
        what = f"topk payload of {self.payload.size} bytes"
        if self.payload.size < _HEADER_BYTES:
            return f"{what}, need at least {_HEADER_BYTES} for its header"
        words = to_host(self.state).tolist()
        count, gap_bytes, _, last = words[:_READ_SOUND]
        exponent = int(np.uint32(words[2]).view(np.int32))
        damaged = f"{what} for {self.numel} elements is damaged: "
        if last:
            return f"{damaged}its last header word is {last}, need 0"
        if not _SMALLEST_EXPONENT <= exponent <= _LARGEST_EXPONENT:
            return f"{damaged}exponent {exponent}, need {_SMALLEST_EXPONENT} to {_LARGEST_EXPONENT}"
        if count > self.numel:
            return f"{damaged}{count} values, need at most {self.numel}"
        need = _HEADER_BYTES + gap_bytes + 2 * count
        if self.payload.size != need:
            return f"{what}, need {need} for {count} values in {gap_bytes} gap bytes"
        if not words[_READ_SOUND]:
            return f"{damaged}its {gap_bytes} gap bytes are not {count} gaps in {self.numel} elements"
        return ""


class DeviceTopk:
    """Top-k on one device.

    Args:
        xp: ``cupy``; or ``numpy``, with a module that runs the kernels on the host.
        module: the kernels.
    """

    def __init__(self, xp: ArrayModule, module: KernelModule) -> None:
        self._xp = xp
        self._kernels = {name: module.get_function(f"hpcps_topk_{name}_kernel") for name in _KERNELS}
        self._scan_kernel = module.get_function("hpcps_scan_kernel")

    def encode(self, x: DeviceArray, out: DeviceArray, residual: Any, keep: int, state: Any) -> None:
        """Start an encoding; the caller has checked all sizes.

        Args:
            x: float32.
            out: uint8, room for the largest payload.
            residual: float32, as many as x, or a null address.
            keep: elements to send, 1 to x.size, or 0 of none.
            state: words of zero, which the kernels fill.
        """
        xp, numel = self._xp, np.int64(x.size)
        tiles, sent_tiles = _num_tiles(x.size), _num_tiles(keep)
        bins = xp.zeros(_NUM_LEVELS * _BINS, np.uint32)
        for level in range(_NUM_LEVELS):
            own = bins[level * _BINS : (level + 1) * _BINS]
            counted = (x, residual, numel, np.int32(level), state, own)
            self._launch("histogram", min(tiles, _HISTOGRAM_BLOCKS), counted)
            self._launch("choose", 1, (own, np.int32(level), np.int64(keep), state))
        tile_counts = xp.empty(tiles, np.uint64)
        self._launch("count", tiles, (x, residual, numel, state, tile_counts))
        self._scan(tile_counts, tiles, state[_STATE_SCANNED : _STATE_SCANNED + 1])
        indices, halves = xp.empty(keep, np.uint32), xp.empty(keep, np.uint16)
        found = (tile_counts, np.int64(keep), indices, halves)
        self._launch("compact", tiles, (x, residual, numel, state, *found))
        tile_bytes = xp.empty(sent_tiles, np.uint64)
        self._launch("measure", sent_tiles, (indices, state, tile_bytes))
        self._scan(tile_bytes, sent_tiles, state[_STATE_GAP_BYTES : _STATE_GAP_BYTES + 1])
        self._launch("write", sent_tiles, (indices, halves, tile_bytes, state, out))

    def survey(self, payload: DeviceArray, numel: int) -> Survey:
        """Start to look through a payload of any bytes.

        Args:
            payload: uint8.
            numel: elements that it should encode.
        """
        tiles = _num_tiles(payload.size - _HEADER_BYTES)
        counts, spans = self._xp.empty(tiles, np.uint64), self._xp.empty(tiles, np.uint64)
        state = self._xp.zeros(_READ_WORDS, np.uint64)
        if payload.size >= _HEADER_BYTES:
            sizes = (payload, np.int64(payload.size), np.int64(numel))
            self._launch("survey", tiles, (*sizes, counts, spans, state))
            self._scan(counts, tiles, state[_READ_COUNT : _READ_COUNT + 1])
            self._scan(spans, tiles, state[_READ_SPAN : _READ_SPAN + 1])
            self._launch("check", 1, (*sizes, state))
        return Survey(payload, numel, counts, spans, state)

    def add(self, acc: DeviceArray, survey: Survey, weight: np.float32, *, assign: bool) -> None:
        """Add weight times the values of a sound payload to their elements, or assign that.

        Args:
            acc: float32.
            survey: of the payload; it found no fault.
            weight: the factor.
            assign: what acc holds does not matter; elements that the payload does not hold become +0.
        """
        if assign:
            acc.fill(0)
        payload = survey.payload
        sizes = (acc, np.int64(survey.numel), payload, np.int64(payload.size))
        args = (*sizes, survey.tile_counts, survey.tile_spans, weight, np.int32(assign))
        self._launch("add", _num_tiles(payload.size - _HEADER_BYTES), args)

    def _launch(self, name: str, num_blocks: int, args: tuple[Any, ...]) -> None:
        self._kernels[name]((num_blocks,), (_THREADS,), args)

    def _scan(self, values: Any, numel: int, total: Any) -> None:
        self._scan_kernel((1,), (_THREADS,), (values, np.int64(numel), total))
