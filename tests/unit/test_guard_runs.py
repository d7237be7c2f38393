"""Whole jobs whose groups slide towards sync: a divergence that is caught, levels that change at any moment, caps."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Outcome, run_ranks

import hpcps.torch as ht
from hpcps.comm.loopback import Faults
from hpcps.config import (
    CapacityConfig,
    CommConfig,
    DataConfig,
    EmulateConfig,
    GuardConfig,
    LogConfig,
    RoutingConfig,
    RunConfig,
    StalenessConfig,
    WindowConfig,
)
from hpcps.plan import Roles
from hpcps.policy import GuardDecision, GuardFacts, GuardMemory, GuardRail
from hpcps.protocol.control import ControlMessage, GuardLevel, LoaderOpen, Order, OrderRequest
from hpcps.protocol.control_json import decode_control
from hpcps.runtime.coordination import Coordination
from hpcps.runtime.job import Job
from hpcps.runtime.metrics import EventLog

DIM = 64
POINTS = torch.utils.data.TensorDataset(1.0 + 0.1 * torch.randn(512, DIM, generator=torch.Generator().manual_seed(0)))
BEST = float(0.5 * ((POINTS.tensors[0].mean(0) - POINTS.tensors[0]) ** 2).sum(1).mean())
"""The least loss of the quadratic below."""


# --- a run that diverges with the learning rate of sync ---------------------------------------------------


def descend(mode: str, *, guard: bool, num_epochs: int = 12) -> tuple[float, Outcome]:
    """Find the mean of the points by gradient descent, with a rate that only sync bears in its first 200 steps.

    With momentum 0.9, curvature 1 and a rate of 0.3 one step of delay is enough to make it unstable; sync is stable up
    to 3.8. A drop of the rate to 0.01 makes it stable in any mode.
    """

    def worker(job: Job) -> float:
        model = torch.nn.Module()
        model.center = torch.nn.Parameter(torch.zeros(DIM))
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), model, job)
        loader = ht.DistributedLoader(POINTS, 16, job)
        steps = itertools.count()
        for _ in job.epochs(num_epochs):
            for (points,) in loader:
                for group in optimizer.param_groups:
                    group["lr"] = 0.3 if next(steps) < 200 else 0.01
                optimizer.zero_grad()
                loss = 0.5 * ((model.center - points) ** 2).sum(1).mean()
                loss.backward()
                optimizer.step()
                job.log(loss=loss)
        return float(0.5 * ((model.center.detach() - POINTS.tensors[0]) ** 2).sum(1).mean())

    config = RunConfig(
        sync_mode=mode,
        guard=GuardConfig(enabled=guard, hold_steps=20),
        staleness=StalenessConfig(decay="none", bound=8),
        routing=RoutingConfig(interval_steps=10),
    )
    outcome = run_ranks(worker, num_workers=4, config=config, faults=Faults(seed=1, delay_s=0.002), timeout_s=120.0)
    return outcome.results[0], outcome


def test_a_diverging_async_run_is_caught_and_goes_back_when_calm() -> None:
    in_sync, outcome = descend("sync", guard=True)
    assert in_sync < 1.05 * BEST
    assert outcome.of_event("guard") == []
    free, outcome = descend("async", guard=False)
    assert not free < 1e3 * BEST, "without the guard rail it is lost"
    assert outcome.of_event("guard") == []
    guarded, outcome = descend("async", guard=True, num_epochs=24)
    assert guarded < 1.1 * BEST
    events = outcome.of_event("guard")
    assert events[0]["level"] == 3
    assert "best" in events[0]["reason"], "it says what it saw"
    assert max(event["level"] for event in events) == 3
    assert [event["level"] for event in events][-3:] == [2, 1, 0], "calm after the drop of the rate"
    for before, after in itertools.pairwise(events):
        assert after["before"] == before["level"]
        assert after["step"] - before["step"] >= 20 or after["level"] == 3
    reasons = [event["reason"] for event in outcome.of_event("grouping")]
    assert reasons[1] == "guard: one group of all workers"
    assert outcome.stats[0].applied_weight == 24 * len(POINTS)


# --- any level at any moment ------------------------------------------------------------------------------


def follow(levels: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the level of every job be this function of the step."""

    def decide(rail: GuardRail, facts: GuardFacts, memory: GuardMemory) -> GuardDecision:
        level = levels(facts.step)
        return GuardDecision(level=level, memory=GuardMemory(level=level), reason="told to")

    monkeypatch.setattr(GuardRail, "decide", decide)


