"""What the documents show is true: README's program runs, flags and settings exist, messages are in the source."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcps.cli import launch, run
from hpcps.cli.options import read_request
from hpcps.settings import names

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/architecture.md", "docs/mpi.md", "docs/guide.md", "jobs/README.md")
CHECK = """
with torch.no_grad():
    right = (model(points).argmax(1) == dataset.tensors[1]).float().mean().item()
saved = torch.load("model.pt", weights_only=True)
print("right", right, "saved", all(torch.equal(saved[name], value) for name, value in model.state_dict().items()))
"""


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    """Every `hpcps run` and `hpcps launch` of the documents' shell blocks, from that word on."""
    lines = [line for document in DOCUMENTS for block in blocks(document, "bash") for line in block.splitlines()]
    return [line[match.start() :] for line in lines if (match := re.search(r"\bhpcps (run|launch) ", line))]


def test_the_program_trains_and_saves(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks("README.md", "python")[0] + CHECK)
    launched = ("OMPI_", "PMI", "SLURM_", "HPCPS_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    match = re.search(r"^right ([\d.]+) saved (\w+)$", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout
    assert float(match[1]) > 0.9
    assert match[2] == "True"


def test_command_lines_are_found() -> None:
    assert len(command_lines()) >= 5


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_are_accepted(line: str) -> None:
    _, command, *words = shlex.split(line, comments=True)
    parser = {"run": run, "launch": launch}[command].make_parser()
    assert read_request(parser, words, {}).program[0] == "train.py"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    targets = re.findall(r"\]\(([^)#:]+)\)", text_of(document))
    assert [target for target in targets if not (folder / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_exist(document: str) -> None:
    sections = {name.partition(".")[0] for name in names() if "." in name}
    words = re.findall(r"(?:`|--set )([a-z]+)\.([a-z_]+)\b(?!\.|\()", text_of(document))
    files = {path.parent.name + "." + path.stem for path in ROOT.glob("hpcps/*/*.py")}
    unknown = {f"{section}.{leaf}" for section, leaf in words if section in sections} - set(names()) - files
    assert unknown == set()


def test_messages_of_the_guide_are_in_the_source() -> None:
    table = text_of("docs/guide.md").partition("## Trouble")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 10
    source = "".join(path.read_text() for path in sorted((ROOT / "hpcps").rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    joined = re.sub(r"\{[^{}]*\}", "…", joined)
    missing = [part for message in messages for part in message.split(" … ") if part not in joined]
    assert missing == []
