"""The server's state machine as scripts: events on the left, the actions they must give on the right."""

from __future__ import annotations

import dataclasses

import pytest

from hpcps.config import StalenessConfig, WindowConfig
from hpcps.errors import ProtocolError
from hpcps.plan import Shard
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify, Refuse
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.server import ServerProtocol

WINDOW = WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=1.0)
NO_DECAY = StalenessConfig(decay="none")
HALF = StalenessConfig(decay="inverse")
"""A staleness of 1 counts a half."""


def server(
    window: WindowConfig = WINDOW, staleness: StalenessConfig = NO_DECAY, *, adaptive: bool = False, keys: int = 1
) -> ServerProtocol:
    """A server whose shards have their first values."""
    shards = [Shard(key=key, server=0, dtype="float32", begin=4 * key, numel=4, pieces=()) for key in range(keys)]
    protocol = ServerProtocol(shards, window=window, staleness=staleness, num_workers=8, adaptive=adaptive)
    for key in range(keys):
        assert not protocol.loaded
        assert protocol.version(key) == -1
        init = dataclasses.replace(push("-", 0, 0), kind=Kind.INIT, key=key, weight=0.0)
        assert protocol.on_push(init, f"init{key}", now_s=0.0) == [Load(key, f"init{key}"), Notify(key, 0, ())]
    assert protocol.loaded
    return protocol


def push(
    name: str,
    group: int,
    clock: int,
    *,
    base: int = 0,
    weight: float = 2.0,
    groups: int = 2,
    generation: int = 0,
    since: int = 1,
    share: float = 0.5,
    key: int = 0,
    route_epoch: int = 0,
    numel: int = 4,
) -> PushHeader:
    return PushHeader(
        kind=Kind.GRADIENT,
        key=key,
        route_epoch=route_epoch,
        generation=generation,
        group=group,
        num_groups=groups,
        sender=group + 1,
        clock=clock,
        since_clock=since,
        base_version=base,
        weight=weight,
        share_frac=share,
        numel=numel,
        meta_bytes=0,
        payload_bytes=16,
    )


def short(actions: list[Action]) -> list[tuple[object, ...]]:
    """Actions as tuples one can read: add token weight, close version total scale pushes, tell clocks, no token."""
    lines: list[tuple[object, ...]] = []
    for action in actions:
        if isinstance(action, Accumulate):
            lines.append(("add", action.token, action.weight))
        elif isinstance(action, Close):
            lines.append(("close", action.version, action.total_weight, action.lr_scale, action.num_pushes))
        elif isinstance(action, Notify):
            lines.append(("tell", action.version, action.clocks))
        elif isinstance(action, Refuse):
            lines.append(("no", action.token, action.reason))
    return lines


def test_a_window_closes_when_all_groups_are_in() -> None:
    protocol = server()
    assert short(protocol.on_push(push("a", 0, 1), "a", now_s=5.0)) == [("add", "a", 2.0)]
    assert protocol.next_deadline_s == 6.0
    assert short(protocol.on_push(push("b", 1, 1, weight=6.0), "b", now_s=5.5)) == [
        ("add", "b", 6.0),
        ("close", 1, 8.0, 1.0, 2),
        ("tell", 1, ((0, 1), (1, 1))),
    ]
    assert protocol.next_deadline_s is None
    assert protocol.version(0) == 1
    assert protocol.settled(0) == Notify(0, 1, ((0, 1), (1, 1)))


def test_one_group_of_all_closes_at_once() -> None:
    protocol = server()
    for clock in (1, 2, 3):
        actions = protocol.on_push(push("a", 0, clock, base=clock - 1, groups=1, share=1.0), "a", now_s=0.0)
        assert short(actions) == [("add", "a", 2.0), ("close", clock, 2.0, 1.0, 1), ("tell", clock, ((0, clock),))]


def test_the_deadline_closes_with_a_quorum_and_scales_by_the_share() -> None:
    protocol = server()
    protocol.on_push(push("a", 0, 1, groups=4, share=0.25), "a", now_s=5.0)
    assert protocol.on_timer(now_s=5.9) == []
    assert protocol.on_timer(now_s=6.0) == [], "one of four is no quorum"
    assert protocol.next_deadline_s is None
    # the deadline is over, so the group that makes the quorum closes the window
    assert short(protocol.on_push(push("b", 1, 1, groups=4, share=0.25), "b", now_s=7.0)) == [
        ("add", "b", 2.0),
        ("close", 1, 4.0, 0.5, 2),
        ("tell", 1, ((0, 1), (1, 1))),
    ]


