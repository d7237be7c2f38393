"""The user's sharding function: what it is asked, what it may say, and that training is the same with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpcps.torch as ht
from hpcps.errors import ConfigError, PlanMismatchError
from hpcps.plan import TensorSpec
from hpcps.runtime.job import Job
from hpcps.torch.sharding import Sharding, choose_servers
from tests.ranks import run_ranks

SPECS = (
    TensorSpec(name="embedding.weight", numel=6000, dtype="float32", param_group=0),
    TensorSpec(name="head.weight", numel=40, dtype="float32", param_group=1, codec="fp16"),
)


def test_it_is_asked_for_every_parameter() -> None:
    asked: list[tuple[str, int, float]] = []

    def sharding(name: str, numel: int, frequency: float) -> int | None:
        asked.append((name, numel, frequency))
        return 1 if name.startswith("embedding") else None

    chosen = choose_servers(SPECS, sharding, num_servers=2)
    assert asked == [("embedding.weight", 6000, 1.0), ("head.weight", 40, 1.0)]
    assert [spec.server for spec in chosen] == [1, -1]
    assert [spec.space for spec in chosen] == [("float32", "none", 1), ("float32", "fp16", -1)]
    assert choose_servers(SPECS, None, num_servers=2) is SPECS


@pytest.mark.parametrize("wrong", [2, -1, 1.0, True, "1", torch.tensor(1)])
def test_what_is_no_server_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_servers(SPECS, lambda name, numel, frequency: wrong, num_servers=2)
    assert str(caught.value) == (
        f"cannot give parameter 'embedding.weight' a server: sharding returned {wrong!r}, need None or a whole number"
        " from 0 to 1; correct the sharding function"
    )


def make_model() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    generator = torch.Generator().manual_seed(3)  # torch's own is shared by the threads that are ranks here
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def train(job: Job, sharding: Sharding | None) -> tuple[list[torch.Tensor], list[tuple[int, bool]]]:
    model = make_model()
    optimizer = ht.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), model, job, sharding=sharding)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    job.finish()
    places = [(shard.server, shard.pinned) for shard in job.client.route.shards]
    return [parameter.detach().clone() for parameter in model.parameters()], places


def test_training_is_the_same_wherever_shards_lie() -> None:
    def sharding(name: str, numel: int, frequency: float) -> int | None:
        return {"0.weight": 2, "2.weight": 0}.get(name)

    pinned = run_ranks(lambda job: train(job, sharding), num_workers=2, num_servers=3).results
    free = run_ranks(lambda job: train(job, None), num_workers=2, num_servers=1).results
    assert sorted(pinned[0][1]) == [(0, True), (1, False), (2, True)]
    assert [pinned_server for pinned_server, is_pinned in free[0][1] if is_pinned] == []
    for parameters, _ in pinned:
        for got, want in zip(parameters, free[0][0], strict=True):
            assert torch.equal(got, want)


def test_workers_must_choose_alike() -> None:
    with pytest.raises(PlanMismatchError, match="build the same model and optimizer on every worker"):
        run_ranks(lambda job: train(job, lambda name, numel, frequency: job.worker_index), num_workers=2, num_servers=2)


def test_one_process_does_not_ask() -> None:
    import hpcps

    with hpcps.init(routing={"servers": [1, 2]}) as job:
        _, places = train(job, lambda name, numel, frequency: 7)
    assert places == [(0, False)]
