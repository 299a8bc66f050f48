"""Every row of a table that promises something has a test that is marked with it, and every mark has its row.

A test names the first cell of the row that it proves: `@pytest.mark.promise("trainer, while it restores")`. Rows whose
last cell names tests themselves ("tested by") need no mark. On guarantees.md every table promises something, on other
pages those of which one row is marked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = ("guarantees.md", "restart.md", "sharding.md", "storage.md")
#: Title of the last column of tables whose rows name their tests themselves.
SELF_PROVED = "tested by"
_NAMED = re.compile(r"`(test_\w+)(\.py)?`")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


class Table(NamedTuple):
    """A table of a page: the titles of its columns, and its rows, links replaced by their words."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(text: str) -> Iterator[Table]:
    """All tables of a page, in order."""
    block: list[tuple[str, ...]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = line.strip().strip("|").split(" | ")
            block.append(tuple(_LINK.sub(r"\1", cell).strip() for cell in cells))
        elif block:
            yield Table(block[0], tuple(block[2:]))
            block = []


def marks_of(source: str) -> Iterator[str]:
    """The rows that tests of a file are marked with."""
    for node in ast.walk(ast.parse(source)):
        for each in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.promise":
                yield ast.literal_eval(each.args[0])


def unproved(table: Table, marked: set[str], everywhere: bool) -> list[str]:
    """Rows of a table that promises something which no test proves."""
    if table.columns[-1] == SELF_PROVED:
        return [row[0] for row in table.rows if not _NAMED.search(row[-1])]
    rows = [row[0] for row in table.rows]
    return [row for row in rows if row not in marked] if everywhere or marked.intersection(rows) else []


def test_every_row_has_a_test_and_every_mark_a_row() -> None:
    files = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    marked = {row for source in files if "mark.promise" in source for row in marks_of(source)}
    tables = {page: list(tables_of((ROOT / "docs" / page).read_text())) for page in PAGES}
    missing = {
        page: rows
        for page, found in tables.items()
        if (rows := [row for table in found for row in unproved(table, marked, page == "guarantees.md")])
    }
    assert missing == {}
    assert marked - {row[0] for found in tables.values() for table in found for row in table.rows} == set()


def test_a_row_without_a_test_is_noticed() -> None:
    table, other = tables_of(
        "# A\n\n|a|b|\n|---|---|\n| [x](y) `|` | 1 |\n| z | 2 |\n\n| a | tested by |\n|--|--|\n| r | - |"
    )
    assert table.rows == (("x `|`", "1"), ("z", "2"))
    assert unproved(table, {"x `|`"}, False) == ["z"]
    assert unproved(table, set(), False) == []
    assert unproved(table, set(), True) == ["x `|`", "z"]
    assert unproved(other, set(), False) == ["r"]
    assert list(marks_of('@pytest.mark.promise("a " "b")\n@pytest.mark.slow\ndef test(): pass')) == ["a b"]
