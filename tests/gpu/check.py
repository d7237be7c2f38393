"""What `make gpu-check` runs: on a machine with a GPU it builds, tests and times everything there, in under 5 minutes.

Builds the extension in place with CUDA for the GPU that is there (where nvcc is), runs tests/gpu on the GPU through
CuPy and through the extension, whichever there are, and times every kernel beside a copy on the device. Prints one
table, and a line `figure NAME VALUE BAR ok|SHORT` for each share of the copy's rate; a figure that falls short does not
make this program fail, a test does. Without a GPU it says so and runs the tests on the CPU instead. Installs nothing.

    python tests/gpu/check.py [--elems N] [--no-build]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

BUILD_LIMIT_S, TESTS_LIMIT_S = 120, 150
TURNS, REPEATS = 5, 10
DENSE_BAR, TOPK_BAR, STAGED_BAR = 0.7, 0.5, 0.7
"""Shares that are hoped for; none was measured yet when this was written."""
NAMES = ("none", "fp32", "fp16", "bf16", "int8", "onebit", "topk", "packed")
WIRE_BYTES = (4.0, 4.0, 2.0, 2.0, 1 + 1 / 256, 1 / 8 + 4 / 256, 0.0, 2 + 1 / 8 + 1 / 256)
"""Bytes of a payload for each element; packed: where half of them are zeros."""
TOPK, PACKED = 6, 7
TOPK_FRAC = 0.01
NUM_TERMS = 4


def find_gpu() -> tuple[str, str]:
    """Name and compute capability (``90``) of the first GPU, or an empty name and the reason, from the driver alone."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return "", f"no NVIDIA driver ({error})"
    count, device = ctypes.c_int(), ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or count.value == 0:
        return "", f"the driver reports {count.value} devices, error {code}"
    name, parts = ctypes.create_string_buffer(100), [ctypes.c_int(), ctypes.c_int()]
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, len(name), device)
    for part, attribute in zip(parts, (75, 76), strict=True):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    return name.value.decode(), "".join(str(part.value) for part in parts)


def run(what: str, words: list[str], limit_s: float, **settings: str) -> int:
    """Run a program from the top of the project; its exit status, 124 past the limit."""
    print(f"gpu-check: {what}", flush=True)
    begin = time.perf_counter()
    try:
        code = subprocess.run(words, cwd=ROOT, env={**os.environ, **settings}, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        code = 124
    print(f"gpu-check: {what}: exit {code} after {time.perf_counter() - begin:.0f} s", flush=True)
    return code


def run_tests() -> int:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE)]
    return run("tests/gpu", words, TESTS_LIMIT_S)


def build(capability: str) -> int:
    """The extension in place, with CUDA for one GPU."""
    (ROOT / "build").mkdir(exist_ok=True)
    words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    settings = {"HPCPS_EXT": "on", "HPCPS_CUDA": "on", "HPCPS_CUDA_ARCHS": capability}
    return run(f"building with CUDA for sm_{capability}", words, BUILD_LIMIT_S, **settings)


# --- timing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    name: str
    seconds: float
    num_bytes: float
    share: float
    bar: float


def time_of(rig: Any, work: Callable[[], object]) -> float:
    """Seconds of one call: the best turn of several calls that are queued together."""
    work()
    rig.synchronize()
    best = float("inf")
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(REPEATS):
            work()
        rig.synchronize()
        best = min(best, (time.perf_counter() - begin) / REPEATS)
    return best


def works(rig: Any, numel: int) -> Iterator[tuple[str, Callable[[], object], float, float]]:
    """Name, call, bytes of memory read and written, and bar, for each kernel or sequence of kernels."""
    rng = np.random.default_rng(0)
    host = rng.standard_normal(numel, dtype=np.float32)
    x, residual, acc = rig.to_device(host), rig.xp.zeros(numel, np.float32), rig.xp.zeros(numel, np.float32)
    codecs, keep = rig.codecs, max(1, round(TOPK_FRAC * numel))
    for codec, name in enumerate(NAMES):
        if codec == PACKED:
            x = rig.to_device(host * (rng.random(numel) < 0.5))
        room = 5 * numel + 4096 if codec != TOPK else 16 + 4 * keep + numel // 127
        out = rig.xp.empty(room, np.uint8)
        passes = 40 if codec == TOPK else 16 if codec == PACKED else 8  # five, two and one of x and residual
        for owed, what in ((None, "encode"), (residual, "encode with feedback")):
            traffic = numel * (
                (passes if owed is not None else passes / 2) + WIRE_BYTES[codec] + 4 * (owed is not None)
            )
            call = bind(codecs.begin, codec, x, out, residual=owed, keep=keep if codec == TOPK else 0)
            yield f"{name} {what}", call, traffic, TOPK_BAR if codec == TOPK else DENSE_BAR
        payload = out[: codecs.encode(codec, x, out, keep=keep if codec == TOPK else 0)[0]]
        if codec == TOPK:
            call = bind(codecs.decode_accumulate, acc, [payload], [codec], [0.5])
            yield f"{name} decode-accumulate, waits", call, 2 * payload.size + 8.0 * keep, 0.0
            continue
        for num_terms in (1, NUM_TERMS):
            terms = [payload] * num_terms, [codec] * num_terms, [0.5] * num_terms
            what = f"{name} decode-accumulate" + (f" of {num_terms}" if num_terms > 1 else "")
            traffic = numel * (8 + num_terms * WIRE_BYTES[codec])
            if codec == PACKED:  # a look at the payload first, and a pass over the sum for each
                what, traffic = f"{what}, waits", numel * num_terms * (8 + WIRE_BYTES[codec])
            yield what, bind(codecs.decode_accumulate, acc, *terms), traffic, 0.0 if codec == PACKED else DENSE_BAR


