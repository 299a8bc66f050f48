"""Modules of tests: a reader finds in one what it tests, and in ``tests/support`` what several need."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_module_of_tests_is_imported_by_another() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2].startswith("test_")
    ]
    assert found == [], "move what is shared to tests/support"
