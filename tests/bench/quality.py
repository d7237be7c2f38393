"""What the codecs do to what is learned: flights and digits at equal steps, with and without error feedback.

One server and two workers in sync mode; every run sees the same samples in the same order as the plain one of its seed.
A figure is the mean over seeds of the loss of quality against plain float32: test AUC for flights, points of test
accuracy for digits. The lines ``..._no_feedback`` show that the feedback acts: there, the loss must be large.

    python tests/bench/quality.py [--out FOLDER] [--seeds N]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from runs import ROOT, Figure, launch_words, run_program

from hpcps.report.events import read_run

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An example, what it reports, and the largest loss of quality by codec, in its unit."""

    name: str
    arguments: tuple[str, ...]
    metric: str
    unit: float
    unit_name: str
    bars: dict[str, float]
    visible: float
    """Loss of top 1 % without feedback that counts as visibly worse."""
    seeds: int
    """Runs that a mean is taken over: the spread of single runs is as large as the bars."""


TASKS = (
    Task(
        name="flights",
        arguments=("--epochs", "2"),
        metric="test_auc",
        unit=1.0,
        unit_name="AUC",
        bars={"fp16": 0.001, "int8": 0.001, "topk:0.01": 0.005},
        visible=0.005,
        seeds=3,
    ),
    Task(
        name="digits",
        arguments=("--epochs", "30"),
        metric="test_accuracy",
        unit=100.0,
        unit_name="points",
        bars={"fp16": 0.3, "int8": 0.3, "topk:0.01": 1.0},
        visible=1.0,
        seeds=10,
    ),
)
WITHOUT_FEEDBACK = ("topk:0.01", "onebit")
SHOWN = ("onebit",)  # no bars


def run_one(task: Task, codec: str, *, feedback: bool, seed: int, out: Path) -> float:
    """The metric of one run."""
    folder = out / f"{task.name}-{codec.replace(':', '')}-{'with' if feedback else 'without'}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--server-num", "1", "--seed", str(seed), "--log-dir", str(folder), "--compression", f"*={codec}"]
    flags += ["--set", f"compression.error_feedback={'on' if feedback else 'off'}"]
    script = ROOT / "examples" / f"{task.name}.py"
    words = launch_words(3, flags, script, [*task.arguments, "--seed", str(seed)])
    run_program(words, name=folder.name, limit_s=LIMIT_S, log=folder.with_suffix(".log"))
    return task.unit * read_run(folder).metric(task.metric)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare what is learned with and without compression.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "quality", help="folder of logs and events")
    parser.add_argument("--seeds", type=int, default=0, help="seeds that a mean is taken over; 0: 3 and 10")
    args = parser.parse_args()
    table = Table(title="Quality against plain float32 at equal steps, means over seeds")
    for name in ("task", "codec", "feedback", "quality", "loss against none", "bar"):
        table.add_column(name, justify="left" if name in ("task", "codec", "feedback") else "right")
    figures = []
    for task in TASKS:
        settings = [("none", True)]
        settings += [(codec, True) for codec in (*task.bars, *SHOWN)]
        settings += [(codec, False) for codec in WITHOUT_FEEDBACK]
        seeds = range(args.seeds or task.seeds)
        means = {}
        for codec, feedback in settings:
            found = [run_one(task, codec, feedback=feedback, seed=seed, out=args.out.resolve()) for seed in seeds]
            means[codec, feedback] = statistics.mean(found)
            loss = means["none", True] - means[codec, feedback]
            bar = task.bars.get(codec) if feedback else None
            table.add_row(
                task.name,
                codec,
                "with" if feedback else "without",
                f"{means[codec, feedback]:.4f} {task.unit_name}",
                f"{loss:.4f}",
                "" if bar is None else f"{bar:g}",
            )
            print(f"{task.name} {codec} {'with' if feedback else 'without'} feedback: {found}", flush=True)
            name = f"quality_{task.name}_{codec.partition(':')[0]}"
            if bar is not None:
                figures.append(Figure(name=name, value=loss, bar=bar, at_most=True))
            elif codec.startswith("topk"):
                figures.append(Figure(name=f"{name}_no_feedback", value=loss, bar=task.visible))
    Console(width=110).print(table)
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
