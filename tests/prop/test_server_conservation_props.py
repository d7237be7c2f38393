"""The server loses and repeats no push: random groups, weights, delays, duplicates, overtaking and ends of data.

So do guard levels that change at any moment, and frames that are found waiting.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import StalenessConfig, WindowConfig
from hpcps.plan import Shard
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify, Refuse
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.server import ServerProtocol


@dataclass(frozen=True)
class Push:
    """A push under way: when it arrives, and its header."""

    at: float
    header: PushHeader
    repeat: bool = False


@dataclass(frozen=True)
class End:
    at: float
    group: int
    clock: int
    generation: int


def header(key: int, group: int, clock: int, *, since: int, generation: int, groups: int, weight: float) -> PushHeader:
    return PushHeader(
        kind=Kind.INIT if clock == 0 else Kind.GRADIENT,
        key=key,
        route_epoch=0,
        generation=generation,
        group=group,
        num_groups=groups,
        sender=group + 1,
        clock=clock,
        since_clock=since,
        base_version=0,
        weight=weight,
        share_frac=1.0 / groups,
        numel=4,
        meta_bytes=0,
        payload_bytes=16,
    )


def traffic(seed: int, *, clocks_of: list[int], since: int, generation: int, keys: int) -> list[Push | End]:
    """All that the groups of one generation send, in order of arrival: late, twice, out of order."""
    rng = random.Random(seed)
    events: list[Push | End] = []
    for group, count in enumerate(clocks_of):
        sent = 0.0
        for clock in range(since, since + count):
            sent += rng.random()
            weight = float(rng.randint(0, 4))
            for key in range(keys):
                made = header(
                    key, group, clock, since=since, generation=generation, groups=len(clocks_of), weight=weight
                )
                events.append(Push(sent + 3 * rng.random(), made))
                if rng.random() < 0.2:
                    events.append(Push(sent + 6 * rng.random(), made, repeat=True))
        events.append(End(sent + 3 * rng.random(), group, since + count - 1, generation))
    return sorted(events, key=lambda event: event.at)


class Account:
    """What the actions did to each shard."""

    def __init__(self, keys: int) -> None:
        self.added: dict[tuple[int, int, int, int], float] = {}
        self.refused: list[tuple[PushHeader, str]] = []
        self.version = [-1] * keys
        self.open = [0.0] * keys
        self.num_open = [0] * keys

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Load):
                self.version[action.key] = 0
            elif isinstance(action, Accumulate):
                frame = action.token
                name = (frame.generation, frame.key, frame.group, frame.clock)
                assert name not in self.added, "a push was added twice"
                self.added[name] = frame.weight
                self.open[action.key] += frame.weight
                self.num_open[action.key] += 1
            elif isinstance(action, Close):
                assert action.version == self.version[action.key] + 1
                self.version[action.key] += 1
                assert action.num_pushes == self.num_open[action.key] >= 1
                assert action.total_weight == self.open[action.key]
                assert 0 < action.lr_scale <= 1
                self.open[action.key], self.num_open[action.key] = 0.0, 0
            elif isinstance(action, Notify):
                assert action.version == self.version[action.key]
            elif isinstance(action, Refuse):
                self.refused.append((action.token, action.reason))


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    clocks_of=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    second=st.lists(st.integers(0, 5), max_size=4),
    keys=st.integers(1, 3),
    quorum=st.sampled_from([0.2, 0.5, 1.0]),
    deadline=st.sampled_from(["mad", "fixed"]),
    decay=st.sampled_from(["none", "inverse"]),
    cap=st.sampled_from([0, 2]),
    levels=st.lists(st.integers(0, 3), max_size=4),
)
def test_every_push_is_added_once_or_refused_with_a_reason(
    seed: int,
    clocks_of: list[int],
    second: list[int],
    keys: int,
    quorum: float,
    deadline: str,
    decay: str,
    cap: int,
    levels: list[int],
) -> None:
    shards = [Shard(key=key, server=0, dtype="float32", begin=4 * key, numel=4, pieces=()) for key in range(keys)]
    protocol = ServerProtocol(
        shards,
        window=WindowConfig(quorum_frac=quorum, deadline=deadline, fixed_s=0.7, min_history=3),
        staleness=StalenessConfig(decay=decay, cap=cap),
        num_workers=64,
        adaptive=False,
    )
    account = Account(keys)
    for key in range(keys):
        first = header(key, 0, 0, since=1, generation=0, groups=1, weight=0.0)
        account.take(protocol.on_push(first, first, now_s=0.0))
    phases = [(clocks_of, 1, 0)]
    if second and len(set(clocks_of)) == 1 and any(second):
        phases.append((second, clocks_of[0] + 1, 1))
    sent: dict[tuple[int, int, int, int], float] = {}
    now_s, num_repeats = 0.0, 0
    rng = random.Random(seed)
    for counts, since, generation in phases:
        # the rules of workers: a new grouping begins when all pushes of the old one are settled
        for event in traffic(seed + generation, clocks_of=counts, since=since, generation=generation, keys=keys):
            now_s = max(now_s, 100.0 * generation + event.at)
            while protocol.next_deadline_s is not None and protocol.next_deadline_s <= now_s:
                account.take(protocol.on_timer(now_s=protocol.next_deadline_s))
            protocol.num_queued = rng.choice([0, 0, 2])
            if levels and rng.random() < 0.3:
                account.take(protocol.set_guard(rng.choice(levels), now_s=now_s))
            if isinstance(event, End):
                actions = protocol.on_end_of_data(event.group, event.clock, generation=event.generation, now_s=now_s)
            else:
                frame = event.header
                sent[frame.generation, frame.key, frame.group, frame.clock] = frame.weight
                num_repeats += event.repeat
                actions = protocol.on_push(frame, frame, now_s=now_s)
            account.take(actions)
            protocol.num_queued = 0
    while protocol.next_deadline_s is not None:
        account.take(protocol.on_timer(now_s=protocol.next_deadline_s))
    assert all(reason for _, reason in account.refused)
    dropped = {
        (frame.generation, frame.key, frame.group, frame.clock): frame.weight
        for frame, reason in account.refused
        if "over the cap" in reason
    }
    assert len(account.refused) == num_repeats + len(dropped)
    if not cap:
        assert not dropped
    assert not set(dropped) & set(account.added)
    assert {**account.added, **dropped} == sent
    assert account.num_open == [0] * keys, "a window stayed open"
    assert protocol.next_deadline_s is None
    for key in range(keys):
        assert protocol.version(key) == account.version[key]
        counts, since, _ = phases[-1]
        clocks = dict(protocol.settled(key).clocks)
        for group, count in enumerate(counts):
            if count:
                assert clocks[group] == since + count - 1, "a worker would wait for ever"
