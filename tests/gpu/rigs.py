"""The places where the device room can run: the shim on this CPU, a GPU through CuPy, a GPU through the extension."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from host_module import HostModule, build_library, compiler
from native_arrays import NativeArrays

from hpcps.device import BuiltModule, DeviceCodecs, load_module, probe
from hpcps.device.arrays import to_host
from hpcps.errors import NotBuiltError

NAMES = ("shim", "cupy", "built")


class Rig:
    """Codecs and the ways to and from their arrays."""

    def __init__(self, name: str, xp: Any, module: Any) -> None:
        self.name = name
        self.xp = xp
        self.module = module
        self.codecs = DeviceCodecs(xp, module)

    def to_device(self, host: np.ndarray) -> Any:
        """A copy on the device; a host array's offset from an aligned address is kept."""
        offset = host.ctypes.data % 16
        room = np.zeros(host.nbytes + offset, np.uint8)
        room[offset:] = host.view(np.uint8)
        return self.xp.asarray(room)[offset:].view(host.dtype)

    def to_host(self, array: Any) -> np.ndarray:
        return to_host(array)

    def synchronize(self) -> None:
        if self.name == "cupy":
            self.xp.cuda.get_current_stream().synchronize()
        elif self.name == "built":
            self.xp.synchronize()


def why_not(name: str) -> str:
    """Why a place cannot be used, empty where it can."""
    if name == "shim":
        return "" if compiler() else "no C++ compiler to build the kernels for the CPU"
    if name == "cupy":
        return probe().why_not
    try:
        BuiltModule()
    except NotBuiltError as error:
        return str(error)
    return ""


def make_rig(name: str, *, seed: int = 1) -> Rig:
    if name == "shim":
        return Rig(name, AlignedNumpy(), HostModule(build_library(), seed=seed))
    if name == "cupy":
        return Rig(name, importlib.import_module("cupy"), load_module())
    return Rig(name, NativeArrays(), BuiltModule())


class AlignedNumpy:
    """numpy, with allocations that begin at a multiple of 16 as those of devices do."""

    def empty(self, shape: int, dtype: Any) -> np.ndarray:
        num_bytes = shape * np.dtype(dtype).itemsize
        room = np.random.default_rng(shape).bytes(num_bytes + 16)  # never zeros by chance
        whole = np.frombuffer(bytearray(room), np.uint8)
        offset = -whole.ctypes.data % 16
        return whole[offset : offset + num_bytes].view(dtype)

    def zeros(self, shape: int, dtype: Any) -> np.ndarray:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def asarray(self, host: np.ndarray) -> np.ndarray:
        array = self.empty(host.size, host.dtype)
        array[:] = host
        return array
