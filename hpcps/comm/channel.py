"""The channel: what the runtime asks of a transport. Moves bytes, decides nothing.

One thread uses a channel (the rank's main thread); the transport may work on its own thread behind it.
Calls return at once with a ticket; ``wait`` blocks without burning a core. A buffer that was handed
over belongs to the channel until its ticket is done.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcps.comm.layout import Layout
from hpcps.comm.link import LinkUse
from hpcps.errors import ChannelError, DeadlineError

logger = logging.getLogger(__name__)

_WARN_S = 60.0
"""A wait as long as this is worth a line in the log."""

__all__ = ["Arrival", "Array", "Bytes", "Channel", "Control", "Counters", "Event", "Notice", "Parcel", "Slot", "Ticket"]

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class Ticket:
    """An operation under way. ``result`` is set before ``done``."""

    __slots__ = ("done", "result")

    def __init__(self) -> None:
        self.done = False
        self.result: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A push slot on a server: whose, which, and for the how-manieth push."""

    worker: int
    index: int
    seq: int


@dataclass(frozen=True, slots=True)
class Control:
    """A control message has come."""

    source: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame stands in a slot; ``head`` is a copy of header and options, ``payload`` the slot's memory."""

    slot: Slot
    head: bytes
    payload: Bytes


@dataclass(frozen=True, slots=True)
class Notice:
    """A server published a version of a shard and settled this worker's group up to a clock."""

    key: int
    version: int
    clock: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """A parcel from another server (a world rank) has come; whoever takes it owns ``body``."""

    source: int
    head: bytes
    body: Bytes


Event: TypeAlias = Control | Arrival | Notice | Parcel


@dataclass(slots=True)
class Counters:
    """What went over the channel since it opened."""

    pushes: int = 0
    pushed_bytes: int = 0
    pulls: int = 0
    pulled_bytes: int = 0
    pull_retries: int = 0
    reduced_bytes: int = 0
    control_messages: int = 0
    credit_waits: int = 0
    parcels: int = 0
    parcel_bytes: int = 0


