"""What each sample costs, from whatever the user gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import hpcps.torch as ht
from hpcps.errors import DataError
from hpcps.torch.costs import read_costs

LENGTHS = [1, 2, 3, 6]
ALL = np.arange(4)


class Samples(Dataset[Any]):
    """Samples made by a function of their number; counts how often each is read."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self.num_reads = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return self._make(index)


TUPLES = Samples(lambda index: ("x" * LENGTHS[index], LENGTHS[index]))
DICTS = Samples(lambda index: {"text": "x" * LENGTHS[index], "length": torch.tensor(LENGTHS[index])})
TENSORS = TensorDataset(torch.zeros(4, 2), torch.tensor(LENGTHS))

GIVEN = [
    ("a list", TUPLES, LENGTHS),
    ("an array", TUPLES, np.array(LENGTHS, dtype=np.int32)),
    ("a tensor", TUPLES, torch.tensor(LENGTHS, dtype=torch.bfloat16)),
    ("a column of shape [n, 1]", TUPLES, torch.tensor(LENGTHS)[:, None]),
    ("a place in tuples", TUPLES, 1),
    ("a key of dicts", DICTS, "length"),
    ("a tensor of a tensor dataset", TENSORS, 1),
    ("the last tensor", TENSORS, -1),
    ("a function", TUPLES, lambda sample: len(sample[0])),
    ("a function that gives a tensor", DICTS, lambda sample: sample["length"] * 10.0),
]


@pytest.mark.parametrize(("name", "dataset", "cost"), GIVEN)
def test_costs_are_scaled_to_a_mean_of_one(name: str, dataset: Dataset[Any], cost: Any) -> None:
    costs = read_costs(dataset, cost, 4)
    assert costs.of(ALL, ()).tolist() == [1 / 3, 2 / 3, 1.0, 2.0], name
    assert costs.of(np.array([3, 0]), (0.5, 0.5)).tolist() == [2.0, 1 / 3], "weights are for learned costs"
    assert (costs.num_features, costs.sums(ALL)) == (0, ())
    assert costs.digest == read_costs(TUPLES, LENGTHS, 4).digest, "the same costs, however they were given"


def test_every_sample_is_read_once() -> None:
    dataset = Samples(lambda index: LENGTHS[index])
    read_costs(dataset, lambda sample: sample, 4)
    assert dataset.num_reads == 4


def test_features_have_a_mean_of_one_and_a_square() -> None:
    costs = read_costs(TUPLES, ht.LearnedCost(features=LENGTHS), 4)
    assert costs.num_features == 3
    assert costs.sums(ALL) == pytest.approx((4, 4, 4))
    assert costs.sums(np.array([3])) == pytest.approx((1.0, 2.0, 36 / 12.5))
    assert costs.of(ALL, ()).tolist() == [1.0] * 4, "nothing learned yet"
    assert costs.of(ALL, (0.0, 1.0, 0.0)).tolist() == [1 / 3, 2 / 3, 1.0, 2.0]
    assert costs.of(ALL, (0.25, 0.75, 0.0)) == pytest.approx([0.5, 0.75, 1.0, 1.75])
    assert costs.digest != read_costs(TUPLES, LENGTHS, 4).digest, "features are not costs"


def test_a_function_may_give_several_features() -> None:
    costs = read_costs(TUPLES, ht.LearnedCost(features=lambda sample: (len(sample[0]), 0.0)), 4)
    assert costs.num_features == 5
    assert costs.sums(ALL) == pytest.approx((4, 4, 4, 0, 0)), "a feature that is always 0 stays 0"


def test_learned_costs_are_never_nothing() -> None:
    costs = read_costs(TUPLES, ht.LearnedCost(features=[0, 1, 1, 1]), 4)
    assert costs.of(ALL, (0.0, 1.0, 0.0)) == pytest.approx([0.001, 4 / 3, 4 / 3, 4 / 3])


BAD = [
    ("nothing for nothing", TUPLES, [1, 2, 0, 3], r"the cost of sample 2: got 0\.0, need a finite number above 0"),
    ("below zero", TUPLES, [1, -2, 0, 3], r"the cost of sample 1: got -2\.0"),
    ("no number", TUPLES, [1, 2, 3, float("nan")], "the cost of sample 3: got nan"),
    ("without end", TUPLES, [float("inf"), 2, 3, 4], "the cost of sample 0: got inf"),
    ("too few", TUPLES, [1, 2, 3], r"got shape \(3,\), need 4 rows"),
    ("one for all", TUPLES, torch.tensor(1.0), r"got shape \(\), need 4 rows"),
    ("two a sample", TUPLES, np.ones((4, 2)), "cannot use 2 costs a sample; need one"),
    ("no columns", TUPLES, np.ones((4, 0)), r"got shape \(4, 0\), need 4 rows"),
    ("words", TUPLES, ["a", "b", "c", "d"], "cannot read the cost of each sample: could not convert"),
    ("ragged", TUPLES, [[1], [1, 2], [1], [1]], "cannot read the cost of each sample"),
    ("a key that is not there", DICTS, "size", "the cost of sample 0: a dict has no field 'size'"),
    ("a place that is not there", TUPLES, 2, "the cost of sample 0: a tuple has no field 2"),
    ("a tensor that is not there", TENSORS, 2, "the dataset has 2 tensors, not number 2"),
    ("a sample without fields", Samples(lambda index: index), 0, "a int has no field 0"),
    ("bad features", TUPLES, ht.LearnedCost(features=[1, -1, 1, 1]), r"the feature of sample 1: got -1\.0"),
    ("many features", TUPLES, ht.LearnedCost(features=np.ones((4, 5))), "costs from 5 features a sample; need 1 to 4"),
]


@pytest.mark.parametrize(("name", "dataset", "cost", "message"), BAD)
def test_what_is_no_cost_is_refused(name: str, dataset: Dataset[Any], cost: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_costs(dataset, cost, 4)
