"""Open the MPI channel with the data plane that works here: windows if their self-test passes, else messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from mpi4py import MPI

from hpcps.comm.agree import wait_for_problem
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


def open_channel(
    world: World, workers: Sequence[int], settings: CommSettings, *, link_bytes_per_s: float = 0.0
) -> MpiChannel:
    """Make this rank's channel. Collective: all ranks, same arguments.

    Args:
        world: the opened world.
        workers: world ranks of the workers.
        settings: of the data path.
        link_bytes_per_s: rate of an emulated link; 0: the real one.

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
        fallback=P2pPlane if settings.mode == "auto" and mode == "rma" else None,
        deadline_s=settings.deadline_s,
        longest_sleep_s=settings.poll_max_s,
        link_bytes_per_s=link_bytes_per_s,
    )
    channel.mode = f"{mode} ({why or 'self-test passed'})"
    return channel


def self_test(world: World) -> str:
    """Try the window operations that the one-sided plane needs, between all pairs.

    Collective: all ranks. Returns: why not, the same on all ranks; empty where all is well.
    """
    window_bytes = (world.size + 1) * _TEST_WORDS * 8
    why = wait_for_problem(world.control, shared_memory_problem(world, lambda _: window_bytes))
    if why:
        return why
    problem = ""
    try:
        window = MPI.Win.Allocate(window_bytes, 1, comm=world.data)
    except MPI.Exception as error:
        problem = f"no window: {error.Get_error_string()}"
    why = wait_for_problem(world.control, problem)
    if why:
        return why
    why = wait_for_problem(world.control, _exchange(world, window))
    window.Free()
    return why


def _exchange(world: World, window: MPI.Win) -> str:
    """Put to everyone, read an atomic word of everyone, look at what came; goes to the end whatever fails."""
    words = np.asarray(window.tomemory()).view(np.int64).reshape(world.size + 1, _TEST_WORDS)
    words[:] = 0
    words[world.size] = world.rank + 1
    mine = np.full(_TEST_WORDS, world.rank + 1, np.int64)
    got, nothing = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def talk_to(rank: int) -> str:
        window.Put([mine, MPI.INT64_T], rank, (world.rank * mine.nbytes, mine.size, MPI.INT64_T))
        window.Flush(rank)
        window.Fetch_and_op([nothing, MPI.INT64_T], [got, MPI.INT64_T], rank, world.size * mine.nbytes, MPI.NO_OP)
        window.Flush(rank)
        return "" if got[0] == rank + 1 else f"read {got[0]} at rank {rank}, need {rank + 1}"

    def look() -> str:
        window.Sync()
        expected = np.arange(1, world.size + 1)[:, None]
        wrong = int((words[: world.size] != expected).sum())
        return f"found {wrong} wrong words in its window" if wrong else ""

    world.control.Barrier()
    problems = [_attempt(lambda: window.Lock_all(MPI.MODE_NOCHECK))]
    problems += [_attempt(lambda rank=rank: talk_to(rank)) for rank in range(world.size)]  # type: ignore[misc]
    world.control.Barrier()
    problems.append(_attempt(look))
    world.control.Barrier()
    problems.append(_attempt(window.Unlock_all))
    return next(filter(None, problems), "")


def _attempt(step: Callable[[], str | None]) -> str:
    """What a step says, or why MPI refused it."""
    try:
        return step() or ""
    except MPI.Exception as error:
        return f"window operations fail: {error.Get_error_string()}"
