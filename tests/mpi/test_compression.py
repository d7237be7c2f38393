"""Compressed pushes on real ranks: the volume reported is the one put, nothing is lost, an emulated link takes time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from mpi_ranks import Ranks

import hpcps
import hpcps.torch as ht
from hpcps.report.events import read_run

PLANES = pytest.mark.parametrize("plane", ["rma", "p2p"])
SAMPLES, FEATURES, WIDTH, BATCH, RATE = 96, 6, 200, 8, 0.5


class CountingWin(MPI.Win):
    """Counts the bytes of every Put."""

    num_bytes = 0

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        count, kind = target[1], target[2]
        self.num_bytes += count * kind.Get_size()
        super().Put(origin, target_rank, target)


@dataclass
class Outcome:
    """What a worker had at its end."""

    values: np.ndarray
    owed: np.ndarray
    counted: int
    put: int


@pytest.fixture(autouse=True)
def excepthook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(3))


def train(folder: Path, *, epochs: int, **settings: object) -> Outcome | None:
    """A loss whose gradient is the same wherever the parameters stand; None on a server."""
    try:
        with hpcps.init(log={"dir": str(folder), "progress_s": 1000.0}, **settings) as job:
            model = torch.nn.Linear(FEATURES, WIDTH, bias=False)
            torch.nn.init.zeros_(model.weight)
            factors = torch.linspace(0.01, 3.0, WIDTH)
            optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, job)
            loader = ht.DistributedLoader(torch.utils.data.TensorDataset(data()), BATCH, job=job)
            for _ in job.epochs(epochs):
                for (inputs,) in loader:
                    optimizer.zero_grad()
                    (model(inputs) * factors).sum(1).mean().backward()
                    optimizer.step()
            client = job.client
            owed = [client.compression.take_owed(shard) for shard in client.route.shards]
            window = getattr(client.channel._plane, "_window", None)
            return Outcome(
                values=model.weight.detach().numpy().reshape(-1).copy(),
                owed=np.concatenate(owed),
                counted=client.channel.counters.pushed_bytes,
                put=window.num_bytes if isinstance(window, CountingWin) else -1,
            )
    except SystemExit as left:
        assert left.code == 0
        return None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rule", ["*=fp16", "*=int8", "*=onebit", "*=topk:0.05", "*=auto"])
@PLANES
def test_nothing_is_lost_and_the_volume_is_what_was_put(
    ranks: Ranks, tmp_path: Path, plane: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MPI, "Win", CountingWin)
    folder = Path(ranks.comm.bcast(str(tmp_path)))
    outcome = train(
        folder,
        epochs=3,
        compression={"rules": (rule,)},
        comm={"mode": plane, "shard_bytes": 1024, "deadline_s": 40.0, "checksum": True},
    )
    outcomes = [found for found in ranks.gather(outcome) if found is not None]

    def check() -> None:
        assert len(outcomes) == ranks.size - 1
        owed = sum(found.owed.astype(np.float64) for found in outcomes)
        gradient = torch.linspace(0.01, 3.0, WIDTH).double()[:, None] * data().double().sum(0)[None, :]
        expected = (-RATE * 3 / BATCH * gradient).reshape(-1).numpy()
        for found in outcomes:
            np.testing.assert_allclose(found.values - RATE * owed, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
        steps = read_run(folder).steps
        for rank, found in enumerate(outcomes, start=1):
            assert sum(step.push_bytes for step in steps if step.rank == rank) == found.counted
            if plane == "rma":
                assert found.put == found.counted

    ranks.check(check)


@pytest.mark.mpi(min_size=2)
@PLANES
def test_an_emulated_link_takes_its_time(ranks: Ranks, tmp_path: Path, plane: str) -> None:
    folder = Path(ranks.comm.bcast(str(tmp_path)))
    rate = 200e3
    train(folder, epochs=1, comm={"mode": plane, "deadline_s": 40.0}, emulate={"link_bytes_per_s": rate})

    def check() -> None:
        for rank in range(1, ranks.size):
            steps = [step for step in read_run(folder).steps if step.rank == rank][1:]  # the first has the first values
            for step in steps:
                assert step.pull_bytes == 4800
                moved_s = (step.push_bytes + step.pull_bytes) / rate
                assert step.step_s >= 0.999 * moved_s, "a sync step pushes, then pulls: that was quicker than the link"

    ranks.check(check)
