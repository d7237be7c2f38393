"""Parcels and messages between servers: any size, whole, in order, also at the end of a job."""

from __future__ import annotations

import struct
import zlib
from collections import deque

import numpy as np
import pytest
from movers import all_done
from mpi4py import MPI
from mpi_ranks import Inbox, Ranks

from hpcps.comm.channel import Bytes, Channel, Control, Parcel
from hpcps.comm.parcels import Parcels
from hpcps.comm.tags import Tag
from hpcps.errors import ProtocolError
from hpcps.units import MiB

PLANES = pytest.mark.parametrize("plane", ["rma", "p2p"])
PARCEL_SIZES = (0, 1, 63, 70_000, 4 * MiB, 0, 4 * MiB + 1, 16 * MiB, 17 * MiB + 5, 200 * MiB, 2, 0)


def parcel_of(source: int, number: int) -> tuple[bytes, Bytes]:
    size = PARCEL_SIZES[number] // (1 if source == 0 else 9)
    period = np.random.default_rng([source, number]).integers(0, 256, 1_000_003, np.uint8)
    body = np.resize(period, size)
    return struct.pack("<iIq", number, zlib.crc32(body), size) * (number % 3), body


@pytest.mark.mpi(min_size=3)
@PLANES
def test_parcels_of_all_sizes_come_whole_and_in_order_both_ways(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(2, [64, 64])

    def body(channel: Channel) -> None:
        if ranks.rank not in layout.servers:
            return
        sent = [parcel_of(ranks.rank, number) for number in range(len(PARCEL_SIZES))]
        tickets = [channel.parcel(1 - ranks.rank, head, body) for head, body in sent]
        inbox = Inbox(channel)
        for number in range(len(PARCEL_SIZES)):
            parcel = inbox.take(Parcel, "a parcel")
            head, body = parcel_of(1 - ranks.rank, number)
            assert (parcel.source, parcel.head) == (1 - ranks.rank, head)
            assert parcel.body.size == body.size and zlib.crc32(parcel.body) == zlib.crc32(body)
        all_done(channel, tickets, "the parcels to leave")
        assert channel.counters.parcels == len(sent)
        assert channel.counters.parcel_bytes == sum(len(head) + body.size for head, body in sent)

    ranks.play(plane, layout, body)


@pytest.mark.mpi(min_size=3)
@PLANES
def test_any_number_of_parcels_may_be_under_way_also_when_the_job_ends(ranks: Ranks, plane: str) -> None:
    layout = ranks.layout(min(3, ranks.size - 1), [64] * 3)
    channels: list[Channel] = []
    num_parcels = 256
    others = [server for server, rank in enumerate(layout.servers) if rank != ranks.rank]

    def body(channel: Channel) -> None:
        channels.append(channel)
        if ranks.rank in layout.servers:
            for number in range(num_parcels):
                for server in others:
                    channel.parcel(server, b"%d" % number, np.full(1_000 + 100 * (number % 4), float(number)))

    ranks.play(plane, layout, body)

    def check() -> None:
        if ranks.rank in layout.servers:
            parcels: dict[int, deque[Parcel]] = {rank: deque() for rank in layout.servers}
            for event in channels[0].take():
                assert isinstance(event, Parcel)
                parcels[event.source].append(event)
            for server in others:
                got = parcels[layout.servers[server]]
                assert [int(parcel.head) for parcel in got] == list(range(num_parcels))
                assert all((parcel.body.view(np.float64) == float(parcel.head)).all() for parcel in got)

    ranks.check(check)


@pytest.mark.mpi(min_size=3)
@PLANES
def test_servers_talk_to_each_other(ranks: Ranks, plane: str) -> None:
    num_servers = min(3, ranks.size - 1)
    layout = ranks.layout(num_servers, [64] * 3)
    sizes = (0, 5, 100_000, 32_760)

    def body(channel: Channel) -> None:
        if ranks.rank not in layout.servers:
            return
        others = [rank for rank in layout.servers if rank != ranks.rank]
        for size in sizes:
            for rank in others:
                channel.send(rank, bytes([ranks.rank]) * size)
        inbox = Inbox(channel)
        counts = dict.fromkeys(others, 0)
        for _ in range(len(others) * len(sizes)):
            control = inbox.take(Control, "control messages")
            assert control.data == bytes([control.source]) * sizes[counts[control.source]]
            counts[control.source] += 1

    ranks.play(plane, layout, body)


@pytest.mark.mpi
@pytest.mark.parametrize("sizes", [(-1, 0), (0, -1), (2**30 + 1, 0), (0, 2**40 + 1)])
def test_parcel_of_impossible_sizes_is_refused(ranks: Ranks, sizes: tuple[int, int]) -> None:
    comm = MPI.COMM_SELF.Dup()
    parcels = Parcels(comm, peers=[0], deliver=lambda parcel: None)
    sent = comm.Isend([np.array(sizes, np.int64), MPI.INT64_T], dest=0, tag=Tag.PARCEL_SIZES)

    def check() -> None:
        with pytest.raises(ProtocolError, match=f"a parcel from rank 0: got sizes of {sizes[0]} and {sizes[1]} bytes,"):
            while True:
                parcels.look()

    ranks.check(check)
    sent.Wait()
    comm.Free()
