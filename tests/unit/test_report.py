"""Events to numbers, table and figure, on runs written out here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcps.config import SpeedChange
from hpcps.errors import ConfigError, DataError, NotBuiltError
from hpcps.report.events import (
    CapacityEvent,
    ChangeEvent,
    CostsEvent,
    GroupingEvent,
    GuardEvent,
    MovedEvent,
    RunEvent,
    SharesEvent,
    StepEvent,
    SummaryEvent,
    read_run,
)
from hpcps.report.figures import StepTimesPanel, draw_step_times
from hpcps.report.summary import (
    SETTLE_STEPS,
    WorkerTimes,
    efficiency,
    s_star_of_capacity,
    s_star_of_speeds,
    summarize,
)
from hpcps.report.table import TableRow, render_table

Fields = dict[str, Any]


def write(folder: Path, rank: int, events: list[Fields], *, tail: str = "") -> Path:
    """Write one rank's file; rank 0 serves."""
    path = folder / f"events-r{rank:03d}.jsonl"
    head = {"v": 2, "t_s": 0.0, "rank": rank, "role": "server" if rank == 0 else "worker"}
    path.write_text("".join(json.dumps({**head, **event}) + "\n" for event in events) + tail)
    return path


def step(number: int, end_s: float, step_s: float, num_samples: int, *, compute_s: float = 0.0) -> Fields:
    return {
        "event": "step", "t_s": end_s, "step": number, "epoch": 0, "num_samples": num_samples, "staleness": 0,
        "compute_s": compute_s, "wait_s": step_s - compute_s, "step_s": step_s,
        "push_bytes": 12, "pull_bytes": 40, "raw_bytes": 36,
    }  # fmt: skip


def shares(t_s: float, counts: list[int], reason: str) -> Fields:
    return {"event": "shares", "t_s": t_s, "step": 0, "counts": counts, "workers": [1, 2], "reason": reason}


def counters(num_pushes: int, mean: float, largest: float) -> Fields:
    return {
        "event": "server", "num_pushes": num_pushes, "num_windows": 1, "num_refused": 0, "queue_max": 2,
        "payload_bytes": 8, "raw_bytes": 16,
        "staleness_mean": mean, "staleness_max": largest,
    }  # fmt: skip


def two_phases(slow: bool) -> list[Fields]:
    """30 steps of 1/4 s with 100 samples, then 10 of 1/8 s; the fast worker's share grows from 100 to 150."""
    first, then = (0.25, 0.09375) if slow else (0.0625, 0.125)
    steps = [step(n, 0.25 * (n + 1), 0.25, 100, compute_s=first) for n in range(30)]
    later = 50 if slow else 150
    return steps + [step(30 + n, 7.5 + 0.125 * (n + 1), 0.125, later, compute_s=then) for n in range(10)]


def balanced_run(folder: Path) -> None:
    write(
        folder, 0, [shares(0.0, [100, 100], "warm-up: equal shares"), shares(7.5, [150, 50], "fit: 22 steps a worker")]
    )
    write(folder, 1, two_phases(slow=False))
    write(folder, 2, two_phases(slow=True))


