"""Equal workers, where there is nothing to adapt to: what adaptation costs.

    paced   two workers whose emulated devices are equal: shares off by a sample, or late orders, would show in the step
    real    two workers that compute as fast as they can: what is done for adaptation would show as processor time

Runs with adaptation and without take turns; the median over the turns of the ratio of one pair counts. The noise is
that of runs of one kind among themselves: the largest over the smallest, less 1.

    python tests/bench/still.py [--out FOLDER] [--rounds N]
    hpcps launch -n 3 tests/bench/still.py --rank           (this program does it)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlp import make_data, make_model, make_optimizer, siblings_cpu_s, train_step
from runs import ROOT, Figure, launch_words, read_results, run_paced, run_program, write_result
from torch.utils.data import TensorDataset

import hpcps
import hpcps.torch as ht
from hpcps.runtime.job import Job

COST_BAR = 1.01
NUM_WORKERS = 2

PACED_STEP_S = 0.05
PACED_BATCH = 256
PACED_STEPS = 130
SETTLE_STEPS = 40  # the warm-up, whose shares differ on purpose, and some more

REAL_BATCH = 512
REAL_WIDTHS = (512, 1024, 1024, 10)  # 1.6 M parameters
BLOCK_STEPS, NUM_BLOCKS = 10, 10


def paced_step_s(folder: Path, switch: str) -> float:
    """Median step of a run after the warm-up."""
    sample_s = PACED_STEP_S * NUM_WORKERS / PACED_BATCH
    flags = ["--sync-mode", "sync", "--heterogeneous", switch]
    flags += ["--emulate-speeds", "1:1", "--emulate-sample-s", f"{sample_s:.9f}"]
    run = run_paced(folder, flags, num_workers=NUM_WORKERS, num_steps=PACED_STEPS, global_batch=PACED_BATCH, small=True)
    return statistics.median(step.step_s for step in run.steps if step.step > SETTLE_STEPS)


def real_step(folder: Path, switch: str) -> tuple[float, float]:
    """Median step of a run after the warm-up, and the CPU seconds of all ranks in a step."""
    flags = ["--server-num", "1", "--sync-mode", "sync", "--heterogeneous", switch, "--log-dir", str(folder)]
    words = launch_words(NUM_WORKERS + 1, flags, Path(__file__).resolve(), ["--rank"])
    text = run_program(words, name=folder.name, limit_s=120.0, log=folder.with_suffix(".log"))
    (found,) = read_results(text)
    return found["step_s"], found["cpu_s"]


def steps_of(job: Job) -> Iterator[None]:
    """Each ``next`` is a step of this worker."""
    model = make_model(REAL_WIDTHS)
    optimizer = ht.DistributedOptimizer(make_optimizer("sgd", model), model, job)
    num_steps = SETTLE_STEPS + BLOCK_STEPS * NUM_BLOCKS
    dataset = TensorDataset(*make_data(10 * REAL_BATCH, REAL_WIDTHS))
    loader = ht.DistributedLoader(dataset, global_batch=REAL_BATCH, job=job)
    for _ in job.epochs(num_steps // 10):
        for inputs, classes in loader:
            train_step(model, optimizer, inputs, classes)
            yield


def run_rank() -> None:
    with hpcps.init() as job:
        steps = steps_of(job)
        for _ in range(SETTLE_STEPS):
            next(steps)
        blocks_s = []
        cpu_began_s = siblings_cpu_s()
        for _ in range(NUM_BLOCKS):
            began_s = time.perf_counter()
            for _ in range(BLOCK_STEPS):
                next(steps)
            blocks_s.append((time.perf_counter() - began_s) / BLOCK_STEPS)
        cpu_s = (siblings_cpu_s() - cpu_began_s) / (NUM_BLOCKS * BLOCK_STEPS)
        for _ in steps:
            pass
        if job.is_first:
            write_result(step_s=statistics.median(blocks_s), cpu_s=cpu_s)


def spread(values: Sequence[float]) -> float:
    return max(values) / min(values) - 1


def compare(what: str, on: Sequence[float], off: Sequence[float]) -> float:
    """Median of the ratios of pairs; prints what came out."""
    ratio = statistics.median(with_s / without_s for with_s, without_s in zip(on, off, strict=True))
    noise = max(spread(on), spread(off))
    print(
        f"still: {what}: on {1e3 * statistics.median(on):.2f} ms, off {1e3 * statistics.median(off):.2f} ms:"
        f" x {ratio:.4f}, noise {noise:.4f}"
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what adaptation costs where there is nothing to adapt to.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-adaptive" / "still", help="folder of runs")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    args = parser.parse_args()
    out = args.out.resolve()
    paced: dict[str, list[float]] = {"on": [], "off": []}
    real: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for index in range(args.rounds):
        for switch in ("on", "off") if index % 2 == 0 else ("off", "on"):
            paced[switch].append(paced_step_s(out / f"paced-{switch}-{index}", switch))
            real[switch].append(real_step(out / f"real-{switch}-{index}", switch))
    paced_ratio = compare("paced devices, a step", paced["on"], paced["off"])
    compare("real devices, a step", [step_s for step_s, _ in real["on"]], [step_s for step_s, _ in real["off"]])
    cpu_ratio = compare(
        "real devices, CPU of a step", [cpu_s for _, cpu_s in real["on"]], [cpu_s for _, cpu_s in real["off"]]
    )
    figures = [
        Figure(name="still_paced_step", value=paced_ratio, bar=COST_BAR, at_most=True),
        Figure(name="still_real_cpu", value=cpu_ratio, bar=COST_BAR, at_most=True),
    ]
    print("\n".join(figure.line() for figure in figures))


if __name__ == "__main__":
    run_rank() if sys.argv[1:] == ["--rank"] else main()
