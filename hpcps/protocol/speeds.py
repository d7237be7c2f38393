"""How fast each worker is: its timed steps, the curve fitted to them, and when to believe a change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hpcps.config import CapacityConfig
from hpcps.errors import DataError
from hpcps.policy.capacity import CapacityFit, DetectChange, FitCapacity, TimedStep

__all__ = ["Report", "Speeds"]

Report = Callable[[str, dict[str, object]], None]
"""Called with the name and fields of every decision, for the log and the event file."""


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
        self._workers = tuple(workers)
        self._report = report
        self._fit = FitCapacity(config)
        self._detect = DetectChange(config)
        kept = max(config.history_steps, config.warmup_steps)
        self._history: dict[int, deque[TimedStep]] = {rank: deque(maxlen=kept) for rank in workers}
        self._num_steps = dict.fromkeys(workers, 0)
        self._since_refit = dict.fromkeys(workers, 0)
        self._due = dict.fromkeys(workers, config.interval_steps)
        self._fits: dict[int, CapacityFit] = self._priors()

    @property
    def known(self) -> bool:
        """True once there is a curve of every worker, given or measured."""
        return len(self._fits) == len(self._workers)

    @property
    def measured(self) -> bool:
        """True once every worker's curve was measured."""
        return self.known and all(fit.num_steps > 0 for fit in self._fits.values())

    @property
    def fits(self) -> list[CapacityFit]:
        """The curves in rank order; of known workers only."""
        return [self._fits[rank] for rank in self._workers if rank in self._fits]

    @property
    def by_rank(self) -> dict[int, float]:
        """Samples a second of each worker."""
        return {rank: fit.speed for rank, fit in sorted(self._fits.items())}

    @property
    def noise_frac(self) -> float:
        """How far measured curves may be off: smaller gains than this are not to be believed."""
        return 2 * max((fit.error_frac for fit in self._fits.values() if fit.num_steps > 0), default=0.0)

    def take(self, rank: int, steps: Sequence[TimedStep]) -> bool:
        """Take in a worker's finished steps; True if its curve is another now."""
        for step in steps:
            self._num_steps[rank] += 1
            if self._num_steps[rank] > self._config.drop_steps:
                self._history[rank].append(step)
                self._since_refit[rank] += 1
        return bool(steps) and self._refit(rank)

    def _refit(self, rank: int) -> bool:
        steps = list(self._history[rank])
        known = self._fits.get(rank)
        if known is None or known.num_steps == 0:
            fit = self._fit.decide(steps)
            return fit is not None and self._adopt(rank, fit, self._config.interval_steps)
        since = steps[max(0, len(steps) - self._since_refit[rank]) :]
        change = self._detect.decide(known, since)
        if change.changed and max(change.ratio, 1 / change.ratio) - 1 > 2 * known.error_frac:
            self._report("change", {"rank": rank, "ratio": change.ratio, "reason": change.reason})
            self._history[rank].clear()
            fit = _rescaled(known, change.ratio, f"rescaled at a change point: {change.reason}")
            return self._adopt(rank, fit, self._config.warmup_steps)
        if self._since_refit[rank] < self._due[rank]:
            return False
        return self._adopt(rank, self._fit.decide(steps, prior=known) or known, self._config.interval_steps)

    def _adopt(self, rank: int, fit: CapacityFit, due: int) -> bool:
        self._fits[rank] = fit
        self._since_refit[rank] = 0
        self._due[rank] = due
        return True

    def _priors(self) -> dict[int, CapacityFit]:
        prior = self._config.prior
        if prior and len(prior) != len(self._workers):
            raise DataError(
                f"cannot use capacity.prior: got {len(prior)} speeds, need {len(self._workers)} (one a worker);"
                " give one speed for each worker in rank order"
            )
        return {
            rank: CapacityFit(fixed_s=0.0, per_sample_s=1 / speed, error_frac=1.0, num_steps=0, reason="given as prior")
            for rank, speed in zip(self._workers, prior, strict=False)
        }


def _rescaled(fit: CapacityFit, ratio: float, reason: str) -> CapacityFit:
    """The same curve for a device that became slower or faster by a factor."""
    return CapacityFit(
        fixed_s=fit.fixed_s * ratio,
        per_sample_s=fit.per_sample_s * ratio,
        error_frac=fit.error_frac,
        num_steps=fit.num_steps,
        reason=reason,
    )
