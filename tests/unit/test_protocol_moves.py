"""A shard from one state machine to another, as scripts: what it had done there is not done again here."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hpcps.config import StalenessConfig, WindowConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Shard
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify, Refuse
from hpcps.protocol.fields import read_fields
from hpcps.protocol.key_state import KeyState
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.server import ServerProtocol

SHARD = Shard(key=0, server=0, dtype="float32", begin=0, numel=4, pieces=())
THERE = dataclasses.replace(SHARD, server=1, room=2, epoch=5)
OTHER = Shard(key=1, server=1, dtype="float32", begin=4, numel=4, pieces=())
WINDOW = WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=1.0)


def server(*shards: Shard, loaded: bool = True) -> ServerProtocol:
    protocol = ServerProtocol(
        shards, window=WINDOW, staleness=StalenessConfig(decay="none"), num_workers=8, adaptive=False
    )
    for shard in shards if loaded else ():
        first = dataclasses.replace(push(0, 0, key=shard.key), kind=Kind.INIT, weight=0.0)
        protocol.on_push(first, "init", now_s=0.0)
    return protocol


def push(
    group: int, clock: int, *, key: int = 0, groups: int = 2, generation: int = 0, since: int = 1, epoch: int = 0
) -> PushHeader:
    return PushHeader(
        kind=Kind.GRADIENT,
        key=key,
        route_epoch=epoch,
        generation=generation,
        group=group,
        num_groups=groups,
        sender=group + 1,
        clock=clock,
        since_clock=since,
        base_version=0,
        weight=2.0,
        share_frac=0.5,
        numel=4,
        meta_bytes=0,
        payload_bytes=16,
    )


def short(actions: list[Action]) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for action in actions:
        if isinstance(action, Accumulate):
            lines.append(("add", action.token))
        elif isinstance(action, Close):
            lines.append(("close", action.key, action.version, action.total_weight, action.num_pushes))
        elif isinstance(action, Notify):
            lines.append(("tell", action.key, action.version, action.clocks))
        elif isinstance(action, Load):
            lines.append(("load", action.token))
        elif isinstance(action, Refuse):
            lines.append(("no", action.token, action.reason))
    return lines


def through_json(state: KeyState) -> KeyState:
    again = read_fields(KeyState, json.loads(json.dumps(dataclasses.asdict(state))))
    assert again == state
    return again


def test_an_open_window_goes_on_at_the_new_server() -> None:
    giver, taker = server(SHARD), server()
    giver.on_push(push(0, 1), "a1", now_s=5.0)
    state, waiting = giver.hand_over(0, now_s=5.25)
    assert (state.window, state.weight, state.window_age_s, waiting) == ([[0, 1]], 2.0, 0.25, [])
    assert not giver.holds(0)
    assert giver.next_deadline_s is None
    assert short(giver.on_push(push(1, 1), "b1", now_s=5.3)) == [("no", "b1", "wrong route: shard 0 is not here")]

    assert short(taker.take_over(THERE, through_json(state), now_s=100.0)) == [("tell", 0, 0, ())]
    assert taker.holds(0)
    assert taker.next_deadline_s == 100.75, "a quarter of a second is over"
    assert short(taker.on_push(push(0, 1), "a1", now_s=100.1)) == [("no", "a1", "duplicate: clock 1")]
    assert short(taker.on_push(push(1, 1, epoch=5), "b1", now_s=100.2)) == [
        ("add", "b1"),
        ("close", 0, 1, 4.0, 2),
        ("tell", 0, 1, ((0, 1), (1, 1))),
    ]
    assert short(taker.on_push(push(1, 2, epoch=6), "b2", now_s=100.2)) == [
        ("no", "b2", "wrong route: epoch 6, 4 elements, have epoch 5 and 4 elements")
    ]


def test_frames_that_wait_come_along_and_are_no_duplicates() -> None:
    giver, taker = server(SHARD), server()
    for clock in (1, 2, 4):
        giver.on_push(push(0, clock, groups=4), f"a{clock}", now_s=0.0)
    giver.on_push(push(1, 3, groups=4), "b3", now_s=0.0)
    state, waiting = giver.hand_over(0, now_s=0.0)
    assert waiting == ["a2", "a4", "b3"], "held first, then those that overtook"
    taker.take_over(THERE, through_json(state), now_s=0.0)
    assert short(taker.on_push(push(0, 4, groups=4), "a4", now_s=0.0)) == []
    assert short(taker.on_push(push(0, 2, groups=4), "a2", now_s=0.0)) == [], "held: its group is in the window"
    assert short(taker.on_push(push(0, 2, groups=4), "again", now_s=0.0)) == [("no", "again", "duplicate: clock 2")]
    assert short(taker.on_push(push(1, 1, groups=4), "b1", now_s=0.0)) == [
        ("add", "b1"),
        ("close", 0, 1, 4.0, 2),
        ("tell", 0, 1, ((0, 1), (1, 1))),
        ("add", "a2"),
    ]


def test_a_window_that_is_due_by_now_closes_at_once() -> None:
    giver, taker = server(SHARD), server(OTHER)
    giver.on_push(push(0, 1), "a1", now_s=5.0)
    state, _ = giver.hand_over(0, now_s=5.5)
    late = dataclasses.replace(state, window_age_s=1.5)
    assert short(taker.take_over(THERE, late, now_s=0.0)) == [
        ("tell", 0, 0, ()),
        ("close", 0, 1, 2.0, 1),
        ("tell", 0, 1, ((0, 1),)),
    ]


def test_what_late_groups_missed_is_measured_from_that_windows_opening() -> None:
    giver, taker = server(SHARD), server()
    giver.on_push(push(0, 1), "a1", now_s=5.0)
    giver.on_timer(now_s=6.0)
    state, _ = giver.hand_over(0, now_s=6.5)
    assert (state.missed, state.missed_age_s, state.offsets_s) == ([0], 1.5, [])
    taker.take_over(THERE, through_json(state), now_s=50.0)
    taker.on_push(push(1, 1), "b1", now_s=50.25)
    state, _ = taker.hand_over(0, now_s=50.5)
    assert state.offsets_s == [1.75]


def test_a_shard_without_values_may_move() -> None:
    giver, taker = server(SHARD, loaded=False), server()
    state, waiting = giver.hand_over(0, now_s=0.0)
    assert (state.version, waiting) == (-1, [])
    assert taker.take_over(THERE, through_json(state), now_s=0.0) == []
    assert not taker.loaded
    first = dataclasses.replace(push(0, 0), kind=Kind.INIT)
    assert short(taker.on_push(first, "i", now_s=0.0)) == [("load", "i"), ("tell", 0, 0, ())]


def test_a_taker_that_lags_behind_begins_the_givers_grouping() -> None:
    giver, taker = server(SHARD), server(OTHER)
    taker.on_push(push(0, 1, key=1), "old", now_s=0.0)
    giver.on_push(push(2, 4, groups=3, generation=2, since=4), "c4", now_s=0.0)
    taker.on_end_of_data(1, 4, generation=2, now_s=0.0)
    state, _ = giver.hand_over(0, now_s=0.0)
    assert short(taker.take_over(THERE, through_json(state), now_s=0.0)) == [
        ("close", 1, 1, 2.0, 1),
        ("tell", 1, 1, ((0, 1),)),
        ("tell", 0, 0, ((0, 3), (1, 3), (2, 3))),
    ]
    assert taker.generation == 2
    assert taker.settled(1).clocks == ((0, 3), (1, 3), (2, 3))
    # group 1 ends at clock 4, as the taker had heard before that grouping began
    taker.on_push(push(1, 4, groups=3, generation=2, since=4), "b4", now_s=0.0)
    lines = short(taker.on_push(push(0, 4, groups=3, generation=2, since=4), "a4", now_s=0.0))
    assert lines[1] == ("close", 0, 1, 6.0, 3)
    taker.on_push(push(0, 5, groups=3, generation=2, since=4), "a5", now_s=0.0)
    lines = short(taker.on_push(push(2, 5, groups=3, generation=2, since=4), "c5", now_s=0.0))
    assert lines[1] == ("close", 0, 2, 4.0, 2), "group 1 is waited for no longer"


def test_a_taker_that_is_ahead_takes_the_old_grouping_for_settled() -> None:
    giver, taker = server(SHARD), server(OTHER)
    giver.on_push(push(0, 1), "a1", now_s=0.0)
    taker.on_push(push(0, 3, key=1, groups=1, generation=1, since=3), "x", now_s=0.0)
    giver.on_end_of_data(0, 3, generation=1, now_s=0.0)
    giver.on_end_of_data(0, 9, generation=0, now_s=0.0)
    state, _ = giver.hand_over(0, now_s=0.0)
    assert state.ended == [[0, 0, 9], [1, 0, 3]]
    assert short(taker.take_over(THERE, through_json(state), now_s=0.0)) == [
        ("close", 0, 1, 2.0, 1),
        ("tell", 0, 1, ((0, 1),)),
        ("tell", 0, 1, ((0, 2),)),
    ]
    assert short(taker.on_push(push(0, 1), "again", now_s=0.0)) == [("no", "again", "old grouping: generation 0")]
    lines = short(taker.on_push(push(0, 3, groups=1, generation=1, since=3), "a3", now_s=0.0))
    assert [line[0] for line in lines] == ["add", "close", "tell"]


def test_ends_of_data_come_along_and_the_later_one_counts() -> None:
    giver, taker = server(SHARD), server(OTHER)
    for protocol, shard in ((giver, 0), (taker, 1)):
        protocol.on_push(push(0, 1, key=shard), "a1", now_s=0.0)
    giver.on_push(push(1, 1), "b1", now_s=0.0)
    taker.on_push(push(1, 1, key=1), "b1", now_s=0.0)
    giver.on_end_of_data(1, 1, generation=0, now_s=0.0)
    state, _ = giver.hand_over(0, now_s=0.0)
    taker.on_push(push(0, 2, key=1), "a2", now_s=0.0)
    assert taker.version(1) == 1, "group 1 is waited for"
    assert short(taker.take_over(THERE, through_json(state), now_s=0.0)) == [
        ("tell", 0, 1, ((0, 1), (1, 1))),
        ("close", 1, 2, 2.0, 1),
        ("tell", 1, 2, ((0, 2), (1, 1))),
    ]
    # what the group said before it ended comes last
    assert taker.on_end_of_data(1, 0, generation=0, now_s=0.0) == []
    assert ("close", 0, 2, 2.0, 1) in short(taker.on_push(push(0, 2), "a2", now_s=0.0))


def test_groups_of_an_older_grouping_missed_nothing() -> None:
    giver = server(SHARD, OTHER)
    giver.on_push(push(1, 1), "b1", now_s=0.0)
    giver.on_push(push(0, 2, key=1, groups=1, generation=1, since=2), "a2", now_s=0.0)
    state, _ = giver.hand_over(0, now_s=5.0)
    assert (state.settled, state.missed, state.missed_age_s) == ([[0, 1]], [], 0.0)


def test_a_shard_that_is_here_is_not_taken_again() -> None:
    giver, taker = server(SHARD), server(SHARD)
    state, _ = giver.hand_over(0, now_s=0.0)
    with pytest.raises(ProtocolError, match=r"cannot take over shard 0: .* have \[0\]"):
        taker.take_over(THERE, state, now_s=0.0)


def test_servers_that_count_other_groups_do_not_take_over() -> None:
    giver, taker = server(SHARD), server(OTHER)
    giver.on_push(push(0, 1), "a", now_s=0.0)
    taker.on_push(push(0, 1, key=1, groups=3), "a", now_s=0.0)
    state, _ = giver.hand_over(0, now_s=0.0)
    with pytest.raises(ProtocolError, match="2 groups of generation 0, have .* 3 groups of generation 0"):
        taker.take_over(THERE, state, now_s=0.0)
    assert not taker.holds(0)


def test_a_taker_without_pushes_learns_the_number_of_groups() -> None:
    giver, taker = server(SHARD), server(OTHER)
    giver.on_push(push(0, 1, groups=3), "a", now_s=0.0)
    state, _ = giver.hand_over(0, now_s=0.0)
    taker.take_over(THERE, state, now_s=0.0)
    assert short(taker.on_push(push(0, 1, key=1), "x", now_s=0.0)) == [("no", "x", "old grouping: generation 0")]


FINE = KeyState(
    version=3,
    generation=1,
    num_groups=2,
    since_clock=4,
    settled=[[0, 5], [1, 4]],
    window=[[1, 5]],
    weight=2.0,
    decayed=1.0,
    share_frac=0.5,
    window_age_s=0.5,
    missed=[0],
    missed_age_s=1.0,
    offsets_s=[0.25],
    ended=[[1, 0, 5]],
)
WRONG: list[tuple[str, Any]] = [
    ("version", -2),
    ("generation", -1),
    ("num_groups", -1),
    ("since_clock", 0),
    ("settled", [[0, 5, 6]]),
    ("settled", [[2, 5]]),
    ("settled", [[0, 5], [0, 6]]),
    ("window", [[1, -1]]),
    ("window", [[-1, 1]]),
    ("weight", -1.0),
    ("weight", float("nan")),
    ("decayed", float("inf")),
    ("share_frac", -0.5),
    ("window_age_s", -0.1),
    ("missed", [2]),
    ("missed_age_s", -1.0),
    ("offsets_s", [0.1, -0.1]),
    ("ended", [[1, 0]]),
    ("ended", [[1, 0, -1]]),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_state_out_of_range_is_refused(field: str, value: Any) -> None:
    fields = {**dataclasses.asdict(through_json(FINE)), field: value}
    with pytest.raises(ProtocolError, match="cannot take over a shard: its state has"):
        read_fields(KeyState, fields)


SHAPELESS: list[tuple[object, str]] = [
    ([], "got list, need an object of version"),
    ({"version": 1}, r"missing or unknown"),
    ({**dataclasses.asdict(FINE), "more": 1}, r"\['more'\] missing or unknown"),
    ({**dataclasses.asdict(FINE), "version": 1.0}, "field version is 1.0"),
    ({**dataclasses.asdict(FINE), "settled": [[0, 1.5]]}, "field settled is"),
    ({**dataclasses.asdict(FINE), "offsets_s": ["a"]}, "field offsets_s is"),
]


@pytest.mark.parametrize(("fields", "message"), SHAPELESS)
def test_a_state_of_another_form_is_refused(fields: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_fields(KeyState, fields)
