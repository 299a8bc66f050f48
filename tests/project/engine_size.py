"""The engine grows for a reason that the changelog names, or not by more than 300 lines: ``make check`` runs this.

``engine_size.txt`` has the size that was agreed on. A line of the changelog allows more:
``Engine: 45,600 lines, for rewinds.``
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_suffix(".txt")
_GROWTH = 300
_REASON = re.compile(r"\bEngine: ([\d,]+) lines, for \w")


def engine_lines(package: Path = ROOT / "memckpt") -> int:
    """Lines of the engine's Python files."""
    return sum(len(path.read_text().splitlines()) for path in package.rglob("*.py"))


def problem(lines: int, recorded: int, changelog: str) -> str | None:
    """What is wrong with the engine's size; None if nothing is."""
    reasons = (int(found.replace(",", "")) for found in _REASON.findall(changelog))
    most = max([recorded, *reasons]) + _GROWTH
    if lines <= most:
        return None
    return (
        f"memckpt/: expected at most {most:,} lines, found {lines:,}; make it smaller, or say why in CHANGELOG.md: "
        f"Engine: {lines:,} lines, for ..."
    )


if __name__ == "__main__":
    sys.exit(problem(engine_lines(), int(RECORDED.read_text()), (ROOT / "CHANGELOG.md").read_text()))
