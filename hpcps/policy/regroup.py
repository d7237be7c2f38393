"""When the groups of a hybrid run change while it runs. Remembers nothing: what was proposed is passed in again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpcps.config import GroupingConfig
from hpcps.policy.grouping import GroupingDecision, Proposal
from hpcps.policy.speed_classes import (
    ERRORS,
    LIKE_FACTOR,
    Members,
    Ranks,
    WorkerFacts,
    by_speed,
    check_speeds,
    cut_by_size,
    grouping_of,
    how_found,
    in_order,
    join_singletons,
    median_speed,
    predict_samples_per_s,
    ranks_of,
)

__all__ = ["Regroup", "RegroupFacts"]

STAND_STEPS = 10
"""Steps of every worker for which new groups must be the ones to have: a change is measured in pieces, a regrouping
on the first of them would be undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupFacts:
    """What a change of groups rests on.

    Args:
        present: the decision in force; its proposal is that of the last time.
        workers: by world rank.
        num_steps: steps that every worker has made since the last change.
    """

    present: GroupingDecision
    workers: Mapping[int, WorkerFacts]
    num_steps: int


class Regroup:
    """Say whether the groups of a hybrid run still are the ones to have.

    A worker leaves its class when its speed is more than 1.25 times, and the margin on top, off the
    median of the class; the margin is ``grouping.margin_frac`` and three standard errors of the speed.
    Who left joins a class that is within 1.25, or makes one. Two classes become one when their medians
    are closer than 1.25 less the margin. So between two decisions that move a worker there and back
    lies more than its noise. Groups are formed of classes as ``GroupWorkers`` does it, so there are
    never more groups than classes. Of a given size the groups stay runs of that size by speed, where
    a speed within the margin of its group's median counts as that median.

    Nothing changes within ``grouping.hold_steps`` steps of the last change, nor before new groups have
    been the ones to have for ten steps.

    Args:
        config: margin and hold.
        group_size: workers in a group; 0: found from the speeds.
    """

    def __init__(self, config: GroupingConfig, group_size: int) -> None:
        self._config = config
        self._group_size = group_size

    def decide(self, facts: RegroupFacts) -> GroupingDecision:
        """Keep the groups, propose others, or form them.

        Raises:
            PlanError: a speed is not finite and above 0.
        """
        check_speeds({rank: worker.speed for rank, worker in facts.workers.items()})
        if facts.num_steps < self._config.hold_steps:
            held = f"held: {facts.num_steps} of {self._config.hold_steps} steps since the last change"
            return self._keep(facts, held, classes=facts.present.classes, ask_step=self._config.hold_steps)
        classes, notes = self._by_size(facts) if self._group_size else self._classes(facts)
        runs = classes
        if not self._group_size:
            runs = join_singletons(classes, facts.workers, present=facts.present.grouping, margin=self._margin)
        groups = ranks_of(runs)
        if set(groups) == {group.workers for group in facts.present.grouping.groups}:
            return self._keep(facts, "speeds fit the groups", classes=ranks_of(classes))
        known = facts.present.proposal
        proposal = known if known and known.groups == groups else Proposal(groups=groups, since_step=facts.num_steps)
        if facts.num_steps < proposal.since_step + STAND_STEPS:
            return self._keep(
                facts,
                f"other groups may be the ones to have: to be seen for {STAND_STEPS} steps",
                classes=facts.present.classes,
                proposal=proposal,
                ask_step=proposal.since_step + STAND_STEPS,
            )
        how = f"runs of {self._group_size} by speed" if self._group_size else how_found(runs)
        sizes = "+".join(str(len(run)) for run in runs)
        return GroupingDecision(
            grouping=grouping_of(runs, facts.present.grouping.generation + 1),
            reason=f"hybrid: {'; '.join([*notes, how])}; sizes {sizes}",
            classes=ranks_of(classes),
            samples_per_s=predict_samples_per_s(runs, facts.workers),
            before_samples_per_s=_present_samples_per_s(facts),
        )

    def _keep(
        self,
        facts: RegroupFacts,
        reason: str,
        *,
        classes: Ranks,
        proposal: Proposal | None = None,
        ask_step: int | None = None,
    ) -> GroupingDecision:
        rate = _present_samples_per_s(facts)
        return GroupingDecision(
            grouping=facts.present.grouping,
            reason=reason,
            classes=classes,
            changed=False,
            samples_per_s=rate,
            before_samples_per_s=rate,
            proposal=proposal,
            ask_step=ask_step,
        )

    def _margin(self, workers: Iterable[WorkerFacts]) -> float:
        return self._config.margin_frac + ERRORS * max(worker.error_frac for worker in workers)

    def _classes(self, facts: RegroupFacts) -> tuple[list[Members], list[str]]:
        """Classes as they are now, fastest first, and what changed."""
        units: list[tuple[Members, bool]] = []
        notes: list[str] = []
        for ranks in facts.present.classes:
            speeds = {rank: facts.workers[rank].speed for rank in ranks}
            center = statistics.median_high(speeds.values())
            core: dict[int, float] = {}
            for rank, speed in speeds.items():
                edge = LIKE_FACTOR * (1 + self._margin([facts.workers[rank]]))
                if max(speed / center, center / speed) > edge:
                    units.append(([(speed, rank)], False))
                    notes.append(f"rank {rank} has {speed / center:.2f} times its class's speed, edge {edge:.2f}")
                else:
                    core[rank] = speed
            units.append((in_order(core), True))
        units.sort(key=lambda unit: (-median_speed(unit[0]), unit[0][0][1]))
        classes, merged = self._join_like(units, facts)
        return classes, notes + merged

    def _join_like(self, units: Sequence[tuple[Members, bool]], facts: RegroupFacts) -> tuple[list[Members], list[str]]:
        """Make one class of neighbours that are alike; classes that were two need more for that than who left one."""
        runs = [units[0]]
        notes: list[str] = []
        for unit, was_class in units[1:]:
            last, last_was_class = runs[-1]
            limit = LIKE_FACTOR
            if was_class and last_was_class:
                limit /= 1 + self._margin(facts.workers[rank] for _, rank in (*last, *unit))
            ratio = median_speed(last) / median_speed(unit)
            if ratio <= limit:
                if was_class and last_was_class:
                    notes.append(f"two classes are within a factor of {ratio:.2f}, edge {limit:.2f}")
                runs[-1] = (sorted([*last, *unit], key=by_speed), was_class or last_was_class)
            else:
                runs.append((unit, was_class))
        return [run for run, _ in runs], notes

    def _by_size(self, facts: RegroupFacts) -> tuple[list[Members], list[str]]:
        """Runs of the given size.

        The margin is taken off each speed's distance from its group's median, and off what a group's median is above
        that of the group before.
        """
        near: dict[int, float] = {}
        place: dict[int, int] = {}
        before = math.inf
        for group in facts.present.grouping.groups:
            members = {rank: facts.workers[rank] for rank in group.workers}
            center = statistics.median_high(worker.speed for worker in members.values())
            level = before if before < center <= before * (1 + self._margin(members.values())) else center
            for rank, worker in members.items():
                off, slack = worker.speed / center, 1 + self._margin([worker])
                place[rank] = group.index
                near[rank] = level * (off / slack if off > slack else off * slack if off * slack < 1 else 1.0)
            before = level
        ordered = sorted(near, key=lambda rank: (-near[rank], place[rank], rank))
        runs = cut_by_size([(facts.workers[rank].speed, rank) for rank in ordered], self._group_size)
        return runs, []


def _present_samples_per_s(facts: RegroupFacts) -> float:
    runs = [[(facts.workers[rank].speed, rank) for rank in group.workers] for group in facts.present.grouping.groups]
    return predict_samples_per_s(runs, facts.workers)
