"""What optimizers and sums remember, taken out here and put in there: the same bits as without."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from hpcps.errors import ProtocolError
from hpcps.plan import Piece, Shard, TensorSpec
from hpcps.torch.server_optim import ELEMENTWISE, describe_optimizer, make_rule
from hpcps.update.accumulator import Accumulator
from hpcps.update.rule import Rule, RuleSpec

SIZES = (7, 33, 1)
TENSORS = tuple(
    TensorSpec(name=name, numel=numel, dtype="float32", param_group=group)
    for name, numel, group in zip("abc", SIZES, (0, 1, 0), strict=True)
)
SHARD = Shard(
    key=0,
    server=0,
    dtype="float32",
    begin=0,
    numel=sum(SIZES),
    pieces=tuple(
        Piece(tensor=index, start=0, stop=numel, offset=sum(SIZES[:index])) for index, numel in enumerate(SIZES)
    ),
)
EXTRA: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "ASGD": {"t0": 2},
}
STEPS, MOVES = 9, (2, 5, 6)
"""Steps of a run, and those before which the rule goes elsewhere."""


def spec_of(kind: str, **settings: Any) -> RuleSpec:
    params = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    groups = [{"params": [params[0], params[2]]}, {"params": [params[1]], "lr": 0.003}]
    optimizer = getattr(torch.optim, kind)(groups, **{"lr": 0.01, **EXTRA.get(kind, {}), **settings})
    return RuleSpec.from_json(describe_optimizer(optimizer).to_json())


def sgd_spec() -> RuleSpec:
    """The numpy one, of the same words."""
    spec = spec_of("SGD")
    flags = tuple(tuple((name, flag) for name, flag in row if name in ("nesterov", "maximize")) for row in spec.flags)
    return dataclasses.replace(spec, kind="sgd", flags=flags)


def run(spec: RuleSpec, *, moves: tuple[int, ...], adopt: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A few steps; the last piece has its first gradient late, the first one only now and then."""
    rng = np.random.default_rng(1)

    def fresh() -> Rule:
        rule = make_rule(SHARD, spec, TENSORS)
        if adopt:
            rule.adopt(np.zeros(SHARD.numel, SHARD.dtype))
        return rule

    rule = fresh()
    rule.values[:] = rng.standard_normal(SHARD.numel).astype(SHARD.dtype)
    for step in range(STEPS):
        if step in moves:
            state = {name: array.copy() for name, array in rule.state().items()}
            values = rule.values.copy()
            rule = fresh()
            rule.values[:] = values
            rule.restore(state)
            for array in state.values():
                array[...] = 0  # the rule has its own copies
        gradient = rng.standard_normal(SHARD.numel).astype(SHARD.dtype)
        present = [step % 3 != 0, True, step > 5]
        rule.step(gradient, present=present, hyper=spec.options, lr_scale=0.5 if step == 3 else 1.0)
    return rule.values.copy(), {name: array.copy() for name, array in rule.state().items()}


SPECS = [
    *((kind, spec_of(kind), False) for kind in sorted(ELEMENTWISE)),
    *((f"{kind}, torch's default loop", spec_of(kind), True) for kind in ("Adam", "SGD", "Adagrad")),
    *((f"{kind}, loop of the user", spec_of(kind, foreach=True), False) for kind in ("Adam", "RMSprop")),
    ("sgd without momentum", spec_of("SGD", momentum=0.0, nesterov=False), False),
    ("numpy's sgd", sgd_spec(), False),
]


@pytest.mark.parametrize(("name", "spec", "adopt"), SPECS, ids=[name for name, _, _ in SPECS])
def test_a_rule_goes_on_elsewhere_to_the_bit(name: str, spec: RuleSpec, adopt: bool) -> None:
    values, state = run(spec, moves=(), adopt=adopt)
    moved, moved_state = run(spec, moves=MOVES, adopt=adopt)
    assert moved.tobytes() == values.tobytes()
    assert {name: array.tobytes() for name, array in moved_state.items()} == {
        name: array.tobytes() for name, array in state.items()
    }
    assert all(array.dtype in (np.float32, np.float64, np.int64) for array in state.values())


def test_state_has_torchs_names_and_numbers_have_no_axis() -> None:
    _, state = run(spec_of("Adam"), moves=())
    assert sorted(state) == [
        f"{piece}/{name}" for piece in range(3) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    ]
    assert [state["1/exp_avg"].shape, state["2/exp_avg"].shape, state["2/step"].shape] == [(33,), (1,), ()]
    assert float(state["2/step"]) == 3
    assert run(spec_of("SGD", momentum=0.0, nesterov=False), moves=())[1] == {}


