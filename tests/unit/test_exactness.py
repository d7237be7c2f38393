"""Sync training on uneven shares gives the parameters of one process that trains on the pooled batches.

Why not bit for bit: workers sum a batch's gradient in parts, one process in one go, so float32 gradients differ by
rounding. SGD carries that on as it is. Adam divides by the root of the second moment: where a gradient is near zero
its rounding noise is divided by a number as small, so an update can differ by a part of the learning rate. Hence
1e-5 for SGD and 1e-4 for the Adams in float32; in float64 the noise is 1e9 times smaller and both keep 1e-9.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

import hpcps
import hpcps.torch as ht
from hpcps.config import CapacityConfig, CommConfig, DataConfig, RunConfig
from hpcps.errors import ConfigError, DataError, PlanMismatchError
from hpcps.runtime.job import Job

NUM_SAMPLES, BATCH, EPOCHS = 391, 16, 2
"""24 full batches and a tail of 7, twice: 50 steps."""
PRIORS = {1: (1.0,), 2: (3.0, 1.0), 4: (3.0, 2.0, 1.0, 1.0)}
UNEVEN = {
    count: RunConfig(
        heterogeneous=True,
        seed=5,
        capacity=CapacityConfig(prior=prior, warmup_steps=1000),
        comm=CommConfig(shard_bytes=1024),
    )
    for count, prior in PRIORS.items()
}
"""Shares of 16 samples by the prior alone: 16; 12 and 4; 7, 5, 2 and 2. Shards of 1 KiB: each server has some."""

SEEDING = threading.Lock()
"""torch has one random state for all threads."""

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def dataset(dtype: torch.dtype = torch.float32, num_samples: int = NUM_SAMPLES) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_samples, 8, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x.to(dtype), y.to(dtype))


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    for param in model.parameters():
        param.data = 0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def square(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def pooled(
    data: torch.utils.data.TensorDataset, *, seed: int = 5, epochs: int = EPOCHS, batch: int = BATCH
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The global batches of a sync job, from the permutation of each epoch."""
    for epoch in range(epochs):
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 0, epoch)))).permutation(len(data))
        for start in range(0, len(data), batch):
            chosen = torch.from_numpy(order[start : start + batch])
            yield tuple(tensor[chosen] for tensor in data.tensors)


def alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: torch.utils.data.TensorDataset,
    *,
    loss: Loss = square,
    after_step: Callable[[], None] = lambda: None,
    before_step: Callable[[], object] = lambda: None,
    **batches: int,
) -> list[torch.Tensor]:
    """Plain torch on the pooled batches; returns the parameters."""
    for x, y in pooled(data, **batches):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        before_step()
        optimizer.step()
        after_step()
    return snapshot(model)


def snapshot(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(left, right, strict=True) if a.numel()), default=0.0)


