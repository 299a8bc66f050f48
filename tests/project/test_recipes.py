"""The recipes: every command, option and variable in their files and pages is one that there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.core
import typer.main
from torch.distributed.run import get_args_parser

from memckpt.cli.main import app
from memckpt.config.arguments import RESUME, RUN_DIR
from memckpt.config.settings import describe_settings
from tests.support.trainings.script_runs import ROOT

PAGES = sorted((ROOT / "docs/recipes").glob("*.md"))
FILES = sorted(
    path for path in (ROOT / "deploy").rglob("*") if path.suffix in {".sh", ".sbatch", ".service", ".yaml", ".py"}
)
_ADDRESS = {"MEMCKPT_NODE", "MEMCKPT_RACK", "MEMCKPT_ZONE"}


def text_of(path: Path) -> str:
    """Of a page only its blocks of code; long lines in one."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    return re.sub(r"\\\n\s*", " ", text)


def memckpt_commands(path: Path) -> Iterator[list[str]]:
    """What follows `memckpt` where it is a command: in lines of shell and unit files, and in lists of manifests."""
    text = text_of(path)
    for words in re.findall(r"\[memckpt, ([^\]]*)\]", text):
        yield [word.strip().strip('"') for word in words.split(",")]
    for line in text.splitlines():
        if re.match(r"\s*(#|\[|command:)", line):
            continue
        for found in re.findall(r"(?:^|[\s/])memckpt ((?:agent|status|stop|doctor|ls|verify)\b[^;&|>#'`]*)", line):
            yield shlex.split(found.strip())


def placed(path: Path) -> list[tuple[Path, list[str]]]:
    return [(path, words) for words in memckpt_commands(path)]


COMMANDS = [each for path in [*PAGES, *FILES] for each in placed(path)]


def test_commands_are_found_at_all() -> None:
    assert {path.suffix for path, _ in COMMANDS} >= {".md", ".sbatch", ".service", ".yaml"}


@pytest.mark.parametrize(("path", "words"), COMMANDS, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_a_command_is_one_that_the_command_line_takes(path: Path, words: list[str]) -> None:
    """It is parsed, and not run."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands[words[0]]
    with command.make_context(words[0], words[1:]):
        pass


@pytest.mark.parametrize("path", [*PAGES, *FILES], ids=lambda path: path.name)
def test_a_variable_is_one_that_is_read(path: Path) -> None:
    known = {setting.variable for setting in describe_settings()} | _ADDRESS | {RUN_DIR, RESUME}
    assert set(re.findall(r"\bMEMCKPT_[A-Z_]+\b", path.read_text())) <= known


@pytest.mark.parametrize("path", [*PAGES, *FILES], ids=lambda path: path.name)
def test_an_option_of_torchrun_is_one_that_it_has(path: Path) -> None:
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    for found in re.findall(r"torchrun\n?((?:[\s,\-\]]*--?[a-z][\w-]*(?:=(?:\"[^\"]*\"|\S+))?)+)", text_of(path)):
        options = set(re.findall(r"(--[a-z][\w-]*)", re.sub(r'="[^"]*"', "", found)))
        assert options <= known