def test_every_event_is_read_into_its_type(tmp_path: Path) -> None:
    emulate = {"speeds": [3, 1], "sample_s": 0.001, "script": ["300:0=1"]}
    config = {"sync_mode": "hybrid", "heterogeneous": True, "emulate": emulate}
    write(tmp_path, 0, [
        {"event": "run", "config": config},
        {"event": "grouping", "t_s": 2.0, "generation": 1, "groups": [[1, 2], [3]], "reason": "like speeds"},
        {"event": "capacity", "t_s": 1.5, "workers": [1, 2], "fixed_s": [0, 0.01], "per_sample_s": [0.001, 0.002]},
        shares(1.0, [96, 32], "fit"),
        {"event": "a later invention", "what": None},
        counters(8, 0.5, 2),
    ])  # fmt: skip
    write(tmp_path, 1, [
        step(1, 0.4, 0.2, 7), step(0, 0.2, 0.2, 9), {"event": "summary", "test_auc": 0.8, "note": "words"},
    ])  # fmt: skip
    run = read_run(tmp_path)
    changes = (SpeedChange(step=300, is_server=False, index=0, speed=1.0),)
    assert run.runs == (RunEvent(sync_mode="hybrid", heterogeneous=True, speeds=(3.0, 1.0), changes=changes),)
    assert run.groupings == (GroupingEvent(t_s=2.0, generation=1, groups=((1, 2), (3,)), reason="like speeds"),)
    assert run.capacities == (CapacityEvent(t_s=1.5, workers=(1, 2), fixed_s=(0.0, 0.01), per_sample_s=(0.001, 0.002)),)
    assert run.shares == (SharesEvent(t_s=1.0, step=0, counts=(96, 32), workers=(1, 2), reason="fit"),)
    assert [(event.rank, event.step, event.num_samples) for event in run.steps] == [(1, 0, 9), (1, 1, 7)]
    assert run.steps[0] == StepEvent(
        t_s=0.2,
        rank=1,
        step=0,
        epoch=0,
        num_samples=9,
        compute_s=0.0,
        wait_s=0.2,
        step_s=0.2,
        staleness=0.0,
        push_bytes=12,
        pull_bytes=40,
        raw_bytes=36,
    )
    assert run.summaries == (SummaryEvent(rank=1, values=(("test_auc", 0.8),)),)
    assert [(server.num_pushes, server.staleness_max) for server in run.servers] == [(8, 2.0)]


def test_what_a_run_adapted_is_read(tmp_path: Path) -> None:
    moves = {"look": 3, "keys": [4, 6], "sources": [1, 1], "servers": [0, 0], "num_bytes": 8, "stuck": [5]}
    write(tmp_path, 0, [
        {"event": "change", "worker": 2, "ratio": 3.0, "cpu_wait_frac": 0.5, "steps": 4, "reason": "3 x"},
        {"event": "costs", "weights": [0.5, 2], "error": 0.1, "reason": "fit"},
        {"event": "route", **moves, "reason": "server 1 is slow"},
        {"event": "moved", "epoch": 1, "key": 4, "server": 0, "num_bytes": 4, "seconds": 0.25},
        {"event": "guard", "step": 90, "level": 1, "before": 0, "loss": 2.0, "reason": "loss rose"},
        {**counters(8, 0.5, 2), "pushed_weight": 64.0, "num_relayed": 3},
        {"event": "grouping", "generation": 2, "groups": [[1], [2]], "reason": "two", "samples_per_s": 9.5},
    ])  # fmt: skip
    run = read_run(tmp_path)
    assert run.changes == (ChangeEvent(t_s=0.0, worker=2, ratio=3.0, cpu_wait_frac=0.5, steps=4, reason="3 x"),)
    assert run.costs == (CostsEvent(t_s=0.0, weights=(0.5, 2.0), error=0.1, reason="fit"),)
    assert [(route.look, route.keys, route.servers, route.stuck) for route in run.routes] == [(3, (4, 6), (0, 0), (5,))]
    assert run.moves == (MovedEvent(t_s=0.0, epoch=1, key=4, server=0, num_bytes=4, seconds=0.25),)
    assert run.guards == (GuardEvent(t_s=0.0, step=90, level=1, before=0, reason="loss rose"),)
    (server,) = run.servers
    assert (server.pushed_weight, server.applied_weight, server.num_relayed) == (64.0, 0.0, 3)
    assert (run.groupings[0].before_samples_per_s, run.groupings[0].samples_per_s) == (0.0, 9.5)


SETTINGS = "the run's settings with their section emulate"
GOOD = {"v": 2, "t_s": 1.0, "rank": 1, "role": "worker"}


