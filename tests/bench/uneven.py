"""Train a small MLP on devices whose emulated speeds set the pace. Started with ``hpcps launch`` by other programs."""

from __future__ import annotations

import argparse

from mlp import make_data, make_model, make_optimizer, train_step
from torch.utils.data import TensorDataset

import hpcps
import hpcps.torch as ht

WIDTHS = (64, 256, 256, 64, 10)  # 99 thousand parameters: a step's real work is a small part of its emulated time
SMALL_WIDTHS = (8, 10, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network for some steps.")
    parser.add_argument("--steps", type=int, required=True, help="global steps")
    parser.add_argument("--batch", type=int, required=True, help="samples of one step over all workers")
    parser.add_argument("--small", action="store_true", help="a network of 210 parameters, for many ranks on few cores")
    args = parser.parse_args()
    widths = SMALL_WIDTHS if args.small else WIDTHS
    with hpcps.init() as job:
        model = make_model(widths)
        optimizer = ht.DistributedOptimizer(make_optimizer("momentum", model), model, job)
        dataset = TensorDataset(*make_data(args.steps * args.batch, widths))
        loader = ht.DistributedLoader(dataset, global_batch=args.batch, job=job)
        for _ in job.epochs(1):
            for inputs, classes in loader:
                train_step(model, optimizer, inputs, classes)


if __name__ == "__main__":
    main()
