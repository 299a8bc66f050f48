"""A script's own checkpoints are drilled: what they bring back, and the known faults of stock checkpointing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memckpt.errors import ConfigurationError
from memckpt_tools.drill.lines import Attempt, Begun, Point, RankHistory, Restored, RunHistory, Taken
from memckpt_tools.drill.stock import aligned, parse_kinds

SCRIPTS = Path(__file__).parent / "stock_scripts.py"
LIMIT_SECONDS = 600


def drill(tmp_path: Path, script: list[str], *options: str, status: int) -> tuple[str, dict[str, Any]]:
    """Output of the drill of a script, and its findings."""
    command = [sys.executable, "-m", "memckpt", "drill", "--stock", "--steps", "48", "--seed", "4", *options]
    ended = subprocess.run(
        [*command, "--json", "found.json", "--dir", "drill", "--", sys.executable, str(SCRIPTS), *script],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout, json.loads((tmp_path / "found.json").read_bytes())


def test_a_file_that_is_written_over_is_torn_by_a_kill_and_nothing_starts_again(tmp_path: Path) -> None:
    printed, found = drill(tmp_path, ["plain"], "--kills", "1", "--kinds", "save", status=1)
    (kill,) = found["kills"]
    assert (found["outcome"], kill["outcome"], kill["resumed"]) == ("cannot start", "cannot start", None)
    assert "while it wrote saved.pt, 66.0 KiB of it" in printed
    assert "torch.load" in kill["why_none"], "the user sees where the script ended"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drill", "found.json"], "results are the user's"


@pytest.mark.slow
def test_a_whole_checkpoint_under_another_name_first_is_exact_and_loses_steps(tmp_path: Path) -> None:
    printed, found = drill(tmp_path, ["plain", "--atomic"], "--kills", "3", status=0)
    kills = found["kills"]
    assert found["outcome"] == "exact"
    assert {kill["kind"] for kill in kills} == {"step", "save", "term"}
    assert all(kill["step"] - kill["resumed"] == kill["lost"] <= 5 and kill["resumed"] % 5 == 0 for kill in kills)
    assert "Exact: 3 kills left no trace" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        ("optimizer", "not all of its state: state 0.weight (step)"),
        ("generator", "the data go on elsewhere, or a generator"),
        ("schedule", "not the schedule: step"),
    ],
)
def test_what_a_checkpoint_forgets_is_named(forgotten: str, said: str, tmp_path: Path) -> None:
    script = ["plain", "--atomic", "--forget", forgotten]
    printed, found = drill(tmp_path, script, "--kills", "2", "--kinds", "term", status=1)
    assert found["outcome"] == "diverged"
    assert said in printed


@pytest.mark.slow
def test_lightning_goes_on_with_other_data_in_mid_epoch(tmp_path: Path) -> None:
    printed, found = drill(tmp_path, ["lightning"], "--kills", "2", "--kinds", "step", status=1)
    assert found["outcome"] == "diverged"
    assert "the data go on elsewhere, or a generator" in printed


@pytest.mark.slow
def test_transformers_chooses_a_checkpoint_that_is_half_written(tmp_path: Path) -> None:
    printed, found = drill(tmp_path, ["trainer"], "--kills", "1", "--kinds", "save", status=1)
    assert found["outcome"] == "cannot start"
    assert "saved/checkpoint-" in printed, "the user sees which one it chose"


def _point(step: int, bits: bytes) -> Point[Taken]:
    digest, sketch = bits * 16, bytes(32)
    line = Taken(step, step, 0.0, 0.0, (), digest, sketch, {}, 0.0, False, None, None)
    return Point(line, (("parameter", "weight"),))


def _attempt(bits: bytes, *steps: bytes) -> Attempt:
    begun = Begun(1, 1, 0, 1, time.monotonic(), None, "")
    restored = Point(Restored(0, 0, "", 0.0, None, bits * 16, bytes(32)), (("parameter", "weight"),))
    return Attempt(begun, restored, [_point(index, each) for index, each in enumerate(steps, start=1)])


def test_a_process_begins_with_the_last_step_that_had_its_parameters(tmp_path: Path) -> None:
    run = RunHistory(tmp_path)
    run.ranks[0] = RankHistory(
        [
            _attempt(b"0", b"1", b"2", b"2", b"4"),  # the third step is skipped: it changes nothing
            _attempt(b"2", b"4", b"5"),
            _attempt(b"0", b"1"),
        ]
    )
    found, begins = aligned(run)
    assert begins == [0, 3, 0]
    assert [[point.step for point in each.points] for each in found.ranks[0].attempts] == [[1, 2, 3, 4], [4, 5], [1]]


def test_kinds_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="step, save, term"):
        parse_kinds("agent")