def trained(
    make_model: Callable[[], nn.Module],
    make_optimizer: Optimizers,
    data: torch.utils.data.TensorDataset,
    *,
    loss: Loss = square,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    max_grad_norm: float | None = None,
    num_workers: int = 0,
    after_model: Callable[[nn.Module, Job], None] = lambda model, job: None,
) -> Callable[[Job], list[torch.Tensor]]:
    """A worker function: ordinary training; returns the parameters."""

    def worker(job: Job) -> list[torch.Tensor]:
        model = make_model()
        optimizer = ht.DistributedOptimizer(make_optimizer(model), model, job, max_grad_norm=max_grad_norm)
        loader = ht.DistributedLoader(data, batch, job, num_workers=num_workers)
        for _ in job.epochs(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss(model, x, y).backward()
                optimizer.step()
        after_model(model, job)
        return snapshot(model)

    return worker


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups: biases without decay and with a rate of their own."""
    weights = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-3
    )


OPTIMIZERS = {"sgd": sgd, "adam": adam, "adamw": adamw}
TOLERANCES = {
    ("sgd", torch.float32): 1e-5,
    ("adam", torch.float32): 1e-4,
    ("adamw", torch.float32): 1e-4,
    ("sgd", torch.float64): 1e-9,
    ("adam", torch.float64): 1e-9,
    ("adamw", torch.float64): 1e-9,
}


# --- the promise -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_fifty_steps_equal_one_process(num_workers: int, num_servers: int, name: str, dtype: torch.dtype) -> None:
    """The scheduler hangs on the wrapper; on the wrapped optimizer, torch warns that its step was not called."""
    attach = "wrapped" if name == "adamw" and num_servers == 2 else "wrapper"
    data = dataset(dtype)

    def worker(job: Job) -> tuple[list[torch.Tensor], list[int]]:
        model = mlp(dtype)
        wrapped = OPTIMIZERS[name](model)
        optimizer = ht.DistributedOptimizer(wrapped, model, job)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer if attach == "wrapper" else wrapped, 20, gamma=0.5)
        loader = ht.DistributedLoader(data, BATCH, job)
        sizes = []
        for _ in job.epochs(EPOCHS):
            for x, y in loader:
                sizes.append(len(x))
                optimizer.zero_grad()
                square(model, x, y).backward()
                optimizer.step()
                scheduler.step()
        return snapshot(model), sizes

    outcome = run_ranks(worker, num_workers=num_workers, num_servers=num_servers, config=UNEVEN[num_workers])
    model = mlp(dtype)
    optimizer = OPTIMIZERS[name](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.5)
    expected = alone(model, optimizer, data, after_step=scheduler.step)
    for params, _ in outcome.results:
        assert difference(params, expected) <= TOLERANCES[name, dtype]
    for params, _ in outcome.results[1:]:
        assert difference(params, outcome.results[0][0]) == 0.0
    first_sizes = [sizes[0] for _, sizes in outcome.results]
    assert sum(first_sizes) == BATCH
    if num_workers > 1:
        assert max(first_sizes) >= 2 * min(first_sizes), "the shares must be uneven, or this test shows nothing"
    assert all(stats.num_pushes >= 50 for stats in outcome.stats), "every server must hold a shard"
    assert all(stats.staleness_max == 0 and stats.num_refused == 0 for stats in outcome.stats)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_world_of_one_equals_plain_torch_bit_for_bit(name: str) -> None:
    data = dataset()
    with hpcps.init(seed=5) as job:
        params = trained(mlp, OPTIMIZERS[name], data)(job)
    model = mlp()
    assert difference(params, alone(model, OPTIMIZERS[name](model), data)) == 0.0


def test_a_learning_rate_set_by_a_scheduler_is_the_one_the_servers_use() -> None:
    """Plain SGD on a loss whose gradient is 1: each step moves the parameter by exactly its rate."""
    rates = [1.0, 1.0, 0.5, 0.5, 0.25]
    data = torch.utils.data.TensorDataset(torch.ones(20, 1), torch.zeros(20, 1))

    def worker(job: Job) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, job)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        moved = []
        for x, _ in ht.DistributedLoader(data, 4, job):
            before = model.weight.item()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            scheduler.step()
            moved.append(before - model.weight.item())
        return moved

    for moved in run_ranks(worker, num_workers=2, num_servers=2).results:
        assert moved == rates


def test_a_scheduler_keeps_its_pace_where_a_worker_has_no_samples_in_a_batch() -> None:
    """Tails of 2 leave two of four workers out, so their scripts step their schedulers less often than the others.

    In float64 there are four shards, so that each worker pushes one with the rate that it knows.
    """
    data = dataset(torch.float64, num_samples=34)
    steps: dict[int, int] = {}

    def worker(job: Job) -> list[torch.Tensor]:
        model = mlp(torch.float64)
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        loader = ht.DistributedLoader(data, BATCH, job)
        for _ in job.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                square(model, x, y).backward()
                optimizer.step()
                scheduler.step()
                steps[job.rank] = steps.get(job.rank, 0) + 1
        return snapshot(model)

    outcome = run_ranks(worker, num_workers=4, num_servers=2, config=UNEVEN[4])
    assert sorted(steps.values()) == [6, 6, 9, 9]
    model = mlp(torch.float64)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    expected = alone(model, optimizer, data, epochs=3, after_step=scheduler.step)
    for params in outcome.results:
        assert difference(params, expected) <= 1e-9


# --- shapes of models -------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A layer used twice, by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Frozen(nn.Module):
    """A frozen layer before a trained one, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(8, 8)
        self.fixed.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0))
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.fixed(x))) + self.empty.sum()


