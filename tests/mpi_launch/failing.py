"""A small training script that fails where it is told to: ``failing.py PLACE RANK``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

PLACE, RANK = sys.argv[1], int(sys.argv[2])
FOLDER = Path(os.environ["HPCPS_TEST_DIR"])
ME = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


def fail(place: str) -> None:
    """Fail here if this is the place and the rank."""
    if (place, ME) != (PLACE, RANK):
        return
    (FOLDER / "failed").write_text(repr(time.time()))
    raise RuntimeError(f"planned failure in {place} on rank {ME}")


fail("before_init")

import torch  # noqa: E402

import hpcps  # noqa: E402
import hpcps.runtime.entry as entry  # noqa: E402
import hpcps.torch as ht  # noqa: E402
import hpcps.torch.server_optim as server_optim  # noqa: E402


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Eight numbers a sample; a worker may hold more or fewer than the others."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.taken = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.taken += 1
        if self.taken > 40:
            fail("dataset")
        return torch.full((8,), float(index % 7))


def main() -> None:
    make_rule = server_optim.make_rule

    def broken_make_rule(*args, **kwargs):  # type: ignore[no-untyped-def]
        fail("server")
        return make_rule(*args, **kwargs)

    open_logs = entry.open_logs

    def broken_open_logs(*args, **kwargs):  # type: ignore[no-untyped-def]
        fail("open_logs")
        open_logs(*args, **kwargs)

    server_optim.make_rule = broken_make_rule
    entry.open_logs = broken_open_logs
    with hpcps.init() as job:
        odd = RANK == ME
        model = torch.nn.Linear(8, 3 if PLACE == "other_model" and odd else 2)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        data = Numbers(4001 if PLACE == "other_dataset" and odd else 4000)
        loader = ht.DistributedLoader(data, global_batch=20, job=job)
        fail("before_step")
        for _ in job.epochs(10_000):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if job.num_steps > 5:
                    fail("loop")
                    if (PLACE, RANK) == ("exit3", ME):
                        (FOLDER / "failed").write_text(repr(time.time()))
                        sys.exit(3)
                    (FOLDER / f"trains-{ME}").touch()


main()