def test_the_timer_closes_what_is_due() -> None:
    protocol = server(keys=2)
    protocol.on_push(push("a", 0, 1), "a", now_s=5.0)
    protocol.on_push(push("c", 0, 1, key=1), "c", now_s=5.5)
    assert protocol.next_deadline_s == 6.0
    assert short(protocol.on_timer(now_s=6.2)) == [("close", 1, 2.0, 0.5, 1), ("tell", 1, ((0, 1),))]
    assert protocol.next_deadline_s == 6.5
    assert [protocol.version(key) for key in (0, 1)] == [1, 0]


def test_a_group_that_laps_the_others_closes_with_a_quorum() -> None:
    protocol = server()
    protocol.on_push(push("a", 0, 1), "a1", now_s=5.0)
    assert short(protocol.on_push(push("a", 0, 2), "a2", now_s=5.1)) == [
        ("close", 1, 2.0, 0.5, 1),
        ("tell", 1, ((0, 1),)),
        ("add", "a2", 2.0),
    ]


def test_a_group_that_laps_is_held_without_a_quorum_and_holds_nobody_else() -> None:
    protocol = server()
    protocol.on_push(push("a", 0, 1, groups=4, share=0.25), "a1", now_s=5.0)
    assert protocol.on_push(push("a", 0, 2, groups=4, share=0.25), "a2", now_s=5.1) == []
    assert protocol.on_push(push("a", 0, 3, groups=4, share=0.25), "a3", now_s=5.2) == []
    # the second group makes the quorum: the window closes for the held ones, one version each
    assert short(protocol.on_push(push("b", 1, 1, groups=4, share=0.25), "b1", now_s=5.3)) == [
        ("add", "b1", 2.0),
        ("close", 1, 4.0, 0.5, 2),
        ("tell", 1, ((0, 1), (1, 1))),
        ("add", "a2", 2.0),
    ]
    assert short(protocol.on_push(push("b", 1, 2, groups=4, share=0.25), "b2", now_s=5.4)) == [
        ("add", "b2", 2.0),
        ("close", 2, 4.0, 0.5, 2),
        ("tell", 2, ((0, 2), (1, 2))),
        ("add", "a3", 2.0),
    ]


def late_push(staleness: StalenessConfig, *, adaptive: bool) -> list[tuple[object, ...]]:
    """Group 1 computed on version 0 and meets the window after version 1, together with group 0."""
    protocol = server(staleness=staleness, adaptive=adaptive)
    protocol.on_push(push("a", 0, 1), "a1", now_s=5.0)
    protocol.on_timer(now_s=6.0)
    actions = protocol.on_push(push("b", 1, 1, base=0, weight=4.0), "b1", now_s=6.5)
    return short([*actions, *protocol.on_push(push("a", 0, 2, base=1), "a2", now_s=6.6)])


# staleness, adaptive; weights of b1 and a2, then total weight and learning rate scale of the window
LATE = [
    (NO_DECAY, False, 4.0, 2.0, 6.0, 1.0),
    (HALF, False, 2.0, 2.0, 6.0, 1.0),
    (NO_DECAY, True, 4.0, 2.0, 6.0, 1.0),
    (HALF, True, 2.0, 2.0, 4.0, 4.0 / 6.0),
    (StalenessConfig(decay="inverse", cap=1, over_cap="drop"), False, 2.0, 2.0, 6.0, 1.0),
]


@pytest.mark.parametrize(("staleness", "adaptive", "late", "fresh", "total", "scale"), LATE)
def test_a_late_push_joins_the_next_window_with_its_decay(
    staleness: StalenessConfig, adaptive: bool, late: float, fresh: float, total: float, scale: float
) -> None:
    assert late_push(staleness, adaptive=adaptive) == [
        ("add", "b1", late),
        ("add", "a2", fresh),
        ("close", 2, total, pytest.approx(scale), 2),
        ("tell", 2, ((0, 2), (1, 1))),
    ]


def test_a_push_over_the_cap_is_dropped_and_settled() -> None:
    protocol = server(staleness=StalenessConfig(cap=1, over_cap="drop"))
    for clock in (1, 2):
        protocol.on_push(push("a", 0, clock, base=clock - 1), "a", now_s=2.0 * clock)
        protocol.on_timer(now_s=2.0 * clock + 1)
    assert short(protocol.on_push(push("b", 1, 1, base=0), "b1", now_s=9.0)) == [
        ("no", "b1", "staleness 2 is over the cap of 1"),
        ("tell", 2, ((0, 2), (1, 1))),
    ]
    # the group goes on
    assert short(protocol.on_push(push("b", 1, 2, base=2), "b2", now_s=9.5)) == [("add", "b2", 2.0)]


def test_staleness_for_the_metrics_is_that_of_the_admission() -> None:
    protocol = server(staleness=HALF)
    protocol.on_push(push("a", 0, 1), "a1", now_s=5.0)
    protocol.on_timer(now_s=6.0)
    actions = protocol.on_push(push("b", 1, 1), "b1", now_s=6.5)
    assert actions == [Accumulate(0, "b1", 1.0, 1, offset_s=1.5, late=True)]


