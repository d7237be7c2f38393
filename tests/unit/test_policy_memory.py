"""Caps from peaks of memory, by tables."""

from __future__ import annotations

import pytest

from hpcps.policy import FitMemory
from hpcps.units import GiB, MiB

# samples and peak MiB of batches, GiB that the process may hold, cap
CAPS = [
    ([(24, 340), (40, 500)], 1, 82),
    ([(40, 500), (24, 340)], 1, 82),
    ([(24, 340), (40, 500), (24, 300), (40, 480)], 1, 82),
    ([(24, 340), (32, 460), (40, 500)], 1, 78),
    ([(24, 900), (40, 1000)], 1, 40),
    ([(24, 340), (29, 390)], 1, None),
    ([(24, 340)], 1, None),
    ([(24, 340), (40, 340)], 1, None),
    ([(24, 340), (40, 300)], 1, None),
    ([], 1, None),
]


@pytest.mark.parametrize(("peaks", "total", "cap"), CAPS)
def test_caps(peaks: list[tuple[int, int]], total: int, cap: int | None) -> None:
    found = FitMemory().decide([(size, peak * MiB) for size, peak in peaks], total * GiB)
    assert (found.max_samples if found else None) == cap
    if found:
        assert f"1.0 GiB less 10% hold {cap}" in found.reason
        assert f"from sizes 24 to {max(size for size, _ in peaks)}" in found.reason
