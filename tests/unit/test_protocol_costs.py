"""Costs at the coordinator: what members are told, who may disagree, and what is learned of timed steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hpcps.config import CapacityConfig, PartitionConfig, RunConfig
from hpcps.errors import DataError, ProtocolError
from hpcps.policy import AssignSamples, CapacityFit, TimedStep
from hpcps.protocol.control import LoaderOpen, Order, OrderRequest
from hpcps.protocol.coordinator import Coordinator
from hpcps.protocol.costs import Costs, KnownTerms
from hpcps.protocol.speeds import Speeds

Events = list[tuple[str, dict[str, object]]]
FITS = (CapacityFit(fixed_s=0.5, per_sample_s=0.1), CapacityFit(fixed_s=0.0, per_sample_s=0.3))


def opened(rank: int, *, costs: str = "", num_features: int = 0, loader: int = 0, trains: bool = True) -> LoaderOpen:
    return LoaderOpen(
        rank=rank,
        loader=loader,
        num_samples=10_000,
        global_batch=8,
        trains=trains,
        costs=costs,
        num_features=num_features,
    )


def request(
    rank: int,
    index: int = 0,
    *,
    timed: tuple[float, ...] = (),
    features: tuple[float, ...] = (),
    loader: int = 0,
) -> OrderRequest:
    return OrderRequest(
        rank=rank,
        loader=loader,
        epoch=0,
        index=index,
        num_epochs=1,
        timed=list(timed),
        features=list(features),
        logged=[],
        sums=[],
        weights=[],
        staleness=0,
    )


def costs_of(*workers: int, events: Events | None = None, **capacity: int) -> Costs:
    log: Events = [] if events is None else events
    return Costs(CapacityConfig(**capacity), workers, report=lambda name, fields: log.append((name, fields)))


# --- terms -------------------------------------------------------------------------------------------

# counts, fits, caps; fixed seconds, unit seconds, caps as told
TERMS = [
    ("speeds unknown: as the counts differ", (10, 6), (), (0, 0), [0.0, 0.0], [0.1, 1 / 6], []),
    ("nothing for one: it comes last", (1, 0), (), (0, 0), [0.0, 0.0], [1.0, 2.0], []),
    ("the curves", (10, 6), FITS, (0, 0), [0.5, 0.0], [0.1, 0.3], []),
    ("a cap on one", (10, 6), FITS, (12, 0), [0.5, 0.0], [0.1, 0.3], [12, 0]),
    ("a cap below what it has to take", (10, 6), FITS, (8, 7), [0.5, 0.0], [0.1, 0.3], [10, 7]),
]


@pytest.mark.parametrize(("name", "counts", "fits", "caps", "fixed_s", "unit_s", "told"), TERMS)
def test_terms(
    name: str,
    counts: tuple[int, ...],
    fits: tuple[CapacityFit, ...],
    caps: tuple[int, ...],
    fixed_s: list[float],
    unit_s: list[float],
    told: list[int],
) -> None:
    terms = costs_of(1, 2).terms("abc", counts, fits=fits, caps=caps)
    assert terms is not None
    assert (terms.fixed_s, terms.unit_s, terms.caps, terms.weights) == (fixed_s, unit_s, told, []), name


def test_no_terms_where_all_samples_cost_the_same() -> None:
    assert costs_of(1, 2).terms("", (4, 4), fits=FITS, caps=(0, 0)) is None


# --- loaders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "other"), [("abc", "abd"), ("abc", ""), ("", "abc")])
def test_workers_that_disagree_on_costs_are_told(first: str, other: str) -> None:
    made = Coordinator(RunConfig(), (1, 2), report=lambda name, fields: None)
    made.on_loader(opened(1, costs=first))
    message = rf"rank 2 has costs {other or 'none'}, others {first or 'none'}; give the same cost= on every worker"
    with pytest.raises(DataError, match=message) as caught:
        made.on_loader(opened(2, costs=other))
    assert caught.value.rank == 2


def test_costs_of_one_dataset_are_learned() -> None:
    """The same features again, as in a loader made anew each epoch, go on; others are refused, given costs are not."""
    made = Coordinator(RunConfig(), (1,), report=lambda name, fields: None)
    made.on_loader(opened(1, costs="abc", num_features=3))
    made.on_loader(opened(1, costs="abc", num_features=3, loader=1))
    made.on_loader(opened(1, costs="given", loader=2))
    with pytest.raises(DataError, match="cannot learn the costs of loader 3 too: its features are abd, those of"):
        made.on_loader(opened(1, costs="abd", num_features=3, loader=3))


# --- orders ------------------------------------------------------------------------------------------


def orders(made: Coordinator, ranks: tuple[int, ...], index: int, *, loader: int = 0) -> list[Order]:
    found = []
    for rank in ranks:
        [(to, order)] = made.on_request(request(rank, index, loader=loader))
        assert to == rank
        assert isinstance(order, Order)
        found.append(order)
    return found


def test_an_order_names_the_group_and_its_speeds() -> None:
    """Speeds 3 : 1 and batches of 8: the members' own samples are theirs to find, the same terms tell both how."""
    config = RunConfig(
        heterogeneous=True,
        capacity=CapacityConfig(prior=(3.0, 1.0)),
        partition=PartitionConfig(max_share=7, caps=(0, 5)),
    )
    made = Coordinator(config, (1, 2), report=lambda name, fields: None)
    for rank in (1, 2):
        made.on_loader(opened(rank, costs="abc"))
    known = {rank: KnownTerms() for rank in (1, 2)}
    for index in range(3):
        one, two = orders(made, (1, 2), index)
        assert bool(one.fixed_s) is bool(two.fixed_s) is (index == 0), "told once"
        one, two = known[1].fill(one), known[2].fill(two)
        assert (one.start, one.group_count) == (two.start, two.group_count) == (8 * index, 8)
        assert (one.member, two.member) == (0, 1)
        assert one.fixed_s == two.fixed_s == [0.0, 0.0]
        assert one.unit_s == two.unit_s
        assert one.unit_s[1] / one.unit_s[0] == pytest.approx(3.0)
        assert one.caps == two.caps == [7, 5]
        assert one.cost_weights == []


