"""Layered settings: from names and texts to one checked ``RunConfig`` that knows where each value comes from.

One precedence, lowest first: defaults, the script's ``hpcps.init(...)``, the TOML file, the command line.
Within a layer the later value wins. Refuses what it does not know: a misspelled name is an error with the
nearest name, never a default in silence. Nothing read here is evaluated.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpcps.config import RunConfig, describe
from hpcps.errors import ConfigError
from hpcps.units import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "CONFIG_VARIABLE",
    "Layer",
    "Resolved",
    "document",
    "file_layers",
    "load_toml",
    "names",
    "nested_layer",
    "parse_assignment",
    "pending",
    "resolve",
    "set_pending",
    "show",
]

CONFIG_VARIABLE = "HPCPS_CONFIG"
"""Environment variable with the path of a TOML file, read where ``--config`` is not given."""

DEFAULT_SOURCE = "default"

_TRUE_WORDS = ("on", "true", "yes", "1")
_FALSE_WORDS = ("off", "false", "no", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Settings from one place.

    Args:
        source: the place, as a user knows it: ``script``, ``file run.toml``, ``command line``.
        values: dotted name to value; text is read by the type of the setting.
    """

    source: str
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A checked configuration, and the source of every setting in it, by dotted name."""

    config: RunConfig
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One setting: ``section`` is empty at the top level; ``kind`` is the type of its field."""

    name: str
    section: str
    leaf: str
    kind: object
    doc: str


def _settings_of(section: str, owner: type) -> Iterator[_Setting]:
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _settings_of(field.name, hints[field.name])
        else:
            name = f"{section}.{field.name}" if section else field.name
            doc = describe(owner, field.name)
            yield _Setting(name=name, section=section, leaf=field.name, kind=hints[field.name], doc=doc)


_SETTINGS: Mapping[str, _Setting] = MappingProxyType({s.name: s for s in _settings_of("", RunConfig)})
_SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        field.name: type(field.default)
        for field in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(field.default)
    }
)


def names() -> tuple[str, ...]:
    """All dotted names, in the order of ``RunConfig``."""
    return tuple(_SETTINGS)


def document(name: str) -> str:
    """The line of documentation of a setting.

    Raises:
        ConfigError: no setting has this name.
    """
    return _find(name, "caller").doc


def _find(name: str, source: str) -> _Setting:
    if name in _SETTINGS:
        return _SETTINGS[name]
    where = f"cannot accept setting {name!r} of the {source}"
    if name in _SECTIONS:
        inside = ", ".join(n for n in _SETTINGS if n.startswith(f"{name}."))
        raise ConfigError(f"{where}: it is a section, need one setting; set one of {inside}")
    near = _nearest(name)
    if not near:
        raise ConfigError(f"{where}: unknown, and no name is near it; list all with hpcps run --show-config")
    section = _SETTINGS[near].section
    place = f"section {section!r}" if section else "the top level"
    raise ConfigError(f"{where}: unknown, nearest is {near!r} in {place}; write {near}")


def _nearest(name: str) -> str:
    """The best guess for an unknown name; a right name in the wrong section comes first. Empty: no guess."""
    leaf = name.rpartition(".")[2]
    misplaced = [s.name for s in _SETTINGS.values() if s.leaf == leaf]
    if misplaced:
        return difflib.get_close_matches(name, misplaced, n=1, cutoff=0.0)[0]
    whole = difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=0.7)
    if whole:
        return whole[0]
    leaves = {s.leaf: s.name for s in reversed(list(_SETTINGS.values()))}
    near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
    return leaves[near[0]] if near else ""


# Readers: each takes a value or text and gives the value of its kind, or raises ValueError or ConfigError.


def _read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE_WORDS + _FALSE_WORDS:
        return value.strip().lower() in _TRUE_WORDS
    raise ValueError


def _read_int(value: object) -> int:
    if isinstance(value, str):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError
    return int(value)


def _read_bytes(value: object) -> int:
    return parse_bytes(value) if isinstance(value, str) else _read_int(value)


