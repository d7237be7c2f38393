"""The model, data and step that the scripts of the bench train: an MLP 1024-1536-1536-10, 3.95 M float32."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

WIDTHS = (1024, 1536, 1536, 10)
GLOBAL_BATCH = 256
NUM_WARMUP = 14
BLOCK_STEPS = 5
NUM_BLOCKS = 10
NUM_STEPS = NUM_WARMUP + BLOCK_STEPS * NUM_BLOCKS


def make_model(widths: tuple[int, ...] = WIDTHS) -> nn.Sequential:
    """An MLP with ReLU between its layers; the same values at every call."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_data(num_samples: int, widths: tuple[int, ...] = WIDTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and classes; the same at every call."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, widths[0], generator=generator)
    return inputs, torch.randint(widths[-1], (num_samples,), generator=generator)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """``sgd`` (plain), ``momentum`` or ``adam``."""
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-4)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if kind == "momentum" else 0.0)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, classes: torch.Tensor) -> None:
    """One ordinary step."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), classes).backward()
    optimizer.step()


def batches(
    data: tuple[torch.Tensor, torch.Tensor], batch: int, *, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Shuffled batches without end, by indexing: the cheapest loader there is."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(data[1]), generator=generator).split(batch):
            yield data[0][chosen], data[1][chosen]


def measure_steps(steps: Iterator[object]) -> tuple[float, float]:
    """Seconds of a step, and CPU seconds a step of this rank and the others. Each ``next`` of the iterator is a step.

    The first few do not count. The time is the median over blocks, so that neither a short disturbance of the machine
    rules it, nor a slow step among every few is lost.
    """
    for _ in range(NUM_WARMUP):
        next(steps)
    blocks_s = []
    cpu_began_s = siblings_cpu_s()
    for _ in range(NUM_BLOCKS):
        began_s = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            next(steps)
        blocks_s.append((time.perf_counter() - began_s) / BLOCK_STEPS)
    cpu_s = siblings_cpu_s() - cpu_began_s
    return statistics.median(blocks_s), cpu_s / (NUM_BLOCKS * BLOCK_STEPS)


def siblings_cpu_s() -> float:
    """CPU seconds so far of all children of this process's parent, which started the ranks."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        if int(fields[1]) == os.getppid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
