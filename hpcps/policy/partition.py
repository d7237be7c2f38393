"""How many samples each worker gets so that all finish together.

Exact integers, not rounded proportions: the result minimises the largest predicted step time.
This module measures nothing and moves no data.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpcps.config import PartitionConfig
from hpcps.errors import ConfigError, PlanError
from hpcps.policy.capacity import CapacityFit
from hpcps.units import format_seconds

__all__ = ["Partition", "Shares", "equal_shares", "least_cap", "upper_bounds", "warmup_shares"]

Ints = npt.NDArray[np.int64]

MAX_HALVINGS = 1200
"""Upper bound on halvings of the time interval: more than a double has distinct powers and bits."""

WARMUP_SWING = 4
"""A warm-up share differs from the equal share by this fraction of it: 0.75 and 1.25 of equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Samples of each worker.

    Args:
        counts: samples, in the order of the fits.
        finish_s: when the last worker is predicted to finish.
        best_s: the same of the best split within the bounds, where the present one was kept.
        equal_s: the same of equal shares.
        reason: why these.
    """

    counts: tuple[int, ...]
    finish_s: float
    best_s: float
    equal_s: float
    reason: str

    @property
    def speedup(self) -> float:
        """S*: finish time of the equal split over that of the best one; 1 where there is nothing to do."""
        return self.equal_s / self.best_s if self.best_s > 0 else 1.0


class Partition:
    """Split a batch over workers so that the slowest finishes as early as possible.

    Args:
        config: least and greatest share.
        dead_band_frac: a gain below this part of the present finish time leaves the shares as they are.
    """

    def __init__(self, config: PartitionConfig, dead_band_frac: float) -> None:
        if not 0 <= dead_band_frac < 1:
            raise ConfigError(
                f"cannot accept capacity.dead_band_frac: got {dead_band_frac}, need 0 to below 1; try 0.05"
            )
        self._config = config
        self._dead_band_frac = dead_band_frac

    def decide(
        self,
        fits: Sequence[CapacityFit],
        total: int,
        *,
        current: Sequence[int] | None = None,
        caps: Sequence[int] = (),
    ) -> Shares:
        """Choose the shares. Equal workers get equal shares within 1, the lower index the larger.

        Args:
            fits: cost of a step for each worker.
            total: samples to place, 0 or more.
            current: shares in use, one a worker, with the same sum; kept within the dead band.
            caps: samples that each worker holds, 0: no cap of its own; empty: none has. ``partition.max_share`` holds
                besides.

        Returns:
            Shares in the order of fits; they sum to total.

        Raises:
            PlanError: no worker, the caps hold fewer samples than asked, or caps or current do not fit.
        """
        _check_request(total, len(fits))
        high = upper_bounds(total, len(fits), max_share=self._config.max_share, caps=caps)
        low, note = self._lower_bounds(total, high)
        counts = _min_max(fits, total, low=low, high=high)
        best_s = _finish_s(fits, counts)
        equal_s = _finish_s(fits, equal_shares(total, len(fits)))
        times = {"best_s": best_s, "equal_s": equal_s}
        reason = f"finish in {format_seconds(best_s)}, equal shares in {format_seconds(equal_s)}{note}"
        if current is None:
            return Shares(counts=counts, finish_s=best_s, reason=reason, **times)
        _check_current(current, total, len(fits))
        now_s = _finish_s(fits, current)
        gain = 1.0 - best_s / now_s if now_s > 0 else 0.0
        legal = all(least <= count <= most for least, count, most in zip(low, current, high, strict=True))
        if legal and (gain <= 0 or gain < self._dead_band_frac):
            kept = f"shares kept: a change would gain {gain:.1%}, dead band {self._dead_band_frac:.1%}{note}"
            return Shares(counts=tuple(current), finish_s=now_s, reason=kept, **times)
        why = f"gain {gain:.1%} over the present shares" if legal else "present shares leave the bounds"
        return Shares(counts=counts, finish_s=best_s, reason=f"{reason}; {why}", **times)

    def _lower_bounds(self, total: int, high: Sequence[int]) -> tuple[list[int], str]:
        """Least share of each worker, and a note where the minimum had to fall for all."""
        wanted = self._config.min_share
        low = [min(wanted, most) for most in high]
        if sum(low) <= total:
            return low, ""
        possible = total // len(high)
        note = f"; minimum lowered from {wanted} to {possible}: {total} samples, {len(high)} workers"
        return [min(possible, most) for most in high], note


def upper_bounds(total: int, num_workers: int, *, max_share: int = 0, caps: Sequence[int] = ()) -> list[int]:
    """Greatest share of each worker: the smaller of the cap for all and its own, or all samples.

    Raises:
        PlanError: not one cap a worker, or they hold fewer samples than asked.
    """
    if caps and len(caps) != num_workers:
        raise PlanError(
            f"cannot use caps of shares: got {len(caps)}, need {num_workers} (one a worker); give one number for each"
            " worker in rank order, 0 where it has no cap of its own"
        )
    own = caps or [0] * num_workers
    high = [least_cap(max_share, each) or total for each in own]
    if sum(high) < total:
        listed = ", ".join(str(most) for most in high[:8]) + (", ..." if len(high) > 8 else "")
        raise PlanError(
            f"cannot place {total} samples on {num_workers} workers: caps of"
            f" {high[0] if len(set(high)) == 1 else listed} samples hold {sum(high)}, need {total};"
            f" raise partition.max_share{' or partition.caps' if caps else ''} or lower the global batch"
        )
    return high


def least_cap(*caps: int) -> int:
    """The smallest of some caps of samples, 0: no cap."""
    return min((cap for cap in caps if cap), default=0)


def equal_shares(total: int, num_workers: int) -> tuple[int, ...]:
    """Split evenly; the first workers take one more where the split is not even.

    Raises:
        PlanError: no worker, or a negative total.
    """
    _check_request(total, num_workers)
    share, rest = divmod(total, num_workers)
    return tuple(share + (worker < rest) for worker in range(num_workers))


def warmup_shares(
    total: int, num_workers: int, step: int, *, max_share: int = 0, caps: Sequence[int] = ()
) -> tuple[int, ...]:
    """Shares of a warm-up step: near equal, but every worker sees clearly different sizes over steps.

    Neighbours swap a quarter of their share, so that the sum stays. An odd worker at the end makes
    a team of three, in which up, down and even go round:

        step    0      1      2          workers 0 and 1 are a pair, 2, 3 and 4 a team of three
        up      0, 2   1, 3   0, 4
        down    1, 3   0, 4   1, 2
        even    4      2      3

    A cap limits the swing of the one that goes up; at its cap a worker swings down only.
    With less than two samples a worker there is nothing to swap; then the places of the larger
    shares go round. Below one sample a worker, some get none.

    Args:
        total: samples to place, 0 or more.
        num_workers: at least 1.
        step: number of the step, counted from 0.
        max_share: samples that a worker gets at most; 0: no cap.
        caps: samples that each worker holds, 0: no cap of its own; empty: none has. The others take what is over.

    Raises:
        PlanError: no worker, a negative total, or caps that hold too few or are not one a worker.
    """
    _check_request(total, num_workers)
    high = upper_bounds(total, num_workers, max_share=max_share, caps=caps)
    alike = [CapacityFit(fixed_s=0.0, per_sample_s=1.0)] * num_workers
    counts = list(_min_max(alike, total, low=[0] * num_workers, high=high))
    if num_workers == 1:
        return tuple(counts)
    if total < 2 * num_workers:
        turn = step % num_workers
        turned = counts[turn:] + counts[:turn]
        return tuple(turned if all(n <= most for n, most in zip(turned, high, strict=True)) else counts)
    for first in range(0, num_workers - 1, 2):
        team = num_workers - first if num_workers - first == 3 else 2
        members = counts[first : first + team]
        up, down = first + step % team, first + (step + 1) % team
        swing = min(max(1, round(min(members) / WARMUP_SWING)), high[up] - counts[up], counts[down])
        counts[up] += swing
        counts[down] -= swing
        if team == 3:
            break
    return tuple(counts)


def _check_request(total: int, num_workers: int) -> None:
    if num_workers < 1 or total < 0:
        raise PlanError(
            f"cannot split a batch: got {total} samples and {num_workers} workers, need 0 or more samples"
            " and at least 1 worker; add a worker or correct the batch"
        )


def _check_current(current: Sequence[int], total: int, num_workers: int) -> None:
    if len(current) != num_workers or sum(current) != total or min(current) < 0:
        raise PlanError(
            f"cannot compare with the present shares: got {len(current)} shares with sum {sum(current)},"
            f" need {num_workers} shares of 0 or more with sum {total}; pass the shares of this batch or none"
        )


def _finish_s(fits: Sequence[CapacityFit], counts: Sequence[int]) -> float:
    """Predicted time of the slowest worker."""
    return max(fit.seconds(count) for fit, count in zip(fits, counts, strict=True))


def _min_max(fits: Sequence[CapacityFit], total: int, *, low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
    """Integers within low..high of each worker with the sum total and the least greatest time.

    Halve the time interval until the samples that fit in the lower time fall short by at most one
    a worker, then hand out the rest one by one, always where it finishes first. The lower time is
    never above the optimum, so the start lies below an optimal split, and the last part is exact.
    """
    fixed = np.array([fit.fixed_s for fit in fits], dtype=np.float64)
    per = np.array([fit.per_sample_s for fit in fits], dtype=np.float64)
    least, most = np.array(low, dtype=np.int64), np.array(high, dtype=np.int64)
    low_s, high_s = 0.0, float(np.max(fixed + per * most))
    counts = least
    for _ in range(MAX_HALVINGS):
        middle_s = low_s + (high_s - low_s) / 2
        if total - int(counts.sum()) <= len(fits) or not low_s < middle_s < high_s:
            break
        tried = _counts_within(middle_s, fixed, per, low=least, high=most)
        if int(tried.sum()) <= total:
            low_s, counts = middle_s, tried
        else:
            high_s = middle_s
    return _hand_out(fits, counts.tolist(), total, high=high)


def _counts_within(
    limit_s: float, fixed: npt.NDArray[np.float64], per: npt.NDArray[np.float64], *, low: Ints, high: Ints
) -> Ints:
    """Most samples of each worker that end by limit_s, never below low; rounding errs to fewer."""
    with np.errstate(over="ignore"):
        counts = np.clip(np.floor((limit_s - fixed) / per), low, high)
    counts -= fixed + per * counts > limit_s
    within: Ints = np.maximum(counts, low).astype(np.int64)
    return within


def _hand_out(fits: Sequence[CapacityFit], counts: list[int], total: int, *, high: Sequence[int]) -> tuple[int, ...]:
    """Give the rest of the samples, each to the worker that would finish it first.

    Ties go by the fit, then to the smaller share, then to the greater cap, then to the lower index: the plan does not
    depend on the order of the workers, and equal workers stay within 1.
    """

    def entry(worker: int) -> tuple[float, float, float, int, int, int]:
        fit, count = fits[worker], counts[worker]
        return fit.seconds(count + 1), fit.per_sample_s, fit.fixed_s, count, -high[worker], worker

    heap = [entry(worker) for worker in range(len(fits)) if counts[worker] < high[worker]]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        worker = heap[0][-1]
        counts[worker] += 1
        if counts[worker] < high[worker]:
            heapq.heapreplace(heap, entry(worker))
        else:
            heapq.heappop(heap)
    return tuple(counts)
