"""Members of a group that find their own samples by cost share out every batch without gap or overlap."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import CapacityConfig, PartitionConfig, RunConfig
from hpcps.policy import AssignSamples
from hpcps.protocol.control import LoaderOpen, Order, OrderRequest
from hpcps.protocol.control_json import decode_control, encode_control
from hpcps.protocol.coordinator import Coordinator
from hpcps.protocol.costs import KnownTerms


class Member:
    """A worker that asks for one batch after the other, and finds its own samples as a loader does."""

    def __init__(self, rank: int, costs: np.ndarray, least: int) -> None:
        self.rank, self.index, self.ended = rank, 0, False
        self.used: list[int] = []
        self._terms = KnownTerms()
        self._costs, self._policy = costs, AssignSamples(PartitionConfig(min_share=least))

    def step(self, made: Coordinator) -> None:
        request = OrderRequest(
            rank=self.rank,
            loader=0,
            epoch=0,
            index=self.index,
            num_epochs=1,
            timed=[],
            logged=[],
            sums=[],
            weights=[],
            staleness=0,
        )
        [(rank, reply)] = made.on_request(request)
        assert rank == self.rank
        order = decode_control(encode_control(reply))  # what it says after the wire
        assert isinstance(order, Order)
        order = self._terms.fill(order)
        self.index += 1
        self.ended = order.end
        if not order.end:
            group = np.arange(order.start, order.start + order.group_count)
            chosen = self._policy.decide(self._costs[group], order.fixed_s, order.unit_s, caps=order.caps)
            self.used += group[chosen.members == order.member].tolist()


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 6),
    num_samples=st.integers(1, 300),
    batch=st.integers(1, 24),
    mode=st.sampled_from(["sync", "async", "hybrid"]),
    least=st.integers(0, 2),
    heterogeneous=st.booleans(),
    capped=st.booleans(),
)
def test_every_sample_is_used_once(
    seed: int,
    num_workers: int,
    num_samples: int,
    batch: int,
    mode: str,
    least: int,
    heterogeneous: bool,
    capped: bool,
) -> None:
    rng = random.Random(seed)
    speeds = tuple(float(rng.randint(1, 5)) for _ in range(num_workers))
    cap = max(least, -(-batch // num_workers) + rng.randint(0, 3)) if capped else 0
    config = RunConfig(
        sync_mode=mode,
        heterogeneous=heterogeneous,
        capacity=CapacityConfig(prior=speeds),
        partition=PartitionConfig(min_share=least, max_share=cap),
    )
    costs = np.array([rng.choice([1.0, rng.lognormvariate(0, 1)]) for _ in range(num_samples)])
    ranks = range(1, num_workers + 1)
    made = Coordinator(config, ranks, report=lambda name, fields: None)
    members = [Member(rank, costs, least) for rank in ranks]
    for rank in ranks:
        made.on_loader(
            LoaderOpen(rank=rank, loader=0, num_samples=num_samples, global_batch=batch, trains=True, costs="abc")
        )
    while active := [member for member in members if not member.ended]:
        rng.choice(active).step(made)
    assert sorted(number for member in members for number in member.used) == list(range(num_samples))
