"""Set-up of the tests that run as ranks of one mpirun: MPI as hpcps starts it, a header, and the ``ranks`` fixture.

A test that hangs ends itself: pytest prints all stacks, and a little later pytest-timeout ends the rank and so the job.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from hpcps.launch.environment import has_infiniband, mpi_defaults

os.environ.update(mpi_defaults(os.environ, has_infiniband=has_infiniband(), ranks_exceed_cores=True))
import mpi4py

mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI  # noqa: E402
from mpi_ranks import Ranks  # noqa: E402


def pytest_report_header() -> str:
    name, version = MPI.get_vendor()
    return (
        f"mpi: {name} {'.'.join(map(str, version))}, rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on"
        f" {socket.gethostname()}, thread level {MPI.Query_thread()} (serialized is {MPI.THREAD_SERIALIZED})"
    )


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """All ranks, joined by a communicator of this test; they begin and end it together."""
    comm = MPI.COMM_WORLD.Dup()
    yield Ranks(comm, request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled)
    comm.Free()