def bind(call: Callable[..., object], *args: Any, **options: Any) -> Callable[[], object]:
    return lambda: call(*args, **options)


def measure(name: str, numel: int) -> list[Line]:
    """All lines of a place, the copy first."""
    from rigs import make_rig

    rig = make_rig(name)
    a, b = rig.xp.zeros(numel, np.float32), rig.xp.empty(numel, np.float32)
    seconds = time_of(rig, lambda: rig.xp.copyto(b, a))
    copy_rate = 8 * numel / seconds
    lines = [Line("copy on the device", seconds, 8 * numel, 1.0, 0.0)]
    for what, work, traffic, bar in works(rig, numel):
        seconds = time_of(rig, work)
        lines.append(Line(what, seconds, traffic, traffic / seconds / copy_rate, bar))
    if name == "cupy":
        lines.append(measure_staging(rig, numel))
    return lines


def measure_staging(rig: Any, numel: int) -> Line:
    """A payload of fp16 through the ring, checked, beside a plain copy to pinned memory."""
    from hpcps.device import StagingRing, StreamCopier

    payload = rig.to_device(np.random.default_rng(1).integers(0, 256, 2 * numel, dtype=np.uint8))
    copier = StreamCopier(rig.xp)
    ring = StagingRing(2, payload.size, copier=copier)
    plain = copier.allocate(payload.size)

    def stage() -> None:
        slot = ring.stage(payload)
        slot.wait()
        ring.release(slot)

    slot = ring.stage(payload)
    assert np.array_equal(slot.wait(), rig.to_host(payload)), "staging changed the payload"
    ring.release(slot)
    beside = time_of(rig, lambda: payload.get(out=plain))
    seconds = time_of(rig, stage)
    return Line("fp16 payload to the host, beside a plain copy", seconds, payload.size, beside / seconds, STAGED_BAR)


def report(place: str, lines: list[Line], numel: int) -> None:
    width = max(len(line.name) for line in lines)
    print(f"\n{place}, {numel} elements\n{'':<{width}}        ms      GB/s  of a copy")
    for line in lines:
        rate = line.num_bytes / line.seconds / 1e9
        print(f"{line.name:<{width}}  {1e3 * line.seconds:>8.3f}  {rate:>8.1f}  {line.share:>9.2f}")
    print()
    for line in lines:
        if line.bar:
            name = "_".join(line.name.replace(",", "").replace("-", " ").split())
            print(
                f"figure gpu_{place}_{name} {line.share:.4f} {line.bar:g} {'ok' if line.share >= line.bar else 'SHORT'}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Build, test and time the GPU path.")
    parser.add_argument("--elems", type=int, default=1 << 26, help="elements of the arrays that are timed")
    parser.add_argument("--no-build", action="store_true", help="take the extension as it is")
    args = parser.parse_args()
    name, found = find_gpu()
    if not name:
        print(f"gpu-check: no GPU here: {found}; testing the kernels on this CPU instead", flush=True)
        return run_tests()
    print(f"gpu-check: {name}, sm_{found}", flush=True)
    failed = []
    if not args.no_build and (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        failed += ["build"] if build(found) else []
    failed += ["tests"] if run_tests() else []
    from rigs import why_not

    timed = 0
    for place in ("cupy", "built"):
        reason = why_not(place)
        if reason:
            print(f"gpu-check: {place} left out: {reason}")
            continue
        report(place, measure(place, args.elems), args.elems)
        timed += 1
    failed += [] if timed else ["timing: neither CuPy nor the extension can use the GPU"]
    print(f"gpu-check: {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
