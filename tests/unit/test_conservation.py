"""200 random jobs: every sample of an epoch is used once, every push counts once, all ranks leave alike.

Delays, lost and repeated frames come from the in-process channel's faults. A failure prints the seed of its job.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from ranks import Outcome, run_ranks
from wander import WHERE, Wander

import hpcps.torch as ht
from hpcps.comm.loopback import Faults
from hpcps.config import (
    CapacityConfig,
    CommConfig,
    DataConfig,
    RoutingConfig,
    RunConfig,
    StalenessConfig,
    WindowConfig,
)
from hpcps.policy.rebalance import Rebalance
from hpcps.runtime.job import Job

NUM_JOBS = 200
ONCE_HUNG = (1108,) * 10
"""Groups that waited for each other in windows of different shards; it hung once in about thirty runs."""
NUM_FEATURES = 3


@dataclass(frozen=True)
class Draw:
    """One random job."""

    seed: int
    num_workers: int
    num_servers: int
    num_samples: int
    global_batch: int
    num_epochs: int
    config: RunConfig
    faults: Faults | None
    adam: bool
    big: bool
    wanders: bool
    """Its shards move all the time."""


def draw(seed: int) -> Draw:
    rng = random.Random(seed)
    num_workers = rng.randint(1, 4)
    heterogeneous = rng.random() < 0.5
    prior = tuple(float(rng.randint(1, 4)) for _ in range(num_workers)) if rng.random() < 0.5 else ()
    faults = Faults(
        seed=seed,
        delay_s=rng.choice([0.0, 0.0005, 0.002]),
        drop_frac=rng.choice([0.0, 0.2]),
        repeat_frac=rng.choice([0.0, 0.3]),
    )
    config = RunConfig(
        sync_mode=rng.choice(["sync", "async", "hybrid"]),
        sync_group_size=rng.choice([0, 1, 2, 3]),
        heterogeneous=heterogeneous,
        overlap=rng.choice([0, 0, 1]),
        seed=seed,
        capacity=CapacityConfig(prior=prior if heterogeneous else (), interval_steps=20),
        window=WindowConfig(
            quorum_frac=rng.choice([0.25, 0.5, 1.0]),
            deadline=rng.choice(["mad", "fixed"]),
            fixed_s=rng.choice([0.0005, 0.01]),
            min_history=4,
        ),
        staleness=StalenessConfig(
            decay=rng.choice(["none", "inverse", "exponential"]),
            cap=rng.choice([0, 0, 1, 3]),
            over_cap=rng.choice(["drop", "clamp"]),
            bound=rng.choice([0, 1, 2, 4]),
        ),
        comm=CommConfig(shard_bytes=1024, checksum=rng.random() < 0.3),
        data=DataConfig(prefetch_steps=rng.choice([1, 2, 4])),
    )
    wanders = random.Random(f"moves of {seed}").random() < 0.4
    if wanders:
        config = dataclasses.replace(config, routing=RoutingConfig(interval_steps=2, spare_frac=2.0))
    return Draw(
        seed=seed,
        num_workers=num_workers,
        num_servers=rng.randint(1, 3),
        num_samples=rng.choice([1, 2, 3, 7, 20, 33, 60, 97, 200]),
        global_batch=rng.choice([1, 2, 3, 5, 8, 16]),
        num_epochs=rng.randint(1, 2),
        config=config,
        faults=faults if rng.random() < 0.7 else None,
        adam=rng.random() < 0.3,
        big=rng.random() < 0.3,
        wanders=wanders,
    )


def run(job_draw: Draw) -> Outcome:
    generator = torch.Generator().manual_seed(job_draw.seed)
    x = torch.randn(job_draw.num_samples, NUM_FEATURES, generator=generator)
    data = torch.utils.data.TensorDataset(torch.arange(job_draw.num_samples), x)

    def worker(job: Job) -> tuple[list[list[int]], torch.Tensor]:
        width = 300 if job_draw.big else 1
        model = torch.nn.Linear(NUM_FEATURES, width)
        for param in model.parameters():
            torch.nn.init.constant_(param, 0.1)
        kind = torch.optim.Adam if job_draw.adam else torch.optim.SGD
        optimizer = ht.DistributedOptimizer(kind(model.parameters(), lr=0.01), model, job)
        loader = ht.DistributedLoader(data, job_draw.global_batch, job)
        used: list[list[int]] = []
        for _ in job.epochs(job_draw.num_epochs):
            used.append([])
            for ids, inputs in loader:
                used[-1] += ids.tolist()
                optimizer.zero_grad()
                (model(inputs) ** 2).mean().backward()
                optimizer.step()
                job.log(samples=float(len(ids)))
        return used, torch.cat([param.detach().reshape(-1) for param in model.parameters()])

    return run_ranks(
        worker,
        num_workers=job_draw.num_workers,
        num_servers=job_draw.num_servers,
        config=job_draw.config,
        faults=job_draw.faults,
        timeout_s=30.0,
    )


def check(job_draw: Draw, outcome: Outcome) -> None:
    for epoch in range(job_draw.num_epochs):
        used = sorted(number for ids, _ in outcome.results for number in ids[epoch])
        assert used == list(range(job_draw.num_samples)), f"epoch {epoch}"
    first = outcome.results[0][1]
    assert bool(torch.isfinite(first).all())
    assert all(torch.equal(params, first) for _, params in outcome.results), "workers end with other parameters"
    num_shards = 5 if job_draw.big else 1
    total = float(job_draw.num_samples * job_draw.num_epochs * num_shards)
    capped = job_draw.config.staleness.cap and job_draw.config.staleness.over_cap == "drop"
    faulty = job_draw.faults is not None and job_draw.faults.repeat_frac > 0
    applied = sum(stats.applied_weight for stats in outcome.stats)
    for stats in outcome.stats:
        assert stats.pushed_weight == stats.applied_weight + stats.refused_weight
    assert sum(stats.num_windows for stats in outcome.stats) <= sum(stats.num_pushes for stats in outcome.stats)
    if capped:
        assert applied <= total
        assert sum(stats.pushed_weight for stats in outcome.stats) >= total
    else:
        assert applied == total
        if not faulty:
            assert sum(stats.num_refused for stats in outcome.stats) == 0
    if job_draw.config.sync_mode == "sync" and not job_draw.config.overlap:
        assert all(stats.staleness_max == 0 for stats in outcome.stats)


@pytest.mark.parametrize("seeds", [range(begin, begin + 20) for begin in range(0, NUM_JOBS, 20)] + [ONCE_HUNG])
def test_random_jobs_lose_and_repeat_nothing(seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Rebalance
    for seed in seeds:
        job_draw = draw(seed)
        monkeypatch.setattr(WHERE, Wander if job_draw.wanders else policy)
        try:
            check(job_draw, run(job_draw))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r} with {job_draw}") from error


@pytest.mark.parametrize("mode", ["sync", "async", "hybrid"])
@pytest.mark.parametrize("seed", range(4))
def test_the_sum_of_all_gradients_arrives_in_every_mode(mode: str, seed: int) -> None:
    """A loss linear in the parameters has the same gradient wherever they stand.

    With plain SGD, no decay and batches that are all full, a window of weight w moves the parameters by the rate times
    its samples' sum over the global batch, whoever came late: the end is known whatever the order.
    """
    num_samples, batch, rate = 96, 8, 0.5
    x = torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x)

    def worker(job: Job) -> torch.Tensor:
        model = torch.nn.Linear(NUM_FEATURES, 200, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model, job)
        for _ in job.epochs(2):
            for (inputs,) in ht.DistributedLoader(data, batch, job):
                optimizer.zero_grad()
                model(inputs).sum(1).mean().backward()
                optimizer.step()
        return model.weight.detach().clone()

    outcome = run_ranks(
        worker,
        num_workers=4,
        num_servers=2,
        config=RunConfig(
            sync_mode=mode,
            sync_group_size=2,
            window=WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=0.001),
            staleness=StalenessConfig(decay="none"),
            comm=CommConfig(shard_bytes=1024),
        ),
        faults=Faults(seed=seed, delay_s=0.002, drop_frac=0.2, repeat_frac=0.3),
    )
    expected = (-rate * 2 / batch) * x.sum(0).expand(200, -1)
    for weight in outcome.results:
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)
