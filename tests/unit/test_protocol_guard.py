"""Windows under load and at guard levels, as scripts; and the guard rail's ear on requests and loads."""

from __future__ import annotations

import dataclasses
import math

import pytest

from hpcps.config import GuardConfig, RunConfig, StalenessConfig, WindowConfig
from hpcps.plan import Shard
from hpcps.protocol.actions import Accumulate, Action, Close, Refuse
from hpcps.protocol.arrivals import GroupCounts, Paces
from hpcps.protocol.control import OrderRequest, ServerLoad
from hpcps.protocol.guard import LOOK_STEPS, Guard, is_together, ssp_bound
from hpcps.protocol.messages import Kind, PushHeader
from hpcps.protocol.server import ServerProtocol

FIXED = WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=1.0)
WORKERS = (1, 2, 3, 4)


def push(group: int, clock: int, *, base: int = 0, groups: int = 4, generation: int = 0, since: int = 1) -> PushHeader:
    return PushHeader(
        kind=Kind.GRADIENT if clock else Kind.INIT,
        key=0,
        route_epoch=0,
        generation=generation,
        group=group,
        num_groups=groups,
        sender=group + 1,
        clock=clock,
        since_clock=since,
        base_version=base,
        weight=1.0 if clock else 0.0,
        share_frac=1.0 / groups,
        numel=4,
        meta_bytes=0,
        payload_bytes=16,
    )


class Server:
    """A state machine with one shard; a script tells it of pushes by group and clock."""

    def __init__(self, window: WindowConfig = FIXED, staleness: StalenessConfig | None = None) -> None:
        shard = Shard(key=0, server=0, dtype="float32", begin=0, numel=4, pieces=())
        self.protocol = ServerProtocol(
            [shard], window=window, staleness=staleness or StalenessConfig(), num_workers=8, adaptive=False
        )
        self.protocol.on_push(push(0, 0), "first", now_s=0.0)

    def push(self, group: int, clock: int, at_s: float, *, base: int | None = None, queued: int = 0) -> list[Action]:
        """A push that was computed on the newest version, unless told otherwise."""
        self.protocol.num_queued = queued
        version = self.protocol.version(0) if base is None else base
        return self.protocol.on_push(push(group, clock, base=version), f"{group}.{clock}", now_s=at_s)


def closed(actions: list[Action]) -> list[int]:
    """Pushes in each window that was closed."""
    return [action.num_pushes for action in actions if isinstance(action, Close)]


def let_in(actions: list[Action]) -> list[str]:
    return [action.token for action in actions if isinstance(action, Accumulate)]


# --- windows under load ---------------------------------------------------------------------------------


def test_what_is_queued_is_looked_at_before_the_deadline_strikes() -> None:
    """A server that was held up finds four frames; the clock is past the deadline all the time."""
    server = Server()
    server.push(0, 1, 5.0)
    assert closed(server.push(1, 1, 9.0, queued=2)) == [], "two of four are a quorum, but there are more"
    assert server.protocol.next_deadline_s == 9.0
    assert closed(server.protocol.on_end_of_data(3, 0, generation=0, now_s=9.0)) == [], "some are still queued"
    assert closed(server.push(2, 1, 9.0, queued=1)) == [3], "all live groups are in"


def test_what_was_queued_may_be_of_another_shard() -> None:
    server = Server()
    server.push(0, 1, 5.0)
    server.push(1, 1, 9.0, queued=1)
    server.protocol.num_queued = 0
    assert server.protocol.next_deadline_s == 9.0
    assert closed(server.protocol.on_timer(now_s=9.0)) == [2]


def test_a_group_that_comes_round_again_waits_for_what_is_queued() -> None:
    server = Server()
    server.push(0, 1, 5.0)
    server.push(1, 1, 5.1)
    assert closed(server.push(0, 2, 5.2, queued=2)) == []
    assert closed(server.push(2, 1, 5.2, queued=1)) == []
    actions = server.push(3, 1, 5.2)
    assert closed(actions) == [4]
    assert let_in(actions) == ["3.1", "0.2"]


