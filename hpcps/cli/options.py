"""Flags that ``run`` and ``launch`` share, and the split of a command line into flags and program.

Everything from the program on belongs to the program, even what looks like a flag of ours. A flag that is not
known is refused with the nearest one; flags are never guessed from their first letters.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hpcps.errors import ConfigError
from hpcps.settings import Layer, Resolved, document, file_layers, parse_assignment, resolve

__all__ = ["Request", "add_flags", "read_request", "split_arguments"]

COMMAND_LINE = "command line"

_SETTING_FLAGS = (
    ("--server-num", "server_num", "N"),
    ("--worker-num", "worker_num", "N"),
    ("--heterogeneous", "heterogeneous", "on|off"),
    ("--sync-mode", "sync_mode", "MODE"),
    ("--sync-group-size", "sync_group_size", "N"),
    ("--worker-endpoints", "worker_endpoints", "HOST[:PORT],..."),
    ("--server-endpoints", "server_endpoints", "HOST[:PORT],..."),
    ("--overlap", "overlap", "0|1"),
    ("--seed", "seed", "N"),
    ("--emulate-speeds", "emulate.speeds", "3:2:1:1"),
    ("--emulate-sample-s", "emulate.sample_s", "SECONDS"),
    ("--emulate-server-bytes-per-s", "emulate.server_bytes_per_s", "1e8:25e6"),
    ("--emulate-script", "emulate.script", "300:0=1,400:s1=25e6"),
    ("--emulate-trace", "emulate.trace", "FILE"),
    ("--capacity-prior", "capacity.prior", "3:2:1:1"),
    ("--comm-mode", "comm.mode", "MODE"),
    ("--compression", "compression.rules", "PATTERN=CODEC,..."),
    ("--log-dir", "log.dir", "FOLDER"),
)
_BARE_IS_ON = "--heterogeneous"
_BOOL_WORDS = ("on", "off", "true", "false", "yes", "no", "1", "0")
_LAUNCH_ONLY = ("--num-ranks", "--dry-run")
_SHORT = {"-n": "--num-ranks", "-h": "--help"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A command line, read and checked.

    Args:
        layers: the settings file, if any, and the command line; lowest first.
        resolved: the defaults under these layers; the script's own settings are not known yet.
        flags: flags in one spelling, ``--flag=value``, that ``hpcps run`` takes to the same effect.
        program: the script or ``-m module``, and its arguments.
        show_config: only print the settings.
        num_ranks: ranks to launch; 0 if not said.
        dry_run: only print the command.
    """

    layers: tuple[Layer, ...]
    resolved: Resolved
    flags: tuple[str, ...]
    program: tuple[str, ...]
    show_config: bool
    num_ranks: int
    dry_run: bool


class _Assign(argparse.Action):
    """Append (name, text) to ``namespace.assignments``, so that the later of two flags wins."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, setting: str = "", **others: str) -> None:
        super().__init__(option_strings, "assignments", help=others["help"], metavar=others["metavar"])
        self.setting = setting

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        pair = (self.setting, str(values)) if self.setting else parse_assignment(str(values))
        namespace.assignments = [*(namespace.assignments or []), pair]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the shared flags; their help is the documentation of the settings."""
    for flag, setting, metavar in _SETTING_FLAGS:
        text = document(setting).replace("%", "%%")
        if flag == _BARE_IS_ON:
            text += "; --heterogeneous alone is on"
        parser.add_argument(flag, action=_Assign, setting=setting, metavar=metavar, help=text)
    parser.add_argument("--no-heterogeneous", action="store_true", help="the same as --heterogeneous=off")
    parser.add_argument("--config", metavar="FILE.toml", help="settings file; else the one that HPCPS_CONFIG names")
    parser.add_argument(
        "--set", action=_Assign, metavar="NAME=VALUE", help="any setting, such as comm.mode=rma; may be repeated"
    )
    parser.add_argument("--show-config", action="store_true", help="print all settings with their sources, and stop")


def split_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into flags, each as one word ``--flag=value`` with hyphens, and the program with its arguments.

    The program starts at the first word that is no flag and no flag's value, at ``-m``, or after ``--``.

    Raises:
        ConfigError: a flag is unknown (names the nearest), lacks its value, or has one too many.
    """
    takes_value = {
        flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings if flag[:2] == "--"
    }
    flags: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        word = rest.pop(0)
        if word == "--":
            break
        flag, equals, value = _canonical(word).partition("=")
        if flag not in takes_value:
            raise _unknown(word.partition("=")[0], list(takes_value), parser.prog)
        if flag == _BARE_IS_ON and not equals:
            value = rest.pop(0) if rest and rest[0].lower() in _BOOL_WORDS else "on"
        elif takes_value[flag] and not equals:
            if not rest:
                raise ConfigError(f"cannot accept flag {word!r}: no value, need one; write {word}=VALUE")
            value = rest.pop(0)
        elif not takes_value[flag] and equals:
            raise ConfigError(f"cannot accept flag {word!r}: got {value!r}, it takes no value; write {flag}")
        if flag == "--no-heterogeneous":
            flag, value = _BARE_IS_ON, "off"
        flags.append(f"{flag}={value}" if takes_value[flag] else flag)
    return flags, rest


def _canonical(word: str) -> str:
    """A flag in its long form with hyphens; its value is left alone."""
    if not word.startswith("--"):
        short, value = word[:2], word[2:]
        return _SHORT.get(short, word[:1]) + (f"={value.removeprefix('=')}" if value else "")
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _unknown(flag: str, known: Sequence[str], prog: str) -> ConfigError:
    near = difflib.get_close_matches(flag.replace("_", "-"), known, n=1, cutoff=0.6)
    hint = f"nearest is {near[0]}; write that" if near else "no flag is near it"
    return ConfigError(f"cannot accept flag {flag!r}: unknown, {hint}, or see {prog} --help")


def read_request(parser: argparse.ArgumentParser, arguments: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Read the words after the command's name. Prints and leaves only for ``--help``.

    Raises:
        ConfigError: a flag, a setting or the settings file is wrong.
    """
    flags, program = split_arguments(parser, arguments)
    parsed = parser.parse_args(flags)
    own = Layer(source=COMMAND_LINE, values=MappingProxyType(dict(parsed.assignments or [])))
    from_file = file_layers(parsed.config, environ)
    layers = (*from_file, own)
    passed = [flag for flag in flags if flag.partition("=")[0] not in _LAUNCH_ONLY]
    if from_file and parsed.config is None:
        passed.insert(0, f"--config={from_file[0].source.removeprefix('file ')}")
    return Request(
        layers=layers,
        resolved=resolve(layers),
        flags=tuple(passed),
        program=tuple(program),
        show_config=parsed.show_config,
        num_ranks=_num_ranks(getattr(parsed, "num_ranks", None)),
        dry_run=getattr(parsed, "dry_run", False),
    )


def _num_ranks(text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"cannot launch {text!r} ranks: need a whole number of at least 1; write for example -n 4")
    return int(text)
