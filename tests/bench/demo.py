"""The demo: train on the flights of 2013 with four uneven workers, four times, and show what balancing is worth.

One machine with two cores plays a server and four workers whose device speeds are emulated as 3:2:1:1: a sample takes
0.35 ms on a device of speed 1, far longer than its real computation, so that the emulated devices set the pace and not
the two cores. An equal split then takes 512 x 0.35 = 179 ms a step, a balanced one 2048 x 0.35 / 7 = 102 ms.
The first run, sync with equal shares, is the baseline of every speed-up. A figure that falls short is printed as SHORT
and does not make this program fail; a run that fails does.

    python tests/bench/demo.py [--out FOLDER] [--epochs N] [--rows N]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from runs import ROOT, Figure, launch_words, run_program

from hpcps.report.events import RunEvents, read_run
from hpcps.report.figures import StepTimesPanel, draw_step_times
from hpcps.report.summary import RunSummary, efficiency, s_star_of_speeds, summarize
from hpcps.report.table import TableRow, render_table

SPEEDS = (3.0, 2.0, 1.0, 1.0)
SAMPLE_S = 0.00035  # seconds that a sample takes on a device of speed 1
GLOBAL_BATCH = 2048
AUC_BAR = 0.766  # logistic regression on the same columns, one-hot
EFFICIENCY_BAR = 0.93
RUN_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One of the four runs."""

    mode: str
    heterogeneous: bool

    @property
    def name(self) -> str:
        return f"{self.mode}-{'on' if self.heterogeneous else 'off'}"


SETUPS = (
    Setup(mode="sync", heterogeneous=False),
    Setup(mode="sync", heterogeneous=True),
    Setup(mode="hybrid", heterogeneous=True),
    Setup(mode="async", heterogeneous=True),
)


def command(setup: Setup, folder: Path, args: argparse.Namespace) -> list[str]:
    """The command line of one run."""
    flags = ["--server-num", "1", "--sync-mode", setup.mode, *(["--heterogeneous"] if setup.heterogeneous else [])]
    flags += ["--emulate-speeds", ":".join(f"{speed:g}" for speed in SPEEDS), "--emulate-sample-s", str(SAMPLE_S)]
    arguments = ["--batch", str(GLOBAL_BATCH), "--epochs", str(args.epochs), "--rows", str(args.rows)]
    script = ROOT / "examples" / "flights.py"
    return launch_words(len(SPEEDS) + 1, [*flags, "--log-dir", str(folder)], script, arguments)


def run_one(setup: Setup, folder: Path, args: argparse.Namespace) -> RunEvents:
    """Run one setup to its end and read its events; leave the program if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("events-r*.jsonl"):
        stale.unlink()
    words = command(setup, folder, args)
    print(f"\n$ {' '.join(words)}", flush=True)
    run_program(words, name=setup.name, limit_s=RUN_LIMIT_S)
    return read_run(folder)


def table_rows(runs: list[RunEvents], summaries: list[RunSummary]) -> list[TableRow]:
    """Set every run against the first."""
    s_star = s_star_of_speeds(SPEEDS)
    rows = []
    for setup, run, summary in zip(SETUPS, runs, summaries, strict=True):
        speedup = summary.samples_per_s / summaries[0].samples_per_s
        rows.append(
            TableRow(
                mode=setup.mode,
                heterogeneous=setup.heterogeneous,
                samples_per_s=summary.samples_per_s,
                speedup=speedup,
                s_star=s_star,
                efficiency=efficiency(speedup, s_star) if setup.heterogeneous else None,
                test_auc=run.metric("test_auc"),
                staleness_mean=summary.staleness_mean,
                staleness_max=summary.staleness_max,
            )
        )
    return rows


def figure_lines(rows: list[TableRow]) -> list[str]:
    """One line for each figure that has a bar."""
    figures = []
    for setup, row in zip(SETUPS, rows, strict=True):
        if row.efficiency is not None and setup.mode != "async":
            figures.append(Figure(name=f"demo_efficiency_{setup.mode}", value=row.efficiency, bar=EFFICIENCY_BAR))
        suffix = setup.mode if setup.heterogeneous else "baseline"
        figures.append(Figure(name=f"demo_auc_{suffix}", value=row.test_auc, bar=AUC_BAR))
    return [figure.line() for figure in figures]


def draw(summaries: list[RunSummary], path: Path) -> Path:
    """Draw what a step of each worker took: equal shares first, then shares by speed."""
    panels = [
        StepTimesPanel(
            title=f"after: {setup.mode}" if setup.heterogeneous else "before: equal shares", workers=summary.after
        )
        for setup, summary in zip(SETUPS, summaries, strict=True)
    ]
    speeds = ":".join(f"{speed:g}" for speed in SPEEDS)
    return draw_step_times(panels, path, title=f"Step times, emulated speeds {speeds}, global batch {GLOBAL_BATCH}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on flights with four uneven workers, four times.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="folder of logs, events and the figure")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of each run")
    parser.add_argument("--rows", type=int, default=0, help="use only so many flights; 0: all")
    args = parser.parse_args()
    out = args.out.resolve()
    runs = [run_one(setup, out / setup.name, args) for setup in SETUPS]
    summaries = [summarize(run) for run in runs]
    rows = table_rows(runs, summaries)
    print()
    print(render_table(rows, title="Flights, 4 workers of speeds 3:2:1:1 and 1 server"))
    print(f"\nstep times of each worker, before and after: {draw(summaries, out / 'step-times.png')}\n")
    print("\n".join(figure_lines(rows)))


if __name__ == "__main__":
    main()
