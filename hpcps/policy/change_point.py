"""The pace of a worker beside its fitted line: a level that follows it, and the notice that it changed.

Every step gives the logarithm of measured over predicted seconds. Its running mean since the last change is the level;
a two-sided CUSUM (Page 1954) of the steps against the level says when the level is another one. This module fits no
line, keeps no step and reads no clock: what it must remember goes in and out as a frozen value, a few numbers a worker.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpcps.config import CapacityConfig

__all__ = ["ChangeDecision", "DetectChange", "LevelMemory"]

ALLOWANCE = 1.25
"""k of the CUSUM, in standard deviations of a step: half the shift that is found soonest. At 10 % noise that is the
shift to 1.3 times the seconds, ln 1.3 / 0.1 = 2.6; smaller shifts are left to the running level."""

THRESHOLD = 8.0
"""h of the CUSUM. Siegmund's approximation (Sequential Analysis, 1985, eq. 2.57), b = h + 1.166: a false alarm every
(exp(2 k b) - 2 k b - 1) / (2 k^2) = 3e9 steps a side, and 1e6 still where the noise was taken for a fifth too small."""

CLIP = 3.25
"""Largest part of one step, in standard deviations: four steps of any size reach the threshold, 4 (3.25 - 1.25) = 8.
With 1 % of steps stalled, four in a row come every 1e8 steps."""

AGREE = 2.0
"""Three steps in a row beyond CLIP are a change already where they lie this close together: a device that became twice
as slow looks so, three stalls seldom do. Simulated, 2,000 runs of 10,000 steps at 10 % noise: no false alarm without
stalls; with 1 % of steps 3 to 10 times as long one every 4e6 steps, four of five by this rule."""

NOISE_FLOOR = 0.02
"""Least standard deviation of a step that is believed: a shift that the dead band lets through is twice that."""

LEVEL_STEPS = 32
"""Steps that the level is the mean of at most: at 10 % noise it is known to 1.8 %, within the dead band of 5 %."""

NOISE_STEPS = 100
"""Steps that the noise is the mean of at most: known to 6 % then, 17 % after the warm-up."""

STALL = 3.5
"""A difference of neighbouring steps counts towards the noise up to this many times the mean one."""

LONGEST_RUN = 64
"""Steps of a run that are kept for its median."""

SIGMA_OF_DIFFERENCE = math.sqrt(math.pi) / 2
"""Standard deviation over the mean distance of two normal numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelMemory:
    """What is known of a worker's pace.

    Args:
        level: logarithm of measured over predicted seconds, 0 right after a fit.
        num_steps: steps behind it since the last change, at most 32.
        noise_frac: standard deviation of a step, as found from differences of neighbours, without the floor.
        num_differences: how many of them were seen.
        last: logarithm of the latest step.
        up: CUSUM of steps that are slower than the level.
        down: CUSUM of steps that are faster.
        slower: logarithms of the steps since ``up`` left zero, latest last.
        faster: likewise for ``down``.
        waiting: sum of the clipped distances that go into the level when both sums are zero again.
        num_waiting: how many steps that is.
    """

    level: float = 0.0
    num_steps: int = 0
    noise_frac: float = 0.0
    num_differences: int = 0
    last: float = 0.0
    up: float = 0.0
    down: float = 0.0
    slower: tuple[float, ...] = ()
    faster: tuple[float, ...] = ()
    waiting: float = 0.0
    num_waiting: int = 0

    @property
    def sigma(self) -> float:
        """Standard deviation of a step to judge by: one standard error above the estimate, not below the floor."""
        known = math.sqrt(min(max(self.num_differences, 1), NOISE_STEPS))
        return max(self.noise_frac * (1 + 1 / known), NOISE_FLOOR)

    @property
    def error_frac(self) -> float:
        """Standard error of the level."""
        return self.sigma / math.sqrt(max(self.num_steps, 1))

    @property
    def doubtful(self) -> bool:
        """True while there is evidence for a change, however little: a fit now would mix steps before and after it."""
        return self.up > 0 or self.down > 0

    @classmethod
    def of_fit(cls, ratios: Sequence[float]) -> LevelMemory:
        """What the steps behind a first fit say of the noise; the level is the fit's own.

        Args:
            ratios: measured over predicted seconds of those steps, in their order, above 0.
        """
        logs = [math.log(ratio) for ratio in ratios]
        gaps = [abs(after - before) for before, after in itertools.pairwise(logs)] or [0.0]
        most = STALL * max(statistics.median(gaps), NOISE_FLOOR / 2)
        return cls(
            num_steps=min(len(logs), LEVEL_STEPS),
            noise_frac=SIGMA_OF_DIFFERENCE * statistics.fmean(min(gap, most) for gap in gaps),
            num_differences=len(gaps),
            last=logs[-1],
        )

    def after_refit(self, *, num_steps: int, last_ratio: float) -> LevelMemory:
        """The same noise beside a new line, which the level starts from.

        Args:
            num_steps: steps behind the new line.
            last_ratio: measured over predicted seconds of the latest of them, above 0.
        """
        return LevelMemory(
            num_steps=min(num_steps, LEVEL_STEPS),
            noise_frac=self.noise_frac,
            num_differences=self.num_differences,
            last=math.log(last_ratio),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeDecision:
    """What a step says of a worker's pace.

    Args:
        changed: the pace is another one from now on.
        notable: it is off by more than ``capacity.change_frac``, so a user should hear of it.
        ratio: new over old seconds of a step where it changed, above 1: slower; else 1.
        num_steps: steps since the change began; 0 without one.
        memory: to be handed in with the next step.
        reason: the evidence.
    """

    changed: bool
    notable: bool
    ratio: float
    num_steps: int
    memory: LevelMemory
    reason: str


class DetectChange:
    """Follow a worker's level and notice when it jumps.

    No single step moves the level by more than ``CLIP`` standard deviations over the number of steps behind it, and
    none can trip the test. While a sum is above zero the level waits, or it would run after a change and hide it. A
    step costs some microseconds and no array.

    Source: E. S. Page, Biometrika 41 (1954); the quick rule beside it: J. M. Lucas, J. Quality Technology 14 (1982).
    """

    def __init__(self, config: CapacityConfig) -> None:
        self._limit = math.log1p(config.change_frac)

    def decide(self, ratio: float, memory: LevelMemory) -> ChangeDecision:
        """Take in one step.

        Args:
            ratio: its measured seconds over those that the line predicts, above 0.
            memory: from the step before.
        """
        value = math.log(ratio)
        sigma = memory.sigma
        part = max(-CLIP, min(CLIP, (value - memory.level) / sigma))
        up = max(0.0, memory.up + part - ALLOWANCE)
        down = max(0.0, memory.down - part - ALLOWANCE)
        slower = (*memory.slower, value)[-LONGEST_RUN:] if up else ()
        faster = (*memory.faster, value)[-LONGEST_RUN:] if down else ()
        noise, count = _noise(memory, value)
        for total, run in ((up, slower), (down, faster)):
            three = _three_agree(run, memory.level, sigma)
            if three or total >= THRESHOLD:
                fresh = LevelMemory(noise_frac=noise, num_differences=count, last=value)
                return self._changed(memory, fresh, run[-3:] if three else run)
        level, num_steps = memory.level, memory.num_steps
        waiting, num_waiting = memory.waiting + part * sigma, memory.num_waiting + 1
        if not (up or down):
            num_steps = min(num_steps + num_waiting, LEVEL_STEPS)
            level += waiting / num_steps
            waiting, num_waiting = 0.0, 0
        after = LevelMemory(
            level=level,
            num_steps=num_steps,
            noise_frac=noise,
            num_differences=count,
            last=value,
            up=up,
            down=down,
            slower=slower,
            faster=faster,
            waiting=waiting,
            num_waiting=num_waiting,
        )
        return ChangeDecision(changed=False, notable=False, ratio=1.0, num_steps=0, memory=after, reason="as before")

    def _changed(self, before: LevelMemory, fresh: LevelMemory, run: tuple[float, ...]) -> ChangeDecision:
        """The decision at an alarm: the level is the median of the run, and only the run is behind it."""
        level = statistics.median(run)
        shift = level - before.level
        return ChangeDecision(
            changed=True,
            notable=abs(shift) > self._limit,
            ratio=math.exp(shift),
            num_steps=len(run),
            memory=dataclasses.replace(fresh, level=level, num_steps=min(len(run), LEVEL_STEPS)),
            reason=f"{len(run)} steps take {math.exp(shift):.3f} of the time before, noise {before.sigma:.1%} a step",
        )


def _noise(memory: LevelMemory, value: float) -> tuple[float, int]:
    """The noise with one more difference of neighbours: a slow drift does not count, nor a stall at full size."""
    count = memory.num_differences + 1
    mean_gap = memory.noise_frac / SIGMA_OF_DIFFERENCE
    gap = min(abs(value - memory.last), STALL * max(mean_gap, NOISE_FLOOR / 2))
    return SIGMA_OF_DIFFERENCE * (mean_gap + (gap - mean_gap) / min(count, NOISE_STEPS)), count


def _three_agree(run: tuple[float, ...], level: float, sigma: float) -> bool:
    """Whether the last three steps of a run lie far from the level and close together."""
    if len(run) < 3:
        return False
    least, most = min(run[-3:]), max(run[-3:])
    far = least - level >= CLIP * sigma or level - most >= CLIP * sigma
    return far and most - least <= AGREE * sigma
