"""Waiting for an order is no part of what reading a batch took."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import TensorDataset

import hpcps.torch as ht
from hpcps.protocol.control import Order
from hpcps.runtime.job import Job
from hpcps.runtime.mail import Mail

WITHHELD_S = 0.2


@pytest.mark.parametrize("num_loading", [0, 1])
def test_an_order_that_is_withheld_makes_no_worker_slow(monkeypatch: pytest.MonkeyPatch, num_loading: int) -> None:
    answered = Mail.wait_order

    def late(self: Mail, loader: int, epoch: int, index: int) -> Order:
        time.sleep(WITHHELD_S)
        return answered(self, loader, epoch, index)

    monkeypatch.setattr(Mail, "wait_order", late)

    def work(job: Job) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, job)
        data = TensorDataset(torch.ones(40, 2))
        for _ in job.epochs(1):
            for (x,) in ht.DistributedLoader(data, 4, job, num_workers=num_loading):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    steps = run_ranks(work, num_workers=1).of_event("step")
    assert len(steps) == 10
    assert median(step["compute_s"] for step in steps[3:]) < WITHHELD_S / 2
