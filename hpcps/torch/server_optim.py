"""Optimizers of torch.optim on the flat shards of a server, and their description for the wire.

Elementwise optimizers only: their update of an element needs nothing but that element, so a shard may cut
a tensor anywhere. Each piece of a shard is a parameter of its own, so a tensor without a gradient keeps its
moments and its step count, as on one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hpcps.errors import ConfigError, ProtocolError
from hpcps.plan import Shard, TensorSpec
from hpcps.update.rule import Flag, Rule, RuleSpec, RuleState, read_state
from hpcps.update.sgd import NumpySgd

__all__ = ["ELEMENTWISE", "TorchRule", "describe_optimizer", "make_rule", "option_row"]

RealArray: TypeAlias = npt.NDArray[np.floating[Any]]

ELEMENTWISE = {
    "ASGD": False,
    "Adadelta": True,
    "Adagrad": True,
    "Adam": True,
    "AdamW": True,
    "Adamax": True,
    "NAdam": True,
    "RAdam": True,
    "RMSprop": True,
    "Rprop": True,
    "SGD": False,
}
"""Optimizers that may work on a part of a tensor; True where the update does not grow with the gradient."""

_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers with a fused loop for the CPU: measured 1.3 to 3 times as fast, the same to a rounding."""

_LOCAL_FLAGS = ("capturable", "differentiable")
"""Settings that only make sense where the model is."""


def describe_optimizer(optimizer: torch.optim.Optimizer) -> RuleSpec:
    """An optimizer as the servers need it.

    Raises:
        ConfigError: it is not elementwise, or has a setting that servers cannot follow.
    """
    kind = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, kind, None) or kind not in ELEMENTWISE:
        raise ConfigError(
            f"cannot run {type(optimizer).__module__}.{kind} on servers: it is not one of torch.optim's elementwise"
            f" optimizers {', '.join(sorted(ELEMENTWISE))}; use one of these"
        )
    names = tuple(name for name, value in optimizer.defaults.items() for name in _option_names(name, value))
    flag_names = [name for name, value in optimizer.defaults.items() if not _option_names(name, value)]
    flags: list[tuple[tuple[str, Flag], ...]] = []
    for index, group in enumerate(optimizer.param_groups):
        for name in _LOCAL_FLAGS:
            if group.get(name):
                raise ConfigError(
                    f"cannot run {kind} on servers: parameter group {index} has {name}=True, which needs the model's"
                    " own process; leave it off"
                )
        flags.append(tuple((name, group[name]) for name in flag_names if name not in _LOCAL_FLAGS))
    rows = tuple(option_row(group, names) for group in optimizer.param_groups)
    return RuleSpec(kind=kind, option_names=names, options=rows, flags=tuple(flags))


def option_row(group: Mapping[str, Any], names: Sequence[str]) -> tuple[float, ...]:
    """The present numbers of a parameter group, in the order of the spec."""
    row = []
    for name in names:
        field, _, index = name.partition(".")
        value = group[field]
        row.append(float(value[int(index)] if index else value))
    return tuple(row)


def _option_names(name: str, value: object) -> tuple[str, ...]:
    """Names of the numbers in a setting: none for a flag, one for a number, one each for a tuple."""
    if isinstance(value, (tuple, list)):
        return tuple(f"{name}.{index}" for index in range(len(value)))
    if isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return (name,)
    return ()


