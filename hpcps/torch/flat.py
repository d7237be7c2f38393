"""The flat spaces on a worker: parameters and gradients laid end to end, space by space.

Where it can be, a parameter's memory is a range of the flat values, so that a pull writes straight into
the model, and its gradient a range of the flat gradients, so that a push reads straight from it. A parameter
of another dtype, device or memory order keeps its own memory, and values are copied by logical index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpcps.errors import DataError
from hpcps.plan import Route, Space, TensorSpec
from hpcps.runtime.client import Array

__all__ = ["FlatTensors", "describe_parameters"]

_WIRE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_NAMES = {torch.float32: "float32", torch.float64: "float64"}


def describe_parameters(
    param_groups: Sequence[Mapping[str, object]], names: Mapping[int, str]
) -> tuple[list[torch.nn.Parameter], tuple[TensorSpec, ...]]:
    """The trainable parameters of an optimizer, in its order, and what servers need to know of each.

    Args:
        param_groups: of the optimizer.
        names: name by ``id`` of the parameter; the model's first name for a tied one.

    Raises:
        DataError: a parameter's dtype cannot be trained.
    """
    params: list[torch.nn.Parameter] = []
    specs: list[TensorSpec] = []
    for group_index, group in enumerate(param_groups):
        for param in group["params"]:  # type: ignore[attr-defined]
            if not param.requires_grad:
                continue
            name = names.get(id(param), f"param_groups[{group_index}][{len(params)}]")
            wire = _WIRE.get(param.dtype)
            if wire is None:
                raise DataError(
                    f"cannot train parameter {name!r}: its dtype is {param.dtype}, need one of"
                    f" {', '.join(str(dtype) for dtype in _WIRE)}; convert it or freeze it"
                )
            numel = param.numel() * (2 if param.is_complex() else 1)
            params.append(param)
            specs.append(TensorSpec(name=name, numel=numel, dtype=_NAMES[wire], param_group=group_index))
    return params, tuple(specs)


class FlatTensors:
    """Flat values and gradients of a model.

    Args:
        params: trainable parameters, in the order of the specs.
        specs: their description.
        route: the shards that cut the flat space.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], specs: Sequence[TensorSpec], *, route: Route) -> None:
        self.params = list(params)
        self._route = route
        sizes: dict[Space, int] = {}
        for spec in specs:
            sizes[spec.space] = sizes.get(spec.space, 0) + spec.numel
        kinds = {name: dtype for dtype, name in _NAMES.items()}
        self.values = {space: torch.zeros(size, dtype=kinds[space[0]]) for space, size in sizes.items() if size}
        self._grads = {space: torch.zeros(size, dtype=kinds[space[0]]) for space, size in sizes.items() if size}
        begins = dict.fromkeys(sizes, 0)
        self.value_views: list[torch.Tensor] = []
        self.grad_views: list[torch.Tensor] = []
        for param, spec in zip(self.params, specs, strict=True):
            space = spec.space
            begin, end = begins[space], begins[space] + spec.numel
            begins[space] = end
            self.value_views.append(_shaped(self.values, spec, begin, end, param))
            self.grad_views.append(_shaped(self._grads, spec, begin, end, param))
            _adopt(param, self.value_views[-1])
        self.keys_of: list[list[int]] = [[] for _ in self.params]
        self.tensors_of: list[list[int]] = []
        for shard in route.shards:
            tensors = sorted({piece.tensor for piece in shard.pieces})
            self.tensors_of.append(tensors)
            for tensor in tensors:
                self.keys_of[tensor].append(shard.key)

    def shard_values(self) -> list[Array]:
        """The values of every shard as numpy ranges of the flat space."""
        return self._cut(self.values)

    def shard_grads(self) -> list[Array]:
        """The gradients of every shard, likewise."""
        return self._cut(self._grads)

    def staging(self) -> list[Array]:
        """Room for the values of every shard outside the model."""
        return self._cut({space: torch.empty_like(flat) for space, flat in self.values.items()})

    def install(self) -> None:
        """Copy the flat values into the parameters that have memory of their own, or were given some since."""
        with torch.no_grad():
            for param, view in zip(self.params, self.value_views, strict=True):
                if param.data_ptr() != view.data_ptr():
                    param.copy_(view)

    def grad_is_view(self, index: int) -> bool:
        """True if the parameter's gradient may be a range of the flat gradients."""
        param, view = self.params[index], self.grad_views[index]
        return param.dtype == view.dtype and param.device == view.device

    def _cut(self, flats: Mapping[Space, torch.Tensor]) -> list[Array]:
        arrays = {space: flat.numpy() for space, flat in flats.items()}
        return [arrays[shard.space][shard.begin : shard.begin + shard.numel] for shard in self._route.shards]


def _adopt(param: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Copy a parameter's values into the flat space, and let it live there where it can."""
    with torch.no_grad():
        view.copy_(param)
        if param.dtype == view.dtype and param.device == view.device and param.is_contiguous():
            param.data = view


def _shaped(
    flats: Mapping[Space, torch.Tensor], spec: TensorSpec, begin: int, end: int, param: torch.nn.Parameter
) -> torch.Tensor:
    """A range of the flat space in the shape of a parameter; a complex one as pairs."""
    if spec.numel == 0:
        return torch.empty_like(param, dtype=_WIRE[param.dtype] if not param.is_complex() else param.dtype)
    flat = flats[spec.space][begin:end]
    if param.is_complex():
        return torch.view_as_complex(flat.view(*param.shape, 2))
    return flat.view(param.shape)
