"""What a byte of gradients takes on a server, and how sure that is, from the looks at its load so far.

Decides nothing about shards. A look is the mean over an interval of steps, and two looks at an unchanged server differ:
by 10 % on a busy host. Whoever moves shards needs to know whether two servers differ by more than that.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EstimateRate", "Look", "NUM_LOOKS", "RateEstimate", "RateWithMore"]

NUM_LOOKS = 64
"""Looks that are worth keeping: they tell the noise to a tenth."""

_RATE_LOOKS = 16
"""The newest of them that the rate itself may rest on: they pin it to a quarter of the noise of one."""

_NOISE = 0.1
"""Noise of a look, as standard deviation of its logarithm, before there are looks to tell it."""
_PRIOR_STEPS = 8
"""So many steps from look to look does that assumption weigh."""
_LEAST_NOISE = 0.02
_WILD = 2.0
"""A step from look to look of more standard deviations than this is a change or a freeze: it counts as this."""
_CUT = 3.0
"""A look this many standard deviations off what came after it belongs to the time before a change."""
_MEDIAN_ERROR = 1.25
"""A median's standard error by that of a mean."""
_MAD = 0.6745
"""Median of a normal variable's magnitude, in standard deviations."""
_MORE = 1.25
"""A load this much larger than the present one is another load, a byte that takes this much longer another rate."""
_MORE_LOOKS = 3
"""The newest looks at a larger load that tell what a byte takes there."""
_SURE_LOOKS = 2
"""So many looks are believed: at a larger load, that it is slower with more; at the present load, as slow as those at a
larger one, that the load is not why."""
_BELIEVED_LOOKS = 16
"""Looks for which a slowness with more is believed, twice as many each time that it came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a server.

    Args:
        byte_s: mean seconds that a byte of gradients took in the interval, above 0.
        load: gradient bytes a step, above 0.
    """

    byte_s: float
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEstimate:
    """Seconds that a byte takes.

    Args:
        byte_s: the best estimate.
        error_frac: its standard error, as part of it.
        low_s: the lesser of the newest two looks; 0 where there are no two.
        high_s: the larger of them; infinite where there are no two.
        num_looks: looks since the last change that the estimate rests on.
        reason: how it was found.
    """

    byte_s: float
    error_frac: float
    low_s: float
    high_s: float
    num_looks: int
    reason: str


class EstimateRate:
    """Estimate a server's rate from its last looks.

    The median of those that agree with the newest one counts, back to the first that does not, and without the one next
    to that: it may have seen both sides of a change. One look alone may be that of a machine that froze for a second,
    so the newest two are told as well.
    """

    def decide(self, looks: Sequence[float]) -> RateEstimate:
        """Estimate it.

        Args:
            looks: mean seconds that a byte took in each interval, above 0, the newest last; at least one.
        """
        logs = [math.log(look) for look in looks]
        noise = _noise(logs)
        newest, alike = logs[-_RATE_LOOKS:], [logs[-1]]
        for value in reversed(newest[:-1]):
            if abs(value - statistics.median(alike)) > _CUT * noise * math.sqrt(1 + 1 / len(alike)):
                break
            alike.append(value)
        if 1 < len(alike) < len(newest):
            alike.pop()
        count = len(alike)
        error = noise / math.sqrt(count) * (_MEDIAN_ERROR if count > 2 else 1.0)
        known = len(looks) > 1
        return RateEstimate(
            byte_s=math.exp(statistics.median(alike)),
            error_frac=error,
            low_s=min(looks[-2:]) if known else 0.0,
            high_s=max(looks[-2:]) if known else math.inf,
            num_looks=count,
            reason=f"{count} of {len(looks)} looks, noise {noise:.0%}",
        )


class RateWithMore:
    """What a byte may take on a server that gets more than it holds.

    A quota of the processor makes a server slower the more it holds, a cache may too. The looks at its present load do
    not show that; those at a larger load before do. Unless it was as slow at the present load since then: that was a
    change of another kind, and where the server is quick now, it is over. It is believed for some time only, longer
    each time that it came back, for what slowed the server may end while it holds little.
    """

    def decide(self, looks: Sequence[Look]) -> float:
        """Seconds, 0 where nothing is known of more.

        Args:
            looks: at one server, the newest last.
        """
        more = [at for at, look in enumerate(looks) if look.load > _MORE * looks[-1].load]
        if len(more) < _SURE_LOOKS:
            return 0.0
        byte_s = statistics.median(looks[at].byte_s for at in more[-_MORE_LOOKS:])
        since = looks[more[-1] + 1 :]
        times = 1 + sum(after - before > 1 for before, after in itertools.pairwise(more))
        as_slow = sum(look.byte_s * _MORE > byte_s for look in since)
        believed = len(since) <= _BELIEVED_LOOKS * 2 ** (times - 1)
        return byte_s if believed and as_slow < _SURE_LOOKS else 0.0


def _noise(logs: Sequence[float]) -> float:
    """Standard deviation of a look's logarithm; a change of the rate leaves it as it is."""
    steps = [abs(after - before) for before, after in itertools.pairwise(logs)]
    prior = [math.sqrt(2) * _NOISE] * _PRIOR_STEPS
    median = statistics.median([*steps, *[_MAD * step for step in prior]])
    most = _WILD * median / _MAD
    squares = [min(step, most) ** 2 for step in [*steps, *prior]]
    return max(_LEAST_NOISE, math.sqrt(statistics.fmean(squares) / 2))
