"""``hpcps launch``: find the launcher, write its command line, and start ``hpcps run`` under it.

It asks for no flag that it can find out: root, more ranks than cores, binding, srun's kind of MPI. It says on
stderr what it starts and why; ``--dry-run`` stops there.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType

from hpcps.cli.options import Request, add_flags, read_request
from hpcps.cli.run import check_program, print_settings
from hpcps.config import RunConfig
from hpcps.errors import ConfigError, HpcpsError, LaunchError

__all__ = ["main", "make_parser"]

_FORWARD = ("PYTHONPATH", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI")
"""What ranks on other hosts need to find the same Python modules and the same MPI."""

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def make_parser() -> argparse.ArgumentParser:
    """The parser of this command's flags."""
    parser = argparse.ArgumentParser(
        prog="hpcps launch",
        usage="hpcps launch [flags] script.py [arguments]\n       hpcps launch [flags] -m module [arguments]",
        description="Start a training script on several ranks: by srun in a Slurm allocation, else by mpirun.",
        epilog="Flags may be written with _ for -. What follows the script belongs to the script.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--num-ranks", metavar="N", help="ranks in all; else worker_num + server_num")
    parser.add_argument("--dry-run", action="store_true", help="print the command, start nothing")
    add_flags(parser)
    return parser


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command.

    Args:
        arguments: the words after ``launch``.
        environ: the environment.

    Returns: the exit code of the launcher; 2 for a wrong command line, 1 where nothing can be launched.
    """
    try:
        request = read_request(make_parser(), arguments, environ)
        if request.show_config:
            print_settings(request)
            return 0
        check_program(request.program, "hpcps launch")
        words, added = _command(request, environ)
    except HpcpsError as error:
        print(f"hpcps launch: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if request.dry_run:
        print(shlex.join([*(f"{name}={value}" for name, value in added.items()), *words]))
        return 0
    return _start(words, {**environ, **added})


def _command(request: Request, environ: Mapping[str, str]) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The words to start and the variables to add; reports the reasons on stderr."""
    from hpcps.launch.environment import installed_wheels_conflict, launcher_hint, usable_cores
    from hpcps.launch.mpirun import build_command, find_launcher, hosts_from_endpoints

    hint = launcher_hint(environ)
    if hint is not None and hint.size != 1:
        raise LaunchError(
            f"cannot launch inside a rank: {hint.launcher} started this process"
            f" ({hint.variable}={environ[hint.variable]}), need a process started by hand; use hpcps run here",
            op="launch",
        )
    conflict = installed_wheels_conflict()
    if conflict is not None:
        raise conflict
    num_ranks = _num_ranks(request)
    hosts = hosts_from_endpoints(_endpoints(request.resolved.config, num_ranks))
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")
    command = build_command(
        find_launcher(environ),
        num_ranks=num_ranks,
        argv=[sys.executable, "-m", "hpcps", "run", *request.flags, *request.program],
        as_root=os.geteuid() == 0,
        num_cores=usable_cores(),
        hosts=hosts,
        forward=[name for name in _FORWARD if name in environ],
        cpus_per_task=int(cpus) if cpus.isdigit() else 0,
    )
    for reason in command.reasons:
        print(f"hpcps launch: {reason}", file=sys.stderr)
    return command.argv, command.env


def _num_ranks(request: Request) -> int:
    """Ranks from ``-n``, or from the counts of workers and servers.

    Raises:
        ConfigError: neither is given, or they disagree.
    """
    config = request.resolved.config
    num_workers = config.worker_num or len(config.worker_endpoints)
    total = num_workers + config.server_num
    if not request.num_ranks:
        if not num_workers:
            raise ConfigError("cannot launch: the number of ranks is not known; pass --worker-num, or -n for all ranks")
        return total
    if request.num_ranks == 1:
        return 1
    if num_workers and request.num_ranks != total:
        raise ConfigError(
            f"cannot launch {request.num_ranks} ranks: worker_num {num_workers} and server_num {config.server_num}"
            f" make {total}; leave out -n, or correct one of them"
        )
    if request.num_ranks <= config.server_num:
        raise ConfigError(
            f"cannot launch {request.num_ranks} ranks: server_num is {config.server_num}, need at least one rank more"
            " that trains; raise -n or lower --server-num"
        )
    return request.num_ranks


def _endpoints(config: RunConfig, num_ranks: int) -> tuple[str, ...]:
    """An endpoint for each rank, servers first; fewer endpoints than ranks of a role go round.

    Raises:
        ConfigError: only one of the two roles has endpoints, or a role has more of them than ranks.
    """
    servers, workers = config.server_endpoints, config.worker_endpoints
    if not servers and not workers:
        return ()
    num_servers = min(config.server_num, num_ranks)
    num_workers = num_ranks - num_servers
    for role, given, count in (("server", servers, num_servers), ("worker", workers, num_workers)):
        if not 1 <= len(given) <= count:
            raise ConfigError(
                f"cannot place {count} {role}s: got {len(given)} {role}_endpoints, need 1 to {count} where the other"
                f" role has endpoints; correct --{role}-endpoints or --{role}-num"
            )
    return (
        *itertools.islice(itertools.cycle(servers), num_servers),
        *itertools.islice(itertools.cycle(workers), num_workers),
    )


def _start(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a child to its end, hand it the signals that come, and return its exit code."""
    print(f"hpcps launch: {shlex.join(words)}", file=sys.stderr, flush=True)
    # Signals wait until child and handlers are there, so that none is lost. What is ignored (nohup) stays so.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    passed = [number for number, handler in handlers.items() if handler != signal.SIG_IGN]
    try:
        child = subprocess.Popen(list(words), env=dict(environ), preexec_fn=lambda: _set_mask(mask))

        def pass_on(number: int, _frame: FrameType | None) -> None:
            if number != signal.SIGINT or not _terminal_interrupts():
                child.send_signal(number)

        for number in passed:
            signal.signal(number, pass_on)
        _set_mask(mask)
        code = child.wait()
    except OSError as error:
        print(f"hpcps launch: cannot start {words[0]!r}: {error.strerror}; check that it runs", file=sys.stderr)
        return 1
    finally:
        for number in passed:
            signal.signal(number, handlers[number])
        _set_mask(mask)
    return 128 - code if code < 0 else code


def _set_mask(mask: Iterable[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _terminal_interrupts() -> bool:
    """True if Ctrl-C reaches the child by itself: both are in the terminal's foreground group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
