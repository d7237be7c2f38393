"""Every rank of a job, servers too, uses its share of the cores, or what the user gave."""

from __future__ import annotations

import re
import sys

import pytest
from launching import RunMpi

SCRIPT = """
import hpcps

with hpcps.init() as job:
    job.barrier()
"""
SHARE = re.compile(r"(\d+) threads, torch (\d+) \((\d+) cores, (?:its own|shared by (\d+) ranks)\)")


@pytest.mark.parametrize("given", ["", "3"])
def test_threads_of_servers_and_workers(run_mpi: RunMpi, given: str) -> None:
    script = run_mpi.script(SCRIPT)
    words = [sys.executable, "-m", "hpcps", "launch", "-n", "3", "--log-dir", "logs", script]
    job = run_mpi.finish(*run_mpi.start(words, {"OMP_NUM_THREADS": given}), timeout_s=90.0)
    assert job.rc == 0, job.output
    for rank in range(3):
        log = (run_mpi.folder / "logs" / f"rank-{rank:03d}.log").read_text()
        if given:
            assert "3 threads, torch 3 (OMP_NUM_THREADS=3)" in log
            continue
        found = SHARE.search(log)
        assert found is not None, log
        number, in_torch, num_cores, num_ranks = (int(group or 1) for group in found.groups())
        assert number == in_torch == max(1, num_cores // num_ranks)
