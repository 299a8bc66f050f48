"""Every row of a table that promises something has a test that is marked with it.

A test names the first cell of the row that it proves: `@pytest.mark.promise("trainer, while it restores")`. On
guarantees.md every table promises something, on other pages those of which one row is marked. A mark that is no row's
is a promise that only the reference page of promises shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs_site import reference
from docs_site.promises import marks_of, promises

ROOT = Path(__file__).parents[2]
PAGES = ("guarantees.md", "restart.md", "sharding.md", "storage.md")
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


def unproved(table: Table, marked: set[str], everywhere: bool) -> list[str]:
    """Rows of a table that promises something which no test proves."""
    rows = [row[0] for row in table.rows]
    return [row for row in rows if row not in marked] if everywhere or marked.intersection(rows) else []


def test_every_row_has_a_test() -> None:
    marked = set(promises())
    tables = {page: list(tables_of((ROOT / "docs" / page).read_text())) for page in PAGES}
    missing = {
        page: rows
        for page, found in tables.items()
        if (rows := [row for table in found for row in unproved(table, marked, page == "guarantees.md")])
    }
    assert missing == {}
    assert len(marked) > 150


def test_the_reference_has_every_promise_and_test() -> None:
    page = reference.promises()
    assert [promise for promise in promises() if f"- {promise}\n" not in page] == []
    assert page.count("\n  - `tests/") == sum(map(len, promises().values()))


def test_a_row_without_a_test_is_noticed() -> None:
    (table,) = tables_of("# A\n\n|a|b|\n|---|---|\n| [x](y) `|` | 1 |\n| z | 2 |\n")
    assert table.rows == (("x `|`", "1"), ("z", "2"))
    assert unproved(table, {"x `|`"}, False) == ["z"]
    assert unproved(table, set(), False) == []
    assert unproved(table, set(), True) == ["x `|`", "z"]
    marked = '@pytest.mark.promise("a " "b")\n@pytest.mark.slow\ndef test(): pass'
    assert list(marks_of(marked)) == [("a b", "test")]
