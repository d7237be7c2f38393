"""Which workers step together. One group, singletons, or groups of like speed; decides nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from hpcps.errors import ConfigError, PlanError
from hpcps.plan import Group, Grouping

__all__ = ["GroupWorkers", "GroupingDecision"]

LIKE_FACTOR = 1.25
"""Speeds within this factor of a group's median count as alike: a step then idles at most a fifth."""

Members = list[tuple[float, int]]
"""Speed and rank of workers, fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingDecision:
    """The groups, and how they were found."""

    grouping: Grouping
    reason: str


class GroupWorkers:
    """Partition workers into sync groups.

    - sync: one group. async: every worker its own.
    - hybrid, size given: workers sorted by speed, cut into runs of that size. A last run of a single
      worker joins the run before it. A size of 1 gives singletons, as asked.
    - hybrid, size 0: workers sorted by speed; a worker opens a new group when the median of the group
      so far is more than 1.25 times its speed. Then, as long as a singleton and another group are
      left, the singleton nearest to a group (in the logarithm of speed, to the group's median) joins it.

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

    def decide(self, speeds: Mapping[int, float], *, generation: int) -> GroupingDecision:
        """Form the groups; group 0 is the fastest, members are in rank order.

        Args:
            speeds: samples per second (or any common unit) by world rank of the workers.
            generation: number of the new grouping.

        Raises:
            PlanError: no worker, or a speed that is not finite and above 0.
        """
        if not speeds:
            raise PlanError("cannot group workers: got no worker, need at least 1; start more ranks")
        for rank, speed in sorted(speeds.items()):
            if not (speed > 0 and math.isfinite(speed)):
                raise PlanError(
                    f"cannot group rank {rank}: got speed {speed}, need a finite speed above 0; fit its capacity first",
                    rank=rank,
                )
        ordered = sorted(((speed, rank) for rank, speed in speeds.items()), key=lambda item: (-item[0], item[1]))
        runs, how = self._runs(ordered)
        groups = tuple(
            Group(index=index, workers=tuple(sorted(rank for _, rank in run))) for index, run in enumerate(runs)
        )
        sizes = "+".join(str(len(run)) for run in runs)
        return GroupingDecision(
            grouping=Grouping(generation=generation, groups=groups), reason=f"{self._sync_mode}: {how}; sizes {sizes}"
        )

    def _runs(self, ordered: Members) -> tuple[list[Members], str]:
        if self._sync_mode == "sync":
            return [ordered], "one group of all workers"
        if self._sync_mode == "async":
            return [[item] for item in ordered], "every worker its own group"
        if self._group_size > 0:
            return _cut_by_size(ordered, self._group_size), f"runs of {self._group_size} by speed"
        return _join_singletons(_cut_by_speed(ordered)), f"speeds within a factor of {LIKE_FACTOR}, no singletons"


def _cut_by_size(ordered: Members, size: int) -> list[Members]:
    runs = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    if size > 1 and len(runs) > 1 and len(runs[-1]) == 1:
        single = runs.pop()
        runs[-1] = runs[-1] + single
    return runs


def _median(run: Members) -> float:
    return statistics.median(speed for speed, _ in run)


def _cut_by_speed(ordered: Members) -> list[Members]:
    runs = [[ordered[0]]]
    for item in ordered[1:]:
        if _median(runs[-1]) > LIKE_FACTOR * item[0]:
            runs.append([item])
        else:
            runs[-1].append(item)
    return runs


def _join_singletons(runs: list[Members]) -> list[Members]:
    """Merge singletons into neighbours; medians are in order, so the nearest group is a neighbour."""
    runs = list(runs)
    while len(runs) > 1:
        gaps = [
            (math.log(_median(runs[index]) / _median(runs[index + 1])), index)
            for index in range(len(runs) - 1)
            if len(runs[index]) == 1 or len(runs[index + 1]) == 1
        ]
        if not gaps:
            break
        _, index = min(gaps)
        runs[index : index + 2] = [runs[index] + runs[index + 1]]
    return runs