def test_an_order_without_costs_is_as_ever() -> None:
    made = Coordinator(RunConfig(), (1, 2), report=lambda name, fields: None)
    for rank in (1, 2):
        made.on_loader(opened(rank))
    one, two = orders(made, (1, 2), 0)
    assert (one.start, one.count, two.start, two.count) == (0, 4, 4, 4)
    assert (two.fixed_s, two.unit_s, two.caps, two.member) == ([], [], [], 0)


def test_evaluation_is_shared_out_by_cost_over_equal_members() -> None:
    config = RunConfig(heterogeneous=True, capacity=CapacityConfig(prior=(3.0, 1.0)))
    made = Coordinator(config, (1, 2), report=lambda name, fields: None)
    for rank in (1, 2):
        made.on_loader(opened(rank, costs="abc", trains=False))
    one, two = orders(made, (1, 2), 0)
    assert one.unit_s == two.unit_s == [0.25, 0.25]


def test_members_see_different_sizes_while_speeds_are_unknown() -> None:
    made = Coordinator(RunConfig(heterogeneous=True), (1, 2), report=lambda name, fields: None)
    for rank in (1, 2):
        made.on_loader(opened(rank, costs="abc"))
    seen = set()
    for index in range(4):
        order = orders(made, (1, 2), index)[0]
        work = AssignSamples(PartitionConfig()).decide(np.ones(8), order.fixed_s, order.unit_s).work
        seen.add(work)
    assert seen == {(5.0, 3.0), (3.0, 5.0)}


# --- learning ----------------------------------------------------------------------------------------


def test_work_is_taken_as_reported_where_costs_are_given() -> None:
    made = costs_of(1, 2)
    made.on_loader(opened(1, costs="given"), "given")
    steps, renewed = made.take(request(1, timed=(2.5, 0.5, 0.0, 0.1)))
    assert [(step.work, step.seconds) for step in steps] == [(2.5, 0.5)]
    assert not renewed


def test_steps_before_a_worker_opened_its_loader_and_on_other_data_count_as_reported() -> None:
    made = costs_of(1)
    made.on_loader(opened(1, costs="abc", num_features=3), "abc")
    steps, _ = made.take(request(1, timed=(4.0, 0.5)))
    assert [step.work for step in steps] == [4.0]
    steps, _ = made.take(request(1, timed=(4.0, 0.5, 3.0, 0.2, 0.0, 0.1), features=(0, 0, 0, 2, 5, 9, 0, 0, 0)))
    assert [step.work for step in steps] == [4.0, 2.0], "the second by its features: two samples"
    assert [len(rows) for rows in made.steps().values()] == [0], "the first two steps are not timed"


