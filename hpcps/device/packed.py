"""Packed on the device: the kernels that make a payload, and those that read it.

``cuda_src/packed.cuh`` says what each kernel does. Nothing is read back between the kernels of an encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcps.device.arrays import ArrayModule, DeviceArray, to_host
from hpcps.device.module import KernelModule

__all__ = ["DevicePacked", "PackedSurvey"]

_KERNELS = ("count", "write", "survey", "check", "add")
_THREADS = 256
_BLOCK, _TILE, _BITMAP_BYTES = 256, 2048, 32
_STATE_SCANNED = 9
_FAULTY_COUNT, _FAULTY_MARKS, _SPAN, _READ_WORDS = 0, 1, 2, 3
"""Words of the states in ``cuda_src``."""


def _num_tiles(numel: int) -> int:
    return max(1, -(-numel // _TILE))


@dataclass(frozen=True, slots=True)
class PackedSurvey:
    """What the device found in a payload, before anything is done with it.

    Args:
        payload: uint8.
        numel: elements that it should encode.
        tile_offsets: bytes of blocks before each tile.
        state: faults and bytes of all blocks.
    """

    payload: DeviceArray
    numel: int
    tile_offsets: Any
    state: Any

    def fault(self) -> str:
        """What is wrong with the payload, empty where nothing is; waits for the device."""
        what, num_blocks = f"packed payload of {self.payload.size} bytes", -(-self.numel // _BLOCK)
        if self.payload.size < num_blocks:
            return f"{what}, need at least {num_blocks} for the counts of {self.numel} elements"
        state = to_host(self.state).tolist()
        damaged = f"{what} for {self.numel} elements is damaged: "
        if state[_FAULTY_COUNT]:
            block = num_blocks - state[_FAULTY_COUNT]
            count = int(to_host(self.payload[block : block + 1])[0])
            most = max(0, min(_BLOCK, self.numel - block * _BLOCK) - _BITMAP_BYTES // 4 - 1)
            return f"{damaged}count {count} of block {block}, need 0 to {most} or 255"
        need = num_blocks + state[_SPAN]
        if self.payload.size != need:
            return f"{what}, need {need} for {self.numel} elements"
        if state[_FAULTY_MARKS]:
            block = num_blocks - state[_FAULTY_MARKS]
            return f"{damaged}block {block} does not mark as many elements as its count says"
        return ""


class DevicePacked:
    """Packed on one device.

    Args:
        xp: ``cupy``; or ``numpy``, with a module that runs the kernels on the host.
        module: the kernels.
    """

    def __init__(self, xp: ArrayModule, module: KernelModule) -> None:
        self._xp = xp
        self._kernels = {name: module.get_function(f"hpcps_packed_{name}_kernel") for name in _KERNELS}
        self._scan_kernel = module.get_function("hpcps_scan_kernel")

    def encode(self, x: DeviceArray, out: DeviceArray, residual: Any, state: Any) -> None:
        """Start an encoding; the caller has checked all sizes.

        Args:
            x: float32.
            out: uint8, room for the largest payload.
            residual: float32, as many as x, or a null address.
            state: words of zero, which the kernels fill.
        """
        tile_bytes = self._xp.empty(_num_tiles(x.size), np.uint64)
        values = (x, residual, np.int64(x.size))
        self._launch("count", x.size, (*values, out, state, tile_bytes))
        self._scan(tile_bytes, x.size, state[_STATE_SCANNED : _STATE_SCANNED + 1])
        self._launch("write", x.size, (*values, tile_bytes, state, out))

    def survey(self, payload: DeviceArray, numel: int) -> PackedSurvey:
        """Start to look through a payload of any bytes.

        Args:
            payload: uint8.
            numel: elements that it should encode.
        """
        tile_bytes = self._xp.empty(_num_tiles(numel), np.uint64)
        state = self._xp.zeros(_READ_WORDS, np.uint64)
        if payload.size >= -(-numel // _BLOCK):
            self._launch("survey", numel, (payload, np.int64(numel), state, tile_bytes))
            self._scan(tile_bytes, numel, state[_SPAN : _SPAN + 1])
            sizes = (np.int64(payload.size), np.int64(numel))
            self._launch("check", numel, (payload, *sizes, tile_bytes, state))
        return PackedSurvey(payload, numel, tile_bytes, state)

    def add(self, acc: DeviceArray, survey: PackedSurvey, weight: np.float32, *, assign: bool) -> None:
        """Add weight times the values of a sound payload to their elements, or assign that and +0 to all others.

        Args:
            acc: float32.
            survey: of the payload; it found no fault.
            weight: the factor.
            assign: what acc holds does not matter.
        """
        args = (acc, np.int64(survey.numel), survey.payload, survey.tile_offsets, weight, np.int32(assign))
        self._launch("add", survey.numel, args)

    def _launch(self, name: str, numel: int, args: tuple[Any, ...]) -> None:
        self._kernels[name]((_num_tiles(numel),), (_THREADS,), args)

    def _scan(self, values: Any, numel: int, total: Any) -> None:
        self._scan_kernel((1,), (_THREADS,), (values, np.int64(_num_tiles(numel)), total))
