"""Start and end of a rank: find out what this process is, join the parts, and turn an error into the end of all.

The only place that exits or aborts.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from hpcps import native
from hpcps.cluster import Cluster, Host, RankPlace
from hpcps.comm.channel import Channel
from hpcps.comm.loopback import Hub, LoopbackChannel
from hpcps.config import RunConfig
from hpcps.errors import LaunchError
from hpcps.launch.environment import (
    LauncherHint,
    check_world,
    has_infiniband,
    installed_wheels_conflict,
    launcher_hint,
    local_size,
    mpi_defaults,
    tell_launcher,
    usable_cores,
)
from hpcps.launch.threads import share_of_cores
from hpcps.policy.placement import PlaceRoles
from hpcps.runtime.client import WorkerClient
from hpcps.runtime.emulation import check_emulation
from hpcps.runtime.job import Job
from hpcps.runtime.logs import open_logs, run_dir
from hpcps.runtime.memory import free_memory
from hpcps.runtime.metrics import EventLog
from hpcps.runtime.server_loop import MakeRule, ServerLoop

if TYPE_CHECKING:
    from hpcps.comm.world import RankFacts, World

__all__ = ["guard", "start"]

logger = logging.getLogger(__name__)

_FAILED = 1
"""Exit code of a job that an error ended."""


@dataclass(frozen=True, slots=True)
class _Lifeline:
    """How an uncaught error ends all ranks of the job."""

    rank: int
    abort: Callable[[int], None]


_lifeline: _Lifeline | None = None
"""None where there are no other ranks to end."""


def start(
    config: RunConfig,
    *,
    make_rule: MakeRule,
    device: Callable[[int], str],
    gpus: Callable[[], tuple[str, ...]],
    use_threads: Callable[[int, Collection[int]], int],
    versions: str,
) -> Job:
    """Begin this rank's part of the job.

    On a server this serves until the job ends and then leaves the process with exit code 0.

    Args:
        config: the run's settings.
        make_rule: makes the optimizer of a shard.
        device: torch device of a worker with a local rank.
        gpus: names of the GPUs that this rank sees.
        use_threads: lets torch use so many threads, where it uses one of the numbers that it takes by itself; returns
            how many it uses.
        versions: what must be alike on all ranks.

    Returns: the job, on a worker.

    Raises:
        LaunchError: launcher, MPI library and settings do not fit together.
    """
    hint = launcher_hint(os.environ)
    if hint is None or hint.size == 1:
        return _start_alone(config, make_rule=make_rule, device=device)
    world = _join_world(hint, gpus=gpus(), versions=f"{versions}, settings {_settings_digest(config)}")
    if world.size == 1:
        _clear_lifeline()
        return _start_alone(config, make_rule=make_rule, device=device)
    cluster = _cluster(world.ranks)
    decision = PlaceRoles(
        config.server_num,
        config.worker_num,
        server_endpoints=config.server_endpoints,
        worker_endpoints=config.worker_endpoints,
    ).decide(cluster)
    roles = decision.roles
    check_emulation(config.emulate, roles)
    role = "server" if roles.is_server(world.rank) else "worker"
    facts = world.ranks[world.rank]
    folder = run_dir(config.log.dir, world_size=world.size)
    open_logs(folder, rank=world.rank, world_size=world.size, host=facts.host, role=role, level=config.log.level)
    from hpcps.comm.start import open_channel

    channel = open_channel(world, roles.workers, config.comm, link_bytes_per_s=config.emulate.link_bytes_per_s)
    _set_lifeline(channel.rank, channel.abort)
    events = EventLog(folder, rank=world.rank, role=role)
    events.write("run", config=dataclasses.asdict(config), world_size=world.size, host=facts.host)
    logger.info(
        "%d ranks on %d hosts, servers %s, workers %s (%s), %s, data plane %s",
        world.size,
        len(cluster.hosts),
        roles.servers,
        roles.workers,
        decision.reason,
        world.library,
        channel.mode,
    )
    _set_threads(world, use_threads)
    if role == "server":
        num_here = sum(world.ranks[rank].host == facts.host for rank in roles.servers)
        memory = partial(free_memory, parts=num_here)
        ServerLoop(channel, config, roles=roles, make_rule=make_rule, events=events, memory=memory).serve()
        events.close()
        _leave(channel)
        raise SystemExit(0)
    client = WorkerClient(channel, config, roles=roles, events=events)
    name = device(facts.local_rank)
    return Job(client, config, roles=roles, events=events, device=name, close=lambda: _leave(channel), abort=_take_down)


def _join_world(hint: LauncherHint, *, gpus: tuple[str, ...], versions: str) -> World:
    """Start MPI; from here on an uncaught error, or an end without ``close``, ends all ranks."""
    conflict = installed_wheels_conflict()
    if conflict is not None:
        raise conflict
    exceed = local_size(os.environ, hint.size) > usable_cores()
    os.environ.update(mpi_defaults(os.environ, has_infiniband=has_infiniband(), ranks_exceed_cores=exceed))
    from hpcps.comm.world import open_world

    world = open_world(versions=versions, gpus=gpus)
    _set_lifeline(world.rank, world.abort)
    sys.excepthook = _on_uncaught
    atexit.register(_at_exit)
    check_world(hint, mpi_size=world.size, library=world.library)
    return world


def _set_threads(world: World, use_threads: Callable[[int, Collection[int]], int]) -> None:
    """Use this rank's share of its cores, in the kernels and in torch."""
    facts = world.ranks[world.rank]
    others = [each.cpus for rank, each in enumerate(world.ranks) if each.host == facts.host and rank != world.rank]
    num_cores = usable_cores()
    share = share_of_cores(os.environ, num_cores=num_cores, cpus=facts.cpus, others=others)
    native.set_num_threads(share.number)
    by_itself = {num_cores, len(facts.cpus), os.cpu_count() or 1}
    logger.info("%d threads, torch %d (%s)", share.number, use_threads(share.number, by_itself), share.reason)


