"""Where everything lies in the windows. Pure arithmetic; every offset is a multiple of a cache line.

server   | flag of each (worker, slot) | slots of each worker | begin word and K buffers a shard |
worker   | ack of each (server, slot) | notice of each shard |
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LINE_BYTES", "Layout", "ShardRoom"]

LINE_BYTES = 64
"""A cache line: words of different writers never share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRoom:
    """What the transport must know of one shard.

    Args:
        server: index of the server that holds it.
        num_bytes: bytes of its values.
        head_bytes: bytes of a frame before the payload.
    """

    server: int
    num_bytes: int
    head_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The data plane of a job, the same on all ranks.

    Args:
        servers: world ranks of the servers.
        workers: world ranks of the workers.
        shards: one entry a key.
        num_slots: slots of each worker on each server.
        num_buffers: published copies of each shard.
    """

    servers: tuple[int, ...]
    workers: tuple[int, ...]
    shards: tuple[ShardRoom, ...]
    num_slots: int
    num_buffers: int

    def server_keys(self, server: int) -> tuple[int, ...]:
        """Keys of the shards of a server."""
        return tuple(key for key, shard in enumerate(self.shards) if shard.server == server)

    def head_bytes(self, server: int) -> int:
        """Room for header and options in a slot of a server."""
        return max((_lines(self.shards[key].head_bytes) for key in self.server_keys(server)), default=LINE_BYTES)

    def slot_bytes(self, server: int) -> int:
        """Bytes of one slot of a server."""
        largest = max((_lines(self.shards[key].num_bytes) for key in self.server_keys(server)), default=0)
        return self.head_bytes(server) + largest

    def flag_offset(self, worker: int, slot: int) -> int:
        """Flag of a worker's slot, in the server's window."""
        return (self.workers.index(worker) * self.num_slots + slot) * LINE_BYTES

    def slot_offset(self, server: int, worker: int, slot: int) -> int:
        """A worker's slot, in the server's window; all slots follow each other, by worker, then by slot."""
        ring = self.workers.index(worker) * self.num_slots + slot
        return self._num_flags * LINE_BYTES + ring * self.slot_bytes(server)

    def begin_offsets(self) -> tuple[int, ...]:
        """Begin word of each shard, in its server's window; the published copies follow it."""
        ends = [
            self._num_flags * (LINE_BYTES + self.slot_bytes(server)) if self.server_keys(server) else 0
            for server in range(len(self.servers))
        ]
        offsets = []
        for key, shard in enumerate(self.shards):
            offsets.append(ends[shard.server])
            ends[shard.server] += self._published_bytes(key)
        return tuple(offsets)

    def copy_offset(self, key: int, version: int) -> int:
        """The published copy that a version goes to, from the shard's begin word."""
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
            published = sum(self._published_bytes(key) for key in self.server_keys(server))
            return max(LINE_BYTES, self._num_flags * (LINE_BYTES + self.slot_bytes(server)) + published)
        return max(LINE_BYTES, self.notice_offset(len(self.shards)))

    @property
    def _num_flags(self) -> int:
        return len(self.workers) * self.num_slots

    def _published_bytes(self, key: int) -> int:
        return LINE_BYTES + self.num_buffers * _lines(self.shards[key].num_bytes)


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
