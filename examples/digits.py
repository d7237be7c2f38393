"""Ten-second smoke run: a small network on the 1,797 handwritten digits that come with scikit-learn.

python examples/digits.py
hpcps launch -n 3 --server-num 1 examples/digits.py --epochs 30
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import hpcps
import hpcps.torch as ht


def main() -> None:
    parser = argparse.ArgumentParser(description="Read handwritten digits with a small network.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training part")
    parser.add_argument("--batch", type=int, default=64, help="samples of one step over all workers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the model")
    args = parser.parse_args()
    with hpcps.init() as job:
        pixels, digits = load_digits(return_X_y=True)
        images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed))
        train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
        torch.manual_seed(args.seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(job.device)
        adam = torch.optim.Adam(model.parameters(), lr=5e-3)
        optimizer = ht.DistributedOptimizer(adam, model, job)
        dataset = torch.utils.data.TensorDataset(images[train], labels[train])
        loader = ht.DistributedLoader(dataset, global_batch=args.batch, job=job)
        for _ in job.epochs(args.epochs):
            for batch_images, batch_labels in loader:
                optimizer.zero_grad()
                logits = model(batch_images.to(job.device))
                loss = nn.functional.cross_entropy(logits, batch_labels.to(job.device))
                loss.backward()
                optimizer.step()
                job.log(loss=loss)
        if job.is_first:
            with torch.no_grad():
                guesses = model(images[test].to(job.device)).argmax(1).cpu()
            accuracy = (guesses == labels[test]).float().mean().item()
            job.summary(test_accuracy=accuracy, num_test_digits=len(test))


if __name__ == "__main__":
    main()
