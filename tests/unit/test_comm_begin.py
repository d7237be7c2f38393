"""The begin word of a room: what it says, and when a reader believes a copy."""

from __future__ import annotations

import itertools

import pytest

from hpcps.comm.begin import MAX_KEYS, MAX_VERSION, MOVED, Begin


@pytest.mark.parametrize(
    ("key", "stay", "version", "span"),
    list(itertools.product((0, 5, MAX_KEYS - 1), (0, 3, 7), (0, 1, MAX_VERSION), (0, 1, 15))),
)
def test_a_word_says_what_was_put_into_it(key: int, stay: int, version: int, span: int) -> None:
    begin = Begin(key=key, stay=stay, version=version, span=span)
    word = begin.pack()
    assert 0 <= word < 2**63, "a word of a shard is never that of an empty room"
    assert Begin.unpack(word) == begin


def test_an_empty_room_has_no_shards_key() -> None:
    assert Begin.unpack(MOVED).key == MAX_KEYS


def test_a_longer_span_is_cut_to_what_a_word_holds() -> None:
    assert Begin.unpack(Begin(key=1, stay=0, version=40, span=30).pack()).span == 15


@pytest.mark.parametrize(
    ("version", "span", "whole", "complete"),
    [
        (7, 0, [7], 7),  # the first of a stay was written before its word
        (8, 1, [7, 8], 7),
        (9, 2, [7, 8, 9], 8),
        (12, 2, [10, 11, 12], 11),
        (0, 0, [0], 0),
    ],
)
def test_versions_that_a_reader_may_believe(version: int, span: int, whole: list[int], complete: int) -> None:
    begin = Begin(key=0, stay=0, version=version, span=span)
    assert [candidate for candidate in range(20) if begin.keeps(candidate)] == whole
    assert begin.complete == complete


def test_stays_are_counted_round() -> None:
    numbers = [0]
    for _ in range(8):
        numbers.append(Begin.next_stay(numbers[-1]))
    assert numbers == [0, 1, 2, 3, 4, 5, 6, 7, 0]
