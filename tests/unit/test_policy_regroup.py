"""When groups change, by tables: classes, margins, holds, singletons, sizes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from hpcps.config import GroupingConfig
from hpcps.errors import PlanError
from hpcps.plan import Group, Grouping
from hpcps.policy.capacity import CapacityFit
from hpcps.policy.grouping import GroupingDecision, GroupWorkers, Proposal
from hpcps.policy.regroup import STAND_STEPS, Regroup, RegroupFacts
from hpcps.policy.speed_classes import WorkerFacts

Ranks = list[tuple[int, ...]]


def facts(
    speeds: tuple[float, ...],
    present: Ranks,
    *,
    classes: Ranks | None = None,
    num_steps: int = 1000,
    error: float = 0.0,
    shares: tuple[int, ...] | None = None,
    proposal: Proposal | None = None,
) -> RegroupFacts:
    """Workers 1, 2, ...: shares follow the speeds where none are given."""
    counts = shares or tuple(round(100 * speed) for speed in speeds)
    workers = {
        rank: WorkerFacts(speed=speed, error_frac=error, num_samples=count, step_s=count / speed)
        for rank, (speed, count) in enumerate(zip(speeds, counts, strict=True), start=1)
    }
    groups = tuple(Group(index=index, workers=ranks) for index, ranks in enumerate(present))
    decision = GroupingDecision(
        grouping=Grouping(generation=3, groups=groups),
        reason="",
        classes=tuple(classes or present),
        proposal=proposal,
    )
    return RegroupFacts(present=decision, workers=workers, num_steps=num_steps)


def settle(given: RegroupFacts, *, config: GroupingConfig | None = None, size: int = 0) -> GroupingDecision:
    """The decision once a proposal has stood long enough."""
    policy = Regroup(config or GroupingConfig(), size)
    decision = policy.decide(given)
    if decision.proposal is None:
        return decision
    assert not decision.changed
    assert decision.ask_step == given.num_steps + STAND_STEPS
    present = dataclasses.replace(given.present, proposal=decision.proposal)
    later = dataclasses.replace(given, present=present, num_steps=given.num_steps + STAND_STEPS - 1)
    assert not policy.decide(later).changed, "a proposal must stand"
    return policy.decide(dataclasses.replace(later, num_steps=given.num_steps + STAND_STEPS))


# speeds of workers 1, 2, ...; groups in force; the groups to have, None: the same
CHANGES: list[tuple[tuple[float, ...], Ranks, Ranks | None]] = [
    ((1, 1, 1, 1), [(1, 2, 3, 4)], None),
    ((8, 8, 4, 4, 2, 2, 1, 1), [(1, 2, 3, 4), (5, 6, 7, 8)], [(1, 2), (3, 4), (5, 6), (7, 8)]),
    ((1, 1, 2, 2), [(1, 2), (3, 4)], None),
    ((2, 2, 1, 1), [(1, 2, 3), (4,)], [(1, 2), (3, 4)]),
    ((4, 4, 1, 1, 1.1), [(1, 2, 5), (3, 4)], [(1, 2), (3, 4, 5)]),
    # within the margin of 1.25 * 1.1 nothing leaves, beyond it does
    ((1, 1, 1, 0.74), [(1, 2, 3, 4)], None),
    ((1, 1, 0.7, 0.7), [(1, 2, 3, 4)], [(1, 2), (3, 4)]),
    ((1, 1, 1.36, 1.36), [(1, 2, 3, 4)], None),
    ((1, 1, 1.4, 1.4), [(1, 2, 3, 4)], [(3, 4), (1, 2)]),
    # classes become one below 1.25 / 1.1
    ((1, 1, 0.85, 0.85), [(1, 2), (3, 4)], None),
    ((1, 1, 0.9, 0.9), [(1, 2), (3, 4)], [(1, 2, 3, 4)]),
    # a single worker joins the nearest, also where it was not alone before
    ((4, 4, 1, 1, 2), [(1, 2), (3, 4, 5)], None),
    ((4, 4, 1, 1, 3), [(1, 2), (3, 4, 5)], [(1, 2, 5), (3, 4)]),
    ((4, 2, 1), [(1, 2, 3)], None),
]


@pytest.mark.parametrize(("speeds", "present", "wanted"), CHANGES)
def test_groups_follow_the_speeds(speeds: tuple[float, ...], present: Ranks, wanted: Ranks | None) -> None:
    decision = settle(facts(speeds, present))
    assert [group.workers for group in decision.grouping.groups] == (wanted or present)
    assert decision.changed == (wanted is not None)
    assert decision.grouping.generation == (3 if wanted is None else 4)
    assert len(decision.grouping.groups) <= len(decision.classes)
    assert decision.samples_per_s == pytest.approx(sum(speeds)), "shares follow speeds in any group"
    if decision.changed:
        assert decision.reason.startswith("hybrid: ")
        assert not settle(facts(speeds, wanted or present, classes=list(decision.classes))).changed


def test_a_reason_names_who_left() -> None:
    decision = settle(facts((1, 1, 0.5, 0.5), [(1, 2, 3, 4)]))
    assert "rank 3 has 0.50 times its class's speed, edge 1.38" in decision.reason
    assert decision.reason.endswith("speeds within a factor of 1.25, no singletons; sizes 2+2")


def test_noise_widens_the_margin() -> None:
    """A speed known to 5 % only: 1.25 * (1.1 + 0.15) = 1.5625."""
    for error, changed in ((0.0, True), (0.05, False)):
        assert settle(facts((1, 1, 0.66, 0.66), [(1, 2, 3, 4)], error=error)).changed == changed
        assert settle(facts((1, 1, 0.9, 0.9), [(1, 2), (3, 4)], error=error)).changed == changed


def test_the_margin_is_a_setting() -> None:
    given = facts((1, 1, 0.7, 0.7), [(1, 2, 3, 4)])
    assert not settle(given, config=GroupingConfig(margin_frac=0.2)).changed


def test_nothing_changes_soon_after_a_change() -> None:
    given = facts((1, 1, 0.5, 0.5), [(1, 2, 3, 4)], num_steps=29)
    decision = Regroup(GroupingConfig(hold_steps=30), 0).decide(given)
    assert (decision.changed, decision.ask_step, decision.proposal) == (False, 30, None)
    assert decision.reason == "held: 29 of 30 steps since the last change"
    assert decision.classes == given.present.classes
    assert settle(facts((1, 1, 0.5, 0.5), [(1, 2, 3, 4)], num_steps=30), config=GroupingConfig(hold_steps=30)).changed


def test_another_proposal_begins_to_stand_anew() -> None:
    other = Proposal(groups=((1, 2), (3, 4)), since_step=100)
    given = facts((1, 1, 1, 0.5, 0.5), [(1, 2, 3, 4, 5)], num_steps=500, proposal=other)
    decision = Regroup(GroupingConfig(), 0).decide(given)
    assert decision.proposal == Proposal(groups=((1, 2, 3), (4, 5)), since_step=500)
    assert not decision.changed


def test_a_proposal_that_was_wrong_is_forgotten() -> None:
    known = Proposal(groups=((1, 2), (3, 4)), since_step=100)
    decision = Regroup(GroupingConfig(), 0).decide(facts((1, 1, 1, 1), [(1, 2, 3, 4)], proposal=known))
    assert (decision.changed, decision.proposal, decision.ask_step) == (False, None, None)


def test_classes_are_remembered_where_groups_stay() -> None:
    """A worker that leaves its class for none stays in its group, for shares are free; its class is known, though."""
    decision = settle(facts((2, 2, 1), [(1, 2, 3)]))
    assert (decision.changed, decision.classes) == (False, ((1, 2), (3,)))


# speeds, shares; groups in force; groups to have
SINGLETONS: list[tuple[tuple[float, ...], tuple[int, ...], Ranks, Ranks]] = [
    # equal shares: two fast workers would wait for the slow one, alone it costs them nothing
    ((2, 2, 1), (8, 8, 8), [(1, 2, 3)], [(1, 2), (3,)]),
    ((2, 2, 1), (8, 8, 4), [(1, 2, 3)], [(1, 2, 3)]),
    ((4, 2, 1), (8, 8, 8), [(1, 2, 3)], [(1,), (2,), (3,)]),
    # 5 % are needed to begin with, half of it to go on
    ((2, 2, 1), (40, 40, 21), [(1, 2, 3)], [(1, 2, 3)]),
    ((2, 2, 1), (40, 40, 21), [(1, 2), (3,)], [(1, 2), (3,)]),
    ((2, 2, 1), (100, 100, 51), [(1, 2), (3,)], [(1, 2, 3)]),
]


@pytest.mark.parametrize(("speeds", "shares", "present", "wanted"), SINGLETONS)
def test_a_worker_like_no_other_steps_alone_where_that_gains(
    speeds: tuple[float, ...], shares: tuple[int, ...], present: Ranks, wanted: Ranks
) -> None:
    decision = settle(facts(speeds, present, shares=shares))
    assert [group.workers for group in decision.grouping.groups] == wanted
    assert decision.samples_per_s >= decision.before_samples_per_s * 0.975


def test_the_first_groups_let_a_worker_alone_as_well() -> None:
    given = facts((2, 2, 1), [(1, 2, 3)], shares=(8, 8, 8))
    speeds = {rank: worker.speed for rank, worker in given.workers.items()}
    decision = GroupWorkers("hybrid", 0).decide(speeds, generation=1, workers=given.workers)
    assert [group.workers for group in decision.grouping.groups] == [(1, 2), (3,)]
    assert (decision.samples_per_s, decision.before_samples_per_s) == (5.0, 3.0)
    assert "singletons where they gain" in decision.reason
    unsure = facts((2, 2, 1), [(1, 2, 3)], shares=(8, 8, 8), error=0.5)
    decision = GroupWorkers("hybrid", 0).decide(speeds, generation=1, workers=unsure.workers)
    assert len(decision.grouping.groups) == 1, "what is not known cannot gain"


# speeds, groups in force, groups of two to have
SIZES: list[tuple[tuple[float, ...], Ranks, Ranks]] = [
    ((2, 2, 1, 1), [(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    ((2, 1, 2, 1), [(1, 2), (3, 4)], [(1, 3), (2, 4)]),
    ((1, 1, 2, 2), [(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    ((1, 0.95, 1.05, 1), [(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    ((2, 0.95, 1, 1), [(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    ((2, 0.8, 1, 1), [(1, 2), (3, 4)], [(1, 3), (2, 4)]),
    ((2, 0.8, 1, 1.5), [(1, 2), (3, 4)], [(1, 4), (2, 3)]),
    ((1, 1, 1, 1.05, 2), [(1, 2), (3, 4, 5)], [(1, 5), (2, 3, 4)]),
    ((1, 1, 1.08, 1.08, 1.08), [(1, 2), (3, 4, 5)], [(1, 2), (3, 4, 5)]),
    ((1, 1, 1.2, 1.2, 1.2), [(1, 2), (3, 4, 5)], [(3, 4), (1, 2, 5)]),
]


@pytest.mark.parametrize(("speeds", "present", "wanted"), SIZES)
def test_groups_of_a_given_size_keep_it(speeds: tuple[float, ...], present: Ranks, wanted: Ranks) -> None:
    decision = settle(facts(speeds, present), size=2)
    assert {group.workers for group in decision.grouping.groups} == set(wanted)
    assert decision.changed == (set(present) != set(wanted))
    if decision.changed:
        assert "runs of 2 by speed" in decision.reason


@pytest.mark.parametrize("speed", [0.0, math.nan, math.inf])
def test_impossible_speeds_are_refused(speed: float) -> None:
    given = facts((1, 1), [(1, 2)])
    workers = {**given.workers, 2: WorkerFacts(speed=speed)}
    with pytest.raises(PlanError, match="cannot group rank 2: got speed"):
        Regroup(GroupingConfig(), 0).decide(dataclasses.replace(given, workers=workers))


def test_facts_of_a_fit() -> None:
    measured = CapacityFit(fixed_s=0.5, per_sample_s=0.01, error_frac=0.02, num_steps=30)
    assert WorkerFacts.of(measured, 50) == WorkerFacts(speed=100.0, error_frac=0.02, num_samples=50, step_s=1.0)
    given = CapacityFit(fixed_s=0.0, per_sample_s=0.01, error_frac=1.0, num_steps=0)
    assert WorkerFacts.of(given, 0) == WorkerFacts(speed=100.0)
