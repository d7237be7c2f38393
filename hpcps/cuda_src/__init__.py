"""Sources that the CPU build, nvcc and CuPy compile: element functions, wire formats and CUDA kernels. No Python."""

from __future__ import annotations

__all__: list[str] = []