def test_a_window_without_weight_still_counts_on() -> None:
    protocol = server(adaptive=True)
    protocol.on_push(push("a", 0, 1, weight=0.0), "a", now_s=0.0)
    assert short(protocol.on_push(push("b", 1, 1, weight=0.0), "b", now_s=0.0)) == [
        ("add", "b", 0.0),
        ("close", 1, 0.0, 1.0, 2),
        ("tell", 1, ((0, 1), (1, 1))),
    ]


def test_duplicates_are_refused_wherever_the_first_one_is() -> None:
    protocol = server()
    protocol.on_push(push("a", 0, 1, groups=4), "a1", now_s=0.0)
    protocol.on_push(push("a", 0, 2, groups=4), "a2", now_s=0.0)
    protocol.on_push(push("a", 0, 4, groups=4), "a4", now_s=0.0)
    for clock, where in ((1, "in the window"), (2, "held"), (4, "early")):
        actions = protocol.on_push(push("a", 0, clock, groups=4), "again", now_s=0.0)
        assert short(actions) == [("no", "again", f"duplicate: clock {clock}")], where
    init = dataclasses.replace(push("-", 0, 0), kind=Kind.INIT)
    assert short(protocol.on_push(init, "i", now_s=0.0)) == [("no", "i", "first values are in already")]


def test_a_push_that_overtakes_waits_for_the_one_before() -> None:
    protocol = server()
    assert protocol.on_push(push("a", 0, 3, groups=1, share=1.0), "a3", now_s=0.0) == []
    assert protocol.on_push(push("a", 0, 2, groups=1, share=1.0), "a2", now_s=0.0) == []
    assert short(protocol.on_push(push("a", 0, 1, groups=1, share=1.0), "a1", now_s=0.0)) == [
        ("add", "a1", 2.0),
        ("close", 1, 2.0, 1.0, 1),
        ("tell", 1, ((0, 1),)),
        ("add", "a2", 2.0),
        ("close", 2, 2.0, 1.0, 1),
        ("tell", 2, ((0, 2),)),
        ("add", "a3", 2.0),
        ("close", 3, 2.0, 1.0, 1),
        ("tell", 3, ((0, 3),)),
    ]


@pytest.mark.parametrize("order", ["after", "before", "between"])
def test_a_group_at_its_end_is_waited_for_no_longer(order: str) -> None:
    """Group 1 ends at clock 1; its end comes after its push, before it, or before group 0's second push."""
    protocol = server()
    if order == "before":
        assert protocol.on_end_of_data(1, 1, generation=0, now_s=0.0) == []
    protocol.on_push(push("a", 0, 1), "a1", now_s=0.0)
    assert protocol.version(0) == 0, "the end says that a push of group 1 is still to come"
    protocol.on_push(push("b", 1, 1), "b1", now_s=0.0)
    if order == "after":
        assert protocol.on_end_of_data(1, 1, generation=0, now_s=0.0) == []
    lines = short(protocol.on_push(push("a", 0, 2, base=1), "a2", now_s=0.1))
    if order == "between":
        assert lines == [("add", "a2", 2.0)]
        lines += short(protocol.on_end_of_data(1, 1, generation=0, now_s=0.2))
    assert lines == [("add", "a2", 2.0), ("close", 2, 2.0, 0.5, 1), ("tell", 2, ((0, 2), (1, 1)))]


def test_a_group_that_starts_again_is_waited_for_again() -> None:
    protocol = server()
    for group in (0, 1):
        protocol.on_push(push("-", group, 1), "-", now_s=0.0)
        protocol.on_end_of_data(group, 1, generation=0, now_s=0.0)
    assert len(short(protocol.on_push(push("a", 0, 2, base=1), "a2", now_s=1.0))) == 3, "nobody else is live"
    assert len(short(protocol.on_push(push("b", 1, 2, base=1), "b2", now_s=1.0))) == 1, "group 0 is live again"
    assert short(protocol.on_push(push("a", 0, 3, base=2), "a3", now_s=1.0)) == [
        ("add", "a3", 2.0),
        ("close", 3, 4.0, 1.0, 2),
        ("tell", 3, ((0, 3), (1, 2))),
    ]


