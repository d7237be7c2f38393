"""Emulated devices: what the settings accept, how the trace's file is read, what a device takes and when, no sleep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import hpcps.torch as ht
from hpcps.config import EmulateConfig, RunConfig, SpeedChange
from hpcps.errors import ConfigError, LaunchError
from hpcps.plan import Roles
from hpcps.runtime.emulation import (
    EmulatedDevice,
    Pace,
    check_emulation,
    read_trace,
    server_device,
    worker_device,
)
from hpcps.runtime.job import Job

ROLES = Roles(servers=(0, 1), workers=(2, 3, 4))
NEED = "need STEP:WORKER=SPEED, above 0, or STEP:sSERVER=BYTES_PER_S; write for example 300:0=1 or 400:s1=25e6"


# --- the script ---------------------------------------------------------------------------------------


def test_a_script_is_read_in_order_of_time() -> None:
    config = EmulateConfig(script=("600:0=3", "400:s1=25e6", " 300:0=.5", "500:s1=0"))
    assert config.parsed_script() == (
        SpeedChange(step=300, is_server=False, index=0, speed=0.5),
        SpeedChange(step=400, is_server=True, index=1, speed=25e6),
        SpeedChange(step=500, is_server=True, index=1, speed=0.0),
        SpeedChange(step=600, is_server=False, index=0, speed=3.0),
    )


@pytest.mark.parametrize(
    "text",
    ["300", "300:0", "300:=1", ":0=1", "-1:0=1", "300:w0=1", "300:0=0", "3:0=-1", "3:0=nan", "3:0=1e999", "٣:0=1"],
)
def test_a_change_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EmulateConfig(script=("100:0=1", text))
    assert str(caught.value) == f"cannot accept emulate.script: got {text!r}, {NEED}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"script": ("5:0=1", "5:0=2")},
            "cannot accept emulate.script: got ('5:0=1', '5:0=2'), need one change of a device at a step; leave one"
            " out",
        ),
        (
            {"server_bytes_per_s": (1.0, -1.0)},
            "cannot accept emulate.server_bytes_per_s: got (1.0, -1.0), need 0 or more each; write 1e8:25e6",
        ),
        (
            {"trace": "t.txt", "speeds": (1.0,)},
            "cannot accept emulate.trace: got 't.txt', need no other statement of workers' speeds; leave out"
            " emulate.speeds and the workers' part of emulate.script, or the trace",
        ),
        (
            {"trace": "t.txt", "script": ("5:0=1",)},
            "cannot accept emulate.trace: got 't.txt', need no other statement of workers' speeds; leave out"
            " emulate.speeds and the workers' part of emulate.script, or the trace",
        ),
    ],
)
def test_settings_that_contradict_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EmulateConfig(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_change_of_a_server_and_one_of_a_worker_may_share_a_step() -> None:
    EmulateConfig(script=("5:0=1", "5:s0=1", "5:1=1"))
    EmulateConfig(trace="t.txt", script=("5:s0=1",))


# --- the trace ----------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.txt"
    path.write_text(text)
    return path


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "# two workers\n\n1 0.001 2e-3\n  11\t0.003  0.004\n"))
    assert trace.steps == (1, 11)
    assert trace.unit_s == ((0.001, 0.002), (0.003, 0.004))
    assert trace.num_workers == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("x 1 2", "got step 'x', need a whole number"),
        ("-1 1 2", "got step '-1', need a whole number"),
        ("4 1 2", "got step 4 after step 5, need rising steps"),
        ("5 1 2", "got step 5 after step 5, need rising steps"),
        ("6 1 zwei", "got 'zwei', need seconds above 0"),
        ("6 1 0", "got '0', need seconds above 0"),
        ("6 nan 1", "got 'nan', need seconds above 0"),
        ("6 1", "got 1 numbers after the step, need 2, one a worker"),
        ("6 1 2 3", "got 3 numbers after the step, need 2, one a worker"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path, f"# seconds\n5 1 2\n{line}\n9 1 2\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value) == f"cannot read trace {str(path)!r} line 3: {problem}; correct the line"


def test_a_first_line_without_numbers_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "5\n")
    with pytest.raises(ConfigError, match="line 1: got 0 numbers after the step, need 1, one a worker; correct"):
        read_trace(path)


def test_a_trace_that_is_missing_or_empty_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read trace '/nowhere': No such file or directory; correct"):
        read_trace("/nowhere")
    with pytest.raises(ConfigError, match=r"got 1 lines without a step, need lines 'STEP SECONDS ...'; correct"):
        read_trace(write(tmp_path, "# nothing\n"))
    (tmp_path / "trace.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't decode byte"):
        read_trace(tmp_path / "trace.txt")


# --- devices ------------------------------------------------------------------------------------------


def seconds(device: EmulatedDevice | None, steps: tuple[int, ...], work: float = 10.0) -> list[float]:
    assert device is not None
    return [pytest.approx(device.seconds(step, work)) for step in steps]


def test_a_device_is_the_real_one_before_its_first_change() -> None:
    device = EmulatedDevice([(3, 0.5), (6, 0.0), (8, 2.0)])
    assert [device.seconds(step, 2.0) for step in (1, 2, 3, 5, 6, 7, 8, 99)] == [0, 0, 1, 1, 0, 0, 4, 4]


def test_a_worker_has_its_speed_until_the_script_changes_it() -> None:
    config = EmulateConfig(speeds=(3.0, 1.0, 1.0), sample_s=0.3, script=("5:0=1", "9:0=3", "7:1=0.5", "2:s0=7"))
    assert seconds(worker_device(config, 0), (1, 4, 5, 8, 9)) == [1, 1, 3, 3, 1]
    assert seconds(worker_device(config, 1), (1, 6, 7)) == [3, 3, 6]
    assert seconds(worker_device(config, 2), (1, 50)) == [3, 3]
    alone = EmulateConfig(sample_s=0.3, script=("5:0=1",))
    assert seconds(worker_device(alone, 0), (4, 5)) == [0, 3]
    assert worker_device(alone, 1) is None
    assert worker_device(EmulateConfig(), 0) is None


def test_a_worker_follows_the_trace_and_its_first_line_holds_from_the_start(tmp_path: Path) -> None:
    path = write(tmp_path, "3 0.1 0.2\n11 0.3 0.4\n")
    config = EmulateConfig(trace=str(path))
    assert seconds(worker_device(config, 1), (1, 3, 10, 11)) == [2, 2, 2, 4]


def test_a_server_takes_bytes_at_its_rate() -> None:
    config = EmulateConfig(server_bytes_per_s=(0.0, 100.0), script=("4:s1=25", "6:s0=50", "8:s1=0", "2:1=1"))
    assert seconds(server_device(config, 0), (1, 5, 6), 200) == [0, 0, 4]
    assert seconds(server_device(config, 1), (1, 4, 7, 8), 200) == [2, 8, 8, 0]
    assert server_device(EmulateConfig(script=("4:s1=25",)), 0) is None


# --- the job's size -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"speeds": (3.0, 2.5)},
            "cannot emulate speeds 3:2.5: got 2, need 3, one a worker; change --emulate-speeds or the number of ranks",
        ),
        (
            {"server_bytes_per_s": (1e8,)},
            "cannot emulate server rates 1e+08: got 1, need 2, one a server; change --emulate-server-bytes-per-s or the"
            " number of ranks",
        ),
        (
            {"script": ("7:3=1",)},
            "cannot emulate a change at step 7: got worker 3, need 0 to 2; change --emulate-script or the number of"
            " ranks",
        ),
        (
            {"script": ("7:s2=1",)},
            "cannot emulate a change at step 7: got server 2, need 0 to 1; change --emulate-script or the number of"
            " ranks",
        ),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_emulation(EmulateConfig(**fields), ROLES)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_trace_needs_a_column_a_worker(tmp_path: Path) -> None:
    path = write(tmp_path, "1 0.1 0.2\n")
    with pytest.raises(LaunchError) as caught:
        check_emulation(EmulateConfig(trace=str(path)), ROLES)
    assert str(caught.value) == (
        f"cannot emulate trace {str(path)!r}: got 2 workers, need 3; change the file or the number of ranks"
    )
    check_emulation(EmulateConfig(trace=str(write(tmp_path, "1 1 2 3\n")), script=("1:s1=5",)), ROLES)


# --- letting time pass --------------------------------------------------------------------------------


class Clock:
    """Time that passes by sleeping only, each sleep a little longer than asked."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.overrun_s = 0.0
        self.sleeps: list[float] = []

    def read(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(round(duration_s, 9))
        self.now_s += duration_s + self.overrun_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(clock=clock.read, sleep=clock.sleep)


def test_a_device_fills_what_the_real_work_left(clock: Clock, pace: Pace) -> None:
    pace.fill(99.5, 2.0)
    assert clock.sleeps == [1.5]
    pace.fill(clock.now_s - 2.0, 2.0)
    pace.fill(clock.now_s - 3.0, 2.0)
    assert clock.sleeps == [1.5]


def test_what_a_sleep_overran_is_taken_off_the_next_ones(clock: Clock, pace: Pace) -> None:
    clock.overrun_s = 0.25
    for _ in range(3):
        pace.fill(clock.now_s, 1.0)
    assert clock.sleeps == [1.0, 0.75, 0.75]
    assert clock.now_s == pytest.approx(100.0 + 3.0 + 0.25)


def test_many_short_fills_pay_one_long_overrun(clock: Clock, pace: Pace) -> None:
    clock.overrun_s = 0.35
    pace.fill(clock.now_s, 1.0)
    clock.overrun_s = 0.0
    for _ in range(6):
        pace.fill(clock.now_s, 0.1)
    assert clock.sleeps == [1.0, 0.05, 0.1, 0.1]


def test_a_freeze_is_paid_back_for_one_fill_only(clock: Clock, pace: Pace) -> None:
    clock.overrun_s = 60.0
    pace.fill(clock.now_s, 1.0)
    clock.overrun_s = 0.0
    for _ in range(3):
        pace.fill(clock.now_s, 1.0)
    assert clock.sleeps == [1.0, 1.0, 1.0]


# --- in a job -----------------------------------------------------------------------------------------


def test_a_job_fills_its_steps_and_its_servers_their_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    fills: dict[int, list[float]] = {}
    monkeypatch.setattr(Pace, "fill", lambda pace, _, took_s: fills.setdefault(id(pace), []).append(took_s))
    numel, steps = 24, 4
    script = ("3:1=1", "2:s0=12")
    config = RunConfig(
        emulate=EmulateConfig(speeds=(1.0, 2.0), sample_s=0.5, server_bytes_per_s=(96.0,), script=script)
    )

    def worker(job: Job) -> None:
        model = torch.nn.Linear(numel, 1, bias=False)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, job)
        dataset = torch.utils.data.TensorDataset(torch.ones(8 * steps, numel))
        for _ in job.epochs(1):
            for (inputs,) in ht.DistributedLoader(dataset, global_batch=8, job=job):
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()

    run_ranks(worker, num_workers=2, config=config)
    # four samples of a step on each worker; one shard of 24 float32 on the server, pushed once a step
    assert sorted(fills.values()) == [[1.0, 1.0, 2.0, 2.0], [1.0, 8.0, 8.0, 8.0], [2.0, 2.0, 2.0, 2.0]]
