"""1 GiB of parameters that change their servers while they are trained: nothing lost, nothing twice, no long pause.

Two servers of three hold the model at first; then the third joins, one is emptied, and another, until more has moved
than the model is large. What each element became says how many updates it got, and the servers count the weight that
was pushed, applied and refused.

    python tests/bench/migrate.py [--out FOLDER] [--mib 1024] [--mode sync|async]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from pathlib import Path

from runs import ROOT, Figure, launch_words, run_program

from hpcps.report.events import RunEvents, read_run
from hpcps.units import format_bytes

NUM_SERVERS, NUM_WORKERS = 3, 2
NUM_STEPS = 32
SCHEDULE = "7=0:1:2;13=0:2;21=1:2"  # after a step, the servers that may hold shards
PAUSE_BAR = 5.0
NEEDED_BYTES_PER_MIB = 13 * 2**20  # of memory in all: values, gradients, sums and published copies, with room to spare


def run_one(folder: Path, *, mib: int, mode: str) -> RunEvents:
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--server-num", str(NUM_SERVERS), "--sync-mode", mode, "--log-dir", str(folder)]
    for setting in (
        "routing.servers=0:1",
        "routing.spare_frac=0.6",
        "routing.interval_steps=4",
        "comm.publish_buffers=2",
        f"comm.shard_bytes={max(1, mib // 64)}MiB",
        "staleness.decay=none",
        "guard.enabled=off",
    ):
        flags += ["--set", setting]
    arguments = ["--mib", str(mib), "--steps", str(NUM_STEPS), "--schedule", SCHEDULE]
    words = launch_words(NUM_SERVERS + NUM_WORKERS, flags, ROOT / "tests" / "bench" / "moving.py", arguments)
    run_program(words, name="migrate", limit_s=400.0, log=folder.with_suffix(".log"))
    return read_run(folder)


def pause(run: RunEvents) -> tuple[float, float]:
    """Longest step from the first order to move on, in median steps before it; and that median, in seconds."""
    began_s = run.routes[0].t_s
    before = [step.step_s for step in run.steps if step.t_s < began_s and step.step > 2]
    after = [step.step_s for step in run.steps if step.t_s >= began_s]
    median_s = statistics.median(before)
    return max(after) / median_s, median_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Move a model between servers while it is trained.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-adaptive" / "migrate", help="folder of runs")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of parameters, at least 64")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync", help="sync_mode")
    args = parser.parse_args()
    free = free_bytes()
    if free < args.mib * NEEDED_BYTES_PER_MIB:
        need = format_bytes(args.mib * NEEDED_BYTES_PER_MIB)
        print(f"left out: migrate: {format_bytes(free)} of memory, need {need}; pass a smaller --mib")
        return
    run = run_one(args.out.resolve() / args.mode, mib=args.mib, mode=args.mode)
    moved = sum(server.moved_bytes for server in run.servers)
    totals = [sum(getattr(server, name) for server in run.servers) for name in ("pushed_weight", "applied_weight")]
    refused = sum(server.refused_weight for server in run.servers)
    relayed = sum(server.num_relayed for server in run.servers)
    wrong = sum(dict(summary.values)["wrong_elems"] for summary in run.summaries)  # over all workers' copies
    longest, median_s = pause(run)
    print(
        f"migrate: {args.mib} MiB, {NUM_WORKERS} workers, {args.mode}: {len(run.moves)} moves of"
        f" {format_bytes(moved)}, {relayed} frames sent on, {totals[0]:.0f} weight pushed, {totals[1]:.0f} applied,"
        f" {refused:.0f} refused; a step before took {median_s:.2f} s"
    )
    for route in run.routes:
        print(f"migrate: {len(route.keys)} shards, {format_bytes(route.num_bytes)}: {route.reason}")
    figures = [
        Figure(name="migrate_lost_weight", value=abs(totals[0] - totals[1] - refused), bar=0.0, at_most=True),
        Figure(name="migrate_wrong_elems", value=wrong, bar=0.0, at_most=True),
        Figure(name="migrate_moved_mib", value=moved / 2**20, bar=float(args.mib)),
        Figure(name="migrate_pause_steps", value=longest, bar=PAUSE_BAR, at_most=True),
    ]
    print("\n".join(figure.line() for figure in figures))


def free_bytes() -> int:
    """Memory that may be used, shared memory included."""
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    return min(available, shutil.disk_usage("/dev/shm").free + available // 2)


if __name__ == "__main__":
    main()
