"""Shards that move while pushes go on: each push is added once, whatever is late, twice, out of order or sent on.

Several state machines and a model of what is between them: workers that hear of moves late, parcels in order a pair of
servers, clocks that differ, groupings that begin on one server before another.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import StalenessConfig, WindowConfig
from hpcps.plan import Shard
from hpcps.protocol.actions import Accumulate, Action, Close, Load, Notify, Refuse
from hpcps.protocol.fields import read_fields
from hpcps.protocol.key_state import KeyState
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.server import ServerProtocol

Name = tuple[int, int, int, int]
"""Generation, key, group and clock of a push."""


@dataclass
class Account:
    """What the servers' actions did to each shard, wherever it was."""

    version: list[int]
    added: dict[Name, float] = field(default_factory=dict)
    refused: list[tuple[PushHeader, str]] = field(default_factory=list)
    open: dict[int, list[float]] = field(default_factory=dict)
    settled: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By (generation, key, group), as the notices said."""

    def take(self, actions: list[Action], generation: int) -> None:
        for action in actions:
            if isinstance(action, Load):
                assert self.version[action.key] == -1
                self.version[action.key] = 0
            elif isinstance(action, Accumulate):
                name = name_of(action.token)
                assert name not in self.added, "a push was added twice"
                self.added[name] = action.token.weight
                self.open.setdefault(action.key, []).append(action.token.weight)
            elif isinstance(action, Close):
                assert action.version == self.version[action.key] + 1, "a version was left out or given twice"
                self.version[action.key] += 1
                weights = self.open.pop(action.key)
                assert (action.num_pushes, action.total_weight) == (len(weights), sum(weights))
            elif isinstance(action, Notify):
                assert action.version == self.version[action.key]
                for group, clock in action.clocks:
                    before = self.settled.get((generation, action.key, group), 0)
                    assert clock >= before, "a settled push came undone"
                    self.settled[generation, action.key, group] = clock
            else:
                assert isinstance(action, Refuse)
                self.refused.append((action.token, action.reason))


def name_of(header: PushHeader) -> Name:
    return header.generation, header.key, header.group, header.clock


@dataclass(frozen=True)
class Traffic:
    """What happens, besides chance."""

    seed: int
    num_servers: int
    num_keys: int
    phases: tuple[tuple[int, int], ...]
    """Groups and steps of each generation."""
    num_moves: int
    window: WindowConfig
    staleness: StalenessConfig


class World:
    """Servers, workers and a coordinator that moves shards at random."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.rng = random.Random(traffic.seed)
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.account = Account(version=[-1] * traffic.num_keys)
        self.shards = [
            Shard(key=key, server=key % traffic.num_servers, dtype="float32", begin=4 * key, numel=4, pieces=())
            for key in range(traffic.num_keys)
        ]
        self.servers = [
            ServerProtocol(
                [shard for shard in self.shards if shard.server == server],
                window=traffic.window,
                staleness=traffic.staleness,
                num_workers=8,
                adaptive=False,
            )
            for server in range(traffic.num_servers)
        ]
        self.ahead_s = [self.rng.choice([0.0, 1000.0, -3.5]) for _ in self.servers]
        self.targets: list[dict[int, int]] = [{} for _ in self.servers]
        self.last_parcel_s: dict[tuple[int, int], float] = {}
        self.routes = [[(shard.server, shard.epoch) for shard in self.shards] for _ in range(8)]
        """What each group's workers know: server and epoch of each key."""
        self.moving: set[int] = set()
        self.epoch = 0
        self.sent: dict[Name, float] = {}
        self.num_repeats = 0
        self.num_late_generation = 0

    # --- the world's clock -----------------------------------------------------------------------

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time_s, next(self.numbers), action))

    def run(self) -> None:
        """Until nothing is to come; windows close when they are due."""
        while True:
            due = [
                (deadline_s - self.ahead_s[index], index)
                for index, server in enumerate(self.servers)
                if (deadline_s := server.next_deadline_s) is not None
            ]
            if due and (not self.queue or min(due)[0] <= self.queue[0][0]):
                due_s, index = min(due)
                self.now_s = max(self.now_s, due_s + 1e-9)
                self.do(index, self.servers[index].on_timer(now_s=self.clock(index)))
            elif self.queue:
                time_s, _, action = heapq.heappop(self.queue)
                self.now_s = max(self.now_s, time_s)
                action()
            else:
                return

    def clock(self, server: int) -> float:
        return self.now_s + self.ahead_s[server]

    def do(self, server: int, actions: list[Action]) -> None:
        self.account.take(actions, self.servers[server].generation)

    # --- frames ----------------------------------------------------------------------------------

    def arrive(self, index: int, header: PushHeader) -> None:
        """A frame at a server: taken, or sent on."""
        server = self.servers[index]
        if server.holds(header.key):
            self.do(index, server.on_push(header, header, now_s=self.clock(index)))
        else:
            self.parcel(index, self.targets[index][header.key], lambda target: self.arrive(target, header))

    def parcel(self, source: int, target: int, action: Callable[[int], None]) -> None:
        arrival_s = max(self.now_s + self.rng.random(), self.last_parcel_s.get((source, target), 0.0))
        self.last_parcel_s[source, target] = arrival_s
        self.at(arrival_s, lambda: action(target))

    def push(self, generation: int, group: int, clock: int, *, since: int, num_groups: int) -> None:
        """A group's workers push all shards to where they think they are."""
        weight = float(self.rng.randint(0, 4))
        for key in range(self.traffic.num_keys):
            server, epoch = self.routes[group][key]
            header = PushHeader(
                kind=Kind.GRADIENT,
                key=key,
                route_epoch=epoch,
                generation=generation,
                group=group,
                num_groups=num_groups,
                sender=group + 1,
                clock=clock,
                since_clock=since,
                base_version=0,
                weight=weight,
                share_frac=1.0 / num_groups,
                numel=4,
                meta_bytes=0,
                payload_bytes=16,
            )
            self.sent[name_of(header)] = weight
            self.at(self.now_s + 3 * self.rng.random(), lambda s=server, h=header: self.arrive(s, h))  # type: ignore[misc]
            if self.rng.random() < 0.2:
                self.num_repeats += 1
                again_s = self.now_s + 20 * self.rng.random() ** 3
                self.at(again_s, lambda s=server, h=header: self.arrive(s, h))  # type: ignore[misc]

    def phase(self, generation: int, since: int) -> None:
        """All that the groups of one generation send; the last word of each is its end."""
        num_groups, num_steps = self.traffic.phases[generation]
        for group in range(num_groups):
            at_s = self.now_s
            for clock in range(since, since + num_steps):
                at_s += self.rng.random()
                self.at(
                    at_s,
                    lambda g=group, c=clock: self.push(generation, g, c, since=since, num_groups=num_groups),  # type: ignore[misc]
                )
            end = (group, since + num_steps - 1)
            for index in range(len(self.servers)):
                end_s = at_s + 3 * self.rng.random()
                self.at(end_s, lambda i=index, e=end: self.end(i, *e, generation=generation))  # type: ignore[misc]
        self.at(self.now_s, lambda: self.wait_settled(generation, since + num_steps))

    def end(self, index: int, group: int, clock: int, *, generation: int) -> None:
        server = self.servers[index]
        self.do(index, server.on_end_of_data(group, clock, generation=generation, now_s=self.clock(index)))

    def wait_settled(self, generation: int, next_clock: int) -> None:
        """Workers regroup when all that they sent is settled; late copies may still be under way."""
        num_groups = self.traffic.phases[generation][0]
        names = itertools.product([generation], range(self.traffic.num_keys), range(num_groups))
        if not all(self.account.settled.get(name, 0) >= next_clock - 1 for name in names):
            if self.queue:
                self.at(self.now_s + 0.5, lambda: self.wait_settled(generation, next_clock))
        elif generation + 1 < len(self.traffic.phases):
            self.phase(generation + 1, next_clock)

    # --- moves -----------------------------------------------------------------------------------

    def move(self) -> None:
        """The coordinator moves a shard; what it decided is at the giver a little later."""
        ready = sorted(set(range(self.traffic.num_keys)) - self.moving)
        if not ready:
            return
        key = self.rng.choice(ready)
        source = next(index for index, server in enumerate(self.servers) if server.holds(key))
        target = self.rng.choice([index for index in range(len(self.servers)) if index != source])
        self.epoch += 1
        self.moving.add(key)
        self.at(self.now_s + self.rng.random(), lambda e=self.epoch: self.give(key, source, target, e))  # type: ignore[misc]

    def give(self, key: int, source: int, target: int, epoch: int) -> None:
        giver = self.servers[source]
        state, waiting = giver.hand_over(key, now_s=self.clock(source))
        assert not giver.holds(key)
        text = json.dumps(dataclasses.asdict(state))
        self.targets[source][key] = target
        self.parcel(source, target, lambda index: self.take(key, index, epoch, text))
        for header in waiting:
            self.parcel(source, target, lambda index, h=header: self.arrive(index, h))  # type: ignore[misc]

    def take(self, key: int, index: int, epoch: int, text: str) -> None:
        state = read_fields(KeyState, json.loads(text))
        taker = self.servers[index]
        self.num_late_generation += state.generation != taker.generation
        shard = dataclasses.replace(self.shards[key], server=index, epoch=epoch)
        self.do(index, taker.take_over(shard, state, now_s=self.clock(index)))
        self.targets[index].pop(key, None)
        self.moving.discard(key)
        for route in self.routes:
            told_s = self.now_s + 3 * self.rng.random()
            self.at(told_s, lambda r=route: self.reroute(r, key, index, epoch))  # type: ignore[misc]

    def reroute(self, route: list[tuple[int, int]], key: int, server: int, epoch: int) -> None:
        if epoch > route[key][1]:
            route[key] = (server, epoch)


