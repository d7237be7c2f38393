"""The one-sided plane: frames by Put into slots, parameters by Get from versioned copies.

    worker   Put payload, Flush, Put flag {seq, ~seq, sizes}, Flush
    server   sees the flag, hands the slot on; later Put ack {seq, ~seq} into the worker's window
    server   BEGIN = {key, v} (atomic), write copy v mod K, then Put notice {v, clock, check} to the workers
    worker   Get copy v mod K, Flush, read BEGIN (atomic), accept if its key is the shard's and its version less than
             v + K, else read again, and after a few times ask for the copy by message, for a server may publish
             faster than a link reads
    server   retires a shard: all notices are flushed, then BEGIN = moved; a worker that meets it, or another key, waits
             until it hears where the shard is

Only Put goes from workers to servers, so that a worker's death leaves no lock behind. A flag or notice
that is read half-written fails its check word and is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcps.comm.actor import Operation
from hpcps.comm.begin import MAX_KEYS, MAX_VERSION, MOVED, Begin
from hpcps.comm.channel import Arrival, Bytes, Notice, Slot, Ticket
from hpcps.comm.layout import LINE_BYTES, Layout
from hpcps.comm.mpi import MpiChannel
from hpcps.comm.plane import Place, Plane, Posting, Publication, Retirement
from hpcps.comm.questions import Questions
from hpcps.comm.world import shared_memory_problem
from hpcps.errors import ChannelError, ProtocolError

__all__ = ["RmaPlane"]

_WORDS = LINE_BYTES // 8
_MAX_READS = 4
"""Reads of a shard that its server overwrote meanwhile, before the worker asks."""
_CHECK = 0x5A17
"""Mixed into a notice's check word, so that a line of zeros is no notice."""


@dataclass(slots=True)
class _Stay:
    """The stay of a shard in a room, or of the next one to come."""

    number: int = 0
    first: int = -1
    """First version published in it; -1: none yet."""
    newest: int = -1


