"""The sampled cosine between groups' gradients: what it is, how often, and that no update depends on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from hpcps import native
from hpcps.comm.channel import Ticket
from hpcps.config import StalenessConfig, WindowConfig
from hpcps.native import RealArray
from hpcps.plan import Codec, CodecSpec, Shard
from hpcps.protocol.actions import Accumulate, Close, Load
from hpcps.protocol.messages import FrameShape, Kind, PushHeader
from hpcps.protocol.server import ServerProtocol
from hpcps.runtime import agreement
from hpcps.runtime.agreement import AgreementMeter
from hpcps.runtime.load import LoadMeter
from hpcps.runtime.server_stats import ServerStats
from hpcps.runtime.shard_store import ShardStore
from hpcps.update.rule import Rule

Vector = npt.NDArray[np.float64]
NUMEL = 8
SAMPLED = 16
"""The first window that is looked at is the one after so many."""


def shard(key: int, numel: int = NUMEL, dtype: str = "float32") -> Shard:
    return Shard(key=key, server=0, dtype=dtype, begin=0, numel=numel, pieces=())


def header(
    group: int, *, key: int = 0, clock: int = 1, groups: int = 4, codec: Codec = Codec.NONE, size: int = 4 * NUMEL
) -> PushHeader:
    return PushHeader(
        kind=Kind.GRADIENT if clock else Kind.INIT,
        codec=codec,
        key=key,
        route_epoch=0,
        generation=0,
        group=group,
        num_groups=groups,
        sender=group + 1,
        clock=clock,
        since_clock=1,
        base_version=max(0, clock - 1),
        weight=1.0 if clock else 0.0,
        share_frac=1.0 / groups,
        numel=NUMEL,
        meta_bytes=0,
        payload_bytes=size,
    )


def ready(numel: int = NUMEL, dtype: str = "float32") -> AgreementMeter:
    """A meter whose next window is looked at."""
    meter = AgreementMeter()
    meter.watch([shard(0, numel, dtype)])
    for _ in range(SAMPLED):
        assert meter.close(0) is None
    return meter


def as_bytes(gradient: Sequence[float] | Vector, dtype: str = "float32") -> native.Bytes:
    return np.ascontiguousarray(gradient, dtype).view(np.uint8)


E = np.eye(NUMEL)
# gradients of the groups, mean cosine
COSINES: list[tuple[list[Vector], float | None]] = [
    ([E[0], 5 * E[0]], 1.0),
    ([E[0], -3 * E[0]], -1.0),
    ([E[0], E[1]], 0.0),
    ([E[0], E[0] + E[1]], math.sqrt(0.5)),
    # three pairs: 1, -1, -1
    ([E[0], 2 * E[0], -E[0]], -1 / 3),
    ([E[0], E[1], E[2], E[3]], 0.0),
    ([E[0]], None),
    ([], None),
    # what has no direction does not count
    ([E[0], 0 * E[0]], None),
    ([E[0], np.full(NUMEL, math.inf), np.full(NUMEL, math.nan), -E[0]], -1.0),
]


@pytest.mark.parametrize(("gradients", "expected"), COSINES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cosine_table(gradients: list[Vector], expected: float | None, dtype: str) -> None:
    meter = ready(dtype=dtype)
    for group, gradient in enumerate(gradients):
        meter.add(header(group, size=NUMEL * np.dtype(dtype).itemsize), as_bytes(gradient, dtype))
    cosine = meter.close(0)
    assert cosine is None if expected is None else cosine == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "onebit", "packed", "topk:1"])
def test_encoded_gradients_are_compared_as_they_count(codec: str) -> None:
    spec = CodecSpec.parse(codec)
    rng = np.random.default_rng(5)
    gradients = [rng.standard_normal(NUMEL).astype(np.float32) for _ in range(3)]
    meter, decoded = ready(), []
    for group, gradient in enumerate(gradients):
        out = np.empty(spec.wire_bytes(NUMEL), np.uint8)
        size, _ = native.encode(spec.codec, gradient, out, keep=spec.keep(NUMEL))
        meter.add(header(group, codec=spec.codec, size=size), out[:size])
        decoded.append(np.empty(NUMEL, np.float32))
        native.decode(spec.codec, out[:size], decoded[-1])
    units = [vector.astype(float) / np.linalg.norm(vector.astype(float)) for vector in decoded]
    expected = np.mean([units[0] @ units[1], units[0] @ units[2], units[1] @ units[2]])
    assert meter.close(0) == pytest.approx(expected, abs=1e-12)


def test_a_payload_at_an_odd_address_is_read() -> None:
    meter, room = ready(), np.zeros(4 * NUMEL + 1, np.uint8)
    room[1:] = as_bytes(E[0])
    meter.add(header(0), room[1:])
    meter.add(header(1), as_bytes(E[0]))
    assert meter.close(0) == pytest.approx(1.0)


def test_a_payload_that_is_none_is_passed_over() -> None:
    meter = ready()
    meter.add(header(0, codec=Codec.INT8, size=3), np.zeros(3, np.uint8))
    meter.add(header(1), as_bytes(E[0]))
    meter.add(header(2), as_bytes(E[0]))
    assert meter.close(0) == pytest.approx(1.0)


def test_one_window_in_sixteen_is_looked_at() -> None:
    meter, looked = AgreementMeter(), []
    meter.watch([shard(0)])
    for window in range(64):
        for group in range(2):
            meter.add(header(group), as_bytes(E[0]))
        if meter.close(0) is not None:
            looked.append(window)
    assert looked == [16, 32, 48]


def test_windows_with_one_group_are_tried_three_times() -> None:
    """In asynchronous runs many windows hold one push: the next ones are looked at, but not for ever."""
    meter, looked = AgreementMeter(), []
    meter.watch([shard(0)])
    for window in range(64):
        groups = 2 if window in (17, 18, 35, 36, 50) else 1
        for group in range(groups):
            meter.add(header(group), as_bytes(E[0]))
        if meter.close(0) is not None:
            looked.append(window)
    assert looked == [17, 50], "35 comes too late for the sample of 32; one sample is enough"


def test_runs_of_one_group_and_other_shards_are_not_read() -> None:
    meter = ready()
    payload = np.zeros(0, np.uint8)
    meter.add(header(0, groups=1), payload)
    meter.add(header(0, key=1), payload)
    assert meter.close(1) is None
    assert meter.close(0) is None
    nothing = AgreementMeter()
    nothing.watch([])
    nothing.add(header(0), payload)
    assert nothing.close(0) is None


def test_the_smallest_shard_that_tells_enough_is_watched() -> None:
    """A shard that is given away in the middle of a window takes what was noted of it along, into nothing."""
    big, middle, small = shard(0, 1 << 20), shard(1, 5000), shard(2, 100)
    meter = AgreementMeter()
    for held, watched in (([big, middle, small], 1), ([big, small], 0), ([small], 2), ([], None)):
        meter.watch(held)
        for window in range(SAMPLED + 1):
            for each in held:
                for group in range(2):
                    made = np.ones(each.numel, np.float32)
                    meter.add(header(group, key=each.key), as_bytes(made))
                found = meter.close(each.key)
                assert (found is not None) == (each.key == watched and window == SAMPLED)


def test_a_watched_shard_that_stays_keeps_its_count() -> None:
    meter = ready()
    meter.add(header(0), as_bytes(E[0]))
    meter.watch([shard(0), shard(1, NUMEL - 1)])
    meter.add(header(1), as_bytes(E[0]))
    assert meter.close(0) == pytest.approx(1.0)


def test_only_the_first_elements_of_a_large_shard_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MOST_ELEMS", 2)
    meter = ready()
    meter.add(header(0), as_bytes(E[0] + 9 * E[5]))
    meter.add(header(1), as_bytes(E[1] + 9 * E[5]))
    assert meter.close(0) == pytest.approx(0.0)


# --- on a server -----------------------------------------------------------------------------------------


class Line:
    """As much of a channel as a store needs."""

    rank = 0
    shares_memory = False

    def __init__(self) -> None:
        self.published: list[RealArray] = []

    def publish(self, key: int, version: int, values: RealArray) -> Ticket:
        self.published.append(values.copy())
        ticket = Ticket()
        ticket.done = True
        return ticket


class Plain(Rule):
    """Steps down the gradient."""

    adaptive = False

    def __init__(self) -> None:
        self.values = np.zeros(NUMEL, np.float32)

    def adopt(self, values: RealArray) -> None:
        raise AssertionError

    def state(self) -> dict[str, RealArray]:
        raise AssertionError

    def restore(self, state: object) -> None:
        raise AssertionError

    def step(
        self, gradient: RealArray, *, present: Sequence[bool], hyper: Sequence[Sequence[float]], lr_scale: float
    ) -> None:
        self.values -= np.float32(0.1 * lr_scale) * gradient


def served(num_windows: int) -> tuple[list[RealArray], LoadMeter]:
    """What a server publishes of windows with pushes of three groups, some encoded, some late."""
    line, meter = Line(), LoadMeter(0, interval_steps=num_windows - 1)
    store = ShardStore(line, num_options=1, stats=ServerStats(), meter=meter)  # type: ignore[arg-type]
    store.add(shard(0), Plain())
    protocol = ServerProtocol(
        [shard(0)], window=WindowConfig(), staleness=StalenessConfig(), num_workers=4, adaptive=False
    )
    shape = FrameShape(num_options=1, num_pieces=0, payload_bytes=4 * NUMEL)
    rng = np.random.default_rng(3)
    half = CodecSpec.parse("fp16")

    def push(head: PushHeader, payload: native.Bytes) -> None:
        frame = store.frame(head, head.pack() + shape.pack_meta((0.1,), b""), payload, None, shape=shape)
        for action in protocol.on_push(head, frame, now_s=0.0):
            if isinstance(action, Accumulate):
                store.accumulate(action)
            elif isinstance(action, Close):
                store.close(action)
            elif isinstance(action, Load):
                store.load(action)

    push(header(0, clock=0), as_bytes(np.zeros(NUMEL)))
    assert meter.report(0, [0]) is None
    for clock in range(1, num_windows + 1):
        for group in range(3):
            gradient = rng.standard_normal(NUMEL).astype(np.float32)
            if group == 1:
                out = np.empty(half.wire_bytes(NUMEL), np.uint8)
                native.encode(half.codec, gradient, out)
                push(header(group, clock=clock, groups=3, codec=half.codec, size=out.size), out)
            else:
                push(header(group, clock=clock, groups=3), as_bytes(gradient))
    return line.published, meter


def test_no_update_depends_on_being_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    num_windows = 40
    looked, meter = served(num_windows)
    load = meter.report(num_windows, [0])
    assert load is not None
    assert -1 < load.agreement < 0.9, "some windows were compared"
    monkeypatch.setattr(agreement, "_EVERY", 1)
    always, _ = served(num_windows)
    monkeypatch.setattr(agreement, "_EVERY", 1 << 30)
    never, meter = served(num_windows)
    load = meter.report(num_windows, [0])
    assert load is not None
    assert load.agreement == 1.0, "none was"
    assert len(looked) == len(never) == num_windows + 1
    for one, two, three in zip(looked, always, never, strict=True):
        assert one.tobytes() == two.tobytes() == three.tobytes()
