"""The documentation and the files in ``deploy/``: links lead somewhere, and every setting and command exists."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import typer.core
import typer.main

from docs_site import reference
from memckpt.cli.main import app
from memckpt.config.settings import describe_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DEPLOYED = sorted(
    path for path in ROOT.glob("deploy/**/*") if path.suffix in {".sh", ".sbatch", ".service", ".yaml", ".py"}
)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """Without blocks of code, in which `#` begins a comment."""
    return _FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(anchor)
    return found


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        there = "://" in link or (target.exists() and (not anchor or anchor in anchors(target)))
        if not there:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` (c)\n\n## Twice\n\n## Twice\n\n[a](#a-b-c) [b](#twice-1) [c](#no) [d](no.md) [e](page.md#no)\n"
        "```\n# comment\n```\n[f](#comment) [g](https://example.org/no)\n"
    )
    assert broken_links(page) == ["#no", "no.md", "page.md#no", "#comment"]


CLASSES = {kind.__name__: kind for kinds in reference.PARTS.values() for kind in kinds}
SETTINGS = list(describe_settings())
#: Variables of the environment that are no settings, and that packages read by name.
READ = {
    name
    for package in ROOT.glob("*/__init__.py")
    if package.parent.name not in ("tests", "benchmarks")
    for path in package.parent.rglob("*.py")
    for name in re.findall(r"\"(MEMCKPT_\w+)\"", path.read_text())
}
_SPAN = re.compile(r"`([^`\n]+)`")
_VARIABLE = re.compile(r"\bMEMCKPT_[A-Z][A-Z0-9_]*")


def code(page: Path) -> list[str]:
    """Texts in backquotes and blocks of code; of a file in ``deploy/`` all, with lists of a manifest as commands."""
    if page.suffix != ".md":
        words = re.sub(
            r"\[memckpt, ([^\]]*)\]", lambda found: "\nmemckpt " + found[1].replace(",", ""), page.read_text()
        )
        return [re.sub(r"^\s*#(?!SBATCH).*$", "", words, flags=re.MULTILINE)]
    return [*_FENCED.findall(page.read_text()), *_SPAN.findall(prose(page))]


def wrong_settings(texts: list[str]) -> list[str]:
    """Variables, options, paths and arguments in texts that are no setting."""
    variables = {setting.variable for setting in SETTINGS} | READ
    options, paths = {setting.option for setting in SETTINGS}, {setting.path for setting in SETTINGS}
    wrong = []
    for text in texts:
        wrong += [name for name in _VARIABLE.findall(text) if name not in variables and not name.endswith("_")]
        wrong += [name for name in re.findall(r"--memckpt-[a-z-]+", text) if name not in options]
        wrong += [
            path for path in re.findall(r"^((?:agent|storage|peers)\.[a-z_]+)(?:=.*)?$", text) if path not in paths
        ]
        wrong += [f"{name}({given}=)" for name, given in _arguments(text) if given not in _fields(CLASSES[name])]
    return wrong


def _arguments(text: str) -> list[tuple[str, str]]:
    """Classes of settings that a piece of Python makes, and the names of the arguments."""
    try:
        tree = ast.parse(re.sub(r"^```\w*\n|```$", "", text))
    except SyntaxError:
        return []  # no Python
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [
        (call.func.id, str(each.arg))
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in CLASSES
        for each in call.keywords
    ]


def _fields(kind: type) -> set[str]:
    return {each.name for each in dataclasses.fields(kind)}


@pytest.mark.parametrize("page", [*PAGES, *DEPLOYED], ids=lambda page: page.name)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    assert wrong_settings(code(page)) == []


def test_a_setting_that_does_not_exist_is_noticed() -> None:
    named = [
        "MEMCKPT_STORAGE_EVERY_STEPS=5 MEMCKPT_STORAGE_X=1",
        "--memckpt-redo lazy --memckpt-no",
        "storage.url=None",
        "storage.no",
        "```python\nStorageConfig(url='a', no=1)\n```",
    ]
    assert wrong_settings(named) == ["MEMCKPT_STORAGE_X", "--memckpt-no", "storage.no", "StorageConfig(no=)"]


def wrong_commands(texts: list[str]) -> list[str]:
    """Commands and options in texts that `memckpt` does not have. What follows `--` belongs to another program."""
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    wrong = []
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        for name, arguments in re.findall(
            r"(?:^|\$ |&& |exec |nice -n 10 |bin/)memckpt ([a-z]+)\b([^#|;&>]*)", line.strip()
        ):
            if name not in command.commands:
                wrong.append(name)
                continue
            parameters = [*command.params, *command.commands[name].params]
            known = {option for each in parameters for option in [*each.opts, *each.secondary_opts]} | {"--help"}
            given = re.findall(r"(?<![\w-])(--[a-z-]+)", arguments.partition(" -- ")[0])
            wrong += [f"{name} {option}" for option in given if option not in known]
    return wrong


@pytest.mark.parametrize("page", [*PAGES, *DEPLOYED], ids=lambda page: page.name)
def test_every_command_and_option_that_is_named_exists(page: Path) -> None:
    assert wrong_commands(code(page)) == []


def test_a_command_that_does_not_exist_is_noticed() -> None:
    texts = [
        "memckpt status RUN --json --no",
        "$ memckpt fly",
        "memckpt run -- python train.py --any",
        "a memckpt word",
    ]
    assert wrong_commands(texts) == ["status --no", "fly"]
