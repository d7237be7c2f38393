"""What a start does: refusals of a wrong launcher, settings on the command line, log files, exit code 0."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from launching import ROOT, RunMpi

DIGITS = str(ROOT / "examples" / "digits.py")
ALONE = """
import hpcps

with hpcps.init() as job:
    print("a world of", job.num_workers)
"""


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"},
    ],
    ids=["mpirun", "srun"],
)
def test_launcher_with_many_ranks_and_a_world_of_one_is_refused(run_mpi: RunMpi, environ: dict[str, str]) -> None:
    job = run_mpi.finish(*run_mpi.start([sys.executable, run_mpi.script(ALONE)], environ), timeout_s=30.0)
    assert job.rc != 0
    assert "LaunchError: cannot start rank 2 of 4: " in job.output
    assert "sees a world of 1, need 4; start with " in job.output
    assert job.wait_until_gone(5.0) == []


def test_script_by_hand_is_a_world_of_one(run_mpi: RunMpi) -> None:
    job = run_mpi.finish(*run_mpi.start([sys.executable, run_mpi.script(ALONE)]), timeout_s=30.0)
    assert (job.rc, job.output) == (0, "a world of 1\n")
    assert not (run_mpi.folder / "hpcps-run").exists()


@pytest.mark.parametrize("plane", ["rma", "p2p"])
def test_digits_run_to_a_good_end_on_both_planes(run_mpi: RunMpi, plane: str) -> None:
    job = run_mpi.launch(3, "--comm-mode", plane, "--log-dir", "logs", DIGITS, "--epochs", "4")
    assert job.rc == 0, job.output
    assert job.wait_until_gone(10.0) == []
    assert "Traceback" not in job.output
    assert "hpcps.summary: test_accuracy 0." in job.output
    server_log = (run_mpi.folder / "logs" / "rank-000.log").read_text()
    assert f"data plane {plane} (" in server_log
    check_logs(run_mpi.folder / "logs", num_ranks=3)


def check_logs(folder: Path, *, num_ranks: int) -> None:
    """Private to the user: the folder, and a log and an event file of each rank."""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir()}
    wanted = {f"rank-{rank:03d}.log" for rank in range(num_ranks)}
    wanted |= {f"events-r{rank:03d}.jsonl" for rank in range(num_ranks)}
    assert names == wanted
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(wanted, 0o600)


def test_show_config_says_where_each_value_comes_from(run_mpi: RunMpi) -> None:
    job = run_mpi.launch(3, "--sync-mode", "async", "--comm_mode=p2p", "--show-config", DIGITS)
    assert job.rc == 0
    lines = [" ".join(line.split()) for line in job.output.splitlines()]
    assert any(line.startswith('sync_mode = "async"') and "command line" in line for line in lines), job.output
    assert any(line.startswith('comm.mode = "p2p"') and "command line" in line for line in lines), job.output
    assert any(line.startswith("server_num = 1") and "default" in line for line in lines), job.output


def test_typo_is_refused_before_anything_starts(run_mpi: RunMpi) -> None:
    job = run_mpi.launch(3, "--sync-mod", "async", DIGITS)
    assert job.rc == 2
    assert "--sync-mode" in job.output and "Traceback" not in job.output


def test_speeds_that_do_not_fit_the_workers_end_every_rank(run_mpi: RunMpi) -> None:
    job = run_mpi.launch(3, "--emulate-speeds", "3:2:1", DIGITS)
    assert job.rc != 0
    assert "LaunchError: cannot emulate speeds 3:2:1: got 3, need 2, one a worker" in job.output
    assert job.wait_until_gone(10.0) == []
