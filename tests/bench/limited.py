"""Train a network on ranks that may stand under quotas of the processor. Started by relief.py and quotas.py."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from mlp import make_data, make_model, train_step
from torch.utils.data import TensorDataset

import hpcps
import hpcps.torch as ht
from hpcps.launch.environment import launcher_hint

sys.path.append(str(Path(__file__).resolve().parents[1] / "lab"))

from quota import enter


def enter_quota(text: str) -> None:
    """Put this rank under its quota, of a list ``RANK=FILE,...``; before MPI starts its threads."""
    hint = launcher_hint(os.environ)
    files = dict(entry.split("=", 1) for entry in text.split(",") if entry)
    file = files.get(str(hint.rank)) if hint is not None else None
    if file is not None:
        enter(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network for some steps.")
    parser.add_argument("--steps", type=int, required=True, help="global steps")
    parser.add_argument("--batch", type=int, required=True, help="samples of one step over all workers")
    parser.add_argument("--widths", required=True, help="of the layers, such as 64:256:10")
    parser.add_argument("--quotas", default="", help="RANK=FILE,...: the group that each rank enters")
    parser.add_argument("--optimizer", default="SGD", help="class of torch.optim")
    args = parser.parse_args()
    enter_quota(args.quotas)
    widths = tuple(int(width) for width in args.widths.split(":"))
    with hpcps.init() as job:
        model = make_model(widths)
        optimizer = ht.DistributedOptimizer(
            getattr(torch.optim, args.optimizer)(model.parameters(), lr=1e-4), model, job
        )
        num_samples = min(args.steps, 16) * args.batch
        loader = ht.DistributedLoader(TensorDataset(*make_data(num_samples, widths)), args.batch, job)
        for _ in job.epochs(-(-args.steps * args.batch // num_samples)):
            for inputs, classes in loader:
                train_step(model, optimizer, inputs, classes)


if __name__ == "__main__":
    main()
