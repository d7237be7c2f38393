"""The two-sided plane, for an MPI whose windows fail their self-test.

worker   Isend head and payload with the slot's tags; the server has receives posted for every slot
server   feedback line {kind, a, b, c}: an ack or a notice, one small message each
worker   pulls by question and answer (questions.py)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Arrival, Bytes, Notice, Slot, Ticket
from hpcps.comm.layout import Layout
from hpcps.comm.mpi import MpiChannel
from hpcps.comm.plane import Place, Plane, Posting, Publication, Retirement
from hpcps.comm.questions import Questions
from hpcps.comm.standing import Ring, Standing
from hpcps.comm.tags import Tag

__all__ = ["P2pPlane"]

_ACK, _NOTICE = 1, 2
_LINE = 4
"""Words of a feedback message."""
_NUM_POSTED = 32
"""Feedback receives posted by a worker for each server: more than it can be sent while it sleeps 1 ms."""

Words = npt.NDArray[np.int64]


class P2pPlane(Plane):
    """Messages of one rank.

    Args:
        channel: the channel that this plane serves.
    """

    frame_extra_bytes = 8
    """The number of the push."""

    def __init__(self, channel: MpiChannel) -> None:
        super().__init__(channel)
        self._comm = channel.world.data
        self._opened = False
        self._standing: list[Standing | Ring] = []
        self._slots: dict[tuple[int, int], Standing] = {}
        self._sends: deque[tuple[MPI.Request, Any]] = deque()
        self._published: dict[int, tuple[int, Bytes]] = {}
        self._questions = Questions(self._comm, self._published.get)
        self._acked: dict[tuple[int, int], int] = {}
        self._sent = np.zeros(channel.world.size, np.int64)
        self._received = np.zeros(channel.world.size, np.int64)

    def open(self, layout: Layout, ticket: Ticket) -> Operation:
        self._layout = layout
        rank = self._channel.rank
        self._open_lines(layout)
        if rank in layout.servers:
            self._server = layout.servers.index(rank)
            self._head_bytes = layout.head_bytes(self._server)
            self._body_bytes = layout.slot_bytes(self._server) - self._head_bytes
            self._slots = {
                (worker, slot): self._stand_slot(worker, slot)
                for worker in layout.workers
                for slot in range(layout.num_slots)
            }
            self._standing = list(self._slots.values())
            self._questions.stand(layout.workers, num_keys=len(layout.shards))
        else:
            self._standing = [
                Ring([self._stand_feedback(server) for _ in range(_NUM_POSTED)])
                for server in range(len(layout.servers))
            ]
        yield from self._channel.barrier()
        self._opened = True
        self._channel.finish(ticket)

    def close(self) -> Operation:
        if self._opened:
            self.look()
            yield from self._channel.drain(self._sent, self._received)
        self._opened = False
        while self._sends:
            self._reap()
            yield False
        yield from self._questions.close()
        for standing in self._standing:
            standing.cancel()

    def look(self) -> bool:
        if not self._opened:
            return False
        busy = self.empty_outbox()
        self._reap()
        for standing in self._standing:
            busy |= standing.look()
        return busy | self._questions.look()

    def empty_outbox(self) -> bool:
        busy = bool(self.outbox)
        for _ in range(len(self.outbox)):  # what comes meanwhile waits for the next turn
            item = self.outbox.popleft()
            if isinstance(item, Publication):
                self._published[item.key] = (item.version, item.values.copy())
                self._channel.finish(item.ticket)
            elif isinstance(item, Posting):
                notice = item.notice
                self._send_feedback(item.worker, [_NOTICE, notice.key, notice.version, notice.clock])
            elif isinstance(item, Retirement):
                self._published.pop(item.key, None)
                self._channel.finish(item.ticket)
            else:
                self._slots[item.worker, item.index].post()
                self._send_feedback(item.worker, [_ACK, item.index, item.seq, 0])
        return busy

    def acked(self, server: int, slot: int) -> int:
        return self._acked.get((server, slot), 0)

    def send(self, server: int, slot: Slot, head: bytes, payload: Bytes) -> Callable[[], bool]:
        rank = self._layout.servers[server]
        message = np.concatenate([np.array([slot.seq], np.int64).view(np.uint8), np.frombuffer(head, np.uint8)])
        requests = [
            self._comm.Isend([message, MPI.BYTE], dest=rank, tag=Tag.FRAME_HEAD + slot.index),
            self._comm.Isend([payload, MPI.BYTE], dest=rank, tag=Tag.FRAME_BODY + slot.index),
        ]
        self._sent[rank] += 1
        return lambda: bool(MPI.Request.Testall(requests))

    def read(self, key: int, place: Place, version: int, out: Bytes) -> Generator[bool, None, int]:
        return self._questions.ask(self._layout.servers[place.server], key, version, out)

    def _stand_slot(self, worker: int, slot: int) -> Standing:
        """Receives of one slot: head and body; posted again when the slot is released."""
        head = np.empty(8 + self._head_bytes, np.uint8)
        body = np.empty(self._body_bytes, np.uint8)

        def post() -> list[MPI.Request]:
            return [
                self._comm.Irecv([head, MPI.BYTE], source=worker, tag=Tag.FRAME_HEAD + slot),
                self._comm.Irecv([body, MPI.BYTE], source=worker, tag=Tag.FRAME_BODY + slot),
            ]

        def done(statuses: list[MPI.Status]) -> bool:
            head_size, body_size = (status.Get_count(MPI.BYTE) for status in statuses)
            self._received[worker] += 1
            seq = int(head[:8].view(np.int64)[0])
            self._channel.deliver(Arrival(Slot(worker, slot, seq), head[8:head_size].tobytes(), body[:body_size]))
            return False

        return Standing(post, done)

    def _stand_feedback(self, server: int) -> Standing:
        """A receive of one line from a server; many stand, and are filled in the order of posting."""
        line = np.zeros(_LINE, np.int64)
        rank = self._layout.servers[server]

        def done(_: list[MPI.Status]) -> bool:
            self._received[rank] += 1
            kind, first, second, third = line.tolist()
            if kind == _ACK:
                self._acked[server, first] = max(second, self._acked.get((server, first), 0))
            else:
                self._channel.deliver(Notice(first, second, third))
            return True

        return Standing(lambda: [self._comm.Irecv([line, MPI.INT64_T], source=rank, tag=Tag.FEEDBACK)], done)

    def _send_feedback(self, worker: int, line: list[int]) -> None:
        self._sent[worker] += 1
        words = np.array(line, np.int64)
        self._sends.append((self._comm.Isend([words, MPI.INT64_T], dest=worker, tag=Tag.FEEDBACK), words))

    def _reap(self) -> None:
        while self._sends and self._sends[0][0].Test():
            self._sends.popleft()
