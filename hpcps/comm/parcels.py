"""Parcels between servers over MPI: any size, in order between two ranks, cut into chunks. Communication thread only.

    sender     {head bytes, body bytes}, head, chunks of the body, a few under way at a time
    receiver   one receive of sizes stands ready for each peer; memory for a parcel is made when its sizes have come

One parcel of a pair is under way at a time, so the receiver never holds more than one unfinished parcel of a peer, and
the sender's bodies stay where they are until their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Bytes, Parcel
from hpcps.comm.tags import Tag
from hpcps.errors import ProtocolError
from hpcps.units import GiB, MiB

__all__ = ["Parcels"]

_CHUNK_BYTES = 4 * MiB
"""Small enough that a slow link finishes one before its ranks count as idle and look seldom."""
_NUM_UNDER_WAY = 4
"""Chunks of a parcel under way at once: a link never runs dry between two looks."""
_LARGEST_BYTES = 1024 * GiB
"""A size above this was never sent."""


@dataclass(slots=True)
class _Outgoing:
    head: bytes
    body: Bytes
    done: Callable[[], None]


@dataclass(slots=True)
class _Incoming:
    """A parcel that is being received."""

    head: Bytes
    body: Bytes
    waiting: Iterator[tuple[Bytes, Tag]]
    """Pieces that no receive stands ready for."""
    requests: deque[MPI.Request] = field(default_factory=deque)


class Parcels:
    """Parcels that one server sends and receives.

    Args:
        comm: the data communicator.
        peers: ranks of the other servers.
        deliver: takes a parcel that is complete.
    """

    def __init__(self, comm: MPI.Comm, *, peers: Sequence[int], deliver: Callable[[Parcel], None]) -> None:
        self._comm = comm
        self.peers = tuple(peers)
        self._deliver = deliver
        self.sent = np.zeros(comm.size, np.int64)
        """Parcels handed over for each rank."""
        self.received = np.zeros(comm.size, np.int64)
        """Parcels that came whole from each rank."""
        self._lines: dict[int, deque[_Outgoing]] = {peer: deque() for peer in self.peers}
        self._incoming: dict[int, _Incoming] = {}
        self._sizes = [np.zeros(2, np.int64) for _ in self.peers]
        self._requests = [self._post(place) for place in range(len(self.peers))]
        self._statuses = [MPI.Status() for _ in self.peers]

    def send(self, rank: int, head: bytes, body: Bytes, done: Callable[[], None]) -> Operation:
        """The operation that sends a parcel, after those that wait for the same rank; it may leave them all to another.

        Args:
            rank: a peer.
            head: its first part.
            body: contiguous; stays as it is until ``done`` is called.
            done: called when it has left.
        """
        line = self._lines[rank]
        line.append(_Outgoing(head, body, done))
        self.sent[rank] += 1
        if len(line) > 1:
            return
        while line:
            yield from self._send(rank, line[0])
            line.popleft().done()  # no turn between this and the next look at the line, or a second operation moves it

    def look(self) -> bool:
        """Take in what has come; True if anything did."""
        if not self.peers:
            return False
        busy = False
        for place in MPI.Request.Testsome(self._requests, self._statuses) or ():
            self._incoming[place] = self._begin(place)
            busy = True
        for place, parcel in list(self._incoming.items()):
            while parcel.requests and parcel.requests[0].Test():
                parcel.requests.popleft()
                self._go_on(place, parcel)
                busy = True
            if not parcel.requests:
                self._end(place, parcel)
        return busy

    def close(self) -> Operation:
        """End when all parcels have left; every parcel has come."""
        while any(self._lines.values()):
            yield False
        for request in self._requests:
            request.Cancel()
            request.Wait()

    def _send(self, rank: int, parcel: _Outgoing) -> Operation:
        sizes = np.array([len(parcel.head), parcel.body.size], np.int64)
        requests = deque([self._comm.Isend([sizes, MPI.INT64_T], dest=rank, tag=Tag.PARCEL_SIZES)])
        for piece, tag in _pieces(np.frombuffer(parcel.head, np.uint8), parcel.body):
            requests.append(self._comm.Isend([piece, MPI.BYTE], dest=rank, tag=tag))
            while len(requests) > _NUM_UNDER_WAY:
                yield from _next_done(requests)
        while requests:
            yield from _next_done(requests)

    def _post(self, place: int) -> MPI.Request:
        return self._comm.Irecv([self._sizes[place], MPI.INT64_T], source=self.peers[place], tag=Tag.PARCEL_SIZES)

    def _begin(self, place: int) -> _Incoming:
        """The sizes of a parcel have come: make room, and be ready for its first pieces."""
        head_bytes, body_bytes = self._sizes[place].tolist()
        if not (0 <= head_bytes <= GiB and 0 <= body_bytes <= _LARGEST_BYTES):
            raise ProtocolError(
                f"cannot take a parcel from rank {self.peers[place]}: got sizes of {head_bytes} and {body_bytes} bytes,"
                f" need 0 to {GiB} and 0 to {_LARGEST_BYTES}; run the same hpcps on every rank",
                rank=self._comm.rank,
                op="parcel",
            )
        head, body = np.empty(head_bytes, np.uint8), np.empty(body_bytes, np.uint8)
        parcel = _Incoming(head, body, _pieces(head, body))
        for _ in range(_NUM_UNDER_WAY):
            self._go_on(place, parcel)
        return parcel

    def _go_on(self, place: int, parcel: _Incoming) -> None:
        """Be ready for one more piece, if there is one."""
        for piece, tag in parcel.waiting:
            parcel.requests.append(self._comm.Irecv([piece, MPI.BYTE], source=self.peers[place], tag=tag))
            return

    def _end(self, place: int, parcel: _Incoming) -> None:
        del self._incoming[place]
        self._requests[place] = self._post(place)
        self.received[self.peers[place]] += 1
        self._deliver(Parcel(self.peers[place], parcel.head.tobytes(), parcel.body))


def _pieces(head: Bytes, body: npt.NDArray[np.uint8]) -> Iterator[tuple[Bytes, Tag]]:
    """What follows the sizes, in order; nothing of no bytes."""
    if head.size:
        yield head, Tag.PARCEL_HEAD
    for at in range(0, body.size, _CHUNK_BYTES):
        yield body[at : at + _CHUNK_BYTES], Tag.PARCEL_BODY


def _next_done(requests: deque[MPI.Request]) -> Operation:
    while not requests[0].Test():
        yield False
    requests.popleft()
    yield True
