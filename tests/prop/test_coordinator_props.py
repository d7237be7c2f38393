"""Each sample of each epoch goes to one worker once, for any speeds, sizes, modes and order of requests."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import CapacityConfig, PartitionConfig, RunConfig
from hpcps.protocol.control import LoaderOpen, Order, OrderRequest
from hpcps.protocol.coordinator import Coordinator


class Worker:
    """Asks ahead and steps as a loader does; in a group it cannot pass a batch that a member has not begun."""

    def __init__(self, rank: int, *, ahead: int, per_sample_s: float) -> None:
        self.rank, self.ahead, self.per_sample_s = rank, ahead, per_sample_s
        self.epoch, self.index, self.asked = 0, 0, 0
        self.orders: dict[tuple[int, int], Order] = {}
        self.timed: list[float] = []

    def ask(self, made: Coordinator) -> None:
        request = OrderRequest(
            rank=self.rank,
            loader=0,
            epoch=self.epoch,
            index=self.asked,
            num_epochs=2,
            timed=self.timed,
            logged=[],
            sums=[],
            weights=[],
            staleness=0,
        )
        self.timed = []
        [(rank, order)] = made.on_request(request)
        assert rank == self.rank
        assert isinstance(order, Order)
        self.orders[self.epoch, self.asked] = order
        self.asked += 1


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
) -> None:
    rng = random.Random(seed)
    speeds = [float(rng.randint(1, 5)) for _ in range(num_workers)]
    config = RunConfig(
        sync_mode=mode,
        sync_group_size=group_size,
        heterogeneous=heterogeneous,
        capacity=CapacityConfig(prior=tuple(speeds) if with_prior else (), interval_steps=10),
        partition=PartitionConfig(min_share=min_share),
    )
    workers = [Worker(rank + 1, ahead=ahead, per_sample_s=0.01 / speeds[rank]) for rank in range(num_workers)]
    made = Coordinator(config, [worker.rank for worker in workers], report=lambda name, fields: None)
    for worker in workers:
        made.on_loader(LoaderOpen(rank=worker.rank, loader=0, num_samples=num_samples, global_batch=batch, trains=True))
    used: dict[int, list[int]] = {0: [], 1: []}
    generations: dict[int, list[int]] = {worker.rank: [] for worker in workers}
    by_rank = {worker.rank: worker for worker in workers}

    def blocked(worker: Worker) -> bool:
        """A member of its group is still at an earlier batch: the group's allreduce holds it."""
        place = (worker.epoch, worker.index)
        order = worker.orders.get((worker.epoch, worker.index - 1)) if worker.index else None
        grouping = made.grouping.groups if order is not None and order.generation else ()
        group = next((list(g.workers) for g in grouping if worker.rank in g.workers), list(by_rank))
        if order is None and mode != "sync" and made.grouping.generation == 1:
            group = [worker.rank]
        return any((by_rank[rank].epoch, by_rank[rank].index) < place for rank in group)

    active = list(workers)
    while active:
        worker = rng.choice(active)
        if blocked(worker):
            continue
        while worker.asked < worker.index + worker.ahead:
            worker.ask(made)
        order = worker.orders[worker.epoch, worker.index]
        generations[worker.rank].append(order.generation)
        if order.end:
            worker.epoch, worker.index, worker.asked = worker.epoch + 1, 0, 0
            if worker.epoch == 2:
                active.remove(worker)
            continue
        assert 0 <= order.count <= order.group_count
        assert 0 < order.share_frac <= 1
        used[worker.epoch] += range(order.start, order.start + order.count)
        if order.count:
            worker.timed = [float(order.count), order.count * worker.per_sample_s * rng.uniform(0.95, 1.05)]
        worker.index += 1
    for epoch in (0, 1):
        assert sorted(used[epoch]) == list(range(num_samples))
    for seen in generations.values():
        assert seen == sorted(seen), "a worker was sent back to an older grouping"
