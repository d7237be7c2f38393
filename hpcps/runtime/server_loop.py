"""The life of a push on its server: arrive, be checked, be added, close a window, be published, be noticed.

Joins the server's state machine with the channel, the arrays and the moves of shards. ``turn`` takes what has come;
``serve`` turns until every worker is done. In a world of one the worker turns it while it waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from hpcps.comm.channel import Arrival, Bytes, Channel, Control, Notice, Parcel, Slot
from hpcps.config import RunConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Roles, Route, Shard, TensorSpec
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify
from hpcps.protocol.control import (
    ControlMessage,
    Done,
    EndOfData,
    GuardLevel,
    JoinGroup,
    Move,
    Register,
    RegisterReply,
    ServerFacts,
)
from hpcps.protocol.control_json import check_sender, decode_control, encode_control
from hpcps.protocol.messages import HEADER_BYTES, FrameShape, PushHeader
from hpcps.protocol.server import ServerProtocol
from hpcps.runtime.compression import AUTO
from hpcps.runtime.coordination import Coordination
from hpcps.runtime.decoding import DecodeReport
from hpcps.runtime.emulation import server_device
from hpcps.runtime.load import LoadMeter, measure_rate
from hpcps.runtime.memory import free_memory
from hpcps.runtime.metrics import EventLog
from hpcps.runtime.migration import Migration
from hpcps.runtime.parcels import Kind, unpack_head
from hpcps.runtime.server_stats import ServerStats
from hpcps.runtime.shard_store import ShardStore
from hpcps.runtime.wire import frame_shape, layout_of, route_from_json, tensors_from_json
from hpcps.update.rule import Rule, RuleSpec

__all__ = ["MakeRule", "ServerLoop", "ServerStats"]

logger = logging.getLogger(__name__)

MakeRule: TypeAlias = Callable[[Shard, RuleSpec, Sequence[TensorSpec]], Rule]
"""Makes the optimizer of a shard."""

_SLOT_S = 0.002
"""Longest sleep while frames are being sent on from their slots: no news tells that one has left."""

_IDLE_S = 1.0
"""Longest sleep of a server without a deadline; news wakes it at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """What there is once the plan is known."""

    protocol: ServerProtocol
    store: ShardStore
    migration: Migration
    shapes: tuple[FrameShape, ...]


