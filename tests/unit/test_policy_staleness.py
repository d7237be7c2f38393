"""The factor of a late gradient, by tables."""

from __future__ import annotations

import math

import pytest

from hpcps.config import StalenessConfig
from hpcps.errors import ProtocolError
from hpcps.policy import StalenessPolicy

NONE = StalenessConfig(decay="none")
INVERSE = StalenessConfig(decay="inverse")
EXPONENTIAL = StalenessConfig(decay="exponential", rate=0.5)
DROP = StalenessConfig(decay="inverse", cap=3, over_cap="drop")
CLAMP = StalenessConfig(decay="inverse", cap=3, over_cap="clamp")

# config, staleness, accept, factor
FACTORS = [
    (NONE, 0, True, 1.0),
    (NONE, 9, True, 1.0),
    (INVERSE, 0, True, 1.0),
    (INVERSE, 1, True, 0.5),
    (INVERSE, 3, True, 0.25),
    (EXPONENTIAL, 0, True, 1.0),
    (EXPONENTIAL, 2, True, math.exp(-1)),
    (EXPONENTIAL, 100_000, True, 1e-30),
    (DROP, 3, True, 0.25),
    (DROP, 4, False, 0.0),
    (CLAMP, 3, True, 0.25),
    (CLAMP, 4, True, 0.25),
    (CLAMP, 1, True, 0.5),
]


@pytest.mark.parametrize(("config", "staleness", "accept", "factor"), FACTORS)
def test_factor_table(config: StalenessConfig, staleness: int, accept: bool, factor: float) -> None:
    decision = StalenessPolicy(config).decide(staleness)
    assert decision.accept is accept
    assert decision.factor == pytest.approx(factor, rel=1e-12, abs=0.0)
    assert f"staleness {staleness}" in decision.reason


def test_a_version_from_the_future_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot weigh a push: got staleness -1, need 0 or more"):
        StalenessPolicy(INVERSE).decide(-1)
