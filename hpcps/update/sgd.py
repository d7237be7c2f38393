"""Plain SGD in numpy, for servers that hold no torch. It computes what ``torch.optim.SGD`` does, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpcps.errors import ConfigError, ProtocolError
from hpcps.native import RealArray
from hpcps.plan import Piece, Shard, TensorSpec
from hpcps.update.rule import Rule, RuleSpec, RuleState, read_state

__all__ = ["NumpySgd"]

_OPTIONS = ("lr", "momentum", "dampening", "weight_decay")
_FLAGS = ("nesterov", "maximize")
_BUFFER = "momentum_buffer"
_IGNORED_FLAGS = ("foreach", "fused", "differentiable", "capturable")
"""They choose torch's implementation, not the result."""


class NumpySgd(Rule):
    """SGD with momentum, dampening, Nesterov momentum, weight decay and maximize, piece by piece.

    Args:
        shard: what this rule owns; its values start at zero.
        spec: of kind ``sgd``, with the options lr, momentum, dampening and weight_decay in any order.
        tensors: all tensors of the model, indexed by `Piece.tensor`.

    Raises:
        ConfigError: the spec lacks an option, or has a setting that this rule does not know.
    """

    adaptive = False

    def __init__(self, shard: Shard, spec: RuleSpec, *, tensors: Sequence[TensorSpec]) -> None:
        _check_spec(spec)
        self.values: RealArray = np.zeros(shard.numel, dtype=shard.dtype)
        self._shard = shard
        self._num_groups = len(spec.options)
        self._column = {name: spec.option_names.index(name) for name in _OPTIONS}
        self._num_options = len(spec.option_names)
        self._flags = [dict(flags) for flags in spec.flags]
        self._groups = [tensors[piece.tensor].param_group for piece in shard.pieces]
        self._started = [False] * len(shard.pieces)  # whether a piece has momentum from a step before
        self._momentum: RealArray | None = None
        longest = max((piece.numel for piece in shard.pieces), default=0)
        self._direction: RealArray = np.empty(longest, dtype=shard.dtype)
        self._term: RealArray = np.empty(longest, dtype=shard.dtype)
        for group in self._groups:
            if not 0 <= group < self._num_groups:
                raise ConfigError(
                    f"cannot build sgd for shard {shard.key}: a tensor is in group {group}, the rule has"
                    f" {self._num_groups}; describe every parameter group",
                    key=shard.key,
                )

    def adopt(self, values: RealArray) -> None:
        """Live in this memory; see `Rule.adopt`."""
        self.values = values

    def step(
        self, gradient: RealArray, *, present: Sequence[bool], hyper: Sequence[Sequence[float]], lr_scale: float
    ) -> None:
        """Update the pieces that are present; see `Rule.step`."""
        self._check(gradient, present, hyper)
        with np.errstate(all="ignore"):  # an infinite or undefined gradient spreads silently, as in torch
            for index, piece in enumerate(self._shard.pieces):
                if present[index]:
                    self._step_piece(index, piece, gradient, hyper[self._groups[index]], lr_scale)

    def state(self) -> RuleState:
        """The momentum of the pieces that have one; see `Rule.state`."""
        if self._momentum is None:
            return {}
        return {
            f"{index}/{_BUFFER}": self._momentum[piece.offset : piece.offset + piece.numel]
            for index, piece in enumerate(self._shard.pieces)
            if self._started[index]
        }

    def restore(self, state: RuleState) -> None:
        """Take the momentum that `state` gave; see `Rule.restore`."""
        pieces = self._shard.pieces
        found = read_state(state, pieces)
        for index, arrays in enumerate(found):
            dtypes = {name: array.dtype for name, array in arrays.items()}
            if arrays and (dtypes != {_BUFFER: self.values.dtype} or arrays[_BUFFER].shape != (pieces[index].numel,)):
                self._refuse(f"{dtypes} for piece {index}, need {_BUFFER} in {self.values.dtype}", op="restore")
        for index, arrays in enumerate(found):
            if arrays:
                self._started[index] = True
                self._buffers()[pieces[index].offset : pieces[index].offset + pieces[index].numel] = arrays[_BUFFER]

    def _step_piece(self, index: int, piece: Piece, gradient: RealArray, row: Sequence[float], lr_scale: float) -> None:
        where = slice(piece.offset, piece.offset + piece.numel)
        values, direction, term = self.values[where], self._direction[: piece.numel], self._term[: piece.numel]
        lr, momentum, dampening, weight_decay = (float(row[self._column[name]]) for name in _OPTIONS)
        flags = self._flags[self._groups[index]]
        if flags.get("maximize"):
            np.negative(gradient[where], out=direction)
        else:
            np.copyto(direction, gradient[where])
        if weight_decay != 0:
            np.multiply(values, weight_decay, out=term)
            direction += term
        if momentum != 0:
            buffer = self._remember(index, where, momentum, dampening)
            if flags.get("nesterov"):
                np.multiply(buffer, momentum, out=term)
                direction += term
            else:
                direction = buffer
        np.multiply(direction, lr * lr_scale, out=term)
        values -= term

    def _remember(self, index: int, where: slice, momentum: float, dampening: float) -> RealArray:
        """Fold the direction at hand into the piece's momentum and return that."""
        buffer = self._buffers()[where]
        direction, term = self._direction[: buffer.size], self._term[: buffer.size]
        if self._started[index]:
            buffer *= momentum
            np.multiply(direction, 1 - dampening, out=term)
            buffer += term
        else:
            np.copyto(buffer, direction)
            self._started[index] = True
        return buffer

    def _buffers(self) -> RealArray:
        if self._momentum is None:
            self._momentum = np.zeros(self._shard.numel, dtype=self._shard.dtype)
        return self._momentum

    def _check(self, gradient: RealArray, present: Sequence[bool], hyper: Sequence[Sequence[float]]) -> None:
        shard = self._shard
        if gradient.shape != (shard.numel,) or gradient.dtype != shard.dtype:
            self._refuse(f"gradient of {gradient.shape} {gradient.dtype}, need ({shard.numel},) {shard.dtype}")
        if len(present) != len(shard.pieces):
            self._refuse(f"{len(present)} marks of presence, need {len(shard.pieces)}, one a piece")
        if len(hyper) != self._num_groups or any(len(row) != self._num_options for row in hyper):
            self._refuse(
                f"options of lengths {[len(row) for row in hyper]}, need {self._num_groups} rows of {self._num_options}"
            )
        if not all(math.isfinite(value) for row in hyper for value in row):
            self._refuse(f"options {[list(row) for row in hyper]}, need finite numbers")

    def _refuse(self, got: str, op: str = "step") -> None:
        raise ProtocolError(
            f"cannot {op} shard {self._shard.key}: {got}; run the same script on every rank",
            key=self._shard.key,
            op=op,
        )


def _check_spec(spec: RuleSpec) -> None:
    missing = [name for name in _OPTIONS if name not in spec.option_names]
    if spec.kind != "sgd" or missing:
        raise ConfigError(
            f"cannot build sgd: kind {spec.kind!r} with options {spec.option_names}, need kind 'sgd' with"
            f" {', '.join(_OPTIONS)}; give all of them"
        )
    for flags in spec.flags:
        for name, value in flags:
            if name in _IGNORED_FLAGS:
                continue
            if name not in _FLAGS or not isinstance(value, bool):
                raise ConfigError(
                    f"cannot build sgd: flag {name} = {value!r}, need true or false for {' or '.join(_FLAGS)};"
                    " use torch's optimizer on the server"
                )
