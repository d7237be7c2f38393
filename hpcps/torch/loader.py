"""``DistributedLoader``: this worker's part of every batch, sized by what it can do now.

The coordinator hands out ranges of the epoch's permutation; each sample of an epoch goes to exactly one
worker. A batch with nothing for this worker is not shown to the script: the worker then takes part in the
group's step with weight 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hpcps.errors import DataError
from hpcps.runtime.job import Job, Order

__all__ = ["DistributedLoader"]

Numbers: TypeAlias = npt.NDArray[np.int64]
"""Numbers of samples in the dataset."""


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

    Raises:
        DataError: the dataset has no length, or the batch is smaller than 1.
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
        self._loader = job.open_loader(self._num_samples, global_batch, trains=train)
        self._passes = 0
        self._last: Order | None = None

    def __iter__(self) -> Iterator[Any]:
        epoch = self._passes
        self._passes += 1
        orders: deque[Order] = deque()
        batches = self._batches(self._orders(epoch, orders))
        while True:
            began_s = time.monotonic()
            batch = next(batches, None)
            if batch is None:
                break
            order = orders.popleft()
            if self._train and self._job.client.adopt(order):
                began_s = time.monotonic()
            self._job.begin_batch(order, fetch_s=0.0 if order.count == 0 else batch[1] or time.monotonic() - began_s)
            stepper = self._job.stepper if self._train else None
            if order.count == 0:
                if stepper is not None:
                    stepper.idle_step()
                continue
            if stepper is not None:
                stepper.begin_batch()
            yield batch[0]
            if stepper is not None:
                stepper.end_batch()
        if self._train:
            # where the others drew the last samples of the epoch in a new grouping, this worker must still join it
            if self._last is not None:
                self._job.client.adopt(self._last)
            self._job.client.end_of_data()

    def _orders(self, epoch: int, orders: deque[Order]) -> Iterator[Numbers]:
        """Sample numbers of each batch of the epoch, asked for ahead of use; the orders go to the deque."""
        ahead = self._job.config.data.prefetch_steps
        permutation = self._permutation(epoch)
        for index in range(ahead):
            self._job.request_order(self._loader, epoch, index)
        index = 0
        while True:
            order = self._job.client.order(self._loader, epoch, index)
            if order.end:
                self._last = order
                break
            orders.append(order)
            yield permutation[order.start : order.start + order.count]
            self._job.request_order(self._loader, epoch, index + ahead)
            index += 1
        for later in range(index + 1, index + ahead):
            self._job.client.order(self._loader, epoch, later)

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
