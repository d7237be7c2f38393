"""Logging of a rank: its own file, and the console by the rule: rank 0 from INFO, every rank from WARNING."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

__all__ = ["open_logs", "run_dir"]

_FORMAT = "%(asctime)s %(levelname).1s %(place)s %(name)s: %(message)s"


def run_dir(setting: str, *, world_size: int) -> Path | None:
    """The folder of a run, made private to its user; None where nothing is to be written.

    Args:
        setting: ``log.dir``.
        world_size: a world of one writes nothing unless asked.
    """
    name = setting or ("hpcps-run" if world_size > 1 else "")
    if not name:
        return None
    path = Path(name)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def open_logs(folder: Path | None, *, rank: int, world_size: int, host: str, role: str, level: str) -> None:
    """Set up the ``hpcps`` logger of this rank. A second call replaces the first.

    Args:
        folder: where ``rank-NNN.log`` goes, None for no file.
        rank: world rank.
        world_size: number of ranks.
        host: host name.
        role: server or worker.
        level: console level of rank 0.
    """
    place = f"r{rank:03d}/{world_size:03d} {host} {role}"

    def mark(record: logging.LogRecord) -> bool:
        record.place = place
        return True

    logger = logging.getLogger("hpcps")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(level.upper() if rank == 0 else logging.WARNING)
    handlers: list[logging.Handler] = [console]
    if folder is not None:
        path = folder / f"rank-{rank:03d}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        handlers.append(logging.StreamHandler(os.fdopen(descriptor, "a", buffering=1)))
    for handler in handlers:
        handler.addFilter(mark)
        handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if level == "debug" else logging.INFO)
    logger.propagate = False
