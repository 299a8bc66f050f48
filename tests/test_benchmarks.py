"""Benchmarks that rely on how several frameworks and adapters are made still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_framework_overhead(tmp_path: Path) -> None:
    """Every framework trains on its three sides; memckpt's has a session, whose stall is counted."""
    command = [sys.executable, "-m", "benchmarks.framework_overhead", "--quick", "--results", str(tmp_path)]
    subprocess.run(command, cwd=_ROOT, check=True, timeout=280)
    report = json.loads((tmp_path / "framework_overhead.json").read_text())
    ratios, differences = (table["rows"] for table in report["tables"])
    frameworks = {"plain loop", "Lightning", "Accelerate", "transformers.Trainer"}
    assert {row["framework"] for row in ratios if row["arm"] == "memckpt" and row["stall_ms"] > 0} == frameworks
    assert {row["framework"] for row in ratios if row["arm"].startswith("nothing")} == frameworks
    assert len(ratios) == 11
    assert {row["framework"] for row in differences if row["stall_us"] > 0} == frameworks
    assert report["notes"] == []
