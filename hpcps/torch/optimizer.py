"""``DistributedOptimizer``: an ordinary optimizer whose update runs on the servers.

A step: the group's mean gradient (``gradients.py``), then each member pushes the shards that it owns, waits as
the mode says, and pulls what is newer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpcps.errors import ConfigError, DataError
from hpcps.runtime.job import Job
from hpcps.runtime.passes import Contribution
from hpcps.torch.buffers import BufferKeeper
from hpcps.torch.flat import FlatTensors, describe_parameters
from hpcps.torch.gradients import GroupGradients
from hpcps.torch.server_optim import describe_optimizer, option_row
from hpcps.torch.sharding import Sharding, choose_servers

__all__ = ["DistributedOptimizer"]

logger = logging.getLogger(__name__)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer of torch.optim. Collective over all ranks when made: same model on every worker.

    Schedulers may be attached to it or to the wrapped optimizer: both share the parameter groups, whose numbers
    travel with every push.

    Args:
        optimizer: an elementwise optimizer of torch.optim; its state stays empty, the servers hold it.
        model: the model; its parameters and buffers start as the first worker's.
        job: the job.
        max_grad_norm: clip the global norm of the group's mean gradient to this before the push; None: do not.
        sharding: gets a parameter's name, its elements and its updates a step, and returns the index of the server
            that shall hold it for good, or None: any, and it may move. The same on every worker. A job of one
            process has one server and does not ask.

    Raises:
        ConfigError: servers cannot run this optimizer, the job has one already, or ``sharding`` names no server.
        DataError: a parameter cannot be trained.
        PlanMismatchError: another worker built another model or optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        job: Job,
        *,
        max_grad_norm: float | None = None,
        sharding: Sharding | None = None,
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
        specs = self._client.with_rules(specs)
        if not job.roles.embedded:
            specs = choose_servers(specs, sharding, num_servers=len(job.roles.servers))
        route = self._client.place(specs)
        self._flat = FlatTensors(self._params, specs, route=route)
        self._buffers = BufferKeeper(model, self._params, job)
        self._client.register(route, specs, rule=rule)
        for flat in self._flat.values.values():
            self._client.broadcast(flat.numpy())
        self._flat.install()
        self._buffers.broadcast()
        self._values = self._flat.shard_values()
        self._staging = self._flat.staging() if self._overlap else self._values
        self._client.load(self._values, self._options())
        self._own_steps = 0
        self._warned_unused = self._reloaded = False
        self._gradients = GroupGradients(self._flat, job, own_row=self._own_row)
        model.register_load_state_dict_post_hook(self._note_reload)  # type: ignore[no-untyped-call]
        job.stepper = self

    # --- what scripts call -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: a backward inside adds to the gradients and starts no exchange."""
        gradients = self._gradients
        before, gradients.sync_enabled = gradients.sync_enabled, False
        try:
            yield
        finally:
            gradients.sync_enabled = before

    def set_batch_weight(self, weight: float) -> None:
        """Weigh this step's gradient by something else than samples, for example valid tokens.

        Call it before backward, on every worker of the group, in every step. The result is the weighted mean
        over all that is accumulated.

        Args:
            weight: of the next backward, 0 or more.
        """
        if not 0 <= weight < float("inf"):
            raise DataError(f"cannot weigh a batch by {weight}; need a finite number of 0 or more")
        self._gradients.custom_weight = float(weight)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not pushed."""
        if not set_to_none:
            self._gradients.wait_pushes()
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        self.drop_gradients()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the global norm of the group's mean gradient; between backward and step. Returns the norm before."""
        self._gradients.finish_backward()
        return torch.nn.utils.clip_grad_norm_(self._params, max_norm)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the group's gradient, wait as the mode says, and take newer parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gradients.finish_backward()
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

    def begin_batch(self) -> None:
        """A batch is about to be given to the script."""
        self._gradients.batch_used = False

    def end_batch(self) -> None:
        """The script asks for the next batch: one that it made nothing of still owes the group a step."""
        if self._gradients.batch_used:
            return
        if not self._warned_unused:
            logger.warning("the script made no gradient of a batch: this worker's part of that step has weight 0")
            self._warned_unused = True
        self.idle_step()

    def idle_step(self) -> None:
        """Take part in the group's step without samples."""
        self._gradients.refuse_idle("this worker", pending=self._gradients.accumulating)
        self._gradients.finish_backward()
        self._exchange()

    def drop_gradients(self) -> None:
        """Forget gradients that were not pushed, also in the middle of a step."""
        if not self._gradients.stepped:
            self._gradients.start_step()

    def refuse_regroup(self) -> None:
        """Groups are about to change: gradients that are held back belong to the old one."""
        if self._gradients.accumulating:
            raise DataError(
                f"cannot change groups at rank {self._job.rank}: gradients of a step that is not over are accumulated;"
                " accumulate the same number of batches from the start of each epoch on, or set grouping.regroup off"
            )

    def refresh(self) -> None:
        """Take the newest parameters; all pushes are settled. Collective over the workers."""
        self._take_staged()
        self._client.share_versions()
        self._client.finish_pull(self._client.start_pull(self._values))
        self._flat.install()

    def finish(self) -> None:
        """Flush all pushes and take the final parameters. Collective over the workers."""
        self._client.wait_settled()
        self.refresh()
        self._buffers.finish()
        self._client.barrier()

    def _note_reload(self, module: torch.nn.Module, keys: object) -> None:
        self._reloaded = True

    # --- step ------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        began_s = time.monotonic()
        self._refuse_reload()
        gradients = self._gradients
        gradients.batch_used = True
        gradients.gather()
        order = self._job.order
        contribution = Contribution(
            weight=gradients.total_weight,
            share_frac=order.share_frac if order is not None else 1.0,
            options=self._group_options(),
            present=gradients.anyone,
            sample_cost=self._job.sample_cost,
        )
        gradients.pushes = self._client.push(gradients.shards, contribution)
        gradients.stepped = True
        staleness = self._client.staleness()
        self._take_newer()
        if not all(ticket.done for ticket in gradients.pushes):
            for param in self._params:  # the memory belongs to the push until it has left
                param.grad = None
        exchange_s = time.monotonic() - began_s
        self._job.end_step(waited_s=gradients.waited_s + exchange_s, exchange_s=exchange_s, staleness=staleness)

    def _take_newer(self) -> None:
        """Wait as the mode says and take what is newer; with overlap, take what the last step asked for."""
        config = self._job.config
        slack = self._overlap
        if len(self._client.grouping.groups) > 1:
            # windows of different shards may hold different groups, each waiting for another's next step, so that step
            # has to be pushed before the last one is settled; with overlap a read ends before the next push
            slack = max(1 + self._overlap, config.staleness.bound)
        if self._overlap:
            self._take_staged()
            self._gradients.staged = self._client.start_pull(self._staging, slack=slack - self._overlap)
        else:
            self._client.finish_pull(self._client.start_pull(self._values, slack=slack))
        self._flat.install()

    def _take_staged(self) -> None:
        """Finish what the last step asked for, and copy it into the model."""
        staged, self._gradients.staged = self._gradients.staged, None
        if staged is not None:
            for key in self._client.finish_pull(staged):
                self._values[key][:] = self._staging[key]

    def _refuse_reload(self) -> None:
        """Values that the script loads into the model never reach the servers, which would take them back."""
        if self._reloaded and not self._job.roles.embedded:
            raise ConfigError(
                f"cannot train on at rank {self._job.rank}: load_state_dict changed the model after the optimizer was"
                " made, but the servers hold the parameters; load before making DistributedOptimizer, or after training"
            )

    def _own_row(self) -> list[float]:
        """This member's steps and options, for the group."""
        return [float(self._own_steps), *self._options()]

    def _group_options(self) -> tuple[float, ...]:
        """The options of the member with the most steps, if those are more than this worker's.

        Where a batch had no samples for a worker, its script did not step its scheduler.
        """
        rows = self._gradients.rows
        lead = int(rows[:, 0].argmax())
        return tuple(rows[lead, 1:].tolist()) if rows[lead, 0] > self._own_steps else self._options()

    def _options(self) -> tuple[float, ...]:
        return tuple(number for group in self.param_groups for number in option_row(group, self._option_names))
