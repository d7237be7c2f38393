"""Whole jobs whose shards move all the time: nothing is lost, and one group computes what it computes without moves.

The real router carries out moves that a policy draws at random; delays, lost and repeated frames come from the
in-process channel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from ranks import Outcome, run_ranks
from scripted_groups import cycle, follow
from torch import nn
from wander import WHERE, Wander

import hpcps.torch as ht
from hpcps.comm.layout import Layout
from hpcps.comm.loopback import Faults, LoopbackChannel
from hpcps.config import (
    CommConfig,
    CompressionConfig,
    PartitionConfig,
    RoutingConfig,
    RunConfig,
    StalenessConfig,
    WindowConfig,
)
from hpcps.errors import ConfigError
from hpcps.plan import Shard
from hpcps.protocol.actions import Action
from hpcps.protocol.control import DrainTo
from hpcps.protocol.key_state import KeyState
from hpcps.protocol.server import ServerProtocol
from hpcps.runtime.job import Job

FAULTS = Faults(seed=3, delay_s=0.001, drop_frac=0.1, repeat_frac=0.2)
CONFIG = RunConfig(
    comm=CommConfig(shard_bytes=1024, checksum=True),
    routing=RoutingConfig(interval_steps=2, spare_frac=3.0),
)
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture
def wandering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WHERE, Wander)


def constant_gradients(seed: int, num_samples: int) -> torch.Tensor:
    """Inputs of a loss that is linear in the parameters: its gradient is the same wherever they stand."""
    return torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear_job(x: torch.Tensor, *, epochs: int, batch: int, rate: float = 0.5) -> Callable[[Job], torch.Tensor]:
    def worker(job: Job) -> torch.Tensor:
        model = nn.Linear(3, 300, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model, job)
        for _ in job.epochs(epochs):
            for (inputs,) in ht.DistributedLoader(torch.utils.data.TensorDataset(x), batch, job):
                optimizer.zero_grad()
                model(inputs).sum(1).mean().backward()
                optimizer.step()
        return model.weight.detach().clone()

    return worker


def mlp_job(make_optimizer: MakeOptimizer, *, epochs: int = 2) -> Callable[[Job], torch.Tensor]:
    """A small network on data of a curve."""

    def worker(job: Job) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(160, 8, generator=generator)
        data = torch.utils.data.TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
        model = nn.Sequential(nn.Linear(8, 60), nn.Tanh(), nn.Linear(60, 30), nn.Tanh(), nn.Linear(30, 1))
        for param in model.parameters():
            param.data = 0.3 * torch.randn(param.shape, generator=generator)
        optimizer = ht.DistributedOptimizer(make_optimizer(model), model, job)
        for _ in job.epochs(epochs):
            for inputs, outputs in ht.DistributedLoader(data, 8, job):
                optimizer.zero_grad()
                ((model(inputs) - outputs) ** 2).mean().backward()
                optimizer.step()
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()])

    return worker


def count_of(outcome: Outcome, name: str) -> float:
    return sum(getattr(stats, name) for stats in outcome.stats)


def check_counts(outcome: Outcome) -> None:
    """Each server's books are right, and all workers end with the same parameters."""
    for stats in outcome.stats:
        assert stats.pushed_weight == stats.applied_weight + stats.refused_weight
    assert all(torch.equal(result, outcome.results[0]) for result in outcome.results)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-2),
}


@functools.cache
def without_moves(kind: str, overlap: int) -> torch.Tensor:
    config = dataclasses.replace(CONFIG, overlap=overlap, routing=RoutingConfig(move=False))
    outcome = run_ranks(mlp_job(OPTIMIZERS[kind]), num_workers=2, num_servers=3, config=config)
    assert count_of(outcome, "num_moves") == 0
    result: torch.Tensor = outcome.results[0]
    return result


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("faults", [None, FAULTS])
@pytest.mark.parametrize("overlap", [0, 1])
def test_one_group_computes_the_same_bits_as_without_moves(
    kind: str, faults: Faults | None, overlap: int, wandering: None
) -> None:
    expected = without_moves(kind, overlap)
    config = dataclasses.replace(CONFIG, overlap=overlap)
    outcome = run_ranks(mlp_job(OPTIMIZERS[kind]), num_workers=2, num_servers=3, config=config, faults=faults)
    check_counts(outcome)
    assert torch.equal(outcome.results[0], expected)
    assert count_of(outcome, "num_moves") > 5
    assert count_of(outcome, "moved_bytes") > 5 * 1024
    moved = outcome.of_event("moved")
    assert count_of(outcome, "num_moves") == len(moved)
    assert count_of(outcome, "moved_bytes") == sum(fields["num_bytes"] for fields in moved)


