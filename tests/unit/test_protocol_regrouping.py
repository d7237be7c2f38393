"""When the coordinator changes groups, and whom it keeps waiting: short stories."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from cluster import Cluster, Worker

from hpcps.config import CapacityConfig, GroupingConfig, PartitionConfig, RunConfig, StalenessConfig
from hpcps.errors import DataError
from hpcps.plan import Group, Grouping
from hpcps.policy.grouping import GroupingDecision
from hpcps.policy.regroup import STAND_STEPS, RegroupFacts
from hpcps.protocol import regrouping
from hpcps.protocol.control import BarrierEnter, LoaderOpen, Order, OrderRequest
from hpcps.protocol.coordinator import Coordinator, Reply
from hpcps.protocol.speeds import Speeds

Events = list[tuple[str, dict[str, object]]]


class Pairs:
    """In place of the policy: two workers change places as soon as it is asked."""

    def decide(self, facts: RegroupFacts) -> GroupingDecision:
        present = facts.present.grouping
        first, second = (list(group.workers) for group in present.groups)
        first[0], second[0] = second[0], first[0]
        groups = tuple(Group(index=i, workers=tuple(sorted(ranks))) for i, ranks in enumerate((first, second)))
        made = Grouping(generation=present.generation + 1, groups=groups)
        return GroupingDecision(grouping=made, reason="changed places", ask_step=1)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups change as soon as they may, and speeds need no measuring."""
    monkeypatch.setattr(regrouping, "Regroup", lambda config, size: Pairs())
    monkeypatch.setattr(Speeds, "measured", property(lambda self: True))


def coordinator(
    num_workers: int,
    *,
    num_samples: int = 100_000,
    batch: int = 8,
    mode: str = "hybrid",
    prior: tuple[float, ...] = (),
    group_size: int = 0,
    ssp: int = 0,
    regroup: bool = True,
    loaders: int = 1,
    bounds: tuple[int, int] = (1, 0),
    events: Events | None = None,
) -> Coordinator:
    config = RunConfig(
        sync_mode=mode,
        sync_group_size=group_size,
        heterogeneous=True,
        capacity=CapacityConfig(prior=prior, interval_steps=20),
        grouping=GroupingConfig(hold_steps=20, regroup=regroup),
        partition=PartitionConfig(min_share=bounds[0], max_share=bounds[1]),
        staleness=StalenessConfig(ssp=ssp),
    )
    log: Events = [] if events is None else events
    made = Coordinator(config, range(1, num_workers + 1), report=lambda name, fields: log.append((name, fields)))
    for loader in range(loaders):
        for rank in range(1, num_workers + 1):
            made.on_loader(
                LoaderOpen(rank=rank, loader=loader, num_samples=num_samples, global_batch=batch, trains=True)
            )
    return made


def request(
    rank: int,
    index: int,
    *,
    epoch: int = 0,
    loader: int = 0,
    done: int = 0,
    timed: tuple[float, ...] = (),
    held: int = 0,
    leaves: bool = False,
    batches_per_step: int = 1,
) -> OrderRequest:
    return OrderRequest(
        rank=rank,
        loader=loader,
        epoch=epoch,
        index=index,
        num_epochs=1,
        timed=list(timed),
        logged=[],
        sums=[],
        weights=[],
        staleness=0,
        done=done,
        held=held,
        leaves=leaves,
        batches_per_step=batches_per_step,
    )


def told(replies: list[Reply]) -> list[tuple[int, int]]:
    """Who got an order, and of which batch."""
    return [(rank, reply.index) for rank, reply in replies if isinstance(reply, Order)]


def measured(made: Coordinator, num_workers: int, seconds: Callable[[int], float] = lambda rank: 0.01) -> int:
    """Run the warm-up of one group; returns the first batch that nobody has asked for."""
    index = 0
    while not made._speeds.measured:
        for rank in range(1, num_workers + 1):
            made.on_request(request(rank, index, done=index, timed=(2.0, 2.0 * seconds(rank))))
        index += 1
    return index


# --- regrouping by speeds ------------------------------------------------------------------------------


