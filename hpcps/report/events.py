"""Read the event files of a run into typed values.

A run's folder holds one file a rank, ``events-r000.jsonl`` and so on. A line is one JSON object:

    {"v": 2, "t_s": 12.5, "rank": 2, "role": "worker", "event": "step", "step": 7, ...}

``t_s`` is wall-clock time at the end of what the event tells, on one clock for all ranks of a host. Events that this
module does not know are passed over, so that a newer writer may add some. Everything else that does not fit
is an error which names file and line; nothing is guessed or repaired.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hpcps.config import EmulateConfig
from hpcps.errors import ConfigError, DataError
from hpcps.report.event_types import (
    CapacityEvent,
    ChangeEvent,
    CodecEvent,
    CostsEvent,
    GroupingEvent,
    GuardEvent,
    LinksEvent,
    MovedEvent,
    RouteEvent,
    RunEvent,
    RunEvents,
    ServerEvent,
    SharesEvent,
    StepEvent,
    SummaryEvent,
)

__all__ = [
    "CapacityEvent",
    "ChangeEvent",
    "CodecEvent",
    "CostsEvent",
    "EVENT_VERSION",
    "GroupingEvent",
    "GuardEvent",
    "LinksEvent",
    "MovedEvent",
    "RouteEvent",
    "RunEvent",
    "RunEvents",
    "ServerEvent",
    "SharesEvent",
    "StepEvent",
    "SummaryEvent",
    "read_run",
]

EVENT_VERSION = 2
"""The version of the event format that this module reads."""

T = TypeVar("T")

_FILE_NAME = re.compile(r"events-r(\d{3,})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One line of an event file; its getters check what they hand out."""

    place: str
    fields: dict[str, Any]

    def fail(self, got: str, need: str) -> DataError:
        """The error for a line that does not fit."""
        return DataError(
            f"cannot read events of {self.place}: got {got}, need {need}; remove the line or write it again",
            op="read_run",
        )

    def take(self, name: str) -> Any:
        """A field of any type."""
        if name not in self.fields:
            raise self.fail(f"no field {name!r}", f"it in event {self.fields.get('event')!r}")
        return self.fields[name]

    def number(self, name: str) -> float:
        """A finite number."""
        return self._number(self.take(name), name)

    def integer(self, name: str) -> int:
        """A whole number, 0 or more."""
        return self._integer(self.take(name), name)

    def text(self, name: str) -> str:
        """A string."""
        value = self.take(name)
        if not isinstance(value, str):
            raise self.fail(f"{name} = {value!r}", "a string")
        return value

    def items(self, name: str) -> list[Any]:
        """A list."""
        return self._list(self.take(name), name)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        return tuple(self._number(value, name) for value in self.items(name))

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(self._integer(value, name) for value in self.items(name))

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """A list of lists of whole numbers."""
        return tuple(tuple(self._integer(rank, name) for rank in self._list(group, name)) for group in self.items(name))

    def same_length(self, *names: str) -> None:
        """Check that lists belong together."""
        sizes = [len(self.items(name)) for name in names]
        if len(set(sizes)) > 1:
            raise self.fail(f"lists {', '.join(names)} of {sizes} items", "equal lengths")

    def _list(self, value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.fail(f"{name} = {value!r}", "a list")
        return value

    def _number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(f"{name} = {value!r}", "a finite number")
        return float(value)

    def _integer(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(f"{name} = {value!r}", "a whole number, 0 or more")
        return value


def read_run(folder: Path | str) -> RunEvents:
    """Read every event file of a run.

    The last line of a file is left out if it has no line end: its rank was still writing, or was killed.

    Args:
        folder: the folder that the run logged to.

    Raises:
        DataError: the folder holds no event file, or a line does not fit; names file and line.
    """
    root = Path(folder)
    paths = sorted(path for path in root.glob("events-r*.jsonl") if _FILE_NAME.fullmatch(path.name))
    if not paths:
        raise DataError(
            f"cannot read run {str(root)!r}: got no file, need events-r000.jsonl and so on; pass the run's --log-dir"
        )
    found: dict[str, list[Any]] = {name: [] for name in _READERS}
    for line in sorted((line for path in paths for line in _lines(path)), key=lambda line: line.number("t_s")):
        kind = line.text("event")
        if kind in found:
            found[kind].append(_READERS[kind](line))
    return RunEvents(
        folder=root,
        steps=tuple(sorted(found["step"], key=lambda step: (step.rank, step.step))),
        shares=tuple(found["shares"]),
        groupings=tuple(found["grouping"]),
        capacities=tuple(found["capacity"]),
        links=tuple(found["links"]),
        changes=tuple(found["change"]),
        costs=tuple(found["costs"]),
        routes=tuple(found["route"]),
        moves=tuple(found["moved"]),
        guards=tuple(found["guard"]),
        codecs=tuple(found["codec"]),
        servers=tuple(found["server"]),
        runs=tuple(found["run"]),
        summaries=tuple(found["summary"]),
    )


def _lines(path: Path) -> Iterator[_Line]:
    match = _FILE_NAME.fullmatch(path.name)
    assert match is not None
    rank = int(match[1])
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        line = _Line(place=f"{str(path)!r} line {number}", fields={})
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise line.fail(f"{text[:60]!r}", "one JSON object") from error
        if not isinstance(fields, dict):
            raise line.fail(f"{text[:60]!r}", "one JSON object")
        line = _Line(place=line.place, fields=fields)
        if line.take("v") != EVENT_VERSION:
            raise line.fail(f"version {fields['v']!r}", f"version {EVENT_VERSION}")
        if line.integer("rank") != rank:
            raise line.fail(f"rank {fields['rank']}", f"rank {rank} as in the file's name")
        if line.text("role") not in ("worker", "server"):
            raise line.fail(f"role {fields['role']!r}", "worker or server")
        yield line


def _plain(kind: type[T], *, same_length: tuple[str, ...] = ()) -> Callable[[_Line], T]:
    """Reader of an event whose fields are those of a dataclass, in name and type; one with a default may be missing."""
    getters = {name: _GETTERS[hint] for name, hint in get_type_hints(kind).items()}
    optional = {
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default is not dataclasses.MISSING
    }

    def read(line: _Line) -> T:
        if same_length:
            line.same_length(*same_length)
        present = {name: getter for name, getter in getters.items() if name in line.fields or name not in optional}
        return kind(**{name: getter(line, name) for name, getter in present.items()})

    return read


def _run(line: _Line) -> RunEvent:
    config = line.take("config")
    emulate = config.get("emulate") if isinstance(config, dict) else None
    if not isinstance(emulate, dict):
        raise line.fail(f"config = {config!r}", "the run's settings with their section emulate")
    settings = _Line(place=line.place, fields=config)
    heterogeneous = settings.take("heterogeneous")
    if not isinstance(heterogeneous, bool):
        raise line.fail(f"heterogeneous = {heterogeneous!r}", "true or false")
    script = emulate.get("script", [])
    try:
        changes = EmulateConfig(script=tuple(map(str, script))).parsed_script()
    except (ConfigError, TypeError) as error:
        raise line.fail(f"emulate.script = {script!r}", "changes such as 300:0=1") from error
    return RunEvent(
        sync_mode=settings.text("sync_mode"),
        heterogeneous=heterogeneous,
        speeds=_Line(place=line.place, fields=emulate).numbers("speeds"),
        changes=changes,
    )


def _summary(line: _Line) -> SummaryEvent:
    head = ("v", "t_s", "rank", "role", "event")
    values = {name: value for name, value in line.fields.items() if name not in head and not isinstance(value, str)}
    return SummaryEvent(
        rank=line.integer("rank"),
        values=tuple((name, line.number(name)) for name in sorted(values)),
    )


_GETTERS: dict[Any, Callable[[_Line, str], Any]] = {
    float: _Line.number,
    int: _Line.integer,
    str: _Line.text,
    tuple[int, ...]: _Line.integers,
    tuple[float, ...]: _Line.numbers,
    tuple[tuple[int, ...], ...]: _Line.groups,
}
_READERS: dict[str, Callable[[_Line], Any]] = {
    "capacity": _plain(CapacityEvent, same_length=("workers", "fixed_s", "per_sample_s")),
    "change": _plain(ChangeEvent),
    "codec": _plain(CodecEvent),
    "costs": _plain(CostsEvent),
    "grouping": _plain(GroupingEvent),
    "guard": _plain(GuardEvent),
    "links": _plain(
        LinksEvent, same_length=("push_latency_s", "push_bytes_per_s", "pull_latency_s", "pull_bytes_per_s")
    ),
    "moved": _plain(MovedEvent),
    "route": _plain(RouteEvent, same_length=("keys", "sources", "servers")),
    "run": _run,
    "server": _plain(ServerEvent),
    "shares": _plain(SharesEvent, same_length=("counts", "workers")),
    "step": _plain(StepEvent),
    "summary": _summary,
}
