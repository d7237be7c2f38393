"""The bench of adaptation: what runs do whose speeds, data and servers change, as ratios measured in one run.

    part       what happens                                                       program
    throttle   a worker becomes three times slower, and quick again                throttle.py
    alibaba    recorded step times of four real jobs: virtual time, and a run      alibaba.py
    lengths    samples of uneven length, shared out by cost or by count            by_cost.py
    migrate    1 GiB of parameters change their servers while it trains            migrate.py
    relief     one of two servers becomes four times slower                        relief.py
    still      equal workers: what adaptation costs where there is nothing to do   still.py
    classes    four kinds of worker that begin in two groups                       classes.py
    quotas     real computation under changing quotas of the processor             quotas.py

Each part is a program of its own, which prints what it found and a line a figure, and keeps its runs in a folder of its
name. A figure that falls short is printed as SHORT and does not make this program fail; a part that fails does, after
the others have run.

    python tests/bench/adaptive.py [--only PART] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from runs import run_program

HERE = Path(__file__).resolve().parent
LIMIT_S = 420.0
PARTS = {
    name: f"{name}.py" for name in ("throttle", "alibaba", "lengths", "migrate", "relief", "still", "classes", "quotas")
} | {"lengths": "by_cost.py"}


def run_part(name: str, out: Path) -> str:
    """What a part printed; its log has it too."""
    words = [sys.executable, str(HERE / PARTS[name]), "--out", str(out / name)]
    began_s = time.monotonic()
    text = run_program(words, name=name, limit_s=LIMIT_S, log=out / f"{name}.log")
    print(f"bench-adaptive: {name} took {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what adaptation is worth.")
    parser.add_argument("--only", choices=list(PARTS), help="one part")
    parser.add_argument(
        "--out", type=Path, default=HERE.parents[1] / "out" / "bench-adaptive", help="folder of logs and events"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    lines: list[str] = []
    failures: list[str] = []
    for name in (args.only,) if args.only else PARTS:
        try:
            lines += [line for line in run_part(name, out).splitlines() if line]
        except SystemExit as error:
            failures.append(str(error))
    figures = [line for line in lines if line.startswith(("figure ", "left out: "))]
    print("\n".join(line for line in lines if line not in figures))
    print()
    print("\n".join(figures))
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
