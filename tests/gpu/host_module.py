"""The CUDA kernels on the CPU: a stand-in for ``cupy.RawModule`` with numpy arrays.

The library is built by g++ from the sources of the package and the shim beside this file, once for each state of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from hpcps.device.module import SOURCES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KERNELS = ROOT / "hpcps" / "cuda_src"
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wall", "-Wextra")
MOST_ARGUMENTS = 16


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def build_library(*extra: str, optimize: str = "-O2") -> Path:
    """The kernels as a library for this machine, made where it is not there yet."""
    found = compiler()
    assert found is not None, "no C++ compiler"
    sources = [HERE / "shim_library.cpp", HERE / "cuda_shim.h", *(KERNELS / name for name in SOURCES)]
    flags = [*FLAGS, optimize, *extra]
    text = b"".join(path.read_bytes() for path in sources) + " ".join([found, *flags]).encode()
    library = ROOT / "build" / "shim" / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}.tmp")
        command = [found, *flags, f"-I{KERNELS}", f"-I{HERE}", str(sources[0]), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made.replace(library)  # at once, also where another process makes the same
    return library


class HostModule:
    """The kernels of a library, called like those of ``cupy.RawModule``.

    Refuses what CuPy would pass on wrongly: a scalar of another width or kind than the kernel's, None, host memory
    for a scalar.

    Args:
        library: what `build_library` made.
        seed: of the order of threads and blocks.
    """

    def __init__(self, library: Path, *, seed: int = 1) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_arguments.restype = ctypes.c_char_p
        self.set_seed(seed)
        self.skip_barrier(-1)

    def set_seed(self, seed: int) -> None:
        self._library.shim_set_seed(seed)

    def skip_barrier(self, line: int) -> None:
        """Leave out the barrier of a line, -1 for none."""
        self._library.shim_skip_barrier(line)

    def get_function(self, name: str) -> HostKernel:
        sizes = (ctypes.c_int * MOST_ARGUMENTS)()
        kinds = self._library.shim_arguments(name.encode(), sizes)
        if kinds is None:
            raise KeyError(name)
        return HostKernel(self._library, name, list(zip(kinds.decode(), sizes, strict=False)))


class HostKernel:
    """One kernel."""

    def __init__(self, library: ctypes.CDLL, name: str, arguments: list[tuple[str, int]]) -> None:
        self._library = library
        self._name = name
        self._arguments = arguments

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if len(args) != len(self._arguments):
            raise TypeError(f"{self._name}: {len(args)} arguments, need {len(self._arguments)}")
        values = [self._pack(index, arg) for index, arg in enumerate(args)]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        message = ctypes.create_string_buffer(200)
        dims = [(ctypes.c_uint * 3)(*(*size, 1, 1)[:3]) for size in (grid, block)]
        if self._library.shim_launch(self._name.encode(), *dims, pointers, message, len(message)):
            raise RuntimeError(f"{self._name}: {message.value.decode()}")

    def _pack(self, index: int, arg: Any) -> np.ndarray:
        """An argument as the bytes that the kernel reads."""
        kind, size = self._arguments[index]
        what = f"{self._name} argument {index}"
        if isinstance(arg, np.ndarray) and arg.ndim:
            if kind != "p" or not arg.flags.c_contiguous:
                raise TypeError(f"{what}: an array, need {kind}{8 * size}, contiguous")
            return np.array([arg.ctypes.data], np.uint64)
        null = isinstance(arg, np.uint64) and arg == 0
        if kind == "p" and not null:
            raise TypeError(f"{what}: {type(arg).__name__}, need an array or np.uint64(0)")
        if kind != "p" and not (isinstance(arg, np.generic) and arg.dtype.kind == kind and arg.dtype.itemsize == size):
            raise TypeError(f"{what}: {type(arg).__name__}, need a numpy scalar of kind {kind} and {size} bytes")
        return np.array([arg])
