"""What the two data planes of the MPI channel have in common: their interface. Communication thread only,
but for ``release``, ``publish`` and ``notify``, which put into an outbox that ``look`` empties in order.
"""

from __future__ import annotations

import abc
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from hpcps.comm.actor import Operation
from hpcps.comm.channel import Bytes, Notice, Slot, Ticket
from hpcps.comm.layout import Layout

__all__ = ["Outgoing", "Plane", "Posting", "Publication"]


@dataclass(frozen=True, slots=True)
class Publication:
    """A version of a shard to be published."""

    key: int
    version: int
    values: Bytes
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Posting:
    """A notice for a worker (a world rank)."""

    worker: int
    notice: Notice


Outgoing: TypeAlias = Slot | Publication | Posting
"""A slot stands for its ack."""


class Plane(abc.ABC):
    """Frames up, parameters down."""

    def __init__(self) -> None:
        self.outbox: deque[Outgoing] = deque()

    @abc.abstractmethod
    def open(self, layout: Layout, ticket: Ticket) -> Operation:
        """Collective set-up."""

    @abc.abstractmethod
    def close(self) -> Operation:
        """Collective end; no operation is under way."""

    @abc.abstractmethod
    def look(self) -> bool:
        """Take in and give out; True if there was anything."""

    @abc.abstractmethod
    def push(self, server: int, head: bytes, payload: Bytes, ticket: Ticket) -> Operation:
        """Put a frame into the next slot on a server."""

    @abc.abstractmethod
    def pull(self, key: int, version: int, out: Bytes, ticket: Ticket) -> Operation:
        """Read a published shard of at least a version."""

    def release(self, slot: Slot) -> None:
        """Queue an ack."""
        self.outbox.append(slot)

    def publish(self, key: int, version: int, values: Bytes, ticket: Ticket) -> None:
        """Queue a publication."""
        self.outbox.append(Publication(key, version, values, ticket))

    def notify(self, worker: int, notice: Notice) -> None:
        """Queue a notice."""
        self.outbox.append(Posting(worker, notice))
