"""The command line: split of flags and program, refusals, what run and launch do, and what they load."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcps.cli import launch, run
from hpcps.cli.main import COMMANDS, main
from hpcps.cli.options import Request, read_request, split_arguments
from hpcps.errors import ConfigError
from hpcps.settings import pending, set_pending

HEAVY = ("mpi4py", "torch", "cupy", "h5py", "numpy", "hpcps.launch.mpirun", "hpcps.runtime")

SPLITS = [
    ("--seed 3 train.py --seed 4", ["--seed=3"], ["train.py", "--seed", "4"]),
    ("--seed=3 train.py", ["--seed=3"], ["train.py"]),
    ("--server_num 2 --sync_group_size=3 t.py", ["--server-num=2", "--sync-group-size=3"], ["t.py"]),
    ("--log_dir a_b t.py", ["--log-dir=a_b"], ["t.py"]),
    ("--heterogeneous train.py", ["--heterogeneous=on"], ["train.py"]),
    ("--heterogeneous off train.py", ["--heterogeneous=off"], ["train.py"]),
    ("--heterogeneous=no train.py", ["--heterogeneous=no"], ["train.py"]),
    ("--heterogeneous --seed 1", ["--heterogeneous=on", "--seed=1"], []),
    ("--no_heterogeneous train.py", ["--heterogeneous=off"], ["train.py"]),
    ("--set a.b=c --set d=-e t.py", ["--set=a.b=c", "--set=d=-e"], ["t.py"]),
    ("--seed -1 t.py", ["--seed=-1"], ["t.py"]),
    ("--seed 1 -m pkg.mod -n 3", ["--seed=1"], ["-m", "pkg.mod", "-n", "3"]),
    ("--seed 1 -- --odd.py", ["--seed=1"], ["--odd.py"]),
    ("-n 4 --dry-run t.py -n 5", ["--num-ranks=4", "--dry-run"], ["t.py", "-n", "5"]),
    ("-n4 t.py", ["--num-ranks=4"], ["t.py"]),
    ("", [], []),
]


@pytest.mark.parametrize(("line", "flags", "program"), SPLITS, ids=[row[0] or "nothing" for row in SPLITS])
def test_flags_end_where_the_program_starts(line: str, flags: list[str], program: list[str]) -> None:
    assert split_arguments(launch.make_parser(), line.split()) == (flags, program)


REFUSED = [
    ("--sync-mod hybrid t.py", "cannot accept flag '--sync-mod': unknown, nearest is --sync-mode; write that"),
    ("--sync_grup_size=3 t.py", "cannot accept flag '--sync_grup_size': unknown, nearest is --sync-group-size;"),
    ("--server 2 t.py", "cannot accept flag '--server': unknown, nearest is --server-num; write that"),
    ("--qqq t.py", "cannot accept flag '--qqq': unknown, no flag is near it, or see hpcps run --help"),
    ("-x t.py", "cannot accept flag '-x': unknown, no flag is near it"),
    ("-n 4 t.py", "cannot accept flag '-n': unknown"),
    ("--seed", "cannot accept flag '--seed': no value, need one; write --seed=VALUE"),
    ("--show-config=yes", "cannot accept flag '--show-config=yes': got 'yes', it takes no value"),
]


@pytest.mark.parametrize(("line", "text"), REFUSED, ids=[row[0] for row in REFUSED])
def test_wrong_flags_are_refused_on_stderr(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"hpcps run: {text}")


def request(line: str, environ: dict[str, str] | None = None) -> Request:
    return read_request(launch.make_parser(), shlex.split(line), environ or {})


def test_every_flag_sets_its_setting() -> None:
    config = request(
        "--server-num 2 --worker-num 6 --heterogeneous --sync-mode hybrid --sync-group-size 3 --overlap 1 --seed 5"
        " --worker-endpoints ip1:1,ip2:2 --server-endpoints sip1:1 --emulate-speeds 3:2:1:1 --emulate-sample-s 0.5"
        " --capacity-prior 2,1 --comm-mode p2p --log-dir runs --set window.mad_k=2"
    ).resolved.config
    assert (config.server_num, config.worker_num, config.heterogeneous) == (2, 6, True)
    assert (config.sync_mode, config.sync_group_size, config.overlap, config.seed) == ("hybrid", 3, 1, 5)
    assert (config.worker_endpoints, config.server_endpoints) == (("ip1:1", "ip2:2"), ("sip1:1",))
    assert (config.emulate.speeds, config.emulate.sample_s) == ((3.0, 2.0, 1.0, 1.0), 0.5)
    assert (config.capacity.prior, config.comm.mode, config.log.dir) == ((2.0, 1.0), "p2p", "runs")
    assert config.window.mad_k == 2.0
    emulate = request(
        "--emulate-script 300:0=1,400:s1=25e6 --emulate-server-bytes-per-s 1e8:25e6 --set emulate.link_bytes_per_s=5"
    ).resolved.config.emulate
    assert (emulate.script, emulate.server_bytes_per_s) == (("300:0=1", "400:s1=25e6"), (1e8, 25e6))
    assert request("--emulate-trace times.txt").resolved.config.emulate.trace == "times.txt"


@pytest.mark.parametrize(
    ("line", "seed", "heterogeneous"),
    [
        ("--seed 1 --set seed=2", 2, False),
        ("--set seed=2 --seed 1", 1, False),
        ("--heterogeneous --no-heterogeneous", 0, False),
        ("--no-heterogeneous --heterogeneous", 0, True),
        ("--heterogeneous --set heterogeneous=off", 0, False),
    ],
)
def test_the_later_of_two_words_wins(line: str, seed: int, heterogeneous: bool) -> None:
    config = request(line).resolved.config
    assert (config.seed, config.heterogeneous) == (seed, heterogeneous)


def test_the_command_line_stands_over_the_file_and_ranks_read_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\nserver_num = 3\n")
    by_flag = request(f"--config {path} --seed 2 t.py")
    by_variable = request("--seed 2 t.py", {"HPCPS_CONFIG": str(path)})
    for made in (by_flag, by_variable):
        assert (made.resolved.config.seed, made.resolved.config.server_num) == (2, 3)
        assert made.resolved.sources["seed"] == "command line"
        assert made.resolved.sources["server_num"] == f"file {path}"
        assert made.flags == (f"--config={path}", "--seed=2")


@pytest.mark.parametrize("command", ["run", "launch"])
def test_show_config_prints_all_and_runs_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--show-config", "--seed", "3", "no-such-file.py"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["seed", "=", "3", "#", "command", "line"] in lines
    assert ["comm.mode", "=", '"auto"', "#", "default"] in lines


def test_show_config_under_a_launcher_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for rank in ("0", "1"):
        assert run.main(["--show-config"], {"PMI_SIZE": "2", "PMI_RANK": rank}) == 0
        outputs.append(bool(capsys.readouterr().out))
    assert outputs == [True, False]


def test_an_error_under_a_launcher_names_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--seed", "x", "t.py"], {"PMI_SIZE": "2", "PMI_RANK": "1"}) == 2
    assert capsys.readouterr().err.startswith("hpcps run: rank 1: cannot accept seed of the command line: got 'x'")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ([], "cannot run a script: none given, need one; write hpcps run [flags] script.py [arguments]"),
        (["-m"], "cannot run a script: none given, need one; write hpcps run [flags] script.py [arguments]"),
        (["trian.py"], "need a Python script; did you mean 'train.py'"),
        (["sub/trian.py"], "need a Python script; did you mean 'sub/train.py'"),
        (["none/at/all.py"], "need a Python script; give its path, or -m and a module"),
        (["sub"], "cannot run 'sub': no such file in"),
    ],
)
def test_a_missing_script_is_an_error(
    program: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("train.py", "sub/train.py"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        run.check_program(program, "hpcps run")
    assert text in str(caught.value)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stand in for the runtime's guard, keep what a run changes in the process, and list what the guard saw."""
    seen: list[str] = []

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        seen.append("enter")
        try:
            yield
        except ValueError as error:
            seen.append(f"caught {error}")
            raise SystemExit(1) from error
        seen.append("leave")

    entry = types.ModuleType("hpcps.runtime.entry")
    entry.guard = guard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpcps.runtime", types.ModuleType("hpcps.runtime"))
    monkeypatch.setitem(sys.modules, "hpcps.runtime.entry", entry)
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", ["first", *sys.path])
    yield seen
    set_pending(None)


