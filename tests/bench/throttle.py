"""Speeds 3:2:1:1, and a worker that throttles to a third at step 300 and recovers at step 600.

The baseline is the same script with equal shares, in sync mode, in a third of the steps: workers of speed 1 set its
pace in all phases, so its steps are alike and its time counts three times. Efficiency is the speed-up over the whole
run, warm-up included, over S* of the whole run: the time of equal shares over that of the best ones, by the stated
speeds. What the devices alone would take stands beside each time: other load on this machine would show there.

    python tests/bench/throttle.py [--out FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from runs import ROOT, Figure, run_paced

from hpcps.report.adaptation import moving_s_star, phases_of, run_seconds, steps_until_balanced
from hpcps.report.events import RunEvents
from hpcps.report.summary import efficiency

SPEEDS = (3.0, 2.0, 1.0, 1.0)
GLOBAL_BATCH = 1024
BALANCED_STEP_S = 0.12  # at the first speeds; what ranks do beside takes 8 ms
EFFICIENCY_BAR = 0.93
BALANCED_BAR = 20
BASELINE_PART = 3  # of the steps


def script_of(num_steps: int) -> str:
    """Slower at a third of the steps, back at two thirds."""
    return f"{num_steps // 3}:0={SPEEDS[0] / 3:g},{2 * num_steps // 3}:0={SPEEDS[0]:g}"


def run_one(out: Path, *, heterogeneous: bool, num_steps: int) -> RunEvents:
    """A run of the script to its end."""
    name = "adaptive" if heterogeneous else "equal"
    sample_s = BALANCED_STEP_S * sum(SPEEDS) / GLOBAL_BATCH
    flags = ["--sync-mode", "sync", "--heterogeneous", "on" if heterogeneous else "off"]
    flags += ["--emulate-speeds", ":".join(f"{speed:g}" for speed in SPEEDS), "--emulate-sample-s", f"{sample_s:.9f}"]
    flags += ["--emulate-script", script_of(num_steps)]
    return run_paced(
        out / name, flags, num_workers=len(SPEEDS), num_steps=num_steps, global_batch=GLOBAL_BATCH, small=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how a run follows a worker that throttles and recovers.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-adaptive" / "throttle", help="folder of runs")
    parser.add_argument("--steps", type=int, default=900, help="steps; the changes are at a third and two thirds")
    args = parser.parse_args()
    out = args.out.resolve()
    equal = run_one(out, heterogeneous=False, num_steps=args.steps // BASELINE_PART)
    adaptive = run_one(out, heterogeneous=True, num_steps=args.steps)
    phases = phases_of(SPEEDS, adaptive.runs[0].changes, num_steps=args.steps)
    equal_s, adaptive_s = BASELINE_PART * run_seconds(equal), run_seconds(adaptive)
    speedup, s_star = equal_s / adaptive_s, moving_s_star(phases)
    print(f"throttle: speeds 3:2:1:1, then {script_of(args.steps)}, {args.steps} steps of {GLOBAL_BATCH} samples")
    best_s = BALANCED_STEP_S * sum(SPEEDS) * sum(phase.num_steps / sum(phase.speeds) for phase in phases)
    print(
        f"throttle: equal {equal_s:.1f} s of {best_s * s_star:.1f} s, adaptive {adaptive_s:.1f} s of {best_s:.1f} s:"
        f" x {speedup:.3f} of the moving S* {s_star:.3f}"
    )
    figures = [Figure(name="throttle_efficiency", value=efficiency(speedup, s_star), bar=EFFICIENCY_BAR)]
    for name, phase in zip(("slower", "recovered"), phases[1:], strict=True):
        steps = steps_until_balanced(adaptive, phase)
        value = phase.num_steps if steps is None else steps
        figures.append(Figure(name=f"throttle_steps_{name}", value=value, bar=BALANCED_BAR, at_most=True))
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