@pytest.mark.parametrize(
    ("line", "got", "need"),
    [
        ("{oops", "b'{oops'", "one JSON object"),
        ("[1]", "b'[1]'", "one JSON object"),
        ("", "b''", "one JSON object"),
        (json.dumps({**GOOD, "v": 1, "event": "step"}), "version 1", "version 2"),
        (json.dumps({"event": "step"}), "no field 'v'", "it in event 'step'"),
        (json.dumps({**GOOD, "rank": 7, "event": "step"}), "rank 7", "rank 1 as in the file's name"),
        (json.dumps({**GOOD, "role": "boss", "event": "step"}), "role 'boss'", "worker or server"),
        (json.dumps({**GOOD, "t_s": float("nan"), "event": "step"}), "t_s = nan", "a finite number"),
        (json.dumps({**GOOD, **step(0, 1.0, 1.0, -4)}), "num_samples = -4", "a whole number, 0 or more"),
        (json.dumps({**GOOD, **step(0, 1.0, 1.0, 4), "step": True}), "step = True", "a whole number, 0 or more"),
        (json.dumps({**GOOD, **shares(1.0, [4], "fit")}), "lists counts, workers of [1, 2] items", "equal lengths"),
        (json.dumps({**GOOD, **shares(1.0, [4, 4], "fit"), "counts": 4}), "counts = 4", "a list"),
        (json.dumps({**GOOD, "event": 3}), "event = 3", "a string"),
        (json.dumps({**GOOD, "event": "run", "config": {}}), "config = {}", SETTINGS),
        (json.dumps({**GOOD, "event": "summary", "auc": None}), "auc = None", "a finite number"),
        (json.dumps({**GOOD, **counters(1, 0, 0), "num_moves": -1}), "num_moves = -1", "a whole number, 0 or more"),
    ],
)  # fmt: skip
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path: Path, line: str, got: str, need: str) -> None:
    path = write(tmp_path, 1, [step(0, 0.2, 0.2, 4)], tail=line + "\n")
    with pytest.raises(DataError) as caught:
        read_run(tmp_path)
    assert str(caught.value) == (
        f"cannot read events of {str(path)!r} line 2: got {got}, need {need}; remove the line or write it again"
    )


def test_heterogeneous_must_be_true_or_false(tmp_path: Path) -> None:
    config = {"sync_mode": "sync", "heterogeneous": "yes", "emulate": {"speeds": []}}
    write(tmp_path, 1, [{"event": "run", "config": config}])
    with pytest.raises(DataError, match="got heterogeneous = 'yes', need true or false"):
        read_run(tmp_path)


@pytest.mark.parametrize("script", [["300:0"], [3], 5])
def test_a_script_of_speeds_must_be_one(tmp_path: Path, script: object) -> None:
    config = {"sync_mode": "sync", "heterogeneous": True, "emulate": {"speeds": [], "script": script}}
    write(tmp_path, 1, [{"event": "run", "config": config}])
    with pytest.raises(DataError, match=r"got emulate.script = .*, need changes such as 300:0=1; remove the line"):
        read_run(tmp_path)


def test_a_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 1, [step(0, 0.2, 0.2, 4)], tail='{"v": 2, "t_s": 0.4, "ra')
    assert len(read_run(tmp_path).steps) == 1


def test_a_folder_without_events_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rank-000.log").write_text("no events\n")
    with pytest.raises(DataError, match=r"cannot read run .*: got no file, need events-r000\.jsonl"):
        read_run(tmp_path)


def test_metric_is_found_or_named(tmp_path: Path) -> None:
    write(tmp_path, 1, [{"event": "summary", "test_auc": 0.7}, {"event": "summary", "t_s": 1.0, "test_auc": 0.8}])
    run = read_run(tmp_path)
    assert run.metric("test_auc") == 0.8
    with pytest.raises(
        DataError, match=r"cannot find metric 'loss' .*: got \['test_auc'\].*job.summary\(loss=\.\.\.\)"
    ):
        run.metric("loss")


def test_throughput_is_of_the_steps_after_the_new_shares(tmp_path: Path) -> None:
    balanced_run(tmp_path)
    summary = summarize(read_run(tmp_path))
    assert (summary.num_steps, summary.num_samples) == (20, 2000)
    assert summary.samples_per_s == pytest.approx(200 / 0.125)
    # By hand: 28 = 30 equal steps less the two that are not timed.
    assert summary.before == (
        WorkerTimes(rank=1, num_steps=28, num_samples=100, compute_s=0.0625, wait_s=0.1875, step_s=0.25),
        WorkerTimes(rank=2, num_steps=28, num_samples=100, compute_s=0.25, wait_s=0.0, step_s=0.25),
    )
    assert summary.after == (
        WorkerTimes(rank=1, num_steps=10, num_samples=150, compute_s=0.125, wait_s=0.0, step_s=0.125),
        WorkerTimes(rank=2, num_steps=10, num_samples=50, compute_s=0.09375, wait_s=0.03125, step_s=0.125),
    )


