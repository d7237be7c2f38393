"""A model of the workers of a job and of their coordinator, in simulated time.

Workers ask ahead, members of a group make each step together, all change groups together, and some meet at barriers or
leave an epoch early. Nobody may be left waiting. No arrays, no threads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpcps.protocol.control import BarrierEnter, BarrierLeave, Order, OrderRequest
from hpcps.protocol.coordinator import Coordinator, Reply

__all__ = ["Cluster", "Worker"]


@dataclass
class Worker:
    """Asks ahead and steps as a loader does."""

    rank: int
    unit_s: float
    epoch: int = 0
    index: int = 0
    asked: int = 0
    state: str = "begins"
    """begins, wants an order, regroups, steps, meets (at a barrier), is done"""
    ready_s: float = 0.0
    compute_s: float = 0.0
    num_steps: int = 0
    generation: int = 0
    groups: list[list[int]] = field(default_factory=list)
    orders: dict[tuple[int, int], Order] = field(default_factory=dict)
    timed: list[float] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    barriers: int = 0
    left: bool = False

    @property
    def order(self) -> Order | None:
        return self.orders.get((self.epoch, self.index))

    @property
    def group(self) -> list[int]:
        return next(group for group in self.groups if self.rank in group)


class Cluster:
    """Workers and their coordinator, in simulated time."""

    def __init__(
        self,
        made: Coordinator,
        workers: Sequence[Worker],
        *,
        ahead: int,
        num_epochs: int,
        rng: random.Random,
        barrier: bool = False,
        leave_frac: float = 0.0,
        noise: float = 0.05,
        on_step: Callable[[Cluster], None] = lambda cluster: None,
    ) -> None:
        self.made, self.ahead, self.num_epochs, self.rng = made, ahead, num_epochs, rng
        self.barrier, self.leave_frac = barrier, leave_frac
        self.noise, self.on_step = noise, on_step
        self.workers = {worker.rank: worker for worker in workers}
        self.used: dict[int, list[int]] = {epoch: [] for epoch in range(num_epochs)}
        self.num_steps = self.num_regroupings = 0
        for worker in workers:
            worker.groups = [sorted(self.workers)]

    def run(self) -> None:
        while any(worker.state != "is done" for worker in self.workers.values()):
            able = [worker for worker in self.workers.values() if self.can_go(worker)]
            assert able, f"all wait: {[(w.rank, w.state, w.epoch, w.index) for w in self.workers.values()]}"
            first = min(able, key=lambda worker: (worker.ready_s, self.rng.random()))
            self.go(first)

    def can_go(self, worker: Worker) -> bool:
        if worker.state == "wants":
            return worker.order is not None
        if worker.state == "regroups":
            return all(other.state in ("regroups", "is done") for other in self.workers.values())
        if worker.state == "steps":
            return all(self.workers[rank].state == "steps" for rank in worker.group)
        return worker.state == "begins"

    def go(self, worker: Worker) -> None:
        if worker.state == "begins":
            worker.state = "wants"
            while worker.asked < self.ahead:
                self.ask(worker)
        elif worker.state == "regroups":
            self.regroup()
        elif worker.state == "steps":
            self.step([self.workers[rank] for rank in worker.group])
        else:
            self.take(worker)

    def take(self, worker: Worker) -> None:
        """An order has come for the batch at hand."""
        order = worker.order
        assert order is not None
        if order.generation != worker.generation:
            assert order.generation > worker.generation, "sent back to an older grouping"
            worker.state = "regroups"
        elif order.end:
            self.end_pass(worker)
        else:
            worker.state = "steps"
            worker.compute_s = order.count * worker.unit_s * self.rng.uniform(1 - self.noise, 1 + self.noise)
            worker.ready_s += worker.compute_s

    def end_pass(self, worker: Worker) -> None:
        worker.epoch, worker.index, worker.asked, worker.left = worker.epoch + 1, 0, 0, False
        worker.state = "is done" if worker.epoch == self.num_epochs else "begins"
        if self.barrier and worker.state == "begins":
            worker.state = "meets"
            worker.barriers += 1
            self.hand_out(self.made.on_barrier(BarrierEnter(rank=worker.rank, index=worker.barriers)))

    def regroup(self) -> None:
        """All workers have come to their first batch of a new grouping."""
        now_s = max(worker.ready_s for worker in self.workers.values())
        orders = [worker.order for worker in self.workers.values()]
        generations = {order.generation for order in orders if order is not None}
        groups = {str(order.groups) for order in orders if order is not None}
        assert len(generations) == len(groups) == 1, "workers enter different groupings"
        self.num_regroupings += 1
        for worker in self.workers.values():
            assert worker.state == "regroups"
            assert worker.order is not None
            worker.generation, worker.groups = worker.order.generation, worker.order.groups
            worker.state, worker.ready_s = "wants", now_s

    def step(self, members: list[Worker]) -> None:
        """The members of a group make one step together: parts of one batch."""
        self.num_steps += 1
        now_s = max(worker.ready_s for worker in members)
        orders = [worker.orders.pop((worker.epoch, worker.index)) for worker in members]
        assert len({(order.epoch, order.group_count, order.share_frac, order.num_idle) for order in orders}) == 1
        spans = sorted((order.start, order.start + order.count) for order in orders if order.count)
        assert sum(order.count for order in orders) == orders[0].group_count
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans)), "not one batch"
        assert 0 < orders[0].share_frac <= 1
        together = self.rng.random() < 0.5
        leaves = {worker.rank for worker in members if self.rng.random() < self.leave_frac}
        leaves = {worker.rank for worker in members} if leaves and together else leaves
        for worker, order in zip(members, orders, strict=True):
            if not worker.left:
                self.used[worker.epoch] += range(order.start, order.start + order.count)
            worker.ready_s = now_s
            worker.index += 1
            worker.state = "wants"
            if order.count:
                worker.timed = [float(order.count), worker.compute_s]
                worker.num_steps += 1
        self.on_step(self)
        for worker in members:
            self.ask(worker, leaves=worker.rank in leaves and not worker.left)
            worker.left = worker.left or worker.rank in leaves

    def ask(self, worker: Worker, *, leaves: bool = False) -> None:
        request = OrderRequest(
            rank=worker.rank,
            loader=0,
            epoch=worker.epoch,
            index=worker.asked,
            num_epochs=self.num_epochs,
            timed=worker.timed,
            logged=[],
            sums=[],
            weights=[],
            staleness=0,
            done=worker.index,
            leaves=leaves,
        )
        worker.timed = []
        worker.asked += 1
        self.hand_out(self.made.on_request(request))

    def hand_out(self, replies: list[Reply]) -> None:
        for rank, reply in replies:
            worker = self.workers[rank]
            if isinstance(reply, BarrierLeave):
                worker.state = "begins"
            else:
                worker.orders[reply.epoch, reply.index] = reply
                worker.seen.append(reply.generation)
