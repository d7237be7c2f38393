"""One read of all shards: each is read as soon as the servers have settled the step that it must contain."""

from __future__ import annotations

from collections.abc import Sequence

from hpcps.comm.channel import Array, Channel, Ticket
from hpcps.protocol.worker import WorkerProtocol

__all__ = ["Pull"]


class Pull:
    """A read under way.

    Args:
        channel: the worker's channel.
        protocol: the worker's clocks and versions.
        out: where the values of each shard go, by key.
        clock: step of the group that a shard must have settled before it is read.
    """

    def __init__(self, channel: Channel, protocol: WorkerProtocol, *, out: Sequence[Array], clock: int) -> None:
        self.clock = clock
        self.tickets: list[Ticket] = []
        self._channel = channel
        self._protocol = protocol
        self._out = out
        self._waiting = list(range(len(out)))
        self._started: list[int] = []

    def start(self) -> bool:
        """Start to read what is settled and newer than the model's; True once nothing is left to start."""
        for key in [key for key in self._waiting if self._protocol.settled(key) >= self.clock]:
            self._waiting.remove(key)
            newest = self._protocol.newest(key)
            if newest > self._protocol.used(key):
                self._started.append(key)
                self.tickets.append(self._channel.pull(key, newest, self._out[key]))
        return not self._waiting

    def finish(self) -> tuple[int, ...]:
        """All tickets are done: the model's versions are those that were read. Returns their keys."""
        for key, ticket in zip(self._started, self.tickets, strict=True):
            self._protocol.on_pulled(key, version=ticket.result)
        return tuple(self._started)