def test_the_deadline_is_no_longer_than_a_step() -> None:
    """Three groups come 2 s after the first, which is 2.3 s by their median and jitter; steps take 2.1 s."""
    server = Server(WindowConfig(quorum_frac=0.5, deadline="mad", fixed_s=5.0, mad_k=3.0))
    for clock in range(1, 11):
        server.push(0, clock, 2.1 * clock)
        for group in range(1, 4):
            server.push(group, clock, 2.1 * clock + 2.0)
    server.push(0, 11, 30.0)
    assert server.protocol.next_deadline_s == pytest.approx(32.1)


def test_pushes_that_waited_for_their_turn_tell_of_no_arrival() -> None:
    server = Server()
    server.push(0, 1, 5.0)
    server.push(0, 2, 5.1)
    actions = server.push(1, 1, 5.5)
    assert [(action.token, action.offset_s) for action in actions if isinstance(action, Accumulate)] == [
        ("1.1", 0.5),
        ("0.2", 0.0),
    ]


# --- levels ---------------------------------------------------------------------------------------------


def test_at_level_1_windows_wait_a_slow_step_long() -> None:
    server = Server()
    for clock in range(1, 4):
        for group in range(4):
            server.push(group, clock, 2.0 * clock + 0.1 * group)
    assert server.protocol.set_guard(1, now_s=8.0) == []
    server.push(0, 4, 8.0)
    server.push(1, 4, 8.1)
    assert closed(server.push(0, 5, 8.2)) == [], "not for a group that comes round again"
    assert server.protocol.next_deadline_s == pytest.approx(8.0 + 1.5 * 2.0)
    assert closed(server.protocol.on_timer(now_s=11.0)) == [2]


def test_at_level_2_windows_wait_for_all() -> None:
    server = Server()
    assert server.protocol.set_guard(2, now_s=0.0) == []
    for group in range(3):
        server.push(group, 1, 5.0)
    assert server.protocol.next_deadline_s is None
    assert closed(server.protocol.on_timer(now_s=1e6)) == []
    assert closed(server.push(3, 1, 1e6)) == [4]


def test_at_level_2_a_group_that_has_ended_is_not_waited_for() -> None:
    server = Server()
    server.protocol.set_guard(2, now_s=0.0)
    for group in range(3):
        server.push(group, 1, 5.0)
    assert closed(server.protocol.on_end_of_data(3, 0, generation=0, now_s=6.0)) == [3]


def test_groups_that_wait_for_each_other_go_on_after_a_while() -> None:
    """Group 0 waits here for group 1, which perhaps waits in the window of another shard."""
    server = Server()
    server.protocol.set_guard(2, now_s=0.0)
    server.push(0, 1, 5.0)
    server.push(0, 2, 5.1)
    assert server.protocol.next_deadline_s == 10.0
    assert closed(server.protocol.on_timer(now_s=9.9)) == []
    assert closed(server.protocol.on_timer(now_s=10.0)) == [1]
    assert server.protocol.next_deadline_s is None, "nobody waits any more"


def test_back_at_level_0_what_is_due_closes() -> None:
    server = Server()
    server.protocol.set_guard(3, now_s=0.0)
    server.push(0, 1, 5.0)
    assert closed(server.protocol.set_guard(0, now_s=5.5)) == []
    assert server.protocol.next_deadline_s == 6.0
    server.protocol.set_guard(3, now_s=5.5)
    server.push(1, 1, 5.6)
    assert closed(server.protocol.set_guard(0, now_s=7.0)) == [2]


# --- counts ---------------------------------------------------------------------------------------------


