"""What the documents tell a reader to type and to open is there."""

import re
import shlex
from pathlib import Path

import pytest

from nvfp4_train.config.command import parse_command
from nvfp4_train.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def command_lines() -> list[str]:
    """Overrides of every ``scripts/pretrain.py`` command in the documents; an ellipsis stands for one.

    A command with a recipe that its own document tells the reader to write is left out.
    """
    found = set()
    for text in (path.read_text(encoding="utf-8") for path in DOCUMENTS):
        lines = re.findall(r"scripts/pretrain\.py ([^`#\n]*)", text) + re.findall(r"`\.\.\. ([^`\n]*)`", text)
        own = {f"recipe={name}" for name in re.findall(r"`configs/recipe/(\w+)\.yaml`", text)}
        found |= {line for line in lines if not own & set(shlex.split(line))}
    return sorted(found)


def links() -> list[tuple[Path, str]]:
    pattern = re.compile(r"\]\(([^)#]+)")
    pairs = [(path, target) for path in DOCUMENTS for target in pattern.findall(path.read_text(encoding="utf-8"))]
    return [(path, target) for path, target in pairs if not target.startswith("http")]


def test_the_readme_has_commands_and_links():
    assert len(command_lines()) >= 5
    assert len(links()) >= 5


@pytest.mark.parametrize("line", command_lines())
def test_command_composes(line: str):
    command = parse_command(shlex.split(line))
    if not command.shows_help:
        load_config(command.overrides)


@pytest.mark.parametrize(("path", "target"), links(), ids=str)
def test_link_leads_somewhere(path: Path, target: str):
    assert (path.parent / target).exists()


def test_make_targets_of_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {
        name for path in DOCUMENTS for name in re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE)
    }
    assert named - targets == set()
    assert {"train", "test", "check"} <= named
