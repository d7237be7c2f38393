"""Whole jobs over the in-process channel: evaluation, early ends, errors, odd models, jobs without an optimizer."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

import hpcps
import hpcps.torch as ht
from hpcps.config import RunConfig
from hpcps.errors import DataError
from hpcps.runtime.job import Job

NUM_SAMPLES = 21
DATA = torch.utils.data.TensorDataset(torch.arange(NUM_SAMPLES))
MODES = ("sync", "async", "hybrid")


def make(job: Job) -> tuple[torch.nn.Module, ht.DistributedOptimizer]:
    model = torch.nn.Linear(1, 1)
    return model, ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)


def step(model: torch.nn.Module, optimizer: ht.DistributedOptimizer, ids: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(0.01 * ids[:, None].float()).mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_visits_every_sample_once(mode: str) -> None:
    def worker(job: Job) -> list[list[int]]:
        model, optimizer = make(job)
        train = ht.DistributedLoader(DATA, 4, job)
        test = ht.DistributedLoader(DATA, 5, job, train=False, shuffle=False)
        seen = []
        for _ in job.epochs(2):
            for (ids,) in train:
                job.log(loss=step(model, optimizer, ids), one=1)
            seen.append([number for (ids,) in test for number in ids.tolist()])
            job.barrier()
        return seen

    outcome = run_ranks(worker, num_workers=4, num_servers=2, config=RunConfig(sync_mode=mode))
    for epoch in (0, 1):
        assert sorted(number for seen in outcome.results for number in seen[epoch]) == list(range(NUM_SAMPLES))
    assert sum(job.num_samples for job in outcome.jobs) == 2 * NUM_SAMPLES


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_loader_works_before_there_is_an_optimizer(mode: str, num_workers: int) -> None:
    """For example to take the mean of the data; training begins afterwards in the same groups."""

    def worker(job: Job) -> list[list[int]]:
        first = [number for (ids,) in ht.DistributedLoader(DATA, 4, job) for number in ids.tolist()]
        model, optimizer = make(job)
        second: list[int] = []
        for (ids,) in ht.DistributedLoader(DATA, 4, job):
            second += ids.tolist()
            step(model, optimizer, ids)
        job.finish()
        return [first, second]

    outcome = run_ranks(worker, num_workers=num_workers, config=RunConfig(sync_mode=mode))
    for part in (0, 1):
        assert sorted(number for seen in outcome.results for number in seen[part]) == list(range(NUM_SAMPLES))
    assert outcome.stats[0].applied_weight == NUM_SAMPLES
    assert outcome.stats[0].num_refused == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [0, 1])
def test_one_process_trains_in_every_mode(mode: str, overlap: int) -> None:
    with hpcps.init(sync_mode=mode, overlap=overlap) as job:
        model, optimizer = make(job)
        before = model.weight.item()
        for _ in job.epochs(2):
            for (ids,) in ht.DistributedLoader(DATA, 7, job):
                step(model, optimizer, ids)
    # the loss is linear in the weight: each full batch moves it by the rate times its mean input
    expected = before - 2 * 0.01 * 0.01 * sum(range(NUM_SAMPLES)) / 7
    assert model.weight.item() == pytest.approx(expected, abs=1e-6)
    assert job.num_samples == 2 * NUM_SAMPLES


@pytest.mark.parametrize("mode", MODES)
def test_leaving_a_loop_early_ends_well(mode: str) -> None:
    def worker(job: Job) -> torch.Tensor:
        model, optimizer = make(job)
        loader = ht.DistributedLoader(DATA, 4, job)
        for _ in job.epochs(2):
            for count, (ids,) in enumerate(loader):
                step(model, optimizer, ids)
                if count == 1:
                    break
        return model.weight.detach().clone()

    results = run_ranks(worker, num_workers=3, num_servers=2, config=RunConfig(sync_mode=mode)).results
    assert all(torch.equal(weight, results[0]) for weight in results)


def test_an_error_on_one_worker_is_the_error_of_the_job() -> None:
    def worker(job: Job) -> None:
        model, optimizer = make(job)
        if job.worker_index == 1:
            raise KeyError("mine")
        step(model, optimizer, torch.ones(1))

    with pytest.raises(KeyError, match="mine"):
        run_ranks(worker, num_workers=3)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_without_an_element_needs_no_shard(mode: str) -> None:
    def worker(job: Job) -> int:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.empty(0))
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, job)
        for _ in job.epochs(1):
            for _ in ht.DistributedLoader(DATA, 4, job):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
        return job.num_samples

    outcome = run_ranks(worker, num_workers=2, num_servers=3, config=RunConfig(sync_mode=mode))
    assert sum(outcome.results) == NUM_SAMPLES
    assert [stats.num_pushes for stats in outcome.stats] == [0, 0, 0]


def test_a_step_in_which_nobody_has_weight_changes_nothing() -> None:
    def worker(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = make(job)
        before = model.weight.detach().clone()
        for (ids,) in ht.DistributedLoader(DATA, 4, job):
            optimizer.set_batch_weight(0.0)
            step(model, optimizer, ids)
        return before, model.weight.detach().clone()

    outcome = run_ranks(worker, num_workers=2)
    for before, after in outcome.results:
        assert torch.equal(before, after)
    assert outcome.stats[0].num_skipped == outcome.stats[0].num_windows == 6


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda job: ht.DistributedLoader(DATA, 0, job), "cannot use a global batch of 0; need at least 1"),
        (
            lambda job: ht.DistributedLoader(torch.utils.data.TensorDataset(torch.empty(0)), 1, job),
            "cannot share out an empty dataset",
        ),
        (lambda job: ht.DistributedLoader(iter([1]), 1, job), "cannot share out a list_iterator: it has no length"),
        (lambda job: list(job.epochs(-1)), "cannot run -1 epochs"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(build: object, match: str) -> None:
    with pytest.raises(DataError, match=match):
        run_ranks(build, num_workers=1)  # type: ignore[arg-type]
