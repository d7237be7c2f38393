"""The regions of a window lie apart, inside it, each on cache lines of its own."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.comm.layout import LINE_BYTES, Layout, ShardRoom


def lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    num_servers = draw(st.integers(1, 4))
    embedded = draw(st.booleans())
    workers = (0,) if embedded else tuple(range(num_servers, num_servers + draw(st.integers(1, 5))))
    num_servers = 1 if embedded else num_servers
    servers = draw(st.lists(st.integers(0, num_servers - 1), max_size=6))
    spare = draw(st.lists(st.integers(0, 2), min_size=num_servers, max_size=num_servers))
    num_rooms = tuple(servers.count(server) + spare[server] for server in range(num_servers))
    free = [draw(st.permutations(range(rooms))) for rooms in num_rooms]
    shards = tuple(
        ShardRoom(
            server=server,
            num_bytes=draw(st.integers(1, 5000)),
            head_bytes=draw(st.integers(128, 700)),
            room=free[server].pop(),
        )
        for server in servers
    )
    return Layout(
        servers=tuple(range(num_servers)),
        workers=workers,
        shards=shards,
        num_slots=draw(st.integers(2, 4)),
        num_buffers=draw(st.integers(2, 4)),
        num_rooms=num_rooms,
    )


def server_regions(layout: Layout, server: int, guests: dict[int, int]) -> list[tuple[int, int]]:
    """What lies in a server's window, given the shard in each room."""
    regions = []
    begins = layout.begin_offsets(server)
    assert len(begins) == layout.num_rooms[server]
    for worker, slot in itertools.product(layout.workers, range(layout.num_slots)):
        regions.append((layout.flag_offset(worker, slot), LINE_BYTES))
        regions.append((layout.slot_offset(server, worker, slot), layout.slot_bytes(server)))
    for room, key in guests.items():
        regions.append((begins[room], LINE_BYTES))
        for version in range(layout.num_buffers):
            regions.append((begins[room] + layout.copy_offset(key, version), layout.shards[key].num_bytes))
    return regions


def worker_regions(layout: Layout) -> list[tuple[int, int]]:
    acks = itertools.product(range(len(layout.servers)), range(layout.num_slots))
    regions = [(layout.ack_offset(server, slot), LINE_BYTES) for server, slot in acks]
    return regions + [(layout.notice_offset(key), LINE_BYTES) for key in range(len(layout.shards))]


def check(regions: list[tuple[int, int]], window_bytes: int) -> None:
    assert all(offset % LINE_BYTES == 0 for offset, _ in regions)
    ordered = sorted((offset, offset + lines(size)) for offset, size in regions)
    for (_, end), (begin, _) in itertools.pairwise(ordered):
        assert end <= begin
    if ordered:
        assert ordered[0][0] >= 0
        assert ordered[-1][1] <= window_bytes
    assert window_bytes >= LINE_BYTES


@settings(deadline=None, max_examples=300, derandomize=True)
@given(layout=layouts(), data=st.data())
def test_regions_lie_apart_and_inside_their_window(layout: Layout, data: st.DataObject) -> None:
    for server, rank in enumerate(layout.servers):
        own = {layout.shards[key].room: key for key in layout.server_keys(server)}
        guests = [own]
        if layout.moves and layout.num_rooms[server] and layout.shards:  # any shards in any rooms
            keys = st.lists(st.sampled_from(range(len(layout.shards))), unique=True, max_size=layout.num_rooms[server])
            guests.append(dict(enumerate(data.draw(keys))))
        for chosen in guests:
            if rank not in layout.workers:
                check(server_regions(layout, server, chosen), layout.window_bytes(rank))
            for key in chosen.values():
                shard = layout.shards[key]
                assert lines(shard.head_bytes) <= layout.head_bytes(server)
                assert layout.head_bytes(server) + lines(shard.num_bytes) <= layout.slot_bytes(server)
                assert layout.copy_offset(key, layout.num_buffers) == layout.copy_offset(key, 0)
    for rank in layout.workers:
        if rank not in layout.servers:
            check(worker_regions(layout), layout.window_bytes(rank))
    assert sorted(key for server in range(len(layout.servers)) for key in layout.server_keys(server)) == list(
        range(len(layout.shards))
    )


@settings(deadline=None, max_examples=100, derandomize=True)
@given(layout=layouts())
def test_rooms_that_are_needed_at_least_cost_no_more_than_their_shards(layout: Layout) -> None:
    if layout.moves:
        return
    for server, rank in enumerate(layout.servers):
        shards = [layout.shards[key] for key in layout.server_keys(server)]
        rooms = sum(LINE_BYTES + layout.num_buffers * lines(shard.num_bytes) for shard in shards)
        slots = layout.num_flags * (LINE_BYTES + layout.slot_bytes(server))
        assert layout.window_bytes(rank) == max(LINE_BYTES, slots + rooms)


def test_a_layout_by_hand() -> None:
    """One server, two workers of two slots, shards of 100 and 8 bytes with heads of 128 and 192."""
    rooms = (
        ShardRoom(server=0, num_bytes=100, head_bytes=128, room=0),
        ShardRoom(server=0, num_bytes=8, head_bytes=192, room=1),
    )
    layout = Layout(servers=(0,), workers=(1, 2), shards=rooms, num_slots=2, num_buffers=2, num_rooms=(2,))
    assert not layout.moves
    assert (layout.head_bytes(0), layout.slot_bytes(0)) == (192, 320)
    assert [layout.flag_offset(worker, slot) for worker in (1, 2) for slot in (0, 1)] == [0, 64, 128, 192]
    assert [layout.slot_offset(0, worker, slot) for worker in (1, 2) for slot in (0, 1)] == [256, 576, 896, 1216]
    assert layout.begin_offsets(0) == (1536, 1856)
    assert [layout.copy_offset(0, version) for version in (0, 1, 2)] == [64, 192, 64]
    assert [layout.copy_offset(1, version) for version in (2, 3)] == [64, 128]
    assert [layout.ack_offset(0, slot) for slot in (0, 1)] == [0, 64]
    assert [layout.notice_offset(key) for key in (0, 1)] == [128, 192]
    assert (layout.window_bytes(0), layout.window_bytes(1)) == (2048, 256)


def test_a_layout_in_which_shards_move() -> None:
    """The same shards on two servers with two rooms each: rooms and slots of both fit the larger one."""
    rooms = (
        ShardRoom(server=0, num_bytes=100, head_bytes=128, room=1),
        ShardRoom(server=1, num_bytes=8, head_bytes=192, room=0),
    )
    layout = Layout(servers=(0, 1), workers=(2,), shards=rooms, num_slots=2, num_buffers=2, num_rooms=(2, 2))
    assert layout.moves
    for server in (0, 1):
        assert (layout.head_bytes(server), layout.slot_bytes(server)) == (192, 320)
        assert [layout.slot_offset(server, 2, slot) for slot in (0, 1)] == [128, 448]
        assert layout.begin_offsets(server) == (768, 1088)
        assert layout.window_bytes(server) == 1408
    assert [layout.copy_offset(1, version) for version in (0, 1)] == [64, 128]
    assert layout.window_bytes(2) == (2 * 2 + 2) * 64


def test_a_server_without_shards_has_a_window() -> None:
    layout = Layout(servers=(0,), workers=(1,), shards=(), num_slots=2, num_buffers=2, num_rooms=(0,))
    assert (layout.window_bytes(0), layout.window_bytes(1)) == (2 * (64 + 64), 128)
    assert layout.begin_offsets(0) == ()
