"""The dense kernels of the servers and the codecs: the built module where there is one, else the same in numpy.

Both give the same bits. Arrays of numbers are one-dimensional, contiguous, of float32 or float64, and are never
converted or copied: a wrong kind of array is a ``TypeError``, a wrong size, misaligned or shared memory a
``ValueError``, each before any effect. Payloads are one-dimensional, contiguous arrays of uint8, at any address.
The built kernels release the GIL; the codecs among them use several threads for large arrays.

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

from hpcps import _codec_reference, _native_reference
from hpcps.errors import ConfigError

__all__ = [
    "Bytes",
    "RealArray",
    "accumulate",
    "assign",
    "available",
    "checksum",
    "combine",
    "decode",
    "decode_accumulate",
    "encode",
    "isa",
    "num_threads",
    "scale",
    "set_num_threads",
    "why_not",
]

RealArray: TypeAlias = npt.NDArray[np.floating[Any]]
"""An array of float32 or float64."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A payload, or room for one."""

_MODULE = "hpcps._native"


class _Codecs(Protocol):
    """What the built module and the reference of the codecs both offer."""

    def encode(
        self, codec: int, x: RealArray, out: Bytes, *, residual: RealArray | None = None, keep: int = 0
    ) -> tuple[int, int]: ...

    def decode(self, codec: int, payload: Bytes, out: RealArray) -> None: ...

    def decode_accumulate(
        self,
        acc: RealArray,
        payloads: list[Any],
        codecs: Sequence[int],
        weights: Sequence[float],
        *,
        assign: bool = False,
    ) -> None: ...

    def set_num_threads(self, number: int, /) -> None: ...

    def num_threads(self) -> int: ...


class _Kernels(Protocol):
    """What the built module and the reference of the dense kernels both offer."""

    isa: str

    def accumulate(self, acc: RealArray, x: RealArray, weight: float) -> None: ...

    def assign(self, out: RealArray, x: RealArray, weight: float) -> None: ...

    def combine(self, out: RealArray, xs: list[Any], weights: Sequence[float]) -> None: ...

    def scale(self, x: RealArray, weight: float) -> None: ...

    def checksum(self, data: npt.NDArray[np.uint8]) -> int: ...


def _load() -> tuple[_Kernels, _Codecs, str]:
    """The kernels and codecs to use and, for numpy, the reason."""
    setting = os.environ.get("HPCPS_NATIVE", "").lower() or "auto"
    if setting not in ("auto", "off"):
        raise ConfigError(f"cannot choose kernels: HPCPS_NATIVE is {setting!r}, need auto or off; correct or unset it")
    if setting == "off":
        return _in_numpy("cannot use the built kernels: HPCPS_NATIVE is 'off'; unset it")
    try:
        built = importlib.import_module(_MODULE)
        return cast(_Kernels, built), cast(_Codecs, built), ""
    except ModuleNotFoundError:
        return _in_numpy(
            f"cannot import {_MODULE}: it was not built; install a C++17 compiler and the Python headers, then"
            " install hpcps again with HPCPS_EXT=on to see what fails"
        )
    except ImportError as error:
        cause = str(error.__cause__ or error)
        if cause.startswith("cannot "):  # the module's own message, whole as it is
            return _in_numpy(cause)
        return _in_numpy(f"cannot import {_MODULE}: {cause}; install hpcps again with HPCPS_EXT=on")


def _in_numpy(reason: str) -> tuple[_Kernels, _Codecs, str]:
    return cast(_Kernels, _native_reference), cast(_Codecs, _codec_reference), reason


_kernels, _codecs, _why_not = _load()


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


def encode(
    codec: int, x: RealArray, out: Bytes, *, residual: RealArray | None = None, keep: int = 0
) -> tuple[int, int]:
    """Encode ``x + residual`` and leave in the residual what the payload does not hold.

    Where the sum, or its block of int8 or onebit, is not finite, the residual keeps what it had (0 where that was
    not finite either), so nothing that is not finite ever enters it.

    Args:
        codec: number of the codec, see `hpcps.plan.Codec`.
        x: float32; none and fp32 take float64 too.
        out: written from its start; at least `hpcps.plan.CodecSpec.wire_bytes` long.
        residual: dtype and length of x, read and written; None: no error feedback.
        keep: elements to send, for topk only: 1 to the length of x. It sends exactly so many, or all that are not
            zero: the largest ones, of equal ones the first.

    Returns:
        Bytes written, and how many elements of the sum are not finite.

    Raises:
        TypeError: an array of another kind.
        ValueError: unknown codec, lengths do not fit, memory is shared or misaligned.
    """
    return _codecs.encode(codec, x, out, residual=residual, keep=keep)


def decode(codec: int, payload: Bytes, out: RealArray) -> None:
    """Write the elements that a payload holds.

    Args:
        codec: the one it was encoded with.
        payload: its bytes, no more and no less.
        out: float32; for none the dtype of what was encoded, for fp32 either; its length says how many elements.

    Raises:
        TypeError: an array of another kind.
        ValueError: the payload is no valid encoding of so many elements, or memory is shared or misaligned.
    """
    _codecs.decode(codec, payload, out)


def decode_accumulate(
    acc: RealArray, payloads: Sequence[Bytes], codecs: Sequence[int], weights: Sequence[float], *, assign: bool = False
) -> None:
    """Do ``acc += sum of weights[i] * elements of payloads[i]`` in one pass over memory, in the order given.

    Weights are rounded to acc's dtype first; product and sum round separately. Payloads of int8 that follow each
    other with one weight are summed as integers first, block by block, where they share a scale.

    Args:
        acc: written; float32; float64 for none and fp32 only.
        payloads: at least one, of acc's length.
        codecs: one for each payload.
        weights: one factor for each payload.
        assign: what acc held does not matter.

    Raises:
        TypeError: an array of another kind.
        ValueError: counts differ, a payload is no valid encoding of so many elements (says which, what it has and
            what it needs), or memory is shared or misaligned. Nothing is changed.
    """
    _codecs.decode_accumulate(acc, list(payloads), list(codecs), list(weights), assign=assign)


def set_num_threads(number: int) -> None:
    """Let one call of a codec use so many threads, at least 1; no result depends on it.

    Raises:
        ValueError: below 1 or above 4096.
    """
    _codecs.set_num_threads(number)


def num_threads() -> int:
    """Threads that one call of a codec may use: what was set, else the cores this process may run on."""
    return _codecs.num_threads()
