"""How much a late gradient counts. Pure: a number of versions in, a factor out.

The caller applies the factor to the gradient (SGD) or to the update (Adam, which does not see the
scale of a gradient); this module does not know the optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcps.config import StalenessConfig
from hpcps.errors import ProtocolError

__all__ = ["StalenessDecision", "StalenessPolicy"]

MIN_FACTOR = 1e-30
"""Floor of the factor: above 0 in float32 too, so that a window's sum of weights never vanishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessDecision:
    """Whether a push is taken, and the factor on it: above 0 up to 1, or 0 where it is refused."""

    accept: bool
    factor: float
    reason: str


class StalenessPolicy:
    """Weigh a push by its staleness: server version less the version its gradient was computed on."""

    def __init__(self, config: StalenessConfig) -> None:
        self._config = config

    def decide(self, staleness: int) -> StalenessDecision:
        """Accept or refuse a push, with its factor.

        Args:
            staleness: versions, 0 or more.

        Raises:
            ProtocolError: the staleness is negative: the push names a version that does not exist yet.
        """
        if staleness < 0:
            raise ProtocolError(
                f"cannot weigh a push: got staleness {staleness}, need 0 or more; send the version that was pulled"
            )
        config = self._config
        over = 0 < config.cap < staleness
        if over and config.over_cap == "drop":
            return StalenessDecision(
                accept=False, factor=0.0, reason=f"staleness {staleness} is over the cap of {config.cap}"
            )
        counted = config.cap if over else staleness
        factor = max(self._decay(counted), MIN_FACTOR)
        clamped = f", counted as the cap {config.cap}" if over else ""
        return StalenessDecision(
            accept=True,
            factor=factor,
            reason=f"staleness {staleness}{clamped}, decay {config.decay}: factor {factor:.4g}",
        )

    def _decay(self, staleness: int) -> float:
        if self._config.decay == "inverse":
            return 1.0 / (1.0 + staleness)
        if self._config.decay == "exponential":
            return math.exp(-self._config.rate * staleness)
        return 1.0
