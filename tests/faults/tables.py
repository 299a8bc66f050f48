"""Tables of the documentation that promise something, as rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        page: file name in docs/.
        heading: the last heading before it, without markup of links.
        columns: the titles of its columns.
        rows: its rows: the text of each cell, links replaced by their words.
    """

    page: str
    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(page: str, text: str | None = None) -> list[Table]:
    """All tables of a page, in order."""
    lines = ((DOCS / page).read_text() if text is None else text).splitlines()
    found: list[Table] = []
    heading, block = "", list[tuple[str, ...]]()
    for line in [*lines, ""]:
        if line.startswith("|"):
            block.append(_cells(line))
            continue
        if block:
            found.append(Table(page, heading, block[0], tuple(block[2:])))
            block = []
        if line.startswith("#"):
            heading = _LINK.sub(r"\1", line.lstrip("#").strip())
    return found


def _cells(line: str) -> tuple[str, ...]:
    return tuple(_LINK.sub(r"\1", cell).strip() for cell in line.strip().strip("|").split(" | "))
