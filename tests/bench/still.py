"""Equal workers, where there is nothing to adapt to: what adaptation costs.

    paced   two workers whose emulated devices are equal: shares off by a sample, or late orders, would show in the step
    real    two workers that compute as fast as they can: what is done for adaptation would show too

Three jobs, each with two workers and a server, stand in one process and take turns of a few steps: with adaptation,
without, and without once more. Every turn of the first is set beside the mean of the others' next to it, and the median
of these ratios counts; the noise is the same between the second and the third. Ranks are threads over the in-process
channel: runs of their own, one after the other, differ by more than one in a hundred.

    python tests/bench/still.py [--out FOLDER] [--turns N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mlp import make_data, make_model, make_optimizer, train_step
from runs import ROOT, Figure
from torch.utils.data import TensorDataset

import hpcps.torch as ht
from hpcps.config import EmulateConfig, RunConfig
from hpcps.runtime.job import Job

sys.path.append(str(ROOT / "tests"))

from ranks import run_ranks

COST_BAR = 1.01
NUM_WORKERS = 2
JOBS = ("on", "off", "off again")
SETTLE_STEPS = 40  # the warm-up, whose shares differ on purpose, and some more

TURN_STEPS = 10
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the workers train; ``step_s``: of their emulated devices, 0: real ones."""

    widths: tuple[int, ...]
    global_batch: int
    step_s: float = 0.0


KINDS = {
    "paced": Kind(widths=(8, 10, 10), global_batch=256, step_s=0.05),
    "real": Kind(widths=(256, 1024, 1024, 10), global_batch=512),
}


@dataclass(slots=True)
class Turns:
    """Whose turn it is, and what the turns took; all workers of all jobs meet before each and at the end."""

    order: list[str]
    meet: threading.Barrier = field(default_factory=lambda: threading.Barrier(len(JOBS) * NUM_WORKERS, timeout=LIMIT_S))
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in JOBS})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in JOBS})


def worker_of(name: str, turns: Turns, kind: Kind) -> Callable[[Job], None]:
    """What a worker of a job does; its first turn settles the job and does not count."""

    def batches(loader: ht.DistributedLoader) -> Iterator[list[torch.Tensor]]:
        while True:
            yield from loader

    def work(job: Job) -> None:
        model = make_model(kind.widths)
        optimizer = ht.DistributedOptimizer(make_optimizer("sgd", model), model, job)
        dataset = TensorDataset(*make_data(SETTLE_STEPS * kind.global_batch, kind.widths))
        stream = batches(ht.DistributedLoader(dataset, global_batch=kind.global_batch, job=job))
        for index, whose in enumerate(turns.order):
            turns.meet.wait()
            if whose != name:
                continue
            count = SETTLE_STEPS if index < len(JOBS) else TURN_STEPS
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            for _ in range(count):
                train_step(model, optimizer, *next(stream))
            if job.is_first and index >= len(JOBS):
                turns.seconds[name].append((time.perf_counter() - began_s) / count)
                turns.cpu_s[name].append((time.process_time() - cpu_began_s) / count)
        turns.meet.wait()

    return work


def run_kind(kind: Kind, num_turns: int) -> Turns:
    """All turns of the three jobs."""
    turns = Turns([*JOBS, *(name for turn in range(num_turns) for name in (JOBS if turn % 2 == 0 else JOBS[::-1]))])
    sample_s = kind.step_s * NUM_WORKERS / kind.global_batch
    emulate = EmulateConfig(speeds=(1.0,) * NUM_WORKERS, sample_s=sample_s) if kind.step_s else EmulateConfig()

    def run(name: str) -> None:
        config = RunConfig(heterogeneous=name == "on", emulate=emulate)
        run_ranks(worker_of(name, turns, kind), num_workers=NUM_WORKERS, config=config, timeout_s=LIMIT_S)

    with ThreadPoolExecutor(len(JOBS)) as pool:
        for future in [pool.submit(run, name) for name in JOBS]:
            future.result()
    return turns


def compare(turns: Turns, what: str) -> float:
    """Time of a step with adaptation over that without; prints what came out."""
    for unit, found in (("CPU of a step", turns.cpu_s), ("a step", turns.seconds)):
        rows = list(zip(*(found[name] for name in JOBS), strict=True))
        ratio = statistics.median(2 * on / (off + again) for on, off, again in rows)
        noise = statistics.median(again / off for _, off, again in rows)
        on_ms, off_ms = (1e3 * statistics.median(found[name]) for name in ("on", "off"))
        print(f"still: {what}, {unit}: {on_ms:.2f} ms on, {off_ms:.2f} ms off: x {ratio:.4f}, noise x {noise:.4f}")
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what adaptation costs where there is nothing to adapt to.")
    parser.add_argument("--out", type=Path, help="not used: nothing is written")
    parser.add_argument("--turns", type=int, default=20, help="turns of each job")
    args = parser.parse_args()
    figures = []
    for what, kind in KINDS.items():
        ratio = compare(run_kind(kind, args.turns), what)
        figures.append(Figure(name=f"still_{what}", value=ratio, bar=COST_BAR, at_most=True))
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    main()
