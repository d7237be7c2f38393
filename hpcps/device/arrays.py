"""What this room asks of arrays, and views of tensors that others made. Refuses to copy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpcps.errors import DataError

__all__ = ["ArrayModule", "DeviceArray", "address_of", "device_view", "to_host"]

_HOST_MEMORY, _DEVICE_MEMORY, _MANAGED_MEMORY = 1, 2, 13
"""Kinds of memory in DLPack: kDLCPU, kDLCUDA, kDLCUDAManaged."""


class DeviceArray(Protocol):
    """The part of CuPy's and numpy's arrays that is used here."""

    @property
    def size(self) -> int: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def flags(self) -> Any: ...

    def __getitem__(self, index: slice, /) -> Any: ...

    def fill(self, value: Any, /) -> None: ...


class ArrayModule(Protocol):
    """The part of ``cupy`` and ``numpy`` that is used here."""

    def empty(self, shape: int, dtype: Any) -> Any: ...

    def zeros(self, shape: int, dtype: Any) -> Any: ...

    def asarray(self, a: Any) -> Any: ...


def address_of(array: object) -> int:
    """Address of the first element, on the device or the host."""
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(array, name, None)
        if interface is not None:
            return int(interface["data"][0])
    raise TypeError(f"cannot take the address of a {type(array).__name__}: need an array of cupy or numpy; convert it")


def to_host(array: Any) -> npt.NDArray[Any]:
    """The array in host memory, once all work on it is done; a numpy array as it is."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def device_view(tensor: Any, xp: Any) -> Any:
    """Look at a tensor as a flat array of ``xp``, without a copy.

    Work that others have under way on the tensor is waited for on the device, as DLPack lays down. A tensor that
    records gradients must be detached first.

    Args:
        tensor: anything with ``__dlpack__`` or ``__cuda_array_interface__``, contiguous, of any shape.
        xp: ``cupy``, or ``numpy`` for tensors in host memory.

    Raises:
        DataError: the tensor is elsewhere, is not contiguous, or cannot be looked at.
    """
    what = f"cannot look at a {type(tensor).__name__} on the device"
    if hasattr(tensor, "__dlpack_device__"):
        _check_place(tensor, xp, what)
        try:
            array = xp.from_dlpack(tensor)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"{what}: {error}; detach it, or copy it into a plain tensor") from error
    elif hasattr(tensor, "__cuda_array_interface__"):
        array = xp.asarray(tensor)
    else:
        raise DataError(f"{what}: it has neither __dlpack__ nor __cuda_array_interface__; pass a tensor or an array")
    if not array.flags.c_contiguous:
        raise DataError(f"{what}: strides {array.strides} for shape {array.shape}, need contiguous elements; copy it")
    return array.reshape(-1)


def _check_place(tensor: Any, xp: Any, what: str) -> None:
    kind, index = (int(each) for each in tensor.__dlpack_device__())
    if xp is np:
        if kind != _HOST_MEMORY:
            raise DataError(f"{what}: it is in memory of kind {kind}, need host memory; use cupy for device tensors")
        return
    if kind not in (_DEVICE_MEMORY, _MANAGED_MEMORY):
        raise DataError(f"{what}: it is in memory of kind {kind}, need CUDA memory; move it to the device")
    current = int(xp.cuda.runtime.getDevice())
    if kind == _DEVICE_MEMORY and index != current:
        raise DataError(f"{what}: it is on device {index}, current is device {current}; use one device a process")
