"""Which workers step together. One group, singletons, or groups of like speed; decides nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcps.errors import ConfigError
from hpcps.plan import Grouping
from hpcps.policy.speed_classes import (
    Members,
    Ranks,
    WorkerFacts,
    check_speeds,
    cut_by_size,
    cut_by_speed,
    grouping_of,
    how_found,
    in_order,
    join_singletons,
    predict_samples_per_s,
    ranks_of,
)

__all__ = ["GroupWorkers", "GroupingDecision", "Proposal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Groups that would be formed if they still are the ones to have some steps later."""

    groups: Ranks
    since_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingDecision:
    """The groups, and how they were found.

    Args:
        grouping: the groups.
        reason: how they were found, or why they stay.
        classes: workers of like speed, fastest class first; a group holds one or more of them.
        changed: the grouping is another than the one before.
        samples_per_s: predicted samples per second of these groups, 0: unknown.
        before_samples_per_s: the same for the groups before.
        proposal: groups that may come next, to be passed in again.
        ask_step: step at which to ask again; None: when speeds have changed.
    """

    grouping: Grouping
    reason: str
    classes: Ranks = ()
    changed: bool = True
    samples_per_s: float = 0.0
    before_samples_per_s: float = 0.0
    proposal: Proposal | None = None
    ask_step: int | None = None


class GroupWorkers:
    """Partition workers into sync groups, knowing of none before.

    - sync: one group. async: every worker its own.
    - hybrid, size given: workers sorted by speed, cut into runs of that size. A last run of a single
      worker joins the run before it. A size of 1 gives singletons, as asked.
    - hybrid, size 0: workers sorted by speed; a worker opens a new class when the median of the class
      so far is more than 1.25 times its speed. Every class is a group, but for classes of one: as long as
      one and another group are left, the one nearest to a group (in the logarithm of speed, to the group's
      median) joins it, unless the two apart are predicted to gain more than 5 % of all samples per second.
      Where shares are free the slowest member of a mixed group has a small share, and nothing is gained.

    Args:
        sync_mode: sync, async or hybrid.
        group_size: workers in a group of hybrid mode; 0: found from the speeds.
    """

    def __init__(self, sync_mode: str, group_size: int) -> None:
        if sync_mode not in ("sync", "async", "hybrid"):
            raise ConfigError(f"cannot accept sync_mode: got {sync_mode!r}, need sync, async or hybrid; choose one")
        if group_size < 0:
            raise ConfigError(f"cannot accept sync_group_size: got {group_size}, need 0 or more; raise it")
        self._sync_mode = sync_mode
        self._group_size = group_size

    def decide(
        self, speeds: Mapping[int, float], *, generation: int, workers: Mapping[int, WorkerFacts] | None = None
    ) -> GroupingDecision:
        """Form the groups; group 0 is the fastest, members are in rank order.

        Args:
            speeds: samples per second (or any common unit) by world rank of the workers.
            generation: number of the new grouping.
            workers: what they have to do, by world rank, for the prediction; None: unknown.

        Raises:
            PlanError: no worker, or a speed that is not finite and above 0.
        """
        check_speeds(speeds)
        ordered = in_order(speeds)
        classes, runs, how = self._runs(ordered, workers or {})
        sizes = "+".join(str(len(run)) for run in runs)
        return GroupingDecision(
            grouping=grouping_of(runs, generation),
            reason=f"{self._sync_mode}: {how}; sizes {sizes}",
            classes=ranks_of(classes),
            samples_per_s=predict_samples_per_s(runs, workers or {}),
            before_samples_per_s=predict_samples_per_s([ordered], workers or {}),
        )

    def _runs(self, ordered: Members, workers: Mapping[int, WorkerFacts]) -> tuple[list[Members], list[Members], str]:
        """Classes, groups, and how they were found."""
        if self._sync_mode == "sync":
            return [ordered], [ordered], "one group of all workers"
        if self._sync_mode == "async":
            runs = [[item] for item in ordered]
            return runs, runs, "every worker its own group"
        if self._group_size > 0:
            runs = cut_by_size(ordered, self._group_size)
            return runs, runs, f"runs of {self._group_size} by speed"
        classes = cut_by_speed(ordered)
        groups = join_singletons(classes, workers)
        return classes, groups, how_found(groups)
