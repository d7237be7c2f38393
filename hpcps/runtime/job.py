"""What a training script holds: the job. Counts epochs, hands out batches, keeps time, logs, ends well."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol

from hpcps.config import RunConfig
from hpcps.errors import DataError
from hpcps.plan import Roles
from hpcps.protocol.control import LoaderOpen, Order, OrderRequest
from hpcps.runtime.client import WorkerClient
from hpcps.runtime.metrics import EventLog

__all__ = ["Job", "Order", "Stepper"]


class Stepper(Protocol):
    """What the job needs of an optimizer that works on the servers."""

    def begin_batch(self) -> None:
        """A batch is about to be given to the script."""

    def end_batch(self) -> None:
        """The script asks for the next batch."""

    def idle_step(self) -> None:
        """Take part in the group's step without samples."""

    def finish(self) -> None:
        """Flush all pushes and give every worker the final parameters. Collective over the workers."""


class Job:
    """A worker's view of the job. Made by ``hpcps.init()``.

    Args:
        client: this worker's end.
        config: the run's settings.
        roles: who serves and who works.
        events: where events go.
        device: name of the torch device for the model.
        close: frees channel and logs, collective over all ranks.
        abort: ends all ranks after an error.
    """

    def __init__(
        self,
        client: WorkerClient,
        config: RunConfig,
        *,
        roles: Roles,
        events: EventLog,
        device: str,
        close: Callable[[], None],
        abort: Callable[[BaseException], None],
    ) -> None:
        self.client = client
        self.config = config
        self.roles = roles
        self.device = device
        self.epoch = 0
        self.num_steps = 0
        self.num_samples = 0
        self.order: Order | None = None
        self.stepper: Stepper | None = None
        self._events = events
        self._close = close
        self._abort = abort
        self._num_epochs = 0
        self._num_loaders = 0
        self._timed: list[float] = []
        self._num_unreported = 0
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._staleness = 0
        self._batch_began_s = self._step_ended_s = time.monotonic()
        self._batch_compute_s = self._step_compute_s = 0.0
        self._step_samples = 0
        self._overslept_s = 0.0
        self._closed = False

    @property
    def rank(self) -> int:
        """World rank of this worker."""
        return self.client.rank

    @property
    def num_workers(self) -> int:
        """Workers of the job."""
        return len(self.roles.workers)

    @property
    def worker_index(self) -> int:
        """This worker's number among the workers, from 0."""
        return self.roles.workers.index(self.rank)

    @property
    def is_first(self) -> bool:
        """True on the worker that evaluates and reports."""
        return self.worker_index == 0

    # --- for scripts -------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Number the epochs; after the last one every worker holds the same final parameters.

        Args:
            count: epochs, 0 or more.
        """
        if count < 0:
            raise DataError(f"cannot run {count} epochs; need 0 or more; change the argument of job.epochs")
        self._num_epochs = self.epoch + count
        for _ in range(count):
            yield self.epoch
            self.epoch += 1
        self.finish()

    def log(self, **values: object) -> None:
        """Note values of this step (numbers or one-element tensors); means are weighted by samples.

        Args:
            values: name and value, for example ``loss=loss``.
        """
        weight = float(self.order.count) if self.order else 1.0
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * _number(value)
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def summary(self, **values: float) -> None:
        """Write final results as an event, and one line on the console of the worker that calls it."""
        self._events.write("summary", **{name: float(value) for name, value in values.items()})
        line = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        logging.getLogger("hpcps.summary").warning("%s", line)

    def barrier(self) -> None:
        """Wait for all workers."""
        self.client.barrier()

    def finish(self) -> None:
        """Flush, wait for all workers, and take the final parameters. Collective over the workers."""
        self.client.end_of_data()
        if self.stepper is not None:
            self.stepper.finish()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = error is not None and not (isinstance(error, SystemExit) and error.code in (0, None))
        if failed and error is not None:
            self._events.close()
            self._abort(error)
        else:
            self.close()

    def close(self) -> None:
        """Leave the job. Collective over all ranks; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.client.end_of_data()
            if self.client.registered:
                self.client.wait_settled()
            self.client.leave()
            self._events.close()
            self._close()

    # --- for loaders and optimizers ------------------------------------------------------------------------

    def open_loader(self, num_samples: int, global_batch: int, *, trains: bool) -> int:
        """Make a loader known; returns its index."""
        index = self._num_loaders
        self._num_loaders += 1
        self.client.tell_coordinator(
            LoaderOpen(
                rank=self.rank,
                loader=index,
                num_samples=num_samples,
                global_batch=global_batch,
                trains=trains,
            )
        )
        return index

    def request_order(self, loader: int, epoch: int, index: int) -> None:
        """Ask for a batch and report what was measured since the last request."""
        names = list(self._sums)
        self.client.tell_coordinator(
            OrderRequest(
                rank=self.rank,
                loader=loader,
                epoch=epoch,
                index=index,
                num_epochs=self._num_epochs,
                timed=self._timed,
                logged=names,
                sums=[self._sums[name] for name in names],
                weights=[self._weights[name] for name in names],
                staleness=self._staleness,
                num_samples=self._num_unreported,
            )
        )
        self._timed, self._sums, self._weights, self._num_unreported = [], {}, {}, 0

    def begin_batch(self, order: Order, *, fetch_s: float) -> None:
        """A batch is in the script's hands; ``fetch_s`` is what reading it took."""
        self._note_compute()
        self.order = order
        self._batch_began_s = time.monotonic() - fetch_s

    def end_compute(self) -> None:
        """The gradients of this batch are there: the emulated device waits here, then time is taken."""
        self._emulate()
        self._batch_compute_s = time.monotonic() - self._batch_began_s

    def end_step(self, *, waited_s: float, exchange_s: float, staleness: int) -> None:
        """The parameters of the next step are in the model.

        Args:
            waited_s: seconds of the step in which the worker waited for others.
            exchange_s: those of them from the push to the end of the pull.
            staleness: versions that the model is behind.
        """
        now_s = time.monotonic()
        self._note_compute()
        self.num_steps += 1
        self.num_samples += self._step_samples
        self._staleness = max(self._staleness, staleness)
        self._events.write(
            "step",
            step=self.num_steps,
            epoch=self.epoch,
            num_samples=self._step_samples,
            compute_s=self._step_compute_s,
            wait_s=waited_s,
            step_s=now_s - self._step_ended_s,
            staleness=staleness,
            **self.client.compression.volume(),
        )
        self.client.end_step(exchange_s=exchange_s, step_s=now_s - self._step_ended_s)
        self._step_ended_s = now_s
        self._step_samples, self._step_compute_s = 0, 0.0

    def _note_compute(self) -> None:
        """The batch at hand is over: add its samples and seconds to the step (a step may accumulate batches)."""
        if self.order is not None and self._batch_compute_s > 0:
            self._step_samples += self.order.count
            self._step_compute_s += self._batch_compute_s
            self._num_unreported += self.order.count
            if self.order.count:
                self._timed += [float(self.order.count), self._batch_compute_s]
        self._batch_compute_s = 0.0

    def _emulate(self) -> None:
        """Fill the step up to the time of the stated device; what a sleep overran is taken off the next."""
        emulate = self.config.emulate
        if not emulate.speeds or self.order is None:
            return
        device_s = self.order.count * emulate.sample_s / emulate.speeds[self.worker_index]
        end_s = self._batch_began_s + device_s - self._overslept_s
        left_s = end_s - time.monotonic()
        self._overslept_s = 0.0
        if left_s > 0:
            time.sleep(left_s)
            self._overslept_s = max(0.0, time.monotonic() - end_s)


def _number(value: object) -> float:
    """A number, or the one number in a tensor, without its graph."""
    detach = getattr(value, "detach", None)
    return float(detach() if detach is not None else value)  # type: ignore[arg-type]
