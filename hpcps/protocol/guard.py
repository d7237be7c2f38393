"""The guard rail of a job: gathers what the workers log and the servers measure, and says at which level it runs.

Runs on the first server, beside the coordinator. What a level means is carried out by others:

    level   servers (policy.window)                       coordinator
    0       windows close at their deadline               as configured
    1       wait for all, a little over a slowest step    as configured
    2       wait for all                                  a group is at most two steps ahead of the slowest
    3       wait for all                                  all workers are one group, as in sync mode

The one group is formed at the next safe point (``protocol.regrouping``); a script that has none stays at what level 2
does. Without a logged loss only the agreement of gradients counts. Reads no clock, and decides nothing itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpcps.config import RunConfig
from hpcps.policy.guard import TOP_LEVEL, GuardFacts, GuardMemory, GuardRail
from hpcps.protocol.control import OrderRequest, ServerLoad
from hpcps.protocol.speeds import Report

__all__ = ["LOOK_STEPS", "Guard", "is_together", "ssp_bound"]

LOOK_STEPS = 10
"""Steps of the middle worker between two looks."""

STALE_STEPS = 3
"""Mean staleness in steps, that is in versions over the number of groups, that is worth a word: the default bound on
own steps under way is 2, and windows hold several groups."""

SSP_LEVEL, SSP_STEPS = 2, 2
"""From this level on no group is more steps than these ahead of the slowest one."""


class Guard:
    """Level of a job.

    Args:
        config: the run's settings.
        workers: world ranks of the workers.
        report: told of every change (``guard``), and once if gradients are very stale (``stale``).
    """

    def __init__(self, config: RunConfig, workers: Sequence[int], *, report: Report) -> None:
        self._config = config
        self._report = report
        self._policy = GuardRail(config.guard)
        self._memory = GuardMemory()
        self._steps = dict.fromkeys(workers, 0)
        self._next_look = LOOK_STEPS
        self._loads: dict[int, ServerLoad] = {}
        self._loss_sum = self._loss_weight = 0.0
        self._said_stale = False

    @property
    def level(self) -> int:
        """The level in force."""
        return self._memory.level

    def on_load(self, load: ServerLoad) -> None:
        """A server tells what it measured."""
        self._loads[load.server] = load

    def on_request(self, request: OrderRequest, *, num_groups: int) -> int | None:
        """A worker reports its finished steps.

        Args:
            request: with what the worker logged since its last one.
            num_groups: groups of the grouping in force.

        Returns:
            The new level where it changes, else None.
        """
        self._steps[request.rank] += request.num_samples > 0
        for name, total, weight in zip(request.logged, request.sums, request.weights, strict=True):
            if name == self._config.guard.loss_name:
                self._loss_sum += total
                self._loss_weight += weight
        if self._steps[request.rank] < self._next_look:
            return None
        step = statistics.median_low(self._steps.values())
        if step < self._next_look:
            return None
        self._next_look = step + LOOK_STEPS
        return self._look(step, num_groups)

    def _look(self, step: int, num_groups: int) -> int | None:
        before = self._memory.level
        facts = self._facts(step, num_groups)
        self._say_stale(facts)
        decision = self._policy.decide(facts, self._memory)
        self._memory = memory = decision.memory
        if decision.level == before:
            return None
        fields: dict[str, object] = {
            "step": step,
            "level": decision.level,
            "before": before,
            "loss": _finite(memory.smooth if memory.losses else math.nan),
            "best": _finite(memory.best),
            "agreement": _finite(facts.agreement),
            "staleness": facts.staleness,
            "late_frac": facts.late_frac,
            "reason": decision.reason,
        }
        self._report("guard", fields)
        return decision.level

    def _say_stale(self, facts: GuardFacts) -> None:
        """A hint that a learning rate that is fine in sync may be too large here; once a job."""
        if facts.staleness > STALE_STEPS * facts.num_groups and not self._said_stale:
            self._said_stale = True
            fields: dict[str, object] = {"step": facts.step, "staleness": facts.staleness, "groups": facts.num_groups}
            hint = "lower staleness.bound, set staleness.ssp, or use a smaller learning rate or momentum than in sync"
            self._report("stale", {**fields, "reason": f"gradients are {facts.staleness:.1f} versions old; {hint}"})

    def _facts(self, step: int, num_groups: int) -> GuardFacts:
        """What came since the last look; it is forgotten here."""
        loads, self._loads = list(self._loads.values()), {}
        loss = self._loss_sum / self._loss_weight if self._loss_weight > 0 else None
        self._loss_sum = self._loss_weight = 0.0
        num_pushes = max(1, sum(load.num_pushes for load in loads))
        compared = [load.agreement for load in loads if load.agreement < 1]
        return GuardFacts(
            mode=self._config.sync_mode,
            num_groups=num_groups,
            step=step,
            loss=loss,
            agreement=statistics.fmean(compared) if compared else None,
            staleness=sum(load.staleness * load.num_pushes for load in loads) / num_pushes,
            late_frac=sum(load.num_late for load in loads) / num_pushes,
        )


def ssp_bound(configured: int, level: int) -> int:
    """Steps that a group may be ahead of the slowest one at a level; 0: no bound."""
    if level < SSP_LEVEL:
        return configured
    return min(configured, SSP_STEPS) if configured else SSP_STEPS


def is_together(level: int) -> bool:
    """True where all workers are one group."""
    return level >= TOP_LEVEL


def _finite(value: float | None) -> float | None:
    """A number as an event may hold it."""
    return value if value is not None and math.isfinite(value) else None
