"""Equal workers: the step of two workers and a server with hpcps, or of two ranks with torch DDP on gloo.

Same model, global batch, optimizer and data; one thread a rank. DDP stays as it is by default.

    hpcps launch -n 3 tests/bench/equal.py hpcps       (bench.py does this)
    python tests/bench/equal.py ddp
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import torch
from mlp import GLOBAL_BATCH, NUM_STEPS, batches, make_data, make_model, make_optimizer, measure_steps, train_step
from runs import write_result
from torch.utils.data import TensorDataset

import hpcps
import hpcps.torch as ht
from hpcps.runtime.job import Job

NUM_WORKERS = 2
NUM_SAMPLES = 16 * GLOBAL_BATCH


def hpcps_steps(job: Job) -> Iterator[None]:
    """Each ``next`` is a step of this worker."""
    model = make_model()
    optimizer = ht.DistributedOptimizer(make_optimizer("sgd", model), model, job)
    loader = ht.DistributedLoader(TensorDataset(*make_data(NUM_SAMPLES)), global_batch=GLOBAL_BATCH, job=job)
    for _ in job.epochs(NUM_STEPS * GLOBAL_BATCH // NUM_SAMPLES):
        for inputs, classes in loader:
            train_step(model, optimizer, inputs, classes)
            yield


def run_hpcps() -> None:
    with hpcps.init() as job:
        steps = hpcps_steps(job)
        step_s, cpu_s = measure_steps(steps)
        for _ in steps:
            pass
        if job.is_first:
            write_result(samples_per_s=GLOBAL_BATCH / step_s, cpu_s=cpu_s)


def ddp_steps(rank: int) -> Iterator[None]:
    """Each ``next`` is a step of this rank."""
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = make_optimizer("sgd", model)
    inputs_of_all, classes_of_all = make_data(NUM_SAMPLES)
    own = inputs_of_all[rank::NUM_WORKERS], classes_of_all[rank::NUM_WORKERS]
    for inputs, classes in batches(own, GLOBAL_BATCH // NUM_WORKERS, seed=rank):
        train_step(model, optimizer, inputs, classes)
        yield


def run_ddp_rank(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=NUM_WORKERS)
    step_s, cpu_s = measure_steps(ddp_steps(rank))
    torch.distributed.destroy_process_group()
    if rank == 0:
        write_result(samples_per_s=GLOBAL_BATCH / step_s, cpu_s=cpu_s)


def run_ddp() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run_ddp_rank, args=(port,), nprocs=NUM_WORKERS)


if __name__ == "__main__":
    {"hpcps": run_hpcps, "ddp": run_ddp}[sys.argv[1]]()
