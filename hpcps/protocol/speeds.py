"""How fast each worker is: the line of its timed steps times the level of late, its link, its memory, its neighbours.

The facts stand apart: computing is the fit, the link and the memory are told beside it. Every report of every worker
comes through here, so a step costs a handful of floating-point operations; a line is fitted every
``capacity.interval_steps`` steps only, sooner after a change. Shares out nothing and reads no clock.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcps.config import CapacityConfig
from hpcps.errors import DataError
from hpcps.policy.capacity import RESHAPE_GAP_FRAC, CapacityFit, FitCapacity, TimedStep
from hpcps.policy.change_point import ChangeDecision, DetectChange, LevelMemory

__all__ = ["Report", "Speeds"]

Report = Callable[[str, dict[str, object]], None]
"""Called with the name and fields of every decision, for the log and the event file."""

KEPT_LINKS = 15
"""Steps whose median is the link's busy time: a codec's trial or a stall in seven of them does not show."""

KEPT_WAITS = 32
"""Reports of the processor kept: a change that begins slowly is some tens of steps old when it is found."""

SETTLED_STEPS = 8
"""Steps without an alarm after which the line is taken to hold at the size of the latest."""

RECENT = 5
"""Steps before an alarm that say what a step took then."""

OTHERS_USE_IT = 0.2
"""Part of the time spent waiting for a processor from which on a change is put down to others on it."""


@dataclass(slots=True)
class _Worker:
    """What is known of one worker."""

    history: deque[TimedStep]
    """Timed steps since the last change, oldest first."""
    due: int
    """Steps from the last fit to the next one."""
    fit: CapacityFit | None = None
    """The line; its own error is that of a single step."""
    level: LevelMemory = field(default_factory=LevelMemory)
    told: float = 0.0
    """Logarithm of the level that the shares were last made from."""
    least: float = math.inf
    """Smallest work at which the line was seen to hold."""
    most: float = 0.0
    """Largest likewise."""
    num_steps: int = 0
    since_fit: int = 0
    link_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LINKS))
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_WAITS))
    max_samples: int = 0

    @property
    def measured(self) -> bool:
        return self.fit is not None and self.fit.num_steps > 0


class Speeds:
    """Curves of all workers.

    Args:
        config: how speed is measured.
        workers: world ranks of the workers, ascending.
        report: told of every change point.

    Raises:
        DataError: priors are given, but not one a worker.
    """

    def __init__(self, config: CapacityConfig, workers: Sequence[int], *, report: Report) -> None:
        self._config = config
        self._report = report
        self._fit = FitCapacity(config)
        self._detect = DetectChange(config)
        kept = max(config.history_steps, config.warmup_steps)
        self._workers = {rank: _Worker(history=deque(maxlen=kept), due=config.warmup_steps) for rank in workers}
        self._unmeasured = set(self._workers)
        self._spread = math.sqrt(2 * math.log(len(self._workers)))
        self._take_priors()

    @property
    def known(self) -> bool:
        """True once there is a curve of every worker, given or measured."""
        return bool(self._config.prior) or self.measured

    @property
    def measured(self) -> bool:
        """True once every worker's curve was measured."""
        return not self._unmeasured

    @property
    def fits(self) -> list[CapacityFit]:
        """The curves in rank order, times the present level; of known workers only.

        ``error_frac`` is what the level may be off by. A speed given by hand counts until it is measured; where others
        are measured, it is taken in their units.
        """
        unit = self._prior_unit()
        return [_present(worker, unit) for worker in self._workers.values() if worker.fit is not None]

    def fits_in(self, groups: Sequence[Sequence[int]]) -> list[CapacityFit]:
        """The curves, with the exchange that a group waits for, and others do not, among its members' fixed seconds.

        Args:
            groups: world ranks of the members of each group; with less than two, or while a link is unknown, the
                curves are of computing alone.
        """
        links, fits = self.link_s, self.fits
        if len(groups) < 2 or len(links) < len(self._workers):
            return fits
        waits = {rank: max(links[each] for each in group) for group in groups for rank in group}
        shared = min(waits.values())
        return [
            dataclasses.replace(fit, fixed_s=fit.fixed_s + waits[rank] - shared)
            for rank, fit in zip(self._workers, fits, strict=True)
        ]

    def described(self) -> dict[str, object]:
        """Fields of a ``capacity`` event: curves of computing, what they may be off by, and each link (0: unknown)."""
        fits, links = self.fits, self.link_s
        return {
            "workers": list(self._workers),
            "fixed_s": [fit.fixed_s for fit in fits],
            "per_sample_s": [fit.per_sample_s for fit in fits],
            "error_frac": [fit.error_frac for fit in fits],
            "link_s": [links.get(rank, 0.0) for rank in self._workers],
        }

    @property
    def noise_frac(self) -> float:
        """How far measured curves may be off: smaller gains than this are not to be believed.

        The slowest of n equal workers looks slower by about sqrt(2 ln n) standard errors, whatever its speed. The error
        falls with the steps behind a level.
        """
        worst = max((worker.level.error_frac for worker in self._workers.values() if worker.measured), default=0.0)
        return worst * self._spread

    @property
    def link_s(self) -> dict[int, float]:
        """Seconds of a step for which each worker's own link is busy, a running median; of known links only."""
        return {rank: statistics.median(worker.link_s) for rank, worker in self._workers.items() if worker.link_s}

    @property
    def max_samples(self) -> dict[int, int]:
        """Samples that each worker's memory was found to hold; of known ones only."""
        return {rank: worker.max_samples for rank, worker in self._workers.items() if worker.max_samples}

    def take(
        self,
        rank: int,
        steps: Sequence[TimedStep],
        *,
        link_s: Sequence[float] = (),
        cpu_wait_frac: float = 0.0,
        max_samples: int = 0,
    ) -> bool:
        """Take in what a worker reports.

        Args:
            rank: world rank of the worker.
            steps: its finished steps.
            link_s: seconds for which its own link was busy in each, empty: unknown.
            cpu_wait_frac: part of the time in which it waited for a processor, 0 to 1.
            max_samples: samples that its memory holds, 0: unknown.

        Returns:
            True if the shares are to be looked at again: a new line, a change, a level that moved since the last time
            by more than half the dead band and more than its noise explains, one that is known better where noise hid
            gains, or another cap. Nothing else is worth a partition.
        """
        worker = self._workers[rank]
        worker.link_s.extend(link_s)
        if steps:
            worker.waits.append(cpu_wait_frac)
        moved = max_samples not in (0, worker.max_samples)
        worker.max_samples = max_samples or worker.max_samples
        for step in steps:
            worker.num_steps += 1
            if worker.num_steps > self._config.drop_steps and (self._config.follow or not worker.measured):
                moved |= self._step(rank, worker, step)
        if moved:
            for each in self._workers.values():
                each.told = each.level.level
        return moved

    def restart_units(self, steps: Mapping[int, Sequence[TimedStep]]) -> None:
        """The unit of work is another now: put the same steps in their new unit in place of those known so far.

        A mean sample is one unit before and after, so a line that cannot be fitted anew stays nearly right; so does one
        that is to stay.

        Args:
            steps: the last steps of each worker, oldest first; those since its last change count.
        """
        for rank, worker in self._workers.items():
            if not self._config.follow and rank not in self._unmeasured:
                continue
            since = list(steps[rank])[-len(worker.history) :] if worker.history else []
            worker.history.clear()
            worker.history.extend(since)
            line = self._fit.decide(since, prior=worker.fit)
            if line is not None:
                self._unmeasured.discard(rank)
                worker.level = LevelMemory.of_fit([each.seconds / line.seconds(each.work) for each in since])
                self._adopt(worker, line, due=self._config.warmup_steps)

    def _step(self, rank: int, worker: _Worker, step: TimedStep) -> bool:
        """Take in one step; True if its curve is another now."""
        worker.history.append(step)
        worker.since_fit += 1
        fit = worker.fit
        if fit is None or fit.num_steps == 0:
            return self._first(rank, worker)
        before = worker.level
        decision = self._detect.decide(step.seconds / fit.seconds(step.work), worker.level)
        worker.level = decision.memory
        if decision.changed:
            self._change(rank, worker, decision)
            return True
        if not worker.level.doubtful:
            if worker.level.num_steps >= SETTLED_STEPS:
                worker.least, worker.most = min(worker.least, step.work), max(worker.most, step.work)
            if worker.since_fit >= worker.due and self._refit(worker, fit):
                return True
        if worker.level.num_steps.bit_length() > before.num_steps.bit_length() and self._hides_gains(before):
            return True
        moved = abs(worker.level.level - worker.told)
        return moved > max(self._config.dead_band_frac / 2, worker.level.error_frac * self._spread)

    def _hides_gains(self, level: LevelMemory) -> bool:
        """True where a level was known so badly that gains above the dead band had to be passed over."""
        return level.error_frac * self._spread > self._config.dead_band_frac

    def _refit(self, worker: _Worker, fit: CapacityFit) -> bool:
        """A new line through the steps since the last change, if they are enough; the next one is due later."""
        line = self._fit.decide(list(worker.history), prior=fit)
        if line is None:
            return False
        last = worker.history[-1]
        worker.level = worker.level.after_refit(
            num_steps=len(worker.history), last_ratio=last.seconds / line.seconds(last.work)
        )
        self._adopt(worker, line, due=2 * worker.due)
        return True

    def _change(self, rank: int, worker: _Worker, decision: ChangeDecision) -> None:
        """The steps since the change are all that counts; where only the size of steps changed, the line was wrong."""
        steps = list(worker.history)
        begin = max(0, len(steps) - decision.num_steps)
        if self._was_wrong(worker, steps, begin):
            return
        if decision.notable:
            waits = list(worker.waits)[-decision.num_steps :]
            wait = statistics.fmean(waits) if waits else 0.0
            why = "; others use its processor" if decision.ratio > 1 and wait > OTHERS_USE_IT else ""
            fields = {"worker": rank, "ratio": decision.ratio, "cpu_wait_frac": wait, "steps": decision.num_steps}
            self._report("change", {**fields, "reason": decision.reason + why})
        worker.history.clear()
        worker.history.extend(steps[begin:])
        worker.since_fit = 0
        if decision.notable:
            worker.least = worker.most = steps[-1].work
        worker.due = min(self._config.warmup_steps, self._config.interval_steps)

    def _was_wrong(self, worker: _Worker, steps: list[TimedStep], begin: int) -> bool:
        """Where an alarm came with another size of steps, take the line through both sizes, if there is one.

        At a size that the line was seen to hold at, the pace changed; but then that is doubted from now on, so that a
        wrong line cannot send a worker to and fro between two sizes.

        Args:
            worker: whose steps they are.
            steps: the steps that are kept.
            begin: the first of them since the alarm's change.
        """
        if begin == 0:
            return False
        new = _median_step(steps[begin:])
        line = self._fit.bridge(_median_step(steps[:begin][-RECENT:]), new, tolerance_frac=2 * worker.level.sigma)
        if line is None:
            return False
        held = worker.least * (1 - RESHAPE_GAP_FRAC) < new.work < worker.most / (1 - RESHAPE_GAP_FRAC)
        worker.least = worker.most = new.work
        if held:
            return False
        last = steps[-1]
        worker.level = worker.level.after_refit(
            num_steps=len(steps) - begin, last_ratio=last.seconds / line.seconds(last.work)
        )
        self._adopt(worker, line, due=self._config.warmup_steps)
        return True

    def _first(self, rank: int, worker: _Worker) -> bool:
        """The first line of a worker, once there are steps enough; True if there is one."""
        steps = list(worker.history)
        line = self._fit.decide(steps)
        if line is None:
            return False
        self._unmeasured.discard(rank)
        worker.level = LevelMemory.of_fit([step.seconds / line.seconds(step.work) for step in steps])
        worker.least, worker.most = min(step.work for step in steps), max(step.work for step in steps)
        self._adopt(worker, line, due=self._config.warmup_steps)
        return True

    def _adopt(self, worker: _Worker, fit: CapacityFit, *, due: int) -> None:
        worker.fit = fit
        worker.since_fit = 0
        worker.due = min(due, self._config.interval_steps)

    def _prior_unit(self) -> float:
        """Seconds of a sample for a worker whose given speed is 1: the median over those that are measured, or 1."""
        speeds = dict(zip(self._workers, self._config.prior, strict=False))
        costs = [
            worker.fit.per_sample_s * math.exp(worker.level.level) * speeds[rank]
            for rank, worker in self._workers.items()
            if rank in speeds and worker.fit is not None and worker.fit.num_steps > 0
        ]
        return statistics.median(costs) if costs else 1.0

    def _take_priors(self) -> None:
        prior = self._config.prior
        if prior and len(prior) != len(self._workers):
            raise DataError(
                f"cannot use capacity.prior: got {len(prior)} speeds, need {len(self._workers)} (one a worker);"
                " give one speed for each worker in rank order"
            )
        for worker, speed in zip(self._workers.values(), prior, strict=False):
            worker.fit = CapacityFit(
                fixed_s=0.0, per_sample_s=1 / speed, error_frac=1.0, num_steps=0, reason="given as prior"
            )


def _present(worker: _Worker, unit: float) -> CapacityFit:
    """A worker's line times its level; a speed given by hand in the unit of those that are measured."""
    fit = worker.fit
    assert fit is not None
    if fit.num_steps == 0:
        return fit.scaled(unit, error_frac=fit.error_frac, reason=fit.reason)
    ratio = math.exp(worker.level.level)
    reason = f"{fit.reason}; now {ratio:.3f} times that, by {worker.level.num_steps} steps"
    return fit.scaled(ratio, error_frac=worker.level.error_frac, reason=reason)


def _median_step(steps: Sequence[TimedStep]) -> TimedStep:
    """A step of median work and median seconds."""
    return TimedStep(
        work=statistics.median(step.work for step in steps), seconds=statistics.median(step.seconds for step in steps)
    )