def simulate(
    units: dict[int, float],
    changes: dict[int, dict[int, float]],
    *,
    num_steps: int,
    seed: int = 1,
    **settings: object,
) -> tuple[Cluster, list[tuple[int, list[list[int]]]]]:
    """Workers with these seconds a sample, and others from steps of the first worker on.

    Returns:
        What became of them, and for each new grouping the steps of the worker with the fewest, and the groups.
    """
    found: list[tuple[int, list[list[int]]]] = []
    workers = [Worker(rank, unit_s=unit_s) for rank, unit_s in units.items()]

    def report(name: str, fields: dict[str, object]) -> None:
        if name == "grouping":
            found.append((min(worker.num_steps for worker in workers), fields["groups"]))  # type: ignore[arg-type]

    config = RunConfig(sync_mode="hybrid", heterogeneous=True, **settings)  # type: ignore[arg-type]
    made = Coordinator(config, list(units), report=report)
    batch = 16 * len(units)
    for rank in units:
        made.on_loader(LoaderOpen(rank=rank, loader=0, num_samples=batch * num_steps, global_batch=batch, trains=True))

    def on_step(cluster: Cluster) -> None:
        for step, others in changes.items():
            if cluster.workers[min(units)].num_steps >= step:
                for rank, unit_s in others.items():
                    cluster.workers[rank].unit_s = unit_s

    cluster = Cluster(made, workers, ahead=2, num_epochs=1, rng=random.Random(seed), noise=0.1, on_step=on_step)
    cluster.run()
    assert sorted(cluster.used[0]) == list(range(batch * num_steps))
    return cluster, found