def test_sums_that_do_not_fit_the_steps_are_refused() -> None:
    made = costs_of(7)
    made.on_loader(opened(7, costs="abc", num_features=3), "abc")
    with pytest.raises(ProtocolError, match="from rank 7: got 4 sums of features for 1 steps, need 3 a step"):
        made.take(request(7, timed=(1.0, 1.0), features=(1.0, 2.0, 3.0, 4.0)))


def feed(made: Costs, lengths: np.ndarray, *, power: int, speeds: tuple[float, ...], num_steps: int) -> list[int]:
    """Steps of all workers whose time goes with a power of the length; the steps after which weights were new."""
    rng = np.random.default_rng(3)
    table = np.stack([np.ones(len(lengths)), lengths / lengths.mean(), lengths**2 / (lengths**2).mean()], axis=1)
    renewed = []
    for step in range(num_steps):
        for rank, speed in enumerate(speeds, start=1):
            chosen = rng.integers(0, len(lengths), 6 + 4 * ((step + rank) % 2))
            sums = tuple(table[chosen].sum(axis=0).tolist())
            seconds = sums[power] / speed * (1 + 0.01 * rng.normal())
            steps, new = made.take(request(rank, timed=(1.0, seconds), features=sums))
            assert len(steps) == 1
            if new:
                renewed.append(step)
    return renewed


def test_weights_are_learned_once_and_again_when_the_cost_is_another() -> None:
    events: Events = []
    made = costs_of(1, 2, 3, events=events, interval_steps=30)
    made.on_loader(opened(1, costs="abc", num_features=3), "abc")
    lengths = np.random.default_rng(1).lognormal(0, 0.8, 2000)
    assert made.weights == ()
    assert feed(made, lengths, power=1, speeds=(3.0, 1.0, 1.0), num_steps=100) == [21], "2 dropped and 20 timed"
    assert made.weights == pytest.approx((0.0, 1.0, 0.0), abs=0.05)
    terms = made.terms("abc", (4, 4, 4), fits=(), caps=(0, 0, 0))
    assert terms is not None
    assert terms.weights == list(made.weights)
    other = made.terms("given", (4, 4, 4), fits=(), caps=(0, 0, 0))
    assert other is not None
    assert other.weights == [], "given costs have no weights"
    for steps in made.steps().values():
        rates = [step.seconds / step.work for step in steps]
        assert np.std(rates) / np.mean(rates) < 0.05, "told in the unit that is learned"
    again = feed(made, lengths, power=2, speeds=(3.0, 1.0, 1.0), num_steps=150)
    assert 1 <= len(again) <= 2, "once among steps of both kinds, and once more among the new"
    assert made.weights == pytest.approx((0.0, 0.0, 1.0), abs=0.05)
    assert {name for name, _ in events} == {"costs"}
    assert events[0][1]["weights"] != events[1][1]["weights"]


def test_where_nothing_is_to_be_learned_it_is_tried_again_at_the_interval() -> None:
    """Times by count: weights stay, none is told."""
    made = costs_of(1, 2, interval_steps=30)
    made.on_loader(opened(1, costs="abc", num_features=3), "abc")
    lengths = np.random.default_rng(1).lognormal(0, 0.8, 2000)
    assert feed(made, lengths, power=0, speeds=(1.0, 1.0), num_steps=120) == []
    assert made.weights == ()


def test_too_few_steps_of_one_worker_teach_nothing() -> None:
    made = costs_of(1, 2)
    made.on_loader(opened(1, costs="abc", num_features=3), "abc")
    rng = np.random.default_rng(1)
    for _ in range(100):
        length = float(rng.lognormal())
        _, renewed = made.take(request(1, timed=(1.0, length), features=(1.0, length, length**2)))
        assert not renewed


def test_samples_that_should_cost_nothing_are_some_work() -> None:
    made = costs_of(1, interval_steps=30)
    made.on_loader(opened(1, costs="abc", num_features=3), "abc")
    feed(made, np.random.default_rng(1).lognormal(0, 0.8, 2000), power=1, speeds=(1.0,), num_steps=60)
    assert made.weights[0] < 0.05
    steps, _ = made.take(request(1, timed=(1.0, 1.0), features=(1e-9, 0.0, 0.0)))
    assert steps[0].work == pytest.approx(1e-3)


