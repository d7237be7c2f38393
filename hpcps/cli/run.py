"""``hpcps run``: run a training script as one rank, with settings from the command line.

The launcher starts it once a rank; by hand it is a world of one. An error of the script is the runtime's to
report; this module reports only what is wrong with the command line itself.
"""

from __future__ import annotations

import argparse
import difflib
import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from hpcps.cli.options import Request, add_flags, read_request
from hpcps.errors import ConfigError, HpcpsError
from hpcps.settings import set_pending, show

__all__ = ["check_program", "main", "make_parser", "print_settings"]

_NOTE = "# What the script gives to hpcps.init(...) replaces the defaults, and only these."


def make_parser() -> argparse.ArgumentParser:
    """The parser of this command's flags."""
    parser = argparse.ArgumentParser(
        prog="hpcps run",
        usage="hpcps run [flags] script.py [arguments]\n       hpcps run [flags] -m module [arguments]",
        description="Run a training script as one rank: by hand, or under mpirun or srun.",
        epilog="Flags may be written with _ for -. What follows the script belongs to the script.",
        allow_abbrev=False,
    )
    add_flags(parser)
    return parser


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command.

    Args:
        arguments: the words after ``run``.
        environ: the environment.

    Returns: 0, or 2 for a wrong command line. The script's own exit passes through.
    """
    from hpcps.launch.environment import launcher_hint

    hint = launcher_hint(environ)
    rank = hint.rank if hint is not None and hint.size != 1 else None
    try:
        request = read_request(make_parser(), arguments, environ)
        if not request.show_config:
            check_program(request.program, "hpcps run")
    except HpcpsError as error:
        where = "" if rank is None else f"rank {rank}: "
        print(f"hpcps run: {where}{error}", file=sys.stderr)
        return 2
    if request.show_config:
        if not rank:
            print_settings(request)
        return 0
    set_pending(request.layers)
    _execute(request.program)
    return 0


def print_settings(request: Request) -> None:
    """Print every setting with its source."""
    print(_NOTE)
    print(show(request.resolved))


def check_program(program: Sequence[str], command: str) -> None:
    """See that there is something to run.

    Raises:
        ConfigError: no script is given, or there is no such file; names one that is written alike.
    """
    if not program or (program[0] == "-m" and len(program) < 2):
        raise ConfigError(f"cannot run a script: none given, need one; write {command} [flags] script.py [arguments]")
    script = program[0]
    if script == "-m" or os.path.isfile(script) or os.path.isfile(os.path.join(script, "__main__.py")):
        return
    folder, name = os.path.split(script)
    siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    hint = f"did you mean {os.path.join(folder, near[0])!r}" if near else "give its path, or -m and a module"
    raise ConfigError(f"cannot run {script!r}: no such file in {os.getcwd()}, need a Python script; {hint}")


def _execute(program: Sequence[str]) -> None:
    """Run the script or module as ``__main__``, with the arguments and the path that Python would give it."""
    from hpcps.runtime.entry import guard

    is_module = program[0] == "-m"
    target = program[1] if is_module else program[0]
    sys.argv = [target, *program[2 if is_module else 1 :]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    with guard():
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
