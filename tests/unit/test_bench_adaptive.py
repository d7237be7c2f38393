"""The bench of adaptation: how a trace is read and replayed, and the arithmetic of its figures. Runs no job."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH.parent / "lab")]

import classes  # noqa: E402
import quota  # noqa: E402
import relief  # noqa: E402
import replay  # noqa: E402
from runs import DATA  # noqa: E402

from hpcps.report.events import RunEvents, StepEvent  # noqa: E402
from hpcps.runtime.emulation import read_trace  # noqa: E402

HEAD = ",worker,gpu,time,batch_time_norm\n"
ROWS = [(0, 1, 100), (1, 11, 40), (0, 11, 80), (2, 21, 20), (0, 31, 60), (1, 41, 50), (2, 41, 30)]
TABLE = [[80, 40, 20], [60, 40, 20], [60, 50, 30]]  # gaps from the row before; the rows without worker 2 left out


def write_job(path: Path) -> Path:
    text = HEAD + "".join(f"{i},{worker}.0,5,{time}.0,{value}.0\n" for i, (worker, time, value) in enumerate(ROWS))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["job_3_norm.csv", "job_3_norm.csv.gz"])
def test_a_job_is_read_without_gaps(tmp_path: Path, name: str) -> None:
    path = write_job(tmp_path / name)
    assert replay.find_job(tmp_path, 3) == path
    assert replay.find_job(tmp_path, 4) is None
    assert replay.read_job(path).tolist() == TABLE


def test_a_job_becomes_a_trace_for_emulated_devices(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.txt"
    replay.write_trace(path, np.array(TABLE) / 1000, steps_per_row=10)
    trace = read_trace(path)
    assert trace.steps == (1, 11, 21)
    assert trace.unit_s == ((0.08, 0.04, 0.02), (0.06, 0.04, 0.02), (0.06, 0.05, 0.03))


def test_the_times_of_equal_and_of_best_shares() -> None:
    unit_s = np.array([[0.3, 0.1], [0.1, 0.1]])
    assert replay.equal_s(unit_s, global_batch=20, steps_per_row=2) == pytest.approx(2 * 10 * (0.3 + 0.1))
    best_s = 2 * 20 * (1 / (1 / 0.3 + 1 / 0.1) + 1 / 20)
    assert replay.best_s(unit_s, global_batch=20, steps_per_row=2) == pytest.approx(best_s)


def test_a_replay_follows_a_steady_trace() -> None:
    unit_s = np.array([[0.003, 0.001]] * 5)
    replayed = replay.replay(unit_s, replay.adapting(follow=True), global_batch=400)
    assert replayed.counts.sum() == 50 * 400
    assert set(replayed.counts.sum(axis=1)) == {400}
    assert replayed.counts[-1].tolist() == [100, 300]
    assert replayed.step_s[-1] == pytest.approx(0.3)
    assert replayed.total_s < replay.equal_s(unit_s, global_batch=400)
    assert "shares" in {name for _, name, _ in replayed.events}


def test_new_shares_hold_from_the_first_batch_that_nobody_has_drawn() -> None:
    """Two batches are asked for ahead; the first worker drew another before the last one told of the step just over."""
    unit_s = np.array([[0.003, 0.001]] * 60)
    replayed = replay.replay(unit_s, replay.adapting(follow=True), global_batch=400, steps_per_row=1)
    first = next(step for step, name, _ in replayed.events if name == "shares")
    settled = next(at for at, row in enumerate(replayed.counts.tolist(), start=1) if row == [100, 300])
    assert settled == first + 3


def test_shares_that_do_not_follow_stay() -> None:
    unit_s = np.array([[0.003, 0.001]] * 4 + [[0.001, 0.003]] * 3)
    static = replay.replay(unit_s, replay.adapting(follow=False), global_batch=400)
    assert static.counts[-1].tolist() == [100, 300]
    adaptive = replay.replay(unit_s, replay.adapting(follow=True), global_batch=400)
    assert adaptive.counts[-1].tolist() == [300, 100]


@pytest.mark.skipif(
    replay.find_job(DATA / "traces" / "alibaba_minibatch", 1) is None,
    reason=f"no public traces in {DATA}; HPCPS_DATA names the folder of data sets",
)
def test_the_public_trace_is_what_the_bench_takes_it_for() -> None:
    path = replay.find_job(DATA / "traces" / "alibaba_minibatch", 1)
    assert path is not None
    table = replay.read_job(path)
    assert table.shape == (300, 10)
    assert (table.min(), table.max()) == (380.0, 1000.0)


# --- figures ------------------------------------------------------------------------------------------


def step_of(rank: int, number: int, begin_s: float, end_s: float, num_samples: int) -> StepEvent:
    return StepEvent(
        t_s=end_s,
        rank=rank,
        step=number,
        epoch=0,
        num_samples=num_samples,
        compute_s=0.0,
        wait_s=0.0,
        step_s=end_s - begin_s,
        staleness=0.0,
        push_bytes=0,
        pull_bytes=0,
        raw_bytes=0,
    )


def test_what_a_grouping_costs_by_arithmetic() -> None:
    two = [classes.SPEEDS[:4], classes.SPEEDS[4:]]
    four = [classes.SPEEDS[at : at + 2] for at in range(0, 8, 2)]
    assert (classes.groups_rate(two), classes.groups_rate(four)) == (20.0, 30.0)
    assert classes.speeds_of((1, 4, 8)) == (8.0, 4.0, 1.0)


def test_a_rate_counts_the_part_of_a_step_that_is_inside() -> None:
    steps = (step_of(1, 1, 0.0, 4.0, 40), step_of(1, 2, 4.0, 6.0, 40), step_of(2, 1, 0.0, 8.0, 40))
    run = RunEvents(folder=Path("run"), steps=steps)
    assert classes.rate(run, 2.0, 6.0) == pytest.approx((20 + 40 + 20) / 4.0)


def test_the_bytes_of_an_mlp() -> None:
    assert relief.model_bytes("3:5:2") == 4 * (3 * 5 + 5 + 5 * 2 + 2)


@pytest.mark.parametrize(
    ("after_s", "looks", "of_ideal"),
    [
        ({0: 1.6, 1: 0.32}, 1, 1.0),
        ({0: 1.6, 1: 1.6, 2: 0.64, 3: 0.32}, 3, 1.0),
        ({0: 1.6, 1: 1.6, 2: 1.6, 3: 1.6}, 99, 0.2),
    ],
)
def test_relief_is_the_first_look_after_which_steps_are_near_the_ideal(
    after_s: dict[int, float], looks: int, of_ideal: float
) -> None:
    """Steps of 0.2 s before; with a server at a quarter 0.32 s are the best."""
    steps = []
    now_s = 0.0
    for number in range(1, relief.SCRIPT_STEPS + 1):
        # the moves of look n begin at step 40 + 10 n, and take to the fifth step after it
        look = max(key for key in after_s if key == 0 or number >= 40 + 10 * key + 5)
        end_s = now_s + (0.2 if number < relief.SLOW_STEP else after_s[look])
        steps.append(step_of(1, number, now_s, end_s, 4))
        now_s = end_s
    run = RunEvents(folder=Path("run"), steps=tuple(steps))
    of, found = relief.judge(run, by="script", ideal_step_s=None)
    assert (of.value, found.value) == (pytest.approx(of_ideal), looks)


# --- quotas -------------------------------------------------------------------------------------------


def test_a_quota_of_version_1_is_written_as_the_kernel_reads_it(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").touch()
    made = quota._make("x", tmp_path)
    made.set(0.25)
    assert (made.folder / "cpu.cfs_quota_us").read_text() == "5000"
    assert (made.folder / "cpu.cfs_period_us").read_text() == "20000"
    made.set(0.001)
    assert (made.folder / "cpu.cfs_quota_us").read_text() == "1000"
    made.set(None)
    assert (made.folder / "cpu.cfs_quota_us").read_text() == "-1"


def test_a_quota_of_version_2_is_written_as_the_kernel_reads_it(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    made = quota._make("x", tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    made.set(1.5)
    assert (made.folder / "cpu.max").read_text() == "30000 20000"
    made.set(None)
    assert (made.folder / "cpu.max").read_text() == "max 20000"


def test_where_there_is_no_controller_it_is_said(tmp_path: Path) -> None:
    assert quota.why_not(root=tmp_path) == f"no cpu controller in {tmp_path}"
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "cgroup.subtree_control").mkdir()
    with pytest.raises(OSError):
        quota._make("x", tmp_path)


def test_changes_are_made_in_order_once_they_are_due(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").touch()
    made = quota._make("x", tmp_path)
    events = tmp_path / "events-r001.jsonl"
    asked: list[str] = []

    def second() -> bool:
        asked.append((made.folder / "cpu.cfs_quota_us").read_text())
        return True

    changes = [
        quota.Change(due=quota.at_step(events, 7), quota=made, cores=0.5),
        quota.Change(due=second, quota=made, cores=0.1),
    ]
    events.write_text('{"event":"step","step":71,"epoch":0}\n{"event":"step","step":7,"epoch":0}\n')
    with quota.changing(changes, look_s=0.0001):
        while not asked:
            pass
    assert asked == ["10000"]
    events.write_text('{"event":"step","step":71,"epoch":0}\n')
    assert not quota.at_step(events, 7)()
    assert quota.after(-1.0)()
    assert not quota.after(60.0)()
