"""Events of a rank: one JSON object a line, versioned, with units in the field names.

``t_s`` is the wall clock, so that the files of several ranks can be laid side by side.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType

__all__ = ["EVENT_VERSION", "EventLog"]

EVENT_VERSION = 2


class EventLog:
    """Writes ``events-rNNN.jsonl``; without a folder it writes nothing.

    Args:
        folder: of the run.
        rank: world rank.
        role: server or worker.
    """

    def __init__(self, folder: Path | None, *, rank: int, role: str) -> None:
        self._place = {"rank": rank, "role": role}
        self._file = None
        if folder is not None:
            path = folder / f"events-r{rank:03d}.jsonl"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._file = os.fdopen(descriptor, "w", buffering=1)

    def write(self, event: str, **fields: object) -> None:
        """Add an event: one line, written at once, so that it outlives an abort."""
        if self._file is not None:
            line = {"v": EVENT_VERSION, "t_s": round(time.time(), 6), **self._place, "event": event, **fields}
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Write out and end; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
