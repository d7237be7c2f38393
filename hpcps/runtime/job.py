"""What a training script holds: the job. Counts epochs, hands out batches, keeps time, logs, ends well."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from hpcps.config import RunConfig
from hpcps.errors import DataError
from hpcps.plan import Roles
from hpcps.protocol.control import LoaderOpen, Order, OrderRequest
from hpcps.runtime.client import WorkerClient
from hpcps.runtime.emulation import Pace, worker_device
from hpcps.runtime.metrics import EventLog
from hpcps.runtime.observe import MemoryMeter, Observer
from hpcps.runtime.passes import LoaderPass, Stepper
from hpcps.runtime.work import BatchWork

__all__ = ["Job"]


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
        self._passes: dict[tuple[int, int], LoaderPass] = {}
        """By loader and epoch: those to train on that are not over."""
        self._timed: list[float] = []
        self._features: list[float] = []
        self._num_features = 0
        self._num_unreported = 0
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._staleness = 0
        self._batch_began_s = self._step_ended_s = time.monotonic()
        self._batch_compute_s = self._step_compute_s = 0.0
        self._step_samples = self._step_batches = 0
        self._batches_per_step = 1
        self._work: BatchWork | None = None
        self._group_work = self._group_samples = 0.0
        self._device = worker_device(config.emulate, roles.workers.index(client.rank))
        self._pace = Pace()
        self._observer = Observer(client.channel, num_servers=0 if roles.embedded else len(roles.servers))
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

    @property
    def clock(self) -> int:
        """Steps of this worker's group, the same on all its members; where groups changed, of the fastest before."""
        return self.client.clock

    def barrier(self) -> None:
        """Wait for all workers; in hybrid mode, outside of loops over batches: groups differ in pace."""
        self._leave_passes(left_only=True)
        self.client.barrier()

    def use_servers(self, servers: Sequence[int]) -> None:
        """Let only these servers hold the model from now on; shards move there while training goes on.

        One worker calls it, for example the first one. Tensors that a sharding function gave to a server stay there.

        Args:
            servers: numbers of servers, from 0, each once and at least one.

        Raises:
            ConfigError: there is no such server, they have no room for all shards, or shards may not move.
        """
        self.client.use_servers(servers)

    def finish(self) -> None:
        """Flush, wait for all workers, and take the final parameters. Collective over the workers."""
        self._leave_passes()
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
            self._leave_passes()
            self.client.end_of_data()
            if self.client.registered:
                self.client.wait_settled()
            self.client.leave()
            self._observer.close()
            self._events.close()
            self._close()

    # --- for loaders and optimizers ------------------------------------------------------------------------

    def open_loader(
        self, num_samples: int, global_batch: int, *, trains: bool, costs: str = "", num_features: int = 0
    ) -> int:
        """Make a loader known; returns its index."""
        index = self._num_loaders
        self._num_loaders += 1
        if num_features:
            self._num_features = num_features
            self._features = [0.0] * (num_features * (len(self._timed) // 2))
        self.client.mail.tell_coordinator(
            LoaderOpen(
                rank=self.rank,
                loader=index,
                num_samples=num_samples,
                global_batch=global_batch,
                trains=trains,
                costs=costs,
                num_features=num_features,
            )
        )
        return index

    def begin_pass(self, loader: int, epoch: int, *, trains: bool) -> LoaderPass:
        """An epoch of a loader begins; those to train on that the script left early end here."""
        pass_ = LoaderPass(loader, epoch)
        if trains:
            self._leave_passes(left_only=True)
            self._passes[loader, epoch] = pass_
        return pass_

    def take_order(self, pass_: LoaderPass) -> Order:
        """Wait for the next order of an epoch."""
        began_s = time.monotonic()
        order = self.client.mail.wait_order(pass_.loader, pass_.epoch, pass_.taken)
        pass_.waited_s += time.monotonic() - began_s
        pass_.taken += 1
        if order.end:
            pass_.last = pass_.last or order
        return order

    def end_pass(self, pass_: LoaderPass) -> None:
        """An epoch is over; where others drew its last samples in a new grouping, this worker must still join it."""
        del self._passes[pass_.loader, pass_.epoch]
        if pass_.last is not None:
            self.adopt(pass_.last)
        self.client.end_of_data()

    def adopt(self, order: Order) -> bool:
        """Change groups if an order belongs to a new grouping; True if it did. Collective over the workers."""
        if order.generation == self.client.grouping.generation:
            return False
        if self.stepper is not None:
            self.stepper.refuse_regroup()
        return self.client.adopt(order, refresh=self.stepper.refresh if self.stepper is not None else None)

    def _leave_passes(self, *, left_only: bool = False) -> None:
        """End epochs that the script left early; also those that it still holds an iterator of, unless left only."""
        for pass_ in list(self._passes.values()):
            if pass_.left or not left_only:
                self._leave_pass(pass_)

    def _leave_pass(self, pass_: LoaderPass) -> None:
        """End an epoch for this worker's group: members that are still in it must not wait for this one.

        It takes part, without samples, in the steps that were handed out already. A step that the script left between
        backward and step is dropped: it must have been so on all members.
        """
        if self.stepper is not None:
            self.stepper.drop_gradients()
            if pass_.given > pass_.done:
                self.stepper.end_batch()
        if pass_.last is None:
            self.request_order(pass_, leaves=True)
        while pass_.orders or pass_.last is None:
            order = pass_.orders.popleft()[0] if pass_.orders else self.take_order(pass_)
            if order.end:
                break
            self.adopt(order)
            self.begin_batch(order, fetch_s=0.0)
            if self.stepper is not None:
                self.stepper.idle_step()
            if pass_.taken == pass_.asked:
                self.request_order(pass_)
        while pass_.taken < pass_.asked:
            self.take_order(pass_)
        self.end_pass(pass_)

    def request_order(self, pass_: LoaderPass, *, leaves: bool = False) -> None:
        """Ask for the next batch of an epoch and report what was measured since the last request.

        Args:
            pass_: the epoch.
            leaves: the script left it before its end.
        """
        names, seen = list(self._sums), self._observer.take()
        index, pass_.asked = pass_.asked, pass_.asked + 1
        self.client.mail.tell_coordinator(
            OrderRequest(
                rank=self.rank,
                loader=pass_.loader,
                epoch=pass_.epoch,
                index=index,
                num_epochs=self._num_epochs,
                timed=self._timed,
                logged=names,
                sums=[self._sums[name] for name in names],
                weights=[self._weights[name] for name in names],
                staleness=self._staleness,
                num_samples=self._num_unreported,
                features=self._features,
                link_s=seen.link_s,
                links=seen.links,
                cpu_wait_frac=seen.cpu_wait_frac,
                max_samples=seen.max_samples,
                done=pass_.done,
                held=pass_.held,
                leaves=leaves,
                batches_per_step=self._batches_per_step,
            )
        )
        self._features, self._staleness = [], 0
        self._timed, self._sums, self._weights, self._num_unreported = [], {}, {}, 0

    @property
    def batch_work(self) -> float:
        """Work of the batch at hand: its samples, or their cost where samples have costs, in units of a mean sample."""
        if self._work is not None:
            return self._work.own
        return float(self.order.count) if self.order is not None else 0.0

    @property
    def sample_cost(self) -> float:
        """Mean cost of a sample of the group in this step, in units of a mean sample; 1 where costs are not known."""
        return self._group_work / self._group_samples if self._group_samples > 0 else 1.0

    def begin_batch(self, order: Order, *, fetch_s: float, work: BatchWork | None = None) -> None:
        """A batch is in the script's hands.

        Args:
            order: what the batch is.
            fetch_s: what reading it took.
            work: what its samples cost; None: all cost the same.
        """
        self._note_compute()
        self.order = order
        self._work = work
        if work is not None:
            self._group_work += work.group
            self._group_samples += order.group_count
        self._observer.begin_batch(order.count, alike=work is None)
        self._batch_began_s = time.monotonic() - fetch_s

    def watch_memory(self, meter: MemoryMeter) -> None:
        """Measure what batches need, so that no share outgrows this worker's memory."""
        self._observer.watch_memory(meter)

    def end_compute(self) -> None:
        """The gradients of this batch are there: the emulated device waits here, then time is taken."""
        self._emulate()
        self._batch_compute_s = time.monotonic() - self._batch_began_s
        if self.order is not None:
            self._observer.end_compute(self.order.count, self._batch_compute_s)

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
        self._observer.end_step(self._step_batches)
        self._batches_per_step = max(self._batches_per_step, self._step_batches)
        self._step_samples, self._step_batches, self._step_compute_s = 0, 0, 0.0
        self._group_work = self._group_samples = 0.0

    def _note_compute(self) -> None:
        """The batch at hand is over: add its samples and seconds to the step (a step may accumulate batches)."""
        if self.order is not None and self._batch_compute_s > 0:
            self._step_samples += self.order.count
            self._step_batches += 1
            self._step_compute_s += self._batch_compute_s
            self._num_unreported += self.order.count
            if self.order.count:
                self._timed += [self.batch_work, self._batch_compute_s]
                known = self._work.features if self._work is not None else ()
                self._features += known or [0.0] * self._num_features
        self._batch_compute_s = 0.0

    def _emulate(self) -> None:
        """Fill the step up to the time of the stated device."""
        if self._device is not None and self.order is not None:
            self._pace.fill(self._batch_began_s, self._device.seconds(self.num_steps + 1, self.batch_work))


def _number(value: object) -> float:
    """A number, or the one number in a tensor, without its graph."""
    detach = getattr(value, "detach", None)
    return float(detach() if detach is not None else value)  # type: ignore[arg-type]
