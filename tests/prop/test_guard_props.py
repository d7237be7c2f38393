"""The guard rail over random runs: noise does not move it, divergence does; and no level of it lets groups hang."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import GuardConfig, StalenessConfig, WindowConfig
from hpcps.plan import Shard
from hpcps.policy import GuardFacts, GuardMemory, GuardRail
from hpcps.protocol.actions import Accumulate, Action, Notify
from hpcps.protocol.guard import ssp_bound
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.server import ServerProtocol

# --- loss and agreement -----------------------------------------------------------------------------------


def levels_of(losses: list[float], *, agreements: list[float] | None = None, hold_steps: int = 50) -> list[int]:
    """The level after each look, ten steps apart."""
    rail, memory, levels = GuardRail(GuardConfig(hold_steps=hold_steps)), GuardMemory(), []
    for look, loss in enumerate(losses):
        agreement = agreements[look] if agreements else None
        facts = GuardFacts(mode="async", num_groups=4, step=10 * (look + 1), loss=loss, agreement=agreement)
        decision = rail.decide(facts, memory)
        assert abs(decision.level - memory.level) <= 1 or decision.level == 3, "down by one, up by one or all the way"
        memory = decision.memory
        levels.append(memory.level)
    return levels


curves = st.sampled_from(["flat", "fall", "to zero", "below zero"])


def curve(kind: str, look: int) -> float:
    fall = math.exp(-look / 40)
    return {"flat": 2.0, "fall": 0.3 + 2 * fall, "to zero": 2 * fall, "below zero": 2 * fall - 1}[kind]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    kind=curves,
    noise=st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.2]),
    scale=st.floats(1e-3, 1e3),
)
def test_noise_moves_nothing(seed: int, kind: str, noise: float, scale: float) -> None:
    """Looks whose mean has a spread of up to a fifth, and agreement about what unrelated gradients have."""
    rng = random.Random(seed)
    losses = [scale * curve(kind, look) * (1 + noise * rng.gauss(0, 1)) for look in range(400)]
    agreements = [rng.gauss(0.1, 0.05) for _ in losses]
    assert set(levels_of(losses, agreements=agreements)) == {0}


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["flat", "fall"]),
    noise=st.sampled_from([0.0, 0.02, 0.05]),
    calm_looks=st.integers(12, 80),
    growth=st.floats(1.2, 100.0),
    scale=st.floats(1e-3, 1e3),
)
def test_a_divergence_is_caught_within_ten_looks(
    seed: int, kind: str, noise: float, calm_looks: int, growth: float, scale: float
) -> None:
    """From some look on the loss grows by a factor a look; it is at sync long before it overflows."""
    rng = random.Random(seed)
    losses = [
        scale * curve(kind, min(look, calm_looks)) * growth ** max(0, look - calm_looks) * (1 + noise * rng.gauss(0, 1))
        for look in range(calm_looks + 14)
    ]
    levels = levels_of(losses)
    assert set(levels[: calm_looks + 1]) == {0}
    assert levels[calm_looks + 10] > 0
    assert levels[-1] == 3


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    noise=st.sampled_from([0.0, 0.05]),
    bad=st.integers(2, 12),
    hold=st.sampled_from([20, 50]),
)
def test_a_cured_run_is_free_again_and_stays_so(seed: int, noise: float, bad: int, hold: int) -> None:
    """A loss that was ten times its best for some looks and then is what it was."""
    rng = random.Random(seed)
    good = [1 + noise * rng.gauss(0, 1) for _ in range(120)]
    losses = good[:30] + [10 * loss for loss in good[30 : 30 + bad]] + good[30 + bad :]
    levels = levels_of(losses, hold_steps=hold)
    assert max(levels) == 3
    assert levels[-1] == 0
    changes = [(a, b) for a, b in itertools.pairwise(levels) if a != b]
    assert len([change for change in changes if change[1] > change[0]]) <= 2, (
        "it slides once, perhaps by way of level 1"
    )
    held = [look for look, (a, b) in enumerate(itertools.pairwise(levels)) if b < a]
    assert all(b - a >= hold // 10 for a, b in itertools.pairwise(held)), "a level is held"


# --- groups that wait -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Group:
    """A group of workers: its clock, what is settled of it on each server, and whether it computes."""

    index: int
    num_steps: int
    step_s: float
    settled: list[int]
    used: list[int]
    clock: int = 0
    waits: bool = False
    ended: bool = False
    ahead: int = 0
    """Steps since the bound on steps began to count."""


@dataclass(slots=True)
class Run:
    """Groups and servers with one shard each, over a network that delays everything."""

    rng: random.Random
    groups: list[Group]
    servers: list[ServerProtocol]
    slack: int
    delay_s: float
    now_s: float = 0.0
    ssp: int = 0
    added: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), action))

    def sent(self, action: Callable[[], None]) -> None:
        self.after(self.delay_s * self.rng.random() ** 3, action)

    def run(self) -> None:
        for group in self.groups:
            self.after(group.step_s * self.rng.random(), lambda group=group: self.step(group))  # type: ignore[misc]
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def step(self, group: Group) -> None:
        """The group has a gradient: it pushes, and goes on when so much is settled."""
        group.clock += 1
        group.ahead += 1
        for key in range(len(self.servers)):
            self.push(key, header(group.index, group.clock, groups=len(self.groups), base=group.used[key]))
        group.waits = True
        self.go_on()

    def push(self, key: int, frame: PushHeader) -> None:
        self.sent(lambda: self.take(key, self.servers[key].on_push(frame, frame, now_s=self.now_s)))

    def go_on(self) -> None:
        """Let every group take its next step that may."""
        for group in self.groups:
            others = [each.ahead for each in self.groups if each is not group and not each.ended]
            held_back = self.ssp > 0 and others and group.ahead >= min(others) + self.ssp
            if not group.waits or min(group.settled) < group.clock - self.slack:
                continue
            if group.clock == group.num_steps:
                group.waits, group.ended = False, True
                for key, server in enumerate(self.servers):
                    self.sent(
                        lambda key=key, server=server, group=group: self.take(  # type: ignore[misc]
                            key, server.on_end_of_data(group.index, group.clock, generation=0, now_s=self.now_s)
                        )
                    )
                self.go_on()
            elif not held_back:
                group.waits = False
                pace_s = group.step_s * (0.8 + 0.4 * self.rng.random())
                self.after(pace_s, lambda group=group: self.step(group))  # type: ignore[misc]

    def take(self, key: int, actions: list[Action]) -> None:
        """Count what a server does, and send its notices."""
        for action in actions:
            if isinstance(action, Accumulate):
                name = (key, action.token.group, action.token.clock)
                self.added[name] = self.added.get(name, 0) + 1
            elif isinstance(action, Notify):
                self.sent(lambda action=action: self.hear(key, action))  # type: ignore[misc]
        deadline_s = self.servers[key].next_deadline_s
        if deadline_s is not None:
            self.after(max(0.0, deadline_s - self.now_s), lambda: self.look(key))

    def look(self, key: int) -> None:
        deadline_s = self.servers[key].next_deadline_s
        if deadline_s is not None and deadline_s <= self.now_s:
            self.take(key, self.servers[key].on_timer(now_s=self.now_s))

    def hear(self, key: int, notice: Notify) -> None:
        for group in self.groups:
            group.settled[key] = max(group.settled[key], dict(notice.clocks).get(group.index, 0))
            group.used[key] = max(group.used[key], notice.version)
        self.go_on()

    def slide(self, level: int) -> None:
        """What the coordinator does at a new level, but for the one group of level 3."""
        bound = ssp_bound(0, level)
        if bound and not self.ssp:
            for group in self.groups:
                group.ahead = 0
        self.ssp = bound
        for key, server in enumerate(self.servers):
            self.sent(lambda key=key, server=server: self.take(key, server.set_guard(level, now_s=self.now_s)))  # type: ignore[misc]
        self.go_on()


def header(group: int, clock: int, *, groups: int, base: int) -> PushHeader:
    return PushHeader(
        kind=Kind.GRADIENT if clock else Kind.INIT,
        key=0,
        route_epoch=0,
        generation=0,
        group=group,
        num_groups=groups,
        sender=group + 1,
        clock=clock,
        since_clock=1,
        base_version=base,
        weight=float(clock > 0),
        share_frac=1.0 / groups,
        numel=4,
        meta_bytes=0,
        payload_bytes=16,
    )


def server(num_groups: int, window: WindowConfig) -> ServerProtocol:
    shard = Shard(key=0, server=0, dtype="float32", begin=0, numel=4, pieces=())
    protocol = ServerProtocol(
        [shard], window=window, staleness=StalenessConfig(), num_workers=num_groups, adaptive=False
    )
    protocol.on_push(header(0, 0, groups=1, base=0), None, now_s=0.0)
    return protocol


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    keys=st.integers(1, 4),
    slack=st.integers(1, 3),
    quorum=st.sampled_from([0.2, 0.5, 0.7, 1.0]),
    deadline=st.sampled_from(["mad", "fixed"]),
    delay_s=st.sampled_from([0.0, 0.5, 5.0]),
    changes=st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 3)), max_size=6),
)
def test_all_groups_reach_their_end_whatever_the_level_and_its_changes(
    seed: int,
    steps: list[int],
    keys: int,
    slack: int,
    quorum: float,
    deadline: str,
    delay_s: float,
    changes: list[tuple[float, int]],
) -> None:
    """Groups of unlike speed and length, servers that hear of everything at different times."""
    rng = random.Random(seed)
    window = WindowConfig(quorum_frac=quorum, deadline=deadline, fixed_s=0.3, min_history=3)
    run = Run(
        rng,
        [
            Group(index, count, 10.0 ** rng.uniform(-1, 0.5), settled=[0] * keys, used=[0] * keys)
            for index, count in enumerate(steps)
        ],
        [server(len(steps), window) for _ in range(keys)],
        slack=slack,
        delay_s=delay_s,
    )
    for at_s, level in changes:
        run.after(at_s, lambda level=level: run.slide(level))  # type: ignore[misc]
    run.run()
    assert all(group.ended for group in run.groups), "a group waits for ever"
    sent = {
        (key, index, clock): 1 for key in range(keys) for index, num in enumerate(steps) for clock in range(1, num + 1)
    }
    assert run.added == sent


@pytest.mark.parametrize("seed", [47, 61, 65, 125, 145, 300])
def test_groups_that_wait_for_each_other_in_windows_of_different_shards_go_on(seed: int) -> None:
    """Without the rule that a window does not wait for ever where a group waits in line, these six hang."""
    rng = random.Random(seed)
    steps = [rng.randint(5, 40) for _ in range(rng.randint(3, 5))]
    keys = rng.randint(3, 5)
    window = WindowConfig(
        quorum_frac=rng.choice([0.5, 0.7, 0.9]), deadline=rng.choice(["mad", "fixed"]), fixed_s=0.3, min_history=3
    )
    slides = rng.random() < 0.5
    groups = [
        Group(index, count, 10.0 ** rng.uniform(-1, 0.5), settled=[0] * keys, used=[0] * keys)
        for index, count in enumerate(steps)
    ]
    servers = [server(len(steps), window) for _ in range(keys)]
    run = Run(rng, groups, servers, slack=1, delay_s=rng.choice([2.0, 5.0, 20.0]))
    for _ in range(rng.randint(1, 5) if slides else 0):
        level = rng.randint(0, 3)
        run.after(rng.uniform(0, 100), lambda level=level: run.slide(level))  # type: ignore[misc]
    run.run()
    assert all(group.ended for group in groups), "a group waits for ever"
    assert len(run.added) == keys * sum(steps)
