"""``DistributedOptimizer``: an ordinary optimizer whose update runs on the servers.

    backward   each parameter's hook: gradient times (my samples / group's samples) into the flat gradients;
               when a shard is complete, and all before it are, its allreduce starts
    its end    the last allreduces, then p.grad is the group's mean gradient, as after DDP's backward
    step       each member pushes the shards that it owns, waits as the mode says, pulls what is newer

Shards are reduced in one fixed order, the last parameters first, so that members whose graphs differ in a
step still start the same collectives. ``p.grad`` may be read and changed between backward and step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hpcps.errors import ConfigError, DataError
from hpcps.runtime.client import Array, Contribution, Pull, Ticket
from hpcps.runtime.job import Job
from hpcps.torch.buffers import BufferKeeper
from hpcps.torch.flat import FlatTensors, describe_parameters
from hpcps.torch.server_optim import describe_optimizer, option_row

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer of torch.optim. Collective over all ranks when made: same model on every worker.

    Schedulers may be attached to it or to the wrapped optimizer: both share the parameter groups, whose numbers
    travel with every push.

    Args:
        optimizer: an elementwise optimizer of torch.optim; its state stays empty, the servers hold it.
        model: the model; its parameters and buffers start as the first worker's.
        job: the job.
        max_grad_norm: clip the global norm of the group's mean gradient to this before the push; None: do not.

    Raises:
        ConfigError: servers cannot run this optimizer, or the job has one already.
        DataError: a parameter cannot be trained.
        PlanMismatchError: another worker built another model or optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, job: Job, *, max_grad_norm: float | None = None
    ) -> None:
        if job.stepper is not None:
            raise ConfigError(
                "cannot make a second DistributedOptimizer: the job has one; put all parameters into one optimizer,"
                " with a parameter group for each model"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"cannot clip to max_grad_norm {max_grad_norm}; need a number above 0 or None")
        self.defaults = optimizer.defaults
        self.state = optimizer.state
        self.param_groups = optimizer.param_groups
        self._wrapped = optimizer
        self._job = job
        self._client = job.client
        self._max_grad_norm = max_grad_norm
        self._overlap = 0 if job.roles.embedded else job.config.overlap
        rule = describe_optimizer(optimizer)
        self._option_names = rule.option_names
        names = {id(param): name for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))}
        self._params, specs = describe_parameters(self.param_groups, names)
        route = self._client.place(specs)
        self._flat = FlatTensors(self._params, specs, route=route)
        self._buffers = BufferKeeper(model, self._params, job)
        self._client.register(route, specs, rule=rule)
        for flat in self._flat.values.values():
            self._client.broadcast(flat.numpy())
        self._flat.install()
        self._buffers.broadcast()
        self._values, self._grads = self._flat.shard_values(), self._flat.shard_grads()
        self._staging = self._flat.staging() if self._overlap else self._values
        self._client.load(self._values, self._options())
        self._pull: Pull | None = None
        self._pushes: list[Ticket] = []
        self._sync_enabled = True
        self._custom_weight: float | None = None
        self._own_steps = 0
        self._lead_options: tuple[float, ...] = ()
        self._start_step()
        for index, param in enumerate(self._params):
            param.register_post_accumulate_grad_hook(self._make_hook(index))  # type: ignore[no-untyped-call]
        job.stepper = self

    # --- what scripts call -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: a backward inside adds to the gradients and starts no exchange."""
        before, self._sync_enabled = self._sync_enabled, False
        try:
            yield
        finally:
            self._sync_enabled = before

    def set_batch_weight(self, weight: float) -> None:
        """Weigh this step's gradient by something else than samples, for example valid tokens.

        Call it before backward, on every worker of the group, in every step. The result is the weighted mean
        over all that is accumulated.

        Args:
            weight: of the next backward, 0 or more.
        """
        if not 0 <= weight < float("inf"):
            raise DataError(f"cannot weigh a batch by {weight}; need a finite number of 0 or more")
        self._custom_weight = float(weight)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not pushed."""
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        if not self._stepped:
            self._start_step()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the global norm of the group's mean gradient; between backward and step. Returns the norm before."""
        self._finish_backward()
        return torch.nn.utils.clip_grad_norm_(self._params, max_norm)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the group's gradient, wait as the mode says, and take newer parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_backward()
        if self._max_grad_norm is not None:
            self.clip_grad_norm_(self._max_grad_norm)
        self._exchange()
        self._own_steps += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The parameter groups; moments are on the servers."""
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: the moments are on the servers."""
        raise ConfigError(
            "cannot load an optimizer state into DistributedOptimizer: its moments are on the servers, which start"
            " from nothing; load the model's parameters before making the optimizer instead"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the servers' plan is made once."""
        raise ConfigError(
            "cannot add a parameter group to DistributedOptimizer: the servers hold the tensors that it was made with;"
            " give all parameter groups to the wrapped optimizer first"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._wrapped!r})"

    # --- what the job calls ----------------------------------------------------------------------------

    def idle_step(self) -> None:
        """Take part in the group's step without samples."""
        if self._weight > 0 and not self._reduced:
            raise DataError(
                f"cannot end the epoch at rank {self._job.rank}: its last batch has no samples left for this worker"
                " while gradients are being accumulated; use a global batch that divides the data, or fewer workers"
            )
        self._finish_backward()
        self._exchange()

    def finish(self) -> None:
        """Flush all pushes and take the final parameters. Collective over the workers."""
        self._take_staged()
        self._client.wait_settled()
        self._client.share_versions()
        self._client.finish_pull(self._client.start_pull(self._values))
        self._flat.install()
        self._buffers.finish()
        self._client.barrier()

    # --- backward --------------------------------------------------------------------------------------

    def _start_step(self) -> None:
        """Nothing is accumulated."""
        self._stepped = False
        self._reduced = False
        self._in_backward = False
        self._weight = 0.0
        self._scale = 1.0
        self._plain = True
        self._present = [False] * len(self._params)
        self._left = [len(tensors) for tensors in self._flat.tensors_of]
        self._next_key = len(self._left) - 1
        self._reductions: list[Ticket] = []

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            self._on_gradient(index)

        return hook

    def _begin_backward(self) -> None:
        """First gradient of a backward: buffers must be free, the weight of this batch is known."""
        if self._stepped:
            self._client.wait("the last push to leave its buffers", tickets=self._pushes)
            self._start_step()
        if self._pull is not None:
            self._client.go_on(self._pull)
        alone = len(self._client.group.workers) == 1
        if self._reduced and not alone:
            raise DataError(
                f"cannot run a second backward at rank {self._job.rank}: its group has exchanged the gradients of the"
                " first; put all backward calls of a step but the last into optimizer.no_sync()"
            )
        self._reduced = False
        self._in_backward = True
        order = self._job.order
        samples = float(order.count) if order is not None else 1.0
        total = float(order.group_count) if order is not None else float(len(self._client.group.workers))
        weight = samples if self._custom_weight is None else self._custom_weight
        self._plain = self._plain and alone and self._custom_weight is None
        self._weight += weight
        self._scale = weight if self._custom_weight is not None else samples / total if total > 0 else 0.0
        ended = self._end_backward if self._sync_enabled else self._end_accumulation
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _on_gradient(self, index: int) -> None:
        if not self._in_backward:
            self._begin_backward()
        param, view = self._params[index], self._flat.grad_views[index]
        gradient = param.grad
        if gradient is None:
            return
        with torch.no_grad():
            self._add(index, gradient.to_dense() if gradient.is_sparse else gradient, view)
        param.grad = view if self._plain and self._flat.grad_is_view(index) else None
        self._present[index] = True
        if self._sync_enabled and not self._plain:
            for key in self._flat.keys_of[index]:
                self._left[key] -= 1
            self._reduce_complete()

    def _add(self, index: int, gradient: torch.Tensor, view: torch.Tensor) -> None:
        """Put a gradient into the flat space, scaled by this worker's part of the group."""
        if gradient.data_ptr() == view.data_ptr() and gradient.numel():
            if self._scale != 1.0:
                view.mul_(self._scale)
        elif self._present[index]:
            view.add_(gradient.to(view.device, view.dtype), alpha=self._scale)
        elif self._scale == 1.0 or gradient.dtype != view.dtype or gradient.device != view.device:
            view.copy_(gradient)
            if self._scale != 1.0:
                view.mul_(self._scale)
        else:
            torch.mul(gradient, self._scale, out=view)

    def _reduce_complete(self) -> None:
        """Start the allreduce of every shard that is complete and next in order."""
        while self._next_key >= 0 and self._left[self._next_key] == 0:
            self._reductions.append(self._client.allreduce(self._grads[self._next_key]))
            self._next_key -= 1

    def _end_accumulation(self) -> None:
        """A backward inside ``no_sync`` is over."""
        self._in_backward = False
        self._custom_weight = None
        self._job.end_compute()

    def _end_backward(self) -> None:
        """A backward is over: wait for the group, then show its mean gradient."""
        self._in_backward = False
        self._job.end_compute()
        self._reduce()

    def _finish_backward(self) -> None:
        """Make sure that the group's gradient is there, also where nothing was computed."""
        if self._stepped:
            self._client.wait("the last push to leave its buffers", tickets=self._pushes)
            self._start_step()
        if not self._reduced:
            self._reduce()

    def _reduce(self) -> None:
        """Sum the group's gradients, and who has any; before its last part no member can push this step.

        So a staged read that is over by then has the same versions on all members.
        """
        if self._pull is not None:
            self._client.wait_pull(self._pull)
        with torch.no_grad():
            for index, present in enumerate(self._present):
                if not present:
                    self._flat.grad_views[index].zero_()
        self._left = [0] * len(self._left)
        if len(self._client.group.workers) > 1:
            self._reduce_complete()
        custom = self._custom_weight is not None
        tail = np.array([self._weight, custom, *self._present, *self._own_row()], np.float64)
        self._reductions.append(self._client.allreduce(tail))
        began_s = time.monotonic()
        self._client.wait("the gradients of the group", tickets=self._reductions)
        self._waited_s = time.monotonic() - began_s
        self._total_weight = float(tail[0])
        self._anyone = (tail[2 : 2 + len(self._params)] > 0).tolist()
        self._follow(tail[2 + len(self._params) :])
        if tail[1] > 0 and self._total_weight > 0:
            for gradient in self._grads:
                gradient /= self._total_weight
        self._custom_weight = None
        self._reduced = True
        with torch.no_grad():
            for index, param in enumerate(self._params):
                self._show(index, param)

    def _show(self, index: int, param: torch.nn.Parameter) -> None:
        """Let ``p.grad`` be the group's mean gradient."""
        if not self._anyone[index]:
            param.grad = None
        elif self._flat.grad_is_view(index):
            param.grad = self._flat.grad_views[index]
        else:
            param.grad = self._flat.grad_views[index].to(param.device, param.dtype)

    # --- step ------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        began_s = time.monotonic()
        self._gather()
        order = self._job.order
        contribution = Contribution(
            weight=self._total_weight,
            share_frac=order.share_frac if order is not None else 1.0,
            options=self._lead_options or self._options(),
            present=self._anyone,
        )
        self._pushes = self._client.push(self._grads, contribution)
        self._stepped = True
        staleness = self._client.staleness()
        self._take_newer()
        self._job.end_step(waited_s=self._waited_s + time.monotonic() - began_s, staleness=staleness)

    def _take_newer(self) -> None:
        """Wait as the mode says and take what is newer; with overlap, take what the last step asked for."""
        config = self._job.config
        slack = self._overlap
        if len(self._client.grouping.groups) > 1:
            # at least 1: windows of different shards may hold different groups, each waiting for another's next step
            slack = max(1, self._overlap, config.staleness.bound)
        if self._overlap:
            self._take_staged()
            self._pull = self._client.start_pull(self._staging, slack=slack - self._overlap)
        else:
            self._client.finish_pull(self._client.start_pull(self._values, slack=slack))
        self._flat.install()

    def _take_staged(self) -> None:
        """Finish what the last step asked for, and copy it into the model."""
        if self._pull is not None:
            for key in self._client.finish_pull(self._pull):
                self._values[key][:] = self._staging[key]
            self._pull = None

    def _gather(self) -> None:
        """Copy gradients that the script holds elsewhere, changed or replaced, back into the flat space."""
        with torch.no_grad():
            for index, param in enumerate(self._params):
                view = self._flat.grad_views[index]
                if not self._anyone[index]:
                    continue
                if param.grad is None:
                    view.zero_()
                elif param.grad.data_ptr() != view.data_ptr():
                    view.copy_(param.grad)

    def _own_row(self) -> list[float]:
        """A row for each member of the group: its steps and options in its own, zeros in the others'."""
        options = self._options()
        row, members = [float(self._own_steps), *options], self._client.group.workers
        before = members.index(self._job.rank) * len(row)
        return [0.0] * before + row + [0.0] * (len(members) * len(row) - before - len(row))

    def _follow(self, rows: Array) -> None:
        """Take the options of the member with the most steps, if those are more than this worker's.

        Where a batch had no samples for a worker, its script did not step its scheduler.
        """
        table = rows.reshape(len(self._client.group.workers), -1)
        lead = int(table[:, 0].argmax())
        behind = table[lead, 0] > self._own_steps
        self._lead_options = tuple(table[lead, 1:].tolist()) if behind else ()

    def _options(self) -> tuple[float, ...]:
        return tuple(number for group in self.param_groups for number in option_row(group, self._option_names))
