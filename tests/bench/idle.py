"""What waiting costs: cores that 8 ranks together use while their workers pause, or wait for one of them.

Two runs under mpirun, a server and seven workers. In ``pause`` every worker sleeps between two steps; in ``barrier``
the first worker sleeps and the others wait for it at a barrier. The cost is the processor time of all ranks over
WINDOW_S seconds of that quiet time, read from /proc by this process, which is no rank. The launcher's own is shown
beside it.
Each run prints one line, ``figure idle_cores_WAY VALUE LIMIT ok|SHORT``. SHORT does not make this program fail; a run
that fails does.

    python tests/bench/idle.py [--ranks N]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTLE_S = 2.0
WINDOW_S = 5.0
PAUSE_S = 10.0  # the window and the settling lie inside, with room for late starters
LIMIT_CORES = 0.15
RUN_LIMIT_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SCRIPT = f"""
import os, sys, time
from pathlib import Path

import torch

import hpcps
import hpcps.torch as ht

way, folder = sys.argv[1], Path(sys.argv[2])
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
(folder / f"rank-{{rank}}").write_text(str(os.getpid()))
with hpcps.init(log={{"dir": str(folder / "logs"), "progress_s": 1000.0}}) as job:
    model = torch.nn.Linear(64, 64)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
    loader = ht.DistributedLoader(torch.utils.data.TensorDataset(torch.randn(640, 64)), global_batch=64, job=job)
    for _ in job.epochs(1):
        for batch, in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if job.num_steps == 3:
                (folder / f"quiet-{{rank}}").touch()
                if way == "pause" or job.is_first:
                    time.sleep({PAUSE_S})
                if way == "barrier":
                    job.barrier()
"""


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def wait_for(folder: Path, pattern: str, count: int, child: subprocess.Popen[bytes]) -> list[Path]:
    """The files that ranks write to say where they are."""
    end_s = time.monotonic() + RUN_LIMIT_S
    while len(found := sorted(folder.glob(pattern))) < count:
        if child.poll() is not None or time.monotonic() > end_s:
            sys.exit(f"idle: cannot measure: {len(found)} of {count} {pattern}; see {folder / 'output.txt'}")
        time.sleep(0.05)
    return found


def measure(way: str, num_ranks: int, folder: Path) -> tuple[float, float]:
    """Cores used by the ranks, and by the launcher, in the quiet time of one run."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "hpcps", "launch", "-n", str(num_ranks), str(script), way, str(folder)]
    with open(folder / "output.txt", "wb") as output:
        child = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(folder, "quiet-*", num_ranks - 1, child)
        pids = [int(path.read_text()) for path in wait_for(folder, "rank-*", num_ranks, child)]
        launchers = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
        time.sleep(SETTLE_S)
        before, before_launcher = sum(map(cpu_s, pids)), sum(map(cpu_s, launchers))
        began_s = time.monotonic()
        time.sleep(WINDOW_S)
        seconds = time.monotonic() - began_s
        cores = (sum(map(cpu_s, pids)) - before) / seconds
        launcher_cores = (sum(map(cpu_s, launchers)) - before_launcher) / seconds
        if child.wait(RUN_LIMIT_S) != 0:
            sys.exit(f"idle: the run ended with {child.returncode}: {(folder / 'output.txt').read_text()[-2000:]}")
        return cores, launcher_cores
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what waiting ranks cost.")
    parser.add_argument("--ranks", type=int, default=8, help="ranks in all, one of them a server")
    args = parser.parse_args()
    for way in ("pause", "barrier"):
        with tempfile.TemporaryDirectory() as folder:
            cores, launcher_cores = measure(way, args.ranks, Path(folder))
        verdict = "ok" if cores <= LIMIT_CORES else "SHORT"
        print(f"{args.ranks} ranks, {way}: {cores:.3f} cores, and the launcher {launcher_cores:.3f}")
        print(f"figure idle_cores_{way} {cores:.3f} {LIMIT_CORES} {verdict}", flush=True)


if __name__ == "__main__":
    main()
