"""Control messages over MPI: any length, in order between two ranks, no pickling.

A message is cut into parts of one size, and a receive of that size is always posted for each rank that may
send. None is posted for any source: over TCP, MPICH 5.0.2 on UCX leaves such receives unfilled for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Bytes
from hpcps.comm.tags import Tag
from hpcps.errors import ProtocolError
from hpcps.units import GiB

__all__ = ["Mailbox"]

_PART_BYTES = 32 * 1024
"""Above the eager limit of all transports seen, small enough for one a sender."""
_LENGTH = struct.Struct("<q")
_LONGEST_BYTES = GiB
"""A length above this was never sent: control messages are small."""


class Mailbox:
    """Sends and receives of one rank. Used by the communication thread only.

    Args:
        comm: the control communicator.
        peers: ranks that this one sends to and receives from.
    """

    def __init__(self, comm: MPI.Comm, *, peers: Sequence[int]) -> None:
        self._comm = comm
        self.peers = tuple(peers)
        self.sent = np.zeros(comm.size, np.int64)
        """Parts sent to each rank."""
        self.received = np.zeros(comm.size, np.int64)
        """Parts received from each rank."""
        self._parts: dict[int, bytearray] = {}
        self._lengths: dict[int, int] = {}
        self._buffers = [np.empty(_PART_BYTES, np.uint8) for _ in self.peers]
        self._requests = [self._post(place) for place in range(len(self.peers))]
        self._statuses = [MPI.Status() for _ in self.peers]

    def send(self, rank: int, data: bytes) -> Operation:
        """The operation that sends a message."""
        message = np.frombuffer(_LENGTH.pack(len(data)) + data, np.uint8)
        requests = [
            self._comm.Isend([message[at : at + _PART_BYTES], MPI.BYTE], dest=rank, tag=Tag.CONTROL)
            for at in range(0, message.size, _PART_BYTES)
        ]
        self.sent[rank] += len(requests)
        while not MPI.Request.Testall(requests):
            yield False

    def look(self) -> list[tuple[int, bytes]]:
        """Messages that are complete: pairs of sender and text."""
        complete: list[tuple[int, bytes]] = []
        while places := MPI.Request.Testsome(self._requests, self._statuses):
            for place, status in zip(places, self._statuses, strict=False):
                source = self.peers[place]
                self.received[source] += 1
                self._add(source, self._buffers[place][: status.Get_count(MPI.BYTE)], complete)
                self._requests[place] = self._post(place)
        return complete

    def close(self) -> None:
        """Take the posted receives back; every part has come."""
        for request in self._requests:
            request.Cancel()
            request.Wait()

    def _post(self, place: int) -> MPI.Request:
        return self._comm.Irecv([self._buffers[place], MPI.BYTE], source=self.peers[place], tag=Tag.CONTROL)

    def _add(self, source: int, part: Bytes, complete: list[tuple[int, bytes]]) -> None:
        data = part.tobytes()
        if source not in self._parts:
            length = int(_LENGTH.unpack_from(data)[0])
            if not 0 <= length <= _LONGEST_BYTES:
                raise ProtocolError(
                    f"cannot take a control message from rank {source}: got a length of {length} bytes, need 0 to"
                    f" {_LONGEST_BYTES}; run the same hpcps on every rank",
                    op="control",
                )
            self._lengths[source] = length
            self._parts[source] = bytearray()
            data = data[_LENGTH.size :]
        self._parts[source] += data
        if len(self._parts[source]) >= self._lengths[source]:
            complete.append((source, bytes(self._parts.pop(source))))
