"""How much memory this process may still use: what the host has left, within the limits of its control groups.

Only reads /proc and /sys. Where they say nothing, as on other systems than Linux, the answer is 0: unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcps.units import KiB

__all__ = ["free_memory"]


def free_memory(root: Path = Path("/"), *, parts: int = 1) -> int:
    """Bytes that may still be used, 0: unknown.

    Args:
        root: folder that holds ``proc`` and ``sys``.
        parts: processes of the host that need as much, this one included; each is told its part.
    """
    bounds = [*_available(root), *_left_in_groups(root)]
    return max(1, min(bounds) // parts) if bounds else 0


def _available(root: Path) -> Iterator[int]:
    """What the kernel would give out without swapping."""
    for line in _read(root / "proc" / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemAvailable" and words and words[0].isdigit():
            yield int(words[0]) * KiB


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left under the limit of each control group around this process, of version 1 or 2.

    File pages that the kernel may drop count as used in these numbers; they are taken off.
    """
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            folder, names = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder = mounted / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = folder / path.strip("/")
        for group in (inner, *inner.parents):
            limit, used = (_read(group / name).strip() for name in names[:2])
            if limit.isdigit() and used.isdigit():
                yield int(limit) - int(used) + _of_stat(group, names[2])
            if group == folder:
                break


def _of_stat(group: Path, name: str) -> int:
    for line in _read(group / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    """A small file; empty where there is none, or none that may be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
