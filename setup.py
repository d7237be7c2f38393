"""Builds the native kernels in ext/ as hpcps._native and does nothing else.

Environment:
    HPCPS_EXT       auto (default): build, and go on without the kernels where that fails; on: a failure is an
                    error; off: do not build.
    HPCPS_SANITIZE  sanitizers to build with, for example ``address,undefined`` or ``thread``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MODES = ("auto", "on", "off")
SOURCES = ["ext/module.cpp", "ext/kernels.cpp", "ext/checksum.cpp", "ext/nanobind_unit.cpp"]
DEPENDS = ["ext/kernels.h", "ext/kernels.inc"]
COMPILE_ARGS = [
    "-std=c++17",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",  # nanobind asks for it
    "-ffp-contract=off",  # same bits on every processor: a product and a sum round separately
    "-DNDEBUG",
    "-DNB_COMPACT_ASSERTIONS",
]


def read_mode() -> str:
    """The setting HPCPS_EXT, checked."""
    mode = os.environ.get("HPCPS_EXT", "").lower() or "auto"
    if mode not in MODES:
        sys.exit(f"cannot build hpcps: HPCPS_EXT is {mode!r}, need one of {', '.join(MODES)}; correct or unset it")
    return mode


class BuildKernels(build_ext):
    """Adds nanobind's sources and flags; turns a failure into a warning where HPCPS_EXT allows it."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self._add_nanobind(ext)
            super().build_extension(ext)
        except Exception as error:
            if not ext.optional:
                raise
            print(
                f"\nWARNING: cannot build the native kernels of hpcps: {type(error).__name__}: {error}\n"
                "WARNING: hpcps works without them, but slower (numpy instead). To have them, install a C++17\n"
                "WARNING: compiler and the Python headers and install again; HPCPS_EXT=on stops at the error.\n",
                file=sys.stderr,
            )

    @staticmethod
    def _add_nanobind(ext: Extension) -> None:
        import nanobind

        source = Path(nanobind.source_dir())
        robin_map = source.parent / "ext" / "robin_map" / "include"
        ext.include_dirs += [nanobind.include_dir(), str(source), str(robin_map)]
        sanitize = os.environ.get("HPCPS_SANITIZE")
        if sanitize:
            ext.extra_compile_args += ["-O1", "-g", f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
            ext.extra_link_args += [f"-fsanitize={sanitize}"]
        else:
            ext.extra_compile_args += ["-O3", "-g0"]
            ext.extra_link_args += ["-Wl,-s"] if sys.platform.startswith("linux") else []


MODE = read_mode()
setup(
    ext_modules=[]
    if MODE == "off"
    else [
        Extension(
            "hpcps._native",
            sources=SOURCES,
            depends=DEPENDS,
            extra_compile_args=COMPILE_ARGS,
            language="c++",
            optional=MODE == "auto",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
