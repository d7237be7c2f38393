"""Runs tests/mpi under mpirun at several rank counts and judges all ranks together.

    python tests/mpi_suite.py run --stack system --sizes 1 2 4 [--net] [--reports DIR] [-- PYTEST ARGS...]

Each size is one mpirun of ``python -m pytest --with-mpi tests/mpi``. Rank 0 writes to the terminal; every other rank to
DIR/nN/rankR.log, which is shown when that rank fails. Each rank writes a junit file of its own. A test passes at a size
when it passed on every rank; one that ran at no size fails the run. The last line is ``N passed, N failed, N skipped``,
counted in tests at a size. TIMEOUT_S (default 420) ends a size that does not finish.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
STACKS_S = 45  # of one test; then every rank that is still in it prints its stacks
TEST_TIMEOUT_S = 60  # of one test; pytest-timeout then ends the rank, and with it all
TAIL_LINES = 60  # of a failed rank's log


@dataclass
class Tally:
    """What became of the tests, over all sizes."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    ran: set[str] = field(default_factory=set)
    never_ran: set[str] = field(default_factory=set)

    def fail(self, text: str) -> None:
        self.failed += 1
        print(f"FAILED {text}", flush=True)


def run_rank(directory: Path, pytest_args: list[str]) -> None:
    """Become the pytest of this rank."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)
    if rank is None:
        sys.exit(f"cannot tell this process's rank: none of {', '.join(RANK_VARIABLES)} is set; start it by mpirun")
    if rank != "0":
        with open(directory / f"rank{rank}.log", "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    command = [sys.executable, "-m", "pytest", "--with-mpi", str(ROOT / "tests" / "mpi")]
    command += ["-p", "no:cacheprovider", "--color=no", "--timeout", str(TEST_TIMEOUT_S), "--timeout-method", "thread"]
    command += ["-o", f"faulthandler_timeout={STACKS_S}", f"--junitxml={directory}/rank{rank}.xml", *pytest_args]
    os.execv(sys.executable, command)


def read_outcomes(path: Path) -> dict[str, str]:
    """Outcome of each test in a junit file: passed, failed or skipped."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        # a test whose teardown fails has two entries
        outcomes[name] = "failed" if "failed" in (outcome, outcomes.get(name)) else outcome
    return outcomes


def judge_size(tally: Tally, directory: Path, size: int, mpirun_rc: int) -> None:
    """Add one size's outcomes to the tally, and show the logs of its failed ranks."""
    by_rank: list[dict[str, str]] = []
    suspects = set()
    failed_before = tally.failed
    for rank in range(size):
        try:
            by_rank.append(read_outcomes(directory / f"rank{rank}.xml"))
        except (OSError, ElementTree.ParseError) as error:
            by_rank.append({})
            suspects.add(rank)
            tally.fail(f"n={size} rank {rank}: left no result ({type(error).__name__})")
    for name in sorted(set().union(*by_rank)):
        outcomes = [ranks.get(name, "missing") for ranks in by_rank]
        if set(outcomes) == {"passed"}:
            tally.passed += 1
            tally.ran.add(name)
        elif set(outcomes) == {"skipped"}:
            tally.skipped += 1
            tally.never_ran.add(name)
        else:
            tally.ran.add(name)
            suspects |= {rank for rank, outcome in enumerate(outcomes) if outcome != "passed"}
            tally.fail(f"n={size} {name}: by rank {', '.join(outcomes)}")
    if mpirun_rc and tally.failed == failed_before:
        tally.fail(f"n={size}: every test was well, but mpirun ended with {mpirun_rc}")
        suspects = set(range(size))
    for rank in sorted(suspects - {0}):
        log = directory / f"rank{rank}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else ["(no log)"]
        print(f"--- n={size} rank {rank}, end of {log}", *lines[-TAIL_LINES:], sep="\n", flush=True)


def run_sizes(arguments: argparse.Namespace) -> int:
    """Run every size, judge, and print the closing line."""
    tally = Tally()
    os.environ.setdefault("TIMEOUT_S", "420")
    script = ROOT / "tests" / ("net/run.sh" if arguments.net else "mpirun.sh")
    for size in arguments.sizes:
        directory = arguments.reports / f"{arguments.stack}{'-net' if arguments.net else ''}" / f"n{size}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        print(f"=== tests/mpi, n={size}, {arguments.stack}{', a node a rank' if arguments.net else ''}", flush=True)
        command = [str(script), arguments.stack, str(size), "--", sys.executable, __file__, "rank", str(directory)]
        done = subprocess.run([*command, *arguments.pytest_args], cwd=ROOT, check=False)
        judge_size(tally, directory, size, done.returncode)
    if not arguments.net:
        for name in sorted(tally.never_ran - tally.ran):
            tally.fail(f"{name}: ran at none of n={arguments.sizes}")
    if not tally.passed and not tally.failed:
        tally.fail(f"{ROOT / 'tests' / 'mpi'}: no test ran")
    print(f"{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped", flush=True)
    return 1 if tally.failed else 0


def main(argv: list[str]) -> int:
    """Read the command line."""
    if argv[:1] == ["rank"]:
        run_rank(Path(argv[1]), argv[2:])
    parser = argparse.ArgumentParser(description="Run tests/mpi under mpirun at several rank counts.")
    parser.add_argument("verb", choices=["run"])
    parser.add_argument("--stack", choices=["openmpi", "mpich", "system"], default="system")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--net", action="store_true", help="a network namespace a rank; as root")
    parser.add_argument("--reports", type=Path, default=ROOT / "build" / "reports")
    own, pytest_args = argv, []
    if "--" in argv:
        cut = argv.index("--")
        own, pytest_args = argv[:cut], argv[cut + 1 :]
    arguments = parser.parse_args(own)
    arguments.pytest_args = pytest_args
    return run_sizes(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
