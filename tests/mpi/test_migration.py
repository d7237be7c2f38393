"""Shards that move between real ranks while a job trains: it computes what one process computes, and every rank leaves.

The events that a rank wrote say what it did; each rank has a folder of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi_ranks import Ranks
from wander import WHERE, Wander

import hpcps
import hpcps.torch as ht

PLANES = pytest.mark.parametrize("plane", ["rma", "p2p"])
SAMPLES, FEATURES, BATCH, EPOCHS = 203, 6, 32, 6
NUM_SERVERS = 3


@dataclass
class Left:
    """What a rank left behind: its events, a worker's parameters, and the servers that held the model at its end."""

    events: list[dict[str, Any]]
    final: np.ndarray | None
    servers: set[int]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


@pytest.fixture(autouse=True)
def excepthook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job on several ranks takes the hook over; give it back."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield


def data() -> torch.utils.data.TensorDataset:
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(SAMPLES, FEATURES))
    targets = np.sin(inputs @ rng.normal(size=(FEATURES, 2)))
    return torch.utils.data.TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 60), torch.nn.Tanh(), torch.nn.Linear(60, 2)).double()


def flat(model: torch.nn.Module) -> np.ndarray:
    return np.concatenate([param.detach().numpy().reshape(-1).copy() for param in model.parameters()])


def train(folder: Path, *, use: tuple[int, ...] = (), **settings: object) -> Left:
    """Run the job; from its second epoch on these servers shall hold the model."""
    final, servers = None, set[int]()
    try:
        with hpcps.init(
            log={"dir": str(folder), "progress_s": 1000.0}, seed=3, server_num=NUM_SERVERS, **settings
        ) as job:
            model = new_model()
            optimizer = ht.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, job)
            loader = ht.DistributedLoader(data(), global_batch=BATCH, job=job)
            for epoch in job.epochs(EPOCHS):
                if epoch == 1 and use and job.is_first:
                    job.use_servers(use)
                for batch, wanted in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(model(batch), wanted).backward()
                    optimizer.step()
            final, servers = flat(model), {shard.server for shard in job.client.route.shards}
    except SystemExit as left:
        assert left.code == 0
    [path] = folder.glob("events-*.jsonl")
    return Left([json.loads(line) for line in path.read_text().splitlines()], final, servers)


def on_one_process() -> np.ndarray:
    """The pooled batches of the sync job."""
    model, everything = new_model(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence((3, 0, epoch)))).permutation(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            inputs, targets = (tensor[order[start : start + BATCH]] for tensor in everything.tensors)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return flat(model)


def check_finals(left: list[Left]) -> None:
    finals = [each.final for each in left if each.final is not None]
    assert len(finals) == len(left) - NUM_SERVERS
    for final in finals:
        np.testing.assert_array_equal(final, finals[0])


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("sync_mode", ["sync", "async"])
@PLANES
def test_training_goes_on_while_shards_wander(
    ranks: Ranks, tmp_path: Path, plane: str, sync_mode: str, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WHERE, Wander)
    left = ranks.gather(
        train(
            tmp_path,
            sync_mode=sync_mode,
            overlap=overlap,
            comm={"mode": plane, "shard_bytes": 1024, "deadline_s": 40.0, "checksum": True},
            routing={"interval_steps": 2, "spare_frac": 3.0},
            emulate={"server_bytes_per_s": (1e9, 1e9, 1e9)},
        )
    )

    def check() -> None:
        check_finals(left)
        servers = [event for each in left for event in each.of("server")]
        assert sum(event["num_moves"] for event in servers) == len(left[0].of("moved")) > 10
        steps = sum(len(each.of("step")) for each in left)
        num_shards = sum(event["num_pushes"] for event in servers) / steps
        weight = sum(event["applied_weight"] for event in servers)
        if sync_mode == "sync":
            # the group's mean is pushed once, by one member
            assert weight == SAMPLES * EPOCHS * round(num_shards * (len(left) - NUM_SERVERS))
        if sync_mode == "sync" and not overlap:
            np.testing.assert_allclose(left[-1].final, on_one_process(), rtol=0, atol=1e-9)

    ranks.check(check)


@pytest.mark.mpi(min_size=4)
@PLANES
def test_a_third_server_joins_two_that_hold_the_steps_up(ranks: Ranks, tmp_path: Path, plane: str) -> None:
    """Servers take 1 MB/s: with a third one, a step's 4 KB take two thirds of the time, and so some go there."""
    left = ranks.gather(
        train(
            tmp_path,
            use=(0, 1, 2),
            comm={"mode": plane, "shard_bytes": 1024, "deadline_s": 40.0},
            routing={"interval_steps": 4, "spare_frac": 2.0, "servers": (0, 1)},
            emulate={"server_bytes_per_s": (1e6, 1e6, 1e6)},
        )
    )

    def check() -> None:
        check_finals(left)
        np.testing.assert_allclose(left[-1].final, on_one_process(), rtol=0, atol=1e-9)
        assert 2 in {event["server"] for event in left[0].of("moved")}
        assert left[2].of("server")[0]["num_pushes"] > 0

    ranks.check(check)


@pytest.mark.mpi(min_size=4)
@PLANES
def test_a_server_is_emptied(ranks: Ranks, tmp_path: Path, plane: str) -> None:
    left = ranks.gather(
        train(
            tmp_path,
            use=(1, 2),
            comm={"mode": plane, "shard_bytes": 1024, "deadline_s": 40.0},
            routing={"spare_frac": 2.0, "servers": (0, 1)},
            emulate={"server_bytes_per_s": (1e9, 1e9, 1e9)},
        )
    )

    def check() -> None:
        check_finals(left)
        np.testing.assert_allclose(left[-1].final, on_one_process(), rtol=0, atol=1e-9)
        assert left[0].of("server")[0]["num_moves"] > 0
        assert left[-1].servers == {1, 2}

    ranks.check(check)
