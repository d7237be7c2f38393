"""Eight workers of four kinds, 8:8:4:4:2:2:1:1, that begin in two groups: four would be right.

Hybrid mode, and priors that know of two kinds only, so that the run begins with two groups. Shares are fixed and equal:
each member of a group then waits for the slowest, which is what a wrong grouping costs. Arithmetic, in samples of a
worker of speed 1: two groups do 4 x 4 + 4 x 1 = 20, four groups 2 x 8 + 2 x 4 + 2 x 2 + 2 x 1 = 30, a gain of 1.5. A
window needs one group here: the quickest makes more steps than the others together, and a quorum of two would hold it
back, which is no matter of the grouping. With free shares every worker of a group ends at the same time in either
grouping, and the gain is 1.

Rates are taken within one run: over the last third of the time before the regrouping, when shares are settled, and
from a few seconds after it to the end.

    python tests/bench/classes.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from runs import ROOT, Figure, run_paced

from hpcps.report.events import RunEvents

SPEEDS = (8.0, 8.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0)
PRIOR = (4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0, 1.0)
SHARE = 32
SAMPLE_S = {"fixed": 0.06, "free": 0.064}  # at speed 1; a step takes 0.24 s at least, far longer than the real work
HOLD_STEPS = {"fixed": 24, "free": 45}  # of the slowest workers, before the first regrouping
NUM_STEPS = {"fixed": 128, "free": 88}  # of a full batch; twenty seconds of them after the regrouping
SETTLE_STEPS = 4  # of the slowest workers after a regrouping, until all have changed
WITHIN_FRAC = 0.05


def groups_rate(groups: Sequence[Sequence[float]]) -> float:
    """Shares a second of all groups, if each member of a group has a share of the same size."""
    return sum(len(group) * min(group) for group in groups)


def rate(run: RunEvents, begin_s: float, end_s: float) -> float:
    """Samples a second between two times; a step that reaches beyond counts by the part inside."""
    total = 0.0
    for step in run.steps:
        inside = min(step.t_s, end_s) - max(step.t_s - step.step_s, begin_s)
        if inside > 0 and step.step_s > 0:
            total += step.num_samples * inside / step.step_s
    return total / (end_s - begin_s)


def run_one(folder: Path, shares: str) -> RunEvents:
    flags = ["--sync-mode", "hybrid", "--heterogeneous", "--capacity-prior", _list(PRIOR)]
    flags += ["--emulate-speeds", _list(SPEEDS), "--emulate-sample-s", str(SAMPLE_S[shares])]
    flags += ["--set", f"grouping.hold_steps={HOLD_STEPS[shares]}"]
    if shares == "fixed":
        flags += ["--set", f"partition.min_share={SHARE}", "--set", f"partition.max_share={SHARE}"]
        flags += ["--set", "window.quorum_frac=0.25"]
    num_steps = NUM_STEPS[shares]
    return run_paced(
        folder, flags, num_workers=len(SPEEDS), num_steps=num_steps, global_batch=SHARE * len(SPEEDS), small=True
    )


def _list(numbers: Sequence[float]) -> str:
    return ":".join(f"{number:g}" for number in numbers)


def speeds_of(group: Sequence[int]) -> tuple[float, ...]:
    """Speeds of the workers of a group of world ranks; rank 0 serves."""
    return tuple(SPEEDS[rank - 1] for rank in group)


def measure(folder: Path, shares: str) -> tuple[float, float, int]:
    """Gain by regrouping as measured and by arithmetic, and the groups at the end; prints what came out."""
    run = run_one(folder, shares)
    first, last = run.groupings[0], run.groupings[-1]
    for grouping in run.groupings:
        sets = " ".join(_list(speeds_of(group)) for group in grouping.groups)
        print(f"classes: {shares} shares, generation {grouping.generation}: {sets}: {grouping.reason}")
    if last is first:
        return 1.0, 1.0, len(last.groups)
    second_s = run.groupings[1].t_s
    begin_s = (first.t_s + 2 * second_s) / 3
    end_s = min(max(step.t_s for step in run.steps if step.rank == rank) for rank in {step.rank for step in run.steps})
    settled_s = last.t_s + SETTLE_STEPS * max(step.compute_s for step in run.steps)
    before, after = rate(run, begin_s, second_s), rate(run, settled_s, end_s)
    ideal = 1.0
    if shares == "fixed":
        ideal = groups_rate([*map(speeds_of, last.groups)]) / groups_rate([*map(speeds_of, first.groups)])
    print(
        f"classes: {shares} shares: {before:.0f} samples/s in {second_s - begin_s:.0f} s, then {after:.0f} samples/s in"
        f" {end_s - settled_s:.0f} s: x {after / before:.3f}, by arithmetic x {ideal:.3f}"
    )
    return after / before, ideal, len(last.groups)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what finding the right groups is worth.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-adaptive" / "classes", help="folder of runs")
    args = parser.parse_args()
    figures: list[Figure] = []
    for shares in ("fixed", "free"):
        gain, ideal, num_groups = measure(args.out.resolve() / shares, shares)
        figures.append(Figure(name=f"classes_groups_{shares}", value=num_groups, bar=4))
        figures.append(
            Figure(name=f"classes_gain_{shares}_off", value=abs(gain / ideal - 1), bar=WITHIN_FRAC, at_most=True)
        )
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