def play(traffic: Traffic) -> World:
    world = World(traffic)
    for shard in world.shards:
        header = PushHeader(
            kind=Kind.INIT,
            key=shard.key,
            route_epoch=0,
            generation=0,
            group=0,
            num_groups=1,
            sender=1,
            clock=0,
            base_version=0,
            weight=0.0,
            share_frac=0.0,
            numel=4,
            meta_bytes=0,
            payload_bytes=16,
        )
        world.at(world.rng.random(), lambda s=shard, h=header: world.arrive(s.server, h))  # type: ignore[misc]
    world.at(1.0, lambda: world.phase(0, 1))
    length_s = sum(steps for _, steps in traffic.phases) + 4.0
    for _ in range(traffic.num_moves):
        world.at(world.rng.random() * length_s, world.move)
    world.run()
    return world


def check(world: World) -> None:
    account = world.account
    dropped = {name_of(header): header.weight for header, reason in account.refused if "over the cap" in reason}
    assert not set(dropped) & set(account.added)
    assert {**account.added, **dropped} == world.sent, "a push was lost"
    assert not dropped or world.traffic.staleness.cap
    assert len(account.refused) == world.num_repeats + len(dropped), account.refused
    assert not any(account.open.values()), "a window stayed open"
    assert not world.moving
    assert all(server.next_deadline_s is None for server in world.servers)
    last = len(world.traffic.phases) - 1
    num_steps = sum(steps for _, steps in world.traffic.phases)
    for key in range(world.traffic.num_keys):
        [holder] = [server for server in world.servers if server.holds(key)]
        assert holder.version(key) == account.version[key]
        for group in range(world.traffic.phases[last][0]):
            assert account.settled[last, key, group] == num_steps, "a worker would wait for ever"


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_servers=st.integers(2, 4),
    num_keys=st.integers(1, 3),
    phases=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=3),
    num_moves=st.integers(0, 12),
    quorum=st.sampled_from([0.2, 0.5, 1.0]),
    deadline=st.sampled_from(["mad", "fixed"]),
    decay=st.sampled_from(["none", "inverse"]),
    cap=st.sampled_from([0, 0, 2]),
)
def test_moves_lose_and_repeat_no_push(
    seed: int,
    num_servers: int,
    num_keys: int,
    phases: list[tuple[int, int]],
    num_moves: int,
    quorum: float,
    deadline: str,
    decay: str,
    cap: int,
) -> None:
    traffic = Traffic(
        seed=seed,
        num_servers=num_servers,
        num_keys=num_keys,
        phases=tuple(phases),
        num_moves=num_moves,
        window=WindowConfig(quorum_frac=quorum, deadline=deadline, fixed_s=0.7, min_history=3),
        staleness=StalenessConfig(decay=decay, cap=cap),
    )
    moved = play(traffic)
    check(moved)
    still = play(dataclasses.replace(traffic, num_moves=0))
    check(still)
    if not cap:
        assert set(moved.account.added) == set(still.account.added) == set(moved.sent)


def test_the_model_reaches_servers_of_different_generations() -> None:
    """Otherwise the property above says nothing about them."""
    found = 0
    for seed in range(20):
        traffic = Traffic(
            seed=seed,
            num_servers=3,
            num_keys=3,
            phases=((2, 3), (3, 3), (1, 3)),
            num_moves=12,
            window=WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=0.7),
            staleness=StalenessConfig(decay="none"),
        )
        world = play(traffic)
        check(world)
        found += world.num_late_generation
    assert found > 5
