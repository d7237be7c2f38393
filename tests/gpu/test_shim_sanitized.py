"""The kernels under AddressSanitizer and UBSan: whatever a payload holds, nothing beyond the arrays is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_module import HERE, build_library, compiler

SANITIZERS = ("asan", "ubsan")


def runtime(name: str) -> str:
    """Path of a sanitizer's library, empty where the compiler has none."""
    found = compiler()
    if found is None:
        return ""
    path = subprocess.run([found, f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=False)
    return path.stdout.strip() if Path(path.stdout.strip()).is_absolute() else ""


LIBRARIES = [runtime(name) for name in SANITIZERS]


@pytest.mark.skipif(not all(LIBRARIES), reason="no C++ compiler with AddressSanitizer")
def test_damaged_payloads_touch_nothing_beyond_their_arrays():
    library = build_library("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", optimize="-O1")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(LIBRARIES),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "shim_fuzz.py"), str(library), "200", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "200 payloads, " in done.stdout
