"""The coordinator's runtime: hands messages to the state machines of work and of routes, sends their replies, logs
their decisions, and prints the one progress line of a job. Runs on the first server.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from hpcps.comm.channel import Channel
from hpcps.config import RunConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Roles, Route
from hpcps.protocol.control import (
    BarrierEnter,
    ControlMessage,
    Done,
    DrainTo,
    GuardLevel,
    LoaderOpen,
    Move,
    Moved,
    OrderRequest,
    RouteChange,
    ServerFacts,
    ServerLoad,
)
from hpcps.protocol.control_json import encode_control
from hpcps.protocol.coordinator import Coordinator, Reply
from hpcps.protocol.guard import Guard, is_together, ssp_bound
from hpcps.protocol.router import Router
from hpcps.runtime.metrics import EventLog
from hpcps.units import format_seconds

__all__ = ["Coordination"]

logger = logging.getLogger(__name__)


class Coordination:
    """The coordinator of a job.

    Args:
        channel: the first server's channel.
        config: the run's settings.
        roles: who serves and who works.
        events: where events go.
    """

    def __init__(self, channel: Channel, config: RunConfig, *, roles: Roles, events: EventLog) -> None:
        self._channel = channel
        self._config = config
        self._events = events
        self._roles = roles
        self._coordinator = Coordinator(config, roles.workers, report=self._report)
        self._guard = Guard(config, roles.workers, report=self._report)
        self._own_level: int | None = None
        self._facts: dict[int, ServerFacts] = {}
        self._router: Router | None = None
        self._own_moves: list[Move] = []
        self._num_under_way = 0
        self._done: set[int] = set()
        self._shown_s = time.monotonic()
        self._shown_samples = 0

    @property
    def has_facts(self) -> bool:
        """True once every server has said what it can do; a single one need not."""
        return len(self._facts) == len(self._roles.servers) or len(self._roles.servers) == 1

    @property
    def at_rest(self) -> bool:
        """True while no shard is on its way to another server."""
        return self._num_under_way == 0

    def open(self, route: Route, num_rooms: Sequence[int]) -> None:
        """The plan is known: watch over the route from now on.

        Args:
            route: the route at the start.
            num_rooms: rooms of each server.
        """
        if route.num_servers > 1:
            facts = [self._facts[server] for server in sorted(self._facts)]
            self._router = Router(self._config, route, facts=facts, num_rooms=num_rooms, report=self._report)

    def take_own_moves(self) -> list[Move]:
        """Shards that this server is to give away."""
        moves, self._own_moves = self._own_moves, []
        return moves

    def take_own_level(self) -> int | None:
        """The guard level that this server is to take, None: no other than before."""
        level, self._own_level = self._own_level, None
        return level

    def on_done(self, message: Done) -> None:
        """A worker is done: no shard begins to move any more, for servers leave soon."""
        self._done.add(message.rank)

    def on_message(self, message: ControlMessage) -> None:
        """A message for the coordinator, from a worker or a server."""
        if isinstance(message, ServerFacts):
            self._facts[message.server] = message
        elif isinstance(message, ServerLoad | DrainTo | Moved):
            if isinstance(message, ServerLoad):
                self._guard.on_load(message)
            if len(self._roles.servers) > 1 or not isinstance(message, ServerLoad):
                self._on_route_news(message)
        else:
            self._on_work(message)

    def _on_route_news(self, message: ServerLoad | DrainTo | Moved) -> None:
        router = self._router
        if router is None:
            raise ProtocolError(
                f"cannot accept {type(message).__name__}: there is no route between {len(self._roles.servers)} servers"
                " yet; run the same hpcps on every rank",
                rank=self._channel.rank,
            )
        changes: list[RouteChange] = []
        if isinstance(message, Moved):
            self._num_under_way -= 1
            changes, moves = router.on_moved(message)
        elif isinstance(message, ServerLoad):
            moves = router.on_load(message)
        else:
            moves = router.on_drain(message)
        for change in changes:
            for rank in self._roles.workers:
                if rank not in self._done:
                    self._channel.send(rank, encode_control(change))
        for server, move in moves if not self._done else ():
            self._num_under_way += 1
            if server == 0:
                self._own_moves.append(move)
            else:
                self._channel.send(self._roles.servers[server], encode_control(move))

    def _on_work(self, message: ControlMessage) -> None:
        if isinstance(message, OrderRequest):
            replies = self._coordinator.on_request(message)
            num_groups = len(self._coordinator.grouping.groups)
            level = self._guard.on_request(message, num_groups=num_groups)
            if level is not None:
                replies += self._slide(level)
        elif isinstance(message, LoaderOpen):
            self._coordinator.on_loader(message)
            return
        elif isinstance(message, BarrierEnter):
            replies = self._coordinator.on_barrier(message)
        else:
            raise ProtocolError(
                f"cannot accept {type(message).__name__} on a server; run the same hpcps on every rank",
                rank=self._channel.rank,
            )
        for rank, reply in replies:
            self._channel.send(rank, encode_control(reply))

    def _slide(self, level: int) -> list[Reply]:
        """Carry out a new level of the guard rail; returns orders of workers that need not wait any more."""
        self._own_level = level
        for rank in self._roles.servers[1:]:
            self._channel.send(rank, encode_control(GuardLevel(level=level)))
        self._coordinator.set_together(is_together(level))
        return self._coordinator.set_ssp(ssp_bound(self._config.staleness.ssp, level))

    def idle(self) -> float:
        """Show progress if it is due; returns the seconds to the next time."""
        now_s = time.monotonic()
        left_s = self._shown_s + self._config.log.progress_s - now_s
        if left_s <= 0:
            self._show(now_s - self._shown_s)
            self._shown_s = now_s
            left_s = self._config.log.progress_s
        return left_s

    def _report(self, event: str, fields: dict[str, object]) -> None:
        self._events.write(event, **fields)
        level = logging.DEBUG if event in ("capacity", "links", "moved") else logging.INFO
        logger.log(level, "%s: %s", event, ", ".join(f"{name} {value}" for name, value in fields.items()))

    def _show(self, seconds: float) -> None:
        progress = self._coordinator.progress
        done = progress.num_samples - self._shown_samples
        self._shown_samples = progress.num_samples
        if done <= 0:
            return
        rate = done / seconds
        total = f"/{progress.num_epochs}" if progress.num_epochs else ""
        parts = [f"epoch {progress.epoch + 1}{total}", f"{rate:,.0f} samples/s"]
        for name, weight in progress.weights.items():
            if weight > 0:
                parts.append(f"{name} {progress.sums[name] / weight:.4f}")
                progress.sums[name], progress.weights[name] = 0.0, 0.0
        if progress.staleness:
            parts.append(f"staleness up to {progress.staleness}")
            progress.staleness = 0
        if self._guard.level:
            parts.append(f"guard level {self._guard.level}")
        left = progress.num_epochs * progress.epoch_total - progress.num_samples
        if progress.num_epochs and left > 0:
            parts.append(f"ETA {format_seconds(left / rate)}")
        if progress.ideal_samples_per_s > 0:
            reached = rate / progress.ideal_samples_per_s
            holds = f"rank {progress.slowest} is slowest" if reached > 0.9 else "communication or warm-up holds back"
            parts.append(f"{reached:.0%} of the possible speed (S* {progress.s_star:.2f}), {holds}")
        sys.stderr.write("hpcps: " + ", ".join(parts) + "\n")
        sys.stderr.flush()
