"""Step times of a real model over an emulated link, with each codec and with auto in turn. Started by chooser.py.

All settings take turns in one job: the codec is pinned for some steps, then the next, and auto chooses in its own turns
with what it learned in them and in the steps before the first turn. The time of a setting is the median of its steps;
auto is set beside another turn by turn, since a machine that others use drifts, and the median of these ratios counts.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Iterator
from operator import truediv
from pathlib import Path

import torch
from runs import write_result
from sklearn.datasets import load_digits
from torch import nn

import hpcps
import hpcps.torch as ht
from hpcps.plan import CodecSpec

SETTINGS = ("none", "fp16", "int8", "topk:0.01", "auto")
BATCHES = {"digits": 32, "text": 16, "rows": 64}
CONTEXT = 32
SETTLE_STEPS = 45  # auto has tried its candidates and may have switched twice


class Digits(nn.Module):
    """A convolutional network on 8 x 8 digits: 0.44 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(1024, 400), nn.ReLU(), nn.Linear(400, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(images))
        return logits


class Text(nn.Module):
    """A small transformer that predicts the next byte: 0.33 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, 128), nn.Embedding(CONTEXT, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.layers(self.bytes(text) + self.places.weight, mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits.transpose(1, 2)


class Rows(nn.Module):
    """A recommender's shape on real words: a big table of which a batch touches few rows; 0.56 M parameters."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(num_rows, 64, mode="mean")
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(ids))
        return logits


def read_text() -> bytes:
    """Real text that every machine has: sources of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(folder.glob("[a-e]*.py")))


def make(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Model, inputs and labels."""
    torch.manual_seed(0)
    if name == "digits":
        pixels, digits = load_digits(return_X_y=True)
        return Digits(), torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    text = read_text()
    if name == "text":
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        rows = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)[:20_000]
        return Text(), rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    words = text.split()
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    num_rows = min(len(numbers), 8_700)
    ids = torch.tensor([numbers[word] % num_rows for word in words])
    rows = ids[: len(ids) // 16 * 16].view(-1, 16)
    return Rows(num_rows), rows, (rows < 1000).sum(1).gt(8).long()


def batches(loader: ht.DistributedLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the steps of a model with each codec in turn.")
    parser.add_argument("model", choices=("digits", "text", "rows"))
    parser.add_argument("--turns", type=int, required=True, help="turns of each setting")
    parser.add_argument("--steps", type=int, required=True, help="timed steps of a turn")
    args = parser.parse_args()
    with hpcps.init() as job:
        model, inputs, labels = make(args.model)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        dataset = torch.utils.data.TensorDataset(inputs, labels)
        stream = batches(ht.DistributedLoader(dataset, global_batch=BATCHES[args.model], job=job))
        compression = job.client.compression

        def step() -> float:
            began_s = time.perf_counter()
            x, y = next(stream)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            return time.perf_counter() - began_s

        for _ in range(SETTLE_STEPS):
            step()
        times_s: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
        for turn in range(args.turns):
            order = SETTINGS if turn % 2 == 0 else SETTINGS[::-1]
            for name in order:
                compression.pin(None if name == "auto" else CodecSpec.parse(name))
                step()
                times_s[name].append([step() for _ in range(args.steps)])
        compression.pin(None)
        if job.is_first:
            medians = {name: [statistics.median(turn) for turn in turns] for name, turns in times_s.items()}
            ratios = {
                f"auto/{name}": statistics.median(map(truediv, medians["auto"], turns))
                for name, turns in medians.items()
            }
            write_result(**{name: statistics.median(turns) for name, turns in medians.items()}, **ratios)


if __name__ == "__main__":
    main()
