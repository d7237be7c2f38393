"""Whole jobs on real ranks: what they compute, that all samples are used once, and that every rank leaves.

A test's job is the user's: ``hpcps.init()`` in this process, so an error inside ends all ranks, as it does for users.
What the workers saw and got is compared after the job, when MPI is the test's again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi_ranks import Ranks

import hpcps
import hpcps.torch as ht
from hpcps.errors import ConfigError

PLANES = pytest.mark.parametrize("plane", ["rma", "p2p"])
SAMPLES, FEATURES, BATCH, EPOCHS = 203, 6, 32, 3
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


@dataclass
class Outcome:
    """What a worker did: the samples of its batches by epoch and step, and the final parameters."""

    seen: dict[tuple[int, int], list[int]]
    final: np.ndarray


@pytest.fixture(autouse=True)
def excepthook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job on several ranks takes the hook over; give it back."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield


def data() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(SAMPLES, FEATURES))
    targets = np.sin(inputs @ rng.normal(size=(FEATURES, 2)))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def new_model(seed: int) -> torch.nn.Module:
    """Its first layer alone fills several shards of 1024 bytes."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
    return model.double()


def flat(model: torch.nn.Module) -> np.ndarray:
    return np.concatenate([param.detach().numpy().reshape(-1).copy() for param in model.parameters()])


def train(ranks: Ranks, optimizer: str, folder: Path, **settings: object) -> Outcome | None:
    """Run the job; None on a server."""
    inputs, targets = data()
    everything = torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, targets)
    seen: dict[tuple[int, int], list[int]] = {}
    try:
        with hpcps.init(log={"dir": str(folder), "progress_s": 1000.0}, seed=3, **settings) as job:
            # workers start with different parameters and must end with one set
            model = new_model(seed=1 + job.worker_index)
            dist = ht.DistributedOptimizer(OPTIMIZERS[optimizer](list(model.parameters())), model, job)
            loader = ht.DistributedLoader(everything, global_batch=BATCH, job=job)
            for epoch in job.epochs(EPOCHS):
                for numbers, batch, wanted in loader:
                    seen[epoch, job.num_steps] = numbers.tolist()
                    dist.zero_grad()
                    torch.nn.functional.mse_loss(model(batch), wanted).backward()
                    dist.step()
            return Outcome(seen, flat(model))
    except SystemExit as left:
        assert left.code == 0
        return None


def check_samples(outcomes: list[Outcome]) -> None:
    """Every sample of an epoch went to one worker, once."""
    for epoch in range(EPOCHS):
        numbers = [n for outcome in outcomes for (e, _), batch in outcome.seen.items() if e == epoch for n in batch]
        assert sorted(numbers) == list(range(SAMPLES))


def on_one_process(outcomes: list[Outcome], optimizer: str) -> np.ndarray:
    """Train on the pooled batches of each step."""
    inputs, targets = data()
    model = new_model(seed=1)
    optim = OPTIMIZERS[optimizer](list(model.parameters()))
    for at in sorted(set().union(*(outcome.seen for outcome in outcomes))):
        pooled = sorted(number for outcome in outcomes for number in outcome.seen.get(at, []))
        optim.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[pooled]), targets[pooled]).backward()
        optim.step()
    return flat(model)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@PLANES
def test_sync_with_uneven_shares_equals_one_process(
    ranks: Ranks, tmp_path: Path, plane: str, optimizer: str, num_servers: int
) -> None:
    if num_servers >= ranks.size:
        pytest.skip(f"{num_servers} servers and a worker need {num_servers + 1} ranks, there are {ranks.size}")
    num_workers = ranks.size - num_servers
    outcome = train(
        ranks,
        optimizer,
        tmp_path,
        server_num=num_servers,
        heterogeneous=True,
        capacity={"prior": tuple(float(v) for v in range(num_workers, 0, -1))},
        comm={"mode": plane, "shard_bytes": 1024, "deadline_s": 40.0, "checksum": True},
    )
    outcomes = [found for found in ranks.gather(outcome) if found is not None]

    def check() -> None:
        assert len(outcomes) == num_workers
        check_samples(outcomes)
        batches = [{len(batch) for batch in outcome.seen.values()} for outcome in outcomes]
        assert num_workers == 1 or max(batches[0]) > max(batches[-1]), "shares are even"
        expected = on_one_process(outcomes, optimizer)
        for found in outcomes:
            np.testing.assert_allclose(found.final, expected, rtol=0, atol=1e-9)

    ranks.check(check)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("sync_mode", ["sync", "async", "hybrid"])
@PLANES
def test_all_modes_end_and_agree_and_use_every_sample_once(
    ranks: Ranks, tmp_path: Path, plane: str, sync_mode: str, overlap: int
) -> None:
    num_servers = 2 if ranks.size > 4 else 1
    num_workers = ranks.size - num_servers
    outcome = train(
        ranks,
        "adam",
        tmp_path,
        server_num=num_servers,
        sync_mode=sync_mode,
        overlap=overlap,
        heterogeneous=True,
        capacity={"prior": (2.0,) * (num_workers - 1) + (1.0,)},
        comm={"mode": plane, "shard_bytes": 1024, "deadline_s": 40.0, "checksum": True},
    )
    outcomes = [found for found in ranks.gather(outcome) if found is not None]

    def check() -> None:
        assert len(outcomes) == num_workers
        check_samples(outcomes)
        start = flat(new_model(seed=1))
        for found in outcomes:
            assert np.isfinite(found.final).all() and not np.array_equal(found.final, start)
            np.testing.assert_array_equal(found.final, outcomes[0].final)

    ranks.check(check)


@pytest.mark.mpi
def test_world_of_one_equals_plain_torch(ranks: Ranks, tmp_path: Path) -> None:
    if ranks.size > 1:
        pytest.skip("a world of one needs one rank")
    outcome = train(ranks, "adam", tmp_path)
    assert outcome is not None
    check_samples([outcome])
    assert [len(batch) for batch in outcome.seen.values()] == [32, 32, 32, 32, 32, 32, 11] * EPOCHS
    inputs, targets = data()
    model = new_model(seed=1)
    optim = OPTIMIZERS["adam"](list(model.parameters()))
    for batch in outcome.seen.values():
        optim.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
        optim.step()
    np.testing.assert_allclose(outcome.final, flat(model), rtol=0, atol=1e-12)


@pytest.mark.mpi
def test_unknown_setting_stops_every_rank_before_mpi(ranks: Ranks) -> None:
    def check() -> None:
        with pytest.raises(ConfigError, match="cannot accept setting 'sync_mod'"):
            hpcps.init(sync_mod="async")

    ranks.check(check)