class Unused(nn.Module):
    """A layer that no forward uses; weight decay must not touch it."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


class Strided(nn.Module):
    """Parameters whose memory is not in logical order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(3, 4)
        self.last.weight = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.conv(x.view(-1, 2, 2, 2)).flatten(1)))


class Complex(nn.Module):
    """Complex and real parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, 6, dtype=torch.complex64))
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((x.to(torch.complex64) @ self.phase).abs())


def seeded(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with SEEDING:
            torch.manual_seed(11)
            return kind()

    return make


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("kind", [Tied, Frozen, Unused, Strided, Complex])
@pytest.mark.parametrize("make_optimizer", [decayed, adam], ids=["sgd", "adam"])
def test_models_of_unusual_form_equal_one_process(kind: Callable[[], nn.Module], make_optimizer: Optimizers) -> None:
    data = dataset(num_samples=90)
    strides: list[object] = []

    def after(model: nn.Module, job: Job) -> None:
        strides.append([param.stride() for param in model.parameters()])
        if isinstance(model, Tied):
            assert model.first.weight is model.second.weight

    worker = trained(seeded(kind), make_optimizer, data, after_model=after)
    outcome = run_ranks(worker, num_workers=2, num_servers=2, config=UNEVEN[2])
    model = seeded(kind)()
    plain_strides = [param.stride() for param in model.parameters()]
    expected = alone(model, make_optimizer(model), data)
    for params in outcome.results:
        assert difference(params, expected) <= (1e-5 if make_optimizer is decayed else 1e-4)
    assert strides == [plain_strides] * 2
    if kind is Unused:
        assert torch.equal(outcome.results[0][0], seeded(kind)().unused.weight)


def test_a_parameter_that_joins_late_begins_its_step_count_then() -> None:
    """Adam's first step moves by the rate; with a step count that had run on it would move by less."""
    data = dataset(num_samples=64)

    def late(model: Unused, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.calls = getattr(model, "calls", 0) + 1
        return square(model, model.unused(x) if model.calls > 2 else x, y)

    outcome = run_ranks(
        trained(seeded(Unused), adam, data, loss=late, epochs=1), num_workers=2, num_servers=1, config=UNEVEN[2]
    )
    model = seeded(Unused)()
    expected = alone(model, adam(model), data, loss=late, epochs=1)
    assert difference(outcome.results[0], expected) <= 1e-5


def test_a_branch_that_only_one_worker_uses() -> None:
    """The mean gradient of the group has the branch's part from that worker alone, as in the pooled batch."""
    data = dataset(num_samples=96)

    def branch(model: Unused, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Samples with a positive first feature go through the branch, so a batch may have none."""
        chosen = x[:, 0] > 1.0
        out = model.last(x)
        if bool(chosen.any()):
            extra = torch.zeros_like(out)
            extra[chosen] = model.unused(x[chosen])[:, :4]
            out = out + extra
        return ((out - y) ** 2).mean()

    worker = trained(seeded(Unused), decayed, data, loss=branch, batch=6)
    outcome = run_ranks(worker, num_workers=2, num_servers=2, config=UNEVEN[2])
    model = seeded(Unused)()
    expected = alone(model, decayed(model), data, loss=branch, batch=6)
    assert difference(outcome.results[0], expected) <= 1e-5


def test_bfloat16_parameters_are_rounded_copies_of_float32_masters() -> None:
    """Servers hold float32; one process with a float32 master gives the same within bfloat16's last place."""
    data = dataset(num_samples=64)

    def make() -> nn.Module:
        return mlp().to(torch.bfloat16)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return square(model, x.to(torch.bfloat16), y.to(torch.bfloat16)).float()

    outcome = run_ranks(trained(make, sgd, data, loss=loss), num_workers=2, num_servers=1, config=UNEVEN[2])
    assert all(param.dtype == torch.bfloat16 for param in outcome.results[0])
    model = make()
    masters = [param.detach().float().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
    for x, y in pooled(data):
        model.zero_grad()
        loss(model, x, y).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        for master, param in zip(masters, model.parameters(), strict=True):
            param.data.copy_(master)
    got = [param.float() for param in outcome.results[0]]
    # gradients are rounded to 8 bits in each worker: a part in 256 of a parameter that moved by about 1
    assert difference(got, [param.detach().float() for param in model.parameters()]) <= 2e-2
    assert difference(outcome.results[0], outcome.results[1]) == 0.0


# --- ways of training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_equals_the_larger_batch(num_workers: int, set_to_none: bool) -> None:
    """Gradients add up as in plain torch, so the script divides its loss by the number of batches."""
    data = dataset(num_samples=96)

    def worker(job: Job) -> list[torch.Tensor]:
        model = mlp()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        loader = ht.DistributedLoader(data, BATCH, job)
        for _ in job.epochs(2):
            for count, (x, y) in enumerate(loader):
                if count % 3 < 2:
                    if count % 3 == 0:
                        optimizer.zero_grad(set_to_none=set_to_none)
                    with optimizer.no_sync():
                        (square(model, x, y) / 3).backward()
                else:
                    (square(model, x, y) / 3).backward()
                    optimizer.step()
        return snapshot(model)

    outcome = run_ranks(worker, num_workers=num_workers, num_servers=2, config=UNEVEN[num_workers])
    model = mlp()
    expected = alone(model, sgd(model), data, batch=3 * BATCH)
    for params in outcome.results:
        assert difference(params, expected) <= 1e-5


@pytest.mark.parametrize("how", ["argument", "method"])
def test_clipping_uses_the_norm_of_the_pooled_gradient(how: str) -> None:
    data = dataset(num_samples=96)
    norms: list[float] = []

    def worker(job: Job) -> list[torch.Tensor]:
        model = mlp()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job, max_grad_norm=0.2 if how == "argument" else None)
        for x, y in ht.DistributedLoader(data, BATCH, job):
            optimizer.zero_grad()
            square(model, x, y).backward()
            if how == "method":
                norm = optimizer.clip_grad_norm_(0.2)
                if job.is_first:
                    norms.append(float(norm))
            optimizer.step()
        return snapshot(model)

    outcome = run_ranks(worker, num_workers=2, num_servers=2, config=UNEVEN[2])
    model = mlp()
    plain_norms: list[float] = []

    def clip() -> None:
        plain_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)))

    expected = alone(model, sgd(model), data, epochs=1, before_step=clip)
    assert max(plain_norms) > 0.2, "nothing was clipped: this test shows nothing"
    assert difference(outcome.results[0], expected) <= 1e-5
    if how == "method":
        assert norms == pytest.approx(plain_norms, rel=1e-5)


