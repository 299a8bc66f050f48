"""Each test belongs to exactly one share, and no module of tests imports another one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.shares import drawn, parse, taken, thinned

TESTS = [f"tests/test_{name}.py::test_it[{case}]" for name in "abc" for case in range(7)] + [
    f"tests/test_d.py::test_{number}" for number in range(40)
]


@pytest.mark.parametrize("shares", [1, 2, 3, 5, 8])
def test_shares_are_all_tests_and_each_once(shares: int) -> None:
    found = [taken(TESTS, share, shares) for share in range(1, shares + 1)]
    assert [sum(column) for column in zip(*found, strict=True)] == [1] * len(TESTS)


def test_a_function_s_cases_are_spread_evenly() -> None:
    sizes = [sum(taken(TESTS[:7], share, 3)) for share in (1, 2, 3)]
    assert sorted(sizes) == [2, 2, 3]


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "one/two", "1/3 "])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected K/N"):
        parse(text)


@pytest.mark.parametrize("cases", [1, 2, 3, 7, 9])
def test_as_many_cases_are_drawn_and_all_have_their_turn(cases: int) -> None:
    draws = [drawn(TESTS, cases, draw) for draw in range(100, 107)]
    for function in ("a", "b", "c"):
        mine = [index for index, test in enumerate(TESTS) if f"test_{function}.py" in test]
        assert all(1 <= sum(draw[index] for index in mine) <= cases for draw in draws)
        assert all(any(draw[index] for draw in draws) for index in mine)
    alone = TESTS[21:]
    assert all(draw[21:] == [True] * len(alone) for draw in draws)


def test_every_nth_case_of_a_thinned_test_is_in_every_run() -> None:
    found = thinned([(test, 3 if "test_b" in test else 1) for test in TESTS])
    assert [index for index, rare in enumerate(found) if rare] == [7 + index for index in (1, 2, 4, 5)]


ROOT = Path(__file__).parents[2]


def test_no_module_of_tests_is_imported_by_another() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2].startswith("test_")
    ]
    assert found == [], "move what is shared to tests/support"
