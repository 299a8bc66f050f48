"""The benchmarks for a GPU, quickly, wherever the tests run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.arms import Figures
from benchmarks.gpu.trainee import Size
from benchmarks.harness.command import Options
from memckpt.errors import UnsupportedError

_ROOT = Path(__file__).resolve().parents[2]


def test_an_arm_that_fails_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(size: Size, device: torch.device) -> Figures:
        raise UnsupportedError("expected one device, found two")

    def unprotected(size: Size, device: torch.device) -> Figures:
        raise AssertionError("protection is lost")

    def plain(size: Size, device: torch.device) -> Figures:
        return Figures(step_ms=[1.0])

    monkeypatch.setattr(command, "arms_of", lambda size, pattern: {"a": refused, "b": unprotected, "c": plain})
    result = tmp_path / "result"
    command.measure("tiny", torch.device("cpu"), result)
    report = Options.of("gpu", True, tmp_path, "").report("title", "method", *(["column"] * 9))
    command.add(report, "tiny", json.loads(result.read_text()))
    assert [row[1] for row in report.rows] == ["c"]
    assert [note for note in report.notes if "expected one device" in note]
    assert [note for note in report.notes if "protection is lost" in note]


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


@pytest.mark.slow
def test_quick_page_locks(tmp_path: Path, device: str) -> None:
    measured = "cpu" if device == "late" else device
    command = [sys.executable, "-m", "benchmarks.gpu.page_locks", "--device", measured, "--quick"]
    subprocess.run([*command, "--results", str(tmp_path)], cwd=_ROOT, check=True, timeout=200)
    report = json.loads((tmp_path / "gpu.page_locks.json").read_text())
    assert [row["pages"] for row in report["rows"]] == ["huge", "ordinary"]
    assert [row["huge"] for row in report["rows"]] in ([100, 0], [0, 0])  # before Linux 6.1 there are none on request
    rates = [rate for row in report["rows"] for rate in row["gb_per_second"]]
    assert all(rate > 0 for rate in rates if rate is not None)
    assert (None in rates) == (measured == "cpu")
