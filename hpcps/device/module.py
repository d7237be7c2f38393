"""The CUDA kernels as a module with ``get_function``: by CuPy from the shipped sources, or those built by nvcc.

Both are called alike: ``kernel(grid, block, args)``. Arguments are arrays and numpy scalars of the very type that the
kernel has, because CuPy passes a scalar with the width that it comes with.
"""

from __future__ import annotations

import importlib
import importlib.resources
from collections.abc import Callable
from typing import Any, Protocol, cast

from hpcps.device.arrays import address_of
from hpcps.errors import NotBuiltError

__all__ = ["COMPILE_OPTIONS", "BuiltModule", "Kernel", "KernelModule", "SOURCES", "kernel_source", "load_module"]

SOURCES = ("elements.h", "kernels.cuh", "topk.cuh", "packed.cuh")
"""In the order in which each includes the one before."""
COMPILE_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")
"""For NVRTC: nothing that changes bits."""
_DROPPED_LINES = ("#pragma once", *(f'#include "{name}"' for name in SOURCES))


class Kernel(Protocol):
    """A kernel that can be launched."""

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], /) -> object: ...


class KernelModule(Protocol):
    """Kernels by name."""

    def get_function(self, name: str) -> Kernel: ...


def kernel_source() -> str:
    """All kernels as one text that includes nothing."""
    folder = importlib.resources.files("hpcps") / "cuda_src"
    lines = (line for name in SOURCES for line in (folder / name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line not in _DROPPED_LINES) + "\n"


def load_module() -> KernelModule:
    """The kernels for CuPy's current device; they are compiled at the first call and cached on disk by CuPy.

    Raises:
        NotBuiltError: CuPy is missing.
    """
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise NotBuiltError(f"cannot load the CUDA kernels: {error}; pip install 'hpcps[gpu]'") from error
    module = cupy.RawModule(code=kernel_source(), options=COMPILE_OPTIONS, backend="nvrtc")
    return cast(KernelModule, module)


class BuiltModule:
    """The kernels that nvcc built into ``hpcps._native``.

    Args:
        stream: gives the stream to launch on, as a CUDA handle; 0 is the default stream.

    Raises:
        NotBuiltError: the extension has no CUDA part or there is no device.
    """

    def __init__(self, stream: Callable[[], int] = lambda: 0) -> None:
        try:
            native = importlib.import_module("hpcps._native")
        except ImportError as error:
            raise NotBuiltError(f"cannot load the built CUDA kernels: {error}; install with HPCPS_EXT=on") from error
        if not hasattr(native, "cuda_launch"):
            raise NotBuiltError(
                "cannot load the built CUDA kernels: hpcps._native was built without CUDA; put nvcc on PATH and install"
                " again with HPCPS_CUDA=on"
            )
        num_devices, why_none = native.cuda_device_count()
        if num_devices == 0:
            raise NotBuiltError(f"cannot use the built CUDA kernels: {why_none}; install or repair the NVIDIA driver")
        self._native = native
        self._stream = stream

    def get_function(self, name: str) -> Kernel:
        """The kernel of that name.

        Raises:
            KeyError: there is none.
        """
        kinds: str = self._native.cuda_arguments(name)
        launch, stream = self._native.cuda_launch, self._stream

        def call(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], /) -> None:
            if len(args) != len(kinds):
                raise TypeError(f"cannot launch {name}: {len(args)} arguments, need {len(kinds)}; correct the call")
            plain = [_plain(kind, arg) for kind, arg in zip(kinds, args, strict=True)]
            launch(name, grid[0], block[0], plain, stream())

        return call


def _plain(kind: str, arg: Any) -> int | float:
    """An argument as the built launcher takes it: an address, an integer or a float."""
    if kind == "p" and hasattr(arg, "ndim") and arg.ndim > 0:
        return address_of(arg)
    return float(arg) if kind == "f" else int(arg)
