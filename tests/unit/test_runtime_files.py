"""Logs, events and the sleep of the communication thread."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcps.comm.backoff import Backoff
from hpcps.runtime.logs import open_logs, run_dir
from hpcps.runtime.metrics import EVENT_VERSION, EventLog


@pytest.fixture
def clean_logger() -> Iterator[logging.Logger]:
    """The package's logger, put back as it was."""
    logger = logging.getLogger("hpcps")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    logger.handlers = []
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("setting", "world_size", "made"),
    [("", 1, None), ("", 2, "hpcps-run"), ("a/b", 1, "a/b"), ("a/b", 4, "a/b")],
)
def test_the_run_folder_is_private(
    setting: str, world_size: int, made: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_dir(setting, world_size=world_size)
    assert (None if folder is None else str(folder)) == made
    if folder is not None:
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
        assert run_dir(setting, world_size=world_size) == folder
    else:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "console"), [(0, ["info", "warning"]), (3, ["warning"])])
def test_the_console_shows_rank_0_from_info_and_others_from_warning(
    rank: int, console: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], clean_logger: logging.Logger
) -> None:
    for _ in range(2):  # a second call replaces the first
        open_logs(tmp_path, rank=rank, world_size=8, host="gpu-02", role="server", level="info")
    for level in ("debug", "info", "warning"):
        getattr(logging.getLogger("hpcps.part"), level)("text %s", level)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == console
    assert all(f" r00{rank}/008 gpu-02 server hpcps.part: text " in line for line in lines)
    path = tmp_path / f"rank-00{rank}.log"
    assert [line.split()[-1] for line in path.read_text().splitlines()] == ["info", "warning"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_events_are_json_lines_with_place_and_version(tmp_path: Path) -> None:
    with EventLog(tmp_path, rank=3, role="worker") as events:
        events.write("step", num_samples=4, step_s=0.5)
        events.write("end")
    events.close()
    path = tmp_path / "events-r003.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("t_s") > 1.6e9 for line in lines)
    place = {"v": EVENT_VERSION, "rank": 3, "role": "worker"}
    assert lines == [{**place, "event": "step", "num_samples": 4, "step_s": 0.5}, {**place, "event": "end"}]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with EventLog(None, rank=0, role="worker") as events:
        events.write("step")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("under_way", [False, True])
def test_sleeps_grow_while_nothing_comes_and_snap_back(under_way: bool) -> None:
    backoff = Backoff(0.001)
    sleeps = [backoff.next_s(progressed=False, under_way=under_way) for _ in range(1000)]
    assert sleeps[:30] == [0.0] * 30
    working = sleeps[30:400]
    assert 0 < working[0] < 50e-6
    assert working == sorted(working)
    assert working[-1] == (200e-6 if under_way else 0.001)
    assert sleeps[-1] == 0.010, "an idle rank sleeps longer"
    assert backoff.next_s(progressed=True, under_way=under_way) == 0.0
    assert [backoff.next_s(progressed=False, under_way=under_way) for _ in range(32)] == sleeps[:32]
