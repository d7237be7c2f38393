"""What of a model the servers do not train: buffers (BatchNorm's statistics) and frozen parameters.

They start as the first worker's. While training, each worker keeps its own; at the end the policy
``data.buffers`` makes them one: ``mean`` weighs floats by the samples that each worker saw and takes the
largest of integer counters, ``first`` takes the first worker's, ``none`` leaves them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpcps.runtime.job import Job

__all__ = ["BufferKeeper"]


class BufferKeeper:
    """Buffers and frozen parameters of one model.

    Args:
        model: the model.
        trained: parameters that the servers train.
        job: the job.
    """

    def __init__(self, model: torch.nn.Module, trained: Sequence[torch.nn.Parameter], job: Job) -> None:
        skip = {id(param) for param in trained}
        self._job = job
        self._buffers = list(model.buffers())
        self._frozen = [param for param in model.parameters() if id(param) not in skip]

    def broadcast(self) -> None:
        """Give all workers the first worker's. Collective over the workers."""
        for tensor in [*self._buffers, *self._frozen]:
            self._broadcast_one(tensor.data)

    def finish(self) -> None:
        """Apply the policy. Collective over the workers."""
        policy = self._job.config.data.buffers
        if policy == "none" or self._job.num_workers == 1:
            return
        for buffer in self._buffers:
            if policy == "mean" and buffer.is_floating_point():
                self._mean(buffer)
            elif policy == "mean" and not buffer.is_complex() and buffer.dtype != torch.bool:
                self._largest(buffer)
            else:
                self._broadcast_one(buffer)

    def _broadcast_one(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            host = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
            self._job.client.broadcast(host)
            tensor.copy_(torch.from_numpy(host).view(tensor.dtype).view(tensor.shape))

    def _mean(self, buffer: torch.Tensor) -> None:
        """Weighted by samples, summed in double."""
        weight = float(self._job.num_samples)
        total = np.append(buffer.detach().double().cpu().reshape(-1).numpy() * weight, weight)
        self._sum(total)
        if total[-1] > 0:
            buffer.copy_(torch.from_numpy(total[:-1] / total[-1]).view(buffer.shape))

    def _largest(self, buffer: torch.Tensor) -> None:
        """Every worker shows its numbers in a row of its own; exact up to 2**53."""
        rows = np.zeros((self._job.num_workers, buffer.numel()))
        rows[self._job.worker_index] = buffer.detach().cpu().reshape(-1).numpy()
        self._sum(rows.reshape(-1))
        buffer.copy_(torch.from_numpy(rows.max(axis=0)).view(buffer.shape))

    def _sum(self, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        ticket = self._job.client.allreduce(values, everyone=True)
        self._job.client.mail.wait("the buffers of the other workers", tickets=(ticket,))
