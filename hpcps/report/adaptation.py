"""How well a run followed speeds that changed: the ideal it had, and how soon its shares fitted again.

The speeds are the stated ones of emulated devices, as the run's settings name them. Reads events only.

The ideal of a run whose speeds change is a ratio of times: what its steps take with equal shares over what they take
with the best ones. A phase in which balancing brings little thus counts by the time that it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcps.config import SpeedChange
from hpcps.errors import ConfigError, DataError
from hpcps.report.events import RunEvents

__all__ = ["Phase", "moving_s_star", "phases_of", "run_seconds", "steps_until_balanced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps in which no speed changes.

    Args:
        first_step: the first of them, from 1.
        num_steps: how many, at least 1.
        speeds: relative speed of each worker, above 0.
    """

    first_step: int
    num_steps: int
    speeds: tuple[float, ...]


def phases_of(speeds: Sequence[float], changes: Sequence[SpeedChange], *, num_steps: int) -> tuple[Phase, ...]:
    """Cut a run at the steps at which a worker's speed changes.

    Args:
        speeds: of each worker at first.
        changes: the script; those of servers are passed over.
        num_steps: steps of the whole run, at least 1.
    """
    now = list(speeds)
    starts: dict[int, tuple[float, ...]] = {1: tuple(now)}
    for change in sorted(changes, key=lambda change: change.step):
        if not change.is_server and change.step <= num_steps:
            now[change.index] = change.speed
            starts[max(1, change.step)] = tuple(now)
    firsts = sorted(starts)
    ends = [*firsts[1:], num_steps + 1]
    return tuple(
        Phase(first_step=first, num_steps=end - first, speeds=starts[first])
        for first, end in zip(firsts, ends, strict=True)
    )


def moving_s_star(phases: Sequence[Phase]) -> float:
    """Ideal speed-up of a whole run: time with equal shares over time with the best ones, summed over its steps.

    Raises:
        ConfigError: there is no phase, or a speed is not above 0.
    """
    if not phases or not all(phase.speeds and min(phase.speeds) > 0 for phase in phases):
        raise ConfigError(
            f"cannot compute S*: got phases {tuple(phases)}, need some with positive speeds; write for example 3:2:1:1"
        )
    equal = sum(phase.num_steps / len(phase.speeds) / min(phase.speeds) for phase in phases)
    best = sum(phase.num_steps / sum(phase.speeds) for phase in phases)
    return equal / best


def run_seconds(run: RunEvents) -> float:
    """Seconds from the first batch of any worker to the end of the last step; what comes before is no training.

    Raises:
        DataError: the run has no step.
    """
    if not run.steps:
        raise DataError(f"cannot time run {str(run.folder)!r}: got no worker step, need some; train for more steps")
    begin_s = min(step.t_s - step.compute_s - step.wait_s for step in run.steps)
    return max(step.t_s for step in run.steps) - begin_s


def steps_until_balanced(run: RunEvents, phase: Phase, *, within_frac: float = 0.1, hold_steps: int = 20) -> int | None:
    """Steps of a phase until the shares fit its speeds, in a run in which all workers step together.

    They fit from the first step on whose slowest worker is within ``within_frac`` of the best time, by the stated
    speeds and the samples that each worker really had, if that is so for ``hold_steps`` steps or to the phase's end.

    Args:
        run: events of a sync run.
        phase: the steps to look at.
        within_frac: how much longer than at best a step may take.
        hold_steps: steps for which it has to stay so, at least 1.

    Returns: steps before the first that fits, 0 if that is the first of the phase; None: the shares never fit.
    """
    ranks = sorted({step.rank for step in run.steps})
    speeds = dict(zip(ranks, phase.speeds, strict=True))
    counts: dict[int, dict[int, int]] = {}
    for step in run.steps:
        counts.setdefault(step.step, {})[step.rank] = step.num_samples
    last = phase.first_step + phase.num_steps - 1
    fitting = 0
    for number in range(phase.first_step, last + 1):
        fits = _excess_frac(counts.get(number, {}), speeds) <= within_frac
        fitting = fitting + 1 if fits else 0
        if fitting == hold_steps:
            return number - hold_steps + 1 - phase.first_step
    return last - fitting + 1 - phase.first_step if fitting else None


def _excess_frac(counts: dict[int, int], speeds: dict[int, float]) -> float:
    """How much longer than at best a step takes."""
    total = sum(counts.values())
    if not total:
        return float("inf")
    slowest = max(count / speeds[rank] for rank, count in counts.items())
    return slowest * sum(speeds.values()) / total - 1
