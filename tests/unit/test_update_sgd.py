"""NumpySgd against torch.optim.SGD, piece by piece.

torch may fuse a product and a sum into one rounding where the processor can, numpy never does, so float32 agrees
to a few units in the last place of numbers near 1, not bit for bit.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hpcps.errors import ConfigError, ProtocolError
from hpcps.plan import Piece, Shard, TensorSpec
from hpcps.update.rule import RuleSpec
from hpcps.update.sgd import NumpySgd

NAMES = ("lr", "momentum", "dampening", "weight_decay")
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}
LENGTHS = (5, 33, 1)


def make_shard(dtype: str) -> Shard:
    """Three tensors, of which the shard holds elements 2: of the first and the whole others."""
    pieces = (
        Piece(tensor=0, start=2, stop=7, offset=0),
        Piece(tensor=1, start=0, stop=33, offset=5),
        Piece(tensor=2, start=0, stop=1, offset=38),
    )
    return Shard(key=4, server=0, dtype=dtype, begin=2, numel=39, pieces=pieces)


def make_tensors(dtype: str) -> tuple[TensorSpec, ...]:
    sizes = (("a", 7, 0), ("b", 33, 1), ("c", 1, 0))
    return tuple(TensorSpec(name=name, numel=numel, dtype=dtype, param_group=g) for name, numel, g in sizes)


def make_spec(options: tuple[tuple[float, ...], ...], **flags: bool) -> RuleSpec:
    return RuleSpec(kind="sgd", option_names=NAMES, options=options, flags=(tuple(flags.items()),) * len(options))


def run_both(dtype: str, options: tuple[tuple[float, ...], ...], *, absent: dict[int, set[int]], **flags: bool):
    """Ten steps of both, with the learning rate cut at step 5; absent[step] are pieces without a gradient."""
    rng = np.random.default_rng(11)
    rule = NumpySgd(make_shard(dtype), make_spec(options, **flags), tensors=make_tensors(dtype))
    rule.values[:] = rng.standard_normal(39)
    bounds = list(itertools.pairwise([0, 5, 38, 39]))
    params = [torch.nn.Parameter(torch.tensor(rule.values[begin:end])) for begin, end in bounds]
    groups = [
        {"params": members} | dict(zip(NAMES, row, strict=True))
        for members, row in zip(([params[0], params[2]], [params[1]]), options, strict=True)
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.5, **flags)  # each group sets its own
    for step in range(10):
        gradient = rng.standard_normal(39).astype(dtype)
        gradient.flags.writeable = False
        factor = 0.1 if step >= 5 else 1.0
        hyper = [(row[0] * factor, *row[1:]) for row in options]
        missing = absent.get(step, set())
        for index, (begin, end) in enumerate(bounds):
            params[index].grad = None if index in missing else torch.tensor(gradient[begin:end])
        for group, row in zip(optimizer.param_groups, hyper, strict=True):
            group["lr"] = row[0]
        optimizer.step()
        rule.step(gradient, present=[index not in missing for index in range(3)], hyper=hyper, lr_scale=1.0)
        want = np.concatenate([param.detach().numpy() for param in params])
        np.testing.assert_allclose(rule.values, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    return rule


SETTINGS = [
    # lr, momentum, dampening, weight decay of group 0; of group 1; flags
    (((0.1, 0.0, 0.0, 0.0), (0.3, 0.0, 0.0, 0.0)), {}),
    (((0.1, 0.9, 0.0, 0.0), (0.3, 0.5, 0.0, 0.0)), {}),
    (((0.1, 0.9, 0.2, 0.0), (0.3, 0.0, 0.0, 0.0)), {}),
    (((0.1, 0.9, 0.0, 0.01), (0.3, 0.5, 0.0, 0.0)), {"nesterov": True}),
    (((0.1, 0.0, 0.0, 0.1), (0.3, 0.0, 0.0, 0.0)), {"maximize": True}),
    (((0.1, 0.9, 0.1, 0.1), (0.3, 0.5, 0.9, 0.3)), {"maximize": True}),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("options", "flags"), SETTINGS)
def test_it_follows_torch(dtype, options, flags):
    run_both(dtype, options, absent={}, **flags)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pieces_without_a_gradient_are_left_alone_as_in_torch(dtype):
    """Piece 1 first comes at step 3, so its momentum starts undamped there; all are absent in step 6."""
    absent = {0: {1}, 1: {1}, 2: {0, 1}, 6: {0, 1, 2}, 7: {2}}
    run_both(dtype, ((0.1, 0.9, 0.5, 0.1), (0.3, 0.5, 0.5, 0.1)), absent=absent)


def test_lr_scale_multiplies_the_learning_rate():
    rule = NumpySgd(make_shard("float64"), make_spec(((0.5, 0, 0, 0),) * 2), tensors=make_tensors("float64"))
    rule.step(np.ones(39), present=[True, True, False], hyper=((0.5, 0, 0, 0), (0.25, 0, 0, 0)), lr_scale=0.5)
    assert rule.values.tolist() == [-0.25] * 5 + [-0.125] * 33 + [0.0]
    assert not rule.adaptive


def test_the_order_of_options_is_that_of_the_spec():
    spec = RuleSpec(kind="sgd", option_names=NAMES[::-1], options=((0, 0, 0, 0.5),) * 2, flags=((), ()))
    rule = NumpySgd(make_shard("float64"), spec, tensors=make_tensors("float64"))
    rule.step(np.ones(39), present=[True] * 3, hyper=spec.options, lr_scale=1.0)
    assert rule.values.tolist() == [-0.5] * 39


def test_the_values_are_one_array_for_life():
    rule = NumpySgd(make_shard("float32"), make_spec(((0.5, 0.9, 0, 0),) * 2), tensors=make_tensors("float32"))
    values = rule.values
    rule.step(np.ones(39, dtype=np.float32), present=[True] * 3, hyper=((0.5, 0.9, 0, 0),) * 2, lr_scale=1.0)
    assert rule.values is values and values.dtype == np.float32


ROW = (0.5, 0.0, 0.0, 0.0)
GRADIENT = np.ones(39)
BAD_STEPS = [
    (GRADIENT[:38], [True] * 3, (ROW, ROW), r"gradient of \(38,\) float64, need \(39,\) float64"),
    (GRADIENT.astype(np.float32), [True] * 3, (ROW, ROW), "float32, need"),
    (GRADIENT, [True] * 2, (ROW, ROW), "2 marks of presence, need 3"),
    (GRADIENT, [True] * 3, (ROW,), r"options of lengths \[4\], need 2 rows of 4"),
    (GRADIENT, [True] * 3, (ROW, ROW[:3]), r"options of lengths \[4, 3\], need 2 rows of 4"),
    (GRADIENT, [True] * 3, (ROW, (float("nan"), 0, 0, 0)), "need finite numbers"),
]


@pytest.mark.parametrize(("gradient", "present", "hyper", "message"), BAD_STEPS, ids=range(len(BAD_STEPS)))
def test_a_step_that_does_not_fit_changes_nothing(gradient, present, hyper, message):
    rule = NumpySgd(make_shard("float64"), make_spec((ROW, ROW)), tensors=make_tensors("float64"))
    with pytest.raises(ProtocolError, match=f"cannot step shard 4: .*{message}") as caught:
        rule.step(gradient, present=present, hyper=hyper, lr_scale=1.0)
    assert caught.value.key == 4
    assert not rule.values.any()


def test_what_numpy_cannot_do_is_refused():
    shard, tensors = make_shard("float32"), make_tensors("float32")
    lacking = RuleSpec(kind="sgd", option_names=("lr",), options=((0.1,),) * 2, flags=((), ()))
    with pytest.raises(ConfigError, match="cannot build sgd: kind 'sgd' with options .*, need kind 'sgd' with lr, mom"):
        NumpySgd(shard, lacking, tensors=tensors)
    with pytest.raises(ConfigError, match="flag decoupled = True, need true or false for nesterov or maximize"):
        NumpySgd(shard, make_spec((ROW, ROW), decoupled=True), tensors=tensors)
    with pytest.raises(ConfigError, match="a tensor is in group 1, the rule has 1"):
        NumpySgd(shard, make_spec((ROW,)), tensors=tensors)
    NumpySgd(shard, make_spec((ROW, ROW), foreach=True), tensors=tensors)
