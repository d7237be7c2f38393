"""Whole jobs whose samples cost unlike: the update is that of the pooled batch; no sample is lost or counts less."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

import hpcps.torch as ht
from hpcps.comm.loopback import Faults
from hpcps.config import (
    CapacityConfig,
    CommConfig,
    DataConfig,
    PartitionConfig,
    RunConfig,
    StalenessConfig,
    WindowConfig,
)
from hpcps.errors import DataError
from hpcps.plan import Codec, Piece, Shard
from hpcps.protocol.actions import Accumulate
from hpcps.protocol.control import OrderRequest
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.server import ServerProtocol
from hpcps.runtime.job import Job
from hpcps.runtime.metrics import EventLog
from hpcps.runtime.server_stats import ServerStats

NUM_SAMPLES, BATCH, LONGEST, WIDTH = 211, 16, 24, 5
PRIORS = {1: (1.0,), 2: (3.0, 1.0), 4: (3.0, 2.0, 1.0, 1.0)}


def config_of(num_workers: int, mode: str = "sync", **others: Any) -> RunConfig:
    return RunConfig(
        heterogeneous=True,
        sync_mode=mode,
        seed=5,
        capacity=CapacityConfig(prior=PRIORS[num_workers], warmup_steps=1000),
        comm=CommConfig(shard_bytes=1024),
        **others,
    )


def dataset() -> torch.utils.data.TensorDataset:
    """Sequences of 1 to 24 vectors, padded, with skewed lengths; a target each."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.exp(torch.randn(NUM_SAMPLES, generator=generator)).mul(4).ceil().clamp(1, LONGEST)
    x = torch.randn(NUM_SAMPLES, LONGEST, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, lengths, y, torch.arange(NUM_SAMPLES))


DATA = dataset()
LENGTHS = DATA.tensors[1]
Batch = tuple[torch.Tensor, ...]


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    for param in model.parameters():
        param.data = 0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return model


