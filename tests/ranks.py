"""A whole job in one process: ranks are threads over the in-process channel.

``run_ranks`` gives every worker thread a real ``Job``, as ``hpcps.init()`` does, runs a real ``ServerLoop`` a server,
and raises the first error of any of them. Servers have the first ranks, workers the rest.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcps.comm.loopback import Faults, Hub, LoopbackChannel
from hpcps.config import RunConfig
from hpcps.plan import Roles
from hpcps.runtime.client import WorkerClient
from hpcps.runtime.job import Job
from hpcps.runtime.metrics import EventLog
from hpcps.runtime.server_loop import MakeRule, ServerLoop, ServerStats
from hpcps.torch.server_optim import make_rule as make_torch_rule

__all__ = ["EventList", "Outcome", "run_ranks"]

torch.set_num_threads(1)
# torch loads its compiler with the first optimizer: seconds, and better done before there are threads
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

_CHANNEL_DEADLINE_S = 30.0
_RATE = 1e9
"""Bytes a second that every server says it takes, so that all have alike."""
_QUIET_S = 1e9
"""Between two progress lines: never."""


class EventList(EventLog):
    """Keeps events in memory."""

    def __init__(self, *, rank: int, role: str) -> None:
        super().__init__(None, rank=rank, role=role)
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, **fields: object) -> None:
        self.events.append((event, fields))


@dataclass(slots=True)
class Outcome:
    """What a job left behind."""

    results: list[Any]
    """What each worker function returned."""
    stats: list[ServerStats]
    jobs: list[Job]
    worker_events: list[list[tuple[str, dict[str, Any]]]]
    server_events: list[list[tuple[str, dict[str, Any]]]]

    def of_event(self, name: str) -> list[dict[str, Any]]:
        """Fields of all events of a name, servers' first."""
        return [
            fields for events in [*self.server_events, *self.worker_events] for event, fields in events if event == name
        ]


@dataclass(slots=True)
class _Threads:
    """Threads of a job, and the first error of any."""

    hub: Hub
    threads: list[threading.Thread] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def start(self, name: str, body: Callable[[], None]) -> None:
        def run() -> None:
            try:
                body()
            except BaseException as error:
                self.fail(error)

        self.threads.append(threading.Thread(target=run, name=name, daemon=True))
        self.threads[-1].start()

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        for end in list(self.hub.ends.values()):
            end.abort(1)

    def join(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        stuck = [thread.name for thread in self.threads if thread.is_alive()]
        if stuck and not self.errors:
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
            self.fail(TimeoutError(f"{', '.join(stuck)} did not end within {timeout_s} s; their stacks are on stderr"))


def run_ranks(
    worker: Callable[[Job], Any],
    *,
    num_workers: int,
    num_servers: int = 1,
    config: RunConfig | None = None,
    faults: Faults | None = None,
    timeout_s: float = 60.0,
    make_rule: MakeRule = make_torch_rule,
) -> Outcome:
    """Run a worker function on every worker; returns when all ranks have left, or raises the first error.

    Args:
        worker: gets the job; it runs inside ``with job:``.
        num_workers: worker threads, at least 1.
        num_servers: server threads, at least 1.
        config: the run's settings; progress lines are silenced.
        faults: what happens to frames, acks and notices.
        timeout_s: longest time of the whole job; past it the stacks of all threads are printed.
        make_rule: makes the servers' optimizers.
    """
    config = dataclasses.replace(config or RunConfig(), server_num=num_servers)
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, progress_s=_QUIET_S))
    roles = Roles(servers=tuple(range(num_servers)), workers=tuple(range(num_servers, num_servers + num_workers)))
    hub = Hub(faults=faults)
    group = _Threads(hub)
    server_logs = [EventList(rank=rank, role="server") for rank in roles.servers]
    worker_logs = [EventList(rank=rank, role="worker") for rank in roles.workers]
    loops: list[ServerLoop] = []
    for rank, events in zip(roles.servers, server_logs, strict=True):
        channel = LoopbackChannel(hub, rank, serves=True, deadline_s=_CHANNEL_DEADLINE_S)
        loops.append(
            ServerLoop(
                channel, config, roles=roles, make_rule=make_rule, events=events, measure=lambda rate: rate or _RATE
            )
        )
    jobs = [
        _make_job(hub, rank, config, roles, events) for rank, events in zip(roles.workers, worker_logs, strict=True)
    ]
    results: list[Any] = [None] * num_workers

    def serve(loop: ServerLoop) -> Callable[[], None]:
        return loop.serve

    def work(index: int) -> Callable[[], None]:
        def body() -> None:
            with jobs[index] as job:
                results[index] = worker(job)

        return body

    before = threading.excepthook
    threading.excepthook = lambda args: group.fail(args.exc_value or RuntimeError("a thread failed"))
    try:
        for index, loop in enumerate(loops):
            group.start(f"server-{index}", serve(loop))
        for index in range(num_workers):
            group.start(f"worker-{index}", work(index))
        group.join(timeout_s)
    finally:
        hub.stop()
        threading.excepthook = before
    if group.errors:
        raise group.errors[0]
    return Outcome(
        results=results,
        stats=[loop.stats for loop in loops],
        jobs=jobs,
        worker_events=[log.events for log in worker_logs],
        server_events=[log.events for log in server_logs],
    )


def _make_job(hub: Hub, rank: int, config: RunConfig, roles: Roles, events: EventLog) -> Job:
    channel = LoopbackChannel(hub, rank, serves=False, deadline_s=_CHANNEL_DEADLINE_S)
    return Job(
        WorkerClient(channel, config, roles=roles, events=events),
        config,
        roles=roles,
        events=events,
        device="cpu",
        close=channel.close,
        abort=lambda error: None,
    )
