"""When a server tells the workers what decoding takes."""

from __future__ import annotations

from hpcps.plan import Codec
from hpcps.protocol.control import DecodeCosts
from hpcps.runtime.decoding import DecodeReport
from hpcps.update.accumulator import Accumulator, DecodeTime


def spent(**times: tuple[int, float]) -> list[Accumulator]:
    """One accumulator that spent seconds on elements, by codec."""
    total = Accumulator(1, "float32")
    total.times = {
        Codec[name.upper()]: DecodeTime(num_elems=elems, busy_s=seconds) for name, (elems, seconds) in times.items()
    }
    return [total]


def test_costs_are_told_at_intervals_and_when_they_changed() -> None:
    report = DecodeReport(1, interval_windows=10)
    assert report.look(9, spent(fp16=(1 << 20, 0.001))) is None
    first = report.look(10, spent(fp16=(1 << 20, 1 << 20), int8=(1 << 20, 1 << 19)))
    assert first == DecodeCosts(server=1, codecs=[2, 4], elem_s=[1.0, 0.5])
    assert report.look(19, spent(fp16=(1 << 20, 1 << 30))) is None, "ten windows have not passed"
    assert report.look(20, spent(fp16=(1 << 20, 1.2 * (1 << 20)))) is None, "a fifth more is no news"
    later = report.look(30, spent(fp16=(1 << 20, 2 << 20)))
    assert later == DecodeCosts(server=1, codecs=[2, 4], elem_s=[2.0, 0.5]), "what is known of int8 stays"


def test_too_few_elements_say_nothing_and_every_time_counts_once() -> None:
    report = DecodeReport(0, interval_windows=1)
    few = spent(fp16=(100, 1.0))
    assert report.look(1, few) is None
    assert few[0].times == {}
    two = [*spent(fp16=(1 << 16, 1 << 16)), *spent(fp16=(1 << 16, 3 << 16))]
    assert report.look(2, two) == DecodeCosts(server=0, codecs=[2], elem_s=[2.0])
