"""Quotas of the processor: processes that together get a part of a core, by the kernel's cpu controller.

For real computation on hosts that are made slow: a throttled device, a busy neighbour. Needs a writable cgroup, of
version 1 (``/sys/fs/cgroup/cpu``) or 2; says why not where there is none. The groups are removed at the end, and
nothing outside of them is changed.

    with cpu_quota("server-1", 0.4) as quota:
        start(..., str(quota.procs))       # the process calls enter(path) first
        quota.set(0.1)                     # or: with changing([Change(due=after(20.0), quota=quota, cores=0.1)]):
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 20_000  # with the kernel's default of 100 ms a small quota stops a process for most of a step
LEAST_US = 1_000  # the kernel refuses less
_REMOVE_S = 5.0


class QuotaError(Exception):
    """No quota can be had here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A group of processes with a quota.

    Args:
        folder: the cgroup.
        parent: where its processes go at the end.
        version: of the kernel's interface, 1 or 2.
    """

    folder: Path
    parent: Path
    version: int

    @property
    def procs(self) -> Path:
        """The file into which a process writes its number to enter."""
        return self.folder / "cgroup.procs"

    def set(self, cores: float | None) -> None:
        """Let the processes use that many cores in all; None: as many as there are."""
        quota_us = None if cores is None else max(LEAST_US, round(cores * PERIOD_US))
        if self.version == 1:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text("-1" if quota_us is None else str(quota_us))
        else:
            (self.folder / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {PERIOD_US}")

    def remove(self) -> None:
        """Let the processes go and remove the group."""
        end_s = time.monotonic() + _REMOVE_S
        while True:
            for pid in self.procs.read_text().split():
                with contextlib.suppress(OSError):  # it has ended since
                    (self.parent / "cgroup.procs").write_text(pid)
            try:
                self.folder.rmdir()
                return
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.05)


def enter(procs: str | Path) -> None:
    """Put this process, with all its threads, under a quota."""
    Path(procs).write_text(str(os.getpid()))


@contextlib.contextmanager
def cpu_quota(name: str, cores: float | None, *, root: Path = ROOT) -> Iterator[Quota]:
    """A group for processes, under a quota from the start.

    Args:
        name: of the group, distinct among those of this process.
        cores: see `Quota.set`.
        root: where the kernel shows its cgroups.

    Raises:
        QuotaError: there is no cpu controller that this process may use.
    """
    quota = _make(f"hpcps-{os.getpid()}-{name}", root)
    try:
        quota.set(cores)
        yield quota
    finally:
        quota.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quota becomes another one as soon as ``due`` says so; ``cores`` as in `Quota.set`."""

    due: Callable[[], bool]
    quota: Quota
    cores: float | None


def after(seconds: float) -> Callable[[], bool]:
    """Due so many seconds from now."""
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s


def at_step(events: Path, step: int) -> Callable[[], bool]:
    """Due as soon as a worker's file of events tells of a step."""
    mark = f'"step":{step},'
    return lambda: events.exists() and mark in events.read_text()


@contextlib.contextmanager
def changing(changes: Sequence[Change], *, look_s: float = 0.02) -> Iterator[None]:
    """Make changes one after the other, while what stands inside runs."""
    over = threading.Event()

    def make() -> None:
        for change in changes:
            while not change.due():
                if over.wait(look_s):
                    return
            change.quota.set(change.cores)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def why_not(*, root: Path = ROOT) -> str:
    """Why no quota can be had here; empty: one can."""
    try:
        with cpu_quota("probe", 1.0, root=root):
            return ""
    except QuotaError as error:
        return str(error)


def _make(name: str, root: Path) -> Quota:
    first, second = root / "cpu", root / "cgroup.controllers"
    if (first / "cpu.cfs_quota_us").exists():
        parent, version = first, 1
    elif second.exists():
        parent, version = root, 2
        if "cpu" not in (root / "cgroup.subtree_control").read_text().split():
            try:
                (root / "cgroup.subtree_control").write_text("+cpu")
            except OSError as error:
                raise QuotaError(f"the cpu controller of {root} is not handed down: {error.strerror}") from error
    else:
        raise QuotaError(f"no cpu controller in {root}")
    folder = parent / name
    try:
        folder.mkdir()
    except OSError as error:
        raise QuotaError(f"cannot make a group in {parent}: {error.strerror}") from error
    return Quota(folder=folder, parent=parent, version=version)
