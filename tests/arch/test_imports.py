"""The walls between rooms, read from the source: who may import whom. Imports in functions count too."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpcps"
HEAVY = ("mpi4py", "torch", "cupy", "h5py")


@dataclass(frozen=True)
class Rule:
    """What a room may import besides itself, errors, units and the standard library.

    ours: rooms or single modules of this package. others: distributions, by top-level module.
    lazy: inside functions and under TYPE_CHECKING, any room of ours as well.
    """

    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    lazy: bool = False


FACTS = ("cluster", "plan", "config")
RUNTIME = ("cluster", "plan", "config", "settings", "policy", "protocol", "native", "device", "codec", "update", "comm")
RULES = {
    "errors": Rule(),
    "units": Rule(),
    "cluster": Rule(),
    "plan": Rule(ours=("cluster",)),
    "config": Rule(ours=("cluster", "plan")),
    "settings": Rule(ours=FACTS, others=("tomli",)),
    "policy": Rule(ours=FACTS, others=("numpy",)),
    "protocol": Rule(ours=("plan", "config", "policy")),
    "sim": Rule(ours=("policy", "protocol", *FACTS), others=("numpy",)),
    "native": Rule(others=("numpy",)),
    "cuda_src": Rule(),
    "device": Rule(others=("cupy", "numpy")),
    "codec": Rule(ours=("plan", "native", "device"), others=("numpy",)),
    "update": Rule(ours=("plan", "native", "device"), others=("numpy",)),
    "comm": Rule(ours=("protocol.messages", "device"), others=("mpi4py", "numpy")),
    "storage": Rule(ours=FACTS, others=("h5py", "numpy")),
    "launch": Rule(ours=FACTS),
    "runtime": Rule(ours=(*RUNTIME, "storage", "launch"), others=("numpy",)),
    "torch": Rule(ours=("runtime", "update", "plan", "config"), others=("torch", "numpy")),
    "report": Rule(ours=("storage", *FACTS), others=("numpy", "matplotlib", "rich")),
    "cli": Rule(ours=("storage", "settings", *FACTS), others=("matplotlib", "rich"), lazy=True),
    "root": Rule(ours=("settings", *FACTS), lazy=True),
    "__main__": Rule(ours=("cli",)),
}
ROOT_MODULES = ("__init__", "job")


@dataclass(frozen=True)
class Import:
    """One imported module. deferred: not carried out when the file is loaded."""

    name: str
    line: int
    deferred: bool


def room_of(module: str) -> str:
    """Room of a module, given as its path below the package: policy.window, errors, _codec_reference."""
    first = module.split(".")[0]
    if first in ROOT_MODULES:
        return "root"
    return "native" if first.startswith(("_native", "_codec")) else first


def is_type_checking(test: ast.expr) -> bool:
    """True for the test of `if TYPE_CHECKING:`."""
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def read_imports(tree: ast.AST, module: str, *, deferred: bool = False) -> list[Import]:
    """All imports below a node, with relative ones made absolute."""
    found: list[Import] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, deferred) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["hpcps", *module.split(".")][: -node.level]
                base = ".".join([*package, *filter(None, [node.module])])
            found += [Import(f"{base}.{alias.name}", node.lineno, deferred) for alias in node.names]
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and is_type_checking(node.test)
        found += read_imports(node, module, deferred=deferred or function or typing_only)
    return found


def breach(module: str, found: Import) -> str | None:
    """Why a module may not import this, or None."""
    room = room_of(module)
    rule = RULES[room]
    top, _, inner = found.name.partition(".")
    if top != "hpcps":
        allowed = top in sys.stdlib_module_names or top in rule.others
        return None if allowed else f"{found.line}: {room} may not import {top}"
    target = room_of(inner) if inner else "root"
    if target not in RULES:
        target = "root"  # a name that the package itself exports
    granted = (room, "errors", "units", *rule.ours)
    if target in granted or any(inner == name or inner.startswith(f"{name}.") for name in granted):
        return None
    if rule.lazy and found.deferred:
        return None
    return f"{found.line}: {room} may not import hpcps.{inner}" + (" when it is loaded" if rule.lazy else "")


def breaches(source: str, module: str) -> list[str]:
    """Every breach of a file."""
    reasons = (breach(module, found) for found in read_imports(ast.parse(source), module))
    return [reason for reason in reasons if reason is not None]


def sources() -> list[tuple[str, Path]]:
    """Modules of the package, as path below it, and their files; a package's __init__ keeps its name."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(".".join(path.relative_to(PACKAGE).with_suffix("").parts), path) for path in files]


MODULES = [pytest.param(module, path, id=module) for module, path in sources()]


