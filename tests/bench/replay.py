"""Replay of recorded step times: real jobs of a public trace, each of ten workers that share machines with others.

The trace (Alibaba PAI, cluster-trace-gpu-v2020, mini-batch-time) has a row a moment with the time that a mini-batch
took on each worker, normalised. The column that numbers the rows counts 1, 11, 21, ... without a unit. It is read as
the number of the step, so a row lasts ten steps; ``steps_per_row=1`` is the other reading. Gaps are filled from the row
before, and rows before every worker has a value are left out.

``replay`` lets the coordinator of a job share out batches in virtual time: its messages are those of the real loader,
the seconds that it is told are the trace's. It measures nothing and starts nothing.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpcps.config import RunConfig
from hpcps.protocol.control import LoaderOpen, Order, OrderRequest
from hpcps.protocol.coordinator import Coordinator

Times: TypeAlias = npt.NDArray[np.float64]
"""Time of a mini-batch by moment and worker."""

STEPS_PER_ROW = 10


def read_job(path: Path) -> Times:
    """Read a job of the trace: rows by time, columns by worker, no gap."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        cells = {
            (int(float(row["time"])), int(float(row["worker"]))): float(row["batch_time_norm"])
            for row in csv.DictReader(file)
        }
    moments = sorted({moment for moment, _ in cells})
    workers = sorted({worker for _, worker in cells})
    table = np.full((len(moments), len(workers)), np.nan)
    last = np.full(len(workers), np.nan)
    for at, moment in enumerate(moments):
        seen = np.array([cells.get((moment, worker), np.nan) for worker in workers])
        last = np.where(np.isnan(seen), last, seen)
        table[at] = last
    return table[~np.isnan(table).any(axis=1)]


def find_job(folder: Path, number: int) -> Path | None:
    """The file of a job in the folder of the trace, packed or not; None: not there."""
    names = (f"job_{number}_norm.csv", f"job_{number}_norm.csv.gz")
    return next((folder / name for name in names if (folder / name).exists()), None)


def write_trace(path: Path, unit_s: Times, *, steps_per_row: int) -> None:
    """Write rows for ``emulate.trace``.

    Args:
        path: file to write.
        unit_s: seconds of a sample by row and worker.
        steps_per_row: steps that a row lasts.
    """
    lines = [
        f"{1 + at * steps_per_row} {' '.join(f'{seconds:.9g}' for seconds in row)}" for at, row in enumerate(unit_s)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# seconds of a sample on each worker from a step on\n" + "\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay gave.

    Args:
        step_s: seconds of each step, shape [num_steps].
        counts: samples of each worker in each step, shape [num_steps, num_workers].
        events: names and fields of what the coordinator decided, each with the step at hand, in order.
    """

    step_s: Times
    counts: npt.NDArray[np.int64]
    events: tuple[tuple[int, str, dict[str, object]], ...]

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return float(self.step_s.sum())


def replay(
    unit_s: Times,
    config: RunConfig,
    *,
    global_batch: int,
    steps_per_row: int = STEPS_PER_ROW,
    noise: Callable[[], float] = lambda: 1.0,
) -> Replayed:
    """Run a sync job in virtual time, in which a sample takes what the trace says and all else takes none.

    Each worker asks for ``data.prefetch_steps`` batches ahead, and tells with each request how long its last step took,
    as the loader does. In a round the workers ask in rank order, so the first of them draws each batch, before the
    others have told of the step just over.

    Args:
        unit_s: seconds of a sample by row and worker.
        config: the run's settings.
        global_batch: samples of a step.
        steps_per_row: steps that a row lasts.
        noise: factor on the time of each step of each worker.
    """
    num_steps, num_workers = len(unit_s) * steps_per_row, unit_s.shape[1]
    ranks = range(1, num_workers + 1)
    events: list[tuple[int, str, dict[str, object]]] = []
    at = 0

    def report(name: str, fields: dict[str, object]) -> None:
        events.append((at + 1, name, fields))

    coordinator = Coordinator(config, tuple(ranks), report=report)
    for rank in ranks:
        coordinator.on_loader(
            LoaderOpen(
                rank=rank, loader=0, num_samples=num_steps * global_batch, global_batch=global_batch, trains=True
            )
        )
    ahead = config.data.prefetch_steps
    orders: dict[int, deque[Order]] = {rank: deque() for rank in ranks}

    def ask(rank: int, index: int, timed: list[float]) -> None:
        for _, reply in coordinator.on_request(_request(rank, index, timed)):
            assert isinstance(reply, Order)
            orders[rank].append(reply)

    for rank in ranks:
        for index in range(ahead):
            ask(rank, index, [])
    step_s = np.zeros(num_steps)
    counts = np.zeros((num_steps, num_workers), dtype=np.int64)
    for at, row in enumerate(np.repeat(unit_s, steps_per_row, axis=0)):
        taken = [orders[rank].popleft().count for rank in ranks]
        seconds = [count * float(each) * noise() for count, each in zip(taken, row, strict=True)]
        step_s[at], counts[at] = max(seconds), taken
        for rank, count, took_s in zip(ranks, taken, seconds, strict=True):
            ask(rank, at + ahead, [float(count), took_s] if count else [])
    return Replayed(step_s=step_s, counts=counts, events=tuple(events))


def _request(rank: int, index: int, timed: list[float]) -> OrderRequest:
    return OrderRequest(
        rank=rank,
        loader=0,
        epoch=0,
        index=index,
        num_epochs=1,
        timed=timed,
        logged=[],
        sums=[],
        weights=[],
        staleness=0,
        num_samples=int(sum(timed[::2])),
    )


def equal_s(unit_s: Times, *, global_batch: int, steps_per_row: int = STEPS_PER_ROW) -> float:
    """Seconds of all steps with equal shares."""
    return float(unit_s.max(axis=1).sum()) * steps_per_row * global_batch / unit_s.shape[1]


def best_s(unit_s: Times, *, global_batch: int, steps_per_row: int = STEPS_PER_ROW) -> float:
    """Seconds of all steps with the best shares at every moment, in fractions of a sample."""
    return float((1 / (1 / unit_s).sum(axis=1)).sum()) * steps_per_row * global_batch


def adapting(*, follow: bool) -> RunConfig:
    """Settings of a sync run whose shares follow speeds, or stay as the warm-up found them."""
    config = RunConfig(heterogeneous=True)
    return dataclasses.replace(config, capacity=dataclasses.replace(config.capacity, follow=follow))


def rows_of(replayed: Replayed, steps_per_row: int) -> Iterator[float]:
    """Seconds of each row."""
    yield from replayed.step_s.reshape(-1, steps_per_row).sum(axis=1).tolist()