@pytest.mark.parametrize("events", [[], [shares(0.0, [10, 10], "equal shares: heterogeneous is off")]])
def test_without_new_shares_only_the_first_steps_are_left_out(tmp_path: Path, events: list[Fields]) -> None:
    assert SETTLE_STEPS == 22
    # The first 22 steps take 1 s, the other 5 take 0.5 s.
    ends = [float(n + 1) for n in range(22)] + [22 + 0.5 * (n + 1) for n in range(5)]
    steps = [step(n, end_s, 1.0 if n < 22 else 0.5, 10) for n, end_s in enumerate(ends)]
    write(tmp_path, 0, [*events, counters(4, 0.0, 0)])
    write(tmp_path, 1, steps)
    write(tmp_path, 2, steps)
    summary = summarize(read_run(tmp_path))
    assert (summary.num_steps, summary.samples_per_s) == (10, 40.0)


def test_workers_out_of_step_are_measured_from_first_start_to_last_end(tmp_path: Path) -> None:
    # Rank 1 steps in 0.25 s from 0 on, rank 2 in 0.5 s: their steady parts cover 5.5 to 8 s and 11 to 14 s.
    write(tmp_path, 1, [step(n, 0.25 * (n + 1), 0.25, 30) for n in range(32)])
    write(tmp_path, 2, [step(n, 0.5 * (n + 1), 0.5, 10) for n in range(28)])
    summary = summarize(read_run(tmp_path))
    assert summary.samples_per_s == pytest.approx((10 * 30 + 6 * 10) / (14.0 - 5.5))


def test_a_run_too_short_to_settle_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1, [step(n, 0.1 * (n + 1), 0.1, 4) for n in range(22)])
    with pytest.raises(DataError, match=r"rank 1 has 22 steps and none after .*, need more than 22; train for more"):
        summarize(read_run(tmp_path))


def test_a_run_without_steps_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 0, [counters(0, 0.0, 0)])
    with pytest.raises(DataError, match="got no worker step"):
        summarize(read_run(tmp_path))


def test_staleness_is_weighted_by_pushes_over_servers(tmp_path: Path) -> None:
    balanced_run(tmp_path)
    summary = summarize(read_run(tmp_path))
    assert (summary.staleness_mean, summary.staleness_max) == (0.0, 0.0)
    write(tmp_path, 0, [counters(30, 1.0, 4)])
    write(tmp_path, 3, [{**counters(10, 3.0, 9), "role": "server"}])
    summary = summarize(read_run(tmp_path))
    assert (summary.staleness_mean, summary.staleness_max) == (1.5, 9.0)


@pytest.mark.parametrize(
    ("speeds", "expected"), [((3, 2, 1, 1), 1.75), ((2, 2, 2, 1, 1, 1), 1.5), ((5, 5), 1.0), ((4,), 1.0)]
)
def test_s_star_of_speeds(speeds: tuple[float, ...], expected: float) -> None:
    assert s_star_of_speeds(speeds) == pytest.approx(expected)
    per_sample_s = [0.001 / speed for speed in speeds]
    assert s_star_of_capacity([0.0] * len(speeds), per_sample_s, global_batch=840) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fixed_s", "per_sample_s", "batch", "equal_s", "balanced_s"),
    [
        # (t - 1) / 1 + (t - 1) / 3 = 8 gives t = 7; equal: 1 + 3 * 4.
        ((1.0, 1.0), (1.0, 3.0), 8, 13.0, 7.0),
        # A worker whose fixed time is above the balanced step gets nothing: t / 1 = 4.
        ((0.0, 10.0), (1.0, 1.0), 4, 12.0, 4.0),
        # The same with the order turned round.
        ((10.0, 0.0), (1.0, 1.0), 4, 12.0, 4.0),
        # It just enters: t + (t - 4) / 2 = 7 gives t = 6; equal: 4 + 2 * 3.5.
        ((0.0, 4.0), (1.0, 2.0), 7, 11.0, 6.0),
    ],
)
def test_s_star_of_capacity(
    fixed_s: tuple[float, ...], per_sample_s: tuple[float, ...], batch: int, equal_s: float, balanced_s: float
) -> None:
    assert s_star_of_capacity(fixed_s, per_sample_s, global_batch=batch) == pytest.approx(equal_s / balanced_s)


