"""A worker's end: registers the plan, encodes and pushes shards, waits, pulls, and asks for work.

Joins the worker's state machine with the channel. One thread uses it, the script's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from hpcps.codec.encoder import Encoded, plain
from hpcps.comm.channel import Array, Channel, Notice, Ticket
from hpcps.config import RunConfig
from hpcps.errors import PlanMismatchError, ProtocolError
from hpcps.native import checksum
from hpcps.plan import Group, Grouping, Roles, Route, Shard, TensorSpec, digest
from hpcps.protocol.control import (
    BarrierEnter,
    DecodeCosts,
    Done,
    DrainTo,
    EndOfData,
    JoinGroup,
    Order,
    Register,
    RouteChange,
)
from hpcps.protocol.messages import Kind
from hpcps.protocol.worker import WorkerProtocol, owner_of
from hpcps.runtime.compression import Compression
from hpcps.runtime.mail import Mail
from hpcps.runtime.metrics import EventLog
from hpcps.runtime.passes import Contribution
from hpcps.runtime.placing import check_servers, place_shards, rerouted, with_rules
from hpcps.runtime.pull import Pull
from hpcps.runtime.wire import frame_shape, layout_of, to_json
from hpcps.update.rule import RuleSpec

__all__ = ["Array", "Pull", "Ticket", "WorkerClient"]

POOLED_AT_ONCE = 8
"""Shards whose residuals are summed over the workers together: few hold little memory, one waits for each."""


class WorkerClient:
    """One worker.

    Args:
        channel: this rank's channel.
        config: the run's settings.
        roles: who serves and who works.
        events: where events go.
    """

    def __init__(self, channel: Channel, config: RunConfig, *, roles: Roles, events: EventLog) -> None:
        self.channel = channel
        self.config = config
        self.roles = roles
        self.rank = channel.rank
        self.compression = Compression(channel, config, events=events)
        self.grouping = Grouping(generation=0, groups=(Group(index=0, workers=roles.workers),))
        self._group = self.grouping.groups[0]
        self._route: Route | None = None
        self._num_rooms: tuple[int, ...] = ()
        self._protocol = WorkerProtocol(self.rank, num_keys=0)
        self.mail = Mail(channel, roles=roles, on_notice=self._on_notice, on_news=self._on_news)
        self._num_barriers = 0
        self._told_end = (-1, -1)

    def place(self, tensors: tuple[TensorSpec, ...]) -> Route:
        """Cut the tensors into shards and give each a server; the same on every worker."""
        facts = self.mail.wait_facts() if len(self.roles.servers) > 1 else {}
        return place_shards(tensors, config=self.config, roles=self.roles, facts=facts)

    def with_rules(self, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Give each tensor the codec that the rules name."""
        return with_rules(tensors, config=self.config, roles=self.roles)

    # --- start ---------------------------------------------------------------------------------------

    def register(self, route: Route, tensors: tuple[TensorSpec, ...], *, rule: RuleSpec) -> None:
        """Agree on the plan with all ranks and open the data plane. Collective over all ranks.

        Raises:
            PlanMismatchError: another worker has another plan.
        """
        rule_text = rule.to_json()
        first = self.rank == self.roles.workers[0]
        message = Register(
            rank=self.rank,
            digest=f"{digest(route)}-{_text_digest(to_json(tensors) + rule_text)}",
            route=to_json(route) if first else "",
            tensors=to_json(tensors) if first else "",
            rule=rule_text if first else "",
        )
        self.mail.tell_servers(message)
        for refusal in self.mail.wait_replies():
            if refusal:
                raise PlanMismatchError(refusal, rank=self.rank)
        self._route = route
        self._shapes = [frame_shape(shard, rule) for shard in route.shards]
        self._protocol = WorkerProtocol(self.rank, num_keys=len(route.shards))
        layout = layout_of(route, rule, roles=self.roles, config=self.config.comm, routing=self.config.routing)
        self._num_rooms = self.channel.open(layout).num_rooms
        if self.grouping.generation > 0:
            self.channel.regroup([list(group.workers) for group in self.grouping.groups])
        self._join()

    def load(self, values: Sequence[Array], options: tuple[float, ...]) -> None:
        """Give the servers the first values, from the first worker; wait until they are published."""
        if self.rank == self.roles.workers[0]:
            tickets = []
            for shard in self.route.shards:
                presence = bytes(len(shard.pieces))
                encoded = plain(values[shard.key])
                tickets.append(self._send(shard, Kind.INIT, encoded=encoded, options=options, presence=presence))
            self.mail.wait("the servers to take the first values", tickets=tickets)
        self.mail.wait("the servers to publish the first values", until=self._protocol.loaded)
        for shard in self.route.shards:
            self._protocol.on_pulled(shard.key, version=0)

    @property
    def route(self) -> Route:
        """The route in force."""
        if self._route is None:
            raise ProtocolError(
                "cannot use the servers: no plan is registered; make a DistributedOptimizer first", rank=self.rank
            )
        return self._route

    @property
    def registered(self) -> bool:
        """True once a plan is in force."""
        return self._route is not None

    @property
    def group(self) -> Group:
        """This worker's group."""
        return self._group

    # --- one step --------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """Steps begun by this worker."""
        return self._protocol.clock

    def push(self, gradients: Sequence[Array], contribution: Contribution) -> list[Ticket]:
        """Begin the next step: send the shards that this member owns. A buffer is free when its ticket is done."""
        self._protocol.advance()
        group = self.group
        self.compression.share_frac = contribution.share_frac
        tickets = []
        for shard in self.route.shards:
            if owner_of(shard, group) == self.rank:
                encoded = self.compression.encode(shard, gradients[shard.key], counts=contribution.weight > 0)
                presence = bytes(bool(contribution.present[piece.tensor]) for piece in shard.pieces)
                tickets.append(
                    self._send(
                        shard,
                        Kind.GRADIENT,
                        encoded=encoded,
                        options=contribution.options,
                        presence=presence,
                        weight=contribution.weight,
                        share_frac=contribution.share_frac,
                        sample_cost=contribution.sample_cost,
                    )
                )
        return tickets

    def wait_settled(self) -> None:
        """Wait until all steps of the group are applied or refused."""
        clock = self._protocol.clock
        self.mail.wait(f"the servers to settle step {clock}", until=lambda: self._protocol.settled_through(clock))

    def start_pull(self, out: Sequence[Array], *, slack: int = 0) -> Pull:
        """Begin to read every shard that has a version newer than the model's.

        Args:
            out: where the values of each shard go, by key; the channel's until the read is finished.
            slack: last steps of the group that need not be settled.
        """
        pull = Pull(self.channel, self._protocol, out=out, clock=self._protocol.clock - slack)
        self.go_on(pull)
        return pull

    def go_on(self, pull: Pull) -> None:
        """Start what may be read by now, without waiting."""
        self.mail.process()
        pull.start()

    def wait_pull(self, pull: Pull) -> None:
        """Wait until everything is read."""
        self.mail.wait(f"the servers to settle step {pull.clock}", until=pull.start, tickets=pull.tickets)

    def finish_pull(self, pull: Pull) -> tuple[int, ...]:
        """Wait for a read; the model's versions are then its. Returns the keys that were read."""
        self.wait_pull(pull)
        return pull.finish()

    def share_versions(self) -> None:
        """Hear of every version that another worker has heard of. Collective over the workers.

        A notice may come late; who has waited for its own pushes knows of the versions that they made.
        """
        own = [self._protocol.newest(shard.key) for shard in self.route.shards]
        rows = self._gather(own, "the versions that the other workers know")
        for shard in self.route.shards:
            self._protocol.on_notice(shard.key, version=int(rows[:, shard.key].max()), clock=0)

    def staleness(self) -> int:
        """Largest number of versions by which the model is behind what this worker has heard of."""
        return max(
            (self._protocol.newest(shard.key) - self._protocol.used(shard.key) for shard in self.route.shards),
            default=0,
        )

    def end_step(self, *, exchange_s: float, step_s: float) -> None:
        """A step is over: let the choice of codecs learn from it.

        Args:
            exchange_s: from the push to the end of the pull.
            step_s: from the end of the step before.
        """
        runs_ahead = self.config.overlap > 0 or len(self.grouping.groups) > 1
        self.compression.end_step(exchange_s=exchange_s, hidden_s=step_s - exchange_s if runs_ahead else 0.0)

    def allreduce(self, buffer: Array, *, everyone: bool = False) -> Ticket:
        """Sum over the group or over all workers, in place."""
        return self.channel.allreduce(buffer, everyone=everyone)

    def broadcast(self, buffer: Array) -> None:
        """Give all workers the first worker's buffer."""
        ticket = self.channel.broadcast(buffer, self.roles.workers[0])
        self.mail.wait("the first worker's values", tickets=(ticket,))

    # --- groups and servers ---------------------------------------------------------------------------

    def adopt(self, order: Order, *, refresh: Callable[[], None] | None = None) -> bool:
        """Regroup if the order belongs to a new grouping; True if it did. Collective over the workers.

        The group pauses, so that no window waits for it, and waits for its own pushes. Once all workers have come so
        far nothing is under way: all take the newest parameters, and from there on all clocks are the largest of all.

        Args:
            order: names the grouping.
            refresh: takes the newest parameters.
        """
        if order.generation == self.grouping.generation:
            return False
        if order.generation < self.grouping.generation:
            raise ProtocolError(
                f"cannot go back to grouping {order.generation} at rank {self.rank}: it is in grouping"
                f" {self.grouping.generation} already; read one loader at a time, or set grouping.regroup and"
                " guard.enabled off",
                rank=self.rank,
            )
        if self.registered:
            self.end_of_data()
            self.wait_settled()
            clocks = self._gather([self._protocol.clock], "the other workers to regroup")
            self._protocol.on_regroup(int(clocks.max()))
            if refresh is not None:
                refresh()
        self.grouping = Grouping(
            generation=order.generation,
            groups=tuple(Group(index=i, workers=tuple(ranks)) for i, ranks in enumerate(order.groups)),
        )
        self._group = self.grouping.group_of(self.rank)
        if self.registered:
            self._pool_owed()
            self.channel.regroup(order.groups)
            self._join()
        return True

    def _gather(self, row: Sequence[float], what: str) -> Array:
        """The numbers of all workers, a row each; returns when all workers have come here."""
        rows = np.zeros((len(self.roles.workers), len(row)))
        rows[self.roles.workers.index(self.rank)] = row
        self.mail.wait(what, tickets=(self.allreduce(rows.reshape(-1), everyone=True),))
        return rows

    def _pool_owed(self) -> None:
        """Give every worker the sum of what the old groups' codecs left out, each by its part of a batch.

        Every new group owes all of it: its own part of the batch is what the servers make of it.
        """
        shards = [shard for shard in self.route.shards if self.compression.may_owe(shard)]
        for first in range(0, len(shards), POOLED_AT_ONCE):
            some = shards[first : first + POOLED_AT_ONCE]
            totals = [self.compression.take_owed(shard) for shard in some]
            self.mail.wait(
                "what the other groups owe", tickets=[self.allreduce(each, everyone=True) for each in totals]
            )
            for shard, total in zip(some, totals, strict=True):
                if owner_of(shard, self._group) == self.rank:
                    self.compression.owe(shard, total)

    def end_of_data(self) -> None:
        """Tell the servers that the group sends nothing until it starts again; a second call says nothing."""
        told = (self.grouping.generation, self._protocol.clock)
        if self.registered and told != self._told_end and self.rank == self.group.workers[0]:
            self._told_end = told
            self.mail.tell_servers(EndOfData(generation=told[0], group=self.group.index, clock=told[1]))

    def barrier(self) -> None:
        """Wait for all workers; until the next step no window waits for this one's group."""
        self.end_of_data()
        self._num_barriers += 1
        index = self._num_barriers
        self.mail.tell_coordinator(BarrierEnter(rank=self.rank, index=index))
        self.mail.wait_barrier(index)

    def use_servers(self, servers: Sequence[int]) -> None:
        """Ask for a move of all shards to these servers (indices), beside those that the user gave to others.

        Raises:
            ConfigError: there is no such server, they have no room for all shards, or shards may not move.
        """
        route = self.route
        check_servers(servers, route=route, num_rooms=self._num_rooms, routing=self.config.routing)
        if route.num_servers > 1:
            self.mail.tell_coordinator(DrainTo(rank=self.rank, servers=sorted(servers)))

    def leave(self) -> None:
        """Say that nothing more will come."""
        self.mail.tell_servers(Done(rank=self.rank))

    # --- inside ----------------------------------------------------------------------------------------

    def _on_notice(self, notice: Notice) -> None:
        self._protocol.on_notice(notice.key, version=notice.version, clock=notice.clock)

    def _on_news(self, message: RouteChange | DecodeCosts) -> None:
        """Shards are elsewhere: pull and push them there from now on. Or a server told what decoding takes."""
        if isinstance(message, DecodeCosts):
            self.compression.on_decode_costs(message)
            return
        self._route = rerouted(self.route, message, num_rooms=self._num_rooms)
        for key in message.keys:
            shard = self._route.shards[key]
            self.compression.reroute(shard)
            self.channel.reroute(key, shard.server, shard.room)

    def _join(self) -> None:
        self.mail.tell_servers(JoinGroup(rank=self.rank, generation=self.grouping.generation, group=self.group.index))

    def _send(
        self,
        shard: Shard,
        kind: Kind,
        *,
        encoded: Encoded,
        options: tuple[float, ...],
        presence: bytes,
        weight: float = 0.0,
        share_frac: float = 0.0,
        sample_cost: float = 1.0,
    ) -> Ticket:
        shape = self._shapes[shard.key]
        header = self._protocol.header(
            shard,
            kind,
            group=self.group,
            generation=self.grouping.generation,
            num_groups=len(self.grouping.groups),
            weight=weight,
            share_frac=share_frac,
            sample_cost=sample_cost,
            meta_bytes=shape.meta_bytes,
            payload_bytes=encoded.payload.size,
            codec=encoded.codec,
            checksum=checksum(encoded.payload) if self.config.comm.checksum else 0,
        )
        return self.channel.push(shard.server, header.pack() + shape.pack_meta(options, presence), encoded.payload)


def _text_digest(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
