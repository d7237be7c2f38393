"""The worker's clock and versions."""

from __future__ import annotations

import pytest

from hpcps.errors import ProtocolError
from hpcps.plan import Group, Shard
from hpcps.protocol.messages import Kind
from hpcps.protocol.worker import WorkerProtocol, owner_of

SHARDS = [Shard(key=key, server=0, dtype="float32", begin=4 * key, numel=4, pieces=(), epoch=7) for key in range(3)]
GROUP = Group(index=1, workers=(3, 5))


def test_shards_are_spread_over_the_members() -> None:
    assert [owner_of(shard, GROUP) for shard in SHARDS] == [3, 5, 3]
    assert [owner_of(shard, Group(index=0, workers=(4,))) for shard in SHARDS] == [4, 4, 4]


def test_notices_may_come_late_and_out_of_order() -> None:
    worker = WorkerProtocol(3, num_keys=2)
    assert not worker.loaded()
    worker.on_notice(0, version=0, clock=0)
    assert not worker.loaded()
    worker.on_notice(1, version=0, clock=0)
    assert worker.loaded()
    worker.on_notice(0, version=2, clock=2)
    worker.on_notice(0, version=1, clock=1)
    assert (worker.newest(0), worker.newest(1)) == (2, 0)
    assert (worker.settled(0), worker.settled(1)) == (2, 0)
    assert worker.settled_through(0)
    assert not worker.settled_through(1)
    worker.on_notice(1, version=2, clock=2)
    assert worker.settled_through(2)
    assert not worker.settled_through(3)


def test_a_worker_without_shards_waits_for_nothing() -> None:
    worker = WorkerProtocol(3, num_keys=0)
    assert worker.loaded()
    assert worker.settled_through(100)


@pytest.mark.parametrize("key", [-1, 2])
def test_a_notice_of_an_unknown_shard_is_refused(key: int) -> None:
    with pytest.raises(ProtocolError, match=f"cannot accept a notice: key {key}, need 0 to 1") as caught:
        WorkerProtocol(3, num_keys=2).on_notice(key, version=0, clock=0)
    assert (caught.value.rank, caught.value.key) == (3, key)


# kind, generation of the push, clock at which it begins if it is the first; expected clock, since_clock, base_version
HEADERS = [
    (Kind.INIT, 0, None, 0, 1, 0),
    (Kind.GRADIENT, 0, None, 1, 1, 0),
    (Kind.GRADIENT, 0, None, 2, 1, 2),
    (Kind.GRADIENT, 1, 2, 3, 3, 3),
    (Kind.GRADIENT, 1, None, 4, 3, 4),
    (Kind.GRADIENT, 3, 9, 10, 10, 5),
]


def test_headers_carry_clock_version_and_where_the_generation_began() -> None:
    worker = WorkerProtocol(3, num_keys=3)
    for kind, generation, largest_clock, clock, since_clock, base_version in HEADERS:
        if largest_clock is not None:
            worker.on_regroup(largest_clock)
            assert worker.settled_through(largest_clock), "all workers have flushed"
        if kind is not Kind.INIT:
            assert worker.advance() == clock
        if base_version:
            worker.on_pulled(1, version=base_version)
        header = worker.header(
            SHARDS[1],
            kind,
            group=GROUP,
            generation=generation,
            num_groups=2,
            weight=3.0,
            share_frac=0.5,
            meta_bytes=5,
            payload_bytes=16,
        )
        assert (header.kind, header.generation) == (kind, generation)
        assert (header.clock, header.since_clock, header.base_version) == (clock, since_clock, base_version)
        assert (header.key, header.group, header.num_groups, header.sender) == (1, 1, 2, 3)
        assert (header.route_epoch, header.numel, header.weight, header.share_frac) == (7, 4, 3.0, 0.5)
    assert worker.used(1) == 5
    assert worker.used(0) == -1
