"""The device room's tests run in each place that there is; the shim's order of threads is drawn by each test's seed."""

from __future__ import annotations

import zlib

import pytest
from rigs import NAMES, Rig, make_rig, why_not

REASONS = {name: why_not(name) for name in NAMES}
PLACES = [name for name in NAMES if not REASONS[name]] or [
    pytest.param("shim", marks=pytest.mark.skip(reason=REASONS["shim"]))
]


@pytest.fixture(params=NAMES)
def reason(request: pytest.FixtureRequest) -> str:
    """Why a place cannot be used, empty where it can."""
    return REASONS[request.param]


@pytest.fixture(scope="session", params=PLACES)
def place(request: pytest.FixtureRequest) -> Rig:
    return make_rig(request.param)


@pytest.fixture
def rig(place: Rig, request: pytest.FixtureRequest) -> Rig:
    if place.name == "shim":
        place.module.set_seed(zlib.crc32(request.node.nodeid.encode()))
    return place


@pytest.fixture(scope="session")
def shim_rig() -> Rig:
    if REASONS["shim"]:
        pytest.skip(REASONS["shim"])
    return make_rig("shim")
