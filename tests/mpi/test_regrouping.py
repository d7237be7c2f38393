"""Workers on real ranks change groups while they train: new communicators, nothing lost, all end alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi_ranks import Ranks
from scripted_groups import Groups, cycle, follow

import hpcps
import hpcps.torch as ht

SAMPLES, EPOCHS, SHARE, FEATURES = 600, 2, 2, 6


@pytest.fixture(autouse=True)
def excepthook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job on several ranks takes the hook over; give it back."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield


def groupings(num_workers: int) -> list[Groups]:
    """Each pair of neighbours in a ring once, the others together: members come from different groups each time."""
    if num_workers == 2:
        return [[[1, 2]], [[1], [2]]]
    pairs = [{first, first % num_workers + 1} for first in range(1, num_workers + 1)]
    return [[sorted(pair), [n for n in range(1, num_workers + 1) if n not in pair]] for pair in pairs]


def train(num_workers: int, folder: Path, **settings: object) -> tuple[list[list[int]], np.ndarray, int] | None:
    """Run the job: this worker's samples by epoch, its final parameters, its last grouping; None: a server."""
    rng = np.random.default_rng(5)
    inputs = torch.from_numpy(rng.normal(size=(SAMPLES, FEATURES))).float()
    targets = torch.sin(inputs.sum(1, keepdim=True))
    seen: list[list[int]] = []
    try:
        with hpcps.init(
            log={"dir": str(folder), "progress_s": 1000.0},
            sync_mode="hybrid",
            heterogeneous=True,
            sync_group_size=2,
            partition={"min_share": SHARE, "max_share": SHARE},
            **settings,
        ) as job:
            torch.manual_seed(job.worker_index)
            model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 60), torch.nn.Tanh(), torch.nn.Linear(60, 1))
            dist = ht.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, job)
            data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, targets)
            loader = ht.DistributedLoader(data, global_batch=SHARE * num_workers, job=job)
            for _ in job.epochs(EPOCHS):
                seen.append([])
                for numbers, batch, wanted in loader:
                    seen[-1] += numbers.tolist()
                    dist.zero_grad()
                    torch.nn.functional.mse_loss(model(batch), wanted).backward()
                    dist.step()
            final = np.concatenate([param.detach().numpy().reshape(-1).copy() for param in model.parameters()])
            return seen, final, job.client.grouping.generation
    except SystemExit as left:
        assert left.code == 0
        return None


def events(folder: Path, name: str) -> list[dict[str, float]]:
    """Events of this rank's file."""
    lines = [json.loads(line) for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("plane", "overlap", "rules", "num_servers"),
    [("rma", 0, (), 1), ("p2p", 1, ("*=int8",), 1), ("rma", 1, ("*=topk:0.1",), 2)],
    ids=["rma", "p2p-overlap-int8", "rma-overlap-topk-2"],
)
def test_groups_change_again_and_again(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plane: str,
    overlap: int,
    rules: tuple[str, ...],
    num_servers: int,
) -> None:
    num_workers = ranks.size - num_servers
    follow(monkeypatch, cycle(groupings(num_workers)))
    outcome = train(
        num_workers,
        tmp_path,
        server_num=num_servers,
        overlap=overlap,
        compression={"rules": rules},
        staleness={"ssp": 8},
        comm={"mode": plane, "shard_bytes": 1024, "deadline_s": 40.0, "checksum": True},
    )
    outcomes = [found for found in ranks.gather(outcome) if found is not None]
    changes = ranks.gather(events(tmp_path, "grouping"))[0]
    servers = [server for found in ranks.gather(events(tmp_path, "server")) for server in found]

    def check() -> None:
        assert len(outcomes) == num_workers
        for epoch in range(EPOCHS):
            numbers = sorted(number for seen, *_ in outcomes for number in seen[epoch])
            assert numbers == list(range(SAMPLES))
        for _, final, generation in outcomes:
            assert np.isfinite(final).all()
            np.testing.assert_array_equal(final, outcomes[0][1])
            assert generation == len(changes)
        assert len(changes) > 8
        assert len(servers) == num_servers
        for server in servers:
            assert server["pushed_weight"] == server["applied_weight"] + server["refused_weight"]
        num_shards = sum(server["applied_weight"] for server in servers) / (EPOCHS * SAMPLES)
        assert num_shards == int(num_shards) > 1, "a push was lost or counted twice"

    ranks.check(check)
