"""Builds the native kernels in ext/ as hpcps._native and does nothing else.

Environment:
    HPCPS_EXT       auto (default): build, and go on without the kernels where that fails; on: a failure is an
                    error; off: do not build.
    HPCPS_SANITIZE  sanitizers to build with, for example ``address,undefined`` or ``thread``.
    HPCPS_CUDA      auto (default): add the CUDA kernels where nvcc is found, and go on without them where that fails;
                    on: a failure is an error; off: leave them out. nvcc: of CUDA_HOME, else on PATH.
    HPCPS_CUDA_ARCHS  compute capabilities to build for, for example ``80;90``; the last one also as PTX, which newer
                    devices can run. Default: the oldest that nvcc knows, and those of CUDA_ARCHS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MODES = ("auto", "on", "off")
SOURCES = [
    "ext/module.cpp",
    "ext/codec_module.cpp",
    "ext/codec.cpp",
    "ext/codec_kernels.cpp",
    "ext/packed.cpp",
    "ext/topk.cpp",
    "ext/pool.cpp",
    "ext/kernels.cpp",
    "ext/isa.cpp",
    "ext/checksum.cpp",
    "ext/nanobind_unit.cpp",
]
DEPENDS = [
    "ext/arrays.h",
    "ext/codec.h",
    "ext/codec_avx2.inc",
    "ext/codec_avx2_packed.inc",
    "ext/codec_kernels.h",
    "ext/codec_module.h",
    "ext/codec_plain.inc",
    "ext/isa.h",
    "ext/kernels.h",
    "ext/kernels.inc",
    "ext/packed.h",
    "ext/pool.h",
    "ext/topk.h",
    "hpcps/cuda_src/elements.h",
]
COMPILE_ARGS = [
    "-std=c++17",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",  # nanobind asks for it
    "-ffp-contract=off",  # same bits on every processor: a product and a sum round separately
    "-fno-math-errno",  # lets the portable loops become vector code; changes no result
    "-fno-trapping-math",
    "-pthread",
    "-DNDEBUG",
    "-DNB_COMPACT_ASSERTIONS",
]
CUDA_SOURCE = "ext/cuda_launch.cu"
CUDA_DEPENDS = [
    CUDA_SOURCE,
    "ext/cuda_launch.h",
    *(f"hpcps/cuda_src/{name}" for name in ("elements.h", "kernels.cuh", "topk.cuh", "packed.cuh")),
]
CUDA_ARCHS = ("80", "90", "100")  # one for each generation of large devices; their code runs on its smaller ones too
NVCC_ARGS = ["-std=c++17", "-O3", "--fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Ihpcps/cuda_src"]


def read_mode(name: str) -> str:
    """A setting that is auto, on or off."""
    mode = os.environ.get(name, "").lower() or "auto"
    if mode not in MODES:
        sys.exit(f"cannot build hpcps: {name} is {mode!r}, need one of {', '.join(MODES)}; correct or unset it")
    return mode


def find_nvcc() -> str | None:
    """The CUDA compiler of CUDA_HOME, else on PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (shutil.which("nvcc", path=str(Path(home, "bin"))) if home else None) or shutil.which("nvcc")


def choose_archs(nvcc: str) -> list[str]:
    """Compute capabilities to build for, in ascending order."""
    named = os.environ.get("HPCPS_CUDA_ARCHS", "").replace(",", ";").strip(";")
    if named:
        return [each.strip() for each in named.split(";")]
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    known = sorted({each.removeprefix("sm_") for each in listed}, key=int)
    return sorted({known[0], *(each for each in CUDA_ARCHS if each in known)}, key=int)


def find_cuda_libraries(nvcc: str) -> str:
    """Folder of the static CUDA run-time. nvcc itself is asked, since the one on PATH may be a wrapper."""
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", "-"], input="", capture_output=True, text=True).stderr
    tops = [line.removeprefix("#$ TOP=").strip().strip('"') for line in plan.splitlines() if line.startswith("#$ TOP=")]
    for top in tops or [str(Path(nvcc).resolve().parents[1])]:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            if Path(top, folder, "libcudart_static.a").exists():
                return str(Path(top, folder))
    raise FileNotFoundError(f"no libcudart_static.a below {', '.join(tops)}")


def compile_cuda(nvcc: str, build_dir: Path) -> Path:
    """The object file of the CUDA kernels, made again where a source is newer."""
    archs = choose_archs(nvcc)
    made = build_dir / f"cuda_launch-{'-'.join(archs)}.o"
    if made.exists() and made.stat().st_mtime > max(Path(each).stat().st_mtime for each in CUDA_DEPENDS):
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    threads = ["--threads", str(os.cpu_count() or 1)]
    command = [nvcc, *NVCC_ARGS, *threads, *targets, "-c", CUDA_SOURCE, "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc failed for {', '.join(archs)}: {done.stderr.strip() or done.stdout.strip()}")
    return made


class BuildKernels(build_ext):
    """Adds nanobind's sources and flags; turns a failure into a warning where HPCPS_EXT allows it."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self._add_nanobind(ext)
            self._add_cuda(ext)
            super().build_extension(ext)
        except Exception as error:
            if not ext.optional or CUDA_MODE == "on":
                raise
            print(
                f"\nWARNING: cannot build the native kernels of hpcps: {type(error).__name__}: {error}\n"
                "WARNING: hpcps works without them, but slower (numpy instead). To have them, install a C++17\n"
                "WARNING: compiler and the Python headers and install again; HPCPS_EXT=on stops at the error.\n",
                file=sys.stderr,
            )

    def _add_cuda(self, ext: Extension) -> None:
        nvcc = find_nvcc() if CUDA_MODE != "off" else None
        if nvcc is None:
            if CUDA_MODE == "on":
                raise FileNotFoundError("HPCPS_CUDA is 'on' and there is no nvcc; set CUDA_HOME or PATH")
            return
        try:
            made, libraries = compile_cuda(nvcc, Path(self.build_temp, "ext")), find_cuda_libraries(nvcc)
        except Exception as error:
            if CUDA_MODE == "on":
                raise
            print(
                f"\nWARNING: cannot build the CUDA kernels of hpcps: {type(error).__name__}: {error}\n"
                "WARNING: hpcps works without them; on a GPU, CuPy compiles them. HPCPS_CUDA=on stops at the error,\n"
                "WARNING: HPCPS_CUDA=off leaves them out.\n",
                file=sys.stderr,
            )
            return
        ext.extra_objects.append(str(made))
        ext.depends.append(str(made))
        ext.sources.append("ext/cuda_module.cpp")
        ext.define_macros.append(("HPCPS_WITH_CUDA", "1"))
        ext.library_dirs.append(libraries)
        ext.libraries += ["cudart_static", "dl", "rt", "pthread"]

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


MODE = read_mode("HPCPS_EXT")
CUDA_MODE = read_mode("HPCPS_CUDA")
if MODE == "off" and CUDA_MODE == "on":
    sys.exit("cannot build hpcps: HPCPS_EXT is 'off' and HPCPS_CUDA is 'on', need HPCPS_EXT on or auto; unset one")
setup(
    ext_modules=[]
    if MODE == "off"
    else [
        Extension(
            "hpcps._native",
            sources=SOURCES,
            depends=DEPENDS,
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=MODE == "auto",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
