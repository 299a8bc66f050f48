"""Every row that promises something has a scenario, every scenario a row and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.kinds import Kind
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.faults.tables import Table, tables_of

TESTS = Path(__file__).parents[1]
#: Title of the last column of tables whose rows name their tests themselves.
SELF_PROVED = "tested by"
_NAMED = re.compile(r"`(test_\w+)(\.py)?`")


def unproved(table: Table, scenarios: tuple[Scenario, ...]) -> list[str]:
    """Rows of a table without a scenario or a test, and scenarios without a row."""
    if table.columns[-1] == SELF_PROVED:
        return [row[0] for row in table.rows if not _NAMED.search(row[-1])]
    rows, named = [row[0] for row in table.rows], [each.row for each in scenarios]
    return [row for row in rows if row not in named] + [f"no such row: {row}" for row in named if row not in rows]


def promises(page: str) -> list[tuple[Table, tuple[Scenario, ...]]]:
    """A page's tables with their scenarios: on guarantees.md all, elsewhere those that are registered."""
    found, seen = [], dict[str, int]()
    for table in tables_of(page):
        key = (page, table.heading)
        number = seen[table.heading] = seen.get(table.heading, -1) + 1
        ours = SCENARIOS.get(key, ())
        if page == "guarantees.md" or ours:
            found.append((table, ours[number] if number < len(ours) else ()))
    return found


@pytest.mark.parametrize("page", sorted({"guarantees.md", *(page for page, _ in SCENARIOS)}))
def test_every_row_has_a_scenario(page: str) -> None:
    tables = promises(page)
    assert {table.heading for table, _ in tables} >= {heading for of, heading in SCENARIOS if of == page}
    assert [(table.heading, unproved(table, ours)) for table, ours in tables if unproved(table, ours)] == []


def test_a_row_without_a_scenario_is_noticed() -> None:
    table, other = tables_of(
        "x.md", "# A\n\n|a|b|\n|---|---|\n| [x](y) `|` | 1 |\n| z | 2 |\n\n| a | tested by |\n|--|--|\n| r | - |"
    )
    proved = Scenario("x `|`", (Kind.SCRIPT,), ())
    assert (table.heading, table.rows) == ("A", (("x `|`", "1"), ("z", "2")))
    assert unproved(table, (proved,)) == ["z"]
    assert unproved(table, (proved, Scenario("w", (), ()), Scenario("z", (), ()))) == ["no such row: w"]
    assert unproved(other, ()) == ["r"]


def test_every_test_of_a_scenario_exists() -> None:
    scenarios = [each for tables in SCENARIOS.values() for table in tables for each in table]
    missing = []
    for path, _, name in {test.partition("::") for each in scenarios for test in each.tests}:
        file = TESTS / path
        if not file.exists() or f"def {name}(" not in file.read_text():
            missing.append(f"{path}::{name}")
    assert missing == []
    assert [each.row for each in scenarios if not each.tests or not each.kinds] == []


def test_every_kind_of_fault_is_in_a_scenario() -> None:
    used = {kind for tables in SCENARIOS.values() for table in tables for each in table for kind in each.kinds}
    assert used == set(Kind)
