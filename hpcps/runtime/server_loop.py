"""The life of a push on its server: arrive, be checked, be added, close a window, be published, be noticed.

Joins the server's state machine with the channel, the accumulators and the rules. ``turn`` takes what
has come; ``serve`` turns until every worker is done. In a world of one the worker turns it while it waits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hpcps.comm.channel import Arrival, Channel, Control, Notice, Ticket
from hpcps.config import RunConfig
from hpcps.errors import ProtocolError
from hpcps.native import checksum
from hpcps.plan import Codec, Roles, Shard, TensorSpec
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify, Refuse
from hpcps.protocol.control import Done, EndOfData, JoinGroup, Register, RegisterReply, decode_control, encode_control
from hpcps.protocol.messages import HEADER_BYTES, FrameShape, Kind, PushHeader
from hpcps.protocol.server import ServerProtocol
from hpcps.runtime.compression import AUTO
from hpcps.runtime.coordination import Coordination
from hpcps.runtime.decoding import DecodeReport
from hpcps.runtime.metrics import EventLog
from hpcps.runtime.wire import frame_shape, layout_of, route_from_json, tensors_from_json
from hpcps.units import format_bytes
from hpcps.update.accumulator import Accumulator
from hpcps.update.rule import Rule, RuleSpec

__all__ = ["MakeRule", "ServerLoop", "ServerStats"]

logger = logging.getLogger(__name__)

MakeRule: TypeAlias = Callable[[Shard, RuleSpec, Sequence[TensorSpec]], Rule]
"""Makes the optimizer of a shard."""

_IDLE_S = 1.0
"""Longest sleep of a server without a deadline; news wakes it at once."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A checked frame: the protocol's token."""

    arrival: Arrival
    header: PushHeader
    options: tuple[float, ...]
    presence: bytes


@dataclass(slots=True)
class _ShardState:
    """Arrays of one shard, and what its open window has gathered."""

    shard: Shard
    shape: FrameShape
    rule: Rule
    total: Accumulator
    publication: Ticket | None = None
    pending: list[Arrival] = field(default_factory=list)
    """Frames whose payloads the accumulator still refers to."""
    presence: bytearray = field(default_factory=bytearray)
    options: tuple[float, ...] = ()
    options_clock: int = -1


@dataclass(slots=True, kw_only=True)
class ServerStats:
    """Counts of one server since the start."""

    num_pushes: int = 0
    num_windows: int = 0
    num_refused: int = 0
    num_skipped: int = 0
    payload_bytes: int = 0
    raw_bytes: int = 0
    """What the payloads would have been without a codec."""
    pushed_weight: float = 0.0
    applied_weight: float = 0.0
    refused_weight: float = 0.0
    staleness_sum: int = 0
    staleness_max: int = 0
    queue_max: int = 0