def test_numpys_sgd_goes_on_where_torchs_stopped() -> None:
    """They are one rule under two names."""
    torch_values, torch_state = run(spec_of("SGD"), moves=())
    numpy_values, numpy_state = run(sgd_spec(), moves=())
    assert sorted(torch_state) == sorted(numpy_state)
    np.testing.assert_allclose(numpy_values, torch_values, rtol=1e-5, atol=1e-6)
    rule = make_rule(SHARD, sgd_spec(), TENSORS)
    rule.restore(torch_state)
    assert {name: array.tobytes() for name, array in rule.state().items()} == {
        name: array.tobytes() for name, array in torch_state.items()
    }


BAD: list[tuple[str, np.ndarray]] = [
    ("3/exp_avg", np.zeros(1, np.float32)),
    ("-1/exp_avg", np.zeros(1, np.float32)),
    ("x/exp_avg", np.zeros(7, np.float32)),
    ("²/exp_avg", np.zeros(7, np.float32)),
    ("0", np.zeros(7, np.float32)),
    ("0/", np.zeros(7, np.float32)),
    ("0/exp_avg", np.zeros(8, np.float32)),
    ("0/exp_avg", np.zeros((7, 1), np.float32)),
]


@pytest.mark.parametrize(("name", "array"), BAD)
@pytest.mark.parametrize("spec", [spec_of("Adam"), sgd_spec()], ids=["torch", "numpy"])
def test_arrays_that_fit_no_piece_are_refused(spec: RuleSpec, name: str, array: np.ndarray) -> None:
    rule = make_rule(SHARD, spec, TENSORS)
    with pytest.raises(ProtocolError, match="cannot restore an optimizer: got"):
        rule.restore({name: array})
    assert rule.state() == make_rule(SHARD, spec, TENSORS).state()


WRONG_MOMENTUM: list[dict[str, np.ndarray]] = [
    {"0/momentum_buffer": np.zeros(7)},
    {"0/momentum_buffer": np.zeros((), np.float32)},
    {"1/momentum_buffer": np.zeros(33, np.float32), "0/exp_avg": np.zeros(7, np.float32)},
]


@pytest.mark.parametrize("state", WRONG_MOMENTUM)
def test_numpys_sgd_takes_nothing_but_its_momentum(state: dict[str, np.ndarray]) -> None:
    rule = make_rule(SHARD, sgd_spec(), TENSORS)
    with pytest.raises(ProtocolError, match="cannot restore shard 0: .* need momentum_buffer in float32"):
        rule.restore(state)
    assert rule.state() == {}


# --- sums ----------------------------------------------------------------------------------------


def payload(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).view(np.uint8)


@pytest.mark.parametrize("settled", [False, True])
def test_a_sum_goes_on_elsewhere(settled: bool) -> None:
    here, there = Accumulator(2, "float32"), Accumulator(2, "float32")
    for numbers, weight in (((1.0, 2.0), 3.0), ((5.0, 6.0), 1.0)):
        here.add(payload(*numbers), weight)
        if settled:
            here.settle()
    total = here.take_sum()
    assert total is not None
    assert total.tolist() == [8.0, 12.0]
    assert here.num_pending == 0
    assert here.take_sum() is None
    there.put_sum(total)
    there.add(payload(2.0, 0.0), 4.0)
    assert there.mean(8.0).tolist() == [2.0, 1.5]
    # both begin anew
    for each in (here, there):
        each.add(payload(1.0, 1.0), 2.0)
        assert each.mean(2.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("total", [np.zeros(3, np.float32), np.zeros(2), np.zeros((2, 1), np.float32)])
def test_a_sum_that_does_not_fit_is_refused(total: np.ndarray) -> None:
    with pytest.raises(ProtocolError, match="cannot go on from a sum"):
        Accumulator(2, "float32").put_sum(total)


@pytest.mark.parametrize("settled", [False, True])
def test_a_sum_goes_only_where_there_is_none(settled: bool) -> None:
    total = Accumulator(2, "float32")
    total.add(payload(1.0, 2.0), 1.0)
    if settled:
        total.settle()
    with pytest.raises(ProtocolError, match="which has to be empty"):
        total.put_sum(np.zeros(2, np.float32))
    assert total.mean(1.0).tolist() == [1.0, 2.0]
