"""Push and pull of one float32 tensor, two workers to one server, without any model. Started by bench.py.

A round: each worker pushes a gradient of the tensor's size and pulls the new values. With ``each`` the workers are a
group each, so both push everything and the server sums; with ``one`` they are one group, which sums first and
pushes once. The result is checked against the values that the rounds must give. MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from runs import write_result

import hpcps
from hpcps.plan import TensorSpec
from hpcps.protocol.control import Order
from hpcps.runtime.job import Job
from hpcps.runtime.passes import Contribution
from hpcps.update.rule import RuleSpec

LR = 2.0**-10  # a power of two, so that the check is exact
RULE = RuleSpec(
    kind="sgd",
    option_names=("lr", "momentum", "dampening", "weight_decay"),
    options=((LR, 0.0, 0.0, 0.0),),
    flags=((("nesterov", False), ("maximize", False)),),
)
NUM_WARMUP = 3


class Exchange:
    """One worker's end of the rounds."""

    def __init__(self, job: Job, numel: int, grouping: str) -> None:
        self.client = job.client
        self.num_workers = job.num_workers
        tensors = (TensorSpec(name="tensor", numel=numel, dtype="float32", param_group=0),)
        route = self.client.place(tensors)
        self.client.register(route, tensors, rule=RULE)
        # worker 0 pushes ones, worker 1 threes: their mean is two
        self.gradient = np.full(numel, 1.0 + 2.0 * job.worker_index, np.float32)
        self.mean_gradient = np.empty_like(self.gradient)
        self.values = np.zeros(numel, np.float32)
        cuts = [(shard.begin, shard.begin + shard.numel) for shard in route.shards]
        self.value_shards = [self.values[begin:end] for begin, end in cuts]
        self.client.load(self.value_shards, RULE.options[0])
        self.alone = grouping == "each"
        if self.alone:
            self.client.adopt(_order([[rank] for rank in job.roles.workers]))
        pushed = self.gradient if self.alone else self.mean_gradient
        self.gradient_shards = [pushed[begin:end] for begin, end in cuts]

    def round(self) -> tuple[float, float]:
        """One round; seconds from its start to when the push is applied, and to its end."""
        began_s = time.perf_counter()
        if not self.alone:
            np.multiply(self.gradient, 1.0 / self.num_workers, out=self.mean_gradient)
            tickets = [self.client.allreduce(shard) for shard in reversed(self.gradient_shards)]
            self.client.mail.wait("the group's gradient", tickets=tickets)
        share_frac = 1.0 / self.num_workers if self.alone else 1.0
        contribution = Contribution(weight=share_frac, share_frac=share_frac, options=RULE.options[0], present=[True])
        self.client.push(self.gradient_shards, contribution)
        self.client.wait_settled()
        settled_s = time.perf_counter()
        self.client.finish_pull(self.client.start_pull(self.value_shards))
        return settled_s - began_s, time.perf_counter() - began_s

    def meet(self) -> None:
        """Wait for the other worker; at a barrier of the job groups would pause, and no window wait for them."""
        ticket = self.client.allreduce(np.zeros(1), everyone=True)
        self.client.mail.wait("the other worker", tickets=(ticket,))


def _order(groups: list[list[int]]) -> Order:
    """Says nothing but the grouping."""
    return Order(
        loader=0, epoch=0, index=0, end=False, start=0, count=0, group_count=0, num_idle=0, share_frac=1.0,
        generation=1, groups=groups,
    )  # fmt: skip


def copy_bytes_per_s(array: np.ndarray) -> float:
    """Bytes a second of np.copyto of an array, median."""
    target = np.zeros_like(array)
    times_s = []
    for _ in range(9):
        began_s = time.perf_counter()
        np.copyto(target, array)
        times_s.append(time.perf_counter() - began_s)
    return array.nbytes / statistics.median(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure push and pull.")
    parser.add_argument("grouping", choices=("each", "one"))
    parser.add_argument("--mb", type=int, required=True, help="size of the tensor in 10^6 bytes")
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    with hpcps.init() as job:
        exchange = Exchange(job, args.mb * 1_000_000 // 4, args.grouping)
        for _ in range(NUM_WARMUP):
            exchange.round()
        exchange.meet()
        copy_rate = copy_bytes_per_s(exchange.gradient) if job.is_first else 0.0
        exchange.meet()
        times_s = [exchange.round() for _ in range(args.rounds)]
        expected = np.float32(-2.0 * LR * (NUM_WARMUP + args.rounds))
        if not (exchange.values == expected).all():
            raise SystemExit(f"cannot trust the transfer: values {exchange.values[:4]}, need {expected} throughout")
        if job.is_first:
            moved = 2 * job.num_workers * exchange.values.nbytes
            whole_s = statistics.median(whole for _, whole in times_s)
            write_result(
                mb_per_s=moved / whole_s / 1e6,
                copy_mb_per_s=copy_rate / 1e6,
                settle_s=statistics.median(settled for settled, _ in times_s),
                round_s=whole_s,
            )


if __name__ == "__main__":
    main()
