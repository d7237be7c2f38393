"""The arrays of the shards that a server holds: payloads into sums, sums into updates, updates published.

Carries out, for one shard at a time, what the protocol decided. Decides nothing, and knows no route but the shards that
it was given.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hpcps.comm.channel import Array, Bytes, Channel, Slot, Ticket
from hpcps.errors import ProtocolError
from hpcps.native import checksum
from hpcps.plan import Codec, Shard
from hpcps.protocol.actions import Accumulate, Close, Load, Refuse
from hpcps.protocol.messages import HEADER_BYTES, FrameShape, Kind, PushHeader
from hpcps.runtime.agreement import AgreementMeter
from hpcps.runtime.emulation import EmulatedDevice, Pace
from hpcps.runtime.load import LoadMeter
from hpcps.runtime.server_stats import ServerStats
from hpcps.update.accumulator import Accumulator
from hpcps.update.rule import Rule

__all__ = ["Frame", "ShardArrays", "ShardStore"]

logger = logging.getLogger(__name__)

_VALUES = "values"
_SUM = "sum"
_RULE = "rule/"
"""Names of what goes with a shard; the rule's own names follow the last."""

_WARN_DROPPED = (8, 64, 512, 4096)
"""Pushes of a group dropped in a row that are worth a warning: few, and then ever fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A checked frame: the protocol's token.

    Args:
        header: its header.
        head: the header and the options as they came.
        options: numbers of the optimizer.
        presence: a byte a piece.
        payload: in the memory of the slot or of a parcel.
        slot: where it stands, None if it came in a parcel.
    """

    header: PushHeader
    head: bytes
    options: tuple[float, ...]
    presence: bytes
    payload: Bytes
    slot: Slot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardArrays:
    """All of a shard that the protocol does not know, as it goes to another server.

    Args:
        arrays: the values, what the rule remembers, and the sum of the open window if there is one.
        presence: of the open window, a number a piece.
        options: newest numbers of the optimizer.
        options_clock: clock of the push that brought them, -1 for none.
        window_bytes: gradient bytes in the open window, as they would be without a codec.
    """

    arrays: Mapping[str, Array]
    presence: list[int]
    options: list[float]
    options_clock: int
    window_bytes: int


@dataclass(slots=True)
class _ShardState:
    """Arrays of one shard, and what its open window has gathered."""

    shard: Shard
    rule: Rule
    total: Accumulator
    version: int = -1
    """The one published last."""
    publication: Ticket | None = None
    pending: list[Frame] = field(default_factory=list)
    """Frames whose payloads the accumulator still refers to."""
    presence: bytearray = field(default_factory=bytearray)
    options: tuple[float, ...] = ()
    options_clock: int = -1
    window_bytes: int = 0