@pytest.mark.parametrize("speeds", [(), (1.0, 0.0)])
def test_s_star_refuses_what_is_no_speed(speeds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"cannot compute S\*: got speeds .* write for example 3:2:1:1"):
        s_star_of_speeds(speeds)


@pytest.mark.parametrize(
    ("fixed_s", "per_sample_s", "batch"),
    [((), (), 8), ((0.0,), (1.0, 1.0), 8), ((-1.0,), (1.0,), 8), ((0.0,), (0.0,), 8), ((0.0,), (1.0,), 0)],
)
def test_s_star_refuses_what_is_no_capacity(
    fixed_s: tuple[float, ...], per_sample_s: tuple[float, ...], batch: int
) -> None:
    with pytest.raises(ConfigError, match=r"cannot compute S\*: got fixed_s .* pass a capacity event's values"):
        s_star_of_capacity(fixed_s, per_sample_s, global_batch=batch)


def test_efficiency_is_speed_up_over_s_star() -> None:
    assert efficiency(1.68, 1.75) == pytest.approx(0.96)
    with pytest.raises(ConfigError, match=r"got S\* = 0\.900, need at least 1"):
        efficiency(1.0, 0.9)


def test_the_table_reads_like_this() -> None:
    values = {"s_star": 1.75, "test_auc": 0.8056}
    rows = [
        TableRow(mode="sync", heterogeneous=False, samples_per_s=11404.2, speedup=1.0, efficiency=None,
                 staleness_mean=0.0, staleness_max=0.0, **values),
        TableRow(mode="hybrid", heterogeneous=True, samples_per_s=19501.9, speedup=1.7101, efficiency=0.97720,
                 staleness_mean=0.62, staleness_max=3.0, **values),
    ]  # fmt: skip
    expected = """\
One run a row

 mode     heterogeneous   samples/s   speed-up     S*   efficiency   test AUC   staleness mean / max
 ───────────────────────────────────────────────────────────────────────────────────────────────────
 sync     off                11,404       1.00   1.75     baseline      0.806               0.00 / 0
 hybrid   on                 19,502       1.71   1.75        0.977      0.806               0.62 / 3"""
    assert render_table(rows, title="One run a row") == expected


def times(rank: int, num_samples: int, compute_s: float, step_s: float) -> WorkerTimes:
    return WorkerTimes(
        rank=rank, num_steps=5, num_samples=num_samples, compute_s=compute_s, wait_s=step_s - compute_s, step_s=step_s
    )


def test_the_figure_is_a_png_and_shows_the_times(tmp_path: Path) -> None:
    before = StepTimesPanel(title="before", workers=(times(1, 512, 0.06, 0.18), times(2, 512, 0.18, 0.18)))
    after = StepTimesPanel(title="after", workers=(times(1, 878, 0.10, 0.11), times(2, 292, 0.10, 0.11)))
    slower = StepTimesPanel(title="after", workers=(times(1, 878, 0.10, 0.11), times(2, 292, 0.02, 0.11)))
    path = draw_step_times([before, after], tmp_path / "a.png", title="Step times")
    assert path == tmp_path / "a.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    again = draw_step_times([before, after], tmp_path / "b.png", title="Step times")
    other = draw_step_times([before, slower], tmp_path / "c.png", title="Step times")
    assert again.read_bytes() == path.read_bytes()
    assert other.read_bytes() != path.read_bytes()


@pytest.mark.parametrize("panels", [[], [StepTimesPanel(title="nobody", workers=())]])
def test_nothing_to_draw_is_an_error(tmp_path: Path, panels: list[StepTimesPanel]) -> None:
    with pytest.raises(DataError, match=r"cannot draw step times to .*: got \d panels"):
        draw_step_times(panels, tmp_path / "a.png", title="Step times")


def test_a_missing_plotter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    panel = StepTimesPanel(title="before", workers=(times(1, 512, 0.06, 0.18),))
    with pytest.raises(NotBuiltError, match="need matplotlib; run `pip install matplotlib`"):
        draw_step_times([panel], tmp_path / "a.png", title="Step times")


def test_importing_the_room_loads_no_plotter() -> None:
    code = (
        "import sys, hpcps.report.events, hpcps.report.figures, hpcps.report.summary, hpcps.report.table;"
        "print([name for name in ('matplotlib', 'torch', 'mpi4py', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