class ServerLoop:
    """One server.

    Args:
        channel: this rank's channel.
        config: the run's settings.
        roles: who serves and who works.
        make_rule: makes the optimizer of a shard.
        events: where events go.
        measure: tells the gradient bytes a second that this server takes; the emulated rate, 0 for none, goes in.
        memory: tells the bytes that this server may still use, 0: unknown.
        clock: seconds, rising.
    """

    def __init__(
        self,
        channel: Channel,
        config: RunConfig,
        *,
        roles: Roles,
        make_rule: MakeRule,
        events: EventLog,
        measure: Callable[[float], float] = measure_rate,
        memory: Callable[[], int] = free_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._config = config
        self._roles = roles
        self._make_rule = make_rule
        self._events = events
        self._measure = measure
        self._memory = memory
        self._clock = clock
        self._index = roles.servers.index(channel.rank)
        self._coordination = Coordination(channel, config, roles=roles, events=events) if self._index == 0 else None
        self._registered: dict[int, Register] = {}
        self._membership: dict[int, JoinGroup] = {}
        self._done: set[int] = set()
        self._plane: _Plane | None = None
        self._moves: list[tuple[Move, float]] = []
        """Shards to give away at the end of this turn, and when the order came."""
        self._decoding = DecodeReport(self._index)
        self._meter = LoadMeter(self._index, interval_steps=config.routing.interval_steps, memory=memory)
        self.stats = ServerStats()

    def serve(self) -> None:
        """Turn until every worker is done."""
        if len(self._roles.servers) > 1:
            self._tell_facts()
        while not self.finished:
            self.turn()
            deadline_s = self._plane.protocol.next_deadline_s if self._plane else None
            wait_s = _IDLE_S if deadline_s is None else min(_IDLE_S, max(0.0, deadline_s - self._clock()))
            if self._coordination is not None:
                wait_s = min(wait_s, self._coordination.idle())
            if self._plane is not None and self._plane.migration.sending_on:
                wait_s = min(wait_s, _SLOT_S)
            if not self.finished:
                self._channel.wait_events(wait_s)
        self.close()

    @property
    def finished(self) -> bool:
        """True once all workers have said that they are done, and no shard will move any more."""
        return self._done.issuperset(self._roles.workers) and (
            len(self._roles.servers) == 1 or self._roles.servers[0] in self._done
        )

    def close(self) -> None:
        """Write the counts."""
        self.stats.write(self._events, counts=self._plane.protocol.counts if self._plane else {})

    def turn(self) -> bool:
        """Take in everything that has come; True if there was anything to do."""
        self._meter.turn_began()
        events = self._channel.take()
        queue = sum(isinstance(event, (Arrival, Parcel)) for event in events)
        self.stats.queue_max = max(self.stats.queue_max, queue)
        self._meter.queued(queue)
        for event in events:
            queue -= isinstance(event, (Arrival, Parcel))
            if self._plane is not None:
                self._plane.protocol.num_queued = queue
            if isinstance(event, Arrival):
                self._on_frame(event.head, event.payload, event.slot)
            elif isinstance(event, Parcel):
                self._on_parcel(event)
            elif isinstance(event, Control):
                self._on_control(event)
        plane, due = self._plane, False
        if plane is not None:
            deadline_s = plane.protocol.next_deadline_s
            due = deadline_s is not None and deadline_s <= self._clock()
            if due:
                self._carry_out(plane.protocol.on_timer(now_s=self._clock()))
            plane.store.settle()
            self._tell_costs(plane)
        self._meter.turn_ended(worked=bool(events) or due)
        if plane is not None:
            self._tell_load(plane)
            self._give(plane)
        if self._coordination is not None:
            level = self._coordination.take_own_level()
            if level is not None:
                self._set_guard(level)
            self._coordination.idle()
            self._tell_end(self._coordination)
        return bool(events)

    # --- control -----------------------------------------------------------------------------------

    def _on_control(self, event: Control) -> None:
        message = decode_control(event.data)
        check_sender(message, event.source, servers=self._roles.servers, workers=self._roles.workers)
        plane = self._plane
        if isinstance(message, Register):
            self._registered[message.rank] = message
        elif isinstance(message, JoinGroup):
            self._membership[message.rank] = message
            if plane is not None:
                for key in plane.store.keys:
                    self._notify(plane.protocol.settled(key), only=message.rank)
        elif isinstance(message, EndOfData):
            if plane is not None:
                now_s = self._clock()
                self._carry_out(
                    plane.protocol.on_end_of_data(
                        message.group, message.clock, generation=message.generation, now_s=now_s
                    )
                )
        elif isinstance(message, GuardLevel):
            self._set_guard(message.level)
        elif isinstance(message, Move):
            self._moves.append((message, self._clock()))
        elif isinstance(message, Done):
            self._done.add(message.rank)
            if self._coordination is not None:
                self._coordination.on_done(message)
        elif self._coordination is not None:
            self._coordination.on_message(message)
        else:
            raise ProtocolError(
                f"cannot accept {type(message).__name__} from rank {event.source}: rank {self._channel.rank} is not"
                " the first server; run the same hpcps on every rank",
                rank=self._channel.rank,
            )
        ready = self._coordination is None or self._coordination.has_facts
        if self._plane is None and ready and len(self._registered) == len(self._roles.workers):
            self._open()

    def _tell_facts(self) -> None:
        """Say what this server can do, before the workers place shards on it."""
        rates = self._config.emulate.server_bytes_per_s
        facts = ServerFacts(
            server=self._index,
            bytes_per_s=self._measure(rates[self._index] if rates else 0.0),
            memory_bytes=self._memory(),
        )
        for rank in self._roles.workers:
            self._channel.send(rank, encode_control(facts))
        self._tell_coordinator(facts)

    def _tell_coordinator(self, message: ControlMessage) -> None:
        if self._coordination is not None:
            self._coordination.on_message(message)
        else:
            self._channel.send(self._roles.servers[0], encode_control(message))

    def _tell_load(self, plane: _Plane) -> None:
        if self._roles.embedded:
            return
        load = self._meter.report(plane.store.newest, plane.store.keys)
        if load is None:
            return
        self._events.write("load", **asdict(load))
        if len(self._roles.servers) > 1 or self._config.sync_mode != "sync":
            self._tell_coordinator(load)

    def _set_guard(self, level: int) -> None:
        if self._plane is not None:
            self._carry_out(self._plane.protocol.set_guard(level, now_s=self._clock()))

    def _tell_end(self, coordination: Coordination) -> None:
        """Once all workers are done and all moves over: let the other servers go, and this one."""
        own = self._roles.servers[0]
        if own not in self._done and self._done.issuperset(self._roles.workers) and coordination.at_rest:
            self._done.add(own)
            for rank in self._roles.servers[1:]:
                self._channel.send(rank, encode_control(Done(rank=own)))

    def _open(self) -> None:
        """All workers have registered: compare their plans, then open the data plane."""
        first = self._registered[self._roles.workers[0]]
        refusal = ""
        for rank, message in sorted(self._registered.items()):
            if message.digest != first.digest:
                refusal = (
                    f"cannot start training: rank {rank} has plan {message.digest}, rank {first.rank} has"
                    f" {first.digest}; build the same model and optimizer on every worker"
                )
        for rank in self._roles.workers:
            self._channel.send(rank, encode_control(RegisterReply(refusal=refusal)))
        if refusal:
            self._registered.clear()
            return
        route, tensors = route_from_json(first.route), tensors_from_json(first.tensors)
        spec = RuleSpec.from_json(first.rule)
        self._plane = self._make_plane(route, spec, tensors)
        layout = layout_of(route, spec, roles=self._roles, config=self._config.comm, routing=self._config.routing)
        layout = self._channel.open(layout)
        if self._coordination is not None:
            self._coordination.open(route, layout.num_rooms)

    def _make_plane(self, route: Route, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> _Plane:
        def make_rule(shard: Shard) -> Rule:
            return self._make_rule(shard, spec, tensors)

        store = ShardStore(
            self._channel,
            num_options=len(spec.option_names),
            stats=self.stats,
            meter=self._meter,
            device=server_device(self._config.emulate, self._index),
        )
        own = route.of_server(self._index)
        for shard in own:
            store.add(shard, make_rule(shard))
        smallest = min(route.shards, key=lambda shard: shard.numel, default=None)
        protocol = ServerProtocol(
            own,
            window=self._config.window,
            staleness=self._config.staleness,
            num_workers=len(self._roles.workers),
            adaptive=smallest is not None and make_rule(smallest).adaptive,
            overlap=0 if self._roles.embedded else self._config.overlap,
        )
        migration = Migration(
            self._channel,
            route=route,
            server=self._index,
            protocol=protocol,
            store=store,
            make_rule=make_rule,
            stats=self.stats,
            clock=self._clock,
        )
        shapes = tuple(frame_shape(shard, spec) for shard in route.shards)
        return _Plane(protocol=protocol, store=store, migration=migration, shapes=shapes)

    # --- pushes and parcels ------------------------------------------------------------------------

    def _on_frame(self, head: bytes, payload: Bytes, slot: Slot | None) -> None:
        header = PushHeader.unpack(head[:HEADER_BYTES])
        plane, key = self._plane, header.key
        if plane is not None and plane.protocol.holds(key):
            frame = plane.store.frame(header, head, payload, slot, shape=plane.shapes[key])
            self._carry_out(plane.protocol.on_push(header, frame, now_s=self._clock()))
        elif plane is not None and plane.migration.target(key) is not None:
            plane.migration.send_on(key, head, payload, slot)
        else:
            raise ProtocolError(
                f"cannot accept a push of shard {key} from rank {header.sender}: rank {self._channel.rank} holds"
                f" {sorted(plane.store.keys) if plane else []}; run the same plan on every rank",
                rank=self._channel.rank,
                key=key,
                op="push",
            )

    def _on_parcel(self, parcel: Parcel) -> None:
        began_s = self._clock()
        kind, head = unpack_head(parcel.head)
        if kind is Kind.FRAME:
            self._on_frame(head, parcel.body, None)
            return
        plane = self._plane
        if plane is None:
            raise ProtocolError(
                f"cannot take a shard from rank {parcel.source}: rank {self._channel.rank} has no plan yet;"
                " run the same hpcps on every rank",
                rank=self._channel.rank,
                op="move",
            )
        moved, actions = plane.migration.take(head, parcel.body, began_s=began_s)
        self._carry_out(actions)
        self._tell_coordinator(moved)
        self._meter.leave_out(self._clock() - began_s)

    def _give(self, plane: _Plane) -> None:
        """Give away what the coordinator wants elsewhere; what this turn brought is in it.

        Last in a turn: the load that it reports may be what makes the coordinator move a shard of this very server.
        """
        if self._coordination is not None:
            self._moves += [(move, self._clock()) for move in self._coordination.take_own_moves()]
        moves, self._moves = self._moves, []
        for move, began_s in moves:
            plane.migration.give(move, began_s=began_s)
        plane.migration.poll()

    def _carry_out(self, actions: Sequence[Action]) -> None:
        plane = self._plane
        assert plane is not None  # it is the protocol's
        for action in actions:
            if isinstance(action, Accumulate):
                plane.store.accumulate(action)
            elif isinstance(action, Close):
                plane.store.close(action)
            elif isinstance(action, Notify):
                self._notify(action)
            elif isinstance(action, Load):
                plane.store.load(action)
            else:
                plane.store.refuse(action)

    def _tell_costs(self, plane: _Plane) -> None:
        """Tell the workers what decoding takes here, where there is a shard for which they choose the codec."""
        chosen = plane.store.totals(AUTO)
        costs = self._decoding.look(self.stats.num_windows, chosen) if chosen else None
        if costs is not None:
            for rank in self._roles.workers:
                if rank not in self._done:
                    self._channel.send(rank, encode_control(costs))

    def _notify(self, action: Notify, *, only: int | None = None) -> None:
        plane = self._plane
        if action.version < 0 or plane is None:
            return
        clocks = dict(action.clocks)
        for rank in self._roles.workers if only is None else (only,):
            member = self._membership.get(rank)
            known = member is not None and member.generation == plane.protocol.generation
            clock = clocks.get(member.group, 0) if member is not None and known else 0
            self._channel.notify(rank, Notice(action.key, action.version, clock))
