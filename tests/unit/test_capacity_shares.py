"""Shares as the coordinator makes them from speeds, caps, links and neighbours, through its messages."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from hpcps.config import CapacityConfig, PartitionConfig, RunConfig
from hpcps.errors import PlanError
from hpcps.protocol.control import LoaderOpen, Order, OrderRequest
from hpcps.protocol.coordinator import Coordinator

Events = list[tuple[str, dict[str, object]]]


class Job:
    """Workers that step together; a batch is asked for two steps ahead, with what is measured by then."""

    def __init__(self, config: RunConfig, *, num_workers: int = 4, batch: int = 128, epochs: int = 1) -> None:
        self.events: Events = []
        self.made = Coordinator(
            config, range(1, num_workers + 1), report=lambda name, fields: self.events.append((name, fields))
        )
        self.batch = batch
        self.orders: dict[int, list[Order]] = {rank: [] for rank in range(1, num_workers + 1)}
        for rank in self.orders:
            self.made.on_loader(LoaderOpen(rank=rank, loader=0, num_samples=10**9, global_batch=batch, trains=True))

    def ask(self, rank: int, **facts: Any) -> None:
        index = len(self.orders[rank])
        request = OrderRequest(
            rank=rank,
            loader=0,
            epoch=0,
            index=index,
            num_epochs=1,
            timed=[],
            logged=[],
            sums=[],
            weights=[],
            staleness=0,
            done=max(0, index - 2),
        )
        for to, order in self.made.on_request(dataclasses.replace(request, **facts)):
            assert isinstance(order, Order)
            self.orders[to].append(order)

    def step(self, seconds: dict[int, float], **facts: dict[int, Any]) -> float:
        """All do one step; seconds of a sample by rank. Returns how long the slowest took."""
        while min(len(orders) for orders in self.orders.values()) < 2:
            for rank, orders in self.orders.items():
                if len(orders) < 2:
                    self.ask(rank)
        longest = 0.0
        for rank, orders in self.orders.items():
            count = orders[-2].count
            longest = max(longest, count * seconds[rank])
            timed = [float(count), count * seconds[rank]] if count else []
            self.ask(rank, timed=timed, **{name: value[rank] for name, value in facts.items()})
        return longest

    @property
    def counts(self) -> list[int]:
        return [orders[-1].count for orders in self.orders.values()]

    def named(self, name: str) -> list[dict[str, object]]:
        return [fields for event, fields in self.events if event == name]


def config(
    *, mode: str = "sync", partition: PartitionConfig | None = None, overlap: int = 0, **capacity: Any
) -> RunConfig:
    return RunConfig(
        heterogeneous=True,
        sync_mode=mode,
        overlap=overlap,
        partition=partition or PartitionConfig(),
        capacity=CapacityConfig(**capacity),
    )


LIKE = {1: 0.001, 2: 0.001, 3: 0.001, 4: 0.001}
MIXED = {1: 0.001 / 3, 2: 0.0005, 3: 0.001, 4: 0.001}
"""Speeds 3, 2, 1, 1."""


def test_a_throttled_worker_is_relieved_within_ten_steps_and_trusted_again_after() -> None:
    """Speeds 3:2:1:1, worker 1 at a third from step 100 to 200: as the best split all the time but for some steps."""
    job, taken, best = Job(config()), 0.0, 0.0
    late = []
    for index in range(300):
        seconds = MIXED | ({1: 0.001} if 100 <= index < 200 else {})
        step_s, ideal_s = job.step(seconds), job.batch / sum(1 / each for each in seconds.values())
        if index >= 30:
            taken, best = taken + step_s, best + ideal_s
            if step_s > 1.1 * ideal_s:
                late.append(index)
    assert set(late) <= set(range(100, 110)) | set(range(200, 210))
    assert best / taken > 0.9
    changes = job.named("change")
    assert [fields["worker"] for fields in changes] == [1, 1]
    assert [fields["ratio"] for fields in changes] == pytest.approx([3.0, 1 / 3], rel=0.05)


def test_equal_noisy_workers_keep_their_shares() -> None:
    rng = random.Random(8)
    job, moved = Job(config()), 0
    before = None
    for index in range(600):
        job.step({rank: 0.001 * math.exp(0.05 * rng.gauss(0, 1)) for rank in job.orders})
        if index >= 30:
            moved += before is not None and job.counts != before
            before = job.counts
    assert moved <= 2
    assert max(job.counts) - min(job.counts) <= 6
    assert not job.named("change")
    assert len(job.named("capacity")) < 60, "few looks"


def test_without_following_the_split_of_the_warm_up_stays() -> None:
    job = Job(config(follow=False))
    for _ in range(40):
        job.step(MIXED)
    split = job.counts
    assert split == [55, 37, 18, 18]
    for _ in range(150):
        job.step(LIKE)
    assert job.counts == split
    assert len(job.named("shares")) == 1


def test_given_caps_hold_in_the_warm_up_and_after() -> None:
    job = Job(config(partition=PartitionConfig(caps=(30, 0, 0, 10))))
    for _ in range(40):
        job.step(MIXED)
        assert job.counts[0] <= 30
        assert job.counts[3] <= 10
    assert job.counts == pytest.approx([30, 58.7, 29.3, 10], abs=1)
    assert job.named("capacity")[-1]["caps"] == [30, 0, 0, 10]


def test_measured_memory_caps_a_share_but_ends_no_run() -> None:
    job = Job(config())
    for _ in range(40):
        job.step(MIXED, max_samples={1: 40, 2: 0, 3: 0, 4: 0})
    assert job.counts == [40, 44, 22, 22]
    job.step(MIXED, max_samples={1: 1, 2: 1, 3: 1, 4: 1})
    job.step(MIXED)
    assert job.named("capacity")[-1]["caps"] == [0, 0, 0, 0], "together too little: not believed"
    assert sum(job.counts) == 128


# caps, for all; the complaint
REFUSED = [
    ((8, 0, 0), 0, r"got 3 numbers in partition.caps, need 4 \(one a worker\); give one for each worker"),
    ((8, 8, 8, 8), 0, r"4 workers of at most 8 samples hold 32, the global batch is 128; raise partition.max_share"),
    ((8, 0, 8, 8), 40, r"4 workers of at most 8, 40, 8, 8 samples hold 64, the global batch is 128"),
    ((), 8, r"4 workers of at most 8 samples hold 32, the global batch is 128"),
]


@pytest.mark.parametrize(("caps", "most", "complaint"), REFUSED)
def test_caps_that_cannot_hold_are_refused(caps: tuple[int, ...], most: int, complaint: str) -> None:
    with pytest.raises(PlanError, match=f"cannot share out loader 0: {complaint}"):
        Job(config(partition=PartitionConfig(max_share=most, caps=caps)))


def test_equal_shares_above_a_cap_are_refused() -> None:
    made = RunConfig(partition=PartitionConfig(caps=(0, 0, 8, 0)))
    with pytest.raises(
        PlanError, match="equal shares of 32 samples are more than partition.caps allow rank 3; run with"
    ):
        Job(made)
    Job(RunConfig(partition=PartitionConfig(caps=(0, 0, 32, 0))))


def test_others_on_a_processor_are_named() -> None:
    job = Job(config())
    waits = {1: 0.0, 2: 0.6, 3: 0.0, 4: 0.0}
    for index in range(60):
        disturbed = index >= 50
        job.step(
            LIKE | ({2: 0.0025} if disturbed else {}),
            cpu_wait_frac=waits if disturbed else dict.fromkeys(waits, 0.0),
        )
    [change] = job.named("change")
    assert change["worker"] == 2
    assert str(change["reason"]).endswith("others use its processor")
    assert change["cpu_wait_frac"] == pytest.approx(0.6)
    assert job.counts[1] < 20, "treated as a slow one"


@pytest.mark.parametrize(("mode", "overlap", "equal"), [("sync", 0, True), ("async", 0, False), ("async", 1, True)])
def test_a_slow_link_counts_where_its_group_alone_waits_for_it(mode: str, overlap: int, equal: bool) -> None:
    job = Job(config(mode=mode, overlap=overlap))
    links = {1: [0.02], 2: [0.002], 3: [0.002], 4: [0.002]}
    for _ in range(40):
        job.step(LIKE, link_s=links)
    counts = job.counts
    assert (max(counts) - min(counts) <= 1) is equal
    if not equal:
        assert counts == pytest.approx([18.5, 36.5, 36.5, 36.5], abs=1), (
            "18 ms of link are 18 samples, which the four of them share"
        )
    assert job.named("capacity")[-1]["link_s"] == pytest.approx([0.02, 0.002, 0.002, 0.002])
