"""Latency and rate of a link from timed transfers."""

from __future__ import annotations

import math

import pytest

from hpcps.errors import DataError, PlanError
from hpcps.policy import LinkEstimate, LinkFacts

LARGE, SMALL = 4 << 20, 64 << 10
LATENCY_S, PER_BYTE_S = 100e-6, 8e-9


def seconds(num_bytes: int, *, latency_s: float = LATENCY_S, per_byte_s: float = PER_BYTE_S) -> float:
    return latency_s + num_bytes * per_byte_s


def fed(sizes: list[int], **line: float) -> LinkEstimate:
    """An estimate after one transfer a step, without noise."""
    estimate = LinkEstimate()
    for step, size in enumerate(sizes):
        estimate.add(size, seconds(size, **line), step=step)
    return estimate


def test_two_sizes_give_latency_and_rate() -> None:
    facts = fed([SMALL, LARGE] * 4).facts(LARGE)
    assert facts.latency_s == pytest.approx(LATENCY_S)
    assert facts.bytes_per_s == pytest.approx(1 / PER_BYTE_S)
    assert (facts.trusted, facts.num_transfers, facts.num_changes) == (True, 8, 0)
    assert facts.seconds(10**6) == pytest.approx(seconds(10**6))


def test_int8_frames_beside_plain_ones_count_as_two_sizes() -> None:
    facts = fed([1052800, 4194432] * 4).facts(LARGE)
    assert facts.latency_s == pytest.approx(LATENCY_S)


def test_one_size_gives_a_rate_that_holds_the_latency() -> None:
    facts = fed([LARGE] * 5).facts(LARGE)
    assert (facts.latency_s, facts.bytes_per_s) == (0.0, pytest.approx(LARGE / seconds(LARGE)))
    assert facts.trusted


def test_the_latency_is_remembered_while_large_transfers_go_on() -> None:
    facts = fed([SMALL, LARGE] * 4 + [LARGE] * 32).facts(LARGE)
    assert (facts.latency_s, facts.bytes_per_s) == (pytest.approx(LATENCY_S), pytest.approx(1 / PER_BYTE_S))
    small = fed([SMALL, LARGE] * 4 + [SMALL] * 32).facts(LARGE)
    assert (small.latency_s, small.bytes_per_s) == (0.0, pytest.approx(SMALL / seconds(SMALL)))
    little = 4096  # the latency is most of its time
    beside = fed([16, little] * 4 + [little] * 32).facts(little)
    assert (beside.latency_s, beside.bytes_per_s) == (0.0, pytest.approx(little / seconds(little)))


def test_a_change_of_the_link_forgets_the_latency() -> None:
    estimate = fed([SMALL, LARGE] * 4 + [LARGE] * 10)
    for step in range(18, 21):
        estimate.add(LARGE, 2 * seconds(LARGE), step=step)
    facts = estimate.facts(LARGE)
    assert (facts.num_changes, facts.latency_s) == (1, 0.0)


# sizes seen, size asked about, trusted
TRUST = [
    ([], LARGE, False),
    ([LARGE, LARGE], LARGE, False),
    ([LARGE] * 3, LARGE, True),
    ([SMALL] * 30, LARGE, False),
    ([SMALL] * 30, 2 * SMALL, True),
    ([SMALL] * 30, 2 * SMALL + 1, False),
    ([SMALL] * 29 + [LARGE], LARGE, True),
    ([LARGE] + [SMALL] * 31, LARGE, True),
    ([LARGE] + [SMALL] * 32, LARGE, False),
]


@pytest.mark.parametrize(("sizes", "asked", "trusted"), TRUST)
def test_small_transfers_are_not_trusted_for_large_ones(sizes: list[int], asked: int, trusted: bool) -> None:
    assert fed(sizes).facts(asked).trusted is trusted


