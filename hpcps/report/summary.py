"""Sum up a run: throughput, what each worker's steps took, staleness, and efficiency. Reads events only.

The rule of the steady part, the same for every run so that runs can be compared: a worker's step belongs to it if
    - it is not among the worker's first ``SETTLE_STEPS`` steps, and
    - it started at or after the first "shares" event whose reason does not begin with "warm-up", where there is one.
Throughput is all samples of these steps over the time from the earliest start to the latest end.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpcps.config import CapacityConfig
from hpcps.errors import ConfigError, DataError
from hpcps.report.events import RunEvents, StepEvent

__all__ = [
    "RunSummary",
    "SETTLE_STEPS",
    "WorkerTimes",
    "efficiency",
    "s_star_of_capacity",
    "s_star_of_speeds",
    "summarize",
]

SETTLE_STEPS = CapacityConfig().drop_steps + CapacityConfig().warmup_steps
"""First steps of a worker that are never steady: as many as the speed measurement takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """Medians over some steps of one worker.

    Args:
        rank: world rank.
        num_steps: steps that the medians are taken over, at least 1.
        num_samples: samples of a step.
        compute_s: forward and backward.
        wait_s: waiting for other ranks.
        step_s: whole step.
    """

    rank: int
    num_steps: int
    num_samples: float
    compute_s: float
    wait_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run did.

    Args:
        samples_per_s: throughput of the steady part, all workers together.
        num_samples: samples of the steady part.
        num_steps: steps of the steady part, counted over all workers.
        before: each worker's times over its first steps, the untimed ones left out; in rank order.
        after: each worker's times over the steady part; in rank order.
        staleness_mean: over pushes where servers report it, else over worker steps, in versions.
        staleness_max: the largest, in versions.
    """

    samples_per_s: float
    num_samples: int
    num_steps: int
    before: tuple[WorkerTimes, ...]
    after: tuple[WorkerTimes, ...]
    staleness_mean: float
    staleness_max: float


def summarize(run: RunEvents) -> RunSummary:
    """Sum up a run by the rule of this module.

    Raises:
        DataError: a worker has no step in the steady part.
    """
    settled_s = next((shares.t_s for shares in run.shares if not shares.reason.startswith("warm-up")), float("-inf"))
    before: list[WorkerTimes] = []
    after: list[WorkerTimes] = []
    steady: list[StepEvent] = []
    for rank in sorted({step.rank for step in run.steps}):
        own = [step for step in run.steps if step.rank == rank]
        late = [step for step in own[SETTLE_STEPS:] if step.t_s - step.step_s >= settled_s]
        if not late:
            raise DataError(
                f"cannot sum up run {str(run.folder)!r}: rank {rank} has {len(own)} steps and none after the speed"
                f" measurement, need more than {SETTLE_STEPS}; train for more steps",
                rank=rank,
            )
        early = own[: len(own) - len(late)]
        before.append(_times(early[CapacityConfig().drop_steps :]))
        after.append(_times(late))
        steady += late
    if not steady:
        raise DataError(f"cannot sum up run {str(run.folder)!r}: got no worker step, need some; train for more steps")
    span_s = max(step.t_s for step in steady) - min(step.t_s - step.step_s for step in steady)
    num_samples = sum(step.num_samples for step in steady)
    mean, largest = _staleness(run)
    return RunSummary(
        samples_per_s=num_samples / span_s,
        num_samples=num_samples,
        num_steps=len(steady),
        before=tuple(before),
        after=tuple(after),
        staleness_mean=mean,
        staleness_max=largest,
    )


def s_star_of_speeds(speeds: Sequence[float]) -> float:
    """Ideal speed-up of a balanced over an equal split: mean over least speed.

    Args:
        speeds: relative speed of each worker, above 0.

    Raises:
        ConfigError: there is no speed, or one is not above 0.
    """
    if not speeds or min(speeds) <= 0:
        raise ConfigError(
            f"cannot compute S*: got speeds {tuple(speeds)}, need positive ones; write for example 3:2:1:1"
        )
    return statistics.fmean(speeds) / min(speeds)


def s_star_of_capacity(fixed_s: Sequence[float], per_sample_s: Sequence[float], *, global_batch: int) -> float:
    """Ideal speed-up where a step of n samples takes ``fixed_s + per_sample_s * n``.

    The balanced step time t solves sum of (t - a_i) / b_i = B over the workers with a_i < t; shares may be fractions.

    Args:
        fixed_s: seconds of a step without samples, by worker, 0 or more.
        per_sample_s: seconds a sample, by worker, above 0.
        global_batch: samples of a step over all workers, at least 1.

    Raises:
        ConfigError: the lists are empty or differ in length, or a value is out of range.
    """
    costs = sorted(zip(fixed_s, per_sample_s, strict=False))
    if not costs or len(fixed_s) != len(per_sample_s) or global_batch < 1 or costs[0][0] < 0 or min(per_sample_s) <= 0:
        raise ConfigError(
            f"cannot compute S*: got fixed_s {tuple(fixed_s)}, per_sample_s {tuple(per_sample_s)},"
            f" batch {global_batch}, need as many of both, 0 or more and above 0, and a batch"
            " of at least 1; pass a capacity event's values"
        )
    equal_s = max(fixed + each * global_batch / len(costs) for fixed, each in costs)
    rate = work = balanced_s = 0.0
    for index, (fixed, each) in enumerate(costs):
        rate += 1 / each
        work += fixed / each
        balanced_s = (global_batch + work) / rate
        if index + 1 == len(costs) or balanced_s <= costs[index + 1][0]:
            break
    return equal_s / balanced_s


def efficiency(measured_speedup: float, s_star: float) -> float:
    """Heterogeneity efficiency: the part of the ideal speed-up that was reached.

    Raises:
        ConfigError: ``s_star`` is below 1, which no split can have.
    """
    if s_star < 1:
        raise ConfigError(f"cannot compute efficiency: got S* = {s_star:.3f}, need at least 1; check the speeds")
    return measured_speedup / s_star


def _times(steps: Sequence[StepEvent]) -> WorkerTimes:
    return WorkerTimes(
        rank=steps[0].rank,
        num_steps=len(steps),
        num_samples=statistics.median(step.num_samples for step in steps),
        compute_s=statistics.median(step.compute_s for step in steps),
        wait_s=statistics.median(step.wait_s for step in steps),
        step_s=statistics.median(step.step_s for step in steps),
    )


def _staleness(run: RunEvents) -> tuple[float, float]:
    num_pushes = sum(server.num_pushes for server in run.servers)
    if num_pushes:
        total = sum(server.staleness_mean * server.num_pushes for server in run.servers)
        return total / num_pushes, max(server.staleness_max for server in run.servers)
    values = [step.staleness for step in run.steps]
    return statistics.fmean(values), max(values)