def test_counts_tell_what_became_of_each_groups_pushes() -> None:
    """Group 1 is five times slower than group 0 and computes on what it had, with a cap of 2 versions."""
    server = Server(staleness=StalenessConfig(cap=2))
    dropped = []
    for clock in range(1, 13):
        server.push(0, clock, 2.0 * clock)
        server.push(2, clock, 2.0 * clock)
        server.protocol.on_timer(now_s=2.0 * clock + 1.0)
        if clock == 2:
            server.push(1, 1, 2.0 * clock + 1.1, base=1)
        elif clock % 3 == 0:
            actions = server.push(1, clock // 3 + 1, 2.0 * clock + 1.1, base=clock - 3)
            dropped += [action.dropped_in_a_row for action in actions if isinstance(action, Refuse)]
    assert dropped == [1, 2, 3, 4]
    assert server.protocol.counts == {
        (0, 0): GroupCounts(used=12),
        (0, 1): GroupCounts(decayed=1, dropped=4, late=1, dropped_in_a_row=4),
        (0, 2): GroupCounts(used=12),
    }
    server.push(1, 6, 99.0)
    assert server.protocol.counts[0, 1] == GroupCounts(used=1, decayed=1, dropped=4, late=2)


def test_other_groups_have_other_paces_and_counts() -> None:
    server = Server()
    for clock in range(1, 4):
        for group in range(4):
            server.push(group, clock, 9.0 * clock)
    server.protocol.set_guard(1, now_s=30.0)
    header = push(0, 4, base=3, groups=2, generation=1, since=4)
    server.protocol.on_push(header, "new", now_s=30.0)
    assert server.protocol.next_deadline_s == 31.0, "nothing is known of the new groups' steps"
    assert set(server.protocol.counts) == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)}


def test_the_pace_of_groups() -> None:
    paces = Paces()
    assert paces.of([0, 1]) == (0.0, 0.0)
    for clock in range(4):
        paces.came(0, now_s=float(clock))
        paces.came(1, now_s=3.0 * clock)
    paces.came(2, now_s=5.0)
    assert paces.of([0]) == (1.0, 1.0)
    assert paces.of([0, 1, 2, 3]) == (2.0, 3.0)
    for clock in range(4, 13):
        paces.came(1, now_s=9.0 + 0.5 * (clock - 3))
    assert paces.of([0, 1]) == (0.75, 1.0), "the last nine steps count"


# --- the guard rail of a job ----------------------------------------------------------------------------


def request(rank: int, *, loss: float | None = None, weight: float = 4.0, samples: int = 4) -> OrderRequest:
    return OrderRequest(
        rank=rank,
        loader=0,
        epoch=0,
        index=0,
        num_epochs=1,
        timed=[],
        logged=["accuracy"] if loss is None else ["accuracy", "loss"],
        sums=[0.5] if loss is None else [0.5, loss * weight],
        weights=[weight] if loss is None else [weight, weight],
        staleness=0,
        num_samples=samples,
    )


def load(server: int, *, agreement: float, pushes: int = 10, late: int = 0, staleness: float = 0.0) -> ServerLoad:
    return ServerLoad(
        server=server,
        version=1,
        seconds=1.0,
        busy_s=0.0,
        cpu_s=0.0,
        raw_bytes=0,
        keys=[],
        pushes=[],
        queue=0,
        memory_bytes=0,
        num_pushes=pushes,
        num_late=late,
        offset_s=0.0,
        staleness=staleness,
        agreement=agreement,
    )


class Job:
    """A guard, and what it reported."""

    def __init__(self, **config: object) -> None:
        self.events: list[dict[str, object]] = []
        self.hints: list[dict[str, object]] = []
        run = RunConfig(sync_mode="async", **config)  # type: ignore[arg-type]
        self.guard = Guard(run, WORKERS, report=self._report)

    def _report(self, event: str, fields: dict[str, object]) -> None:
        assert event in ("guard", "stale")
        (self.events if event == "guard" else self.hints).append(fields)

    def look(self, loss: float | None = None, *, num_groups: int = 4) -> list[int]:
        """All workers make the steps of one look; the levels that came of it."""
        levels = [
            self.guard.on_request(request(rank, loss=loss), num_groups=num_groups)
            for _ in range(LOOK_STEPS)
            for rank in WORKERS
        ]
        return [level for level in levels if level is not None]


def test_a_loss_that_explodes_is_told_with_its_numbers() -> None:
    job = Job()
    for _ in range(10):
        assert job.look(2.0) == []
    job.guard.on_load(load(0, agreement=0.4, pushes=30, late=3, staleness=3.0))
    job.guard.on_load(load(1, agreement=0.2, pushes=10, late=7, staleness=1.0))
    assert job.look(20.0) == []
    assert job.look(200.0) == [3]
    assert job.guard.level == 3
    fields = job.events[0]
    # a look ends with the middle worker's step: one step of the last worker, at a loss of 20, counts in the next one
    assert str(fields.pop("reason")).startswith("loss 195.5 of the last look, best 2; staleness 0.0, late 0%")
    assert fields == {
        "step": 120,
        "level": 3,
        "before": 0,
        "loss": 2.0,
        "best": 2.0,
        "agreement": None,
        "staleness": 0.0,
        "late_frac": 0.0,
    }


