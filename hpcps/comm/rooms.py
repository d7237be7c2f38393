"""Which shards a server holds, and in which of its rooms: the view of its main thread. Moves no bytes."""

from __future__ import annotations

from hpcps.comm.layout import Layout
from hpcps.errors import ChannelError

__all__ = ["Rooms"]


class Rooms:
    """The rooms of one server.

    Args:
        rank: world rank of the server.
        layout: the data plane, with the server's first shards.
    """

    def __init__(self, rank: int, layout: Layout) -> None:
        self._rank = rank
        self._num_keys = len(layout.shards)
        server = layout.servers.index(rank)
        self._num_rooms = layout.num_rooms[server]
        self._rooms = {key: layout.shards[key].room for key in layout.server_keys(server)}

    def find(self, key: int, op: str) -> int:
        """The room of a shard.

        Args:
            key: the shard.
            op: what is to be done with it, for the error.

        Raises:
            ChannelError: it is not here.
        """
        if key not in self._rooms:
            raise ChannelError(
                f"cannot {op} shard {key} at rank {self._rank}: it holds {sorted(self._rooms)}; host the shard first",
                rank=self._rank,
                key=key,
                op=op,
            )
        return self._rooms[key]

    def leave(self, key: int) -> int:
        """Take a shard out of its room. Returns: the room.

        Raises:
            ChannelError: it is not here.
        """
        room = self.find(key, "retire")
        del self._rooms[key]
        return room

    def enter(self, key: int, room: int) -> None:
        """Put a shard into a room.

        Raises:
            ChannelError: there is no such shard or room, the shard is here already, or the room is taken.
        """
        if not 0 <= key < self._num_keys or key in self._rooms:
            why = f"it holds {sorted(self._rooms)} of {self._num_keys} shards"
        elif not 0 <= room < self._num_rooms:
            why = f"it has {self._num_rooms} rooms"
        elif room in self._rooms.values():
            why = f"shard {next(other for other, taken in self._rooms.items() if taken == room)} lies there"
        else:
            self._rooms[key] = room
            return
        raise ChannelError(
            f"cannot host shard {key} in room {room} at rank {self._rank}: {why}; retire first, or choose a free room",
            rank=self._rank,
            key=key,
            op="host",
        )
