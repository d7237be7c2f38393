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
    shard = st.builds(
        lambda server, num_bytes, head: ShardRoom(server=server, num_bytes=num_bytes, head_bytes=head),
        st.integers(0, num_servers - 1),
        st.integers(1, 5000),
        st.integers(128, 700),
    )
    embedded = draw(st.booleans())
    workers = (0,) if embedded else tuple(range(num_servers, num_servers + draw(st.integers(1, 5))))
    return Layout(
        servers=(0,) * 1 if embedded else tuple(range(num_servers)),
        workers=workers,
        shards=tuple(
            ShardRoom(server=0, num_bytes=room.num_bytes, head_bytes=room.head_bytes) if embedded else room
            for room in draw(st.lists(shard, max_size=6))
        ),
        num_slots=draw(st.integers(2, 4)),
        num_buffers=draw(st.integers(2, 4)),
    )


def server_regions(layout: Layout, server: int) -> list[tuple[int, int]]:
    regions = []
    begins = layout.begin_offsets()
    for worker, slot in itertools.product(layout.workers, range(layout.num_slots)):
        regions.append((layout.flag_offset(worker, slot), LINE_BYTES))
        regions.append((layout.slot_offset(server, worker, slot), layout.slot_bytes(server)))
    for key in layout.server_keys(server):
        regions.append((begins[key], LINE_BYTES))
        for version in range(layout.num_buffers):
            regions.append((begins[key] + layout.copy_offset(key, version), layout.shards[key].num_bytes))
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
@given(layout=layouts())
def test_regions_lie_apart_and_inside_their_window(layout: Layout) -> None:
    for server, rank in enumerate(layout.servers):
        if rank not in layout.workers:
            check(server_regions(layout, server), layout.window_bytes(rank))
        for key in layout.server_keys(server):
            room = layout.shards[key]
            assert lines(room.head_bytes) <= layout.head_bytes(server)
            assert layout.head_bytes(server) + lines(room.num_bytes) <= layout.slot_bytes(server)
            assert layout.copy_offset(key, layout.num_buffers) == layout.copy_offset(key, 0)
    for rank in layout.workers:
        if rank not in layout.servers:
            check(worker_regions(layout), layout.window_bytes(rank))
    assert sorted(key for server in range(len(layout.servers)) for key in layout.server_keys(server)) == list(
        range(len(layout.shards))
    )


def test_a_layout_by_hand() -> None:
    """One server, two workers of two slots, shards of 100 and 8 bytes with heads of 128 and 192."""
    rooms = (ShardRoom(server=0, num_bytes=100, head_bytes=128), ShardRoom(server=0, num_bytes=8, head_bytes=192))
    layout = Layout(servers=(0,), workers=(1, 2), shards=rooms, num_slots=2, num_buffers=2)
    assert (layout.head_bytes(0), layout.slot_bytes(0)) == (192, 320)
    assert [layout.flag_offset(worker, slot) for worker in (1, 2) for slot in (0, 1)] == [0, 64, 128, 192]
    assert [layout.slot_offset(0, worker, slot) for worker in (1, 2) for slot in (0, 1)] == [256, 576, 896, 1216]
    assert layout.begin_offsets() == (1536, 1856)
    assert [layout.copy_offset(0, version) for version in (0, 1, 2)] == [64, 192, 64]
    assert [layout.copy_offset(1, version) for version in (2, 3)] == [64, 128]
    assert [layout.ack_offset(0, slot) for slot in (0, 1)] == [0, 64]
    assert [layout.notice_offset(key) for key in (0, 1)] == [128, 192]
    assert (layout.window_bytes(0), layout.window_bytes(1)) == (2048, 256)


def test_a_server_without_shards_has_a_window() -> None:
    layout = Layout(servers=(0,), workers=(1,), shards=(), num_slots=2, num_buffers=2)
    assert (layout.window_bytes(0), layout.window_bytes(1)) == (2 * (64 + 64), 128)
    assert layout.begin_offsets() == ()
