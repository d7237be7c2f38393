"""The coordinator: who gets which samples, as tables and short stories."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from hpcps.config import CapacityConfig, PartitionConfig, RunConfig
from hpcps.errors import DataError, ProtocolError
from hpcps.protocol.control import BarrierEnter, BarrierLeave, LoaderOpen, Order, OrderRequest
from hpcps.protocol.coordinator import Coordinator

Events = list[tuple[str, dict[str, object]]]


def coordinator(
    workers: tuple[int, ...],
    *,
    num_samples: int = 20,
    batch: int = 8,
    trains: bool = True,
    mode: str = "sync",
    heterogeneous: bool = False,
    prior: tuple[float, ...] = (),
    group_size: int = 0,
    events: Events | None = None,
) -> Coordinator:
    config = RunConfig(
        sync_mode=mode,
        sync_group_size=group_size,
        heterogeneous=heterogeneous,
        capacity=CapacityConfig(prior=prior, interval_steps=30),
    )
    log: Events = [] if events is None else events
    made = Coordinator(config, workers, report=lambda name, fields: log.append((name, fields)))
    for rank in workers:
        made.on_loader(opened(rank, num_samples=num_samples, batch=batch, trains=trains))
    return made


def opened(rank: int, *, num_samples: int = 20, batch: int = 8, trains: bool = True, loader: int = 0) -> LoaderOpen:
    return LoaderOpen(rank=rank, loader=loader, num_samples=num_samples, global_batch=batch, trains=trains)


def ask(
    made: Coordinator, rank: int, index: int, *, epoch: int = 0, timed: tuple[float, ...] = (), loader: int = 0
) -> Order:
    request = OrderRequest(
        rank=rank,
        loader=loader,
        epoch=epoch,
        index=index,
        num_epochs=2,
        timed=list(timed),
        logged=["loss"],
        sums=[2.0],
        weights=[4.0],
        staleness=rank,
        num_samples=sum(int(work) for work in timed[::2]),
    )
    [(to, order)] = made.on_request(request)
    assert to == rank
    assert isinstance(order, Order)
    return order


def spans(made: Coordinator, ranks: tuple[int, ...], index: int, *, epoch: int = 0) -> list[tuple[int, int]]:
    return [(order.start, order.count) for order in (ask(made, rank, index, epoch=epoch) for rank in ranks)]


# workers, samples, batch, prior; (start, count) of each worker in each batch
SYNC = [
    ((1, 2), 20, 8, (), [[(0, 4), (4, 4)], [(8, 4), (12, 4)], [(16, 2), (18, 2)]]),
    ((1, 2), 9, 8, (), [[(0, 4), (4, 4)], [(8, 1), (9, 0)]]),
    ((1, 2, 3), 7, 5, (), [[(0, 2), (2, 2), (4, 1)], [(5, 1), (6, 1), (7, 0)]]),
    ((1, 2, 3), 4, 2, (), [[(0, 1), (1, 1), (2, 0)], [(2, 1), (3, 1), (4, 0)]]),
    ((4,), 3, 2, (), [[(0, 2)], [(2, 1)]]),
    ((1, 2), 12, 8, (3.0, 1.0), [[(0, 6), (6, 2)], [(8, 3), (11, 1)]]),
]


@pytest.mark.parametrize(("workers", "num_samples", "batch", "prior", "expected"), SYNC)
def test_sync_batches(
    workers: tuple[int, ...],
    num_samples: int,
    batch: int,
    prior: tuple[float, ...],
    expected: list[list[tuple[int, int]]],
) -> None:
    made = coordinator(workers, num_samples=num_samples, batch=batch, heterogeneous=bool(prior), prior=prior)
    for epoch in (0, 1):
        for index, row in enumerate(expected):
            assert spans(made, workers, index, epoch=epoch) == row
        for rank in workers:
            for later in range(3):
                order = ask(made, rank, len(expected) + later, epoch=epoch)
                assert (order.end, order.count, order.group_count) == (True, 0, 0)


def test_an_order_says_what_the_group_has() -> None:
    made = coordinator((1, 2), num_samples=12, batch=8)
    full, tail = ask(made, 2, 0), ask(made, 2, 1)
    assert (full.count, full.group_count, full.share_frac) == (4, 8, 1.0)
    assert (tail.count, tail.group_count, tail.share_frac) == (2, 4, 1.0), "a tail is a full share of what is left"
    assert (full.generation, full.groups) == (0, []), "all know that they begin as one group"


def test_a_tail_too_small_for_the_least_share_joins_the_batch_before() -> None:
    """Seventeen samples in batches of eight for two workers of at least two: a last batch of one would be no use."""
    for least, expected in ((1, [(4, 4), (4, 4), (1, 0)]), (2, [(4, 4), (5, 4)])):
        config = RunConfig(partition=PartitionConfig(min_share=least))
        made = Coordinator(config, (1, 2), report=lambda name, fields: None)
        for rank in (1, 2):
            made.on_loader(LoaderOpen(rank=rank, loader=0, num_samples=17, global_batch=8, trains=True))
        orders = [[ask(made, rank, index) for rank in (1, 2)] for index in range(len(expected))]
        assert [tuple(order.count for order in pair) for pair in orders] == expected
        assert ask(made, 1, len(expected)).end


def test_requests_in_advance_get_the_same_batches() -> None:
    made = coordinator((1, 2), num_samples=20, batch=8)
    first = [ask(made, 1, index) for index in range(5)]
    second = [ask(made, 2, index) for index in range(5)]
    assert [order.end for order in first] == [False, False, False, True, True]
    assert [order.start + order.count for order in first] == [order.start for order in second[:3]] + [0, 0]


def test_batches_that_all_members_have_are_forgotten() -> None:
    made = coordinator((1, 2), num_samples=400, batch=8)
    for index in range(20):
        ask(made, 1, index)
    stream = made._loaders[0].passes[0].streams[0, 0]
    assert (stream.first, len(stream.batches)) == (0, 20), "worker 2 has none of them yet"
    for index in range(18):
        ask(made, 2, index)
    assert (stream.first, len(stream.batches), stream.num_drawn) == (18, 2, 20)
    with pytest.raises(ProtocolError, match="cannot give rank 2 batch 17 of its group: it is out of turn, need 18"):
        ask(made, 2, 17)


def test_a_loader_that_nobody_opened_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot give rank 1 a batch of loader 3: it never opened that one"):
        ask(coordinator((1, 2)), 1, 0, loader=3)


def test_in_async_mode_the_faster_worker_draws_more() -> None:
    made = coordinator((1, 2), num_samples=20, batch=8, mode="async")
    drawn: dict[int, list[tuple[int, int]]] = defaultdict(list)
    next_index = {1: 0, 2: 0}
    for rank in (1, 1, 1, 2, 1, 2, 1):
        order = ask(made, rank, next_index[rank])
        next_index[rank] += 1
        if not order.end:
            drawn[rank].append((order.start, order.count))
            first = next_index[rank] == 1
            assert (order.share_frac, order.generation) == (0.5, 1)
            assert order.groups == ([[1], [2]] if first else []), "a worker is told of its grouping once"
    assert drawn == {1: [(0, 4), (4, 4), (8, 4), (16, 4)], 2: [(12, 4)]}
    assert ask(made, 1, 4).end
    assert ask(made, 2, 1).end


def test_hybrid_with_prior_speeds_begins_with_groups() -> None:
    made = coordinator((1, 2, 3, 4), batch=8, mode="hybrid", heterogeneous=True, prior=(1.0, 3.0, 3.0, 1.0))
    orders = {rank: ask(made, rank, 0) for rank in (1, 2, 3, 4)}
    assert orders[1].groups == [[2, 3], [1, 4]]
    assert {rank: (order.start, order.count) for rank, order in orders.items()} == {
        1: (0, 1),
        4: (1, 1),
        2: (2, 3),
        3: (5, 3),
    }
    assert [orders[rank].share_frac for rank in (1, 2)] == [0.25, 0.75]


def test_hybrid_without_balancing_is_grouped_by_rank() -> None:
    made = coordinator((1, 2, 3, 4), mode="hybrid", group_size=2)
    assert ask(made, 1, 0).groups == [[1, 2], [3, 4]]


def test_warm_up_then_shares_then_groups_at_a_batch_that_nobody_has() -> None:
    """Worker 1 takes 10 ms a sample, worker 2 takes 30, 3 and 4 as 1 and 2; two batches are asked for ahead."""
    events: Events = []
    workers = (1, 2, 3, 4)
    speeds = {1: 0.01, 2: 0.03, 3: 0.01, 4: 0.03}
    made = coordinator(
        workers, num_samples=10_000, batch=40, mode="hybrid", heterogeneous=True, group_size=2, events=events
    )
    orders = {rank: [ask(made, rank, 0), ask(made, rank, 1)] for rank in workers}
    index = 2
    while orders[1][-1].generation == 0 and index < 60:
        for rank in workers:
            done = orders[rank][index - 2]
            orders[rank].append(ask(made, rank, index, timed=(float(done.count), done.count * speeds[rank])))
        index += 1
    first_of = {rank: [order.generation for order in orders[rank]].index(1) for rank in workers}
    assert len(set(first_of.values())) == 1, "all change at the same batch"
    begin = first_of[1]
    assert begin >= 22, "two steps dropped and twenty timed"
    assert orders[1][begin].groups == [[1, 3], [2, 4]]
    sizes = {rank: {order.count for order in orders[rank][:begin]} for rank in workers}
    assert all(len(size) > 1 for size in sizes.values()), "warm-up must show two sizes"
    assert [orders[rank][begin].count for rank in workers] == [15, 5, 15, 5]
    used = sorted((order.start, order.start + order.count) for rank in workers for order in orders[rank])
    assert used[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(used))
    assert [name for name, _ in events].count("grouping") == 1
    shares = [fields for name, fields in events if name == "shares"]
    assert shares[-1]["counts"] == [15, 5, 15, 5]
    assert made.progress.s_star == pytest.approx(2.0)
    assert made.grouping.generation == 1


def run_steps(made: Coordinator, workers: tuple[int, ...], seconds: dict[int, float], *, begin: int, end: int) -> int:
    """Steps of a sync job; returns the index of the first step with other shares than the first one, or -1."""
    first: list[int] = []
    changed = -1
    timed: dict[int, tuple[float, ...]] = dict.fromkeys(workers, ())
    for index in range(begin, end):
        counts = []
        for rank in workers:
            order = ask(made, rank, index, timed=timed[rank])
            counts.append(order.count)
            timed[rank] = (float(order.count), order.count * seconds[rank])
        first = first or counts
        if counts != first and changed < 0:
            changed = index
    return changed


def test_a_worker_that_slows_down_is_found_within_twenty_steps() -> None:
    events: Events = []
    made = coordinator((1, 2), num_samples=100_000, batch=40, heterogeneous=True, events=events)
    run_steps(made, (1, 2), {1: 0.01, 2: 0.01}, begin=0, end=60)
    assert not [name for name, _ in events if name == "change"]
    assert run_steps(made, (1, 2), {1: 0.01, 2: 0.01}, begin=60, end=160) == -1, "a steady worker keeps its share"
    changed = run_steps(made, (1, 2), {1: 0.01, 2: 0.03}, begin=160, end=181)
    assert 160 < changed <= 180
    change = [fields for name, fields in events if name == "change"]
    assert [fields["worker"] for fields in change] == [2]
    assert change[0]["ratio"] == pytest.approx(3.0, rel=0.1)
    assert [ask(made, rank, 181).count for rank in (1, 2)] == [30, 10]


def test_evaluation_is_shared_out_equally_whatever_the_mode() -> None:
    made = coordinator((1, 2), mode="async", trains=False, heterogeneous=True, prior=(3.0, 1.0))
    assert spans(made, (1, 2), 0) == [(0, 4), (4, 4)]
    assert ask(made, 1, 1).generation == 0


def test_a_worker_may_be_passes_ahead_in_evaluation() -> None:
    made = coordinator((1, 2), num_samples=16, batch=8, trains=False)
    assert spans(made, (2,), 0) == [(4, 4)]
    for epoch in range(4):
        assert spans(made, (1,), 0, epoch=epoch) == [(0, 4)]
        assert spans(made, (1,), 1, epoch=epoch) == [(8, 4)]
    assert spans(made, (2,), 1) == [(12, 4)], "its part of the first pass is still its own"


def test_a_new_grouping_does_not_tear_an_evaluation() -> None:
    """The groups change while worker 2 is in the middle of a pass over another loader."""
    made = coordinator((1, 2), num_samples=10_000, batch=8, mode="hybrid", heterogeneous=True, group_size=1)
    for rank in (1, 2):
        made.on_loader(opened(rank, num_samples=16, batch=4, trains=False, loader=1))
    before = [ask(made, rank, index, loader=1) for rank in (1, 2) for index in range(2)]
    index = 0
    while made.grouping.generation == 0:
        for rank in (1, 2):
            ask(made, rank, index, timed=(4.0 + (index + rank) % 2, 0.01 * rank * (4.0 + (index + rank) % 2)))
        index += 1
    after = [ask(made, rank, index, loader=1) for rank in (1, 2) for index in range(2, 4)]
    used = [n for order in [*before, *after] for n in range(order.start, order.start + order.count)]
    assert sorted(used) == list(range(16))


@pytest.mark.parametrize("message", [opened(2, num_samples=21), opened(2, batch=9)])
def test_workers_with_other_data_are_refused(message: LoaderOpen) -> None:
    made = coordinator((1,))
    with pytest.raises(DataError, match="cannot share out loader 0: rank 2 has .*; build the same dataset") as caught:
        made.on_loader(message)
    assert caught.value.rank == 2


def test_priors_must_be_one_a_worker() -> None:
    with pytest.raises(DataError, match="cannot use capacity.prior: got 3 speeds, need 2"):
        coordinator((1, 2), heterogeneous=True, prior=(1.0, 2.0, 3.0))
    coordinator((1, 2), heterogeneous=False, prior=(1.0, 2.0, 3.0))


def test_a_barrier_opens_for_all_when_the_last_arrives() -> None:
    made = coordinator((1, 2, 3))
    assert made.on_barrier(BarrierEnter(rank=3, index=1)) == []
    assert made.on_barrier(BarrierEnter(rank=1, index=1)) == []
    assert made.on_barrier(BarrierEnter(rank=1, index=1)) == [], "a second call counts once"
    assert made.on_barrier(BarrierEnter(rank=2, index=1)) == [(rank, BarrierLeave(index=1)) for rank in (1, 2, 3)]


def test_progress_adds_up_what_workers_report() -> None:
    made = coordinator((1, 2))
    ask(made, 1, 0)
    ask(made, 2, 0, timed=(4.0, 0.1, 3.0, 0.1))
    progress = made.progress
    assert (progress.num_samples, progress.num_epochs, progress.epoch_total) == (7, 2, 20)
    assert (progress.sums, progress.weights, progress.staleness) == ({"loss": 4.0}, {"loss": 8.0}, 2)
