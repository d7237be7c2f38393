"""Train on texts of very unlike length, on devices whose pace goes with the bytes of their batch.

Texts are the blocks between blank lines of the standard library's sources, which every machine has: on average 230
bytes, with a coefficient of variation of 1. Whatever the shares, a step in sync mode is on the same texts, so runs
differ in time and not in what is learned. Started with ``hpcps launch``, four workers and a server:

    count     shares count samples: whoever got long texts is waited for
    given     cost= the texts' lengths
    learned   cost= LearnedCost of the lengths

Prints the samples a second of the steps after the warm-up, and the loss on the first texts at the end.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from runs import write_result
from torch import nn
from torch.utils.data import Dataset

import hpcps
import hpcps.torch as ht
from hpcps.runtime.emulation import Pace

LONGEST = 1024
CONTEXT = 8
SPEEDS = (3.0, 2.0, 1.0, 1.0)
NUM_JUDGED = 512


def read_texts() -> list[bytes]:
    """Blocks of the sources between blank lines, cut to 1024 bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    whole = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-e]*.py")))
    return [block[:LONGEST] for block in re.split(rb"\n\s*\n", whole) if block.strip()]


class Texts(Dataset[torch.Tensor]):
    """Each text as its bytes."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._texts[index]), dtype=torch.uint8)


class NextByte(nn.Module):
    """Predicts each byte from the eight before it: no padding, work goes with the bytes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(257, 12, padding_idx=256)
        self.layers = nn.Sequential(nn.Linear(CONTEXT * 12, 64), nn.Tanh(), nn.Linear(64, 256))

    def forward(self, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Mean over texts of the mean over their bytes."""
        padded = [nn.functional.pad(text.long(), (CONTEXT, 0), value=256) for text in texts]
        contexts = torch.cat([text[:-1].unfold(0, CONTEXT, 1) for text in padded])
        parts = torch.cat([torch.full((len(text),), 1 / len(text)) for text in texts])
        logits = self.layers(self.bytes(contexts).flatten(1))
        losses = nn.functional.cross_entropy(logits, torch.cat(list(texts)).long(), reduction="none")
        loss: torch.Tensor = (losses * parts).sum() / len(texts)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on texts of unlike length, on devices of unlike speed.")
    parser.add_argument("cost", choices=("count", "given", "learned"), help="what shares are made by")
    parser.add_argument("--steps", type=int, default=160, help="steps in all, at least one more than --skip")
    parser.add_argument("--skip", type=int, default=40, help="first steps that do not count")
    parser.add_argument("--batch", type=int, default=32, help="texts of one step over all workers")
    parser.add_argument("--step-s", type=float, default=0.2, help="mean seconds of a step that is shared out evenly")
    args = parser.parse_args()
    texts = read_texts()[: args.steps * args.batch]
    lengths = [len(text) for text in texts]
    byte_s = args.step_s * sum(SPEEDS) / (args.batch * sum(lengths) / len(lengths))
    cost = {"count": None, "given": lengths, "learned": ht.LearnedCost(features=lengths)}[args.cost]
    dataset = Texts(texts)
    with hpcps.init() as job:
        torch.manual_seed(0)
        model, pace, device_s, began_s = NextByte(), Pace(), 0.0, 0.0
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model, job)
        # the last gradient of a backward: the emulated device is done now, and the step's compute ends with it
        model.bytes.weight.register_hook(lambda gradient: pace.fill(began_s, device_s))
        loader = ht.DistributedLoader(dataset, args.batch, job, collate_fn=list, cost=cost)
        counted_s, num_counted = 0.0, 0
        for _ in job.epochs(-(-args.steps * args.batch // len(texts))):
            for batch in loader:
                began_s = time.monotonic()
                device_s = sum(map(len, batch)) * byte_s / SPEEDS[job.worker_index % len(SPEEDS)]
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                optimizer.step()
                job.log(loss=loss)
                if job.num_steps == args.skip:
                    counted_s, num_counted = time.monotonic(), job.num_steps
                elif job.num_steps == args.steps:
                    counted_s, num_counted = time.monotonic() - counted_s, job.num_steps - num_counted
        if job.is_first:
            with torch.no_grad():
                final = model([dataset[index] for index in range(min(NUM_JUDGED, len(texts)))])
            write_result(samples_per_s=num_counted * args.batch / counted_s, loss=float(final))


if __name__ == "__main__":
    main()
