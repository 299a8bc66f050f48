"""The documentation site: its reference pages say what the code says, and it builds without a warning."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_site import reference
from memckpt.config.settings import describe_settings

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


def test_every_public_name_is_in_the_reference() -> None:
    def things(module: str, names: list[str]) -> set[int]:
        return {id(getattr(importlib.import_module(module), name)) for name in names}

    shown = set().union(*(things(module, reference.shown_names(module)) for module in reference.MODULES))
    for module in reference.MODULES:
        assert things(module, reference.public_names(module)) <= shown, module


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