def test_lines_are_fitted_anew_when_the_unit_of_work_is_another() -> None:
    """Forty steps told by count, whose times go with another number: the same steps in that unit fit at once."""
    speeds = Speeds(CapacityConfig(warmup_steps=20, drop_steps=1), (1, 2), report=lambda name, fields: None)
    rng = np.random.default_rng(2)
    work = {rank: rng.lognormal(0, 0.6, 40) * 8 for rank in (1, 2)}
    for rank in (1, 2):
        steps = [TimedStep(work=8.0 + index % 3, seconds=0.01 * rank * work[rank][index]) for index in range(40)]
        for step in steps:
            speeds.take(rank, [step])
    assert max(fit.error_frac for fit in speeds.fits) > 0.04
    others = {rank: [TimedStep(work=each, seconds=0.01 * rank * each) for each in work[rank][1:]] for rank in work}
    speeds.restart_units(others)
    for rank, fit in enumerate(speeds.fits, start=1):
        assert fit.per_sample_s == pytest.approx(0.01 * rank, rel=1e-6)
        assert fit.fixed_s == pytest.approx(0.0, abs=1e-9)
        assert fit.error_frac < 0.02
    before = speeds.fits
    speeds.restart_units({rank: others[rank][-5:] for rank in others})
    assert speeds.fits == before, "five steps make no line: the old one stays"


def test_a_worker_that_is_not_known_yet_waits_for_its_warm_up() -> None:
    speeds = Speeds(CapacityConfig(warmup_steps=20), (1,), report=lambda name, fields: None)
    speeds.restart_units({1: [TimedStep(work=1.0, seconds=1.0)] * 30})
    assert not speeds.known, "steps that it has not seen itself are none since its last change"


def test_a_job_learns_costs_and_shares_out_by_speed() -> None:
    """Worker 1 is twice as fast as worker 2 on samples whose time goes with their length."""
    config = RunConfig(heterogeneous=True, capacity=CapacityConfig(interval_steps=30))
    events: Events = []
    made = Coordinator(config, (1, 2), report=lambda name, fields: events.append((name, fields)))
    lengths = np.random.default_rng(1).lognormal(0, 0.8, 10_000)
    table = np.stack([np.ones(10_000), lengths / lengths.mean(), lengths**2 / (lengths**2).mean()], axis=1)
    policy = AssignSamples(PartitionConfig())
    for rank in (1, 2):
        made.on_loader(opened(rank, costs="abc", num_features=3))
    reports: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {1: ((), ()), 2: ((), ())}
    order = None
    known = {1: KnownTerms(), 2: KnownTerms()}
    ends, told = [], []
    for index in range(120):
        work = []
        for rank in (1, 2):
            timed, features = reports[rank]
            [(_, order)] = made.on_request(request(rank, index, timed=timed, features=features))
            assert isinstance(order, Order)
            order = known[rank].fill(order)
            rows = table[order.start : order.start + order.group_count]
            costs = rows @ np.array(order.cost_weights) if order.cost_weights else np.ones(len(rows))
            own = rows[policy.decide(costs, order.fixed_s, order.unit_s).members == order.member].sum(axis=0)
            seconds = float(own[1]) * rank
            reports[rank] = ((float(own[0]), seconds), tuple(own.tolist()))
            work.append(seconds)
        told.append((bool(order.cost_weights), order.unit_s))
        ends.append(max(work) * (1 + 1 / 2) / (work[0] + work[1] / 2))  # slowest over an even end
    assert order is not None
    assert order.cost_weights == pytest.approx([0.0, 1.0, 0.0], abs=0.05)
    first = next(unit_s for learned, unit_s in told if learned)
    assert first[1] / first[0] == pytest.approx(2.0, rel=0.05), "speeds are known at once in the new unit"
    assert np.mean(ends[-60:]) < 1.25 < np.mean(ends[:20]), "batches of 8 samples end evenly but for the last sample"
    assert [name for name, _ in events].count("costs") == 1


def test_terms_are_told_once_and_a_worker_keeps_them() -> None:
    order = Order(
        loader=2,
        epoch=0,
        index=0,
        end=False,
        start=0,
        count=3,
        group_count=6,
        num_idle=0,
        share_frac=1.0,
        generation=0,
        groups=[],
    )
    terms = costs_of(1, 2).terms("abc", (4, 4), fits=FITS, caps=(5, 5))
    assert terms is not None
    whole = terms.told(order, start=6, member=1, again=False)
    short = terms.told(order, start=6, member=1, again=True)
    assert (short.start, short.member, short.fixed_s, short.unit_s, short.caps) == (6, 1, [], [], [])
    known = KnownTerms()
    assert known.fill(short) == short, "never told"
    assert known.fill(whole) == whole
    assert known.fill(short) == whole
    over, other = dataclasses.replace(order, end=True), dataclasses.replace(order, loader=3)
    assert (known.fill(over), known.fill(other)) == (over, other)
