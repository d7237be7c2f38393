"""The guard rail on real ranks: a level reaches every server, workers become one group and part again, and all leave.

The script logs a loss that explodes at some step and is well again later, so that it does not depend on luck.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi_ranks import Ranks

import hpcps
import hpcps.torch as ht

PLANES = pytest.mark.parametrize("plane", ["rma", "p2p"])
SAMPLES, BATCH, EPOCHS = 403, 8, 6
EXPLODES, IS_WELL = 40, 80
"""Steps of a worker from and to which its loss is bad."""


@pytest.fixture(autouse=True)
def excepthook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job on several ranks takes the hook over; give it back."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield


def train(folder: Path, **settings: object) -> tuple[list[list[int]], np.ndarray] | None:
    """Run the job: the samples that a worker used in each epoch, and its parameters; None on a server."""
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs)
    try:
        with hpcps.init(log={"dir": str(folder), "progress_s": 1000.0}, **settings) as job:
            model = torch.nn.Linear(3, 200, dtype=torch.float64)
            optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, job)
            loader = ht.DistributedLoader(data, BATCH, job)
            used: list[list[int]] = []
            for _ in job.epochs(EPOCHS):
                used.append([])
                for numbers, x in loader:
                    used[-1] += numbers.tolist()
                    optimizer.zero_grad()
                    (model(x) ** 2).mean().backward()
                    optimizer.step()
                    job.log(loss=1e3 if EXPLODES <= job.num_steps < IS_WELL else 1.0)
            return used, torch.cat([param.detach().reshape(-1) for param in model.parameters()]).numpy().copy()
    except SystemExit as left:
        assert left.code == 0
        return None


def events(folder: Path, name: str) -> list[dict[str, object]]:
    """What the first server wrote of a kind."""
    lines = [json.loads(line) for line in (folder / "events-r000.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("sync_mode", ["async", "hybrid"])
@PLANES
def test_a_run_slides_to_sync_and_back(ranks: Ranks, tmp_path: Path, plane: str, sync_mode: str) -> None:
    num_servers = 2 if ranks.size > 3 else 1
    folder = Path(ranks.comm.bcast(str(tmp_path)))
    outcome = train(
        folder,
        server_num=num_servers,
        sync_mode=sync_mode,
        sync_group_size=1,
        guard={"hold_steps": 20},
        comm={"mode": plane, "shard_bytes": 1024, "deadline_s": 40.0, "checksum": True},
    )
    outcomes = [found for found in ranks.gather(outcome) if found is not None]

    def check() -> None:
        for epoch in range(EPOCHS):
            assert sorted(number for used, _ in outcomes for number in used[epoch]) == list(range(SAMPLES))
        for _, final in outcomes:
            np.testing.assert_array_equal(final, outcomes[0][1])
        levels = [event["level"] for event in events(folder, "guard")]
        assert levels == [3, 2, 1, 0]
        sizes = [len(event["groups"]) for event in events(folder, "grouping")]  # type: ignore[arg-type]
        assert sizes == [ranks.size - num_servers, 1, ranks.size - num_servers]

    ranks.check(check)
