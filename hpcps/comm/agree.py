"""One answer for all ranks: what keeps the first of them from going on."""

from __future__ import annotations

import time
from collections.abc import Generator

import numpy as np
from mpi4py import MPI

__all__ = ["first_problem", "wait_for_problem"]

_TEXT_BYTES = 512
"""Longest text that is passed on; the rest is cut off."""
_POLL_S = 100e-6


def first_problem(comm: MPI.Comm, problem: str) -> Generator[bool, None, str]:
    """The steps of an operation that tells all ranks of the first that has a problem.

    Collective: all ranks of comm.

    Args:
        comm: the ranks that ask.
        problem: this rank's, empty for none.

    Returns:
        The problem of the lowest rank that has one, with that rank's number; empty where all is well.
    """
    rank, size = comm.rank, comm.size
    first = np.array([rank if problem else size], np.int32)
    reduction = comm.Iallreduce(MPI.IN_PLACE, [first, MPI.INT32_T], op=MPI.MIN)
    while not reduction.Test():
        yield False
    root = int(first[0])
    if root == size:
        return ""
    text = np.zeros(_TEXT_BYTES, np.uint8)
    if rank == root:
        data = np.frombuffer(problem.encode()[:_TEXT_BYTES], np.uint8)
        text[: data.size] = data
    broadcast = comm.Ibcast([text, MPI.BYTE], root=root)
    while not broadcast.Test():
        yield False
    said = text.tobytes().rstrip(b"\0").decode(errors="replace")
    return f"rank {root}: {said}"


def wait_for_problem(comm: MPI.Comm, problem: str) -> str:
    """The same at once, while this thread calls MPI. Collective: all ranks of comm."""
    steps = first_problem(comm, problem)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return str(end.value)
        time.sleep(_POLL_S)