def test_run_gives_the_script_its_arguments_path_and_settings(
    guarded: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'neighbour'\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, beside\nfrom hpcps.settings import pending, resolve\n"
        "print(__name__, sys.argv, beside.WORD, resolve(pending()).config.seed)\n"
    )
    assert main(["run", "--seed", "8", str(script), "--seed", "9"]) == 0
    assert capsys.readouterr().out == f"__main__ {[str(script), '--seed', '9']} neighbour 8\n"
    assert guarded == ["enter", "leave"]
    assert sys.path[0] == str(tmp_path)


def test_run_takes_a_module(
    guarded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_by_module.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    assert main(["run", "-m", "train_by_module", "--lr", "3"]) == 0
    assert capsys.readouterr().out == "__main__ ['--lr', '3']\n"


def test_errors_and_exits_of_the_script_go_through_the_guard(guarded: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('bad batch')\n")
    with pytest.raises(SystemExit) as caught:
        main(["run", str(script)])
    assert (caught.value.code, guarded) == (1, ["enter", "caught bad batch"])
    script.write_text("raise SystemExit(7)\n")
    with pytest.raises(SystemExit) as caught:
        main(["run", str(script)])
    assert caught.value.code == 7


def test_nothing_is_pending_after_a_refused_line(guarded: list[str]) -> None:
    assert main(["run", "--seed", "x", "t.py"]) == 2
    assert (pending(), guarded) == ((), [])


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that says it is Open MPI's mpirun and is the only launcher; it runs its last word by sh."""
    path = tmp_path / "bin" / "mpirun"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'mpirun (Open MPI) 5.0.11'; exit; fi\n"
        'for last; do :; done\nexec sh -c "$last"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(path.parent / "python"))
    for name in [n for n in os.environ if n.startswith(("SLURM_", "OMPI_", "PMI", "HPCPS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MPI4PY_LIBMPI", "/x/libmpi.so.40")
    monkeypatch.setattr("hpcps.launch.environment.usable_cores", lambda: 2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("hpcps.launch.environment.installed_wheels_conflict", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return path


@pytest.mark.parametrize(
    ("line", "flags", "rest"),
    [
        (
            "--worker-num 3 train.py --lr 1",
            "--oversubscribe --allow-run-as-root --bind-to none -n 4",
            "--worker-num=3 train.py --lr 1",
        ),
        ("-n 2 train.py", "--allow-run-as-root --bind-to none -n 2", "train.py"),
        ("-n 1 --worker-num 3 train.py", "--allow-run-as-root --bind-to none -n 1", "--worker-num=3 train.py"),
        (
            "--worker_endpoints a:1,b:2,b:3 --server_endpoints s:1 train.py",
            "--allow-run-as-root --bind-to none --host s:1,a:1,b:2 -x MPI4PY_LIBMPI -n 4",
            "--worker-endpoints=a:1,b:2,b:3 --server-endpoints=s:1 train.py",
        ),
    ],
)
def test_dry_run_prints_the_whole_command(
    mpirun: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    flags: str,
    rest: str,
) -> None:
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert main(["launch", "--dry-run", *line.split()]) == 0
    out, err = capsys.readouterr()
    assert out == f"{mpirun} {flags} {sys.executable} -m hpcps run {rest}\n"
    assert "hpcps launch: --allow-run-as-root: the user is root\n" in err


LAUNCH_REFUSED = [
    ("train.py", 2, "cannot launch: the number of ranks is not known; pass --worker-num, or -n for all ranks"),
    ("-n two train.py", 2, "cannot launch 'two' ranks: need a whole number of at least 1"),
    ("-n 0 train.py", 2, "cannot launch '0' ranks: need a whole number of at least 1"),
    ("-n 4 --worker-num 6 --server-num 2 train.py", 2, "cannot launch 4 ranks: worker_num 6 and server_num 2 make 8"),
    ("-n 2 --server-num 2 train.py", 2, "cannot launch 2 ranks: server_num is 2, need at least one rank more"),
    ("-n 3 --worker-endpoints a,b train.py", 2, "cannot place 1 servers: got 0 server_endpoints, need 1 to 1"),
    ("-n 2 --server-endpoints s train.py", 2, "cannot place 1 workers: got 0 worker_endpoints, need 1 to 1"),
    ("--worker-num 3 trian.py", 2, "cannot run 'trian.py': no such file in"),
    ("--worker-num 3", 2, "cannot run a script: none given, need one; write hpcps launch [flags] script.py"),
]


@pytest.mark.parametrize(("line", "code", "text"), LAUNCH_REFUSED, ids=[row[0] for row in LAUNCH_REFUSED])
def test_what_cannot_be_launched(
    mpirun: Path, capsys: pytest.CaptureFixture[str], line: str, code: int, text: str
) -> None:
    assert main(["launch", *line.split()]) == code
    assert capsys.readouterr().err.startswith(f"hpcps launch: {text}")


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun of Open MPI started this process (OMPI_COMM_WORLD_SIZE=4),"),
        ({"PMIX_RANK": "0"}, "a PMIx launcher started this process (PMIX_RANK=0),"),
    ],
)
def test_launch_inside_a_rank_is_refused(
    mpirun: Path, capsys: pytest.CaptureFixture[str], environ: dict[str, str], text: str
) -> None:
    assert launch.main(["-n", "2", "train.py"], environ) == 1
    assert capsys.readouterr().err.startswith(f"hpcps launch: cannot launch inside a rank: {text}")


@pytest.mark.parametrize(("word", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -KILL $$", 137)])
def test_launch_returns_the_exit_code_of_its_child(mpirun: Path, word: str, code: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["launch", "-n", "2", "train.py", word]) == code
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["TERM", "USR1", "HUP"])
def test_launch_hands_signals_to_its_child(mpirun: Path, name: str) -> None:
    # The child signals its parent, which must hand the signal back; a parent that died of it leaves no code 42.
    word = f"sleep 8 & trap 'kill $!; exit 42' {name}; kill -{name} $PPID; wait"
    assert main(["launch", "-n", "2", "train.py", word]) == 42


def test_a_launcher_that_vanishes_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch._start(["/no/such/mpirun"], {}) == 1
    assert "cannot start '/no/such/mpirun': No such file or directory" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and command.help in out for name, command in COMMANDS.items())


@pytest.mark.parametrize("command", ["run", "launch"])
def test_help_of_a_command_documents_the_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--seed", "1", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "--sync-group-size N workers in a group of hybrid mode; 0: found from the speeds" in out


@pytest.mark.parametrize(
    ("word", "hint"), [("rnu", "write hpcps run"), ("train.py", "write hpcps run train.py to run a script")]
)
def test_an_unknown_command_is_refused(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    expected = f"hpcps: cannot run command {word!r}: unknown, need {' or '.join(COMMANDS)}; {hint}\n"
    assert capsys.readouterr().err == expected


def test_help_and_version_load_nothing_heavy() -> None:
    program = (
        "import sys\nfrom hpcps.cli.main import main\n"
        "for words in (['--version'], ['--help'], ['run', '--help'], ['launch', '--help']):\n"
        "    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        f"sys.stderr.write(' '.join(name for name in {HEAVY} if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("hpcps ")


def test_python_m_hpcps_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hpcps", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: hpcps")