def test_losses_are_weighed_by_samples_and_found_by_name() -> None:
    """Workers with few samples and a wild loss change little; other names do not count."""
    job = Job(guard=GuardConfig(loss_name="loss"))
    for _ in range(12):
        for _ in range(LOOK_STEPS):
            for rank in WORKERS:
                wild = rank == 1
                made = request(rank, loss=50.0 if wild else 1.0, weight=0.001 if wild else 4.0)
                assert job.guard.on_request(made, num_groups=4) is None
    assert job.look(1.1) == []
    other = Job(guard=GuardConfig(loss_name="nll"))
    assert [level for loss in (1.0, 1.0, 1e3, 1e6, 1e9) for level in other.look(loss)] == []


def test_agreement_is_the_mean_of_the_servers_that_compared_something() -> None:
    job = Job()
    levels = []
    for _ in range(10):
        job.guard.on_load(load(0, agreement=-0.8, pushes=30, late=3, staleness=2.0))
        job.guard.on_load(load(1, agreement=-0.4, pushes=10, late=1))
        job.guard.on_load(load(2, agreement=1.0, pushes=0))
        levels += job.look()
    assert levels == [1, 2]
    assert job.events[0]["agreement"] == pytest.approx(-0.6)
    assert job.events[0]["staleness"] == pytest.approx(1.5)
    assert job.events[0]["late_frac"] == pytest.approx(0.1)
    assert job.events[0]["loss"] is None
    assert job.events[0]["best"] is None


def test_a_loss_that_is_not_finite_makes_an_event_that_can_be_read() -> None:
    job = Job()
    assert job.look(1.0) == []
    assert job.look(math.nan) == [3]
    assert job.events[0]["loss"] == 1.0
    assert job.events[0]["reason"] == "the loss is nan; staleness 0.0, late 0%"


def test_looks_follow_the_middle_worker() -> None:
    """One worker is far ahead, one has no samples at all: looks come when the second has made ten steps."""
    job = Job()
    for _ in range(100):
        assert job.guard.on_request(request(1, loss=math.nan), num_groups=4) is None
        assert job.guard.on_request(request(4, samples=0), num_groups=4) is None
    for _ in range(LOOK_STEPS - 1):
        for rank in (2, 3):
            assert job.guard.on_request(request(rank), num_groups=4) is None
    assert job.guard.on_request(request(2), num_groups=4) is None
    assert job.guard.on_request(request(3), num_groups=4) == 3


def test_very_stale_gradients_are_spoken_of_once() -> None:
    job = Job()
    for staleness in (11.9, 12.1, 13.0):
        job.guard.on_load(load(0, agreement=1.0, staleness=staleness))
        assert job.look(1.0) == []
    (hint,) = job.hints
    assert hint == {
        "step": 20,
        "staleness": 12.1,
        "groups": 4,
        "reason": (
            "gradients are 12.1 versions old; lower staleness.bound, set staleness.ssp, or use a smaller learning rate"
            " or momentum than in sync"
        ),
    }


@pytest.mark.parametrize(
    ("mode", "enabled", "num_groups"), [("sync", True, 1), ("async", False, 4), ("hybrid", True, 1)]
)
def test_one_group_needs_no_guard(mode: str, enabled: bool, num_groups: int) -> None:
    job = Job(guard=GuardConfig(enabled=enabled))
    job.guard = Guard(
        dataclasses.replace(RunConfig(sync_mode=mode), guard=GuardConfig(enabled=enabled)), WORKERS, report=job._report
    )
    for _ in range(4):
        assert job.look(math.inf, num_groups=num_groups) == []
    assert job.guard.level == 0


def test_what_a_level_asks_of_the_coordinator() -> None:
    assert [ssp_bound(0, level) for level in range(4)] == [0, 0, 2, 2]
    assert [ssp_bound(1, level) for level in range(4)] == [1, 1, 1, 1]
    assert [ssp_bound(8, level) for level in range(4)] == [8, 8, 2, 2]
    assert [is_together(level) for level in range(4)] == [False, False, False, True]