def test_wrong_priors_are_put_right() -> None:
    """Two classes were given, four of two workers each are there."""
    units = {rank: 0.001 * 2 ** ((rank - 1) // 2) for rank in range(1, 9)}
    prior = (2.0,) * 4 + (1.0,) * 4
    _, found = simulate(units, {}, num_steps=150, capacity=CapacityConfig(prior=prior))
    assert [groups for _, groups in found] == [
        [[1, 2, 3, 4], [5, 6, 7, 8]],
        [[1, 2], [3, 4], [5, 6], [7, 8]],
    ]
    assert found[1][0] <= 50 + STAND_STEPS + 5, "one hold after the start"


def test_a_worker_that_changes_class_is_moved_soon() -> None:
    units = {1: 0.001, 2: 0.001, 3: 0.001, 4: 0.002, 5: 0.002}
    _, found = simulate(units, {200: {1: 0.002}}, num_steps=300)
    assert [groups for _, groups in found] == [[[1, 2, 3], [4, 5]], [[2, 3], [1, 4, 5]]]
    assert 180 < found[1][0] <= 200 + 20 + STAND_STEPS + 5


def test_steady_workers_stay_in_their_groups() -> None:
    """Ten percent of noise, one class on the edge between two."""
    units = {1: 0.001, 2: 0.001, 3: 0.00125, 4: 0.00125, 5: 0.0016, 6: 0.0016}
    for seed in range(3):
        _, found = simulate(units, {}, num_steps=500, seed=seed, grouping=GroupingConfig(hold_steps=1))
        assert len(found) == 1


def test_groups_stay_as_first_found_where_the_run_says_so() -> None:
    units = {1: 0.001, 2: 0.001, 3: 0.002, 4: 0.002}
    _, found = simulate(units, {100: {1: 0.004, 2: 0.004}}, num_steps=200, grouping=GroupingConfig(regroup=False))
    assert len(found) == 1


def test_a_worker_alone_in_its_class_steps_alone_where_its_share_is_bound() -> None:
    units = {1: 0.001, 2: 0.001, 3: 0.003}
    bound = PartitionConfig(min_share=16, max_share=16)
    assert [groups for _, groups in simulate(units, {}, num_steps=60, partition=bound)[1]] == [[[1, 2], [3]]]
    assert [groups for _, groups in simulate(units, {}, num_steps=60)[1]] == []


def test_the_event_says_what_is_gained() -> None:
    events: Events = []
    made = coordinator(4, bounds=(2, 2), events=events)
    index = measured(made, 4, lambda rank: 0.01 * (1 + (rank > 2)))
    for rank in range(1, 5):
        made.on_request(request(rank, index))
    (fields,) = (fields for name, fields in events if name == "grouping")
    assert (fields["generation"], fields["groups"]) == (1, [[1, 2], [3, 4]])
    assert fields["before_samples_per_s"] == pytest.approx(8 / 0.04, rel=1e-3)
    assert fields["samples_per_s"] == pytest.approx(4 / 0.02 + 4 / 0.04, rel=1e-3)


def test_one_class_of_workers_stays_one_group() -> None:
    made = coordinator(3)
    index = measured(made, 3)
    replies = [made.on_request(request(rank, index)) for rank in (1, 2, 3)]
    assert made.grouping.generation == 0
    assert all(reply.generation == 0 for each in replies for _, reply in each if isinstance(reply, Order))


# --- safe points ---------------------------------------------------------------------------------------


class Story:
    """Workers 1 and 2 are twice as fast as 3 and 4; the groups change places as soon as it is safe."""

    def __init__(self, *, num_samples: int = 1000, loaders: int = 1, mode: str = "hybrid") -> None:
        self.events: Events = []
        self.made = coordinator(
            4,
            num_samples=num_samples,
            batch=12,
            mode=mode,
            prior=(2.0, 2.0, 1.0, 1.0),
            loaders=loaders,
            events=self.events,
        )

    def ask(self, rank: int, index: int, **settings: object) -> Order:
        ((_, order),) = self.made.on_request(request(rank, index, **settings))  # type: ignore[arg-type]
        assert isinstance(order, Order)
        return order

    def begin(self, **settings: object) -> None:
        """Each worker gets a batch, then speeds are other ones."""
        for rank in range(1, 5):
            self.ask(rank, 0, **settings)
        self.made._regrouping.on_speeds()

    @property
    def groups(self) -> list[tuple[int, ...]]:
        return [group.workers for group in self.made.grouping.groups]

    @property
    def fixed(self) -> list[object]:
        return [fields["reason"] for name, fields in self.events if name == "grouping_fixed"]


@pytest.mark.usefixtures("pairs")
def test_members_of_a_new_group_begin_at_different_batches() -> None:
    story = Story()
    for rank, index in ((1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (1, 2)):
        assert story.ask(rank, index).generation == 1
    story.made._regrouping.on_speeds()
    fourth = story.ask(4, 1)
    assert story.groups == [(2, 3), (1, 4)]
    assert (fourth.generation, fourth.groups) == (2, [[2, 3], [1, 4]])
    assert [story.ask(2, index).generation for index in (1, 2)] == [1, 1], "drawn before, so to be stepped through"
    first = story.ask(1, 3)
    assert (first.generation, first.group_count, fourth.group_count) == (2, 6, 6)
    assert fourth.start == first.start + first.count, "parts of one batch"
    assert story.ask(4, 2).groups == [], "told once"
    third, second = story.ask(3, 1), story.ask(2, 3)
    assert (second.count, third.count, third.start) == (4, 2, second.start + 4)


@pytest.mark.usefixtures("pairs")
def test_a_grouping_that_not_all_have_seen_is_not_passed_by() -> None:
    story = Story()
    story.begin()
    story.ask(1, 1)
    for index in range(2, 20):
        story.ask(1, index)
        story.made._regrouping.on_speeds()
    assert story.made.grouping.generation == 2, "worker 2 got no batch in it yet"
    for rank in (2, 3, 4):
        story.ask(rank, 1)
    story.ask(4, 2)
    assert story.made.grouping.generation == 3


@pytest.mark.usefixtures("pairs")
def test_groups_that_still_step_through_an_epoch_without_samples_left_do_not_matter() -> None:
    """24 samples: three batches of group 1 2, one of group 3 4; then the first group asks for the next epoch."""
    story = Story(num_samples=24)
    story.begin()
    story.made._regrouping._speeds_changed = False
    assert [story.ask(1, index).group_count for index in (1, 2, 3)] == [8, 4, 0]
    story.made._regrouping.on_speeds()
    assert story.ask(2, 1).generation == 1, "no sample is left: a grouping that begins here might never be reached"
    assert story.ask(1, 0, epoch=1).generation == 2
    assert story.ask(3, 1).end
    assert story.ask(3, 1).generation == 1
    assert story.ask(3, 0, epoch=1).generation == 2


@pytest.mark.usefixtures("pairs")
def test_groups_do_not_change_for_no_batch() -> None:
    story = Story(num_samples=12)
    story.begin()
    last = story.ask(1, 1)
    assert (last.end, last.generation) == (True, 1)


@pytest.mark.usefixtures("pairs")
def test_groups_in_different_epochs_with_samples_left_stay() -> None:
    """Group 1 2 breaks the first epoch off; group 3 4 may be in it for long."""
    story = Story()
    for rank in (1, 2, 3, 4):
        story.ask(rank, 0)
    assert story.ask(1, 1, leaves=True).end
    assert story.ask(2, 1, leaves=True).end
    story.made._regrouping.on_speeds()
    assert story.ask(3, 1).generation == 1, "who left might never come to it"
    assert story.ask(1, 0, epoch=1).generation == 1
    assert story.ask(4, 1).generation == 1
    assert story.ask(3, 2, leaves=True).end
    assert story.ask(3, 0, epoch=1).generation == 2


@pytest.mark.usefixtures("pairs")
def test_who_leaves_before_a_new_grouping_ends_it_for_its_new_group() -> None:
    """Worker 1 leaves while it has a batch of the old groups: it steps through that, then joins, then all is over."""
    story = Story()
    story.begin()
    story.ask(2, 1)
    assert story.groups == [(2, 3), (1, 4)]
    assert story.ask(4, 1).generation == 2
    leaves = story.ask(1, 1, leaves=True)
    assert (leaves.generation, leaves.end, leaves.group_count) == (2, False, 6), "worker 4 waits for it there"
    assert story.ask(1, 2).end
    assert story.ask(4, 2).end
    assert not story.ask(3, 1).end


@pytest.mark.usefixtures("pairs")
def test_groups_change_between_steps_of_several_batches() -> None:
    story = Story()
    story.begin(batches_per_step=2)
    assert story.ask(1, 1).generation == 1, "one batch was drawn: half a step"
    assert story.ask(1, 2).generation == 1
    assert story.ask(3, 1).generation == 1
    assert story.ask(1, 3).generation == 1
    assert story.ask(3, 2).generation == 2
    assert story.ask(1, 4).generation == 2


@pytest.mark.usefixtures("pairs")
def test_loaders_one_after_the_other_are_fine() -> None:
    story = Story(num_samples=24, loaders=2)
    story.begin()
    story.made._regrouping._speeds_changed = False
    assert [story.ask(1, index).end for index in (1, 2, 3)] == [False, False, True]
    story.made._regrouping.on_speeds()
    assert story.ask(1, 0, loader=1).generation == 2
    assert story.ask(2, 1).generation == 1
    assert not story.fixed


@pytest.mark.usefixtures("pairs")
def test_groups_stay_where_two_loaders_are_read_at_once() -> None:
    story = Story(loaders=2)
    story.begin()
    story.ask(1, 0, loader=1)
    for index in range(1, 9):
        assert story.ask(1, index).generation == 1
    assert story.fixed == ["the script reads two loaders at once"]


def test_two_loaders_at_once_are_refused_while_groups_are_to_be_found() -> None:
    made = coordinator(2, loaders=2)
    made.on_request(request(1, 0))
    with pytest.raises(DataError, match="cannot train on two loaders at once at rank 1") as caught:
        made.on_request(request(1, 0, loader=1))
    assert caught.value.rank == 1
    coordinator(2, loaders=2, mode="sync").on_request(request(1, 0))


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_groups_stay_where_workers_meet_within_an_epoch(mode: str) -> None:
    story = Story(mode=mode)
    story.begin()
    story.made.on_barrier(BarrierEnter(rank=3, index=1))
    story.made.on_barrier(BarrierEnter(rank=4, index=1))
    story.made.set_together(True)
    assert story.ask(1, 1).generation == 1
    assert story.fixed == (["workers meet at barriers within an epoch"] if mode == "hybrid" else [])


@pytest.mark.usefixtures("pairs")
def test_workers_may_meet_between_epochs() -> None:
    story = Story(num_samples=12)
    story.begin()
    story.made._regrouping._speeds_changed = False
    for rank in range(1, 5):
        assert story.ask(rank, 1).end
        story.made.on_barrier(BarrierEnter(rank=rank, index=1))
    assert not story.fixed


@pytest.mark.parametrize("mode", ["hybrid", "async", "sync"])
def test_one_group_on_demand_and_back(mode: str) -> None:
    story = Story(mode=mode)
    for rank in range(1, 5):
        story.ask(rank, 0)
    before = story.groups
    story.made.set_together(True)
    for rank in range(1, 5):
        story.ask(rank, 1)
    assert story.groups == [(1, 2, 3, 4)]
    story.made._regrouping.on_speeds()
    story.ask(1, 2)
    assert story.groups == [(1, 2, 3, 4)], "speeds do not matter now"
    story.made.set_together(False)
    for rank in range(1, 5):
        story.ask(rank, 3 if rank == 1 else 2)
    assert story.groups == before
    reasons = [fields["reason"] for name, fields in story.events if name == "grouping"]
    assert ("guard: one group of all workers" in reasons) == (mode != "sync")


def test_evaluation_has_no_part_in_it() -> None:
    made = coordinator(4, prior=(2.0, 2.0, 1.0, 1.0))
    for rank in range(1, 5):
        made.on_loader(LoaderOpen(rank=rank, loader=1, num_samples=16, global_batch=4, trains=False))
    for rank in range(1, 5):
        ((_, order),) = made.on_request(request(rank, 0, loader=1))
        assert isinstance(order, Order)
        assert (order.generation, order.groups, order.count) == (0, [], 1)
    assert made._regrouping._told == dict.fromkeys(range(1, 5), 0)


# --- who is ahead --------------------------------------------------------------------------------------


def test_a_group_is_so_many_batches_ahead_and_no_more() -> None:
    made = coordinator(2, mode="async", ssp=2)
    assert told(made.on_request(request(1, 0))) == [(1, 0)]
    assert told(made.on_request(request(1, 1))) == [(1, 1)], "nobody else has begun"
    assert told(made.on_request(request(2, 0))) == [(2, 0)]
    assert told(made.on_request(request(1, 2, done=1))) == [(1, 2)]
    assert told(made.on_request(request(1, 3, done=2))) == []
    assert told(made.on_request(request(1, 4, done=3))) == []
    assert told(made.on_request(request(2, 1))) == [(2, 1)]
    assert told(made.on_request(request(2, 2, done=1))) == [(2, 2), (1, 3)]
    assert told(made.on_request(request(2, 3, done=2))) == [(2, 3), (1, 4)]


def test_a_member_gets_its_part_of_a_batch_that_was_drawn() -> None:
    made = coordinator(4, prior=(2.0, 2.0, 1.0, 1.0), ssp=1)
    for rank in (3, 1, 2):
        made.on_request(request(rank, 0))
    assert told(made.on_request(request(1, 1))) == [(1, 1)]
    assert told(made.on_request(request(2, 1))) == [(2, 1)]
    assert told(made.on_request(request(1, 2, done=1))) == []
    assert told(made.on_request(request(2, 2, done=1))) == []
    assert told(made.on_request(request(3, 1, done=1))) == [(3, 1)], "its mate has not made the step"
    assert told(made.on_request(request(4, 0))) == [(4, 0)]
    assert told(made.on_request(request(4, 1, done=1))) == [(4, 1), (1, 2), (2, 2)]


def test_nobody_waits_for_a_group_without_samples_left() -> None:
    made = coordinator(2, mode="async", ssp=1, num_samples=16, batch=8)
    for rank in (1, 2):
        made.on_request(request(rank, 0))
    assert told(made.on_request(request(1, 1))) == [(1, 1)]
    assert told(made.on_request(request(1, 2, done=1))) == []
    assert told(made.on_request(request(2, 1))) == [(2, 1), (1, 2)], "it took the last samples"


@pytest.mark.parametrize("leaves", [False, True])
def test_nobody_waits_for_who_waits_itself_or_left(leaves: bool) -> None:
    made = coordinator(2, mode="async", ssp=1)
    for rank in (2, 1):
        made.on_request(request(rank, 0))
    made.on_request(request(1, 1))
    assert told(made.on_request(request(1, 2, done=1))) == []
    if leaves:
        assert told(made.on_request(request(2, 1, leaves=True))) == [(1, 2), (2, 1)]
    else:
        assert told(made.on_barrier(BarrierEnter(rank=2, index=1))) == [(1, 2)]
        assert told(made.on_request(request(1, 3, done=2))) == [(1, 3)]
        made.on_barrier(BarrierEnter(rank=1, index=1))
        assert told(made.on_request(request(1, 4, done=3))) == [(1, 4)], "a lead from a pause does not count"
        assert told(made.on_request(request(1, 5, done=4))) == []
        assert told(made.on_request(request(2, 1, done=1))) == [(2, 1), (1, 5)]


def test_who_comes_late_is_not_behind() -> None:
    made = coordinator(3, mode="async", ssp=2)
    for index in range(6):
        for rank in (1, 2):
            made.on_request(request(rank, index, done=index))
    made.on_request(request(3, 0))
    assert told(made.on_request(request(1, 6, done=6))) == [(1, 6)]
    assert told(made.on_request(request(1, 7, done=7))) == [(1, 7)]
    assert told(made.on_request(request(1, 8, done=8))) == []


def test_the_bound_may_change_while_it_runs() -> None:
    made = coordinator(2, mode="async", ssp=1)
    for rank in (1, 2):
        made.on_request(request(rank, 0))
    made.on_request(request(1, 1))
    for index in (2, 3, 4):
        assert told(made.on_request(request(1, index, done=index - 1))) == []
    assert told(made.set_ssp(3)) == [(1, 2), (1, 3)]
    assert told(made.set_ssp(0)) == [(1, 4)]
    assert told(made.on_request(request(1, 5, done=4))) == [(1, 5)]
    assert told(made.set_ssp(1)) == []
    assert told(made.on_request(request(1, 6, done=5))) == [(1, 6)], "one ahead, counted from where the bound began"
    assert told(made.on_request(request(1, 7, done=6))) == []
    assert told(made.on_request(request(2, 1, done=1))) == [(2, 1), (1, 7)]


def test_who_has_to_load_batches_first_gets_them() -> None:
    """Two loading processes take four batches each before there is a first: nobody could begin without."""
    made = coordinator(2, mode="async", ssp=1)
    for index in range(5):
        for rank in (1, 2):
            assert told(made.on_request(request(rank, index, held=4))) == [(rank, index)]
    assert told(made.on_request(request(1, 5, held=4))) == [(1, 5)]
    assert told(made.on_request(request(1, 6, held=4, done=1))) == []


@pytest.mark.usefixtures("pairs")
def test_a_barrier_before_a_new_grouping_that_was_decided_is_refused() -> None:
    """Worker 1 would wait at the barrier for worker 4, which waits for worker 1 to change groups."""
    story = Story()
    for rank, index in ((1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (1, 2)):
        story.ask(rank, index)
    story.made._regrouping.on_speeds()
    assert story.ask(4, 1).generation == 2
    message = "cannot wait at a barrier within an epoch at rank 1: the workers are about to change groups.*or set"
    with pytest.raises(DataError, match=message):
        story.made.on_barrier(BarrierEnter(rank=1, index=1))


@pytest.mark.usefixtures("pairs")
def test_a_barrier_is_fine_once_all_have_changed_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    story.begin()
    story.ask(4, 1)
    monkeypatch.setattr(story.made._regrouping, "_due", lambda *_: False)
    for rank in range(1, 5):
        for index in range(1 + (rank == 4), 5):
            assert story.ask(rank, index).generation == 2
    assert story.made.on_barrier(BarrierEnter(rank=1, index=1)) == []
    assert story.fixed == ["workers meet at barriers within an epoch"]