class Channel(abc.ABC):
    """A rank's end of the transport.

    Args:
        rank: world rank.
        deadline_s: longest time that one ``wait`` may last.
    """

    def __init__(self, rank: int, *, deadline_s: float) -> None:
        self.rank = rank
        self.deadline_s = deadline_s
        self.counters = Counters()
        self.mode = "in process"
        self._inbox: deque[Event] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    @property
    def shares_memory(self) -> bool:
        """True if arrays are handed over by reference: the worker's parameters may be the server's."""
        return False

    # --- life -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def open(self, layout: Layout) -> Layout:
        """Set up the data plane. Collective: all ranks, same layout. Blocks.

        Returns: the layout in force: without rooms to spare where some rank has no memory for them.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for all ranks, then free everything. Collective. A second call does nothing.

        The wait has no deadline: one rank may evaluate the model for hours while the others are done.
        """

    @abc.abstractmethod
    def abort(self, code: int) -> None:
        """End all ranks of the job with an exit code; comes back only where there is no other rank."""

    # --- control and collectives ------------------------------------------------------------------

    @abc.abstractmethod
    def send(self, rank: int, data: bytes) -> None:
        """Send a control message; messages of one pair of ranks arrive in order.

        Workers send to servers, servers to workers and to other servers. What a server sends leaves after all
        that it published, noticed and retired before.
        """

    @abc.abstractmethod
    def regroup(self, groups: Sequence[Sequence[int]]) -> None:
        """Make the communicator of this worker's group. Collective over the workers. Blocks."""

    @abc.abstractmethod
    def allreduce(self, buffer: Array, *, everyone: bool = False) -> Ticket:
        """Sum a float buffer in place over the group, or over all workers.

        Collective: the members start their reductions in the same order.
        """

    @abc.abstractmethod
    def broadcast(self, buffer: Array, root: int) -> Ticket:
        """Give all workers the buffer of one worker (a world rank). Collective over the workers."""

    # --- data plane, worker ------------------------------------------------------------------------

    @abc.abstractmethod
    def push(self, server: int, head: bytes, payload: Array) -> Ticket:
        """Put a frame into this worker's next slot on a server (an index); waits for a credit first."""

    @abc.abstractmethod
    def link_use(self, server: int) -> LinkUse:
        """What this worker pushed to a server (an index) so far, and in what time."""

    @abc.abstractmethod
    def pull_use(self, server: int) -> LinkUse:
        """What this worker pulled from a server (an index) so far, and in what time."""

    @abc.abstractmethod
    def pull(self, key: int, version: int, out: Array) -> Ticket:
        """Read a published shard, at least of a version known from a notice; the result is its version.

        A read that finds that the shard has left goes on when ``reroute`` says where it is.
        """

    @abc.abstractmethod
    def reroute(self, key: int, server: int, room: int) -> None:
        """From now on pulls of a shard go to this room of a server (an index); those that wait go on there."""

    # --- data plane, server ------------------------------------------------------------------------

    @abc.abstractmethod
    def release(self, slot: Slot) -> None:
        """Give the slot back to its worker: a credit. The payload must not be used any more."""

    @abc.abstractmethod
    def publish(self, key: int, version: int, values: Array) -> Ticket:
        """Publish a version of a shard that this server holds; the values may be changed once the ticket is done.

        The first version after the start or after ``host`` is any, each other one follows the one before.
        """

    @abc.abstractmethod
    def notify(self, worker: int, notice: Notice) -> None:
        """Tell a worker (a world rank) about a version. Sent after all earlier publications."""

    @abc.abstractmethod
    def retire(self, key: int) -> Ticket:
        """A shard is here no longer, and its room is free: readers find that it has left.

        The ticket is done once that is so and all earlier publications and notices of the shard have left this rank.
        """

    @abc.abstractmethod
    def host(self, key: int, room: int) -> None:
        """A shard is here now: what is published of it from the next version on lies in that room, which is free.

        At the start a server hosts the shards that the layout gives it.
        """

    @abc.abstractmethod
    def parcel(self, server: int, head: bytes, body: Array) -> Ticket:
        """Send bytes of any number to another server (an index).

        Parcels of one pair of servers arrive in order, and leave after all that this server published, noticed and
        retired before. The body belongs to the channel until the ticket is done.
        """

    # --- waiting -----------------------------------------------------------------------------------

    def take(self) -> list[Event]:
        """All events that have come, oldest first.

        Raises:
            ChannelError: the transport failed; the cause is chained.
        """
        self._raise_failure()
        with self._changed:
            events = list(self._inbox)
            self._inbox.clear()
        return events

    def wait(self, until: Callable[[], bool], what: str, *, deadline_s: float | None = None) -> None:
        """Block until a condition on tickets or on the inbox holds.

        Args:
            until: the condition; called under the channel's lock, so it must be quick.
            what: what is waited for, for the error.
            deadline_s: longest time, the channel's own by default.

        Raises:
            DeadlineError: it took too long; names rank, wait and time.
        """
        began_s = time.monotonic()
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        with self._changed:
            while not until():
                self._raise_failure()
                waited_s = time.monotonic() - began_s
                if waited_s >= limit_s:
                    raise DeadlineError(
                        f"cannot go on at rank {self.rank}: waited {self.deadline_s:g} s for {what}; look at the other"
                        " ranks' logs for the first error, or raise comm.deadline_s",
                        rank=self.rank,
                        op=what,
                    )
                if not self._changed.wait(min(limit_s - waited_s, _WARN_S)):
                    waited_s = time.monotonic() - began_s
                    if waited_s >= _WARN_S:
                        logger.warning("waiting for %s since %.0f s", what, waited_s)

    @property
    def has_events(self) -> bool:
        """True if ``take`` would give something, or fail."""
        return bool(self._inbox) or self._failure is not None

    def wait_events(self, timeout_s: float) -> None:
        """Block until an event has come or the time is over."""
        with self._changed:
            if not self._inbox and self._failure is None:
                self._changed.wait(timeout_s)

    def _deliver(self, *events: Event) -> None:
        with self._changed:
            self._inbox.extend(events)
            self._changed.notify_all()

    def _finish(self, ticket: Ticket, result: int = 0) -> None:
        with self._changed:
            ticket.result = result
            ticket.done = True
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ChannelError(
                f"cannot go on at rank {self.rank}: the transport failed with {self._failure!r};"
                " the first error of the job is in the other ranks' logs",
                rank=self.rank,
            ) from self._failure
