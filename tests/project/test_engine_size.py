"""The check of the engine's size."""

from __future__ import annotations

from pathlib import Path

from tests.project.engine_size import engine_lines, problem


def test_growth_needs_a_reason_in_the_changelog() -> None:
    assert problem(45_300, 45_000, "") is None
    assert problem(45_301, 45_000, "- Engine: 44,000 lines, for less.") == (
        "memckpt/: expected at most 45,300 lines, found 45,301; make it smaller, or say why in CHANGELOG.md: "
        "Engine: 45,301 lines, for ..."
    )
    assert problem(45_900, 45_000, "- Engine: 45,600 lines, for rewinds.\n") is None
    assert problem(45_901, 45_000, "- Engine: 45,600 lines, for rewinds.\n") is not None


def test_all_lines_of_python_files_count(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "one.py").write_text("a\n\nb\n")
    (tmp_path / "room" / "two.py").write_text("c")
    (tmp_path / "room" / "page.txt").write_text("d\n")
    assert engine_lines(tmp_path) == 4