def test_a_new_grouping_closes_the_old_windows_and_counts_on() -> None:
    protocol = server()
    protocol.on_push(push("a", 0, 1), "a1", now_s=0.0)
    actions = protocol.on_push(push("b", 0, 2, generation=1, groups=3, since=2, base=1), "b", now_s=0.0)
    assert short(actions) == [("close", 1, 2.0, 0.5, 1), ("tell", 1, ((0, 1),)), ("add", "b", 2.0)]
    assert protocol.generation == 1
    assert protocol.settled(0) == Notify(0, 1, ((0, 1), (1, 1), (2, 1)))
    assert short(protocol.on_push(push("a", 1, 2), "old", now_s=0.0)) == [("no", "old", "old grouping: generation 0")]
    other = push("c", 1, 2, generation=1, groups=2, since=2)
    assert short(protocol.on_push(other, "other", now_s=0.0)) == [("no", "other", "old grouping: generation 1")]


def test_a_new_grouping_may_begin_with_a_push_that_overtook() -> None:
    protocol = server()
    first = push("a", 0, 1, generation=1, groups=1, share=1.0)
    second = push("a", 0, 2, generation=1, groups=1, share=1.0)
    assert protocol.on_push(second, "a2", now_s=0.0) == []
    assert [line[0] for line in short(protocol.on_push(first, "a1", now_s=0.0))] == ["add", "close", "tell"] * 2


def test_ends_of_data_of_other_groupings() -> None:
    protocol = server()
    assert protocol.on_end_of_data(1, 1, generation=1, now_s=0.0) == [], "kept until that grouping begins"
    assert len(short(protocol.on_push(push("a", 0, 2, generation=1, since=2), "a", now_s=0.0))) == 3
    assert protocol.on_end_of_data(0, 2, generation=0, now_s=0.0) == [], "old news"
    assert short(protocol.on_push(push("a", 0, 3, generation=1, since=2, base=1), "a", now_s=0.0))[-1][0] == "tell"


def test_a_regrouping_lets_held_pushes_in_first() -> None:
    protocol = server()
    for clock in (1, 2):
        protocol.on_push(push("a", 0, clock, groups=4, share=0.25), f"a{clock}", now_s=0.0)
    assert short(protocol.on_push(push("b", 0, 3, generation=1, groups=1, since=3, share=1.0), "b", now_s=0.0)) == [
        ("close", 1, 2.0, 0.25, 1),
        ("tell", 1, ((0, 1),)),
        ("add", "a2", 2.0),
        ("close", 2, 2.0, 0.25, 1),
        ("tell", 2, ((0, 2),)),
        ("add", "b", 2.0),
        ("close", 3, 2.0, 1.0, 1),
        ("tell", 3, ((0, 3),)),
    ]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (push("a", 0, 1, route_epoch=1), "wrong route: epoch 1, 4 elements, have epoch 0 and 4 elements"),
        (push("a", 0, 1, key=5), "wrong route: shard 5 is not here"),
        (push("a", 0, 1, numel=5), "wrong route: epoch 0, 5 elements, have epoch 0 and 4 elements"),
        (push("a", 0, 1, groups=9), "9 groups of 8 workers"),
    ],
)
def test_pushes_of_another_route_are_refused(header: PushHeader, reason: str) -> None:
    assert short(server().on_push(header, "t", now_s=0.0)) == [("no", "t", reason)]


def test_a_gradient_before_the_first_values_is_refused() -> None:
    shard = Shard(key=0, server=0, dtype="float32", begin=0, numel=4, pieces=())
    protocol = ServerProtocol([shard], window=WINDOW, staleness=NO_DECAY, num_workers=8, adaptive=False)
    assert short(protocol.on_push(push("a", 0, 1), "a", now_s=0.0)) == [("no", "a", "no first values yet")]


def test_a_push_on_a_version_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="got staleness -1"):
        server().on_push(push("a", 0, 1, base=1), "a", now_s=0.0)


def test_the_mad_deadline_learns_from_late_groups() -> None:
    """Ten windows in which group 1 comes 0.2 s after group 0: the deadline then lies a little later than that."""
    protocol = server(WindowConfig(quorum_frac=0.5, deadline="mad", fixed_s=5.0, mad_k=3.0, min_history=4))
    for clock in range(1, 11):
        protocol.on_push(push("a", 0, clock, base=clock - 1), "a", now_s=10.0 * clock)
        protocol.on_push(push("b", 1, clock, base=clock - 1), "b", now_s=10.0 * clock + 0.2)
    protocol.on_push(push("a", 0, 11, base=10), "a", now_s=200.0)
    assert protocol.next_deadline_s == pytest.approx(200.23)
    protocol.on_timer(now_s=200.23)
    # what missed the window is measured from that window's opening
    protocol.on_push(push("b", 1, 11, base=10), "b", now_s=200.9)
    assert protocol.version(0) == 11


def test_a_server_without_shards_is_idle() -> None:
    protocol = ServerProtocol([], window=WINDOW, staleness=NO_DECAY, num_workers=8, adaptive=False)
    assert protocol.loaded
    assert protocol.next_deadline_s is None
    assert protocol.on_timer(now_s=1.0) == []