def test_a_gradient_that_the_script_changes_is_the_one_that_is_pushed() -> None:
    data = dataset(num_samples=48)

    def worker(job: Job) -> list[torch.Tensor]:
        model = mlp()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        for x, y in ht.DistributedLoader(data, BATCH, job):
            optimizer.zero_grad()
            square(model, x, y).backward()
            for param in model.parameters():
                param.grad = param.grad * 0.5
            optimizer.step()
        return snapshot(model)

    outcome = run_ranks(worker, num_workers=2, num_servers=1, config=UNEVEN[2])
    model = mlp()
    expected = alone(model, sgd(model), data, epochs=1, loss=lambda m, x, y: 0.5 * square(m, x, y))
    assert difference(outcome.results[0], expected) <= 1e-6


def test_batch_weights_make_the_mean_over_tokens() -> None:
    """Each sample has its own number of valid tokens; the loss is the mean over a worker's tokens."""
    tokens = torch.arange(96) % 5 + 1.0
    base = dataset(num_samples=96)
    data = torch.utils.data.TensorDataset(torch.cat([base.tensors[0][:, :7], tokens[:, None]], 1), base.tensors[1])

    def by_token(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = x[:, 7:]
        inputs = torch.cat([x[:, :7], torch.ones_like(weights)], 1)
        return (weights * (model(inputs) - y) ** 2).sum() / weights.sum()

    def worker(job: Job) -> list[torch.Tensor]:
        model = mlp()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        for x, y in ht.DistributedLoader(data, BATCH, job):
            optimizer.zero_grad()
            optimizer.set_batch_weight(float(x[:, 7].sum()))
            by_token(model, x, y).backward()
            optimizer.step()
        return snapshot(model)

    outcome = run_ranks(worker, num_workers=2, num_servers=2, config=UNEVEN[2])
    model = mlp()
    expected = alone(model, sgd(model), data, epochs=1, loss=by_token)
    assert difference(outcome.results[0], expected) <= 1e-5


@pytest.mark.parametrize(("num_workers", "num_samples", "batch"), [(4, 33, 2), (4, 3, 16), (2, 17, 16), (4, 21, 5)])
@pytest.mark.parametrize("heterogeneous", [False, True])
def test_batches_smaller_than_the_workers_and_tails_of_one(
    num_workers: int, num_samples: int, batch: int, heterogeneous: bool
) -> None:
    data = dataset(num_samples=num_samples)
    config = dataclasses.replace(UNEVEN[num_workers], heterogeneous=heterogeneous)
    worker = trained(mlp, sgd, data, batch=batch)
    outcome = run_ranks(worker, num_workers=num_workers, num_servers=1, config=config)
    model = mlp()
    expected = alone(model, sgd(model), data, batch=batch)
    for params in outcome.results:
        assert difference(params, expected) <= 1e-5


@pytest.mark.parametrize("num_loading", [0, 2])
def test_loading_processes_give_the_same_samples(num_loading: int) -> None:
    data = dataset(num_samples=50)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return data.tensors[0][index], data.tensors[1][index]

    def worker(job: Job) -> list[torch.Tensor]:
        model = mlp()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        for x, y in ht.DistributedLoader(Rows(), 12, job, num_workers=num_loading):
            optimizer.zero_grad()
            square(model, x, y).backward()
            optimizer.step()
        return snapshot(model)

    outcome = run_ranks(worker, num_workers=2, num_servers=1, config=UNEVEN[2])
    model = mlp()
    expected = alone(model, sgd(model), data, epochs=1, batch=12)
    assert difference(outcome.results[0], expected) <= 1e-6


@pytest.mark.parametrize("num_workers", [1, 2])
def test_overlap_is_one_step_late_and_no_more(num_workers: int) -> None:
    """A gradient is computed on the parameters before the last step; that is by choice, so it does not decay."""
    data = dataset(num_samples=160)
    config = dataclasses.replace(UNEVEN[num_workers], overlap=1)
    outcome = run_ranks(trained(mlp, sgd, data), num_workers=num_workers, num_servers=2, config=config)
    assert all(stats.staleness_max == 1 and stats.num_refused == 0 for stats in outcome.stats)
    model, viewed = mlp(), mlp()
    optimizer = sgd(model)
    for x, y in pooled(data):
        viewed.zero_grad()
        square(viewed, x, y).backward()
        for param, view in zip(model.parameters(), viewed.parameters(), strict=True):
            param.grad = view.grad
            view.data.copy_(param)  # the next gradient sees what was there before this step
        optimizer.step()
    for params in outcome.results:
        assert difference(params, snapshot(model)) <= 1e-5


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


@pytest.mark.parametrize("policy", ["mean", "first", "none"])
def test_batch_norm_statistics_follow_the_policy(policy: str) -> None:
    """Three quarters of the samples go to the first worker; it also ran as many batches as the second."""
    data = dataset(num_samples=64)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    own: dict[int, torch.Tensor] = {}

    def worker(job: Job) -> None:
        model = seeded(Normed)()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        loader = ht.DistributedLoader(data, BATCH, job)
        for x, y in loader:
            optimizer.zero_grad()
            square(model, x, y).backward()
            optimizer.step()
        own[job.worker_index] = model.norm.running_mean.clone()
        job.finish()
        assert model.norm.num_batches_tracked.dtype == torch.int64
        seen[job.worker_index] = (model.norm.running_mean.clone(), model.norm.num_batches_tracked.clone())

    config = dataclasses.replace(UNEVEN[2], data=DataConfig(buffers=policy))
    run_ranks(worker, num_workers=2, num_servers=1, config=config)
    expected = {
        "mean": [0.75 * own[0] + 0.25 * own[1]] * 2,
        "first": [own[0], own[0]],
        "none": [own[0], own[1]],
    }[policy]
    assert not torch.equal(own[0], own[1])
    for index in (0, 1):
        torch.testing.assert_close(seen[index][0], expected[index])
        assert int(seen[index][1]) == 4


def test_every_worker_begins_with_the_first_workers_parameters_and_buffers() -> None:
    def worker(job: Job) -> list[torch.Tensor]:
        with SEEDING:
            torch.manual_seed(100 + job.rank)
            model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(float(job.rank))
        model[0].bias.requires_grad_(False)
        before = [tensor.clone() for tensor in model.state_dict().values()]
        ht.DistributedOptimizer(sgd(model), model, job)
        after = [tensor.clone() for tensor in model.state_dict().values()]
        return [*before, *after]

    results = run_ranks(worker, num_workers=3, num_servers=1).results
    half = len(results[0]) // 2
    for result in results:
        for first, tensor in zip(results[0][:half], result[half:], strict=True):
            assert torch.equal(first, tensor)


# --- refusals ---------------------------------------------------------------------------------------------


def test_two_backward_calls_are_fine_alone_and_refused_in_a_group() -> None:
    data = dataset(num_samples=32)

    def worker(job: Job) -> list[torch.Tensor]:
        model = mlp()
        optimizer = ht.DistributedOptimizer(sgd(model), model, job)
        for x, y in ht.DistributedLoader(data, BATCH, job):
            optimizer.zero_grad()
            (0.5 * square(model, x, y)).backward()
            (0.5 * square(model, x, y)).backward()
            optimizer.step()
        return snapshot(model)

    with pytest.raises(DataError, match="cannot run a second backward at rank .*: its group has exchanged"):
        run_ranks(worker, num_workers=2, config=UNEVEN[2])
    model = mlp()
    expected = alone(model, sgd(model), data, epochs=1)
    assert difference(run_ranks(worker, num_workers=1, config=UNEVEN[1]).results[0], expected) <= 1e-6


def test_a_second_optimizer_is_refused() -> None:
    def worker(job: Job) -> None:
        for _ in range(2):
            model = mlp()
            ht.DistributedOptimizer(sgd(model), model, job)

    with pytest.raises(ConfigError, match="cannot make a second DistributedOptimizer: the job has one"):
        run_ranks(worker, num_workers=2)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), ConfigError, "cannot run torch.optim.lbfgs.LBFGS on servers"),
        (lambda m: torch.optim.Adam(m.parameters(), capturable=True), ConfigError, "group 0 has capturable=True"),
    ],
)
def test_optimizers_that_servers_cannot_run_are_refused(make: Optimizers, error: type[Exception], match: str) -> None:
    def worker(job: Job) -> None:
        model = mlp()
        ht.DistributedOptimizer(make(model), model, job)

    with pytest.raises(error, match=match):
        run_ranks(worker, num_workers=1)


def test_workers_with_different_models_or_rates_are_refused() -> None:
    def worker(job: Job) -> None:
        model = mlp()
        ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 * job.rank), model, job)

    with pytest.raises(PlanMismatchError, match="cannot start training: rank 2 has plan .*, rank 1 has"):
        run_ranks(worker, num_workers=2)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_batch_weights_out_of_range_are_refused(weight: float) -> None:
    def worker(job: Job) -> None:
        model = mlp()
        ht.DistributedOptimizer(sgd(model), model, job).set_batch_weight(weight)

    with pytest.raises(DataError, match="cannot weigh a batch by"):
        run_ranks(worker, num_workers=1)


def test_datasets_of_different_length_are_refused() -> None:
    def worker(job: Job) -> None:
        model = mlp()
        ht.DistributedOptimizer(sgd(model), model, job)
        for _ in ht.DistributedLoader(dataset(num_samples=20 + job.rank), 4, job):
            break

    with pytest.raises(DataError, match="cannot share out loader 0: rank . has .* samples"):
        run_ranks(worker, num_workers=2)
