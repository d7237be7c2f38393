"""Two servers, of which one becomes four times slower: the other takes over, so that steps are as quick as they can be.

Servers set the pace. Two ways to slow one down:

    quota    real computation, with a dear optimizer (NAdam); the slow server gets a quarter of its part of a core
    script   emulated servers that take so many gradient bytes a second

Ideal: the model's bytes over the sum of the servers' rates. Where rates are quotas, only their ratio is known, so the
ideal is taken from the run's own steps before the change, less the worker's computation. Bar: 0.9 of it in the steps
after the third look at the servers' load that follows the change, to the end; and the look from which on that holds.

    python tests/bench/relief.py [--out FOLDER] [--by quota|script]
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runs import ROOT, Figure, launch_words, run_program

from hpcps.report.events import RunEvents, read_run

sys.path.append(str(ROOT / "tests" / "lab"))

from quota import Change, at_step, changing, cpu_quota, why_not

SLOWER = 4.0
INTERVAL_STEPS = 10
LOOKS = 3
RELIEF_BAR = 0.9
SLOW_STEP = 45  # the change; before it are four looks

SCRIPT_WIDTHS, SCRIPT_SHARD = "64:1000:1000:10", "64KiB"  # 4.3 MB in 66 shards: one is 5 % of the ideal step
SCRIPT_STEP_S = 0.3  # of the servers before the change, far longer than the real work
SCRIPT_STEPS = 120

QUOTA_WIDTHS, QUOTA_SHARD = "64:3000:3000:10", "512KiB"  # 37 MB in 71 shards
QUOTA_CORES = 0.4
QUOTA_STEPS = 130


def launch(folder: Path, flags: Sequence[str], arguments: Sequence[str], *, num_workers: int, shard: str) -> RunEvents:
    """A run to its end."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = (f"routing.interval_steps={INTERVAL_STEPS}", f"comm.shard_bytes={shard}", "comm.poll_max_s=0.002")
    flags = ["--server-num", "2", *flags, *(word for setting in settings for word in ("--set", setting))]
    script = ROOT / "tests" / "bench" / "limited.py"
    words = launch_words(2 + num_workers, [*flags, "--log-dir", str(folder)], script, arguments)
    run_program(words, name=f"relief-{folder.name}", limit_s=300.0, log=folder.with_suffix(".log"))
    return read_run(folder)


# --- by script ---------------------------------------------------------------------------------------


def run_script(folder: Path) -> RunEvents:
    num_bytes = model_bytes(SCRIPT_WIDTHS)
    rate = num_bytes / 2 / SCRIPT_STEP_S
    flags = ["--emulate-server-bytes-per-s", f"{rate:.0f}:{rate:.0f}"]
    flags += ["--emulate-script", f"{SLOW_STEP}:s1={rate / SLOWER:.0f}"]
    arguments = ["--steps", str(SCRIPT_STEPS), "--batch", "8", "--widths", SCRIPT_WIDTHS]
    return launch(folder, flags, arguments, num_workers=2, shard=SCRIPT_SHARD)


def model_bytes(widths: str) -> int:
    """Bytes of the parameters of an MLP."""
    sizes = [int(width) for width in widths.split(":")]
    return 4 * sum(inside * outside + outside for inside, outside in itertools.pairwise(sizes))


# --- by quota ----------------------------------------------------------------------------------------


def run_quota(folder: Path) -> RunEvents:
    """Ranks 0 and 1 serve; the second is slowed down once the worker has told of step `SLOW_STEP`."""
    with cpu_quota("server-0", QUOTA_CORES) as first, cpu_quota("server-1", QUOTA_CORES) as second:
        quotas = f"0={first.procs},1={second.procs}"
        arguments = ["--steps", str(QUOTA_STEPS), "--batch", "4", "--widths", QUOTA_WIDTHS, "--optimizer", "NAdam"]
        slower = Change(due=at_step(folder / "events-r002.jsonl", SLOW_STEP), quota=second, cores=QUOTA_CORES / SLOWER)
        with changing([slower]):
            return launch(folder, [], [*arguments, "--quotas", quotas], num_workers=1, shard=QUOTA_SHARD)


# --- figures -----------------------------------------------------------------------------------------


def mean_s(step_s: Mapping[int, float], begin: int, end: int) -> float:
    """Mean seconds of steps ``begin`` to ``end - 1``."""
    return statistics.fmean(step_s[number] for number in range(begin, end))


def judge(run: RunEvents, *, by: str, ideal_step_s: float | None) -> list[Figure]:
    """Compare the steps after the looks with the ideal; prints what came out.

    Args:
        run: its events.
        by: how the server was slowed down.
        ideal_step_s: seconds of a step at the stated rates; None: from the steps before, at the stated ratio.
    """
    rank = min(step.rank for step in run.steps)
    step_s = {step.step: step.step_s for step in run.steps if step.rank == rank}
    before_s = statistics.median(step_s[number] for number in range(5, SLOW_STEP))
    if ideal_step_s is None:
        compute_s = statistics.median(step.compute_s for step in run.steps if step.rank == rank)
        ideal_step_s = compute_s + (before_s - compute_s) * 2 / (1 + 1 / SLOWER)
    looks_before = (SLOW_STEP - 1) // INTERVAL_STEPS
    begins = [(looks_before + look) * INTERVAL_STEPS + 5 for look in range(1, LOOKS + 2)]  # a look's moves take a few
    rates = [ideal_step_s / mean_s(step_s, begin, begin + INTERVAL_STEPS) for begin in begins]
    rest = [ideal_step_s / mean_s(step_s, begin, max(step_s)) for begin in begins]
    begin, after_s = begins[LOOKS - 1], ideal_step_s / rest[LOOKS - 1]
    worst_s = max(seconds for number, seconds in step_s.items() if number >= SLOW_STEP)
    print(
        f"relief: by {by}: a step took {1e3 * before_s:.0f} ms, at worst {1e3 * worst_s:.0f} ms after the change, and"
        f" {1e3 * after_s:.0f} ms from step {begin} on; ideal {1e3 * ideal_step_s:.0f} ms"
    )
    print(f"relief: by {by}: of the ideal after each look: {', '.join(f'{rate:.3f}' for rate in rates)}")
    for route in run.routes:
        print(f"relief: look {route.look}, {len(route.keys)} shards: {route.reason}")
    looks = next((look for look, rate in enumerate(rest, start=1) if rate >= RELIEF_BAR), 99)
    return [
        Figure(name=f"relief_{by}_of_ideal", value=ideal_step_s / after_s, bar=RELIEF_BAR),
        Figure(name=f"relief_{by}_looks", value=looks, bar=LOOKS, at_most=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how a slow server is relieved.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-adaptive" / "relief", help="folder of runs")
    parser.add_argument("--by", choices=("quota", "script"), help="one way to slow the server down, else both")
    args = parser.parse_args()
    out = args.out.resolve()
    figures: list[Figure] = []
    if args.by != "script":
        reason = why_not()
        if reason:
            print(f"left out: relief_quota: {reason}")
        else:
            figures += judge(run_quota(out / "quota"), by="quota", ideal_step_s=None)
    if args.by != "quota":
        ideal_step_s = SCRIPT_STEP_S * 2 / (1 + 1 / SLOWER)
        figures += judge(run_script(out / "script"), by="script", ideal_step_s=ideal_step_s)
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
