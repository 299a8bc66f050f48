"""Promises, and the tests that try to break them: `@pytest.mark.promise("a promise")`, read from the tests' source.

A promise is the first cell of a row in a table of `docs/guarantees.md` and the like, or a sentence of the mark's own.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def promises() -> dict[str, list[str]]:
    """Every promise with its tests, as pytest names them."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        source = file.read_text()
        if "mark.promise" in source:
            for promise, test in marks_of(source):
                found[promise].append(f"{file.relative_to(ROOT)}::{test}")
    return found


def marks_of(source: str) -> Iterator[tuple[str, str]]:
    """The promises that tests of a file are marked with, and the tests' names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.promise":
                    yield ast.literal_eval(each.args[0]), node.name
