"""Arrays on the device through ``hpcps._native.cuda_*``, for machines with nvcc and a GPU but no CuPy.

Only what the device room asks of an array module. One stream, and every read waits.
"""

from __future__ import annotations

import importlib
import math
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np


class NativeArray:
    """A flat array in device memory, or a part of one."""

    def __init__(self, native: Any, owner: Any, address: int, size: int, dtype: np.dtype) -> None:
        self._native = native
        self._owner = owner  # holds the memory
        self.address = address
        self.size = size
        self.dtype = dtype
        self.ndim = 1
        self.flags = SimpleNamespace(c_contiguous=True)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, typestr = (self.size,), self.dtype.str
        return {"data": (self.address, False), "shape": shape, "typestr": typestr, "strides": None, "version": 3}

    def __getitem__(self, index: slice) -> NativeArray:
        begin, stop, step = index.indices(self.size)
        assert step == 1
        address = self.address + begin * self.dtype.itemsize
        return NativeArray(self._native, self._owner, address, max(0, stop - begin), self.dtype)

    def view(self, dtype: Any) -> NativeArray:
        dtype = np.dtype(dtype)
        return NativeArray(self._native, self._owner, self.address, self.nbytes // dtype.itemsize, dtype)

    def fill(self, value: Any) -> None:
        assert value == 0 and math.copysign(1, value) > 0
        self._native.cuda_fill(self.address, 0, self.nbytes)

    def get(self) -> np.ndarray:
        host = np.empty(self.size, self.dtype)
        self._native.cuda_copy(host.ctypes.data, self.address, self.nbytes)
        return host


class NativeArrays:
    """The array module. Memory that is given up is kept and used again, in the order of the one stream."""

    def __init__(self) -> None:
        self._native = importlib.import_module("hpcps._native")
        self._unused: dict[int, list[int]] = {}

    def empty(self, shape: int, dtype: Any) -> NativeArray:
        dtype = np.dtype(dtype)
        num_bytes = max(1, shape * dtype.itemsize)
        unused = self._unused.setdefault(num_bytes, [])
        address = unused.pop() if unused else self._native.cuda_allocate(num_bytes)
        memory = Memory()
        weakref.finalize(memory, unused.append, address)
        return NativeArray(self._native, memory, address, shape, dtype)

    def zeros(self, shape: int, dtype: Any) -> NativeArray:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def asarray(self, host: np.ndarray) -> NativeArray:
        array = self.empty(host.size, host.dtype)
        self._native.cuda_copy(array.address, np.ascontiguousarray(host).ctypes.data, array.nbytes)
        return array

    def copyto(self, to: NativeArray, source: NativeArray) -> None:
        self._native.cuda_copy(to.address, source.address, source.nbytes)

    def synchronize(self) -> None:
        self._native.cuda_synchronize()


class Memory:
    """Stands for an allocation, which is free when nothing refers to this."""
