"""Where everything lies in the windows. Pure arithmetic; every offset is a multiple of a cache line.

server   | flag of each (worker, slot) | slots of each worker | begin word and K copies a room |
worker   | ack of each (server, slot) | notice of each shard |

A room holds one shard at a time, or none. Where some server has a room to spare, shards may move: then all rooms and
all slots fit the largest shard of all. Else each room fits its shard, and the slots of a server fit its largest.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hpcps.errors import PlanError

__all__ = ["LINE_BYTES", "Layout", "ShardRoom"]

LINE_BYTES = 64
"""A cache line: words of different writers never share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRoom:
    """What the transport must know of one shard.

    Args:
        server: index of the server that holds it at the start.
        num_bytes: bytes of its values.
        head_bytes: bytes of a frame before the payload.
        room: number of its room on that server.
    """

    server: int
    num_bytes: int
    head_bytes: int
    room: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The data plane of a job, the same on all ranks.

    Args:
        servers: world ranks of the servers.
        workers: world ranks of the workers.
        shards: one entry a key.
        num_slots: slots of each worker on each server.
        num_buffers: published copies of each shard.
        num_rooms: rooms of each server.
    """

    servers: tuple[int, ...]
    workers: tuple[int, ...]
    shards: tuple[ShardRoom, ...]
    num_slots: int
    num_buffers: int
    num_rooms: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.num_rooms) != len(self.servers):
            raise PlanError(
                f"cannot lay out the windows: got rooms of {len(self.num_rooms)} servers, need those of"
                f" {len(self.servers)}; run the same hpcps on every rank"
            )
        taken: dict[tuple[int, int], int] = {}
        for key, shard in enumerate(self.shards):
            other = taken.setdefault((shard.server, shard.room), key)
            if other != key or not 0 <= shard.room < self.num_rooms[shard.server]:
                why = f"shard {other} lies there" if other != key else f"it has {self.num_rooms[shard.server]}"
                raise PlanError(
                    f"cannot lay out shard {key}: got room {shard.room} of server {shard.server}, and {why};"
                    " give each shard of a server a room of its own",
                    key=key,
                )

    @property
    def moves(self) -> bool:
        """True if shards may move: some server has a room to spare."""
        return sum(self.num_rooms) > len(self.shards)

    def tight(self) -> Layout:
        """The same shards in rooms that just hold them: they cannot move."""
        own = tuple(len(self.server_keys(server)) for server in range(len(self.servers)))
        return dataclasses.replace(self, num_rooms=own)

    def server_keys(self, server: int) -> tuple[int, ...]:
        """Keys of the shards that a server holds at the start."""
        return tuple(key for key, shard in enumerate(self.shards) if shard.server == server)

    def head_bytes(self, server: int) -> int:
        """Room for header and options in a slot of a server."""
        return max((_lines(shard.head_bytes) for shard in self._guests(server)), default=LINE_BYTES)

    def slot_bytes(self, server: int) -> int:
        """Bytes of one slot of a server."""
        return self.head_bytes(server) + max((_lines(shard.num_bytes) for shard in self._guests(server)), default=0)

    def flag_offset(self, worker: int, slot: int) -> int:
        """Flag of a worker's slot, in the server's window."""
        return (self.workers.index(worker) * self.num_slots + slot) * LINE_BYTES

    def slot_offset(self, server: int, worker: int, slot: int) -> int:
        """A worker's slot, in the server's window; all slots follow each other, by worker, then by slot."""
        ring = self.workers.index(worker) * self.num_slots + slot
        return self.num_flags * LINE_BYTES + ring * self.slot_bytes(server)

    def begin_offsets(self, server: int) -> tuple[int, ...]:
        """Begin word of each room, in the server's window; the published copies follow it."""
        at = self.num_flags * (LINE_BYTES + self.slot_bytes(server))
        offsets = []
        for room_bytes in self._room_bytes(server):
            offsets.append(at)
            at += room_bytes
        return tuple(offsets)

    def copy_offset(self, key: int, version: int) -> int:
        """The published copy that a version of a shard goes to, from the begin word of its room."""
        return LINE_BYTES + version % self.num_buffers * _lines(self.shards[key].num_bytes)

    def ack_offset(self, server: int, slot: int) -> int:
        """Ack of a server's slot, in the worker's window."""
        return (server * self.num_slots + slot) * LINE_BYTES

    def notice_offset(self, key: int) -> int:
        """Notice of a shard, in the worker's window."""
        return (len(self.servers) * self.num_slots + key) * LINE_BYTES

    def window_bytes(self, rank: int) -> int:
        """Bytes of a rank's window, at least one line."""
        if rank in self.servers:
            server = self.servers.index(rank)
            slots = self.num_flags * (LINE_BYTES + self.slot_bytes(server))
            return max(LINE_BYTES, slots + sum(self._room_bytes(server)))
        return max(LINE_BYTES, self.notice_offset(len(self.shards)))

    @property
    def num_flags(self) -> int:
        """Slots of a server."""
        return len(self.workers) * self.num_slots

    def _guests(self, server: int) -> list[ShardRoom]:
        """The shards that a server may hold at any time."""
        moves = self.moves
        return [shard for shard in self.shards if moves or shard.server == server]

    def _room_bytes(self, server: int) -> list[int]:
        """Bytes of each room of a server, begin word and copies."""
        guests = self._guests(server)
        if self.moves:
            largest = max((_lines(shard.num_bytes) for shard in guests), default=0)
            return [LINE_BYTES + self.num_buffers * largest] * self.num_rooms[server]
        sizes = {shard.room: _lines(shard.num_bytes) for shard in guests}
        return [LINE_BYTES + self.num_buffers * sizes[room] for room in range(self.num_rooms[server])]


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
