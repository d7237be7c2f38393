"""Real computation under quotas of the processor: shares follow what each worker can do, and a change of it.

Three workers of 0.6, 0.3 and 0.3 of a core and a server of 0.5; then the first worker is cut to a third. No speed is
stated to hpcps, and how much is done in a second of processor varies on shared hosts: so the bars are wide.

    python tests/bench/quotas.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
from pathlib import Path

from runs import ROOT, Figure, launch_words, run_program

from hpcps.report.events import RunEvents, read_run

sys.path.append(str(ROOT / "tests" / "lab"))

from quota import Change, at_step, changing, cpu_quota, why_not

SERVER_CORES = 0.5
WORKER_CORES = (0.6, 0.3, 0.3)
CUT = 3.0
CUT_STEP = 90
NUM_STEPS = 170
GLOBAL_BATCH = 2048
WIDTHS = "256:512:512:10"  # 0.4 M parameters: little to send, much to compute
BEFORE_BAR, AFTER_BAR = 1.4, 0.95  # ideal 2 and 0.67


def run_one(folder: Path) -> RunEvents:
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--server-num", "1", "--sync-mode", "sync", "--heterogeneous", "--log-dir", str(folder)]
    arguments = ["--steps", str(NUM_STEPS), "--batch", str(GLOBAL_BATCH), "--widths", WIDTHS]
    with contextlib.ExitStack() as stack:
        quotas = [
            stack.enter_context(cpu_quota(f"rank-{rank}", cores))
            for rank, cores in enumerate((SERVER_CORES, *WORKER_CORES))
        ]
        arguments += ["--quotas", ",".join(f"{rank}={quota.procs}" for rank, quota in enumerate(quotas))]
        words = launch_words(len(quotas), flags, ROOT / "tests" / "bench" / "limited.py", arguments)
        due = at_step(folder / "events-r001.jsonl", CUT_STEP)
        with changing([Change(due=due, quota=quotas[1], cores=WORKER_CORES[0] / CUT)]):
            run_program(words, name="quotas", limit_s=300.0, log=folder.with_suffix(".log"))
    return read_run(folder)


def share_ratio(run: RunEvents, begin: int, end: int) -> float:
    """Samples of the first worker over those of the mean other one, in the median step of a range."""
    counts: dict[int, dict[int, int]] = {}
    for step in run.steps:
        counts.setdefault(step.step, {})[step.rank] = step.num_samples
    ratios = [
        row[1] * (len(row) - 1) / (sum(row.values()) - row[1])
        for number, row in counts.items()
        if begin <= number < end and len(row) == len(WORKER_CORES)
    ]
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train under quotas of the processor.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-adaptive" / "quotas", help="folder of runs")
    args = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"left out: quotas: {reason}")
        return
    run = run_one(args.out.resolve() / "run")
    before = share_ratio(run, CUT_STEP - 40, CUT_STEP)
    after = share_ratio(run, CUT_STEP + 30, NUM_STEPS)
    step_s = [step.step_s for step in run.steps if step.rank == 1 and CUT_STEP - 40 <= step.step < CUT_STEP]
    print(
        f"quotas: steps of {1e3 * statistics.median(step_s):.0f} ms; the first worker's share over the others':"
        f" {before:.2f} before its quota was cut to a third, {after:.2f} after; quotas say 2.00 and 0.67"
    )
    for change in run.changes:
        print(f"quotas: rank {change.worker}: {change.reason}")
    figures = [
        Figure(name="quotas_share_before", value=before, bar=BEFORE_BAR),
        Figure(name="quotas_share_after", value=after, bar=AFTER_BAR, at_most=True),
    ]
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
