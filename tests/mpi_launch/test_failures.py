"""A failure on any rank: its traceback is shown with its rank, every process goes, the job's exit code tells of it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job, RunMpi, mpirun_words, processes

from hpcps.launch.environment import mpi_family

SCRIPT = str(Path(__file__).with_name("failing.py"))
GONE_S = 10.0  # from the failure until the last process of the job has left


def expect_end(job: Job) -> None:
    """Nothing is left of the job soon after the failure, and its exit code is not 0."""
    failed_s = float((job.folder / "failed").read_text())
    assert job.wait_until_gone(GONE_S) == []
    assert job.ended_s - failed_s <= GONE_S
    assert job.rc != 0, job.output


def first_traceback(output: str) -> str:
    """The first line of the output that begins a traceback."""
    return next((line.strip() for line in output.splitlines() if "Traceback (most recent call last)" in line), "none")


@pytest.mark.parametrize(
    ("place", "rank"),
    [("loop", 2), ("dataset", 3), ("before_step", 1), ("server", 0)],
)
def test_exception_shows_its_traceback_and_ends_all(run_mpi: RunMpi, place: str, rank: int) -> None:
    job = run_mpi.launch(4, SCRIPT, place, str(rank))
    expect_end(job)
    assert first_traceback(job.output).endswith(f"[rank {rank}] Traceback (most recent call last):"), job.output
    assert f"[rank {rank}] RuntimeError: planned failure in {place} on rank {rank}" in job.output
    assert "planned failure" in (run_mpi.folder / "hpcps-run" / f"rank-{rank:03d}.log").read_text()


@pytest.mark.parametrize("place", ["before_init", "open_logs"])
def test_exception_before_the_rank_has_joined_ends_all(run_mpi: RunMpi, place: str) -> None:
    job = run_mpi.launch(4, SCRIPT, place, "2")
    expect_end(job)
    assert f"[rank 2] RuntimeError: planned failure in {place} on rank 2" in job.output


@pytest.mark.parametrize(("place", "rank"), [("loop", 2), ("server", 0), ("before_init", 1)])
def test_script_under_plain_mpirun_ends_the_same_way(run_mpi: RunMpi, place: str, rank: int) -> None:
    if place == "before_init" and mpi_family(os.environ) == "mpich":
        pytest.skip("MPICH's mpirun waits for ranks that end before MPI begins, and hpcps is not even loaded then")
    job = run_mpi.mpirun(3, SCRIPT, place, str(rank))
    expect_end(job)
    assert f"RuntimeError: planned failure in {place} on rank {rank}" in job.output
    if place != "before_init":
        assert first_traceback(job.output).endswith(f"[rank {rank}] Traceback (most recent call last):"), job.output


@pytest.mark.parametrize("by", ["launch", "mpirun"])
def test_exit_code_of_a_worker_ends_all(run_mpi: RunMpi, by: str) -> None:
    start: Callable[..., Job] = run_mpi.launch if by == "launch" else run_mpi.mpirun
    job = start(3, SCRIPT, "exit3", "1")
    expect_end(job)
    assert "[rank 1] SystemExit: 3" in job.output


def test_models_that_differ_are_refused_by_rank(run_mpi: RunMpi) -> None:
    job = run_mpi.launch(4, SCRIPT, "other_model", "3")
    assert job.rc != 0 and job.wait_until_gone(GONE_S) == []
    assert re.search(
        r"PlanMismatchError: cannot start training: rank 3 has plan \S+, rank 1 has \S+; build the same model and"
        r" optimizer on every worker",
        job.output,
    ), job.output


def test_datasets_that_differ_are_refused_by_rank(run_mpi: RunMpi) -> None:
    job = run_mpi.launch(4, SCRIPT, "other_dataset", "2")
    assert job.rc != 0 and job.wait_until_gone(GONE_S) == []
    assert re.search(
        r"DataError: cannot share out loader 0: rank \d has (4000|4001) samples and global batch 20, others"
        r" (4000|4001) and 20; build the same dataset on every worker, from one seed",
        job.output,
    ), job.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("by", ["launch", "mpirun"])
def test_signal_to_the_launcher_leaves_nothing_behind(run_mpi: RunMpi, by: str, number: signal.Signals) -> None:
    launch = [sys.executable, "-m", "hpcps", "launch", "-n", "3"]
    words = [*launch, SCRIPT, "nowhere", "0"] if by == "launch" else mpirun_words(3, SCRIPT, "nowhere", "0")
    child, mark = run_mpi.start(words, {"VENV": sys.prefix})
    wait_until_training(run_mpi, ranks=(1, 2))
    assert len(processes(mark)) >= 4
    os.kill(child.pid, number)
    job = run_mpi.finish(child, mark, timeout_s=30.0)
    assert job.rc != 0
    assert job.wait_until_gone(GONE_S) == []


def wait_until_training(run_mpi: RunMpi, *, ranks: tuple[int, ...]) -> None:
    end_s = time.monotonic() + 60.0
    while not all((run_mpi.folder / f"trains-{rank}").exists() for rank in ranks):
        assert time.monotonic() < end_s, run_mpi.output()
        time.sleep(0.1)
