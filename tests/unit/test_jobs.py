"""The batch scripts: bash accepts them, and they start ranks the way that Slurm and MPI need."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcps.cli.options import read_request
from hpcps.cli.run import make_parser

JOBS = Path(__file__).resolve().parents[2] / "jobs"
NAMES = ("train.sbatch", "train_het.sbatch", "train_mpirun.sbatch")
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "cn[1-2]",
    "SLURM_NTASKS_HET_GROUP_0": "2",
    "SLURM_CPUS_PER_TASK_HET_GROUP_0": "3",
    "SLURM_CPUS_PER_TASK_HET_GROUP_1": "5",
}
HET_RANK = (
    "hpcps run --server-num 2 --server-endpoints cn1,cn2 --heterogeneous --log-dir hpcps-run-77 train.py --epochs 3"
)
RANK = "hpcps run --server-num 1 --heterogeneous --log-dir hpcps-run-77 train.py --epochs 3"
# script: the command that it ends in
COMMANDS = {
    "train.sbatch": f"srun --mpi=pmix --kill-on-bad-exit=1 --ntasks=8 --cpus-per-task=4 {RANK}",
    "train_het.sbatch": (
        f"srun --mpi=pmix --kill-on-bad-exit=1 --het-group=0 --cpus-per-task=3 {HET_RANK}"
        f" : --het-group=1 --cpus-per-task=5 {HET_RANK}"
    ),
    "train_mpirun.sbatch": f"mpirun --bind-to none -n 8 {RANK}",
}


def started(name: str, folder: Path, **more: str) -> str:
    """The command that a script starts, with stand-ins for Slurm's and MPI's programs."""
    for program in ("srun", "mpirun"):
        (folder / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
    (folder / "scontrol").write_text("#!/bin/sh\necho cn1; echo cn2\n")
    for program in ("srun", "mpirun", "scontrol"):
        (folder / program).chmod(0o755)
    done = subprocess.run(
        ["bash", str(JOBS / name), "train.py", "--epochs", "3"],
        env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **SLURM, **more},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_script_is_listed() -> None:
    assert sorted(path.name for path in JOBS.glob("*.sbatch")) == sorted(NAMES)
    readme = (JOBS / "README.md").read_text()
    assert [name for name in NAMES if name not in readme] == []


@pytest.mark.parametrize("name", NAMES)
def test_bash_accepts_it(name: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-n", str(JOBS / name)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_it_starts_this_command(name: str, tmp_path: Path) -> None:
    assert started(name, tmp_path) == COMMANDS[name]


@pytest.mark.parametrize("name", ["train.sbatch", "train_het.sbatch"])
def test_the_kind_of_mpi_can_be_chosen(name: str, tmp_path: Path) -> None:
    assert started(name, tmp_path, HPCPS_PMI="pmi2").startswith("srun --mpi=pmi2 --kill-on-bad-exit=1")


@pytest.mark.parametrize("name", NAMES)
def test_hpcps_accepts_the_flags(name: str) -> None:
    for part in COMMANDS[name].split(" : "):
        words = shlex.split(part)
        request = read_request(make_parser(), words[words.index("run") + 1 :], {})
        assert request.program == ("train.py", "--epochs", "3")
        assert request.resolved.config.heterogeneous


@pytest.mark.parametrize("name", NAMES)
def test_it_stops_at_the_first_error_and_exports_nothing(name: str) -> None:
    text = (JOBS / name).read_text()
    assert re.search(r"^set -euo pipefail$", text, re.MULTILINE)
    assert not re.search(r"^\s*export\b", text, re.MULTILINE)
    assert "#SBATCH --job-name=hpcps" in text
