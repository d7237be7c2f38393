"""Tests that start mpirun themselves: deaths, mistakes at launch, and what a run leaves behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import RunMpi

from hpcps.errors import LaunchError
from hpcps.launch.mpirun import find_launcher


@pytest.fixture(scope="session", autouse=True)
def launcher() -> None:
    """Without MPI there is nothing to start."""
    try:
        find_launcher(os.environ)
    except LaunchError as error:
        pytest.fail(f"{error}", pytrace=False)


@pytest.fixture
def run_mpi(tmp_path: Path) -> Iterator[RunMpi]:
    """Starts jobs and ends what is left of them."""
    runner = RunMpi(tmp_path)
    yield runner
    runner.end()
    shutil.rmtree(tmp_path, ignore_errors=True)
