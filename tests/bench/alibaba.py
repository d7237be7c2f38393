"""Four real jobs of a public trace, replayed: shares that follow speeds, shares that stay, and equal ones.

In virtual time the whole trace of each job; then a piece of job 4 as a real run of ten workers and a server, whose gain
is set beside that of the same piece in virtual time. ``replay.py`` says how the trace is read.

    python tests/bench/alibaba.py [--out FOLDER] [--jobs 1,2,3,4] [--no-run]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from replay import STEPS_PER_ROW, Times, adapting, best_s, equal_s, find_job, read_job, replay, write_trace
from runs import DATA, ROOT, Figure, run_paced

from hpcps.report.adaptation import run_seconds

TRACE = DATA / "traces" / "alibaba_minibatch"
GLOBAL_BATCH = 2560
NORM_S = 0.001  # a worker with an equal share takes so many seconds for a mini-batch of 1 in the trace
JOB4_BAR = 3.4
FIRST_ROW, NUM_ROWS = 360, 14  # the piece of job 4 that is run: a worker changes in it, so that static shares go wrong
RUN_SCALE = 2.0  # on its times, so that the ten ranks on few cores take a small part of a step
RUN_BAR = 0.9


def unit_seconds(path: Path) -> Times:
    """Seconds of a sample by row and worker of a job."""
    table = read_job(path)
    return table * (NORM_S * table.shape[1] / GLOBAL_BATCH)


def gains(unit_s: Times, *, steps_per_row: int) -> dict[str, float]:
    """Time of equal shares over that of each way to share, in virtual time."""
    sizes = {"global_batch": GLOBAL_BATCH, "steps_per_row": steps_per_row}
    equal = equal_s(unit_s, **sizes)
    took_s = {
        name: replay(unit_s, adapting(follow=name == "adaptive"), **sizes).total_s for name in ("adaptive", "static")
    }
    return {"best": equal / best_s(unit_s, **sizes), **{name: equal / seconds for name, seconds in took_s.items()}}


def describe(found: dict[str, float]) -> str:
    return ", ".join(f"{name} x {gain:.3f}" for name, gain in found.items())


def replay_job(number: int, path: Path) -> Figure:
    """Replay a whole job; prints what came out."""
    unit_s = unit_seconds(path)
    print(f"alibaba: job {number}, {unit_s.shape[1]} workers, {len(unit_s)} rows, over equal shares:")
    found = gains(unit_s, steps_per_row=STEPS_PER_ROW)
    print(f"alibaba:   a row lasts {STEPS_PER_ROW} steps: {describe(found)}")
    print(f"alibaba:   a row lasts one step: {describe(gains(unit_s, steps_per_row=1))}", flush=True)
    bar = JOB4_BAR if number == 4 else max(1.0, found["static"])
    return Figure(name=f"alibaba_job{number}", value=found["adaptive"], bar=bar)


def run_piece(path: Path, out: Path) -> Figure:
    """Run a piece of a job for real, and in virtual time; prints what came out."""
    unit_s = unit_seconds(path)[FIRST_ROW : FIRST_ROW + NUM_ROWS] * RUN_SCALE
    trace = out / "piece.txt"
    write_trace(trace, unit_s, steps_per_row=STEPS_PER_ROW)
    took_s = {}
    for name in ("equal", "adaptive"):
        flags = ["--sync-mode", "sync", "--heterogeneous", "on" if name == "adaptive" else "off"]
        run = run_paced(
            out / name,
            [*flags, "--emulate-trace", str(trace)],
            num_workers=unit_s.shape[1],
            num_steps=len(unit_s) * STEPS_PER_ROW,
            global_batch=GLOBAL_BATCH,
            small=True,
        )
        took_s[name] = run_seconds(run)
    virtual = gains(unit_s, steps_per_row=STEPS_PER_ROW)
    real = took_s["equal"] / took_s["adaptive"]
    rows = f"rows {FIRST_ROW} to {FIRST_ROW + NUM_ROWS - 1} of job 4"
    print(f"alibaba: {rows}, {RUN_SCALE:g} x slower, virtual time: {describe(virtual)}")
    print(f"alibaba: {rows}, run: equal {took_s['equal']:.1f} s, adaptive {took_s['adaptive']:.1f} s: x {real:.3f}")
    return Figure(name="alibaba_run_over_virtual", value=real / virtual["adaptive"], bar=RUN_BAR)


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay jobs of a public trace.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-adaptive" / "alibaba", help="folder of runs")
    parser.add_argument("--jobs", default="1,2,3,4", help="numbers of the jobs to replay")
    parser.add_argument("--no-run", action="store_true", help="virtual time only")
    args = parser.parse_args()
    figures: list[Figure] = []
    for number in map(int, args.jobs.split(",")):
        path = find_job(TRACE, number)
        if path is None:
            print(f"left out: alibaba_job{number}: no trace in {TRACE}; name the folder of data with HPCPS_DATA")
            continue
        figures.append(replay_job(number, path))
        if number == 4 and not args.no_run:
            figures.append(run_piece(path, args.out.resolve()))
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