@pytest.mark.parametrize("mode", ["sync", "async", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_the_sum_of_all_gradients_arrives_in_every_mode(
    mode: str, seed: int, wandering: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without decay a window of weight w moves the parameters by the rate times its samples' sum, whoever came late."""
    monkeypatch.setattr(Wander, "seed", seed)
    x, batch, epochs, rate = constant_gradients(seed, 96), 8, 4, 0.5
    config = dataclasses.replace(
        CONFIG,
        sync_mode=mode,
        sync_group_size=2,
        window=WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=0.001),
        staleness=StalenessConfig(decay="none"),
    )
    faults = Faults(seed=seed, delay_s=0.002, drop_frac=0.2, repeat_frac=0.3)
    outcome = run_ranks(
        linear_job(x, epochs=epochs, batch=batch, rate=rate),
        num_workers=4,
        num_servers=3,
        config=config,
        faults=faults,
    )
    check_counts(outcome)
    num_shards = len(outcome.jobs[0].client.route.shards)
    assert num_shards > 3
    assert count_of(outcome, "applied_weight") == len(x) * epochs * num_shards
    assert count_of(outcome, "num_moves") > 5
    expected = (-rate * epochs / batch) * x.sum(0).expand(300, -1)
    torch.testing.assert_close(outcome.results[0], expected, rtol=0, atol=1e-12)


def test_groups_and_shards_change_at_once(wandering: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers hear of a new grouping by its first push, so a shard comes to servers that have not, or already have."""
    generations: list[int] = []
    take_over = ServerProtocol.take_over

    def note(self: ServerProtocol, shard: Shard, given: KeyState, *, now_s: float) -> list[Action]:
        generations.append(given.generation - self.generation)
        return take_over(self, shard, given, now_s=now_s)

    monkeypatch.setattr(ServerProtocol, "take_over", note)
    batch, epochs, rate = 8, 3, 0.5
    config = dataclasses.replace(
        CONFIG,
        sync_mode="hybrid",
        sync_group_size=2,
        heterogeneous=True,
        partition=PartitionConfig(min_share=2, max_share=2),
        window=WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=0.001),
        staleness=StalenessConfig(decay="none"),
    )
    for seed in range(3):
        follow(monkeypatch, cycle(([[1, 2], [3, 4]], [[1, 3], [2, 4]], [[1, 4], [2, 3]])))
        monkeypatch.setattr(Wander, "seed", seed)
        x = constant_gradients(seed, 200)
        faults = Faults(seed=seed, delay_s=0.002, drop_frac=0.2, repeat_frac=0.3)
        job = linear_job(x, epochs=epochs, batch=batch, rate=rate)
        outcome = run_ranks(job, num_workers=4, num_servers=3, config=config, faults=faults)
        check_counts(outcome)
        assert len(outcome.of_event("grouping")) > 5
        expected = (-rate * epochs / batch) * x.sum(0).expand(300, -1)
        torch.testing.assert_close(outcome.results[0], expected, rtol=0, atol=1e-11)
    assert {1, -1} <= set(generations), "servers were never of different generations, so this says nothing"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_codec_left_out_is_owed_wherever_the_shard_goes(mode: str, wandering: None) -> None:
    x, batch, epochs, rate = constant_gradients(7, 96), 8, 4, 0.5
    config = dataclasses.replace(
        CONFIG,
        sync_mode=mode,
        window=WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=0.001),
        staleness=StalenessConfig(decay="none"),
        compression=CompressionConfig(rules=("*=fp32",)),
    )
    outcome = run_ranks(
        linear_job(x, epochs=epochs, batch=batch, rate=rate), num_workers=2, num_servers=3, config=config, faults=FAULTS
    )
    check_counts(outcome)
    assert count_of(outcome, "num_moves") > 5
    owed = torch.zeros(900, dtype=torch.float64)
    for job in outcome.jobs:
        for shard in job.client.route.shards:
            owed[shard.begin : shard.begin + shard.numel] += torch.from_numpy(job.client.compression.take_owed(shard))
    exact = (-rate * epochs / batch) * x.sum(0).repeat(300)
    got = outcome.results[0].reshape(-1)
    assert float((got - exact).abs().max()) > 1e-10, "the codec lost nothing, so nothing is seen"
    torch.testing.assert_close(got - rate * owed, exact, rtol=0, atol=1e-12)


def test_codecs_are_chosen_while_shards_wander(wandering: None) -> None:
    config = dataclasses.replace(CONFIG, compression=CompressionConfig(rules=("*=auto",)))
    job = mlp_job(OPTIMIZERS["adam"], epochs=4)
    outcome = run_ranks(job, num_workers=2, num_servers=3, config=config, faults=FAULTS)
    check_counts(outcome)
    assert count_of(outcome, "num_moves") > 5


def servers_of(job: Job) -> set[int]:
    return {shard.server for shard in job.client.route.shards}


def test_a_script_takes_a_server_in_and_lets_another_go() -> None:
    """Servers 0 and 1, then 1 and 2, then 2 alone; the parameters are those of a run that never moved."""
    seen: list[set[int]] = []

    def follow(job: Job, servers: list[int]) -> None:
        job.use_servers(servers)
        job.client.mail.wait("the shards to move", until=lambda: servers_of(job) == set(servers))
        seen.append(servers_of(job))

    def worker(job: Job, *, moves: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 8, generator=generator)
        model = nn.Linear(8, 150)
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
        optimizer = ht.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, job)
        for epoch in job.epochs(4):
            if epoch == 0 and moves:
                assert servers_of(job) == {0, 1}
            if job.is_first and moves and epoch in (1, 3):
                follow(job, {1: [1, 2], 3: [2]}[epoch])
            for (inputs,) in ht.DistributedLoader(torch.utils.data.TensorDataset(x), 8, job):
                optimizer.zero_grad()
                (model(inputs) ** 2).mean().backward()
                optimizer.step()
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()])

    config = dataclasses.replace(CONFIG, routing=RoutingConfig(servers=(0, 1), spare_frac=2.0, interval_steps=1000))
    outcome = run_ranks(lambda job: worker(job, moves=True), num_workers=2, num_servers=3, config=config, faults=FAULTS)
    check_counts(outcome)
    assert seen == [{1, 2}, {2}]
    assert outcome.stats[2].num_moves == 0
    assert outcome.stats[2].num_pushes > 0
    still = run_ranks(lambda job: worker(job, moves=False), num_workers=2, num_servers=3, config=config)
    assert torch.equal(outcome.results[0], still.results[0])


def test_a_job_ends_well_with_moves_under_way() -> None:
    """The script asks for moves in its last breath; nobody leaves before they are over."""

    def worker(job: Job) -> torch.Tensor:
        model = nn.Linear(8, 150)
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        optimizer.zero_grad()
        (model(torch.ones(2, 8)) ** 2).mean().backward()
        optimizer.step()
        job.use_servers([2])
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()])

    config = dataclasses.replace(CONFIG, routing=RoutingConfig(servers=(0, 1), spare_frac=2.0))
    for seed in range(5):
        faults = Faults(seed=seed, delay_s=0.003, drop_frac=0.2, repeat_frac=0.3)
        outcome = run_ranks(worker, num_workers=2, num_servers=3, config=config, faults=faults)
        assert count_of(outcome, "num_moves") == len(outcome.of_event("moved"))
        check_counts(outcome)


ASKED = [
    ((), RoutingConfig(), "need at least one"),
    ((0, 3), RoutingConfig(), "from 0 to 2"),
    ((1, 1), RoutingConfig(), "each once"),
    ((2,), RoutingConfig(), "room for 4 shards, need 6; raise routing.spare_frac (routing.spare_frac is 1)"),
    ((1, 2), RoutingConfig(move=False), "routing.move is off"),
]


@pytest.mark.parametrize(("servers", "routing", "message"), ASKED)
def test_servers_that_cannot_hold_the_model_are_refused(
    servers: tuple[int, ...], routing: RoutingConfig, message: str
) -> None:
    def worker(job: Job) -> str:
        model = nn.Linear(8, 150)
        ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        assert len(job.client.route.shards) == 6
        with pytest.raises(ConfigError, match="cannot use servers") as caught:
            job.use_servers(list(servers))
        return str(caught.value)

    outcome = run_ranks(worker, num_workers=1, num_servers=3, config=dataclasses.replace(CONFIG, routing=routing))
    assert message in outcome.results[0]


def test_without_memory_for_spare_rooms_shards_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rooms are those of the windows that were opened, not those that were asked for, on servers and workers."""
    opened = LoopbackChannel.open

    def tight(self: LoopbackChannel, layout: Layout) -> Layout:
        assert layout.moves
        return opened(self, layout.tight())

    monkeypatch.setattr(LoopbackChannel, "open", tight)

    def worker(job: Job) -> str:
        generator = torch.Generator().manual_seed(1)
        model = nn.Linear(8, 150)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        with pytest.raises(ConfigError, match="cannot use servers") as caught:
            job.use_servers([1])
        job.client.mail.tell_coordinator(DrainTo(rank=job.rank, servers=[1]))
        data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=generator))
        for _ in job.epochs(1):
            for (inputs,) in ht.DistributedLoader(data, 8, job):
                optimizer.zero_grad()
                (model(inputs) ** 2).mean().backward()
                optimizer.step()
        assert servers_of(job) == {0, 1}
        return str(caught.value)

    outcome = run_ranks(worker, num_workers=2, num_servers=2, config=CONFIG)
    said = (
        "they have room for 3 shards, need 6, for windows with room to spare did not fit into shared memory; give the"
        " container more, or set comm.mode to p2p (routing.spare_frac is 3)"
    )
    assert all(result.endswith(said) for result in outcome.results)
    assert count_of(outcome, "num_moves") == 0
    assert [event["stuck"] for event in outcome.of_event("route")], "the coordinator knows that they cannot"


def test_a_single_server_has_nothing_to_move() -> None:
    def worker(job: Job) -> None:
        model = nn.Linear(2, 2)
        ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        job.use_servers([0])

    run_ranks(worker, num_workers=1)
