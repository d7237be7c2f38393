"""The chooser of codecs beside each codec alone: real models over emulated links of 50 Mb/s to 40 Gb/s.

A server and two workers on this machine; each worker's pushes, and its pulls, take as long as the stated link would,
and what this machine takes to move them comes on top: the quickest rates are slower than stated. Gradients inside the
group are summed over the real transport. auto may choose among none, fp16, int8 and top 1 %. The steps in which it
tries them do not count. Bars: auto is at most 5 % slower than the best of them, and at most 2 % than none.

    python tests/bench/chooser.py [--out FOLDER] [--models NAMES] [--turns N]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table
from runs import ROOT, Figure, launch_words, read_results, run_program

from hpcps.report.events import read_run

HERE = Path(__file__).resolve().parent
RATES = {"50 Mb/s": 50e6, "200 Mb/s": 200e6, "1 Gb/s": 1e9, "5 Gb/s": 5e9, "10 Gb/s": 10e9, "40 Gb/s": 40e9}
FIXED = ("none", "fp16", "int8", "topk:0.01")
BEST_BAR, NONE_BAR = 1.05, 1.02
SLOW_BIT_PER_S = 1e9
SLOW_TURNS, SLOW_STEPS, STEPS = 2, 4, 15  # a slow link rules its steps: few are enough
LIMIT_S = 300.0


def run_one(model: str, rate: float, turns: int, folder: Path) -> tuple[dict[str, float], str]:
    """Median step times and ratios by setting, and what auto had chosen in the end."""
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--server-num", "1", "--compression", "*=auto", "--log-dir", str(folder)]
    flags += ["--set", f"emulate.link_bytes_per_s={rate / 8}"]
    turns, steps = (SLOW_TURNS, SLOW_STEPS) if rate < SLOW_BIT_PER_S else (turns, STEPS)
    arguments = [model, "--turns", str(turns), "--steps", str(steps)]
    words = launch_words(3, flags, HERE / "links.py", arguments)
    text = run_program(words, name=folder.name, limit_s=LIMIT_S, log=folder.with_suffix(".log"))
    (found,) = read_results(text)
    chosen = {event.key: event.codec for event in read_run(folder).codecs}
    return found, ", ".join(sorted(set(chosen.values()))) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare auto with each codec over emulated links.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "chooser", help="folder of logs and events")
    parser.add_argument("--models", default="digits,text,rows", help="which models, separated by commas")
    parser.add_argument("--turns", type=int, default=8, help="turns of each setting on links of 1 Gb/s and more")
    args = parser.parse_args()
    table = Table(title="Milliseconds a step, median; 2 workers, 1 server")
    for name in ("model", "link", *FIXED, "auto", "auto chose", "auto / best", "auto / none"):
        table.add_column(name, justify="left" if name in ("model", "link", "auto chose") else "right")
    figures = []
    for model in args.models.split(","):
        for label, rate in RATES.items():
            slug = label.replace(" ", "").replace("/", "p")
            found, chosen = run_one(model, rate, args.turns, args.out.resolve() / f"{model}-{slug}")
            best = min(FIXED, key=lambda name: found[name])
            to_best, to_none = found[f"auto/{best}"], found["auto/none"]
            times = [f"{1e3 * found[name]:.1f}" for name in (*FIXED, "auto")]
            table.add_row(model, label, *times, chosen, f"{to_best:.3f}", f"{to_none:.3f}")
            print(f"{model} over {label}: {' '.join(times)} ms, auto chose {chosen}", flush=True)
            name = f"chooser_{model}_{slug}"
            figures.append(Figure(name=f"{name}_best", value=to_best, bar=BEST_BAR, at_most=True))
            figures.append(Figure(name=f"{name}_none", value=to_none, bar=NONE_BAR, at_most=True))
    Console(width=150).print(table)
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
