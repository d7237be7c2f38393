"""Each sample of each epoch goes to one worker once, for any speeds, sizes, modes, groupings and order of requests.

And nobody is left waiting: the model of the workers fails when none can go on.
"""

from __future__ import annotations

import random

import pytest
from cluster import Cluster, Worker
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import CapacityConfig, GroupingConfig, PartitionConfig, RunConfig, StalenessConfig
from hpcps.plan import Group, Grouping
from hpcps.policy.grouping import GroupingDecision
from hpcps.policy.regroup import RegroupFacts
from hpcps.protocol.control import LoaderOpen
from hpcps.protocol.coordinator import Coordinator


class RandomGroups:
    """A policy that forms any groups at any time."""

    def __init__(self, rng: random.Random, change_frac: float) -> None:
        self.rng, self.change_frac = rng, change_frac

    def decide(self, facts: RegroupFacts) -> GroupingDecision:
        present = facts.present.grouping
        if self.rng.random() > self.change_frac:
            return GroupingDecision(grouping=present, reason="kept", changed=False, ask_step=0)
        groups: dict[int, list[int]] = {}
        for rank in facts.workers:
            groups.setdefault(self.rng.randrange(len(facts.workers)), []).append(rank)
        made = tuple(Group(index=index, workers=tuple(ranks)) for index, ranks in enumerate(groups.values()))
        return GroupingDecision(
            grouping=Grouping(generation=present.generation + 1, groups=made), reason="any", ask_step=0
        )


def job(
    rng: random.Random,
    *,
    num_workers: int,
    num_samples: int,
    batch: int,
    mode: str,
    ssp: int,
    heterogeneous: bool = True,
    with_prior: bool = False,
    min_share: int = 1,
    group_size: int = 0,
) -> tuple[Coordinator, list[Worker]]:
    speeds = [float(rng.choice([1, 1.1, 2, 4, 5])) for _ in range(num_workers)]
    config = RunConfig(
        sync_mode=mode,
        sync_group_size=group_size,
        heterogeneous=heterogeneous,
        capacity=CapacityConfig(prior=tuple(speeds) if with_prior else (), interval_steps=10),
        partition=PartitionConfig(min_share=min_share),
        grouping=GroupingConfig(hold_steps=1),
        staleness=StalenessConfig(ssp=ssp),
    )
    workers = [Worker(rank + 1, unit_s=0.01 / speeds[rank]) for rank in range(num_workers)]
    made = Coordinator(config, [worker.rank for worker in workers], report=lambda name, fields: None)
    for worker in workers:
        made.on_loader(LoaderOpen(rank=worker.rank, loader=0, num_samples=num_samples, global_batch=batch, trains=True))
    return made, workers


def check(cluster: Cluster, num_samples: int) -> None:
    for epoch in range(cluster.num_epochs):
        assert sorted(cluster.used[epoch]) == list(range(num_samples))
    for worker in cluster.workers.values():
        assert worker.seen == sorted(worker.seen), "a worker was sent back to an older grouping"


@settings(deadline=None, max_examples=120, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 5),
    num_samples=st.integers(1, 400),
    batch=st.integers(1, 24),
    mode=st.sampled_from(["sync", "async", "hybrid"]),
    heterogeneous=st.booleans(),
    with_prior=st.booleans(),
    min_share=st.integers(0, 2),
    group_size=st.integers(0, 3),
    ahead=st.integers(1, 4),
    ssp=st.sampled_from([0, 0, 1, 3]),
    barrier=st.booleans(),
)
def test_every_sample_of_an_epoch_is_handed_out_once(
    seed: int,
    num_workers: int,
    num_samples: int,
    batch: int,
    mode: str,
    heterogeneous: bool,
    with_prior: bool,
    min_share: int,
    group_size: int,
    ahead: int,
    ssp: int,
    barrier: bool,
) -> None:
    rng = random.Random(seed)
    made, workers = job(
        rng,
        num_workers=num_workers,
        num_samples=num_samples,
        batch=batch,
        mode=mode,
        ssp=ssp,
        heterogeneous=heterogeneous,
        with_prior=with_prior,
        min_share=min_share,
        group_size=group_size,
    )
    cluster = Cluster(made, workers, ahead=ahead, num_epochs=2, rng=rng, barrier=barrier)
    cluster.run()
    check(cluster, num_samples)


def regroup_at_random(
    seed: int, *, num_workers: int, num_samples: int, batch: int, ahead: int, ssp: int, barrier: bool, leave_frac: float
) -> Cluster:
    rng = random.Random(seed)
    made, workers = job(rng, num_workers=num_workers, num_samples=num_samples, batch=batch, mode="hybrid", ssp=ssp)
    made._regrouping._policy = RandomGroups(rng, rng.choice([0.05, 0.3, 1.0]))  # type: ignore[assignment]
    cluster = Cluster(made, workers, ahead=ahead, num_epochs=3, rng=rng, barrier=barrier, leave_frac=leave_frac)
    cluster.run()
    return cluster


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(2, 5),
    num_samples=st.integers(100, 900),
    batch=st.integers(2, 24),
    ahead=st.integers(1, 4),
    ssp=st.sampled_from([0, 1, 2, 5]),
    barrier=st.booleans(),
)
def test_samples_are_handed_out_once_over_any_number_of_regroupings(
    seed: int, num_workers: int, num_samples: int, batch: int, ahead: int, ssp: int, barrier: bool
) -> None:
    cluster = regroup_at_random(
        seed,
        num_workers=num_workers,
        num_samples=num_samples,
        batch=batch,
        ahead=ahead,
        ssp=ssp,
        barrier=barrier,
        leave_frac=0.0,
    )
    check(cluster, num_samples)


@pytest.mark.parametrize("ssp", [0, 2])
def test_a_run_may_regroup_very_often(ssp: int) -> None:
    cluster = regroup_at_random(
        5, num_workers=4, num_samples=2000, batch=8, ahead=2, ssp=ssp, barrier=False, leave_frac=0.0
    )
    check(cluster, 2000)
    assert cluster.num_regroupings > 50


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(2, 5),
    ahead=st.integers(1, 4),
    ssp=st.sampled_from([0, 1, 4]),
    barrier=st.booleans(),
)
def test_groups_that_leave_an_epoch_early_stop_nobody(
    seed: int, num_workers: int, ahead: int, ssp: int, barrier: bool
) -> None:
    cluster = regroup_at_random(
        seed,
        num_workers=num_workers,
        num_samples=600,
        batch=8,
        ahead=ahead,
        ssp=ssp,
        barrier=barrier,
        leave_frac=0.01,
    )
    for epoch in range(cluster.num_epochs):
        assert len(set(cluster.used[epoch])) == len(cluster.used[epoch])
