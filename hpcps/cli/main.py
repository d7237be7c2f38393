"""The ``hpcps`` command: picks the command and hands it the rest of the line. Loads nothing heavy for help."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["COMMANDS", "CliCommand", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CliCommand:
    """One command: a line of help, and what runs it on the words after its name."""

    help: str
    run: Callable[[Sequence[str]], int]


def _run(arguments: Sequence[str]) -> int:
    from hpcps.cli import run

    return run.main(arguments)


def _launch(arguments: Sequence[str]) -> int:
    from hpcps.cli import launch

    return launch.main(arguments)


COMMANDS: Mapping[str, CliCommand] = MappingProxyType(
    {
        "run": CliCommand(help="run a script as one rank: by hand, or under mpirun or srun", run=_run),
        "launch": CliCommand(help="find the launcher and start a script on several ranks", run=_launch),
    }
)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hpcps",
        usage="hpcps [--help] [--version] command ...",
        description="Train a PyTorch script with parameter servers on workers of unlike speed.",
        epilog=f"commands:\n{listing}\n\nhpcps COMMAND --help shows the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser


def _version() -> str:
    import hpcps

    return str(getattr(hpcps, "__version__", "unknown"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after ``hpcps``; None takes them from the process.

    Returns: the exit code; 2 for a wrong command line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]].run(words[1:])
    parser = _parser()
    if words and not words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], COMMANDS, n=1, cutoff=0.5)
        hint = f"write hpcps {near[0]}" if near else f"write hpcps run {words[0]} to run a script"
        commands = " or ".join(COMMANDS)
        print(f"hpcps: cannot run command {words[0]!r}: unknown, need {commands}; {hint}", file=sys.stderr)
        return 2
    if parser.parse_args(words).version:
        print(f"hpcps {_version()}")
        return 0
    parser.print_help()
    return 0
