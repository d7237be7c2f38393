"""Texts of very unlike length: shares by what samples cost, given or learned, beside shares that count samples.

`lengths.py` says what is trained. All runs are in sync mode and take the same texts in a step, so they learn the same.

    python tests/bench/by_cost.py [--out FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from runs import ROOT, Figure, launch_words, read_results, run_program

NUM_WORKERS = 4
GAIN_BAR = 1.15
LOSS_BAR = 0.01  # of the loss; sums of floats in another order differ by far less


def run_one(cost: str, out: Path, num_steps: int) -> dict[str, float]:
    folder = out / cost
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--server-num", "1", "--sync-mode", "sync", "--heterogeneous", "--log-dir", str(folder)]
    script = ROOT / "tests" / "bench" / "lengths.py"
    words = launch_words(NUM_WORKERS + 1, flags, script, [cost, "--steps", str(num_steps)])
    (found,) = read_results(run_program(words, name=f"lengths-{cost}", limit_s=240.0, log=folder.with_suffix(".log")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare shares by cost with shares by count.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-adaptive" / "lengths", help="folder of runs")
    parser.add_argument("--steps", type=int, default=130, help="steps of each run")
    args = parser.parse_args()
    found = {cost: run_one(cost, args.out.resolve(), args.steps) for cost in ("count", "given", "learned")}
    rate, loss = found["count"]["samples_per_s"], found["count"]["loss"]
    figures: list[Figure] = []
    for cost, run in found.items():
        print(f"lengths: {cost}: {run['samples_per_s']:.0f} samples/s, x {run['samples_per_s'] / rate:.3f}", end="")
        print(f", loss {run['loss']:.5f}")
        if cost != "count":
            off_frac = abs(run["loss"] / loss - 1)
            figures.append(Figure(name=f"lengths_{cost}", value=run["samples_per_s"] / rate, bar=GAIN_BAR))
            figures.append(Figure(name=f"lengths_{cost}_loss_off", value=off_frac, bar=LOSS_BAR, at_most=True))
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
