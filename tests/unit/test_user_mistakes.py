"""What a script may do by accident: it ends in the right result or in an error that says what to do."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils.data import TensorDataset

import hpcps
import hpcps.torch as ht
from hpcps.config import PartitionConfig, RunConfig, StalenessConfig
from hpcps.errors import ConfigError, DataError, PlanError
from hpcps.runtime.entry import _settings_digest
from hpcps.runtime.job import Job

NO_DECAY = StalenessConfig(decay="none")


def made(job: Job, *, lr: float = 0.1) -> tuple[torch.nn.Linear, ht.DistributedOptimizer]:
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return model, ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model, job)


def ones(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.ones(num_samples, 1))


def test_an_undefined_gradient_of_weight_zero_reaches_nobody() -> None:
    def worker(job: Job) -> float:
        model, optimizer = made(job)
        for (x,) in ht.DistributedLoader(ones(8), 4, job):
            optimizer.zero_grad()
            bad = job.worker_index == 1
            optimizer.set_batch_weight(0.0 if bad else 2.0)
            (model(x).mean() * (float("nan") if bad else 1.0)).backward()
            optimizer.step()
        return model.weight.item()

    assert run_ranks(worker, num_workers=2).results == pytest.approx([-0.2, -0.2])


def test_a_batch_that_one_worker_skips_counts_for_the_others() -> None:
    """Worker 1 leaves out its fourth batch; the step's mean is then over worker 0's samples and an empty part."""

    def worker(job: Job) -> list[float]:
        model, optimizer = made(job)
        seen = []
        for _ in job.epochs(1):
            for index, (x,) in enumerate(ht.DistributedLoader(ones(40), 4, job)):
                if job.worker_index == 1 and index == 3:
                    continue
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                seen.append(model.weight.item())
        return [*seen, model.weight.item()]

    outcome = run_ranks(worker, num_workers=2)
    assert [len(seen) for seen in outcome.results] == [11, 10]
    assert outcome.results[0][-1] == outcome.results[1][-1] == pytest.approx(-0.95)


def test_an_empty_part_while_others_accumulate_is_an_error() -> None:
    def worker(job: Job) -> None:
        model, optimizer = made(job)
        loader = ht.DistributedLoader(ones(17), 4, job)
        for _ in job.epochs(2):
            for index, (x,) in enumerate(loader):
                last = index % 2 == 1
                with contextlib.nullcontext() if last else optimizer.no_sync():
                    (model(x).mean() / 2).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(DataError, match="a batch has no samples for .* while gradients are being accumulated"):
        run_ranks(worker, num_workers=2)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_pushes_arrive_though_the_script_only_leaves(mode: str) -> None:
    def worker(job: Job) -> None:
        model, optimizer = made(job)
        for (x,) in ht.DistributedLoader(ones(40), 4, job):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    for seed in range(4):
        config = RunConfig(sync_mode=mode, seed=seed)
        outcome = run_ranks(worker, num_workers=2, config=config)
        assert sum(stats.applied_weight for stats in outcome.stats) == 40


def test_clearing_gradients_in_place_leaves_the_push_alone() -> None:
    """The flat gradients are the push's buffer until it has left, so they may not be zeroed before."""

    def worker(job: Job) -> float:
        model, optimizer = made(job)
        for _ in job.epochs(1):
            for (x,) in ht.DistributedLoader(ones(20), 2, job):
                optimizer.zero_grad(set_to_none=False)
                model(x).mean().backward()
                optimizer.step()
        return model.weight.item()

    config = RunConfig(sync_mode="async", staleness=NO_DECAY)
    assert run_ranks(worker, num_workers=1, config=config).results == pytest.approx([-1.0])


def test_settings_that_must_be_alike_show_in_the_digest() -> None:
    config = RunConfig()
    other_log = dataclasses.replace(config, log=dataclasses.replace(config.log, dir="elsewhere"))
    assert _settings_digest(config) == _settings_digest(other_log)
    assert _settings_digest(config) != _settings_digest(dataclasses.replace(config, seed=1))


def test_a_model_that_moves_after_the_optimizer_was_made_still_trains() -> None:
    def worker(job: Job) -> float:
        model, optimizer = made(job)
        model.weight.data = model.weight.data.clone()
        for _ in job.epochs(1):
            for (x,) in ht.DistributedLoader(ones(20), 2, job):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        return model.weight.item()

    assert run_ranks(worker, num_workers=2).results == pytest.approx([-1.0, -1.0])


def test_values_loaded_after_the_optimizer_was_made_are_refused_in_time() -> None:
    def worker(job: Job) -> None:
        model, optimizer = made(job)
        model.load_state_dict({"weight": torch.ones(1, 1)})
        for (x,) in ht.DistributedLoader(ones(8), 4, job):
            model(x).mean().backward()
            optimizer.step()

    with pytest.raises(ConfigError, match="load before making DistributedOptimizer"):
        run_ranks(worker, num_workers=2)


def test_weights_on_some_workers_only_are_refused() -> None:
    def worker(job: Job) -> None:
        model, optimizer = made(job)
        for (x,) in ht.DistributedLoader(ones(8), 4, job):
            if job.worker_index == 0:
                optimizer.set_batch_weight(3.0)
            model(x).mean().backward()
            optimizer.step()

    with pytest.raises(DataError, match="1 of 2 workers called set_batch_weight"):
        run_ranks(worker, num_workers=2)


def test_a_batch_over_all_caps_is_refused_at_once() -> None:
    def worker(job: Job) -> None:
        for _ in ht.DistributedLoader(ones(64), 64, job):
            pass

    with pytest.raises(PlanError, match="4 workers of at most 8 samples hold 32, the global batch is 64"):
        run_ranks(worker, num_workers=4, config=RunConfig(partition=PartitionConfig(max_share=8)))


def test_one_process_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with hpcps.init(log={"progress_s": 1e-6}) as job:
        model, optimizer = made(job)
        for _ in job.epochs(2):
            for (x,) in ht.DistributedLoader(ones(64), 4, job):
                optimizer.zero_grad()
                loss = model(x).mean()
                loss.backward()
                optimizer.step()
                job.log(loss=loss)
    shown = capsys.readouterr().err
    assert "hpcps: epoch 1/2, " in shown and "samples/s, loss -0." in shown
    assert np.isclose(model.weight.item(), -3.2)