class ServerLoop:
    """One server.

    Args:
        channel: this rank's channel.
        config: the run's settings.
        roles: who serves and who works.
        make_rule: makes the optimizer of a shard.
        events: where events go.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._config = config
        self._roles = roles
        self._make_rule = make_rule
        self._events = events
        self._clock = clock
        self._index = roles.servers.index(channel.rank)
        self._coordination = Coordination(channel, config, roles=roles, events=events) if self._index == 0 else None
        self._registered: dict[int, Register] = {}
        self._membership: dict[int, JoinGroup] = {}
        self._done: set[int] = set()
        self._shards: dict[int, _ShardState] = {}
        self._protocol: ServerProtocol | None = None
        self._decoding = DecodeReport(self._index)
        self.stats = ServerStats()

    def serve(self) -> None:
        """Turn until every worker is done."""
        while not self.finished:
            self.turn()
            deadline_s = self._protocol.next_deadline_s if self._protocol else None
            wait_s = _IDLE_S if deadline_s is None else min(_IDLE_S, max(0.0, deadline_s - self._clock()))
            if self._coordination is not None:
                wait_s = min(wait_s, self._coordination.idle())
            if not self.finished:
                self._channel.wait_events(wait_s)
        self.close()

    @property
    def finished(self) -> bool:
        """True once all workers have said that they are done."""
        return len(self._done) == len(self._roles.workers)

    def close(self) -> None:
        """Write the counts."""
        stats = self.stats
        if stats.payload_bytes != stats.raw_bytes:
            logger.info(
                "%d pushes brought %s for %s of gradients",
                stats.num_pushes,
                format_bytes(stats.payload_bytes),
                format_bytes(stats.raw_bytes),
            )
        applied = max(1, stats.num_pushes - stats.num_refused)
        self._events.write(
            "server",
            num_pushes=stats.num_pushes,
            num_windows=stats.num_windows,
            num_refused=stats.num_refused,
            num_skipped=stats.num_skipped,
            payload_bytes=stats.payload_bytes,
            raw_bytes=stats.raw_bytes,
            pushed_weight=stats.pushed_weight,
            applied_weight=stats.applied_weight,
            refused_weight=stats.refused_weight,
            staleness_mean=stats.staleness_sum / applied,
            staleness_max=stats.staleness_max,
            queue_max=stats.queue_max,
        )

    def turn(self) -> bool:
        """Take in everything that has come; True if there was anything to do."""
        events = self._channel.take()
        self.stats.queue_max = max(self.stats.queue_max, sum(isinstance(event, Arrival) for event in events))
        for event in events:
            if isinstance(event, Arrival):
                self._on_arrival(event)
            elif isinstance(event, Control):
                self._on_control(event)
        protocol = self._protocol
        due = protocol is not None and protocol.next_deadline_s is not None
        if protocol is not None and due and (protocol.next_deadline_s or 0.0) <= self._clock():
            self._carry_out(protocol.on_timer(now_s=self._clock()))
        self._settle()
        self._tell_costs()
        if self._coordination is not None:
            self._coordination.idle()
        return bool(events)

    # --- control -----------------------------------------------------------------------------------

    def _on_control(self, event: Control) -> None:
        message = decode_control(event.data)
        if isinstance(message, Register):
            self._registered[message.rank] = message
            if len(self._registered) == len(self._roles.workers):
                self._open()
        elif isinstance(message, JoinGroup):
            self._membership[message.rank] = message
            if self._protocol is not None:
                for key in self._shards:
                    self._notify(self._protocol.settled(key), only=message.rank)
        elif isinstance(message, EndOfData):
            if self._protocol is not None:
                actions = self._protocol.on_end_of_data(
                    message.group, message.clock, generation=message.generation, now_s=self._clock()
                )
                self._carry_out(actions)
        elif isinstance(message, Done):
            self._done.add(message.rank)
        elif self._coordination is not None:
            self._coordination.on_message(message)
        else:
            raise ProtocolError(
                f"cannot accept {type(message).__name__} from rank {event.source}: rank {self._channel.rank} is not"
                " the first server; run the same hpcps on every rank",
                rank=self._channel.rank,
            )

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
        for shard in route.of_server(self._index):
            rule = self._make_rule(shard, spec, tensors)
            self._shards[shard.key] = _ShardState(
                shard=shard,
                shape=frame_shape(shard, spec),
                rule=rule,
                total=Accumulator(shard.numel, shard.dtype),
                presence=bytearray(len(shard.pieces)),
            )
        self._num_options = len(spec.option_names)
        self._protocol = ServerProtocol(
            [state.shard for state in self._shards.values()],
            window=self._config.window,
            staleness=self._config.staleness,
            num_workers=len(self._roles.workers),
            adaptive=any(state.rule.adaptive for state in self._shards.values()),
            overlap=0 if self._roles.embedded else self._config.overlap,
            route_epoch=route.epoch,
        )
        self._channel.open(layout_of(route, spec, roles=self._roles, config=self._config.comm))

    # --- pushes ------------------------------------------------------------------------------------

    def _on_arrival(self, arrival: Arrival) -> None:
        header = PushHeader.unpack(arrival.head[:HEADER_BYTES])
        state = self._shards.get(header.key)
        if state is None or self._protocol is None:
            raise ProtocolError(
                f"cannot accept a push of shard {header.key} from rank {header.sender}: rank {self._channel.rank} holds"
                f" {sorted(self._shards)}; run the same plan on every rank",
                rank=self._channel.rank,
                key=header.key,
                op="push",
            )
        whole = state.shard.num_bytes
        encoded = header.codec is not Codec.NONE and header.kind is Kind.GRADIENT
        fits = header.payload_bytes <= whole if encoded else header.payload_bytes == whole
        if header.payload_bytes != arrival.payload.size or not fits:
            raise ProtocolError(
                f"cannot accept a push of shard {header.key} from rank {header.sender}: {arrival.payload.size} payload"
                f" bytes of codec {header.codec.name.lower()}, header says {header.payload_bytes}, need"
                f" {'at most ' if encoded else ''}{whole}; run the same plan on every rank",
                rank=self._channel.rank,
                key=header.key,
                op="push",
            )
        if header.checksum and checksum(arrival.payload) != header.checksum:
            raise ProtocolError(
                f"cannot accept a push of shard {header.key} from rank {header.sender}: its checksum does not fit its"
                " payload; look for faulty memory or network hardware",
                rank=self._channel.rank,
                key=header.key,
                op="push",
            )
        options, presence = state.shape.unpack_meta(arrival.head[HEADER_BYTES:])
        if header.kind is Kind.GRADIENT:
            self.stats.num_pushes += 1
            self.stats.pushed_weight += header.weight
            self.stats.payload_bytes += header.payload_bytes
            self.stats.raw_bytes += whole
        frame = _Frame(arrival, header, options, presence)
        self._carry_out(self._protocol.on_push(header, frame, now_s=self._clock()))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Accumulate):
                self._accumulate(self._shards[action.key], action)
            elif isinstance(action, Close):
                self._close_window(self._shards[action.key], action)
            elif isinstance(action, Notify):
                self._notify(action)
            elif isinstance(action, Load):
                self._load(self._shards[action.key], action.token)
            else:
                self._refuse(action)

    def _settle(self) -> None:
        """Decode what this turn brought and no window has closed on, so that the slots are free for the next."""
        for state in self._shards.values():
            if state.pending:
                state.total.settle()
                self._release(state)

    def _tell_costs(self) -> None:
        """Tell the workers what decoding takes here, where there is a shard for which they choose the codec."""
        chosen = [state.total for state in self._shards.values() if state.shard.codec == AUTO]
        costs = self._decoding.look(self.stats.num_windows, chosen) if chosen else None
        if costs is not None:
            for rank in self._roles.workers:
                if rank not in self._done:
                    self._channel.send(rank, encode_control(costs))

    def _load(self, state: _ShardState, frame: _Frame) -> None:
        values = frame.arrival.payload.view(state.shard.dtype)
        if self._channel.shares_memory:
            state.rule.adopt(values)
        else:
            state.rule.values[:] = values
        self._channel.release(frame.arrival.slot)
        state.publication = self._channel.publish(state.shard.key, 0, state.rule.values)

    def _accumulate(self, state: _ShardState, action: Accumulate) -> None:
        frame: _Frame = action.token
        header = frame.header
        self.stats.staleness_sum += action.staleness
        self.stats.staleness_max = max(self.stats.staleness_max, action.staleness)
        self.stats.applied_weight += header.weight
        if header.clock > state.options_clock:
            state.options, state.options_clock = frame.options, header.clock
        if action.weight == 0:
            self._channel.release(frame.arrival.slot)
            return
        for index, present in enumerate(frame.presence):
            state.presence[index] |= present
        state.total.add(frame.arrival.payload, action.weight, codec=header.codec)
        if state.total.num_pending == 1:
            self._release(state)
        state.pending.append(frame.arrival)

    def _release(self, state: _ShardState) -> None:
        for arrival in state.pending:
            self._channel.release(arrival.slot)
        state.pending.clear()

    def _close_window(self, state: _ShardState, action: Close) -> None:
        """Update the shard and publish it; a window without weight only counts on."""
        self.stats.num_windows += 1
        publication = state.publication
        if publication is not None and not publication.done:
            self._channel.wait(lambda: publication.done, f"publication of shard {state.shard.key}")
        if action.total_weight > 0:
            gradient = state.total.mean(action.total_weight)
            width = self._num_options
            rows = [state.options[at : at + width] for at in range(0, len(state.options), width)]
            present = [bool(byte) for byte in state.presence]
            state.rule.step(gradient, present=present, hyper=rows, lr_scale=action.lr_scale)
        else:
            self.stats.num_skipped += 1
        self._release(state)
        state.presence = bytearray(len(state.shard.pieces))
        state.publication = self._channel.publish(action.key, action.version, state.rule.values)

    def _notify(self, action: Notify, *, only: int | None = None) -> None:
        if action.version < 0 or self._protocol is None:
            return
        clocks = dict(action.clocks)
        for rank in self._roles.workers if only is None else (only,):
            member = self._membership.get(rank)
            known = member is not None and member.generation == self._protocol.generation
            clock = clocks.get(member.group, 0) if member is not None and known else 0
            self._channel.notify(rank, Notice(action.key, action.version, clock))

    def _refuse(self, action: Refuse) -> None:
        header = action.token.header
        if header.kind is Kind.GRADIENT:
            self.stats.num_refused += 1
            self.stats.refused_weight += header.weight
        level = logging.DEBUG if math.isclose(header.weight, 0.0) else logging.WARNING
        logger.log(level, "refused a push of shard %d from rank %d: %s", header.key, header.sender, action.reason)
        self._channel.release(action.token.arrival.slot)
