"""The dense kernels of the servers: the built module where there is one, else the same in numpy.

Both give the same bits. Arrays are one-dimensional, contiguous, of float32 or float64, and are never
converted or copied: a wrong kind of array is a ``TypeError``, a wrong size, misaligned or shared memory a
``ValueError``, each before any effect. The built kernels release the GIL.

Environment, read once at import: ``HPCPS_NATIVE=off`` takes numpy; ``HPCPS_ISA`` (portable, avx2, auto) chooses
among the built kernels.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from hpcps import _native_reference
from hpcps.errors import ConfigError

__all__ = ["RealArray", "accumulate", "assign", "available", "checksum", "combine", "isa", "scale", "why_not"]

RealArray: TypeAlias = npt.NDArray[np.floating[Any]]
"""An array of float32 or float64."""

_MODULE = "hpcps._native"


class _Kernels(Protocol):
    """What the built module and the reference both offer."""

    isa: str

    def accumulate(self, acc: RealArray, x: RealArray, weight: float) -> None: ...

    def assign(self, out: RealArray, x: RealArray, weight: float) -> None: ...

    def combine(self, out: RealArray, xs: list[Any], weights: Sequence[float]) -> None: ...

    def scale(self, x: RealArray, weight: float) -> None: ...

    def checksum(self, data: npt.NDArray[np.uint8]) -> int: ...


def _load() -> tuple[_Kernels, str]:
    """The kernels to use and, for numpy, the reason."""
    reference = cast(_Kernels, _native_reference)
    setting = os.environ.get("HPCPS_NATIVE", "").lower() or "auto"
    if setting not in ("auto", "off"):
        raise ConfigError(f"cannot choose kernels: HPCPS_NATIVE is {setting!r}, need auto or off; correct or unset it")
    if setting == "off":
        return reference, "cannot use the built kernels: HPCPS_NATIVE is 'off'; unset it"
    try:
        return cast(_Kernels, importlib.import_module(_MODULE)), ""
    except ModuleNotFoundError:
        return reference, (
            f"cannot import {_MODULE}: it was not built; install a C++17 compiler and the Python headers, then"
            " install hpcps again with HPCPS_EXT=on to see what fails"
        )
    except ImportError as error:
        cause = str(error.__cause__ or error)
        if cause.startswith("cannot "):  # the module's own message, whole as it is
            return reference, cause
        return reference, f"cannot import {_MODULE}: {cause}; install hpcps again with HPCPS_EXT=on"


_kernels, _why_not = _load()


def available() -> bool:
    """True where the built kernels are in use."""
    return not _why_not


def why_not() -> str:
    """Why numpy is in use instead of the built kernels, with the remedy; empty where they are."""
    return _why_not


def isa() -> str:
    """Which kernels are in use: ``avx2``, ``portable`` or ``numpy``."""
    return _kernels.isa


def accumulate(acc: RealArray, x: RealArray, weight: float) -> None:
    """Do ``acc += weight * x`` in place.

    The weight is rounded to the dtype first; product and sum round separately.

    Args:
        acc: written, any length.
        x: same dtype and length, in other memory.
        weight: factor of x.

    Raises:
        TypeError: an array of another kind.
        ValueError: lengths differ, memory is shared or misaligned.
    """
    _kernels.accumulate(acc, x, weight)


def assign(out: RealArray, x: RealArray, weight: float) -> None:
    """Do ``out = weight * x``; arguments and errors as in `accumulate`."""
    _kernels.assign(out, x, weight)


def combine(out: RealArray, xs: Sequence[RealArray], weights: Sequence[float]) -> None:
    """Do ``out = weights[0] * xs[0] + weights[1] * xs[1] + ...`` in one pass over memory.

    The terms are added in the order given, with the bits of `assign` followed by `accumulate` for each.

    Args:
        out: written; what it held does not matter.
        xs: at least one array, each of out's dtype and length, none in out's memory.
        weights: one factor for each array.

    Raises:
        TypeError: an array of another kind.
        ValueError: lengths or counts differ, memory is shared or misaligned.
    """
    _kernels.combine(out, list(xs), list(weights))


def scale(x: RealArray, weight: float) -> None:
    """Do ``x *= weight`` in place; errors as in `accumulate`."""
    _kernels.scale(x, weight)


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """Hash bytes against accidental damage, not against an adversary.

    The value is the same on every machine and with every set of kernels; ``ext/checksum.cpp`` defines it.

    Args:
        data: one-dimensional uint8 array, any length and alignment.

    Returns:
        A number from 0 to 2^63 - 1, so that it fits an int64 header field.
    """
    return _kernels.checksum(data)