class ShardStore:
    """Shards of one server.

    Args:
        channel: the server's channel.
        num_options: numbers in one row of a rule's options.
        stats: where counts go.
        meter: told what came and what was let in.
        device: the emulated device, None: the real one.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        num_options: int,
        stats: ServerStats,
        meter: LoadMeter,
        device: EmulatedDevice | None = None,
    ) -> None:
        self._channel = channel
        self._num_options = num_options
        self._stats = stats
        self._meter = meter
        self._device = device
        self._pace = Pace()
        self._states: dict[int, _ShardState] = {}
        self._newest = -1
        self._agreement = AgreementMeter()

    def add(self, shard: Shard, rule: Rule) -> None:
        """Hold a shard; its values are the rule's."""
        self._states[shard.key] = _ShardState(
            shard, rule, Accumulator(shard.numel, shard.dtype), presence=bytearray(len(shard.pieces))
        )
        self._watch()

    @property
    def keys(self) -> Collection[int]:
        """Keys of the shards that are here, in no order."""
        return self._states.keys()

    @property
    def newest(self) -> int:
        """Newest version of any shard that is here, -1 for none."""
        return self._newest

    def totals(self, codec: str) -> list[Accumulator]:
        """The accumulators of the shards under a codec rule."""
        return [state.total for state in self._states.values() if state.shard.codec == codec]

    # --- frames ------------------------------------------------------------------------------------

    def frame(self, header: PushHeader, head: bytes, payload: Bytes, slot: Slot | None, *, shape: FrameShape) -> Frame:
        """Check a frame of a shard that is here, and cut it up.

        Raises:
            ProtocolError: its sizes do not fit the shard, or its checksum does not fit its payload.
        """
        whole = self._states[header.key].shard.num_bytes
        encoded = header.codec is not Codec.NONE and header.kind is Kind.GRADIENT
        fits = header.payload_bytes <= whole if encoded else header.payload_bytes == whole
        if header.payload_bytes != payload.size or not fits:
            raise self._refused(
                header,
                f"{payload.size} payload bytes of codec {header.codec.name.lower()}, header says"
                f" {header.payload_bytes}, need {'at most ' if encoded else ''}{whole}; run the same plan on every"
                " rank",
            )
        if header.checksum and checksum(payload) != header.checksum:
            raise self._refused(
                header, "its checksum does not fit its payload; look for faulty memory or network hardware"
            )
        options, presence = shape.unpack_meta(head[HEADER_BYTES:])
        if header.kind is Kind.GRADIENT:
            self._stats.count_push(header, raw_bytes=whole)
            self._meter.arrived(header.key, whole)
        return Frame(header=header, head=head, options=options, presence=presence, payload=payload, slot=slot)

    def hand_on(self, frame: Frame, shard: Shard) -> None:
        """A frame that was counted here goes to another server with its shard, and counts there."""
        self._stats.count_push(frame.header, raw_bytes=shard.num_bytes, times=-1)
        self._meter.arrived(shard.key, shard.num_bytes, times=-1)

    def _refused(self, header: PushHeader, got: str) -> ProtocolError:
        return ProtocolError(
            f"cannot accept a push of shard {header.key} from rank {header.sender}: {got}",
            rank=self._channel.rank,
            key=header.key,
            op="push",
        )

    def load(self, action: Load) -> None:
        """Take the first values and publish them."""
        state, frame = self._states[action.key], action.token
        values = frame.payload.view(state.shard.dtype)
        if self._channel.shares_memory:
            state.rule.adopt(values)
        else:
            state.rule.values[:] = values
        self._free(frame)
        self._publish(state, 0)

    def accumulate(self, action: Accumulate) -> None:
        """Add a payload to the open window."""
        state, frame = self._states[action.key], action.token
        header = frame.header
        self._stats.count_applied(header, staleness=action.staleness, weight=action.weight)
        self._meter.admitted(staleness=action.staleness, offset_s=action.offset_s, late=action.late)
        if header.clock > state.options_clock:
            state.options, state.options_clock = frame.options, header.clock
        if action.weight == 0:
            self._free(frame)
            return
        state.window_bytes += state.shard.num_bytes
        for index, present in enumerate(frame.presence):
            state.presence[index] |= present
        state.total.add(frame.payload, action.weight, codec=header.codec)
        if state.total.num_pending == 1:
            self._free_pending(state)
        state.pending.append(frame)
        self._agreement.add(header, frame.payload)

    def close(self, action: Close) -> None:
        """Update the shard and publish it; a window without weight only counts on."""
        state = self._states[action.key]
        began_s = time.monotonic()
        self._stats.num_windows += 1
        agreement = self._agreement.close(action.key)
        if agreement is not None:
            self._meter.compared(agreement)
        self._wait_published(state)
        if action.total_weight > 0:
            gradient = state.total.mean(action.total_weight)
            width = self._num_options
            rows = [state.options[at : at + width] for at in range(0, len(state.options), width)]
            present = [bool(byte) for byte in state.presence]
            state.rule.step(gradient, present=present, hyper=rows, lr_scale=action.lr_scale)
        else:
            self._stats.num_skipped += 1
        if self._device is not None:
            self._pace.fill(began_s, self._device.seconds(action.version, state.window_bytes))
        self._free_pending(state)
        state.window_bytes = 0
        state.presence = bytearray(len(state.shard.pieces))
        self._publish(state, action.version)

    def refuse(self, action: Refuse) -> None:
        """Free a frame without use."""
        header = action.token.header
        if header.kind is Kind.GRADIENT:
            self._stats.num_refused += 1
            self._stats.refused_weight += header.weight
        quiet = action.dropped_in_a_row > 0 or math.isclose(header.weight, 0.0)
        level = logging.DEBUG if quiet else logging.WARNING
        logger.log(level, "refused a push of shard %d from rank %d: %s", header.key, header.sender, action.reason)
        if action.dropped_in_a_row in _WARN_DROPPED:
            logger.warning(
                "nothing that rank %d pushed counted any more: its last %d pushes were dropped, the last for %s; raise"
                " staleness.cap, or set staleness.over_cap to clamp",
                header.sender,
                action.dropped_in_a_row,
                action.reason,
            )
        self._free(action.token)

    def settle(self) -> None:
        """Decode what this turn brought and no window has closed on, so that the slots are free for the next."""
        for state in self._states.values():
            if state.pending:
                state.total.settle()
                self._free_pending(state)

    # --- moving ------------------------------------------------------------------------------------

    def take_out(self, key: int) -> ShardArrays:
        """Give up a shard; its arrays are the caller's, and no frame of it is referred to any more."""
        state = self._states.pop(key)
        self._newest = max((each.version for each in self._states.values()), default=-1)
        self._watch()
        total = state.total.take_sum()
        self._free_pending(state)
        self._wait_published(state)
        arrays: dict[str, Array] = {_VALUES: state.rule.values}
        arrays |= {_RULE + name: array for name, array in state.rule.state().items()}
        if total is not None:
            arrays[_SUM] = total
        return ShardArrays(
            arrays=arrays,
            presence=list(state.presence),
            options=list(state.options),
            options_clock=state.options_clock,
            window_bytes=state.window_bytes,
        )

    def put_in(self, shard: Shard, rule: Rule, given: ShardArrays, *, version: int) -> None:
        """Hold a shard as another server gave it up, and publish it unless it has no values yet.

        Args:
            shard: with its room here.
            rule: a new one.
            given: what `take_out` gave; the arrays are copied.
            version: of the values, -1: there are none yet.

        Raises:
            ProtocolError: an array is missing, unknown or does not fit; nothing was changed.
        """
        arrays = dict(given.arrays)
        values, total = arrays.pop(_VALUES, None), arrays.pop(_SUM, None)
        stray = [name for name in arrays if not name.startswith(_RULE)]
        fits = values is not None and (values.shape, values.dtype) == (rule.values.shape, rule.values.dtype)
        if values is None or not fits or stray or len(given.presence) != len(shard.pieces):
            raise ProtocolError(
                f"cannot take over shard {shard.key}: got {sorted(given.arrays)} and {len(given.presence)} marks of"
                f" presence, need values of {shard.numel} {shard.dtype} and {len(shard.pieces)} marks; run the same"
                " hpcps on every rank",
                rank=self._channel.rank,
                key=shard.key,
                op="move",
            )
        state = _ShardState(shard, rule, Accumulator(shard.numel, shard.dtype))
        if total is not None:
            state.total.put_sum(total.copy())
        rule.restore({name[len(_RULE) :]: array for name, array in arrays.items()})
        rule.values[:] = values
        state.presence = bytearray(bool(mark) for mark in given.presence)
        state.options, state.options_clock = tuple(given.options), given.options_clock
        state.window_bytes = given.window_bytes
        self._states[shard.key] = state
        self._watch()
        self._channel.host(shard.key, shard.room)
        if version >= 0:
            self._publish(state, version)

    # --- inside ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._agreement.watch(state.shard for state in self._states.values())

    def _publish(self, state: _ShardState, version: int) -> None:
        state.version = version
        self._newest = max(self._newest, version)
        state.publication = self._channel.publish(state.shard.key, version, state.rule.values)

    def _wait_published(self, state: _ShardState) -> None:
        """Wait until the values may be changed."""
        publication = state.publication
        if publication is not None and not publication.done:
            self._channel.wait(lambda: publication.done, f"publication of shard {state.shard.key}")

    def _free_pending(self, state: _ShardState) -> None:
        for frame in state.pending:
            self._free(frame)
        state.pending.clear()

    def _free(self, frame: Frame) -> None:
        if frame.slot is not None:
            self._channel.release(frame.slot)
