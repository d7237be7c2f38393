"""What a server measures of itself: its rate at the start, and its load between two reports."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hpcps import native
from hpcps.protocol.control import ServerLoad
from hpcps.protocol.control_json import decode_control, encode_control
from hpcps.runtime.load import LoadMeter, measure_rate


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_meter(clock: Clock, *, interval_steps: int = 10, memory: int = 0) -> LoadMeter:
    cpu = Clock(0.0)
    meter = LoadMeter(
        3, interval_steps=interval_steps, memory=lambda: memory, clock=clock, cpu_clock=lambda: clock() / 4 + cpu()
    )
    assert meter.report(0, (1, 2)) is None
    return meter


def turn(meter: LoadMeter, clock: Clock, seconds: float, *, worked: bool = True, left_out_s: float = 0.0) -> None:
    meter.turn_began()
    clock.now_s += seconds
    meter.leave_out(left_out_s)
    meter.turn_ended(worked=worked)


def test_a_report_holds_what_was_counted() -> None:
    clock = Clock()
    meter = make_meter(clock, memory=77)
    turn(meter, clock, 2.0)
    turn(meter, clock, 5.0, worked=False)  # woke up for nothing
    turn(meter, clock, 3.0, left_out_s=1.0)
    for frames in (4, 9, 2):
        meter.queued(frames)
    for key in (2, 1, 2, 5):  # shard 5 has left since
        meter.arrived(key, 1000)
    meter.admitted(staleness=0, offset_s=0.0, late=False)
    meter.admitted(staleness=3, offset_s=0.25, late=True)
    meter.admitted(staleness=0, offset_s=0.5, late=False)
    meter.compared(0.5)
    meter.compared(0.0)
    load = meter.report(10, {2: "b", 1: "a"})
    assert load == ServerLoad(
        server=3,
        version=10,
        seconds=10.0,
        busy_s=4.0,
        cpu_s=2.5,
        raw_bytes=4000,
        keys=[1, 2],
        pushes=[1, 2],
        queue=9,
        memory_bytes=77,
        num_pushes=3,
        num_late=1,
        offset_s=0.25,
        staleness=1.0,
        agreement=0.25,
    )
    assert decode_control(encode_control(load)) == load


def test_a_report_is_due_once_an_interval_and_starts_anew() -> None:
    clock = Clock()
    meter = make_meter(clock, interval_steps=10)
    turn(meter, clock, 2.0)
    meter.arrived(1, 8)
    assert meter.report(9, (1,)) is None
    assert meter.report(13, (1,)) is not None
    assert meter.report(22, (1,)) is None
    clock.now_s += 1
    load = meter.report(23, (1,))
    assert load is not None
    assert (load.seconds, load.busy_s, load.raw_bytes, load.pushes, load.queue) == (1.0, 0.0, 0, [0], 0)
    assert (load.num_pushes, load.staleness, load.offset_s, load.agreement) == (0, 0.0, 0.0, 1.0)


def test_an_interval_begins_with_the_first_shard() -> None:
    clock = Clock()
    meter = LoadMeter(0, interval_steps=10, memory=lambda: 0, clock=clock, cpu_clock=clock)
    turn(meter, clock, 5.0)
    assert meter.report(-1, ()) is None
    assert meter.report(507, (4,)) is None  # it came at this version
    clock.now_s += 2
    assert meter.report(516, (4,)) is None
    load = meter.report(517, (4,))
    assert load is not None and (load.seconds, load.busy_s) == (2.0, 0.0)
    assert meter.report(-1, ()) is None  # it has gone again
    clock.now_s += 50
    assert meter.report(700, (5,)) is None
    clock.now_s += 1
    load = meter.report(710, (5,))
    assert load is not None and load.seconds == 1.0


def test_where_the_newest_shard_has_left_an_interval_begins_at_those_that_are_here() -> None:
    meter = make_meter(Clock(), interval_steps=10)
    assert meter.report(5012, (1, 2)) is not None
    assert meter.report(3008, (1,)) is None
    assert meter.report(3017, (1,)) is None
    assert meter.report(3018, (1,)) is not None


def test_the_median_offset_is_that_of_the_newest() -> None:
    meter = make_meter(Clock(), interval_steps=1)
    for _ in range(2000):
        meter.admitted(staleness=0, offset_s=5.0, late=False)
    for _ in range(600):
        meter.admitted(staleness=0, offset_s=1.0, late=False)
    load = meter.report(1, (1,))
    assert load is not None and load.offset_s == 1.0 and load.num_pushes == 2600


def test_a_push_that_is_handed_on_counts_elsewhere() -> None:
    clock = Clock()
    meter = make_meter(clock, interval_steps=1)
    meter.arrived(0, 100)
    meter.arrived(1, 100)
    meter.arrived(1, 100, times=-1)
    load = meter.report(1, (0, 1))
    assert load is not None and (load.raw_bytes, load.pushes) == (100, [1, 0])
    meter.arrived(0, 100, times=-1)  # it came in the interval before
    load = meter.report(2, (0, 1))
    assert load is not None and (load.raw_bytes, load.pushes) == (0, [0, 0])


def test_a_turn_cannot_be_busy_for_less_than_nothing() -> None:
    clock = Clock()
    meter = make_meter(clock, interval_steps=1)
    turn(meter, clock, 1.0, left_out_s=1.5)
    load = meter.report(1, (1,))
    assert load is not None and load.busy_s == 0.0


def test_the_rate_is_that_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e6 < measure_rate() < 1e12
    clock = Clock()
    took_s = iter([9.0, 0.5, 0.125, 4.0, *[1.0] * 100])  # the first touches the memory, others are disturbed

    def slow(*args: object, **kwargs: object) -> None:
        clock.now_s += next(took_s) * 0.01

    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(native, "decode_accumulate", slow)
    monkeypatch.setattr(native, "accumulate", lambda *args: None)
    assert measure_rate() == pytest.approx(4 * 1024 * 1024 / 0.005)  # two passes suffice once the time is over


def test_an_emulated_rate_is_believed() -> None:
    assert measure_rate(25e6) == 25e6
