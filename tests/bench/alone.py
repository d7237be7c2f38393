"""One process: a step of hpcps as a world of one against a step of plain PyTorch.

Both train the same model in the same process on the same number of threads, in blocks of steps that take turns, so
that both see the same machine. hpcps uses its own loader, plain PyTorch plain indexing.

    python tests/bench/alone.py momentum|adam
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

from mlp import GLOBAL_BATCH, batches, make_data, make_model, make_optimizer, train_step
from runs import write_result
from torch.utils.data import TensorDataset

import hpcps
import hpcps.torch as ht
from hpcps.runtime.job import Job

BLOCK_STEPS = 5
NUM_BLOCKS = 12
NUM_SAMPLES = 16 * GLOBAL_BATCH


def plain_steps(kind: str) -> Iterator[None]:
    """Each ``next`` is a step of plain PyTorch."""
    model = make_model()
    optimizer = make_optimizer(kind, model)
    for inputs, classes in batches(make_data(NUM_SAMPLES), GLOBAL_BATCH, seed=0):
        train_step(model, optimizer, inputs, classes)
        yield


def hpcps_steps(kind: str, job: Job) -> Iterator[None]:
    """Each ``next`` is a step of hpcps."""
    model = make_model()
    optimizer = ht.DistributedOptimizer(make_optimizer(kind, model), model, job)
    loader = ht.DistributedLoader(TensorDataset(*make_data(NUM_SAMPLES)), global_batch=GLOBAL_BATCH, job=job)
    for _ in job.epochs((NUM_BLOCKS + 1) * BLOCK_STEPS * GLOBAL_BATCH // NUM_SAMPLES + 1):
        for inputs, classes in loader:
            train_step(model, optimizer, inputs, classes)
            yield


def block_s(steps: Iterator[None]) -> float:
    """Median step of one block."""
    times_s = []
    for _ in range(BLOCK_STEPS):
        began_s = time.perf_counter()
        next(steps)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


def main() -> None:
    kind = sys.argv[1]
    with hpcps.init() as job:
        sides = (hpcps_steps(kind, job), plain_steps(kind))
        for side in sides:
            block_s(side)
        pairs = []
        for index in range(NUM_BLOCKS):
            order = (0, 1) if index % 2 == 0 else (1, 0)
            times_s = {which: block_s(sides[which]) for which in order}
            pairs.append((times_s[0], times_s[1]))
    write_result(
        ratio=statistics.median(ours / plain for ours, plain in pairs),
        ours_s=statistics.median(ours for ours, _ in pairs),
        plain_s=statistics.median(plain for _, plain in pairs),
    )


if __name__ == "__main__":
    main()
