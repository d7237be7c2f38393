"""Emulated devices: how long a batch or an update takes on a device whose speed is stated and not the real one.

Says seconds and lets them pass; what is computed stays the same. Reads the file of a trace, once, at the start.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcps.config import EmulateConfig
from hpcps.errors import ConfigError, LaunchError
from hpcps.plan import Roles

__all__ = [
    "EmulatedDevice",
    "Pace",
    "Trace",
    "check_emulation",
    "read_trace",
    "server_device",
    "worker_device",
]


class EmulatedDevice:
    """A device of a stated speed, which may change at steps.

    Args:
        changes: a step, and the seconds that a unit of work takes from it on, 0: as long as it really takes; steps
            rising. Before the first the device is the real one.
    """

    def __init__(self, changes: Sequence[tuple[int, float]]) -> None:
        self._steps = [step for step, _ in changes]
        self._unit_s = [unit_s for _, unit_s in changes]

    def seconds(self, step: int, work: float) -> float:
        """Seconds that so much work takes at a step; 0: as long as it really takes."""
        index = bisect.bisect_right(self._steps, step) - 1
        return work * self._unit_s[index] if index >= 0 else 0.0


class Pace:
    """Lets time pass until an emulated device would be done; what a sleep overran is taken off what follows.

    Args:
        clock: seconds, rising.
        sleep: lets so many seconds pass, or a little more.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._overslept_s = 0.0

    def fill(self, began_s: float, seconds: float) -> None:
        """Return when work that began then has taken that long; at once where it really took longer.

        No more is taken off than the work takes: after a freeze of the machine the device does not seem quick for long.
        """
        end_s = began_s + seconds
        left_s = end_s - self._clock()
        if left_s <= 0:
            return
        paid_s = min(left_s, self._overslept_s)
        if paid_s < left_s:
            self._sleep(left_s - paid_s)
            self._overslept_s = min(seconds, max(0.0, self._clock() - (end_s - paid_s)))
        else:
            self._overslept_s -= paid_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Seconds of a sample by worker: ``unit_s[i][w]`` on worker ``w`` from step ``steps[i]`` on; steps rising."""

    steps: tuple[int, ...]
    unit_s: tuple[tuple[float, ...], ...]

    @property
    def num_workers(self) -> int:
        """Workers of the trace."""
        return len(self.unit_s[0])


def read_trace(path: str | Path) -> Trace:
    """Read lines ``STEP SECONDS SECONDS ...``, one number a worker; empty lines and those that begin with # are notes.

    Raises:
        ConfigError: the file cannot be read or holds no step, or a line does not fit; names file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read trace {str(path)!r}: {reason}; correct emulate.trace") from error
    steps: list[int] = []
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        problem = _problem(words, after=steps[-1] if steps else -1, num_workers=len(rows[0]) if rows else 0)
        if problem:
            raise ConfigError(f"cannot read trace {str(path)!r} line {number}: {problem}; correct the line")
        steps.append(int(words[0]))
        rows.append(tuple(float(word) for word in words[1:]))
    if not rows:
        raise ConfigError(
            f"cannot read trace {str(path)!r}: got {len(lines)} lines without a step, need lines 'STEP SECONDS ...';"
            " correct emulate.trace"
        )
    return Trace(steps=tuple(steps), unit_s=tuple(rows))


def _problem(words: Sequence[str], *, after: int, num_workers: int) -> str:
    """What is wrong with a line of a trace; empty: nothing."""
    if not (words[0].isascii() and words[0].isdigit()):
        return f"got step {words[0]!r}, need a whole number"
    if int(words[0]) <= after:
        return f"got step {words[0]} after step {after}, need rising steps"
    for word in words[1:]:
        try:
            fits = 0 < float(word) < math.inf
        except ValueError:
            fits = False
        if not fits:
            return f"got {word!r}, need seconds above 0"
    wanted = num_workers or max(1, len(words) - 1)
    if len(words) - 1 != wanted:
        return f"got {len(words) - 1} numbers after the step, need {wanted}, one a worker"
    return ""


def worker_device(config: EmulateConfig, worker: int) -> EmulatedDevice | None:
    """The device of a worker, whose unit of work is a sample; None: the real one.

    Args:
        config: the run's settings.
        worker: its number among the workers.

    Raises:
        ConfigError: the trace cannot be read.
    """
    if config.trace:
        trace = read_trace(config.trace)
        # what the file says first holds from the beginning
        steps = (0, *trace.steps[1:])
        return EmulatedDevice([(step, row[worker]) for step, row in zip(steps, trace.unit_s, strict=True)])
    changes = [(0, config.sample_s / config.speeds[worker])] if config.speeds else []
    changes += [
        (change.step, config.sample_s / change.speed)
        for change in config.parsed_script()
        if not change.is_server and change.index == worker
    ]
    return EmulatedDevice(changes) if changes else None


def server_device(config: EmulateConfig, server: int) -> EmulatedDevice | None:
    """The device of a server, whose unit of work is a byte of gradients before a codec; None: the real one.

    Args:
        config: the run's settings.
        server: its number among the servers.
    """
    changes = [(0, config.server_bytes_per_s[server])] if config.server_bytes_per_s else []
    changes += [
        (change.step, change.speed) for change in config.parsed_script() if change.is_server and change.index == server
    ]
    return EmulatedDevice([(step, 1 / rate if rate else 0.0) for step, rate in changes]) if changes else None


def check_emulation(config: EmulateConfig, roles: Roles) -> None:
    """Check that what is emulated fits the ranks of the job, before anything starts.

    Raises:
        ConfigError: the trace cannot be read.
        LaunchError: a list has not one number a rank, or the script names a rank that there is not.
    """
    num_workers, num_servers = len(roles.workers), len(roles.servers)
    _check_count("speeds", config.speeds, num_workers, "a worker", "--emulate-speeds")
    _check_count("server rates", config.server_bytes_per_s, num_servers, "a server", "--emulate-server-bytes-per-s")
    for change in config.parsed_script():
        role, count = ("server", num_servers) if change.is_server else ("worker", num_workers)
        if change.index >= count:
            raise LaunchError(
                f"cannot emulate a change at step {change.step}: got {role} {change.index}, need 0 to {count - 1};"
                " change --emulate-script or the number of ranks"
            )
    if config.trace:
        trace = read_trace(config.trace)
        if trace.num_workers != num_workers:
            raise LaunchError(
                f"cannot emulate trace {config.trace!r}: got {trace.num_workers} workers, need {num_workers};"
                " change the file or the number of ranks"
            )


def _check_count(what: str, values: Sequence[float], count: int, each: str, flag: str) -> None:
    if values and len(values) != count:
        raise LaunchError(
            f"cannot emulate {what} {':'.join(f'{value:g}' for value in values)}: got {len(values)}, need {count},"
            f" one {each}; change {flag} or the number of ranks"
        )
