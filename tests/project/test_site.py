"""The documentation site: its reference pages say what the code says, and it builds without a warning."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer.core
import typer.main

from docs_site import reference
from memckpt import errors
from memckpt.cli.main import app
from memckpt.config.settings import describe_settings
from memckpt.journal.events import AnyEvent

ROOT = Path(__file__).parents[2]


def test_every_setting_is_in_the_reference_with_its_default_and_meaning() -> None:
    page = reference.settings()
    parts = re.split(r"^### `([\w.]+)`$", page, flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    expected = {setting.path: setting for setting in describe_settings()}
    assert list(shown) == sorted(shown, key=[*shown].index)
    assert set(shown) == set(expected)
    for path, text in shown.items():
        facts, meaning = text.strip().split("\n\n")[:2]
        assert len(meaning) > 10, path
        assert f"`{expected[path].variable}`" in facts
        assert f"`{expected[path].option}`" in facts
        kinds = [kind for kind in reference.PARTS[expected[path].part] for each in dataclasses.fields(kind)
                 if each.name == path.rpartition(".")[2]]  # fmt: skip
        for kind in kinds:
            default = getattr(kind(), path.rpartition(".")[2])
            value = f'"{default}"' if isinstance(default, str) else f"{default}"
            assert f"default `{value}`" in facts or dataclasses.is_dataclass(default), path


def test_every_command_is_in_the_reference_with_its_options() -> None:
    page = reference.commands()
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    for name, each in command.commands.items():
        text = page.partition(f"## `memckpt {name}`\n")[2].partition("\n## ")[0]
        options = [option for parameter in each.params if not getattr(parameter, "hidden", False)
                   for option in [*parameter.opts, *parameter.secondary_opts] if option.startswith("--")]  # fmt: skip
        assert [option for option in options if option not in text] == [], name
        assert len(text.splitlines()) > 8, name


@pytest.mark.parametrize("module", reference.MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    found = importlib.import_module(module)
    names = reference.public_names(module)
    assert names
    for name in names:
        thing = getattr(found, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue  # a type's other name
        # Not a dataclass's signature, nor what a base class says of itself.
        own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert own, f"{module}.{name}"
        assert not own.startswith(f"{name}("), f"{module}.{name}"
        if inspect.isclass(thing) and not dataclasses.is_dataclass(thing):
            methods = [(each, method) for each, method in vars(thing).items() if inspect.isfunction(method)]
            assert [each for each, method in methods if not each.startswith("_") and not method.__doc__] == [], name


def test_every_public_name_is_in_the_reference() -> None:
    def things(module: str, names: list[str]) -> set[int]:
        return {id(getattr(importlib.import_module(module), name)) for name in names}

    shown = set().union(*(things(module, reference.shown_names(module)) for module in reference.MODULES))
    for module in reference.MODULES:
        assert things(module, reference.public_names(module)) <= shown, module


def test_every_kind_of_error_has_its_exit_status() -> None:
    table = reference.exit_statuses()
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


def test_every_event_is_in_the_reference_with_its_fields() -> None:
    parts = re.split(r"^## `(\w+)`$", reference.events(), flags=re.MULTILINE)
    shown = {
        name: re.findall(r"^- `(\w+)`", text, re.MULTILINE) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    kinds = [kind for part in typing.get_args(AnyEvent) for kind in (typing.get_args(part) or (part,))]
    assert shown == {kind.__struct_config__.tag: list(kind.__struct_fields__) for kind in kinds}


def test_every_page_gets_what_is_made_for_it() -> None:
    pages = {path: path.read_text() for path in (ROOT / "docs/reference").glob("*.md")}
    found = [name for text in pages.values() for name in re.findall(r"^<!-- made: (\w+) -->$", text, re.MULTILINE)]
    assert sorted(found) == sorted(reference.MADE)
    page = pages[ROOT / "docs/reference/settings.md"]
    assert reference.with_made(page) == page.replace("<!-- made: settings -->", reference.settings())


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-c", "docs_site", "."]
    built = subprocess.run(
        [*command, str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert built.returncode == 0, built.stderr
    pages = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "README.html", "docs/quickstart.html", "docs/reference/interface.html"} <= pages
    interface = (tmp_path / "site/docs/reference/interface.html").read_text()
    for module in reference.MODULES:
        assert [name for name in reference.shown_names(module) if f'id="{module}.{name}"' not in interface] == []
