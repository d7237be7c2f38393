"""Train a small MLP on devices whose emulated speeds set the pace. Started by bench.py with ``hpcps launch``."""

from __future__ import annotations

import argparse

from mlp import make_data, make_model, make_optimizer, train_step
from torch.utils.data import TensorDataset

import hpcps
import hpcps.torch as ht

WIDTHS = (64, 256, 256, 64, 10)  # 99 thousand parameters: a step's real work is a small part of its emulated time


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network for some steps.")
    parser.add_argument("--steps", type=int, required=True, help="global steps")
    parser.add_argument("--batch", type=int, required=True, help="samples of one step over all workers")
    args = parser.parse_args()
    with hpcps.init() as job:
        model = make_model(WIDTHS)
        optimizer = ht.DistributedOptimizer(make_optimizer("momentum", model), model, job)
        dataset = TensorDataset(*make_data(args.steps * args.batch, WIDTHS))
        loader = ht.DistributedLoader(dataset, global_batch=args.batch, job=job)
        for _ in job.epochs(1):
            for inputs, classes in loader:
                train_step(model, optimizer, inputs, classes)


if __name__ == "__main__":
    main()
