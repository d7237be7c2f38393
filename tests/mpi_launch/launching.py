"""Start a job as a user does, watch it from outside, and leave no process behind.

Every process of the job carries a mark in its environment, by which it is found in /proc: also one whose parent died
and that left the group of its launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "HPCPS_TEST_MARK"
_INHERITED = ("OMPI_", "PMIX", "PMI_", "PMI2_", "HYD", "PRTE_", "MPI_LOCAL", "SLURM_")
"""Of a run that this process may itself be a part of."""


@dataclass
class Job:
    """A job that was started: what it printed, how it ended, and what is left of it."""

    mark: str
    rc: int
    output: str
    seconds: float
    folder: Path
    ended_s: float = field(default_factory=time.time)
    """By the wall clock, as scripts note their own times."""

    def wait_until_gone(self, limit_s: float) -> list[str]:
        """The command lines of the job's processes that are still there after a while; empty where all is well."""
        end_s = time.monotonic() + limit_s
        while (left := processes(self.mark)) and time.monotonic() < end_s:
            time.sleep(0.05)
        self.ended_s = time.time()
        return list(left.values())


def processes(mark: str) -> dict[int, str]:
    """Live processes with a mark: pid and command line."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            if wanted in environ.split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile, or belongs to someone else; a zombie has an empty environment
            continue
    return found


def end_all(mark: str) -> None:
    """Kill what is left of a job."""
    for pid in processes(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without the traces of a launcher."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}
    environ.setdefault("OMP_NUM_THREADS", "1")
    return {**environ, "PYTHONUNBUFFERED": "1", **added}


@dataclass
class RunMpi:
    """Starts jobs in a folder of their own; what they leave behind is killed at the end of the test."""

    folder: Path
    marks: list[str] = field(default_factory=list)

    def start(
        self, words: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], str]:
        """Start a command in a session of its own, its output going to ``output.txt``."""
        mark = uuid.uuid4().hex
        self.marks.append(mark)
        with open(self.folder / "output.txt", "wb") as output:
            child = subprocess.Popen(
                list(words),
                cwd=self.folder,
                env=clean_environment(**(environ or {}), **{MARK: mark, "HPCPS_TEST_DIR": str(self.folder)}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return child, mark

    def finish(self, child: subprocess.Popen[bytes], mark: str, *, timeout_s: float = 60.0) -> Job:
        """Wait for a started command; one that does not end is killed and fails the test."""
        began_s = time.monotonic()
        try:
            rc = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end_all(mark)
            child.wait()
            raise AssertionError(f"the job did not end in {timeout_s} s:\n{self.output()}") from None
        return Job(mark, rc, self.output(), time.monotonic() - began_s, self.folder)

    def output(self) -> str:
        """What was printed so far."""
        return (self.folder / "output.txt").read_bytes().replace(b"\0", b"").decode(errors="replace")

    def launch(self, num_ranks: int, *words: str, timeout_s: float = 60.0) -> Job:
        """Run ``hpcps launch`` on a script or with flags."""
        command = [sys.executable, "-m", "hpcps", "launch", "-n", str(num_ranks), *words]
        return self.finish(*self.start(command), timeout_s=timeout_s)

    def mpirun(self, num_ranks: int, *words: str, timeout_s: float = 60.0) -> Job:
        """Run a plain Python script by mpirun, as the tests' own wrapper calls it."""
        return self.finish(*self.start(mpirun_words(num_ranks, *words), {"VENV": sys.prefix}), timeout_s=timeout_s)

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script; returns its path."""
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def end(self) -> None:
        """Kill whatever is left of all jobs."""
        for mark in self.marks:
            end_all(mark)


def mpirun_words(num_ranks: int, *words: str) -> list[str]:
    """The command line of an mpirun that fits the MPI in use."""
    stack = Path(os.environ.get("MPI4PY_LIBMPI", "/system/lib/libmpi.so")).parents[1].name
    known = stack if stack in ("openmpi", "mpich") else "system"
    return [str(ROOT / "tests" / "mpirun.sh"), known, str(num_ranks), "--", sys.executable, *words]
