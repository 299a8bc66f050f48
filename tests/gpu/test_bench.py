"""The benchmarks for a GPU, quickly, wherever the tests run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quick_benchmark(tmp_path: Path, device: str) -> None:
    measured = "cpu" if device == "late" else device
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", measured, "--quick", "--results", str(tmp_path)]
    subprocess.run(command, cwd=_ROOT, check=True, timeout=200)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert not [note for note in report["notes"] if note.startswith("Left out")], report["notes"]
    by_arm = {row["arm"]: row for row in report["rows"]}
    assert len(by_arm) == 6
    lazy, copy = by_arm["memckpt, lazy T=8"], by_arm["page-locked copy of the state"]
    # A gradient and an eighth of the state, a step; the state has three tensors for each gradient.
    assert 0.9 < lazy["to_host_bytes"] / (copy["state_bytes"] * (1 / 3 + 1 / 8)) < 1.05
    assert lazy["restore_seconds"] > 0
    assert lazy["stall_ms"] > 0
