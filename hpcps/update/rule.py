"""What a server-side optimizer is, and its description as it crosses the wire. It keeps no list of rules."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcps.errors import ConfigError, ProtocolError
from hpcps.native import RealArray
from hpcps.plan import Piece

__all__ = ["Flag", "Rule", "RuleSpec", "RuleState", "read_state"]

RuleState: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""What a rule remembers between steps, by ``<index of the piece>/<name>``: one number, or one an element of the piece.
Names are torch's, for example ``2/exp_avg`` and ``2/step``."""

Flag: TypeAlias = bool | int | float | str | None
"""A setting that is chosen once, before training."""


class Rule(ABC):
    """The optimizer of one shard.

    Attributes:
        adaptive: True where the size of an update does not follow the size of the gradient (Adam and its kin),
            so that the decay of a late gradient must act on the learning rate.
        values: the live parameters of the shard, one-dimensional, in the shard's dtype. The rule owns the array;
            its caller writes the first values into it and reads it between steps.
    """

    adaptive: bool
    values: RealArray

    @abstractmethod
    def adopt(self, values: RealArray) -> None:
        """Live in this memory from now on; before the first step only.

        Args:
            values: the first values, of the shape and dtype of ``values``, writable.
        """

    @abstractmethod
    def step(
        self, gradient: RealArray, *, present: Sequence[bool], hyper: Sequence[Sequence[float]], lr_scale: float
    ) -> None:
        """Update the parameters once.

        Args:
            gradient: mean gradient of the shard, in its dtype; it is not written.
            present: one entry a piece of the shard: whether anyone had a gradient for it. A piece without is left
                alone: no weight decay, no momentum, no step counted.
            hyper: for each parameter group the numbers that `RuleSpec.option_names` names, in that order.
            lr_scale: factor of every learning rate, above 0 to 1.

        Raises:
            ProtocolError: an argument does not fit the shard; nothing was changed.
        """

    @abstractmethod
    def state(self) -> RuleState:
        """What the rule remembers besides ``values``; the arrays are its own, as they are until the next step."""

    @abstractmethod
    def restore(self, state: RuleState) -> None:
        """Go on from what `state` gave, to the bit; before the first step only. The arrays are copied.

        Raises:
            ProtocolError: an array does not fit the shard; nothing was changed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSpec:
    """Which rule, with what settings.

    Args:
        kind: name of the rule, for example ``sgd``.
        option_names: the numbers of a parameter group that may change while training, each named once.
        options: their first values, one row a parameter group, finite.
        flags: the settings of each parameter group that stay, as (name, value) pairs, each name once.
    """

    kind: str
    option_names: tuple[str, ...]
    options: tuple[tuple[float, ...], ...]
    flags: tuple[tuple[tuple[str, Flag], ...], ...]

    def __post_init__(self) -> None:
        num_names, num_groups = len(self.option_names), len(self.options)
        _need(bool(self.kind), "its kind is empty", "name the rule")
        _need(len(set(self.option_names)) == num_names, f"options {self.option_names} repeat", "name each once")
        _need(
            num_groups >= 1 and len(self.flags) == num_groups,
            f"{num_groups} rows of options and {len(self.flags)} of flags, need as many of both and at least 1",
            "give one row of each for every parameter group",
        )
        for index, row in enumerate(self.options):
            _need(
                len(row) == num_names,
                f"group {index} has {len(row)} options, need {num_names}",
                f"give {', '.join(self.option_names)}",
            )
            for name, value in zip(self.option_names, row, strict=True):
                _need(math.isfinite(value), f"group {index} has {name} = {value}, need a finite number", "correct it")
        for index, flags in enumerate(self.flags):
            names = [name for name, _ in flags]
            _need(len(set(names)) == len(names), f"flags of group {index} repeat in {names}", "name each once")
            for name, setting in flags:
                finite = not isinstance(setting, float) or math.isfinite(setting)
                _need(finite, f"group {index} has {name} = {setting}, need a finite number", "correct it")

    def to_json(self) -> str:
        """Write the spec as JSON text; `from_json` gives back an equal spec."""
        fields = {
            "kind": self.kind,
            "option_names": self.option_names,
            "options": self.options,
            "flags": [dict(flags) for flags in self.flags],
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RuleSpec:
        """Read what `to_json` wrote.

        Raises:
            ProtocolError: the text is no spec; the message names the first field that is wrong.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _bad_text(f"{type(error).__name__}: {error}, need JSON") from None
        if not isinstance(fields, dict) or set(fields) != {"kind", "option_names", "options", "flags"}:
            got = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
            raise _bad_text(f"{got}, need an object of kind, option_names, options and flags")
        if not isinstance(fields["kind"], str):
            raise _bad_text(f"kind is {fields['kind']!r}, need text")
        try:
            return cls(
                kind=fields["kind"],
                option_names=_read_names(fields["option_names"]),
                options=tuple(_read_options(row) for row in _read_list(fields["options"], "options")),
                flags=tuple(_read_flags(row) for row in _read_list(fields["flags"], "flags")),
            )
        except ConfigError as error:
            raise _bad_text(str(error)) from None


def read_state(state: RuleState, pieces: Sequence[Piece]) -> list[dict[str, npt.NDArray[Any]]]:
    """The names and arrays of each piece.

    Raises:
        ProtocolError: a name is of no piece, or an array of another size.
    """
    found: list[dict[str, npt.NDArray[Any]]] = [{} for _ in pieces]
    for name, array in state.items():
        number, _, word = name.partition("/")
        index = int(number) if number.isascii() and number.isdigit() else -1
        if not word or not 0 <= index < len(pieces) or array.shape not in ((), (pieces[index].numel,)):
            raise ProtocolError(
                f"cannot restore an optimizer: got {name!r} of shape {array.shape}, need <piece>/<name> of one of"
                f" {len(pieces)} pieces and one number or one an element; run one version of hpcps on every rank",
                op="restore",
            )
        found[index][word] = np.array(array)
    return found


def _need(ok: bool, got: str, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"cannot describe a rule: {got}; {remedy}")


def _bad_text(got: str) -> ProtocolError:
    return ProtocolError(f"cannot read a rule: {got}; run one version of hpcps on every rank", op="read rule")


def _read_list(value: object, field: str) -> list[object]:
    if not isinstance(value, list):
        raise _bad_text(f"{field} has {value!r}, need a list")
    return value


def _read_names(value: object) -> tuple[str, ...]:
    names = _read_list(value, "option_names")
    for name in names:
        if not isinstance(name, str):
            raise _bad_text(f"option_names has {name!r}, need text")
    return tuple(str(name) for name in names)


def _read_options(value: object) -> tuple[float, ...]:
    row: list[float] = []
    for number in _read_list(value, "options"):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise _bad_text(f"options has {number!r}, need a number")
        try:
            row.append(float(number))
        except OverflowError:
            raise _bad_text("options has a number too large for a float") from None
    return tuple(row)


def _read_flags(value: object) -> tuple[tuple[str, Flag], ...]:
    if not isinstance(value, dict):
        raise _bad_text(f"flags has {value!r}, need an object for each group")
    flags: list[tuple[str, Flag]] = []
    for name, setting in value.items():
        if setting is not None and not isinstance(setting, bool | int | float | str):
            raise _bad_text(f"flag {name} is {setting!r}, need a number, text, true, false or null")
        flags.append((str(name), setting))
    return tuple(flags)
