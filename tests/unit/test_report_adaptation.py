"""The ideal of a run whose speeds change, and how soon its shares fitted again, on runs written out here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcps.config import EmulateConfig
from hpcps.errors import ConfigError, DataError
from hpcps.report.adaptation import Phase, moving_s_star, phases_of, run_seconds, steps_until_balanced
from hpcps.report.events import RunEvents, StepEvent

SPEEDS = (3.0, 2.0, 1.0, 1.0)
THROTTLE = EmulateConfig(script=("300:0=1", "600:0=3", "10:s0=5", "2000:1=7")).parsed_script()


def test_a_run_is_cut_where_a_speed_changes() -> None:
    assert phases_of(SPEEDS, THROTTLE, num_steps=900) == (
        Phase(first_step=1, num_steps=299, speeds=SPEEDS),
        Phase(first_step=300, num_steps=300, speeds=(1.0, 2.0, 1.0, 1.0)),
        Phase(first_step=600, num_steps=301, speeds=SPEEDS),
    )


def test_changes_at_one_step_make_one_phase_and_one_at_the_start_is_the_first() -> None:
    changes = EmulateConfig(script=("0:0=2", "3:0=4", "3:1=4")).parsed_script()
    assert phases_of((1.0, 1.0), changes, num_steps=4) == (
        Phase(first_step=1, num_steps=2, speeds=(2.0, 1.0)),
        Phase(first_step=3, num_steps=2, speeds=(4.0, 4.0)),
    )


@pytest.mark.parametrize(
    ("phases", "s_star"),
    [
        ([(1, SPEEDS)], 7 / 4),
        ([(600, SPEEDS), (300, (1.0, 2.0, 1.0, 1.0))], (900 / 4) / (600 / 7 + 300 / 5)),
        # a phase without anything to gain counts by its time
        ([(10, (1.0, 1.0)), (10, (3.0, 1.0))], (10 / 2 + 10 / 2) / (10 / 2 + 10 / 4)),
    ],
)
def test_the_moving_ideal_weighs_phases_by_time(phases: list[tuple[int, tuple[float, ...]]], s_star: float) -> None:
    parts = [Phase(first_step=1, num_steps=steps, speeds=speeds) for steps, speeds in phases]
    assert moving_s_star(parts) == pytest.approx(s_star)


@pytest.mark.parametrize("phases", [[], [Phase(first_step=1, num_steps=1, speeds=(1.0, 0.0))]])
def test_no_ideal_without_speeds(phases: list[Phase]) -> None:
    with pytest.raises(ConfigError, match=r"cannot compute S\*: got phases .*, need some with positive speeds"):
        moving_s_star(phases)


def run_of(counts: list[tuple[int, ...]], *, first_step: int = 1) -> RunEvents:
    """A run whose workers have ranks from 1 on; each step takes a second, and before the first is a long start."""
    steps = [
        StepEvent(
            t_s=float(number),
            rank=1 + worker,
            step=number,
            epoch=0,
            num_samples=count,
            compute_s=0.5,
            wait_s=0.5,
            step_s=1.0 if number > first_step else 30.0,
            staleness=0.0,
            push_bytes=0,
            pull_bytes=0,
            raw_bytes=0,
        )
        for number, row in enumerate(counts, start=first_step)
        for worker, count in enumerate(row)
    ]
    return RunEvents(folder=Path("run"), steps=tuple(steps))


EQUAL, NEAR, BEST = (20, 20), (32, 8), (30, 10)  # of speeds 3 and 1: 2 x, 1.07 x and 1 x the best time


@pytest.mark.parametrize(
    ("counts", "steps"),
    [
        ([BEST] * 9, 0),
        ([EQUAL] * 4 + [NEAR] * 5, 4),
        ([EQUAL, BEST, EQUAL, BEST, BEST, BEST, EQUAL, EQUAL, EQUAL], 3),
        ([EQUAL] * 7 + [BEST] * 2, 7),
        ([EQUAL] * 9, None),
        ([BEST] * 2 + [EQUAL] * 7, None),
    ],
)
def test_shares_fit_from_the_step_on_from_which_they_stay(counts: list[tuple[int, int]], steps: int | None) -> None:
    phase = Phase(first_step=5, num_steps=9, speeds=(3.0, 1.0))
    run = run_of([EQUAL] * 4 + counts + [BEST] * 9)
    assert steps_until_balanced(run, phase, hold_steps=3) == steps


def test_a_step_that_is_missing_does_not_fit() -> None:
    phase = Phase(first_step=1, num_steps=5, speeds=(3.0, 1.0))
    assert steps_until_balanced(run_of([BEST] * 3), phase, hold_steps=5) is None


def test_a_run_lasts_from_its_first_batch_to_its_last_step() -> None:
    assert run_seconds(run_of([BEST] * 7, first_step=3)) == 7.0
    with pytest.raises(DataError, match=r"cannot time run 'run': got no worker step, need some; train for more steps"):
        run_seconds(RunEvents(folder=Path("run"), steps=()))
