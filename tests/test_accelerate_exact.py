"""Exact resume with Accelerate: killed anywhere, any number of times, a run must end as if it never had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerate_runs import Case, Kill, Run, survives
from tests.engine_harness import Lab

PLAIN = Case("plain")


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed trainings, one for each case and number of ranks."""
    return tmp_path_factory.mktemp("references")


def test_plain(lab: Lab, references: Path) -> None:
    survives(lab, Run(PLAIN, lab.directory / "job"), [("backward", 5), ("committed", 7)], references)
