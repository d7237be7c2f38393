"""``DistributedLoader``: this worker's part of every batch, sized by what it can do now.

The coordinator hands out ranges of the epoch's permutation; each sample of an epoch goes to exactly one
worker. Where samples have costs the range is the group's, and its members find their own samples in it by the same
rule. A batch with nothing for this worker is not shown to the script: the worker then takes part in the
group's step with weight 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hpcps.errors import DataError
from hpcps.runtime.job import Job
from hpcps.runtime.passes import LoaderPass, Order
from hpcps.runtime.work import BatchWork, TakePart
from hpcps.torch.costs import Cost, Numbers, read_costs

__all__ = ["DistributedLoader"]

Part: TypeAlias = tuple[Order, BatchWork | None]
"""This worker's part of a batch, and what it costs where samples have costs."""

_LOADED_AHEAD = 2
"""Batches that torch's loader lets each loading process load ahead."""


class DistributedLoader:
    """Iterate over this worker's batches of the job's current epoch.

    Args:
        dataset: map-style dataset, the same on every worker.
        global_batch: samples of one full step over all workers, at least 1.
        job: the job.
        shuffle: a new order every epoch, from the job's seed; off: the dataset's order.
        train: the batches are trained on; off: shares stay equal and no step is owed (evaluation).
        num_workers: loading processes, 0 for none.
        collate_fn: joins samples into a batch, torch's own by default.
        cost: what each sample costs, where that differs, in any unit: one number a sample; the key, or the place, of
            such a column in the samples; a function of the sample; or ``LearnedCost`` of such. A function, a key or a
            place reads every sample once on every worker when the loader is made: for a big dataset pass numbers.

    Raises:
        DataError: the dataset has no length, the batch is smaller than 1, or a cost is missing or out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        job: Job,
        *,
        shuffle: bool = True,
        train: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        cost: Cost | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(
                f"cannot share out a {type(dataset).__name__}: it has no length; need a map-style dataset with"
                " __len__ and __getitem__"
            )
        if global_batch < 1:
            raise DataError(f"cannot use a global batch of {global_batch}; need at least 1")
        self._dataset = dataset
        self._job = job
        self._shuffle = shuffle
        self._train = train
        self._num_workers = num_workers
        self._collate_fn = collate_fn
        self._num_samples = len(dataset)
        if self._num_samples == 0:
            raise DataError("cannot share out an empty dataset; need at least one sample")
        self._costs = read_costs(dataset, cost, self._num_samples) if cost is not None else None
        self._take_part = TakePart(job.config.partition)
        self._loader = job.open_loader(
            self._num_samples,
            global_batch,
            trains=train,
            costs=self._costs.digest if self._costs is not None else "",
            num_features=self._costs.num_features if self._costs is not None else 0,
        )
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        epoch = self._passes
        self._passes += 1
        pass_ = self._job.begin_pass(self._loader, epoch, trains=self._train)
        pass_.held = _LOADED_AHEAD * self._num_workers
        batches = self._batches(self._orders(pass_))
        try:
            yield from self._steps(batches, pass_)
        except GeneratorExit:
            pass_.left = True
            raise
        if self._train:
            self._job.end_pass(pass_)

    def _steps(self, batches: Iterator[tuple[Any, float]], pass_: LoaderPass) -> Iterator[Any]:
        """The batches of the script, and the steps between them that it has no samples for."""
        while True:
            began_s, waited_s = time.monotonic(), pass_.waited_s
            batch = next(batches, None)
            if batch is None:
                break
            read_s = batch[1] or time.monotonic() - began_s - (pass_.waited_s - waited_s)
            order, work = pass_.orders.popleft()
            fetch_s = 0.0 if order.count == 0 else read_s
            if self._train:
                self._job.adopt(order)
            self._job.begin_batch(order, fetch_s=fetch_s, work=work if self._train else None)
            stepper = self._job.stepper if self._train else None
            pass_.given += 1
            if order.count:
                if stepper is not None:
                    stepper.begin_batch()
                yield batch[0]
                if stepper is not None:
                    stepper.end_batch()
            elif stepper is not None:
                stepper.idle_step()
            pass_.done += 1

    def _orders(self, pass_: LoaderPass) -> Iterator[Numbers]:
        """Sample numbers of each batch of the epoch, asked for ahead of use; the orders go to the pass."""
        ahead = self._job.config.data.prefetch_steps
        permutation = self._permutation(pass_.epoch)
        for _ in range(ahead):
            self._job.request_order(pass_)
        while not (order := self._job.take_order(pass_)).end:
            part, samples = self._part(order, permutation)
            pass_.orders.append(part)
            yield samples
            self._job.request_order(pass_)
        while pass_.taken < pass_.asked:
            self._job.take_order(pass_)

    def _part(self, order: Order, permutation: Numbers) -> tuple[Part, Numbers]:
        """This worker's part of a batch, and the numbers of its samples."""
        if self._costs is None or not order.fixed_s:
            return (order, None), permutation[order.start : order.start + order.count]
        group = permutation[order.start : order.start + order.group_count]
        costs = self._costs.of(group, order.cost_weights)
        order, mine = self._take_part.find(order, costs)
        own = group[mine]
        work = BatchWork(own=float(costs[mine].sum()), group=float(costs.sum()), features=self._costs.sums(own))
        return (order, work), own

    def _batches(self, samples: Iterator[Numbers]) -> Iterator[tuple[Any, float]]:
        """Pairs of a batch and the seconds that reading it took (0: not known)."""
        dataset = self._dataset
        if self._num_workers == 0:
            for numbers in samples:
                began_s = time.monotonic()
                batch = self._fetch(dataset, numbers) if numbers.size else ()
                yield batch, time.monotonic() - began_s
            return
        loader = DataLoader(
            dataset,
            batch_sampler=_Sampler(samples),
            num_workers=self._num_workers,
            prefetch_factor=_LOADED_AHEAD,
            collate_fn=_SkipEmpty(self._collate_fn),
        )
        for batch in loader:
            yield batch, 0.0

    def _fetch(self, dataset: Dataset[Any], numbers: Numbers) -> Any:
        if isinstance(dataset, TensorDataset) and self._collate_fn is None:
            chosen = torch.from_numpy(numbers)
            return [tensor.index_select(0, chosen.to(tensor.device)) for tensor in dataset.tensors]
        get_many = getattr(dataset, "__getitems__", None)
        wanted = numbers.tolist()
        samples = get_many(wanted) if get_many is not None else [dataset[number] for number in wanted]
        return _SkipEmpty(self._collate_fn)(samples)

    def _permutation(self, epoch: int) -> Numbers:
        if not self._shuffle:
            return np.arange(self._num_samples)
        seed = (self._job.config.seed, self._loader, epoch)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(self._num_samples)


class _Sampler:
    """Batches of sample numbers, for torch's loader."""

    def __init__(self, samples: Iterator[Numbers]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        return (numbers.tolist() for numbers in self._samples)


class _SkipEmpty:
    """A collate function that lets an empty batch through."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Sequence[Any]) -> Any:
        if not len(samples):
            return ()
        if self._collate_fn is not None:
            return self._collate_fn(list(samples))
        return torch.utils.data.default_collate(list(samples))
