"""What the numpy references refuse of an array: the types, and the messages, of ``ext/arrays.h``.

A wrong kind of array is a ``TypeError``, a wrong size or place in memory a ``ValueError``; both before any effect.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["RealArray", "check_apart", "check_bytes", "check_input", "check_real", "check_writable", "check_written"]

RealArray: TypeAlias = npt.NDArray[np.floating[Any]]


def check_real(array: object, what: str) -> None:
    """Refuse what is no aligned one-dimensional array of float32 or float64."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"cannot {what}: it is no array; pass a list of arrays")
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"cannot {what}: dtype {array.dtype}, need float32 or float64; convert it first")
    _check_layout(array, what)


def check_bytes(array: object, what: str) -> None:
    """Refuse what is no one-dimensional array of uint8."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"cannot {what}: it is no array; pass a list of arrays")
    if array.dtype != np.uint8:
        raise TypeError(f"cannot {what}: dtype {array.dtype}, need uint8; view it as uint8")
    _check_layout(array, what)


def _check_layout(array: npt.NDArray[Any], what: str) -> None:
    if array.ndim != 1:
        raise TypeError(f"cannot {what}: {array.ndim} dimensions, need 1; flatten it first")
    if not array.flags.c_contiguous:
        raise TypeError(f"cannot {what}: its elements are not contiguous; pass a contiguous array")
    if not array.flags.aligned:
        raise ValueError(f"cannot {what}: its memory is not aligned to its elements; copy it into an aligned array")


def check_writable(array: npt.NDArray[Any], what: str) -> None:
    """Refuse an array that is read-only."""
    if not array.flags.writeable:
        raise TypeError(f"cannot {what}: it is read-only; pass an array that may be written")


def check_written(array: RealArray, what: str) -> None:
    """Refuse what is no array of real numbers that may be written."""
    check_real(array, what)
    check_writable(array, what)


def check_apart(array: npt.NDArray[Any], what: str, other: npt.NDArray[Any], name: str) -> None:
    """Refuse an array that shares memory with another one."""
    if np.may_share_memory(array, other):
        raise ValueError(f"cannot {what}: it shares memory with {name}; pass separate arrays")


def check_input(array: RealArray, what: str, other: RealArray, name: str = "the array written") -> None:
    """Refuse an array that differs in dtype or size from another one or shares memory with it."""
    check_real(array, what)
    if array.dtype != other.dtype:
        raise TypeError(f"cannot {what}: dtype {array.dtype}, {name} is {other.dtype}; pass arrays of one dtype")
    if array.size != other.size:
        raise ValueError(f"cannot {what}: {array.size} elements, {name} has {other.size}; pass arrays of one size")
    check_apart(array, what, other, name)