def _read_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _read_text(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ValueError
    return value


def _items(value: object, separators: str) -> Sequence[object]:
    if isinstance(value, str):
        return [item.strip() for item in re.split(separators, value)] if value.strip() else []
    if isinstance(value, (list, tuple)):
        return value
    raise ValueError


def _read_floats(value: object) -> tuple[float, ...]:
    return tuple(_read_float(item) for item in _items(value, "[:,]"))


def _read_ints(value: object) -> tuple[int, ...]:
    return tuple(_read_int(item) for item in _items(value, "[:,]"))


def _read_texts(value: object) -> tuple[str, ...]:
    texts = tuple(_read_text(item) for item in _items(value, ","))
    if not all(texts):
        raise ValueError
    return texts


_READERS: Mapping[object, tuple[Callable[[object], object], str, str]] = {
    bool: (_read_bool, "on or off", "on"),
    int: (_read_int, "a whole number", "2"),
    float: (_read_float, "a finite number", "0.5"),
    str: (_read_text, "text", "auto"),
    tuple[float, ...]: (_read_floats, "finite numbers", "3:2:1:1"),
    tuple[int, ...]: (_read_ints, "whole numbers", "64:64:0:0"),
    tuple[str, ...]: (_read_texts, "names separated by commas", "node1,node2"),
}
_BYTES_READER = (_read_bytes, "a size in bytes", "4MiB")


def _read(setting: _Setting, value: object, source: str) -> object:
    in_bytes = setting.kind is int and setting.leaf.endswith("_bytes")
    reader, need, example = _BYTES_READER if in_bytes else _READERS[setting.kind]
    try:
        return reader(value)
    except (ValueError, ConfigError):
        raise ConfigError(
            f"cannot accept {setting.name} of the {source}: got {value!r}, need {need};"
            f" write for example {setting.name}={example}"
        ) from None


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Lay the layers over the defaults, lowest first, and check the outcome.

    Raises:
        ConfigError: a name is unknown, a value is of the wrong type or out of range; names the source.
    """
    values: dict[str, object] = {}
    sources = dict.fromkeys(_SETTINGS, DEFAULT_SOURCE)
    for layer in layers:
        for name, value in layer.values.items():
            values[name] = _read(_find(name, layer.source), value, layer.source)
            sources[name] = layer.source
    sections = {name: _build(name, kind, values, sources) for name, kind in _SECTIONS.items()}
    return Resolved(config=_build("", RunConfig, values, sources, **sections), sources=MappingProxyType(sources))


def _build(
    section: str, kind: type, values: Mapping[str, object], sources: Mapping[str, str], **parts: object
) -> typing.Any:
    """Make one dataclass; a value out of range is reported with the sources of what was set beside it."""
    given = {n: v for n, v in values.items() if _SETTINGS[n].section == section}
    try:
        return kind(**{_SETTINGS[n].leaf: v for n, v in given.items()}, **parts)
    except ConfigError as error:
        origin = ", ".join(f"{n} is set by the {sources[n]}" for n in given)
        raise ConfigError(f"{error} ({origin})") from None


def nested_layer(source: str, values: Mapping[str, object]) -> Layer:
    """Make a layer from values in which a section is a mapping or one of the config dataclasses.

    Args:
        source: the place, see ``Layer``.
        values: such as ``{"seed": 3, "comm": {"mode": "rma"}, "window": WindowConfig(mad_k=2)}``.
    """
    flat: dict[str, object] = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            inner = nested_layer(source, value).values
            flat.update({f"{name}.{leaf}": item for leaf, item in inner.items()})
        else:
            flat[name] = value
    return Layer(source=source, values=MappingProxyType(flat))


def load_toml(path: str | Path) -> Layer:
    """Read a TOML file; its tables are the sections.

    Raises:
        ConfigError: the file cannot be opened, or is no TOML; names the first place that is wrong.
    """
    try:
        with open(path, "rb") as stream:
            values = tomllib.load(stream)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot read settings file {str(path)!r}: {reason}; correct its path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read settings file {str(path)!r}: {error}; need TOML, correct it") from error
    return nested_layer(f"file {path}", values)


def file_layers(path: str | None, environ: Mapping[str, str]) -> tuple[Layer, ...]:
    """The layer of the settings file: ``path`` where given, else what ``HPCPS_CONFIG`` names, else none."""
    chosen = path or environ.get(CONFIG_VARIABLE, "")
    return (load_toml(chosen),) if chosen else ()


def parse_assignment(text: str) -> tuple[str, str]:
    """Split ``a.b=c`` into name and value. The name may be written with hyphens.

    Raises:
        ConfigError: no ``=``, or nothing before it.
    """
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise ConfigError(f"cannot read assignment {text!r}: need name=value; write for example comm.mode=rma")
    return name, value.strip()


def show(resolved: Resolved) -> str:
    """One line a setting, ``name = value  # source``. The text is TOML that ``load_toml`` reads back."""
    lines = [(f"{name} = {_literal(_value(resolved.config, name))}", resolved.sources[name]) for name in _SETTINGS]
    width = max(len(left) for left, _ in lines)
    return "\n".join(f"{left:<{width}}  # {' '.join(source.split())}" for left, source in lines)


def _value(config: RunConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _literal(value: object) -> str:
    """A TOML literal. JSON's strings are TOML's, but for DEL, which TOML wants escaped."""
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


_pending: tuple[Layer, ...] | None = None


def set_pending(layers: Sequence[Layer] | None) -> None:
    """Keep the layers that stand over the script's own, for the ``hpcps.init`` of a script run in this process.

    Args:
        layers: lowest first; None forgets them.
    """
    global _pending
    _pending = None if layers is None else tuple(layers)


def pending() -> tuple[Layer, ...]:
    """The layers over the script's own: those that were set, else the file that ``HPCPS_CONFIG`` names.

    Raises:
        ConfigError: that file cannot be read.
    """
    return file_layers(None, os.environ) if _pending is None else _pending
