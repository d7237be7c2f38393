"""A worker's mail: what servers tell it is kept until somebody asks; who waits takes in what comes. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from hpcps.comm.channel import Channel, Control, Notice, Ticket
from hpcps.errors import ProtocolError
from hpcps.plan import Roles
from hpcps.protocol.control import (
    BarrierLeave,
    ControlMessage,
    DecodeCosts,
    Order,
    RegisterReply,
    RouteChange,
    ServerFacts,
)
from hpcps.protocol.control_json import check_sender, decode_control, encode_control
from hpcps.protocol.costs import KnownTerms

__all__ = ["Mail"]


class Mail:
    """Messages between one worker and the servers.

    Args:
        channel: this rank's channel.
        roles: who serves and who works.
        on_notice: told of every notice at once.
        on_news: told at once of what concerns the data plane.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        roles: Roles,
        on_notice: Callable[[Notice], None],
        on_news: Callable[[RouteChange | DecodeCosts], None],
    ) -> None:
        self._channel = channel
        self._roles = roles
        self._on_notice = on_notice
        self._on_news = on_news
        self._orders: dict[tuple[int, int, int], Order] = {}
        self._terms = KnownTerms()
        self._replies: list[str] = []
        self._barriers_left = 0
        self.facts: dict[int, ServerFacts] = {}

    # --- out -------------------------------------------------------------------------------------------

    def tell_coordinator(self, message: ControlMessage) -> None:
        """Send a message to the first server."""
        self._channel.send(self._roles.servers[0], encode_control(message))

    def tell_servers(self, message: ControlMessage) -> None:
        """Send a message to every server."""
        data = encode_control(message)
        for server in self._roles.servers:
            self._channel.send(server, data)

    # --- in --------------------------------------------------------------------------------------------

    def wait(self, what: str, *, until: Callable[[], bool] | None = None, tickets: Sequence[Ticket] = ()) -> None:
        """Take in events until a condition holds and all tickets are done.

        Args:
            what: what is waited for, for the error.
            until: the condition, asked after every look at the events; it may start more work.
            tickets: operations under way; ``until`` may add to them.
        """
        end_s = time.monotonic() + self._channel.deadline_s
        while True:
            self.process()
            ready = until is None or until()
            if ready and all(ticket.done for ticket in tickets):
                return
            left_s = end_s - time.monotonic()
            self._channel.wait(partial(self._news, tickets if ready else None), what, deadline_s=left_s)

    def process(self) -> None:
        """Take in what has come."""
        for event in self._channel.take():
            if isinstance(event, Notice):
                self._on_notice(event)
            elif isinstance(event, Control):
                message = decode_control(event.data)
                check_sender(message, event.source, servers=self._roles.servers, workers=self._roles.workers)
                self._keep(message)

    def wait_facts(self) -> dict[int, ServerFacts]:
        """Wait until every server has said what it can do; by index of the server."""
        num_servers = len(self._roles.servers)
        self.wait("every server to say what it can do", until=lambda: len(self.facts) == num_servers)
        return self.facts

    def wait_replies(self) -> list[str]:
        """Wait until every server has answered the plan; an answer is the reason of a refusal, or empty."""
        num_servers = len(self._roles.servers)
        self.wait("every server to accept the plan", until=lambda: len(self._replies) == num_servers)
        return self._replies

    def wait_order(self, loader: int, epoch: int, index: int) -> Order:
        """Wait for the order that answers a request."""
        name = (loader, epoch, index)
        self.wait(f"batch {index} of epoch {epoch}", until=lambda: name in self._orders)
        return self._orders.pop(name)

    def wait_barrier(self, index: int) -> None:
        """Wait until all workers have arrived at a barrier."""
        self.wait(f"the other workers at barrier {index}", until=lambda: self._barriers_left >= index)

    # --- inside ----------------------------------------------------------------------------------------

    def _news(self, tickets: Sequence[Ticket] | None) -> bool:
        return self._channel.has_events or (tickets is not None and all(ticket.done for ticket in tickets))

    def _keep(self, message: ControlMessage) -> None:
        if isinstance(message, Order):
            self._orders[message.loader, message.epoch, message.index] = self._terms.fill(message)
        elif isinstance(message, RouteChange | DecodeCosts):
            self._on_news(message)
        elif isinstance(message, BarrierLeave):
            self._barriers_left = max(self._barriers_left, message.index)
        elif isinstance(message, RegisterReply):
            self._replies.append(message.refusal)
        elif isinstance(message, ServerFacts):
            self.facts[message.server] = message
        else:
            raise ProtocolError(
                f"cannot accept {type(message).__name__} on a worker; run the same hpcps on every rank",
                rank=self._channel.rank,
            )