@pytest.mark.parametrize(("module", "path"), MODULES)
def test_imports_keep_the_walls(module: str, path: Path) -> None:
    assert room_of(module) in RULES, f"{path} is in no room of the table"
    assert breaches(path.read_text(), module) == []


@pytest.mark.parametrize(("module", "path"), MODULES)
def test_only_the_command_line_prints_and_exits(module: str, path: Path) -> None:
    if room_of(module) == "cli" or module == "__main__":
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    banned = ("print", "sys.exit", "exit", "quit")
    assert [f"{call.lineno}: {ast.unparse(call.func)}" for call in calls if ast.unparse(call.func) in banned] == []


# module, source, the breach or empty
EXAMPLES = [
    ("policy.window", "import numpy as np", ""),
    ("policy.window", "import math, os.path", ""),
    ("policy.window", "from hpcps.config import WindowConfig", ""),
    ("policy.window", "from hpcps.errors import PlanError", ""),
    ("policy.window", "from . import capacity", ""),
    ("policy.window", "from ..comm import channel", "1: policy may not import hpcps.comm.channel"),
    ("policy.window", "def f():\n    import torch", "2: policy may not import torch"),
    ("policy.window", "from hpcps import comm", "1: policy may not import hpcps.comm"),
    ("policy.window", "import hpcps.comm.mpi", "1: policy may not import hpcps.comm.mpi"),
    ("policy.__init__", "from .window import WindowPolicy", ""),
    ("policy.__init__", "from ..torch import loader", "1: policy may not import hpcps.torch.loader"),
    ("config", "from hpcps.policy import Partition", "1: config may not import hpcps.policy.Partition"),
    ("comm.mpi", "from mpi4py import MPI", ""),
    ("comm.mpi", "from hpcps.protocol.messages import Header", ""),
    ("comm.mpi", "from hpcps.protocol import messages", ""),
    ("comm.mpi", "from hpcps.protocol.server import Server", "1: comm may not import hpcps.protocol.server.Server"),
    ("comm.mpi", "if TYPE_CHECKING:\n    import torch", "2: comm may not import torch"),
    ("runtime.client", "from mpi4py import MPI", "1: runtime may not import mpi4py"),
    ("runtime.client", "from hpcps.comm import World", ""),
    ("runtime.client", "from hpcps.sim import Engine", "1: runtime may not import hpcps.sim.Engine"),
    ("native", "from hpcps import _native_reference", ""),
    ("policy.window", "from hpcps import __version__", "1: policy may not import hpcps.__version__"),
    ("torch.loader", "import torch", ""),
    ("cli.run", "from hpcps.runtime import Job", "1: cli may not import hpcps.runtime.Job when it is loaded"),
    ("cli.run", "def f():\n    from hpcps.runtime import Job", ""),
    ("cli.run", "def f():\n    import torch", "2: cli may not import torch"),
    ("__init__", "from .job import Job", ""),
    ("__init__", "def __getattr__(name):\n    import hpcps.torch", ""),
    ("job", "from hpcps.comm import World", "1: root may not import hpcps.comm.World when it is loaded"),
    ("__main__", "from hpcps.cli.main import main", ""),
    ("__main__", "from hpcps.runtime import Job", "1: __main__ may not import hpcps.runtime.Job"),
    ("job", "if TYPE_CHECKING:\n    from hpcps.comm import World", ""),
]


@pytest.mark.parametrize(("module", "source", "expected"), EXAMPLES)
def test_the_check_itself(module: str, source: str, expected: str) -> None:
    assert breaches(source, module) == ([expected] if expected else [])


def heavy_after(code: str) -> str:
    """Heavy modules that are loaded after some code in a fresh interpreter, in one line."""
    script = f"import sys\n{code}\nprint('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["hpcps", "hpcps.policy", "hpcps.protocol", "hpcps.sim"])
def test_light_imports_load_nothing_heavy(name: str) -> None:
    if not PACKAGE.joinpath(*name.split(".")[1:], "__init__.py").exists():
        pytest.skip(f"{name} does not exist")
    assert heavy_after(f"import {name}") == "loaded:"


def test_help_loads_nothing_heavy() -> None:
    if not (PACKAGE / "__main__.py").exists():
        pytest.skip("hpcps has no __main__")
    run = (
        "import runpy\nsys.argv = ['hpcps', '--help']\n"
        "try:\n    runpy.run_module('hpcps', run_name='__main__')\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert heavy_after(run) == "loaded:"


def test_the_subprocess_check_can_fail() -> None:
    assert heavy_after("import types\nsys.modules['torch'] = types.ModuleType('torch')") == "loaded: torch"
