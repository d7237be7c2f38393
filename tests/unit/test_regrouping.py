"""Jobs whose workers change groups again and again: nothing is lost, nothing counts twice, all end alike.

Groups follow a script in place of the policy, so that a change comes every few steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from ranks import Outcome, run_ranks
from scripted_groups import Groups, cycle, follow

import hpcps.torch as ht
from hpcps.comm.loopback import Faults
from hpcps.config import (
    CommConfig,
    CompressionConfig,
    PartitionConfig,
    RunConfig,
    StalenessConfig,
    WindowConfig,
)
from hpcps.errors import DataError, ProtocolError
from hpcps.protocol import regrouping
from hpcps.protocol.control import Order
from hpcps.runtime.client import WorkerClient
from hpcps.runtime.job import Job

BATCH, NUM_WORKERS, RATE, WIDTH = 8, 4, 0.5, 200
PAIRS = ([[1, 2], [3, 4]], [[1, 3], [2, 4]], [[1, 4], [2, 3]])
"""Groups of two workers of two samples: every batch is full."""
WEAK = WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=0.001)
FAULTS = Faults(seed=1, delay_s=0.001, drop_frac=0.2, repeat_frac=0.3)

Script = Callable[..., None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Give the coordinator groupings one after the other."""
    return partial(follow, monkeypatch)


