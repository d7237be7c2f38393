"""How long this thread was ready to run and did not get a processor: what other jobs, or a quota, took from it.

Reads counters of the kernel and nothing else; where there are none (not Linux, a kernel without them) it says 0.
Wall-clock times contain these waits, so a worker that is disturbed is a slow one anyway; this tells the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["Disturbance"]


class Disturbance:
    """Counts waits of the thread that first asks.

    The kernel counts the time of a runnable thread without a processor as its run delay (second number of
    ``schedstat``, nanoseconds); a thread whose quota is used up is runnable, so that is in it. Where a kernel does not
    count it, the throttled time of the control group is taken, which is that of all its threads together. Both would
    count a quota twice.

    Args:
        proc: where the process file system is.
        cgroups: where the control groups are.
    """

    def __init__(self, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._file: int | None = None
        self._read: Callable[[int], float | None] = _run_delay_s
        self._begun = False

    def waited_s(self) -> float:
        """Seconds waited so far, from an origin of its own: differences count. Costs a read of one file."""
        if not self._begun:
            self._begun = True
            sources = [(self._proc / "thread-self/schedstat", _run_delay_s)]
            sources += [(path, _throttled_s) for path in self._cpu_stats()]
            for path, read in sources:
                file = _opened(path)
                if file is not None and read(file) is not None:
                    self._file, self._read = file, read
                    break
                if file is not None:
                    os.close(file)
        return (self._read(self._file) or 0.0) if self._file is not None else 0.0

    def close(self) -> None:
        """Give the file back; waits are not counted any more."""
        if self._file is not None:
            os.close(self._file)
        self._begun, self._file = True, None

    def _cpu_stats(self) -> list[Path]:
        """Where the quota of this process may be counted: cgroup v2 first, then the controller cpu of v1."""
        try:
            lines = (self._proc / "self/cgroup").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return []
        paths = []
        for line in sorted(lines, key=lambda text: not text.startswith("0::")):
            _, controllers, group = [*line.split(":", 2), "", ""][:3]
            inner = group.lstrip("/")
            if controllers == "":
                paths += [self._cgroups / inner / "cpu.stat", self._cgroups / "unified" / inner / "cpu.stat"]
            elif "cpu" in controllers.split(","):
                paths += [self._cgroups / controllers / inner / "cpu.stat", self._cgroups / "cpu" / inner / "cpu.stat"]
        return paths


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _run_delay_s(file: int) -> float | None:
    """Second number of a schedstat file, in seconds; None where there is none."""
    try:
        return int(os.pread(file, 128, 0).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _throttled_s(file: int) -> float | None:
    """Throttled time of a cpu.stat file in seconds; None where there is none: a group without a quota."""
    try:
        fields = dict(line.split(b" ", 1) for line in os.pread(file, 1024, 0).splitlines())
        if b"throttled_usec" in fields:
            return int(fields[b"throttled_usec"]) / 1e6
        return int(fields[b"throttled_time"]) / 1e9
    except (OSError, ValueError, KeyError):
        return None
