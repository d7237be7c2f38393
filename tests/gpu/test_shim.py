"""The shim itself: it notices wrong kernels and wrong calls, and it depends on its seed only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from host_module import KERNELS
from rigs import make_rig
from test_gpu_codecs import check_encode, numbers

from hpcps.plan import Codec

SYNCS = [
    line
    for line, text in enumerate((KERNELS / "topk.cuh").read_text().splitlines(), start=1)
    if "__syncthreads()" in text
]


def test_each_place_is_used_or_gives_its_reason(reason):
    if reason:
        pytest.skip(reason)


def test_only_one_file_has_barriers():
    """So that a line names one."""
    texts = {path.name: path.read_text() for path in KERNELS.iterdir() if path.is_file()}
    assert [name for name, text in texts.items() if "__syncthreads()" in text] == ["topk.cuh"]
    assert len(SYNCS) >= 4


@pytest.mark.parametrize("line", [-1, *SYNCS])
def test_a_missing_barrier_is_noticed(shim_rig, line):
    """In a process of its own, since a wrong kernel may write anywhere."""
    command = [sys.executable, str(Path(__file__).with_name("mutant.py")), str(line)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) == (line == -1), done.stderr
    assert "Traceback" not in done.stderr or "AssertionError" in done.stderr or "ValueError" in done.stderr


def test_threads_at_different_barriers_are_reported(shim_rig):
    kernel = shim_rig.module.get_function("shim_divergent_kernel")
    out = np.zeros(64, np.uint32)
    with pytest.raises(
        RuntimeError, match=r"^shim_divergent_kernel: threads wait at the barriers of lines \d+ and \d+$"
    ):
        kernel((1,), (64,), (out, np.int32(0)))
    with pytest.raises(
        RuntimeError, match=r"^shim_divergent_kernel: 32 threads ended without the barrier of line \d+$"
    ):
        kernel((1,), (64,), (out, np.int32(1)))


def test_a_lane_that_never_comes_is_reported(shim_rig):
    kernel = shim_rig.module.get_function("shim_lost_lane_kernel")
    with pytest.raises(RuntimeError, match=r"deadlock: 0 threads at a barrier, 31 at a warp collective, 33 ended$"):
        kernel((1,), (64,), (np.zeros(64, np.uint32),))


def test_after_an_error_kernels_run_again(shim_rig):
    with pytest.raises(RuntimeError, match="deadlock"):
        shim_rig.module.get_function("shim_lost_lane_kernel")((1,), (64,), (np.zeros(64, np.uint32),))
    check_encode(shim_rig, Codec.TOPK, numbers(1, 3000), None, keep=30)


GOOD = (np.zeros(4, np.uint64), np.int64(4), np.zeros(1, np.uint64))
WRONG = [
    ((GOOD[0], 4, GOOD[2]), r"argument 1: int, need a numpy scalar of kind i and 8 bytes"),
    ((GOOD[0], np.int32(4), GOOD[2]), r"argument 1: int32, need a numpy scalar of kind i and 8 bytes"),
    ((GOOD[0], np.uint64(4), GOOD[2]), r"argument 1: uint64, need a numpy scalar of kind i"),
    ((GOOD[0], np.float64(4), GOOD[2]), r"argument 1: float64, need a numpy scalar of kind i"),
    ((GOOD[0], np.zeros(1, np.int64), GOOD[2]), r"argument 1: an array, need i64"),
    ((None, GOOD[1], GOOD[2]), r"argument 0: NoneType, need an array or np.uint64\(0\)"),
    ((GOOD[0], GOOD[1], np.uint64(7)), r"argument 2: uint64, need an array or np.uint64\(0\)"),
    (GOOD[:2], r"2 arguments, need 3"),
]


@pytest.mark.parametrize(("args", "message"), WRONG)
def test_wrong_arguments_are_refused(shim_rig, args, message):
    with pytest.raises(TypeError, match=message):
        shim_rig.module.get_function("hpcps_scan_kernel")((1,), (256,), args)


def test_an_unknown_kernel_is_refused(shim_rig):
    with pytest.raises(KeyError, match="hpcps_no_kernel"):
        shim_rig.module.get_function("hpcps_no_kernel")


def test_the_order_follows_the_seed(shim_rig):
    """The divergent kernel's report tells the order only by chance, atomics do: a wrong scan gives other sums."""
    shim_rig.module.skip_barrier(SYNCS[0])
    try:
        sums = [broken_scan(seed) for seed in (1, 2, 3, 1, 2, 3)]
    finally:
        shim_rig.module.skip_barrier(-1)
    assert sums[:3] == sums[3:]
    assert len(set(sums)) > 1


def broken_scan(seed: int) -> tuple[int, ...]:
    rig = make_rig("shim", seed=seed)
    rig.module.skip_barrier(SYNCS[0])
    values = np.arange(2048, dtype=np.uint64)
    rig.module.get_function("hpcps_scan_kernel")((1,), (256,), (values, np.int64(2048), np.zeros(1, np.uint64)))
    return tuple(values.tolist())