def make_rule(shard: Shard, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> Rule:
    """The optimizer of a shard: torch's, or the numpy one for ``sgd``."""
    return NumpySgd(shard, spec, tensors=tensors) if spec.kind == "sgd" else TorchRule(shard, spec, tensors=tensors)


class TorchRule(Rule):
    """A torch optimizer on one flat shard.

    Args:
        shard: what it holds.
        spec: the worker's optimizer.
        tensors: all tensors of the model, for their parameter groups.

    Raises:
        ProtocolError: the spec names no elementwise optimizer.
    """

    def __init__(self, shard: Shard, spec: RuleSpec, *, tensors: Sequence[TensorSpec]) -> None:
        if spec.kind not in ELEMENTWISE:
            raise ProtocolError(f"cannot make a server optimizer {spec.kind!r}; need one of {sorted(ELEMENTWISE)}")
        self.adaptive = ELEMENTWISE[spec.kind]
        self._spec = spec
        self._shard = shard
        self._pieces = [(piece.offset, piece.offset + piece.numel) for piece in shard.pieces]
        self._group_of = [tensors[piece.tensor].param_group for piece in shard.pieces]
        self._build(np.zeros(shard.numel, shard.dtype), fused=True)

    def adopt(self, values: RealArray) -> None:
        """Live in this memory; see `Rule.adopt`. One process computes what plain torch does, to the bit."""
        self._build(values, fused=False)

    def _build(self, values: RealArray, *, fused: bool) -> None:
        self.values = values
        flat = torch.from_numpy(values)
        self._params = [flat[begin:end] for begin, end in self._pieces]
        groups = []
        spec = self._spec
        faster: dict[str, Flag] = {"fused": True} if fused and spec.kind in _FUSED else {}
        for index, (row, flags) in enumerate(zip(spec.options, spec.flags, strict=True)):
            params = [p for p, group in zip(self._params, self._group_of, strict=True) if group == index]
            if params:
                options = {**_settings(spec.option_names, row), **_choose(dict(flags), faster)}
                groups.append({"params": params, "hpcps_group": index, **options})
        self._optimizer: torch.optim.Optimizer = getattr(torch.optim, spec.kind)(groups)

    def step(
        self,
        gradient: RealArray,
        *,
        present: Sequence[bool],
        hyper: Sequence[Sequence[float]],
        lr_scale: float,
    ) -> None:
        if len(present) != len(self._params) or gradient.shape != self.values.shape:
            raise ProtocolError(
                f"cannot step: got {len(present)} pieces and shape {gradient.shape}, need {len(self._params)} and"
                f" {self.values.shape}; run the same plan on every rank"
            )
        if not all(math.isfinite(number) for row in hyper for number in row):
            raise ProtocolError(f"cannot step: an option of {hyper} is not finite; look at the scheduler")
        flat = torch.from_numpy(gradient)
        for group in self._optimizer.param_groups:
            group.update(_settings(self._spec.option_names, hyper[group["hpcps_group"]]))
            group["lr"] *= lr_scale
        for param, (begin, end), has in zip(self._params, self._pieces, present, strict=True):
            param.grad = flat[begin:end] if has else None
        self._optimizer.step()
        for param in self._params:
            param.grad = None

    def state(self) -> RuleState:
        found: dict[str, npt.NDArray[Any]] = {}
        for index, param in enumerate(self._params):
            for name, value in self._optimizer.state.get(param, {}).items():
                if value is not None:
                    found[f"{index}/{name}"] = value.detach().numpy()
        return found

    def restore(self, state: RuleState) -> None:
        for param, arrays in zip(self._params, read_state(state, self._shard.pieces), strict=True):
            if arrays:
                self._optimizer.state[param] = {name: torch.from_numpy(array) for name, array in arrays.items()}


def _choose(flags: dict[str, Flag], faster: dict[str, Flag]) -> dict[str, Flag]:
    """The user's flags; torch's fused loop where the user left the choice of a loop to torch."""
    return flags | faster if flags.get("fused") is None and flags.get("foreach") is None else flags


def _settings(names: Sequence[str], row: Sequence[float]) -> dict[str, Any]:
    """Numbers back in the form that torch wants."""
    settings: dict[str, Any] = {}
    for name, number in zip(names, row, strict=True):
        field, _, index = name.partition(".")
        if index:
            settings[field] = (*settings.get(field, ()), number)
        else:
            settings[field] = number
    return settings
