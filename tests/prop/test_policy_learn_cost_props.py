"""Weights are a fair price of features: 0 or more, of sum 1, near the truth, whatever the unit of time."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.config import CapacityConfig
from hpcps.policy import CostRow, LearnCost
from hpcps.policy.learn_cost import _non_negative

POLICY = LearnCost(CapacityConfig())


def rows(weights: list[float], speeds: list[float], *, fixed: float, noise: float, seed: int) -> list[list[CostRow]]:
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(0, 0.8, 3000)
    table = np.stack([np.ones(3000), lengths / lengths.mean(), lengths**2 / (lengths**2).mean()], axis=1)
    found = []
    for worker, speed in enumerate(speeds):
        chosen = [rng.integers(0, 3000, 6 + 6 * ((worker + step) % 2)) for step in range(24)]
        sums = [table[numbers].sum(axis=0) for numbers in chosen]
        times = [(fixed + float(each @ np.array(weights))) / speed * np.exp(noise * rng.normal()) for each in sums]
        found.append([CostRow(features=tuple(a.tolist()), seconds=b) for a, b in zip(sums, times, strict=True)])
    return found


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    parts=st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=3, max_size=3).filter(lambda w: sum(w) > 0),
    speeds=st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    fixed=st.sampled_from([0.0, 2.0]),
    noise=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 100),
)
def test_weights(parts: list[float], speeds: list[float], fixed: float, noise: float, seed: int) -> None:
    truth = [part / sum(parts) for part in parts]
    made = rows(truth, speeds, fixed=fixed, noise=noise, seed=seed)
    uniform = (1.0, 0.0, 0.0)
    got = POLICY.decide(made, current=uniform)
    assert got is not None
    assert min(got.weights) >= 0
    assert abs(sum(got.weights) - 1) < 1e-9
    assert got.changed or got.weights == uniform
    if noise == 0 and got.changed:
        assert max(abs(a - b) for a, b in zip(got.weights, truth, strict=True)) < 0.02
    slower = [[dataclasses.replace(row, seconds=1000 * row.seconds) for row in each] for each in made]
    again = POLICY.decide(slower, current=uniform)
    assert again is not None
    assert np.allclose(again.weights, got.weights, atol=1e-6)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(seed=st.integers(0, 10_000), num_columns=st.integers(1, 5), same=st.booleans())
def test_the_active_set_finds_the_least_squares_of_all_supports(seed: int, num_columns: int, same: bool) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, num_columns)), rng.normal(size=12)
    if same:
        matrix[:, -1] = matrix[:, 0]
    found = _non_negative(matrix, target)
    assert found.min() >= 0
    best = float(target @ target)
    for size in range(1, num_columns + 1):
        for support in map(list, itertools.combinations(range(num_columns), size)):
            solved = np.linalg.lstsq(matrix[:, support], target, rcond=None)[0]
            if solved.min() >= 0:
                best = min(best, float(((matrix[:, support] @ solved - target) ** 2).sum()))
    assert float(((matrix @ found - target) ** 2).sum()) <= best * (1 + 1e-9) + 1e-12
