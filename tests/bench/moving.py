"""Train constants while their shards change servers, and count the updates of each element. Started by migrate.py.

Every gradient is 1 and the optimizer is plain SGD with a power of two as learning rate, so the final value of an
element says exactly how many updates it got: it starts as a small whole number and loses the learning rate at each.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import hpcps
import hpcps.torch as ht

LEARNING_RATE = 2.0**-10
NUM_TENSORS = 16


class Constants(nn.Module):
    """Tensors without a computation; the loss is their sum."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        each = numel // NUM_TENSORS
        values = (torch.arange(each, dtype=torch.int32).remainder_(7).float() for _ in range(NUM_TENSORS))
        self.tensors = nn.ParameterList([nn.Parameter(each) for each in values])

    def forward(self) -> torch.Tensor:
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum()


def count_wrong(model: Constants, num_steps: int) -> int:
    """Elements that did not get exactly that many updates."""
    wrong = 0
    with torch.no_grad():
        for tensor in model.tensors:
            right = torch.arange(tensor.numel(), dtype=torch.int32).remainder_(7).float()
            wrong += int(tensor.ne(right.sub_(num_steps * LEARNING_RATE)).sum())
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Move shards while training.")
    parser.add_argument("--mib", type=int, required=True, help="MiB of parameters")
    parser.add_argument("--steps", type=int, required=True, help="steps of a full batch")
    parser.add_argument("--schedule", required=True, help="STEP=SERVERS;...: after that step only these hold shards")
    args = parser.parse_args()
    schedule = {
        int(step): [int(server) for server in servers.split(":")]
        for step, servers in (entry.split("=") for entry in args.schedule.split(";"))
    }
    with hpcps.init() as job:
        model = Constants(args.mib * 2**20 // 4)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), model, job)
        dataset = torch.utils.data.TensorDataset(torch.zeros(args.steps * job.num_workers, 1))
        loader = ht.DistributedLoader(dataset, global_batch=job.num_workers, job=job)
        for _ in job.epochs(1):
            for step, _ in enumerate(loader, start=1):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
                if job.is_first and step in schedule:
                    job.use_servers(schedule[step])
        job.summary(wrong_elems=count_wrong(model, args.steps), steps=job.num_steps)


if __name__ == "__main__":
    main()
