"""Open the MPI channel with the data plane that works here: windows if their self-test passes, else messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from mpi4py import MPI

from hpcps.comm.mpi import MpiChannel
from hpcps.comm.p2p import P2pPlane
from hpcps.comm.rma import RmaPlane
from hpcps.comm.world import World, shared_memory_problem
from hpcps.errors import ChannelError

__all__ = ["CommSettings", "open_channel", "self_test"]

_TEST_WORDS = 1024
"""Words that each rank puts to each other: enough to leave every inline path."""


class CommSettings(Protocol):
    """What is read of the run's settings."""

    @property
    def mode(self) -> str:
        """rma, p2p or auto."""

    @property
    def deadline_s(self) -> float:
        """Longest wait."""

    @property
    def poll_max_s(self) -> float:
        """Longest sleep of the communication thread."""


def open_channel(world: World, workers: Sequence[int], settings: CommSettings) -> MpiChannel:
    """Make this rank's channel. Collective: all ranks, same arguments.

    Raises:
        ChannelError: one-sided mode was asked for and its self-test fails.
    """
    mode, why = settings.mode, "asked for"
    if mode != "p2p":
        why = self_test(world)
        if why and mode == "rma":
            raise ChannelError(
                f"cannot use one-sided mode with {world.library}: {why}; set comm.mode to auto or p2p",
                rank=world.rank,
            )
        mode = "p2p" if why else "rma"
    plane = RmaPlane if mode == "rma" else P2pPlane
    channel = MpiChannel(
        world,
        workers,
        plane=plane,
        deadline_s=settings.deadline_s,
        longest_sleep_s=settings.poll_max_s,
    )
    channel.mode = f"{mode} ({why or 'self-test passed'})"
    return channel


def self_test(world: World) -> str:
    """Try the window operations that the one-sided plane needs, between all pairs.

    Collective: all ranks. Returns: why not, the same on all ranks; empty where all is well.
    """
    problem = shared_memory_problem(world, lambda _: (world.size + 1) * _TEST_WORDS * 8)
    if not _all_agree(world, not problem):
        return problem or "another rank has too little shared memory"
    try:
        window = MPI.Win.Allocate((world.size + 1) * _TEST_WORDS * 8, 1, comm=world.data)
    except MPI.Exception as error:
        problem = f"no window: {error.Get_error_string()}"
    if not _all_agree(world, not problem):
        return problem or "another rank got no window"
    try:
        problem = _exchange(world, window)
    except MPI.Exception as error:
        problem = f"window operations fail: {error.Get_error_string()}"
    fine = _all_agree(world, not problem)
    window.Free()
    return "" if fine else problem or "another rank read wrong values"


def _exchange(world: World, window: MPI.Win) -> str:
    """Put to everyone, read an atomic word of everyone, look at what came."""
    words = np.asarray(window.tomemory()).view(np.int64).reshape(world.size + 1, _TEST_WORDS)
    words[:] = 0
    words[world.size] = world.rank + 1
    world.control.Barrier()
    window.Lock_all(MPI.MODE_NOCHECK)
    mine = np.full(_TEST_WORDS, world.rank + 1, np.int64)
    got, nothing = np.zeros(1, np.int64), np.zeros(1, np.int64)
    wrong = 0
    for rank in range(world.size):
        offset = world.rank * mine.nbytes
        window.Put([mine, MPI.INT64_T], rank, (offset, mine.size, MPI.INT64_T))
        window.Flush(rank)
        window.Fetch_and_op([nothing, MPI.INT64_T], [got, MPI.INT64_T], rank, world.size * mine.nbytes, MPI.NO_OP)
        window.Flush(rank)
        wrong += int(got[0]) != rank + 1
    world.control.Barrier()
    window.Sync()
    expected = np.repeat(np.arange(1, world.size + 1)[:, None], _TEST_WORDS, axis=1)
    wrong += int((words[: world.size] != expected).any())
    world.control.Barrier()
    window.Unlock_all()
    return f"rank {world.rank} read {wrong} wrong values" if wrong else ""


def _all_agree(world: World, fine: bool) -> bool:
    answer = np.array([fine], np.int32)
    world.control.Allreduce(MPI.IN_PLACE, [answer, MPI.INT32_T], op=MPI.MIN)
    return bool(answer[0])
