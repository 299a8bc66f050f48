"""The documentation: links lead somewhere, and every setting, command, exit status and public name is in it."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.core
import typer.main

import memckpt
from memckpt import errors
from memckpt.cli.main import app
from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig, StorageConfig
from memckpt.config.settings import alternatives, describe_settings, variant_name

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
ALL = "\n".join(page.read_text() for page in PAGES)


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


CONFIGURED = [MemckptConfig, AgentConfig, ErasureConfig, StorageConfig]


@pytest.mark.parametrize("kind", CONFIGURED, ids=lambda kind: kind.__name__)
def test_every_setting_is_described_with_its_default(kind: type) -> None:
    inherited = {
        each.name for base in kind.__bases__ if dataclasses.is_dataclass(base) for each in dataclasses.fields(base)
    }
    page = (ROOT / "docs/configuration.md").read_text()
    table = page.partition(f"## `{kind.__name__}`\n")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE))
    own = [each for each in dataclasses.fields(kind) if each.name not in inherited]
    assert set(shown) == {each.name for each in own}
    for each in own:
        if each.default is not dataclasses.MISSING:
            expected = f'`"{each.default}"`' if isinstance(each.default, str) else f"`{each.default}`"
            plain = f"{each.default:g}" if isinstance(each.default, (int, float)) else expected
            assert shown[each.name] in (expected, plain), each.name


def test_every_setting_of_a_compressor_is_described_with_its_default() -> None:
    """One table for all of them, whose second column says which have a field."""
    hints = typing.get_type_hints(MemckptConfig)
    kinds = {kind.__name__: kind for kind in alternatives(hints["compression"])[0]}
    heading = "## " + ", ".join(f"`{name}`" for name in kinds)
    page = (ROOT / "docs/configuration.md").read_text()
    assert f"{heading}\n" in page
    table = page.partition(f"{heading}\n")[2].partition("\n## ")[0]
    shown: list[tuple[str, str, str]] = []
    for field, of, default in re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE):
        named = re.findall(r"`(\w+)`", of)
        having = [name for name in kinds if (name in named) is not of.startswith("all but ")]
        shown += [(name, field, default.strip("`")) for name in having]
    values = [(name, field.name, field.default) for name, kind in kinds.items() for field in dataclasses.fields(kind)]
    expected = [(name, field, f'"{value}"' if isinstance(value, str) else str(value)) for name, field, value in values]
    assert sorted(shown) == sorted(expected)


def test_every_compressor_is_described() -> None:
    (setting,) = [each for each in describe_settings() if each.path == "compression"]
    kinds = alternatives(typing.get_type_hints(MemckptConfig)["compression"])[0]
    assert setting.choices == tuple(map(variant_name, kinds))
    (variable,) = re.findall(r"^\| `MEMCKPT_COMPRESSION` \| (.*)$", ALL, re.MULTILINE)
    (row,) = re.findall(r"^\| `compression` \| (.*)$", ALL, re.MULTILINE)
    compared = (ROOT / "docs/compression.md").read_text()
    for kind in kinds:
        assert f"`{variant_name(kind)}`" in variable
        assert f"`{kind.__name__}`" in row
        assert f"\n| `{kind.__name__}(" in compared


def test_the_defaults_shown_are_the_defaults() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs/configuration.md").read_text(), re.DOTALL)
    assert block is not None
    values: dict[str, Any] = {}
    exec(block[1], values)
    assert values["config"] == MemckptConfig()
    (shown,) = [value for name, value in values.items() if name != "config" and isinstance(value, ErasureConfig)]
    assert shown == ErasureConfig()
    for kind in CONFIGURED:
        assert [each.name for each in dataclasses.fields(kind) if f"{each.name}=" not in block[1]] == []


def test_every_command_and_option_is_described() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    assert {"status", "export", "doctor"} <= set(command.commands)
    shown = (ROOT / "README.md").read_text()
    assert [name for name in command.commands if not re.search(rf"^memckpt {name} ", shown, re.MULTILINE)] == []
    options = {
        option.opts[0]
        for each in [command, *command.commands.values()]
        for option in each.params
        if isinstance(option, typer.core.TyperOption) and not option.hidden
    }
    assert len(options) > 10
    assert [option for option in sorted(options) if not re.search(rf"(?<![\w-]){option}\b", ALL)] == []


def test_every_public_name_is_described() -> None:
    assert [name for name in memckpt.__all__ if not re.search(rf"\b{name}\b", ALL)] == []


def test_every_exit_status_is_described() -> None:
    table = (ROOT / "docs/troubleshooting.md").read_text().partition("## Exit status")[2]
    shown = {
        name: int(status)
        for status, names in re.findall(r"^\| (\d+) \| ([^|]+) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MemckptError)]
    other = errors.MemckptError.exit_code
    assert shown == {
        kind.__name__: kind.exit_code for kind in kinds if kind.exit_code != other or kind is errors.MemckptError
    }


def test_every_named_test_exists() -> None:
    """Of the promises in guarantees.md."""
    for row in re.findall(r"^\|.*`test_\w+\.py`.*$", (ROOT / "docs/guarantees.md").read_text(), re.MULTILINE):
        for part in row.split("; "):
            named = re.findall(r"`(test_\w+)(\.py)?`", part)
            files = [name for name, suffix in named if suffix]
            sources = [path.read_text() for name in files for path in (ROOT / "tests").rglob(f"{name}.py")]
            assert len(sources) == len(files), part
            if sources:
                missing = [name for name, suffix in named if not suffix and f"def {name}(" not in sources[0]]
                assert missing == [], part