def run_job(
    config: RunConfig, *, num_workers: int, num_servers: int, num_samples: int, faults: Faults | None
) -> Outcome:
    """Four epochs of batches of eight; every worker returns what it used of each, and its parameters."""
    x = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(num_samples))
    data = torch.utils.data.TensorDataset(torch.arange(num_samples), x)

    def worker(job: Job) -> tuple[list[list[int]], torch.Tensor]:
        model = torch.nn.Linear(3, 200)
        for param in model.parameters():
            torch.nn.init.constant_(param, 0.1)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model, job)
        loader = ht.DistributedLoader(data, 8, job)
        used: list[list[int]] = []
        for _ in job.epochs(4):
            used.append([])
            for ids, inputs in loader:
                used[-1] += ids.tolist()
                optimizer.zero_grad()
                loss = (model(inputs) ** 2).mean()
                loss.backward()
                optimizer.step()
                job.log(loss=loss)
            job.barrier()
        return used, model.weight.detach().clone()

    return run_ranks(
        worker, num_workers=num_workers, num_servers=num_servers, config=config, faults=faults, timeout_s=60.0
    )


def check(outcome: Outcome, *, num_samples: int, config: RunConfig) -> None:
    for epoch in range(4):
        used = sorted(number for ids, _ in outcome.results for number in ids[epoch])
        assert used == list(range(num_samples)), f"epoch {epoch}"
    first = outcome.results[0][1]
    assert bool(torch.isfinite(first).all())
    assert all(torch.equal(weight, first) for _, weight in outcome.results)
    applied = sum(stats.applied_weight for stats in outcome.stats)
    refused = sum(stats.refused_weight for stats in outcome.stats)
    assert sum(stats.pushed_weight for stats in outcome.stats) == applied + refused
    shards = sum(stats.num_windows > 0 for stats in outcome.stats)
    assert shards == len(outcome.stats)
    if not config.staleness.cap:
        assert applied == 4.0 * num_samples * 4, "four shards"