def _settings_digest(config: RunConfig) -> str:
    """What all ranks must have alike; where each writes its log is its own affair."""
    fields = dataclasses.asdict(config)
    del fields["log"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


def _start_alone(config: RunConfig, *, make_rule: MakeRule, device: Callable[[int], str]) -> Job:
    """One process is server and worker: no MPI, no thread, no copy between the two."""
    cluster = Cluster(
        hosts=(Host(name=socket.gethostname()),), places=(RankPlace(rank=0, host=socket.gethostname(), local_rank=0),)
    )
    roles = PlaceRoles(config.server_num, config.worker_num).decide(cluster).roles
    check_emulation(config.emulate, roles)
    folder = run_dir(config.log.dir, world_size=1)
    open_logs(folder, rank=0, world_size=1, host=platform.node(), role="server and worker", level=config.log.level)
    events = EventLog(folder, rank=0, role="worker")
    events.write("run", config=dataclasses.asdict(config), world_size=1, host=platform.node())
    hub = Hub(shared_memory=True)
    server_end = LoopbackChannel(hub, 0, serves=True, deadline_s=config.comm.deadline_s)
    worker_end = LoopbackChannel(hub, 0, serves=False, deadline_s=config.comm.deadline_s)
    server = ServerLoop(server_end, config, roles=roles, make_rule=make_rule, events=events)
    hub.turn_server = server.turn

    def close() -> None:
        server.turn()
        worker_end.close()
        server_end.close()

    def abort(error: BaseException) -> None:
        close()

    client = WorkerClient(worker_end, config, roles=roles, events=events)
    return Job(client, config, roles=roles, events=events, device=device(0), close=close, abort=abort)


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Run a script so that an uncaught error ends all ranks, with its traceback first; also one before ``init``."""
    hint = launcher_hint(os.environ)
    if hint is not None and hint.size != 1 and _lifeline is None:
        _set_lifeline(hint.rank or 0, _end_before_joining)
    try:
        yield
        if _lifeline is not None and _lifeline.abort is _end_before_joining:
            _clear_lifeline()
    except SystemExit as error:
        if error.code not in (0, None) and _lifeline is not None:
            _take_down(error)
        raise
    except BaseException as error:
        if _lifeline is None:
            raise
        _take_down(error)


def _at_exit() -> None:
    """The script is over: a job that it left open would keep all other ranks waiting."""
    if _lifeline is not None:
        error = LaunchError(
            f"cannot end rank {_lifeline.rank}: the script is over, but the job is still open; write"
            " 'with hpcps.init() as job:' or call job.close()",
            rank=_lifeline.rank,
        )
        _take_down(error)


def _end_before_joining(code: int) -> None:
    """End a rank that MPI does not know yet, so that the launcher ends the others."""
    tell_launcher(os.environ, code)
    os._exit(code)


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _lifeline is None:
        sys.__excepthook__(kind, error, trace)
    else:
        _take_down(error)


def _take_down(error: BaseException) -> None:
    """Report an error with its rank, then end every rank of the job."""
    if _lifeline is None:
        return
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else _FAILED
    report = "".join(traceback.format_exception(error))
    lines = "".join(f"[rank {_lifeline.rank}] {line}\n" for line in report.rstrip().split("\n"))
    sys.stdout.flush()
    sys.stderr.write(lines)
    sys.stderr.flush()
    logger.error("this rank ends the job with code %d: %r", code, error)
    _lifeline.abort(code or _FAILED)


def _leave(channel: Channel) -> None:
    channel.close()
    _clear_lifeline()


def _cluster(ranks: tuple[RankFacts, ...]) -> Cluster:
    """Hosts in order of their first rank."""
    hosts: dict[str, Host] = {}
    for facts in ranks:
        host = Host(name=facts.host, num_cores=facts.num_cores, memory_bytes=facts.memory_bytes, gpus=facts.gpus)
        hosts.setdefault(facts.host, host)
    places = tuple(
        RankPlace(rank=rank, host=facts.host, local_rank=facts.local_rank) for rank, facts in enumerate(ranks)
    )
    return Cluster(hosts=tuple(hosts.values()), places=places)


def _set_lifeline(rank: int, abort: Callable[[int], None]) -> None:
    global _lifeline
    _lifeline = _Lifeline(rank, abort)


def _clear_lifeline() -> None:
    global _lifeline
    _lifeline = None