def test_without_transfers_the_link_takes_no_time() -> None:
    facts = LinkEstimate().facts(LARGE)
    assert (facts.seconds(LARGE), facts.bytes_per_s, facts.num_transfers) == (0.0, math.inf, 0)


def test_outliers_do_not_move_the_line() -> None:
    estimate = LinkEstimate()
    for step in range(30):
        size = SMALL if step % 2 else LARGE
        estimate.add(size, seconds(size) * (40 if step % 7 == 3 else 1), step=step)
    facts = estimate.facts(LARGE)
    assert (facts.latency_s, facts.bytes_per_s) == (pytest.approx(LATENCY_S), pytest.approx(1 / PER_BYTE_S))
    assert facts.num_changes == 0


@pytest.mark.parametrize("small_s", [seconds(LARGE) * 2, seconds(LARGE), 1e-9])
def test_a_line_that_makes_no_sense_falls_back_to_the_large_transfers(small_s: float) -> None:
    estimate = LinkEstimate()
    for step in range(6):
        estimate.add(SMALL if step % 2 else LARGE, small_s if step % 2 else seconds(LARGE), step=step)
    facts = estimate.facts(LARGE)
    assert (facts.latency_s, facts.bytes_per_s) == (0.0, pytest.approx(LARGE / seconds(LARGE)))


@pytest.mark.parametrize(("factor", "steps"), [(1.25, None), (0.75, None), (1.4, 3), (0.5, 3), (10.0, 3)])
def test_a_change_is_noticed_and_the_past_forgotten(factor: float, steps: int | None) -> None:
    estimate = fed([LARGE] * 20)
    noticed = None
    for step in range(20, 26):
        estimate.add(LARGE, seconds(LARGE) * factor, step=step)
        if noticed is None and estimate.facts(LARGE).num_changes:
            noticed = step - 19
            facts = estimate.facts(LARGE)
            assert (facts.num_transfers, facts.trusted) == (3, True)
            assert facts.seconds(LARGE) == pytest.approx(seconds(LARGE) * factor)
    assert noticed == steps
    assert estimate.facts(LARGE).num_changes == (steps is not None)


def test_a_change_seen_on_small_transfers_makes_the_link_unknown_for_large_ones() -> None:
    estimate = fed([LARGE] * 5 + [SMALL] * 10)
    assert estimate.facts(LARGE).trusted
    for step in range(15, 18):
        estimate.add(SMALL, 2 * seconds(SMALL), step=step)
    facts = estimate.facts(LARGE)
    assert (facts.num_changes, facts.trusted, facts.num_transfers) == (1, False, 3)


def test_another_size_is_no_change() -> None:
    sizes = [LARGE] * 20 + [SMALL] * 10 + [LARGE // 2] * 10 + [SMALL * 6 // 5] * 10
    facts = fed(sizes, latency_s=5e-3).facts(LARGE)
    assert facts.num_changes == 0


def test_many_transfers_a_step_are_kept_up_to_a_bound() -> None:
    estimate = LinkEstimate()
    for step in range(8):
        for _ in range(50):
            estimate.add(LARGE, seconds(LARGE), step=step)
    assert estimate.facts(LARGE).num_transfers == 128


@pytest.mark.parametrize(("num_bytes", "took_s"), [(0, 1.0), (10, 0.0), (10, -1.0), (10, math.inf), (10, math.nan)])
def test_wrong_transfers_are_refused(num_bytes: int, took_s: float) -> None:
    with pytest.raises(DataError, match="cannot use a transfer of"):
        LinkEstimate().add(num_bytes, took_s, step=0)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(-1.0, 1.0), (math.inf, 1.0), (0.0, 0.0), (0.0, math.nan)])
def test_wrong_links_are_refused(latency_s: float, bytes_per_s: float) -> None:
    with pytest.raises(PlanError, match="cannot describe a link: got a latency of"):
        LinkFacts(latency_s=latency_s, bytes_per_s=bytes_per_s)
