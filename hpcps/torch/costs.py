"""What each sample of a dataset costs: read from a column or computed by a function, or features to learn it from.

Every worker reads the costs of all samples once, at the start, since any of them may get any sample. Their digest is
compared over the workers. This module decides nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, TensorDataset

from hpcps.errors import DataError

__all__ = ["Cost", "Floats", "LearnedCost", "Numbers", "SampleCosts", "read_costs"]

Floats: TypeAlias = npt.NDArray[np.float64]
Numbers: TypeAlias = npt.NDArray[np.int64]
"""Numbers of samples in the dataset."""

Column: TypeAlias = str | int | Sequence[Any] | npt.NDArray[Any] | torch.Tensor | Callable[[Any], Any]
"""The key of dict samples, the place in tuple samples, a number a sample, or a function of the sample."""

MAX_FEATURES = 4
"""Each brings two weights; more than so many cannot be told apart from a few dozen steps."""

LEAST_COST = 1e-3
"""Least cost that learned weights give a sample, in mean samples: no work is done in no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedCost:
    """Learn what samples cost while it runs, by features such as their length: a weight for each and for its square.

    Until enough steps are timed, all samples cost the same.

    Args:
        features: a column, or a function of the sample; one to four numbers of 0 or more for each sample.
    """

    features: Column


Cost: TypeAlias = Column | LearnedCost


class SampleCosts:
    """Costs of all samples, scaled to a mean of 1, or the features that they are learned from.

    Sums are taken in one order and without fused operations, so that all machines get the same bits.

    Args:
        columns: costs, shape [num_samples, 1]; or features, shape [num_samples, num_features], each of mean 1.
        learned: which of the two.
    """

    def __init__(self, columns: Floats, *, learned: bool) -> None:
        self._columns = columns
        self._learned = learned
        kind = f"{'features' if learned else 'costs'} {columns.shape[1]} "
        data = np.ascontiguousarray(columns, dtype="<f8").tobytes()
        self.digest = hashlib.sha256(kind.encode() + data).hexdigest()[:16]

    @property
    def num_features(self) -> int:
        """Features of a sample, 0 where costs are given."""
        return self._columns.shape[1] if self._learned else 0

    def of(self, samples: Numbers, weights: Sequence[float]) -> Floats:
        """Costs of some samples.

        Args:
            samples: which.
            weights: of each feature as learned so far; empty: not yet, so all cost 1. Not used for given costs.
        """
        if not self._learned:
            costs: Floats = self._columns[samples, 0]
            return costs
        if not weights:
            return np.ones(len(samples))
        total = np.zeros(len(samples))
        for index, weight in enumerate(weights):
            total += weight * self._columns[samples, index]
        return np.maximum(total, LEAST_COST)

    def sums(self, samples: Numbers) -> tuple[float, ...]:
        """The sum of each feature over some samples; nothing where costs are given."""
        return tuple(self._columns[samples].sum(axis=0).tolist()) if self._learned else ()


def read_costs(dataset: Dataset[Any], cost: Cost, num_samples: int) -> SampleCosts:
    """Read the costs or the features of all samples.

    Args:
        dataset: the samples.
        cost: what the user gave for their cost.
        num_samples: samples of the dataset.

    Raises:
        DataError: not one number a sample, or a number out of range; names the sample.
    """
    if isinstance(cost, LearnedCost):
        features = _table(dataset, cost.features, num_samples, what="feature")
        _check(features, features >= 0, what="feature", need="a finite number of 0 or more")
        if features.shape[1] > MAX_FEATURES:
            raise DataError(
                f"cannot learn costs from {features.shape[1]} features a sample; need 1 to {MAX_FEATURES}; choose those"
                " that tell most of a sample's length"
            )
        parts = [np.ones((num_samples, 1))]
        for column in features.T:
            parts += [_scaled(column)[:, None], _scaled(column * column)[:, None]]
        return SampleCosts(np.concatenate(parts, axis=1), learned=True)
    costs = _table(dataset, cost, num_samples, what="cost")
    _check(costs, costs > 0, what="cost", need="a finite number above 0")
    if costs.shape[1] != 1:
        raise DataError(f"cannot use {costs.shape[1]} costs a sample; need one; use LearnedCost for features")
    return SampleCosts(_scaled(costs[:, 0])[:, None], learned=False)


def _table(dataset: Dataset[Any], column: Column, num_samples: int, *, what: str) -> Floats:
    """One row a sample."""
    values: Any = column
    if isinstance(column, int) and isinstance(dataset, TensorDataset):
        _check_place(column, len(dataset.tensors), what=what)
        values = dataset.tensors[column]
    elif callable(column):
        values = [column(dataset[index]) for index in range(num_samples)]
    elif isinstance(column, (str, int)):
        values = [_field(dataset[index], column, index, what=what) for index in range(num_samples)]
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.to(torch.float64) if values.is_floating_point() else values).numpy()
    try:
        table = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"cannot read the {what} of each sample: {error}; give one number a sample") from error
    if table.ndim == 1:
        table = table[:, None]
    if table.ndim != 2 or len(table) != num_samples or table.shape[1] < 1:
        raise DataError(
            f"cannot read the {what} of each sample: got shape {np.shape(values)}, need {num_samples} rows, one a"
            " sample; pass the column of this dataset"
        )
    return table


def _field(sample: Any, column: str | int, index: int, *, what: str) -> Any:
    """One field of a sample."""
    try:
        return sample[column]
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(
            f"cannot read the {what} of sample {index}: a {type(sample).__name__} has no field {column!r}; pass the key"
            " of a dict sample, the place in a tuple sample, or a function of the sample"
        ) from error


def _check_place(column: int, count: int, *, what: str) -> None:
    if not -count <= column < count:
        raise DataError(
            f"cannot read the {what} of each sample: the dataset has {count} tensors, not number {column}; pass the"
            " place of the column"
        )


def _check(table: Floats, fine: npt.NDArray[np.bool_], *, what: str, need: str) -> None:
    """All numbers are finite and in range, or the first sample whose number is not is named."""
    bad = np.flatnonzero(~(fine & np.isfinite(table)).all(axis=1))
    if bad.size:
        index = int(bad[0])
        raise DataError(
            f"cannot use the {what} of sample {index}: got {', '.join(map(str, table[index].tolist()))}, need {need};"
            " correct the column or the function"
        )


def _scaled(column: Floats) -> Floats:
    """The column with a mean of 1; as it is where all are 0. Summed exactly: the same on every machine."""
    mean = math.fsum(column.tolist()) / len(column)
    scaled: Floats = column / mean if mean > 0 else column
    return scaled
