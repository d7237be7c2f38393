"""Start a program with a time limit and read what it found; say whether a figure reaches its bar. Measures nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hpcps.report.events import RunEvents, read_run

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("HPCPS_DATA", ROOT.parent / "shared" / "data"))
"""Folder of public data sets that the project does not carry: beside the project, or where HPCPS_DATA says."""
TAIL_LINES = 40
_RESULT = "result "


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured number with its bar; ``at_most``: smaller is better."""

    name: str
    value: float
    bar: float
    at_most: bool = False

    @property
    def state(self) -> str:
        reached = self.value <= self.bar if self.at_most else self.value >= self.bar
        return "ok" if reached else "SHORT"

    def line(self) -> str:
        """``figure NAME VALUE BAR ok|SHORT``."""
        value = f"{self.value:.0f}" if self.value >= 100 else f"{self.value:.4f}"
        return f"figure {self.name} {value} {self.bar:g} {self.state}"


def launch_words(num_ranks: int, flags: Sequence[str], script: Path, arguments: Sequence[str]) -> list[str]:
    """The command that starts a script on several ranks."""
    words = [sys.executable, "-m", "hpcps", "launch", "-n", str(num_ranks), *flags]
    return [*words, str(script), *arguments]


def run_program(words: Sequence[str], *, name: str, limit_s: float, log: Path | None = None) -> str:
    """Run a program to its end, one thread a process; leave the whole program if it fails.

    Args:
        words: the command.
        name: of the run, for the error.
        limit_s: longest time.
        log: file for what it prints, its last lines are shown if it fails; None: it prints on the terminal.

    Returns: what it printed to ``log``.
    """
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
    if log is None:
        problem = _wait(words, environment, limit_s, None)
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            problem = _wait(words, environment, limit_s, sink)
    text = "" if log is None else log.read_text(errors="replace")
    if problem:
        print("\n".join(text.splitlines()[-TAIL_LINES:]), file=sys.stderr)
        where = f"; all it printed is in {log}" if log is not None else ""
        raise SystemExit(f"cannot finish run {name}: {problem}{where}")
    return text


def run_paced(
    folder: Path,
    flags: Sequence[str],
    *,
    num_workers: int,
    num_steps: int,
    global_batch: int,
    small: bool = False,
    limit_s: float = 300.0,
) -> RunEvents:
    """Train a small network on one server and some workers whose devices are emulated; the events of the run.

    Args:
        folder: of the run's events, emptied first; its log lies beside it.
        flags: of ``hpcps launch``.
        num_workers: ranks that train.
        num_steps: full batches.
        global_batch: samples of one.
        small: a network of few parameters, for many ranks on few cores.
        limit_s: longest time.
    """
    shutil.rmtree(folder, ignore_errors=True)
    arguments = ["--steps", str(num_steps), "--batch", str(global_batch), *(["--small"] if small else [])]
    flags = [*flags, "--server-num", "1", "--log-dir", str(folder)]
    words = launch_words(num_workers + 1, flags, ROOT / "tests" / "bench" / "uneven.py", arguments)
    run_program(words, name=folder.name, limit_s=limit_s, log=folder.with_suffix(".log"))
    return read_run(folder)


def write_result(**values: float) -> None:
    """Print what a run found, as one line that `read_results` finds again."""
    sys.stdout.write(_RESULT + json.dumps(values) + "\n")
    sys.stdout.flush()


def read_results(text: str) -> list[dict[str, Any]]:
    """Every result line in what a program printed, in order."""
    return [json.loads(line[len(_RESULT) :]) for line in text.splitlines() if line.startswith(_RESULT)]


def _wait(words: Sequence[str], environment: dict[str, str], limit_s: float, sink: IO[bytes] | None) -> str:
    """Run to the end; returns what went wrong."""
    errors = None if sink is None else subprocess.STDOUT
    process = subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, stdout=sink, stderr=errors)
    try:
        code = process.wait(timeout=limit_s)
    except BaseException as error:
        _stop(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"it still ran after {limit_s:.0f} s"
    return "" if code == 0 else f"exit code {code}, need 0"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and what it started; it gets ten seconds to do so itself."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