def by_sample(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean over samples of the mean over their vectors."""
    x, lengths, y, _ = batch
    mask = (torch.arange(LONGEST) < lengths[:, None])[:, :, None]
    error = ((model(x) - y[:, None]) ** 2) * mask
    return (error.sum((1, 2)) / lengths).mean()


def by_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean over all vectors."""
    x, lengths, y, _ = batch
    mask = (torch.arange(LONGEST) < lengths[:, None])[:, :, None]
    return (((model(x) - y[:, None]) ** 2) * mask).sum() / lengths.sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def permutation(epoch: int) -> list[int]:
    """The order of a job's samples."""
    seed = np.random.SeedSequence((5, 0, epoch))
    return np.random.Generator(np.random.PCG64(seed)).permutation(NUM_SAMPLES).tolist()


def pooled(loss: Callable[[nn.Module, Batch], torch.Tensor], *, epochs: int) -> list[torch.Tensor]:
    """Parameters after plain training on the global batches, whose samples and order no assignment changes."""
    model = net()
    optimizer = sgd(model)
    for epoch in range(epochs):
        order = permutation(epoch)
        for start in range(0, NUM_SAMPLES, BATCH):
            chosen = torch.tensor(order[start : start + BATCH])
            optimizer.zero_grad()
            loss(model, tuple(tensor[chosen] for tensor in DATA.tensors)).backward()
            optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def trains(cost: Any, *, tokens: bool = False, epochs: int = 2, loading: int = 0) -> Callable[[Job], Any]:
    """A worker function; returns the parameters, and the numbers of its samples of each step and epoch."""

    def worker(job: Job) -> tuple[list[torch.Tensor], list[list[list[int]]]]:
        model = net()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        loader = ht.DistributedLoader(DATA, BATCH, job, cost=cost, num_workers=loading)
        used: list[list[list[int]]] = []
        for _ in job.epochs(epochs):
            used.append([])
            for batch in loader:
                used[-1].append(batch[3].tolist())
                optimizer.zero_grad()
                if tokens:
                    optimizer.set_batch_weight(float(batch[1].sum()))
                (by_token if tokens else by_sample)(model, batch).backward()
                optimizer.step()
        return [param.detach().clone() for param in model.parameters()], used

    return worker


def check_used(results: list[Any]) -> None:
    """Every sample of every epoch once."""
    for epoch in range(len(results[0][1])):
        used = [number for _, epochs in results for step in epochs[epoch] for number in step]
        assert sorted(used) == list(range(NUM_SAMPLES))


# --- the promise -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize("cost", [1, LENGTHS.tolist(), ht.LearnedCost(features=1)], ids=["place", "numbers", "learned"])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_update_is_that_of_the_pooled_batch(num_workers: int, cost: Any, tokens: bool) -> None:
    outcome = run_ranks(trains(cost, tokens=tokens), num_workers=num_workers, config=config_of(num_workers))
    check_used(outcome.results)
    expected = pooled(by_token if tokens else by_sample, epochs=2)
    for params, _ in outcome.results:
        for got, want in zip(params, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_members_end_together_by_cost_not_by_count() -> None:
    """Speeds 3 : 1. How long the slower of the two takes, over an even end: by cost, and by count, 12 samples to 4."""
    outcome = run_ranks(trains(1, epochs=1), num_workers=2, config=config_of(2))
    (_, [quick]), (_, [slow]) = outcome.results
    lengths = LENGTHS.double().numpy()
    by_cost, by_count = [], []
    for mine, others in zip(quick[:-1], slow[:-1], strict=True):  # all but the tail
        group = permutation(0)[len(by_cost) * BATCH :][:BATCH]
        assert sorted([*mine, *others]) == sorted(group)
        even = lengths[group].sum() / 4
        by_cost.append(max(lengths[mine].sum() / 3, lengths[others].sum()) / even)
        by_count.append(max(lengths[group[:12]].sum() / 3, lengths[group[12:]].sum()) / even)
    assert max(by_cost) < 1.1
    assert np.mean(by_cost) < 1.02
    assert np.mean(by_count) > 1.2


def test_a_member_without_samples_takes_part_in_the_step() -> None:
    """One worker is so quick that with no least share the others have none, but where it takes their turn in a tail."""
    costs = [1.0 + number % 2 for number in range(NUM_SAMPLES)]
    config = config_of(4, partition=PartitionConfig(min_share=0))
    config = dataclasses.replace(config, capacity=dataclasses.replace(config.capacity, prior=(50.0, 1.0, 1.0, 1.0)))
    outcome = run_ranks(trains(costs), num_workers=4, config=config)
    check_used(outcome.results)
    assert [len(epochs[0]) for _, epochs in outcome.results] == [-(-NUM_SAMPLES // BATCH), 0, 0, 0]
    for got, want in zip(outcome.results[0][0], pooled(by_sample, epochs=2), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_accumulation_is_refused_where_a_member_has_no_samples() -> None:
    """The members know it by the assignment, not by the counts that the coordinator would give."""
    config = config_of(2, partition=PartitionConfig(min_share=0))
    config = dataclasses.replace(config, capacity=dataclasses.replace(config.capacity, prior=(50.0, 1.0)))

    def worker(job: Job) -> None:
        model = net()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        for batch in ht.DistributedLoader(DATA, BATCH, job, cost=[1.0 + number % 2 for number in range(NUM_SAMPLES)]):
            with optimizer.no_sync():
                by_sample(model, batch).backward()

    with pytest.raises(DataError, match="a batch has no samples for another worker"):
        run_ranks(worker, num_workers=2, config=config)


@pytest.mark.parametrize("cost", [1, ht.LearnedCost(features=1)], ids=["given", "learned"])
def test_a_worker_reports_the_work_of_each_step(cost: Any) -> None:
    """Given: the cost of its samples. Learned: their count, as long as nothing is learned, and sums of features."""
    told: dict[int, list[OrderRequest]] = {1: [], 2: []}

    def worker(job: Job) -> Any:
        tell = job.client.mail.tell_coordinator

        def listen(message: Any) -> None:
            if isinstance(message, OrderRequest):
                told[job.rank].append(message)
            tell(message)

        job.client.mail.tell_coordinator = listen  # type: ignore[method-assign]
        return trains(cost, epochs=1)(job)

    outcome = run_ranks(worker, num_workers=2, config=config_of(2))
    lengths = (LENGTHS / LENGTHS.mean()).double().numpy()
    squares = lengths**2 / (lengths**2).mean()
    for rank, (_, [steps]) in enumerate(outcome.results, start=1):
        work = [value for message in told[rank] for value in message.timed[::2]]
        sums = [value for message in told[rank] for value in message.features]
        assert len(work) >= 8
        if cost == 1:
            assert work == pytest.approx([lengths[numbers].sum() for numbers in steps][: len(work)])
            assert sums == []
        else:
            assert work == [float(len(numbers)) for numbers in steps][: len(work)]
            rows = [(len(numbers), lengths[numbers].sum(), squares[numbers].sum()) for numbers in steps]
            assert sums == pytest.approx(np.array(rows)[: len(work)].reshape(-1))


def test_loading_processes_get_the_same_samples() -> None:
    outcomes = [
        run_ranks(trains(1, epochs=1, loading=loading), num_workers=2, config=config_of(2)) for loading in (0, 1)
    ]
    assert outcomes[0].results[0][1] == outcomes[1].results[0][1]


def test_equal_shares_are_balanced_by_cost_too() -> None:
    config = RunConfig(seed=5, comm=CommConfig(shard_bytes=1024))
    outcome = run_ranks(trains(1, epochs=1), num_workers=2, config=config)
    lengths = LENGTHS.double().numpy()
    shares = [sum(lengths[numbers].sum() for [steps] in [epochs] for numbers in steps) for _, epochs in outcome.results]
    assert shares[0] / sum(shares) == pytest.approx(0.5, abs=0.02)


def test_evaluation_by_cost_shows_every_sample_once() -> None:
    def worker(job: Job) -> list[int]:
        loader = ht.DistributedLoader(DATA, BATCH, job, cost=1, train=False)
        return [number for batch in loader for number in batch[3].tolist()]

    outcome = run_ranks(worker, num_workers=4, config=config_of(4))
    assert sorted(number for numbers in outcome.results for number in numbers) == list(range(NUM_SAMPLES))


def test_workers_with_other_costs_are_refused() -> None:
    def worker(job: Job) -> None:
        for _ in ht.DistributedLoader(DATA, BATCH, job, cost=LENGTHS + (job.rank == 2)):
            break

    with pytest.raises(DataError, match="give the same cost= on every worker"):
        run_ranks(worker, num_workers=2)


def test_costs_are_learned_in_a_job_that_also_trains_on_other_data() -> None:
    """A second loader comes later and its steps have no features; what a step takes is emulated by the samples' cost.

    Nothing is asserted of times: the emulated ones are the only ones that learning could see here.
    """
    config = RunConfig(heterogeneous=True, seed=5, data=DataConfig(prefetch_steps=1))

    def worker(job: Job) -> int:
        model = net()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        for loader in (ht.DistributedLoader(DATA, BATCH, job), ht.DistributedLoader(DATA, BATCH, job, cost=learned)):
            for batch in loader:
                optimizer.zero_grad()
                by_sample(model, batch).backward()
                optimizer.step()
        return job.num_samples

    learned = ht.LearnedCost(features=1)
    outcome = run_ranks(worker, num_workers=2, config=config)
    assert sum(outcome.results) == 2 * NUM_SAMPLES


# --- whoever is late -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "hybrid"])
@pytest.mark.parametrize("cost", [1, ht.LearnedCost(features=1)], ids=["given", "learned"])
@pytest.mark.parametrize("seed", range(3))
def test_every_sample_is_used_once_in_every_mode(mode: str, cost: Any, seed: int) -> None:
    faults = Faults(seed=seed, delay_s=0.001, drop_frac=0.1) if seed else None
    config = config_of(4, mode, sync_group_size=2 if seed == 1 else 0)
    outcome = run_ranks(trains(cost), num_workers=4, num_servers=2, config=config, faults=faults)
    check_used(outcome.results)
    first = outcome.results[0][0]
    for params, _ in outcome.results:
        assert all(torch.equal(a, b) for a, b in zip(params, first, strict=True))
    for stats in outcome.stats:
        assert stats.pushed_weight == stats.applied_weight + stats.refused_weight


def test_no_decay_falls_on_costly_samples_in_a_balanced_hybrid_job() -> None:
    """Groups of 3 : 3 and 1 : 1; every batch is balanced by cost, so that lateness has nothing to do with it."""
    config = config_of(4, "hybrid")
    config = dataclasses.replace(config, capacity=dataclasses.replace(config.capacity, prior=(3.0, 3.0, 1.0, 1.0)))
    outcome = run_ranks(trains(1, epochs=8), num_workers=4, config=config)
    assert len(outcome.jobs[0].client.grouping.groups) == 2
    [stats] = outcome.stats
    assert stats.pushed_cost == pytest.approx(stats.pushed_weight), "the mean sample of all data costs 1"
    assert abs(stats.cost_bias) < 0.02
    [event] = outcome.of_event("server")
    assert event["cost_bias"] == stats.cost_bias


# --- the meter -----------------------------------------------------------------------------------------


def push(weight: float, cost: float) -> PushHeader:
    return PushHeader(
        kind=Kind.GRADIENT,
        codec=Codec.NONE,
        key=0,
        route_epoch=0,
        generation=0,
        group=0,
        num_groups=1,
        sender=1,
        clock=1,
        base_version=0,
        weight=weight,
        share_frac=1.0,
        sample_cost=cost,
        numel=4,
        meta_bytes=0,
        payload_bytes=16,
    )


# pushes as (weight, cost of a sample, what staleness leaves of it; None: refused); bias
METER = [
    ("nothing yet", [], 0.0),
    ("nothing decays", [(8, 1.5, 1.0), (8, 0.5, 1.0)], 0.0),
    ("all decay alike", [(8, 1.5, 0.5), (8, 0.5, 0.5)], 0.0),
    ("the costly decays", [(8, 1.5, 0.5), (8, 0.5, 1.0)], (0.75 + 0.5) / 1.5 - 1),
    ("the cheap decays", [(8, 1.5, 1.0), (8, 0.5, 0.5)], (1.5 + 0.25) / 1.5 - 1),
    ("the costly is refused", [(8, 1.5, None), (8, 0.5, 1.0)], -0.5),
    ("all is refused", [(8, 1.5, None)], 0.0),
    ("weights count", [(16, 1.0, 0.5), (4, 3.0, 1.0)], (8 + 12) / 12 / (28 / 20) - 1),
    ("a group without samples", [(0, 1.0, 1.0), (8, 2.0, 1.0)], 0.0),
]


@pytest.mark.parametrize(("name", "pushes", "bias"), METER)
def test_the_meter(name: str, pushes: list[tuple[float, float, float | None]], bias: float) -> None:
    stats = ServerStats()
    for weight, cost, factor in pushes:
        header = push(weight, cost)
        stats.count_push(header, raw_bytes=16)
        if factor is not None:
            stats.count_applied(header, staleness=0, weight=weight * factor)
    assert stats.cost_bias == pytest.approx(bias), name


def test_a_push_that_goes_on_to_another_server_counts_there() -> None:
    stats = ServerStats()
    stats.count_push(push(8, 3.0), raw_bytes=16)
    stats.count_push(push(8, 3.0), raw_bytes=16, times=-1)
    stats.count_push(push(8, 1.0), raw_bytes=16)
    stats.count_applied(push(8, 1.0), staleness=0, weight=8.0)
    assert stats.cost_bias == 0.0


@pytest.mark.parametrize(("decay", "bias"), [("none", 0.0), ("inverse", (1 + 3 / 2) / (1 + 1 / 2) / 2 - 1)])
def test_a_decay_that_falls_on_costly_samples_shows(decay: str, bias: float, caplog: pytest.LogCaptureFixture) -> None:
    """Two groups; the costly batches, of cost 3, always come a version late, and count half by the inverse rule."""
    shard = Shard(
        key=0, server=0, dtype="float32", begin=0, numel=4, pieces=(Piece(tensor=0, start=0, stop=4, offset=0),)
    )
    protocol = ServerProtocol(
        [shard],
        window=WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=0.1),
        staleness=StalenessConfig(decay=decay),
        num_workers=2,
        adaptive=False,
    )
    protocol.on_push(dataclasses.replace(push(0, 1), kind=Kind.INIT, clock=0, numel=4), None, now_s=0.0)
    stats = ServerStats()
    for clock in range(1, 21):
        base = protocol.version(0)
        for group, cost, now_s in ((0, 1.0, clock), (1, 3.0, clock + 0.5)):
            header = dataclasses.replace(push(8, cost), group=group, num_groups=2, clock=clock, base_version=base)
            stats.count_push(header, raw_bytes=16)
            actions = [*protocol.on_push(header, header, now_s=now_s), *protocol.on_timer(now_s=now_s + 0.2)]
            for action in actions:
                if isinstance(action, Accumulate):
                    stats.count_applied(action.token, staleness=action.staleness, weight=action.weight)
    assert stats.staleness_sum == 20
    assert stats.cost_bias == pytest.approx(bias)
    with caplog.at_level(logging.WARNING, logger="hpcps.runtime.server_stats"):
        stats.write(EventLog(None, rank=0, role="server"), counts=protocol.counts)
    warned = "costly samples count 16.7 % less than they should" in caplog.text
    assert warned == (decay == "inverse")