@pytest.mark.parametrize("mode", ["async", "hybrid"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_jobs_run_to_their_end_at_every_level(mode: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven data: 203 samples in batches of 8, workers of unlike speed, two servers, delays, losses and repeats."""
    follow(lambda step: level, monkeypatch)
    config = RunConfig(
        sync_mode=mode,
        sync_group_size=2,
        heterogeneous=True,
        emulate=EmulateConfig(speeds=(4.0, 2.0, 1.0, 1.0), sample_s=0.0005),
        capacity=CapacityConfig(prior=(4.0, 2.0, 1.0, 1.0)),
        comm=CommConfig(shard_bytes=1024),
    )
    faults = Faults(seed=level, delay_s=0.001, drop_frac=0.2, repeat_frac=0.3)
    outcome = run_job(config, num_workers=4, num_servers=2, num_samples=203, faults=faults)
    check(outcome, num_samples=203, config=config)
    assert [event["level"] for event in outcome.of_event("guard")] == [level]
    together = [event for event in outcome.of_event("grouping") if len(event["groups"]) == 1]
    assert bool(together) == (level == 3)


@pytest.mark.parametrize("seeds", [range(begin, begin + 10) for begin in range(0, 30, 10)])
def test_levels_may_change_at_any_moment(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty random jobs whose level changes at nearly every look; nothing is lost, repeated or waited for in vain."""
    for seed in seeds:
        rng = random.Random(seed)
        levels = [rng.randint(0, 3) for _ in range(40)]
        follow(lambda step, levels=levels: levels[step // 10 % 40], monkeypatch)  # type: ignore[misc]
        num_workers, num_samples = rng.randint(2, 4), rng.choice([150, 301, 400])
        config = RunConfig(
            sync_mode=rng.choice(["async", "hybrid"]),
            sync_group_size=rng.choice([1, 2]),
            overlap=rng.choice([0, 1]),
            window=WindowConfig(
                quorum_frac=rng.choice([0.3, 0.5, 1.0]), deadline=rng.choice(["mad", "fixed"]), fixed_s=0.002
            ),
            staleness=StalenessConfig(
                decay=rng.choice(["none", "inverse"]),
                cap=rng.choice([0, 0, 2]),
                bound=rng.choice([0, 2, 4]),
                ssp=rng.choice([0, 0, 1, 5]),
            ),
            comm=CommConfig(shard_bytes=1024),
            data=DataConfig(prefetch_steps=rng.choice([1, 2, 4])),
        )
        faults = Faults(seed=seed, delay_s=0.001, drop_frac=rng.choice([0.0, 0.2]), repeat_frac=rng.choice([0.0, 0.3]))
        try:
            outcome = run_job(
                config,
                num_workers=num_workers,
                num_servers=rng.randint(1, 2),
                num_samples=num_samples,
                faults=faults if rng.random() < 0.7 else None,
            )
            check(outcome, num_samples=num_samples, config=config)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r} with {num_workers} workers and {config}") from error


# --- a cap on the delay -----------------------------------------------------------------------------------


def capped(cap: int, over_cap: str) -> list[dict[str, Any]]:
    """A slow worker beside three quick ones; returns the closing event of the server."""
    config = RunConfig(
        sync_mode="async",
        guard=GuardConfig(enabled=False),
        emulate=EmulateConfig(speeds=(8.0, 8.0, 8.0, 1.0), sample_s=0.025),
        window=WindowConfig(quorum_frac=0.25, deadline="fixed", fixed_s=0.0005),
        staleness=StalenessConfig(cap=cap, over_cap=over_cap, bound=1),
    )
    outcome = run_job(config, num_workers=4, num_servers=1, num_samples=400, faults=None)
    return outcome.of_event("server")


def test_a_worker_whose_pushes_are_always_dropped_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (event,) = capped(1, "drop")
    assert event["groups"] == [[1, 0], [1, 1], [1, 2], [1, 3]]
    assert event["num_dropped"][3] > 8
    assert event["num_used"][3] + event["num_decayed"][3] < event["num_dropped"][3], "most of the slow worker's"
    total = sum(sum(event[name]) for name in ("num_used", "num_decayed", "num_dropped"))
    assert total == event["num_pushes"]
    assert sum(event["num_dropped"]) == event["num_refused"]
    assert sum(event["num_late"]) > 0
    warnings = [record.getMessage() for record in caplog.records if "nothing that rank" in record.getMessage()]
    assert any(
        warning.startswith("nothing that rank 4 pushed counted any more: its last 8 pushes were dropped, the last for")
        for warning in warnings
    )
    assert len(warnings) < event["num_refused"] / 4, "and not at every push"


def test_a_clamp_keeps_every_push() -> None:
    (event,) = capped(1, "clamp")
    assert event["num_refused"] == sum(event["num_dropped"]) == 0
    assert event["num_decayed"][3] > event["num_used"][3]
    assert event["applied_weight"] == event["pushed_weight"]


# --- the coordinator's side ---------------------------------------------------------------------------------


class Line:
    """A channel that keeps what is sent."""

    rank = 0

    def __init__(self) -> None:
        self.sent: list[tuple[int, ControlMessage]] = []

    def send(self, rank: int, data: bytes) -> None:
        self.sent.append((rank, decode_control(data)))


def test_a_level_goes_to_all_servers_and_into_the_progress_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(lambda step: step // 10 + 1, monkeypatch)
    line = Line()
    config = RunConfig(sync_mode="async", log=LogConfig(progress_s=1e-9))
    roles = Roles(servers=(0, 1, 2), workers=(3, 4))
    coordination = Coordination(line, config, roles=roles, events=EventLog(None, rank=0, role="server"))  # type: ignore[arg-type]
    for rank in roles.workers:
        coordination.on_message(LoaderOpen(rank=rank, loader=0, num_samples=4000, global_batch=8, trains=True))

    def work(index: int) -> None:
        for rank in roles.workers:
            request = OrderRequest(
                rank=rank,
                loader=0,
                epoch=0,
                index=index,
                num_epochs=1,
                timed=[4.0, 0.01],
                logged=["loss"],
                sums=[2.0],
                weights=[4.0],
                staleness=index % 4,
                num_samples=4,
                done=index,
            )
            coordination.on_message(request)

    for index in range(9):
        work(index)
    coordination.idle()
    shown = capsys.readouterr().err
    assert "loss 0.5000, staleness up to 3, ETA" in shown
    assert "guard level" not in shown
    assert coordination.take_own_level() is None
    work(9)
    coordination.idle()
    assert "staleness up to 1, guard level 2, ETA" in capsys.readouterr().err
    assert coordination.take_own_level() == 2
    assert coordination.take_own_level() is None, "it is taken once"
    levels = [(rank, message) for rank, message in line.sent if isinstance(message, GuardLevel)]
    assert levels == [(1, GuardLevel(level=2)), (2, GuardLevel(level=2))]
    for index in range(10, 24):
        work(index)
    assert coordination.take_own_level() == 3
    orders = [message for _, message in line.sent if isinstance(message, Order)]
    assert orders[0].generation == 1
    assert orders[-1].generation == 2, "from level 3 on all workers are one group"
    assert orders[-1].groups in ([], [[3, 4]])
