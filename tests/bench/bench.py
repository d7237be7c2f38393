"""The bench: every figure is a ratio, or a rate beside one, of things that took turns in one run on this machine.

    part        what takes turns                                              figures
    alone       hpcps as a world of one, plain PyTorch                        world1_*: step time over step time
    equal       hpcps with two workers and a server, DDP with two ranks       ddp_ratio: rate over rate
    bandwidth   push and pull of 16 and 64 MB, beside numpy's copy            bandwidth_*: MB/s
    uneven      equal shares in sync mode (the baseline), shares by speed     hetero_eff_*: rate over that of the
                in sync and hybrid mode, on emulated devices                  baseline, over S*
    idle        ranks that wait                                               as idle.py prints them

Rounds are interleaved and medians are taken over them. Prints one table and one line a figure. A figure that falls
short is printed as SHORT and does not make this program fail; a run that fails does.

    python tests/bench/bench.py [--only PART] [--rounds N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runs import Figure, launch_words, read_results, run_program

from hpcps.report.events import read_run
from hpcps.report.summary import efficiency, s_star_of_speeds, summarize

HERE = Path(__file__).resolve().parent
LIMIT_S = 150.0

SPEEDS = {"3211": (3.0, 2.0, 1.0, 1.0), "222111": (2.0, 2.0, 2.0, 1.0, 1.0, 1.0)}
UNEVEN_BATCH = 1024
BALANCED_STEP_S = 0.1  # of the emulated devices, far above the real work of a step
UNEVEN_STEPS = {"off": 70, "sync": 100, "hybrid": 100}  # the first 22 measure speed and do not count
EFFICIENCY_BAR = 0.93

ALONE_BAR = 1.05
DDP_BAR = 0.95
BEST_PEER_MB_PER_S = {16: 1383.0, 64: 1246.0}  # ps-lite, two workers and a server on a machine like this
TRANSFER_ROUNDS = {16: 20, 64: 10}
IDLE = "idle.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: what was measured beside what."""

    what: str
    ours: str
    other: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a part found; ``lines`` are figure lines that another program made."""

    rows: tuple[Row, ...]
    figures: tuple[Figure, ...] = ()
    lines: tuple[str, ...] = ()


# --- uneven ------------------------------------------------------------------------------------------


def run_uneven(speeds: tuple[float, ...], mode: str, folder: Path) -> float:
    """Samples a second of the steady part of one run; mode off: sync with equal shares."""
    shutil.rmtree(folder, ignore_errors=True)
    sample_s = BALANCED_STEP_S * sum(speeds) / UNEVEN_BATCH
    flags = ["--server-num", "1", "--sync-mode", "sync" if mode == "off" else mode]
    flags += ["--heterogeneous", "off" if mode == "off" else "on"]
    flags += ["--emulate-speeds", ":".join(f"{speed:g}" for speed in speeds), "--emulate-sample-s", f"{sample_s:.9f}"]
    arguments = ["--steps", str(UNEVEN_STEPS[mode]), "--batch", str(UNEVEN_BATCH)]
    words = launch_words(len(speeds) + 1, [*flags, "--log-dir", str(folder)], HERE / "uneven.py", arguments)
    run_program(words, name=folder.name, limit_s=LIMIT_S, log=folder.with_suffix(".log"))
    return summarize(read_run(folder)).samples_per_s


def measure_uneven(out: Path, rounds: int) -> Found:
    """Heterogeneity efficiency at both sets of speeds."""
    rates: dict[tuple[str, str], list[float]] = {}
    for index in range(max(1, rounds // 3)):  # emulated devices keep their own time: fewer rounds suffice
        for name, speeds in SPEEDS.items():
            for mode in UNEVEN_STEPS:
                rate = run_uneven(speeds, mode, out / f"uneven-{name}-{mode}-{index}")
                rates.setdefault((name, mode), []).append(rate)
    rows: list[Row] = []
    figures: list[Figure] = []
    for name, speeds in SPEEDS.items():
        s_star = s_star_of_speeds(speeds)
        off = statistics.median(rates[name, "off"])
        pace = UNEVEN_BATCH / BALANCED_STEP_S  # what balanced devices do if all else takes no time
        for mode in ("sync", "hybrid"):
            on = statistics.median(rates[name, mode])
            value = efficiency(on / off, s_star)
            figures.append(Figure(name=f"hetero_eff_{name}_{mode}", value=value, bar=EFFICIENCY_BAR))
            rows.append(
                Row(
                    what=f"speeds {':'.join(f'{speed:g}' for speed in speeds)}, {mode}, shares by speed / equal, sync",
                    ours=f"{on:.0f} samples/s",
                    other=f"{off:.0f} samples/s",
                    note=f"x {on / off:.3f} of S* {s_star:.3f}: {value:.3f}; {on / pace:.3f} of the devices' own pace",
                )
            )
    return Found(rows=tuple(rows), figures=tuple(figures))


# --- alone -------------------------------------------------------------------------------------------


def measure_alone(out: Path, rounds: int) -> Found:
    """Step time of a world of one; the script itself takes turns in blocks of steps."""
    rows: list[Row] = []
    figures: list[Figure] = []
    for kind, name in (("momentum", "world1_sgd"), ("adam", "world1_adam")):
        words = [sys.executable, str(HERE / "alone.py"), kind]
        (found,) = read_results(run_program(words, name=name, limit_s=LIMIT_S, log=out / f"{name}.log"))
        figures.append(Figure(name=name, value=found["ratio"], bar=ALONE_BAR, at_most=True))
        rows.append(
            Row(
                what=f"world of one / plain PyTorch, {'SGD with momentum' if kind == 'momentum' else 'Adam'}",
                ours=f"{found['ours_s'] * 1e3:.1f} ms/step",
                other=f"{found['plain_s'] * 1e3:.1f} ms/step",
                note=f"x {found['ratio']:.3f} (median of block pairs)",
            )
        )
    return Found(rows=tuple(rows), figures=tuple(figures))


# --- equal -------------------------------------------------------------------------------------------


def measure_equal(out: Path, rounds: int) -> Found:
    """Two equal workers and a server against DDP with two ranks."""
    flags = ["--server-num", "1", "--log-dir", str(out / "equal")]
    sides = {
        "hpcps": launch_words(3, flags, HERE / "equal.py", ["hpcps"]),
        "ddp": [sys.executable, str(HERE / "equal.py"), "ddp"],
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    cpu_s: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(rounds + 2):  # the figure nearest to its bar
        for side, words in sides.items():
            name = f"equal-{side}-{index}"
            (found,) = read_results(run_program(words, name=name, limit_s=LIMIT_S, log=out / f"{name}.log"))
            rates[side].append(found["samples_per_s"])
            cpu_s[side].append(found["cpu_s"])
    median = {side: statistics.median(values) for side, values in rates.items()}
    ratio = median["hpcps"] / median["ddp"]
    cpu_ms = {side: statistics.median(times_s) * 1e3 for side, times_s in cpu_s.items()}
    row = Row(
        what="two workers and a server / torch DDP, gloo, two ranks, SGD",
        ours=f"{median['hpcps']:.0f} samples/s",
        other=f"{median['ddp']:.0f} samples/s",
        note=f"x {ratio:.3f}; CPU of all processes {cpu_ms['hpcps']:.0f} and {cpu_ms['ddp']:.0f} ms/step",
    )
    return Found(rows=(row,), figures=(Figure(name="ddp_ratio", value=ratio, bar=DDP_BAR),))


# --- bandwidth ---------------------------------------------------------------------------------------


def measure_bandwidth(out: Path, rounds: int) -> Found:
    """Push and pull of one tensor, two workers to one server."""
    flags = ["--server-num", "1", "--set", "window.quorum_frac=1", "--log-dir", str(out / "transfer")]
    runs = [(grouping, mb) for mb in BEST_PEER_MB_PER_S for grouping in ("each", "one")]
    rates: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    copies: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    for index in range(rounds):
        for grouping, mb in runs:
            name = f"transfer-{mb}-{grouping}-{index}"
            arguments = [grouping, "--mb", str(mb), "--rounds", str(TRANSFER_ROUNDS[mb])]
            words = launch_words(3, flags, HERE / "transfer.py", arguments)
            (found,) = read_results(run_program(words, name=name, limit_s=LIMIT_S, log=out / f"{name}.log"))
            rates[grouping, mb].append(found["mb_per_s"])
            copies[grouping, mb].append(found["copy_mb_per_s"])
    rows: list[Row] = []
    figures: list[Figure] = []
    for grouping, mb in runs:
        rate, copy = statistics.median(rates[grouping, mb]), statistics.median(copies[grouping, mb])
        peer = BEST_PEER_MB_PER_S[mb]
        if grouping == "each":
            figures.append(Figure(name=f"bandwidth_{mb}mb", value=rate, bar=2 * peer))
        rows.append(
            Row(
                what=f"push + pull of {mb} MB, {'a group each' if grouping == 'each' else 'one group, summed first'}",
                ours=f"{rate:.0f} MB/s",
                other=f"copy {copy:.0f} MB/s",
                note=f"x {rate / copy:.3f} of a copy, x {rate / peer:.2f} of the best peer",
            )
        )
    return Found(rows=tuple(rows), figures=tuple(figures))


# --- idle --------------------------------------------------------------------------------------------


def measure_idle(out: Path, rounds: int) -> Found:
    """What its own program prints."""
    text = run_program([sys.executable, str(HERE / IDLE)], name="idle", limit_s=LIMIT_S, log=out / "idle.log")
    lines = [line for line in text.splitlines() if line.startswith("figure ")]
    rows = [
        Row(what=name.replace("_", " "), ours=value, other=f"bar {bar}", note="of a core")
        for _, name, value, bar, _ in (line.split() for line in lines)
    ]
    return Found(rows=tuple(rows), lines=tuple(lines))


# --- all ---------------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Path, int], Found]] = {
    "alone": measure_alone,
    "equal": measure_equal,
    "bandwidth": measure_bandwidth,
    "uneven": measure_uneven,
    "idle": measure_idle,
}


def render(rows: list[Row]) -> str:
    """The table as text."""
    cells = [("measured", "hpcps", "beside", "")] + [(row.what, row.ours, row.other, row.note) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join(
        f"{what:<{widths[0]}}  {ours:>{widths[1]}}  {other:>{widths[2]}}  {note}".rstrip()
        for what, ours, other, note in cells
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the figures of the README.")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of everything that takes turns")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "out" / "bench", help="folder of logs and events")
    args = parser.parse_args()
    out = args.out.resolve()
    parts = [args.only] if args.only else [part for part in PARTS if part != "idle" or (HERE / IDLE).exists()]
    found = []
    for part in parts:
        print(f"bench: {part}", file=sys.stderr, flush=True)
        found.append(PARTS[part](out, args.rounds))
    print(render([row for each in found for row in each.rows]))
    print()
    for each in found:
        for line in [*(figure.line() for figure in each.figures), *each.lines]:
            print(line)


if __name__ == "__main__":
    main()
