"""Pulls by question and answer: a worker asks for a shard, the server's communication thread sends its newest copy.

    worker   {key, version}
    server   {key, version}, values; or {key, -1} and no values: the shard is not here

The answer is sent from a copy that nothing changes, so it is never torn. Questions of one worker to one server are
answered in order. Communication thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Bytes
from hpcps.comm.standing import Standing
from hpcps.comm.tags import Tag
from hpcps.errors import ProtocolError

__all__ = ["Questions"]

_NOTHING = np.zeros(0, np.uint8)


class Questions:
    """Both sides of one rank.

    Args:
        comm: the data communicator.
        newest: on a server, version and values of a shard that stay as they are; None for one not held here.
    """

    def __init__(self, comm: MPI.Intracomm, newest: Callable[[int], tuple[int, Bytes] | None]) -> None:
        self._comm = comm
        self._newest = newest
        self._num_keys = 0
        self._standing: list[Standing] = []
        self._sends: deque[tuple[MPI.Request, Any]] = deque()

    def stand(self, workers: Sequence[int], *, num_keys: int) -> None:
        """Be ready for the questions of these workers about so many shards."""
        self._num_keys = num_keys
        self._standing = [self._stand(worker) for worker in workers]

    def look(self) -> bool:
        """Answer what was asked; True if anything was."""
        while self._sends and self._sends[0][0].Test():
            self._sends.popleft()
        busy = False
        for standing in self._standing:
            busy |= standing.look()
        return busy

    def close(self) -> Operation:
        """End when all answers have left; no worker asks any more."""
        while self._sends:
            self.look()
            yield False
        for standing in self._standing:
            standing.cancel()

    def ask(self, server: int, key: int, version: int, out: Bytes) -> Generator[bool, None, int]:
        """The operation that reads a shard from a server (a world rank).

        Returns:
            The version read; -1: the shard is not there.
        """
        answer = np.zeros(2, np.int64)
        requests = [
            self._comm.Irecv([answer, MPI.INT64_T], source=server, tag=Tag.PULLED_HEAD),
            self._comm.Irecv([out, MPI.BYTE], source=server, tag=Tag.PULLED_BODY),
            self._comm.Isend([np.array([key, version], np.int64), MPI.INT64_T], dest=server, tag=Tag.PULL),
        ]
        while not MPI.Request.Testall(requests):
            yield False
        got = int(answer[1])
        if 0 <= got < version:
            raise ProtocolError(
                f"cannot read shard {key} from rank {server}: got version {got}, need {version} that was noticed; run"
                " the same hpcps on every rank",
                rank=self._comm.rank,
                key=key,
                op="pull",
            )
        return got

    def _stand(self, worker: int) -> Standing:
        wanted = np.zeros(2, np.int64)

        def done(_: list[MPI.Status]) -> bool:
            self._answer(worker, int(wanted[0]))
            return True

        return Standing(lambda: [self._comm.Irecv([wanted, MPI.INT64_T], source=worker, tag=Tag.PULL)], done)

    def _answer(self, worker: int, key: int) -> None:
        if not 0 <= key < self._num_keys:
            raise ProtocolError(
                f"cannot answer a pull from rank {worker}: got key {key}, need one below {self._num_keys}; run the same"
                " plan on every rank",
                rank=self._comm.rank,
                key=key,
                op="pull",
            )
        version, values = self._newest(key) or (-1, _NOTHING)
        head = np.array([key, version], np.int64)
        self._sends.append((self._comm.Isend([head, MPI.INT64_T], dest=worker, tag=Tag.PULLED_HEAD), head))
        self._sends.append((self._comm.Isend([values, MPI.BYTE], dest=worker, tag=Tag.PULLED_BODY), values))
