"""Workers sorted into classes of like speed, and what groups made of them are predicted to do.

The parts that ``grouping`` and ``regroup`` share. Decides nothing: it has no notion of what is in force for how long.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpcps.errors import PlanError
from hpcps.plan import Group, Grouping
from hpcps.policy.capacity import CapacityFit

__all__ = [
    "ERRORS",
    "LIKE_FACTOR",
    "Members",
    "Ranks",
    "WorkerFacts",
    "by_speed",
    "check_speeds",
    "cut_by_size",
    "cut_by_speed",
    "grouping_of",
    "how_found",
    "in_order",
    "join_singletons",
    "median_speed",
    "predict_samples_per_s",
    "ranks_of",
]

LIKE_FACTOR = 1.25
"""Speeds within this factor of a group's median count as alike: a step then idles at most a fifth."""

SINGLETON_GAIN = 0.05
"""A worker that is like no other steps alone only where that gains more than this part of all samples a second."""

ERRORS = 3.0
"""Standard errors of a speed by which the edge of its class is moved out, on top of the margin."""

Members = list[tuple[float, int]]
"""Speed and rank of workers, fastest first."""

Ranks = tuple[tuple[int, ...], ...]
"""World ranks, by group or class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One worker.

    Args:
        speed: samples per second of a large step (or any common unit), above 0 and finite.
        error_frac: standard error of the speed, as a part of it, 0 or more.
        num_samples: its part of a full batch, 0 or more.
        step_s: predicted seconds of a step with that part.
    """

    speed: float
    error_frac: float = 0.0
    num_samples: int = 0
    step_s: float = 0.0

    @classmethod
    def of(cls, fit: CapacityFit, num_samples: int) -> WorkerFacts:
        """What a fit says of a worker with so many samples; one given by hand is taken as exact."""
        error_frac = fit.error_frac if fit.num_steps else 0.0
        return cls(
            speed=fit.speed, error_frac=error_frac, num_samples=num_samples, step_s=fit.seconds(float(num_samples))
        )


def check_speeds(speeds: Mapping[int, float]) -> None:
    """Refuse what cannot be sorted.

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


def by_speed(item: tuple[float, int]) -> tuple[float, int]:
    """Sort key of a speed and a rank: fastest first, ties by rank."""
    return -item[0], item[1]


def in_order(speeds: Mapping[int, float]) -> Members:
    """Workers by speed, fastest first."""
    return sorted(((speed, rank) for rank, speed in speeds.items()), key=by_speed)


def ranks_of(runs: Sequence[Members]) -> Ranks:
    """Ranks of each run, ascending."""
    return tuple(tuple(sorted(rank for _, rank in run)) for run in runs)


def grouping_of(runs: Sequence[Members], generation: int) -> Grouping:
    """A grouping of these runs; group 0 is the first."""
    groups = tuple(Group(index=index, workers=workers) for index, workers in enumerate(ranks_of(runs)))
    return Grouping(generation=generation, groups=groups)


def how_found(groups: Sequence[Members]) -> str:
    """Words for groups that were found by speed."""
    alone = any(len(group) == 1 for group in groups)
    return f"speeds within a factor of {LIKE_FACTOR}, {'singletons where they gain' if alone else 'no singletons'}"


def cut_by_size(ordered: Members, size: int) -> list[Members]:
    """Runs of a size; a last run of a single worker joins the one before."""
    runs = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    if size > 1 and len(runs) > 1 and len(runs[-1]) == 1:
        single = runs.pop()
        runs[-1] = runs[-1] + single
    return runs


def median_speed(run: Members) -> float:
    """Median speed of a run."""
    return statistics.median(speed for speed, _ in run)


def cut_by_speed(ordered: Members) -> list[Members]:
    """Runs of like speed: one begins where the median of the run before is more than 1.25 times a worker's speed."""
    runs = [[ordered[0]]]
    for item in ordered[1:]:
        if median_speed(runs[-1]) > LIKE_FACTOR * item[0]:
            runs.append([item])
        else:
            runs[-1].append(item)
    return runs


def join_singletons(
    runs: Sequence[Members],
    workers: Mapping[int, WorkerFacts],
    *,
    present: Grouping | None = None,
    margin: Callable[[Iterable[WorkerFacts]], float] = lambda _: 0.0,
) -> list[Members]:
    """Merge singletons into neighbours, unless they gain alone; medians are in order, so the nearest is a neighbour.

    Args:
        runs: classes, fastest first.
        workers: for the prediction; empty: nothing gains.
        present: groups in force. Who is in one group with a neighbour is nearer to it by the margin; for who steps
            alone half of the gain, and no error on it, is enough to go on so.
        margin: of some workers.
    """
    runs = list(runs)
    place = {rank: group.index for group in present.groups for rank in group.workers} if present is not None else {}
    alone = [group.workers[0] for group in present.groups if len(group.workers) == 1] if present is not None else []
    while len(runs) > 1:
        gaps: list[tuple[float, int]] = []
        for index, (run, following) in enumerate(itertools.pairwise(runs)):
            if 1 in (len(run), len(following)) and not _gains(runs, index, workers, alone=alone):
                gap = math.log(median_speed(run) / median_speed(following))
                if {place.get(rank, -1) for _, rank in run} & {place.get(rank, -2) for _, rank in following}:
                    gap -= math.log1p(margin(workers[rank] for _, rank in (*run, *following)))
                gaps.append((gap, index))
        if not gaps:
            break
        _, index = min(gaps)
        runs[index : index + 2] = [runs[index] + runs[index + 1]]
    return runs


def _gains(runs: Sequence[Members], index: int, workers: Mapping[int, WorkerFacts], *, alone: Sequence[int]) -> bool:
    """True if a run and the next are predicted to be worth more apart than as one."""
    if not workers:
        return False
    pair = [rank for run in runs[index : index + 2] for _, rank in run]
    joined = [*runs[:index], runs[index] + runs[index + 1], *runs[index + 2 :]]
    apart_rate, joined_rate = predict_samples_per_s(runs, workers), predict_samples_per_s(joined, workers)
    if any(len(run) == 1 and run[0][1] in alone for run in runs[index : index + 2]):
        need = SINGLETON_GAIN / 2
    else:
        need = SINGLETON_GAIN + ERRORS * max(workers[rank].error_frac for rank in pair)
    return apart_rate > (1 + need) * joined_rate


def predict_samples_per_s(runs: Sequence[Members], workers: Mapping[int, WorkerFacts]) -> float:
    """Samples of each group over the time of its slowest member, summed; 0 where nothing is known."""
    rate = 0.0
    for run in runs if workers else ():
        members = [workers[rank] for _, rank in run]
        step_s = max(member.step_s for member in members)
        rate += sum(member.num_samples for member in members) / step_s if step_s > 0 else 0.0
    return rate
