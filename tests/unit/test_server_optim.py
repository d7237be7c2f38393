"""Every elementwise optimizer of torch on cut pieces against the same optimizer on whole tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hpcps.errors import ConfigError, ProtocolError
from hpcps.plan import Piece, Shard, TensorSpec
from hpcps.torch.server_optim import ELEMENTWISE, TorchRule, describe_optimizer, make_rule, option_row
from hpcps.update.rule import RuleSpec
from hpcps.update.sgd import NumpySgd

SIZES = (7, 33, 1)
CUT = 20
"""The second tensor is cut between two shards."""
TENSORS = tuple(
    TensorSpec(name=name, numel=numel, dtype="float64", param_group=group)
    for name, numel, group in zip("abc", SIZES, (0, 1, 0), strict=True)
)
SHARDS = (
    Shard(
        key=0,
        server=0,
        dtype="float64",
        begin=0,
        numel=7 + CUT,
        pieces=(Piece(tensor=0, start=0, stop=7, offset=0), Piece(tensor=1, start=0, stop=CUT, offset=7)),
    ),
    Shard(
        key=1,
        server=1,
        dtype="float64",
        begin=7 + CUT,
        numel=34 - CUT,
        pieces=(Piece(tensor=1, start=CUT, stop=33, offset=0), Piece(tensor=2, start=0, stop=1, offset=33 - CUT)),
    ),
)
EXTRA = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"betas": (0.8, 0.95)},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.01},
    "Rprop": {"etas": (0.4, 1.3)},
}


def make_params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)) for size in SIZES]


def make_optimizer(kind: str, params: list[torch.nn.Parameter], **settings: object) -> torch.optim.Optimizer:
    groups = [{"params": [params[0], params[2]]}, {"params": [params[1]], "lr": 0.003}]
    return getattr(torch.optim, kind)(groups, **{"lr": 0.01, **EXTRA.get(kind, {}), **settings})


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_twenty_steps_on_pieces_equal_torch_on_tensors(kind: str) -> None:
    """Rates change at step 10; the first tensor has no gradient in every third step."""
    params = make_params()
    optimizer = make_optimizer(kind, params)
    spec = RuleSpec.from_json(describe_optimizer(optimizer).to_json())
    rules = [make_rule(shard, spec, TENSORS) for shard in SHARDS]
    flat = torch.cat([param.detach() for param in params]).numpy()
    for shard, rule in zip(SHARDS, rules, strict=True):
        assert rule.adaptive is ELEMENTWISE[kind]
        rule.values[:] = flat[shard.begin : shard.begin + shard.numel]
    generator = torch.Generator().manual_seed(2)
    for step in range(20):
        if step == 10:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
        present = [step % 3 != 2, True, True]
        for param, has in zip(params, present, strict=True):
            gradient = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.grad = gradient if has else None
        pushed = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).detach() for p in params]).numpy()
        rows = [option_row(group, spec.option_names) for group in optimizer.param_groups]
        for shard, rule in zip(SHARDS, rules, strict=True):
            rule.step(
                pushed[shard.begin : shard.begin + shard.numel].copy(),
                present=[present[piece.tensor] for piece in shard.pieces],
                hyper=rows,
                lr_scale=1.0,
            )
        optimizer.step()
    result = np.concatenate([rule.values for rule in rules])
    expected = torch.cat([param.detach() for param in params]).numpy()
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)
    assert np.abs(expected - flat).max() > 1e-4


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_lr_scale_multiplies_the_rate_of_one_step_only(kind: str) -> None:
    """A gradient of 1 in every step moves SGD and Adam by just the rate."""
    spec = describe_optimizer(getattr(torch.optim, kind)(make_params(), lr=0.01))
    tensors = tuple(TensorSpec(name=t.name, numel=t.numel, dtype=t.dtype, param_group=0) for t in TENSORS)
    rule = make_rule(SHARDS[1], spec, tensors)
    moved = []
    for scale in (1.0, 0.25, 1.0):
        rule.values[:] = 0.0
        rule.step(np.ones(rule.values.size), present=[True, True], hyper=spec.options, lr_scale=scale)
        moved.append(-float(rule.values[0]))
    assert moved == pytest.approx([0.01, 0.0025, 0.01], rel=1e-6)


def test_options_and_flags_are_told_apart() -> None:
    spec = describe_optimizer(make_optimizer("Adam", make_params()))
    assert spec.option_names == ("lr", "betas.0", "betas.1", "eps", "weight_decay")
    assert spec.options == ((0.01, 0.9, 0.999, 1e-8, 0.01), (0.003, 0.9, 0.999, 1e-8, 0.01))
    assert dict(spec.flags[0])["amsgrad"] is True
    assert "capturable" not in dict(spec.flags[0])


def test_a_tensor_rate_travels_as_a_number() -> None:
    spec = describe_optimizer(torch.optim.Adam(make_params(), lr=torch.tensor(0.02)))
    assert spec.options[0][0] == pytest.approx(0.02)


class Mine(torch.optim.SGD):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.optim.LBFGS(make_params()), "cannot run torch.optim.lbfgs.LBFGS on servers: it is not one of"),
        (lambda: torch.optim.SparseAdam(make_params()), "cannot run .*SparseAdam on servers"),
        (lambda: Mine(make_params(), lr=0.1), "cannot run .*Mine on servers"),
        (lambda: torch.optim.Adam(make_params(), capturable=True), "parameter group 0 has capturable=True"),
        (lambda: torch.optim.SGD(make_params(), lr=0.1, differentiable=True), "group 0 has differentiable=True"),
    ],
)
def test_what_servers_cannot_run_is_refused(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        describe_optimizer(make())  # type: ignore[operator]


def test_what_does_not_fit_the_shard_is_refused_without_effect() -> None:
    spec = describe_optimizer(make_optimizer("Adam", make_params()))
    rule = TorchRule(SHARDS[0], spec, tensors=TENSORS)
    rule.values[:] = 1.0
    rows = list(spec.options)
    gradient = np.ones(rule.values.size)
    with pytest.raises(ProtocolError, match="cannot step: got 1 pieces and shape"):
        rule.step(gradient, present=[True], hyper=rows, lr_scale=1.0)
    with pytest.raises(ProtocolError, match="cannot step: got 2 pieces and shape"):
        rule.step(gradient[:-1], present=[True, True], hyper=rows, lr_scale=1.0)
    with pytest.raises(ProtocolError, match="is not finite; look at the scheduler"):
        rule.step(gradient, present=[True, True], hyper=[(math.nan, *rows[0][1:]), rows[1]], lr_scale=1.0)
    assert rule.values.tolist() == [1.0] * 27


def test_an_unknown_kind_from_the_wire_is_refused() -> None:
    spec = RuleSpec(kind="Nothing", option_names=("lr",), options=((0.1,),), flags=((),))
    with pytest.raises(ProtocolError, match="cannot make a server optimizer 'Nothing'"):
        make_rule(SHARDS[0], spec, TENSORS)


def test_numpy_sgd_serves_jobs_without_torch() -> None:
    names = ("lr", "momentum", "dampening", "weight_decay")
    spec = RuleSpec(kind="sgd", option_names=names, options=((0.1, 0.0, 0.0, 0.0),) * 2, flags=((), ()))
    assert isinstance(make_rule(SHARDS[0], spec, TENSORS), NumpySgd)
