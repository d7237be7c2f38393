"""The kernels compile for GPUs, by both compilers and for the generations that each knows. Needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from host_module import KERNELS, ROOT

from hpcps.device.module import COMPILE_OPTIONS, SOURCES, kernel_source

NVCC = shutil.which("nvcc")
NUM_ARCHS = 4
KERNEL_NAMES = sorted(re.findall(r"^HPCPS_KERNEL (hpcps_\w+)\(", kernel_source(), flags=re.MULTILINE))


def nvcc_archs() -> list[str]:
    """Oldest, newest and two between of those that nvcc has code for."""
    if NVCC is None:
        return []
    listed = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    known = sorted({each.removeprefix("sm_") for each in listed}, key=int)
    return [known[index * (len(known) - 1) // (NUM_ARCHS - 1)] for index in range(NUM_ARCHS)]


@pytest.mark.parametrize("arch", nvcc_archs() or [pytest.param("", marks=pytest.mark.skip(reason="no nvcc on PATH"))])
def test_nvcc_compiles_the_kernels(tmp_path, arch):
    source = tmp_path / "all.cu"
    source.write_text(f'#include "{SOURCES[-1]}"\n')
    made = tmp_path / "all.cubin"
    command = [NVCC, "-std=c++17", "--fmad=false", "-Xptxas", "-v", f"-arch=sm_{arch}"]
    command += [f"-I{KERNELS}", "-cubin", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert made.stat().st_size > 0
    assert sorted(re.findall(r"Compiling entry function '(\w+)'", done.stderr)) == KERNEL_NAMES
    spilled = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert all(int(each) == 0 for each in spilled), done.stderr


@pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH")
def test_nvcc_compiles_the_launchers(tmp_path):
    """As setup.py does, for one generation; the object has the entry points."""
    made = tmp_path / "cuda_launch.o"
    command = [NVCC, "-std=c++17", "--fmad=false", f"-arch=sm_{nvcc_archs()[1]}", "-Xcompiler", "-fPIC", f"-I{KERNELS}"]
    command += ["-c", str(ROOT / "ext" / "cuda_launch.cu"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert b"hpcps_cuda_launch" in made.read_bytes()


@pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"HPCPS_CUDA": "on", "HPCPS_CUDA_ARCHS": "1"}, "nvcc failed for 1: "),
        ({"HPCPS_CUDA": "on", "HPCPS_CUDA_ARCHS": "1", "HPCPS_EXT": "auto"}, "nvcc failed for 1: "),
        (
            {"HPCPS_CUDA": "on", "HPCPS_EXT": "off"},
            "cannot build hpcps: HPCPS_EXT is 'off' and HPCPS_CUDA is 'on', need",
        ),
        ({"HPCPS_CUDA": "maybe"}, "cannot build hpcps: HPCPS_CUDA is 'maybe', need one of auto, on, off"),
    ],
)
def test_a_build_that_must_have_cuda_stops_with_the_cause(tmp_path, settings, message):
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-temp",
        str(tmp_path),
        "--build-lib",
        str(tmp_path),
    ]
    environment = {**os.environ, "HPCPS_EXT": "on", **settings}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode != 0
    assert message in done.stderr


# --- NVRTC, which CuPy uses -------------------------------------------------------------------------------------------


def find_nvrtc() -> Path | None:
    """NVRTC of one of NVIDIA's wheels, or beside nvcc."""
    folders: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or [] if spec else []:
        folders += sorted(Path(base).glob("*/lib"), reverse=True)
    if NVCC is not None:
        folders += [each / "lib64" for each in sorted(Path("/usr/local").glob("cuda*"), reverse=True)]
    found = (path for folder in folders for path in sorted(folder.glob("libnvrtc.so*")))
    return next(found, None)


NVRTC = find_nvrtc()


def nvrtc_compile(
    library: ctypes.CDLL, arch: str, *, options: tuple[str, ...] = COMPILE_OPTIONS
) -> tuple[int, str, bytes]:
    """Result, log and code of a compilation for an arch such as sm_80 or compute_70."""
    program = ctypes.c_void_p()
    source, name = kernel_source().encode(), b"hpcps.cu"
    assert library.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None) == 0
    words = [option.encode() for option in (*options, f"--gpu-architecture={arch}")]
    result = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(1, size.value))
    library.nvrtcGetProgramLog(program, log)
    kind = "CUBIN" if arch.startswith("sm_") else "PTX"
    code = ctypes.create_string_buffer(1)
    if result == 0:
        getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{kind}")(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return result, log.value.decode(), code.raw


@pytest.mark.skipif(NVRTC is None, reason="no NVRTC; pip install nvidia-cuda-nvrtc-cu12 (or -cu13)")
@pytest.mark.parametrize("arch", ["compute_70", "sm_75", "sm_80", "sm_90", "sm_120"])
def test_nvrtc_compiles_the_text_for_cupy(arch):
    library = ctypes.CDLL(str(NVRTC))
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    if arch == "compute_70" and major.value >= 13:
        pytest.skip(f"NVRTC {major.value}.{minor.value} no longer knows {arch}")
    if arch == "sm_120" and (major.value, minor.value) < (12, 8):
        pytest.skip(f"NVRTC {major.value}.{minor.value} does not know {arch} yet")
    result, log, code = nvrtc_compile(library, arch)
    assert result == 0, log
    assert all(name.encode() in code for name in KERNEL_NAMES)


@pytest.mark.skipif(NVRTC is None, reason="no NVRTC; pip install nvidia-cuda-nvrtc-cu12 (or -cu13)")
def test_no_option_is_needed_for_equal_bits():
    """The sources alone keep a compiler from fusing a product and a sum, and use what they mean to."""
    result, log, code = nvrtc_compile(ctypes.CDLL(str(NVRTC)), "compute_80", options=("--std=c++17",))
    assert result == 0, log
    text = code.decode(errors="replace")
    assert "fma.rn.f32" not in text
    words = ("cvt.rn.f16.f32", "cvt.f32.f16", "atom.shared", "bar.sync", "shfl.sync", "vote.sync", "div.rn.f32")
    assert [word for word in words if word not in text] == []