def config(**changes: object) -> RunConfig:
    """Shares are two samples each, so the groups' batches are full whatever the speeds."""
    known: dict[str, object] = {
        "sync_mode": "hybrid",
        "heterogeneous": True,
        "sync_group_size": 2,
        "partition": PartitionConfig(min_share=BATCH // NUM_WORKERS, max_share=BATCH // NUM_WORKERS),
        "window": WEAK,
        "staleness": StalenessConfig(decay="none"),
        "comm": CommConfig(shard_bytes=1024),
    }
    return RunConfig(**{**known, **changes})  # type: ignore[arg-type]


def generations(outcome: Outcome) -> list[int]:
    """Of the new groupings, in order; all workers went through all of them."""
    found = [int(fields["generation"]) for fields in outcome.of_event("grouping")]
    assert {job.client.grouping.generation for job in outcome.jobs} == {found[-1]}
    return found


def inputs(seed: int, num_samples: int) -> torch.Tensor:
    return torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(
    job: Job, x: torch.Tensor, *, epochs: int, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
) -> object:
    """A loss linear in the parameters; returns ids by epoch, the parameters, and what is owed at the end."""
    model = torch.nn.Linear(x.shape[1], WIDTH, bias=False, dtype=x.dtype)
    torch.nn.init.zeros_(model.weight)
    dist = ht.DistributedOptimizer(optimizer(model.parameters(), lr=RATE), model, job)  # type: ignore[call-arg]
    data = torch.utils.data.TensorDataset(torch.arange(len(x)), x)
    loader = ht.DistributedLoader(data, BATCH, job)
    used: list[list[int]] = []
    for _ in job.epochs(epochs):
        used.append([])
        for ids, batch in loader:
            used[-1] += ids.tolist()
            dist.zero_grad()
            model(batch).sum(1).mean().backward()
            dist.step()
    owed = np.zeros((WIDTH, x.shape[1]))
    flat = owed.reshape(-1)
    for shard in job.client.route.shards:
        flat[shard.begin : shard.begin + shard.numel] = job.client.compression.take_owed(shard)
    return used, model.weight.detach().clone(), owed


def check_samples(outcome: Outcome, num_samples: int, epochs: int) -> None:
    for epoch in range(epochs):
        ids = sorted(number for used, *_ in outcome.results for number in used[epoch])
        assert ids == list(range(num_samples))
    for stats in outcome.stats:
        assert stats.pushed_weight == stats.applied_weight + stats.refused_weight
    assert all(torch.equal(result[1], outcome.results[0][1]) for result in outcome.results)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("ssp", [0, 2])
@pytest.mark.parametrize("faults", [None, FAULTS], ids=["clean", "faulty"])
def test_the_sum_of_all_gradients_arrives_over_many_regroupings(
    script: Script, overlap: int, ssp: int, faults: Faults | None
) -> None:
    script(cycle(PAIRS[1:] + PAIRS[:1]))
    x = inputs(3, 400)
    outcome = run_ranks(
        lambda job: train(job, x, epochs=2),
        num_workers=NUM_WORKERS,
        num_servers=2,
        config=config(overlap=overlap, staleness=StalenessConfig(decay="none", ssp=ssp)),
        faults=faults,
    )
    found = generations(outcome)
    assert found == list(range(1, len(found) + 1))
    assert len(found) > 8
    check_samples(outcome, len(x), 2)
    if faults is None:
        assert sum(stats.num_refused for stats in outcome.stats) == 0
    expected = (-RATE * 2 / BATCH) * x.sum(0).expand(WIDTH, -1)
    torch.testing.assert_close(outcome.results[0][1], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("quorum", [0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_any_groups_lose_and_repeat_nothing(script: Script, seed: int, quorum: float) -> None:
    """Groups of one to four workers, windows that wait for all or for half, Adam, bounds on being ahead."""
    rng = random.Random(seed)

    def any_groups() -> Groups:
        groups: dict[int, list[int]] = {}
        for rank in range(1, NUM_WORKERS + 1):
            groups.setdefault(rng.randrange(NUM_WORKERS), []).append(rank)
        return list(groups.values())

    script(any_groups, every=rng.choice([1, 3, 6]))
    num_samples = rng.choice([300, 397])
    outcome = run_ranks(
        lambda job: train(job, inputs(seed, num_samples), epochs=3, optimizer=torch.optim.Adam),
        num_workers=NUM_WORKERS,
        num_servers=rng.choice([1, 2]),
        config=config(
            overlap=rng.choice([0, 1]),
            sync_group_size=0,
            partition=PartitionConfig(min_share=rng.choice([0, 1])),
            window=WindowConfig(quorum_frac=quorum, deadline="fixed", fixed_s=0.002),
            staleness=StalenessConfig(ssp=rng.choice([0, 1, 3]), bound=rng.choice([0, 2])),
        ),
        faults=rng.choice([None, FAULTS]),
    )
    assert len(generations(outcome)) > 3
    check_samples(outcome, num_samples, 3)
    num_shards = len(outcome.jobs[0].client.route.shards)
    assert sum(stats.applied_weight for stats in outcome.stats) == 3 * num_samples * num_shards


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk:0.05"])
def test_what_codecs_leave_out_survives_many_regroupings(script: Script, codec: str) -> None:
    script(cycle(PAIRS[1:] + PAIRS[:1]))
    x = inputs(5, 1).float().expand(400, -1).contiguous()
    outcome = run_ranks(
        lambda job: train(job, x, epochs=2),
        num_workers=NUM_WORKERS,
        num_servers=2,
        config=config(compression=CompressionConfig(rules=(f"*={codec}",))),
        faults=FAULTS,
    )
    assert len(generations(outcome)) > 8
    owed = sum(result[2] for result in outcome.results)
    assert np.abs(owed).max() > 0
    want = (-RATE * 2 * len(x) / BATCH) * x[0].double().numpy()
    for _, values, _ in outcome.results:
        assert np.abs(values.double().numpy() - RATE * owed - want).max() < 2e-4 * np.abs(want).max()


def test_members_of_a_new_group_begin_from_the_same_parameters(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script(cycle(PAIRS[1:] + PAIRS[:1]))
    seen: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    regroup = WorkerClient._join

    def note(self: WorkerClient) -> None:
        versions = tuple(self._protocol.used(shard.key) for shard in self.route.shards)
        seen.setdefault(self.grouping.generation, []).append((self.clock, versions))
        regroup(self)

    monkeypatch.setattr(WorkerClient, "_join", note)
    x = inputs(1, 400)
    outcome = run_ranks(
        lambda job: train(job, x, epochs=1), num_workers=NUM_WORKERS, num_servers=2, config=config(overlap=1)
    )
    for generation in generations(outcome):
        assert len(seen[generation]) == NUM_WORKERS
        assert len(set(seen[generation])) == 1, "clocks or versions differ"
    clocks = [seen[generation][0][0] for generation in sorted(seen)]
    assert clocks == sorted(clocks)
    assert clocks[-1] > 0


def test_a_group_that_waits_for_the_others_holds_no_window_up() -> None:
    """Every window waits for all groups, and never by time; one group makes a step before groups change, one three."""

    def worker(job: Job) -> tuple[int, torch.Tensor]:
        model = torch.nn.Linear(3, WIDTH, bias=False, dtype=torch.float64)
        dist = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        for generation in range(1, 9):
            job.adopt(order(generation, groups=[[1], [2]]))
            for _ in range(1 if job.worker_index == generation % 2 else 3):
                dist.zero_grad()
                model(torch.ones(2, 3, dtype=torch.float64)).sum(1).mean().backward()
                dist.step()
        job.finish()
        return job.clock, model.weight.detach().clone()

    outcome = run_ranks(
        worker, num_workers=2, config=config(window=WindowConfig(quorum_frac=1.0, deadline="fixed", fixed_s=1000.0))
    )
    assert {clock for clock, _ in outcome.results} <= {22, 24}
    assert torch.equal(outcome.results[0][1], outcome.results[1][1])
    assert outcome.stats[0].num_refused == 0


def test_accumulated_steps_are_never_torn(script: Script) -> None:
    """Three batches a step: groups change only where all groups have finished a step."""
    script(cycle(PAIRS[1:] + PAIRS[:1]), every=2)
    x = inputs(4, 960)

    def worker(job: Job) -> object:
        model = torch.nn.Linear(3, WIDTH, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        dist = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, job)
        data = torch.utils.data.TensorDataset(torch.arange(len(x)), x)
        loader = ht.DistributedLoader(data, BATCH, job)
        used: list[list[int]] = []
        for _ in job.epochs(2):
            used.append([])
            left = 0
            for ids, batch in loader:
                used[-1] += ids.tolist()
                left = (left + 1) % 3
                if left:
                    with dist.no_sync():
                        model(batch).sum(1).mean().backward()
                else:
                    model(batch).sum(1).mean().backward()
                    dist.step()
                    dist.zero_grad()
            if left:
                dist.step()
                dist.zero_grad()
        return used, model.weight.detach().clone()

    outcome = run_ranks(worker, num_workers=NUM_WORKERS, config=config(sync_group_size=4))
    assert len(generations(outcome)) > 2
    check_samples(outcome, len(x), 2)


def test_groups_that_would_tear_a_step_are_refused() -> None:
    def worker(job: Job) -> None:
        model = torch.nn.Linear(3, 2)
        dist = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, job)
        with dist.no_sync():
            model(torch.ones(1, 3)).sum().backward()
        job.adopt(order(job.client.grouping.generation + 1))

    with pytest.raises(DataError, match=r"cannot change groups at rank 1: gradients .* set grouping.regroup off"):
        run_ranks(worker, num_workers=1)


def test_a_worker_never_goes_back_to_older_groups() -> None:
    def worker(job: Job) -> None:
        assert job.adopt(order(1))
        assert not job.adopt(order(1))
        job.adopt(order(0))

    with pytest.raises(ProtocolError, match="cannot go back to grouping 0 at rank 1: it is in grouping 1 already"):
        run_ranks(worker, num_workers=1)


def order(generation: int, *, groups: Sequence[Sequence[int]] = ((1,),)) -> Order:
    return Order(
        loader=0,
        epoch=0,
        index=0,
        end=False,
        start=0,
        count=1,
        group_count=1,
        num_idle=0,
        share_frac=1.0,
        generation=generation,
        groups=[list(group) for group in groups],
    )


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("after", [False, True], ids=["before a step", "after a step"])
def test_workers_that_leave_a_loop_early_end_it_for_their_group(script: Script, meet: bool, after: bool) -> None:
    """Some leave each epoch by a count of their own, groups change under them, and nobody waits for ever."""
    script(cycle(PAIRS[1:] + PAIRS[:1]), every=3)
    x = inputs(6, 400)

    def worker(job: Job) -> torch.Tensor:
        model = torch.nn.Linear(3, WIDTH, bias=False, dtype=torch.float64)
        dist = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        loader = ht.DistributedLoader(torch.utils.data.TensorDataset(x), BATCH, job)
        for epoch in job.epochs(5):
            for count, (batch,) in enumerate(loader):
                leaves = count == 30 + 3 * epoch and job.worker_index != 1
                if leaves and not after:
                    break
                dist.zero_grad()
                model(batch).sum(1).mean().backward()
                dist.step()
                if leaves:
                    break
            if meet:
                job.barrier()
        return model.weight.detach().clone()

    outcome = run_ranks(worker, num_workers=NUM_WORKERS, num_servers=2, config=config(overlap=1))
    assert len(generations(outcome)) > 3
    assert all(torch.equal(weight, outcome.results[0]) for weight in outcome.results)


def test_a_loop_whose_iterator_lives_on_ends_with_the_job(script: Script) -> None:
    script(cycle(PAIRS), every=3)
    x = inputs(6, 4000)

    def worker(job: Job) -> tuple[object, torch.Tensor, int]:
        model = torch.nn.Linear(3, WIDTH, bias=False, dtype=torch.float64)
        dist = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        batches = iter(ht.DistributedLoader(torch.utils.data.TensorDataset(x), BATCH, job))
        for _, (batch,) in zip(range(60), batches, strict=False):
            dist.zero_grad()
            model(batch).sum(1).mean().backward()
            dist.step()
        job.finish()
        return batches, model.weight.detach().clone(), job.clock

    outcome = run_ranks(worker, num_workers=NUM_WORKERS, config=config())
    assert all(torch.equal(weight, outcome.results[0][1]) for _, weight, _ in outcome.results)
    assert min(clock for *_, clock in outcome.results) > 20
    assert max(clock for *_, clock in outcome.results) >= 60


def test_one_group_whenever_the_guard_asks_for_it(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script(cycle(PAIRS), every=1000)
    x = inputs(7, 800)

    class Asking(regrouping.Regrouping):
        """Asks as the guard rail does, every ten steps of all workers."""

        def consider(self, facts: Callable[[], regrouping.Facts], *, measured: bool) -> bool:
            if self._found and min(self._given.values()) >= 10:
                self.want_together(len(self.grouping.groups) > 1)
            return super().consider(facts, measured=measured)

    monkeypatch.setattr("hpcps.protocol.coordinator.Regrouping", Asking)
    outcome = run_ranks(lambda job: train(job, x, epochs=2), num_workers=NUM_WORKERS, config=config())
    sizes = [[len(group) for group in fields["groups"]] for fields in outcome.of_event("grouping")]
    assert len(sizes) > 5
    assert all(size == ([4] if index % 2 else [2, 2]) for index, size in enumerate(sizes))
    check_samples(outcome, len(x), 2)
    num_shards = len(outcome.jobs[0].client.route.shards)
    assert sum(stats.applied_weight for stats in outcome.stats) == 2 * len(x) * num_shards


def test_loading_processes_and_a_bound_on_being_ahead() -> None:
    """Processes load more batches ahead than a worker may be ahead of the others."""
    x = inputs(8, 160)

    def worker(job: Job) -> list[int]:
        model = torch.nn.Linear(3, 2, dtype=torch.float64)
        dist = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        data = torch.utils.data.TensorDataset(torch.arange(len(x)), x)
        used: list[int] = []
        for ids, batch in ht.DistributedLoader(data, BATCH, job, num_workers=2):
            used += ids.tolist()
            dist.zero_grad()
            model(batch).sum(1).mean().backward()
            dist.step()
        return used

    outcome = run_ranks(
        worker, num_workers=2, config=RunConfig(sync_mode="async", window=WEAK, staleness=StalenessConfig(ssp=1))
    )
    assert sorted(number for used in outcome.results for number in used) == list(range(len(x)))
