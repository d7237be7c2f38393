"""The MPI channel: control messages and collectives here, frames and parameters in a plane (rma or p2p).

The main thread's calls turn into operations of the communication thread, which alone calls MPI.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcps.comm.actor import Actor, Operation
from hpcps.comm.agree import first_problem
from hpcps.comm.channel import Array, Channel, Control, Notice, Slot, Ticket
from hpcps.comm.layout import Layout
from hpcps.comm.link import LinkUse
from hpcps.comm.mailbox import Mailbox
from hpcps.comm.parcels import Parcels
from hpcps.comm.plane import Plane
from hpcps.comm.tags import MAX_SLOTS, Tag
from hpcps.comm.world import World
from hpcps.errors import ChannelError

__all__ = ["MpiChannel"]

logger = logging.getLogger(__name__)

Counts: TypeAlias = npt.NDArray[np.int64]

_STOP_S = 10.0
"""Time for the communication thread to end at close."""
_ABORT_S = 1.0
"""Time for the communication thread to call Abort; then this thread does."""


class MpiChannel(Channel):
    """This rank's end of an MPI job.

    Args:
        world: the opened world.
        workers: world ranks of the workers.
        plane: makes the data plane, given this channel.
        fallback: makes the one to take where some rank has no room for the first; none to give up.
        deadline_s: longest wait.
        longest_sleep_s: of the communication thread.
        link_bytes_per_s: rate of an emulated link in each direction; 0: the real one.
    """

    def __init__(
        self,
        world: World,
        workers: Sequence[int],
        *,
        plane: Callable[[MpiChannel], Plane],
        fallback: Callable[[MpiChannel], Plane] | None = None,
        deadline_s: float,
        longest_sleep_s: float,
        link_bytes_per_s: float = 0.0,
    ) -> None:
        super().__init__(world.rank, deadline_s=deadline_s)
        self.world = world
        self.link_bytes_per_s = link_bytes_per_s
        self._workers = tuple(workers)
        self._closed = False
        works = world.rank in self._workers
        color = 0 if works else MPI.UNDEFINED
        self._worker_comm = world.control.Split(color, world.rank)
        self._group_size = len(self._workers)
        self._group_comm = MPI.COMM_NULL if color == MPI.UNDEFINED else self._worker_comm.Dup()
        self._never = np.zeros(1, np.uint8)
        self._progress = MPI.COMM_SELF.Irecv([self._never, MPI.BYTE], source=0, tag=Tag.PROGRESS)
        self._servers = tuple(rank for rank in range(world.size) if rank not in self._workers)
        others = [rank for rank in self._servers if rank != world.rank]
        self._mailbox = Mailbox(world.control, peers=others if works else sorted([*others, *self._workers]))
        self._parcels = Parcels(world.data, peers=() if works else others, deliver=self._deliver)
        self._plane = plane(self)
        self._fallback = fallback
        self._actor = Actor(
            f"hpcps-comm-{world.rank}", self._look, longest_sleep_s=longest_sleep_s, on_error=self._fail
        )
        self._actor.start()

    def open(self, layout: Layout) -> Layout:
        if layout.num_slots > MAX_SLOTS:
            raise ChannelError(
                f"cannot open the data plane: {layout.num_slots} slots, at most {MAX_SLOTS}; lower comm.num_slots"
            )
        problem = self._find_problem(layout)
        tight = layout.tight()
        if problem and layout.moves and not self._find_problem(tight):
            logger.warning(
                "shards cannot move: %s; give the container more shared memory, or lower routing.spare_frac", problem
            )
            layout, problem = tight, ""
        if problem:
            self._fall_back(problem)
        self._run(lambda ticket: self._plane.open(layout, ticket), "all ranks to open the data plane")
        return layout

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._run(self._shut, "all ranks to end", deadline_s=math.inf)
        if not self._actor.stop(_STOP_S):
            raise ChannelError(
                f"cannot end rank {self.rank}: the communication thread hangs; see its stack", rank=self.rank
            )
        MPI.COMM_SELF.Send([self._never.copy(), MPI.BYTE], dest=0, tag=Tag.PROGRESS)
        self._progress.Wait()
        for comm in (self._group_comm, self._worker_comm, self.world.control, self.world.data):
            if comm != MPI.COMM_NULL:
                comm.Free()

    def abort(self, code: int) -> None:
        def operation() -> Operation:
            yield True
            MPI.COMM_WORLD.Abort(code)

        self._actor.submit(operation())
        self._actor.stop(_ABORT_S)
        os._exit(code)

    def send(self, rank: int, data: bytes) -> None:
        if rank not in self._mailbox.peers:
            raise ChannelError(
                f"cannot send a control message from rank {self.rank} to rank {rank}: both work, or it is this rank; go"
                " by way of a server",
                rank=self.rank,
            )
        self.counters.control_messages += 1
        self._actor.submit(self._after_outbox(self._mailbox.send(rank, data)))

    def regroup(self, groups: Sequence[Sequence[int]]) -> None:
        color = next(index for index, group in enumerate(groups) if self.rank in group)

        def operation(ticket: Ticket) -> Operation:
            old = self._group_comm
            self._group_comm = self._worker_comm.Split(color, self.rank)
            self._group_size = len(groups[color])
            old.Free()
            self._finish(ticket)
            yield True

        self._run(operation, "the other workers to regroup")

    def allreduce(self, buffer: Array, *, everyone: bool = False) -> Ticket:
        ticket = Ticket()
        self.counters.reduced_bytes += buffer.nbytes
        comm, size = (self._worker_comm, len(self._workers)) if everyone else (self._group_comm, self._group_size)
        if size == 1 or buffer.size == 0:
            ticket.done = True
            return ticket
        datatype = {4: MPI.FLOAT, 8: MPI.DOUBLE}[buffer.itemsize]
        self._actor.submit(self._request(lambda: comm.Iallreduce(MPI.IN_PLACE, [buffer, datatype], op=MPI.SUM), ticket))
        return ticket

    def broadcast(self, buffer: Array, root: int) -> Ticket:
        ticket = Ticket()
        place = self._workers.index(root)
        view = buffer.reshape(-1).view(np.uint8)
        self._actor.submit(self._request(lambda: self._worker_comm.Ibcast([view, MPI.BYTE], root=place), ticket))
        return ticket

    def push(self, server: int, head: bytes, payload: Array) -> Ticket:
        ticket = Ticket()
        self._actor.submit(self._plane.push(server, head, payload.view(np.uint8), ticket))
        return ticket

    def pull(self, key: int, version: int, out: Array) -> Ticket:
        ticket = Ticket()
        self.counters.pulls += 1
        self.counters.pulled_bytes += out.nbytes
        self._actor.submit(self._plane.pull(key, version, out.view(np.uint8), ticket))
        return ticket

    def link_use(self, server: int) -> LinkUse:
        return self._plane.link_use(server)

    def pull_use(self, server: int) -> LinkUse:
        return self._plane.pull_use(server)

    def release(self, slot: Slot) -> None:
        self._plane.release(slot)
        self._actor.wake()

    def publish(self, key: int, version: int, values: Array) -> Ticket:
        ticket = Ticket()
        self._plane.publish(key, version, values.view(np.uint8), ticket)
        self._actor.wake()
        return ticket

    def notify(self, worker: int, notice: Notice) -> None:
        self._plane.notify(worker, notice)
        self._actor.wake()

    def retire(self, key: int) -> Ticket:
        ticket = Ticket()
        self._plane.retire(key, ticket)
        self._actor.wake()
        return ticket

    def host(self, key: int, room: int) -> None:
        self._plane.host(key, room)

    def reroute(self, key: int, server: int, room: int) -> None:
        self._plane.reroute(key, server, room)
        self._actor.wake()

    def parcel(self, server: int, head: bytes, body: Array) -> Ticket:
        rank = self._servers[server]
        if rank not in self._parcels.peers:
            raise ChannelError(
                f"cannot send a parcel from rank {self.rank} to rank {rank}: need two servers; choose another server",
                rank=self.rank,
                op="parcel",
            )
        ticket = Ticket()
        self.counters.parcels += 1
        self.counters.parcel_bytes += len(head) + body.nbytes
        flat = body.reshape(-1).view(np.uint8)
        self._actor.submit(self._after_outbox(self._parcels.send(rank, head, flat, lambda: self._finish(ticket))))
        return ticket

    # --- for the planes ----------------------------------------------------------------------------

    def deliver(self, *events: Any) -> None:
        """An event has come (communication thread)."""
        self._deliver(*events)

    def finish(self, ticket: Ticket, result: int = 0) -> None:
        """An operation is done (communication thread)."""
        self._finish(ticket, result)

    def barrier(self) -> Operation:
        """All ranks of the world, without spinning."""
        return self._tested(self.world.control.Ibarrier())

    def drain(self, sent: Counts, received: Counts) -> Operation:
        """Wait until everything has come that other ranks sent to this one. Collective: all ranks.

        A message that comes after its receive was cancelled would stay behind in the library, where it upsets the
        next communicator that gets the number of the freed one.

        Args:
            sent: messages sent to each rank, and none will follow.
            received: messages received from each rank, counted on while this waits.
        """
        expected = np.zeros_like(sent)
        control = self.world.control
        yield from self._tested(control.Ialltoall([sent, 1, MPI.INT64_T], [expected, 1, MPI.INT64_T]))
        while (received < expected).any():
            yield False

    # --- inside ------------------------------------------------------------------------------------

    def _look(self) -> bool:
        self._progress.Test()
        messages = self._mailbox.look()
        if messages:
            self._deliver(*(Control(source, data) for source, data in messages))
        return bool(messages) | self._plane.look() | self._parcels.look()

    def _run(self, operation: Callable[[Ticket], Operation], what: str, *, deadline_s: float | None = None) -> None:
        ticket = Ticket()
        self._actor.submit(operation(ticket))
        self.wait(lambda: ticket.done, what, deadline_s=deadline_s)

    def _fall_back(self, problem: str) -> None:
        """Take the other plane, for some rank has no memory for this one's windows."""
        if self._fallback is None:
            raise ChannelError(
                f"cannot open the data plane: {problem}; give the container more shared memory, lower"
                " comm.num_slots or comm.publish_buffers, or set comm.mode to auto or p2p",
                rank=self.rank,
            )
        logger.warning("the data plane is p2p: %s", problem)
        self._plane = self._fallback(self)
        self.mode = f"p2p ({problem})"

    def _find_problem(self, layout: Layout) -> str:
        """Why the plane cannot be opened, the same on all ranks; empty if it can."""
        found: list[str] = []

        def operation(ticket: Ticket) -> Operation:
            found.append((yield from first_problem(self.world.control, self._plane.problem(layout))))
            self._finish(ticket)

        self._run(operation, "all ranks to see whether the data plane fits")
        return found[0]

    def _shut(self, ticket: Ticket) -> Operation:
        yield from self.barrier()
        yield from self._plane.close()
        yield from self.drain(self._mailbox.sent, self._mailbox.received)
        yield from self.drain(self._parcels.sent, self._parcels.received)
        yield from self._parcels.close()
        self._mailbox.close()
        self._finish(ticket)

    def _after_outbox(self, operation: Operation) -> Operation:
        """The operation, begun when all that was put into the outbox before has left."""
        self._plane.empty_outbox()
        yield from operation

    def _request(self, start: Callable[[], MPI.Request], ticket: Ticket) -> Operation:
        yield from self._tested(start())
        self._finish(ticket)

    @staticmethod
    def _tested(request: MPI.Request) -> Operation:
        while not request.Test():
            yield False
