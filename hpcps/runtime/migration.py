"""Shards that change servers while pushes go on: give one away, take one in, send frames on to where their shard went.

    giver    takes the turn's frames in, hands over, retires | shard | waiting frames | later frames, as they come ...
    taker                                                    | holds, publishes, notices | applies them
                                                             ----------- one order, as the giver sent it ----------->

A frame is sent on from its slot, which is free when it has left. A server that gave a shard away sends on for ever: to
the server that it gave it to, and so along the way of the shard. Refuses to say which shard goes where: the coordinator
does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hpcps.comm.channel import Bytes, Channel, Slot, Ticket
from hpcps.errors import ProtocolError
from hpcps.plan import Route, Shard
from hpcps.protocol.actions import Action
from hpcps.protocol.control import Move, Moved
from hpcps.protocol.server import ServerProtocol
from hpcps.runtime.parcels import ShardParcel, pack_frame, pack_shard, unpack_shard
from hpcps.runtime.server_stats import ServerStats
from hpcps.runtime.shard_store import Frame, ShardStore
from hpcps.update.rule import Rule

__all__ = ["Migration"]


class Migration:
    """Moves of one server.

    Args:
        channel: the server's channel.
        route: the route at the start.
        server: index of this server.
        protocol: the server's state machine.
        store: its arrays.
        make_rule: makes the optimizer of a shard.
        stats: where counts go.
        clock: seconds, rising.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        route: Route,
        server: int,
        protocol: ServerProtocol,
        store: ShardStore,
        make_rule: Callable[[Shard], Rule],
        stats: ServerStats,
        clock: Callable[[], float],
    ) -> None:
        self._channel = channel
        self._server = server
        self._num_servers = route.num_servers
        self._shards = {shard.key: shard for shard in route.shards}
        self._protocol = protocol
        self._store = store
        self._make_rule = make_rule
        self._stats = stats
        self._clock = clock
        self._targets: dict[int, int] = {}
        self._leaving: list[tuple[Ticket, Slot]] = []
        """Frames that are being sent on, and the slots that they stand in."""

    def target(self, key: int) -> int | None:
        """The server that got a shard from here, None for a shard that this server holds or never had."""
        return self._targets.get(key)

    @property
    def sending_on(self) -> bool:
        """True while slots hold frames that are being sent on."""
        return bool(self._leaving)

    def give(self, move: Move, *, began_s: float) -> None:
        """Give a shard away, and send on what waits for it.

        Args:
            move: the coordinator's order.
            began_s: when it came.

        Raises:
            ProtocolError: the shard is not here, or there is no such other server.
        """
        key, target = move.key, move.target
        if not self._protocol.holds(key) or target == self._server or not 0 <= target < self._num_servers:
            raise ProtocolError(
                f"cannot give shard {key} to server {target}: server {self._server} of {self._num_servers} holds"
                f" {sorted(self._store.keys)}; run the same hpcps on every rank",
                rank=self._channel.rank,
                key=key,
                op="move",
            )
        given = self._store.take_out(key)
        state, waiting = self._protocol.hand_over(key, now_s=self._clock())
        self._channel.retire(key)  # what is sent from now on leaves after it, and after all that was published
        spent_s = self._clock() - began_s
        head, body = pack_shard(
            ShardParcel(key=key, epoch=move.epoch, room=move.room, began_s=spent_s, state=state, given=given)
        )
        self._targets[key] = target
        self._channel.parcel(target, head, body)
        self._stats.num_moves += 1
        self._stats.moved_bytes += body.nbytes
        frames: list[Frame] = waiting
        for frame in frames:
            self._store.hand_on(frame, self._shards[key])
            self.send_on(key, frame.head, frame.payload, frame.slot)

    def send_on(self, key: int, head: bytes, payload: Bytes, slot: Slot | None) -> None:
        """Send a frame of a shard that was given away to where it went."""
        self._stats.num_relayed += 1
        ticket = self._channel.parcel(self._targets[key], pack_frame(head), payload)
        if slot is not None:
            self._leaving.append((ticket, slot))

    def take(self, head: bytes, body: Bytes, *, began_s: float) -> tuple[Moved, list[Action]]:
        """Hold a shard that came in a parcel.

        Args:
            head: of the parcel, without its kind.
            body: of the parcel.
            began_s: when it came.

        Returns:
            What the coordinator is to hear, and what is to be done first.

        Raises:
            ProtocolError: the parcel does not fit the plan.
        """
        parcel = unpack_shard(head, body)
        before = self._shards.get(parcel.key)
        if before is None or self._protocol.holds(parcel.key):
            raise ProtocolError(
                f"cannot take over shard {parcel.key}: the route has {len(self._shards)} shards, and"
                f" {sorted(self._store.keys)} are here; run the same plan on every rank",
                rank=self._channel.rank,
                key=parcel.key,
                op="move",
            )
        shard = dataclasses.replace(before, server=self._server, room=parcel.room, epoch=parcel.epoch)
        self._store.put_in(shard, self._make_rule(shard), parcel.given, version=parcel.state.version)
        actions = self._protocol.take_over(shard, parcel.state, now_s=self._clock())
        self._targets.pop(parcel.key, None)
        moved = Moved(
            key=parcel.key,
            epoch=parcel.epoch,
            server=self._server,
            num_bytes=body.nbytes,
            seconds=parcel.began_s + self._clock() - began_s,
        )
        return moved, actions

    def poll(self) -> None:
        """Free the slots of the frames that have left."""
        left = [slot for ticket, slot in self._leaving if ticket.done]
        if left:
            self._leaving = [(ticket, slot) for ticket, slot in self._leaving if slot not in left]
        for slot in left:
            self._channel.release(slot)
