"""The group's gradient: hooks gather a worker's own, allreduces make it the mean over the group's samples.

    backward   each parameter's hook: gradient times (my samples / group's samples) into the flat gradients;
               when a shard is complete, and all before it are, its allreduce starts
    its end    the last allreduces and a tail of weights and presence, then p.grad is the group's mean gradient

Shards are reduced in one fixed order, the last parameters first, so that members whose graphs differ in a
step still start the same collectives. ``p.grad`` may be read and changed between backward and step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hpcps.errors import DataError
from hpcps.runtime.client import Array, Pull, Ticket
from hpcps.runtime.job import Job
from hpcps.torch.flat import FlatTensors

__all__ = ["GroupGradients"]


class GroupGradients:
    """Gradients of one step of one worker and its group.

    Args:
        flat: the model's flat space.
        job: the job.
        own_row: numbers of this member that the others want to see, the same count on all members.
    """

    def __init__(self, flat: FlatTensors, job: Job, *, own_row: Callable[[], Sequence[float]]) -> None:
        self.sync_enabled = True
        self.custom_weight: float | None = None
        self.batch_used = False
        self.staged: Pull | None = None
        """A read that was started by the last step; it is over before the group's last reduction."""
        self.pushes: list[Ticket] = []
        """Pushes that may still read the flat gradients."""
        self.total_weight = 0.0
        self.anyone: list[bool] = []
        """By parameter: whether anyone in the group had a gradient."""
        self.rows: Array = np.empty((0, 0))
        """The row of each member."""
        self.waited_s = 0.0
        self._flat = flat
        self._params = flat.params
        self._shards = flat.shard_grads()
        self._job = job
        self._client = job.client
        self._own_row = own_row
        self.start_step()
        for index, param in enumerate(self._params):
            param.register_post_accumulate_grad_hook(self._make_hook(index))  # type: ignore[no-untyped-call]

    @property
    def shards(self) -> list[Array]:
        """The flat gradients of every shard, by key."""
        return self._shards

    @property
    def accumulating(self) -> bool:
        """True while gradients are held that no exchange has taken."""
        return self._weight > 0 and not self._reduced

    def start_step(self) -> None:
        """Nothing is accumulated."""
        self.stepped = False
        self._reduced = False
        self._in_backward = False
        self._weight = 0.0
        self._scale = 1.0
        self._plain = True
        self._present = [False] * len(self._params)
        self._left = [len(tensors) for tensors in self._flat.tensors_of]
        self._next_key = len(self._left) - 1
        self._reductions: list[Ticket] = []

    def wait_pushes(self) -> None:
        """Wait until the last push has left its buffers."""
        self._client.mail.wait("the last push to leave its buffers", tickets=self.pushes)

    def finish_backward(self) -> None:
        """Make sure that the group's gradient is there, also where nothing was computed."""
        if self.stepped:
            self.wait_pushes()
            self.start_step()
        if not self._reduced:
            self._reduce()

    def gather(self) -> None:
        """Copy gradients that the script holds elsewhere, changed or replaced, back into the flat space."""
        with torch.no_grad():
            for index, param in enumerate(self._params):
                view = self._flat.grad_views[index]
                if not self.anyone[index]:
                    continue
                if param.grad is None:
                    view.zero_()
                elif param.grad.data_ptr() != view.data_ptr():
                    view.copy_(param.grad)

    def refuse_idle(self, who: str, *, pending: bool) -> None:
        """A member without samples cannot know whether the others exchange or accumulate."""
        if pending:
            raise DataError(
                f"cannot go on at rank {self._job.rank}: a batch has no samples for {who} while gradients are being"
                " accumulated; use a global batch that divides the data, fewer workers, or skip no batch"
            )

    # --- backward --------------------------------------------------------------------------------------

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            self._on_gradient(index)

        return hook

    def _begin_backward(self) -> None:
        """First gradient of a backward: buffers must be free, the weight of this batch is known."""
        if self.stepped:
            self.wait_pushes()
            self.start_step()
        if self.staged is not None:
            self._client.go_on(self.staged)
        alone = len(self._client.group.workers) == 1
        if self._reduced and not alone:
            raise DataError(
                f"cannot run a second backward at rank {self._job.rank}: its group has exchanged the gradients of the"
                " first; put all backward calls of a step but the last into optimizer.no_sync()"
            )
        self._reduced = False
        self._in_backward = True
        self.batch_used = True
        order = self._job.order
        samples = float(order.count) if order is not None else 1.0
        total = float(order.group_count) if order is not None else float(len(self._client.group.workers))
        custom = self.custom_weight
        self._plain = self._plain and alone and custom is None
        self._weight += samples if custom is None else custom
        self._scale = custom if custom is not None else samples / total if total > 0 else 0.0
        ended = self._end_backward if self.sync_enabled else self._end_accumulation
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
        if self.sync_enabled and not self._plain:
            for key in self._flat.keys_of[index]:
                self._left[key] -= 1
            self._reduce_complete()

    def _add(self, index: int, gradient: torch.Tensor, view: torch.Tensor) -> None:
        """Put a gradient into the flat space, scaled by this worker's part of the group; nothing for a part of 0."""
        if self._scale == 0.0:
            if not self._present[index]:
                view.zero_()
            return
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

    def _end_accumulation(self) -> None:
        """A backward inside ``no_sync`` is over."""
        order = self._job.order
        self.refuse_idle("another worker", pending=order is not None and order.num_idle > 0)
        self._in_backward = False
        self.custom_weight = None
        self._job.end_compute()

    def _end_backward(self) -> None:
        """A backward is over: wait for the group, then show its mean gradient."""
        self._in_backward = False
        self._job.end_compute()
        self._reduce()

    # --- group -----------------------------------------------------------------------------------------

    def _reduce_complete(self) -> None:
        """Start the allreduce of every shard that is complete and next in order."""
        while self._next_key >= 0 and self._left[self._next_key] == 0:
            self._reductions.append(self._client.allreduce(self._shards[self._next_key]))
            self._next_key -= 1

    def _reduce(self) -> None:
        """Sum the group's gradients, and who has any; before its last part no member can push this step.

        So a staged read that is over by then has the same versions on all members.
        """
        if self.staged is not None:
            self._client.wait_pull(self.staged)
        with torch.no_grad():
            for index, present in enumerate(self._present):
                if not present:
                    self._flat.grad_views[index].zero_()
        self._left = [0] * len(self._left)
        if len(self._client.group.workers) > 1:
            self._reduce_complete()
        tail = self._tail()
        self._reductions.append(self._client.allreduce(tail))
        began_s = time.monotonic()
        self._client.mail.wait("the gradients of the group", tickets=self._reductions)
        self.waited_s = time.monotonic() - began_s
        self._read_tail(tail)
        self.custom_weight = None
        self._reduced = True
        with torch.no_grad():
            for index, param in enumerate(self._params):
                self._show(index, param)

    def _tail(self) -> Array:
        """Weight, does it count, is it the script's own, presence by parameter, and a row for each member."""
        weighs = self._weight > 0
        custom = weighs and self.custom_weight is not None
        row, members = self._own_row(), self._client.group.workers
        rows = np.zeros((len(members), len(row)))
        rows[members.index(self._job.rank)] = row
        return np.array([self._weight, weighs, custom, *self._present, *rows.reshape(-1)], np.float64)

    def _read_tail(self, tail: Array) -> None:
        weight, num_weights, num_custom = tail[:3].tolist()
        self.total_weight = weight
        self.anyone = (tail[3 : 3 + len(self._params)] > 0).tolist()
        self.rows = tail[3 + len(self._params) :].reshape(len(self._client.group.workers), -1)
        if 0 < num_custom < num_weights:
            raise DataError(
                f"cannot weigh this step at rank {self._job.rank}: {num_custom:g} of {num_weights:g} workers called"
                " set_batch_weight; call it on all of them, in every step, or on none"
            )
        if num_custom > 0:
            for gradient in self._shards:
                gradient /= weight

    def _show(self, index: int, param: torch.nn.Parameter) -> None:
        """Let ``p.grad`` be the group's mean gradient."""
        if not self.anyone[index]:
            param.grad = None
        elif self._flat.grad_is_view(index):
            param.grad = self._flat.grad_views[index]
        else:
            param.grad = self._flat.grad_views[index].to(param.device, param.dtype)