class RmaPlane(Plane):
    """The windows of one rank.

    Args:
        channel: the channel that this plane serves.
    """

    frame_extra_bytes = 32
    """The flag."""

    def __init__(self, channel: MpiChannel) -> None:
        super().__init__(channel)
        self._opened = False
        self._published: dict[int, tuple[int, int]] = {}
        """Room and newest version of each shard published here."""
        self._questions = Questions(channel.world.data, self._copy)

    def problem(self, layout: Layout) -> str:
        if len(layout.shards) > MAX_KEYS:
            return f"{len(layout.shards)} shards, the words of a window name {MAX_KEYS}; raise comm.shard_bytes"
        return shared_memory_problem(self._channel.world, layout.window_bytes)

    def open(self, layout: Layout, ticket: Ticket) -> Operation:
        self._layout = layout
        rank = self._channel.rank
        self._serves = rank in layout.servers
        self._server = layout.servers.index(rank) if self._serves else -1
        size = layout.window_bytes(rank)
        self._window = MPI.Win.Allocate(size, 1, comm=self._channel.world.data)
        self._memory: Bytes = np.asarray(self._window.tomemory()).view(np.uint8)[:size]
        # slots and rooms stay as they are: memory that nobody touches is only address space
        self._memory[: layout.num_flags * LINE_BYTES if self._serves else size] = 0
        yield from self._channel.barrier()
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._window.Sync()
        self._set_up_tables(layout)
        if self._serves:
            self._write_begin(range(layout.num_rooms[self._server]), MOVED)
            self._questions.stand(layout.workers, num_keys=len(layout.shards))
        yield from self._channel.barrier()
        self._opened = True
        self._channel.finish(ticket)

    def close(self) -> Operation:
        if self._opened:
            self._opened = False
            yield from self._questions.close()
            self._window.Unlock_all()
            del self._memory, self._flags, self._acks, self._notices
            yield from self._channel.barrier()
            self._window.Free()

    def look(self) -> bool:
        if not self._opened:
            return False
        sent = self.empty_outbox()
        if not self._serves:
            return sent | self._look_for_notices()
        return sent | self._look_for_frames() | self._questions.look()

    def acked(self, server: int, slot: int) -> int:
        seq, inverse = self._acks[server * self._layout.num_slots + slot, :2].tolist()
        return int(seq) if inverse == ~seq else 0

    def send(self, server: int, slot: Slot, head: bytes, payload: Bytes) -> Callable[[], bool]:
        window = self._window
        rank = self._layout.servers[server]
        at = self._slot_at[server][slot.index]
        window.Put([np.frombuffer(head, np.uint8), MPI.BYTE], rank, (at, len(head), MPI.BYTE))
        if payload.size:
            window.Put([payload, MPI.BYTE], rank, (at + self._head_bytes[server], payload.size, MPI.BYTE))
        window.Flush(rank)
        flag = np.array([slot.seq, ~slot.seq, len(head), payload.size], np.int64)
        window.Put([flag, MPI.INT64_T], rank, (self._flag_at[slot.index], 4, MPI.INT64_T))
        window.Flush(rank)
        return _is_free

    def read(self, key: int, place: Place, version: int, out: Bytes) -> Generator[bool, None, int]:
        layout, window = self._layout, self._window
        rank, begin_at = layout.servers[place.server], self._begin_at[place.server][place.room]
        version = max(version, int(self._seen[key, 0]) - 1)
        word, nothing = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for _ in range(_MAX_READS):
            knows_stay = place.stay >= 0
            if knows_stay:
                at = begin_at + layout.copy_offset(key, version)
                window.Get([out, MPI.BYTE], rank, (at, out.size, MPI.BYTE))
                window.Flush(rank)
            window.Fetch_and_op([nothing, MPI.INT64_T], [word, MPI.INT64_T], rank, begin_at, MPI.NO_OP)
            window.Flush(rank)
            begin = Begin.unpack(int(word[0]))
            if begin.key != key:
                return -1
            if begin.stay == place.stay and begin.keeps(version):
                return version
            if knows_stay:
                self._channel.counters.pull_retries += 1
                self._channel.counters.pulled_bytes += out.size
            place.stay = begin.stay
            version = max(version, begin.complete)
            yield True
        return (yield from self._questions.ask(rank, key, version, out))

    def publish(self, key: int, version: int, values: Bytes, ticket: Ticket) -> None:
        if not 0 <= version <= MAX_VERSION:
            raise ChannelError(
                f"cannot publish version {version} of shard {key}: need 0 to {MAX_VERSION}; set comm.mode to p2p",
                rank=self._channel.rank,
                key=key,
                op="publish",
            )
        super().publish(key, version, values, ticket)

    def _copy(self, key: int) -> tuple[int, Bytes] | None:
        """The newest version of a shard held here, copied: only this thread writes what is published."""
        if key not in self._published:
            return None
        room, version = self._published[key]
        at = self._begin_at[self._server][room] + self._layout.copy_offset(key, version)
        return version, self._memory[at : at + self._layout.shards[key].num_bytes].copy()

    def _set_up_tables(self, layout: Layout) -> None:
        """Views of the words that others write into this window, and where this rank writes."""
        words = self._memory[: self._memory.size // 8 * 8].view(np.int64)
        num_flags = layout.num_flags if self._serves else 0
        num_acks = 0 if self._serves else len(layout.servers) * layout.num_slots
        num_notices = 0 if self._serves else len(layout.shards)
        self._flags = _table(words, num_flags)
        self._acks = _table(words, num_acks)
        self._notices = _table(words[num_acks * _WORDS :], num_notices)
        self._taken = np.zeros(num_flags, np.int64)
        self._seen = np.zeros((num_notices, 3), np.int64)
        self._news = np.zeros(max(num_flags, num_notices), np.bool_)
        self._open_lines(layout)
        self._begin_at = [layout.begin_offsets(server) for server in range(len(layout.servers))]
        self._head_bytes = [layout.head_bytes(server) for server in range(len(layout.servers))]
        me = self._channel.rank
        slots = range(layout.num_slots)
        if self._serves:
            self._stays = [_Stay() for _ in range(layout.num_rooms[self._server])]
            slot_bytes = layout.slot_bytes(self._server)
            first = layout.slot_offset(self._server, layout.workers[0], 0)
            self._room = slot_bytes - self._head_bytes[self._server]
            self._frames = [
                (worker, slot, first + (place * layout.num_slots + slot) * slot_bytes)
                for place, worker in enumerate(layout.workers)
                for slot in slots
            ]
            return
        self._flag_at = [layout.flag_offset(me, slot) for slot in slots]
        self._slot_at = []
        for server in range(len(layout.servers)):
            first, slot_bytes = layout.slot_offset(server, me, 0), layout.slot_bytes(server)
            self._slot_at.append([first + slot * slot_bytes for slot in slots])

    def _look_for_frames(self) -> bool:
        """Flags that changed since the last look, in the order in which each worker pushed."""
        news = np.not_equal(self._flags[:, 0], self._taken, out=self._news)
        if not news.any():
            return False
        fresh = np.nonzero(news)[0]
        self._window.Sync()
        head_room = self._head_bytes[self._server]
        arrivals = []
        for index in sorted(fresh.tolist(), key=lambda i: int(self._flags[i, 0])):
            seq, inverse, head_bytes, payload_bytes = self._flags[index, :4].tolist()
            if inverse != ~seq:
                continue
            self._taken[index] = seq
            worker, slot, at = self._frames[index]
            if not (0 <= head_bytes <= head_room and 0 <= payload_bytes <= self._room):
                raise ProtocolError(
                    f"cannot take a frame from rank {worker}: {head_bytes} + {payload_bytes} bytes, the slot has"
                    f" {head_room} + {self._room}; run the same plan on every rank",
                    rank=self._channel.rank,
                    op="push",
                )
            body = at + head_room
            arrivals.append(
                Arrival(
                    Slot(worker, slot, seq),
                    self._memory[at : at + head_bytes].tobytes(),
                    self._memory[body : body + payload_bytes],
                )
            )
        self._channel.deliver(*arrivals)
        return True

    def _look_for_notices(self) -> bool:
        changed = np.not_equal(self._notices[:, 2], self._seen[:, 2], out=self._news)
        if not changed.any():
            return False
        news = []
        for key in np.nonzero(changed)[0].tolist():
            version, clock, check = self._notices[key, :3].tolist()
            if check == version ^ (clock << 20) ^ _CHECK:
                self._seen[key] = version, clock, check
                news.append(Notice(key, version - 1, clock))
        if news:
            self._window.Sync()
            self._channel.deliver(*news)
        return bool(news)

    def empty_outbox(self) -> bool:
        """Publications, then the newest words for each place, then one flush for all of them.

        What comes meanwhile waits for the next turn, or a server that never rests would never be done.
        """
        if not self.outbox:
            return False
        words: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        for _ in range(len(self.outbox)):
            item = self.outbox.popleft()
            if isinstance(item, Slot):
                at = self._layout.ack_offset(self._server, item.index)
                words[item.worker, at] = np.array([item.seq, ~item.seq], np.int64)
            elif isinstance(item, Posting):
                notice = item.notice
                version = notice.version + 1
                check = version ^ (notice.clock << 20) ^ _CHECK
                at = self._layout.notice_offset(notice.key)
                words[item.worker, at] = np.array([version, notice.clock, check], np.int64)
            elif isinstance(item, Publication):
                self._publish(item)
            else:  # the next notices of this shard are another server's: none of these may come after them
                self._put(words)
                words.clear()
                self._retire(item)
        self._put(words)
        return True

    def _put(self, words: dict[tuple[int, int], npt.NDArray[np.int64]]) -> None:
        for (rank, at), line in words.items():
            self._window.Put([line, MPI.INT64_T], rank, (at, line.size, MPI.INT64_T))
        targets = {rank for rank, _ in words}
        if len(targets) == 1:
            self._window.Flush(targets.pop())
        elif targets:
            self._window.Flush_all()

    def _publish(self, item: Publication) -> None:
        """Announce, then write the copy; but the first of a stay is written before a reader can believe in the room."""
        stay = self._stays[item.room]
        opens = stay.first < 0
        if opens:
            stay.first = stay.newest = item.version
        elif item.version not in (stay.newest, stay.newest + 1):
            raise ProtocolError(
                f"cannot publish version {item.version} of shard {item.key}: its last was {stay.newest}, need the next;"
                " retire and host the shard to begin anew",
                rank=self._channel.rank,
                key=item.key,
                op="publish",
            )
        span = min(self._layout.num_buffers - 1, item.version - stay.first)
        word = Begin(key=item.key, stay=stay.number, version=item.version, span=span).pack()
        if not opens:
            self._write_begin([item.room], word)
        at = self._begin_at[self._server][item.room] + self._layout.copy_offset(item.key, item.version)
        np.copyto(self._memory[at : at + item.values.size], item.values)
        self._window.Sync()
        if opens:
            self._write_begin([item.room], word)
        stay.newest = item.version
        self._published[item.key] = item.room, item.version
        self._channel.finish(item.ticket)

    def _retire(self, item: Retirement) -> None:
        self._write_begin([item.room], MOVED)
        self._stays[item.room] = _Stay(Begin.next_stay(self._stays[item.room].number))
        self._published.pop(item.key, None)
        self._channel.finish(item.ticket)

    def _write_begin(self, rooms: Iterable[int], word: int) -> None:
        me = self._channel.rank
        line = np.array([word], np.int64)
        for room in rooms:
            at = self._begin_at[self._server][room]
            self._window.Accumulate([line, MPI.INT64_T], me, (at, 1, MPI.INT64_T), MPI.REPLACE)
        self._window.Flush(me)
        self._window.Sync()


def _table(words: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    return words[: rows * _WORDS].reshape(rows, _WORDS)


def _is_free() -> bool:
    """A push that was flushed has left its payload."""
    return True
