"""Benchmarks are complete, and those that rely on inner parts still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.field.trainee import Record
from benchmarks.peers_of_the_field import LOOPS, Scale, difference, draw_kills, measure_survival
from benchmarks.run_all import NAMES

_ROOT = Path(__file__).resolve().parents[2]


def _quick_run(name: str, results: Path) -> list[dict[str, Any]]:
    """The raw figures of a quick run of a benchmark."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--results", str(results)]
    subprocess.run(command, cwd=_ROOT, check=True, timeout=1200)
    return _rows(name, results)


def _rows(name: str, results: Path) -> list[dict[str, Any]]:
    """The raw figures of a table."""
    rows: list[dict[str, Any]] = json.loads((results / f"{name}.json").read_text())["rows"]
    return rows


def _notes(name: str, results: Path) -> list[str]:
    """The remarks below a table."""
    notes: list[str] = json.loads((results / f"{name}.json").read_text())["notes"]
    return notes


def test_run_all_knows_every_benchmark() -> None:
    commands = {path.stem for path in (_ROOT / "benchmarks").glob("*.py")} - {"__init__", "run_all"}
    assert sorted(NAMES) == sorted(commands)


@pytest.mark.slow
def test_sharded_overhead(tmp_path: Path) -> None:
    """Two ranks train on each side; what they copy and the agent holds is that of their shards, once."""
    ratios = _quick_run("sharded_overhead", tmp_path)
    copied, held = (_rows(f"sharded_overhead_{part}", tmp_path) for part in ("bytes", "memory"))
    lazy = "memckpt, lazy T=8"
    assert {row["arm"] for row in ratios} >= {lazy, "nothing (null pair)", "dcp.async_save"}
    assert [row["arm"] for row in ratios if row["stall_ms"]] == [row["arm"] for row in held]

    ours = [row for row in copied if row["arm"] == lazy]
    assert [row["rank"] for row in ours] == [0, 1]
    for row in ours:
        assert row["copied"]["gradients"] == row["shard_parameter_bytes"] == 4 * row["shard_numel"]
        assert row["formula_bytes"] <= row["copied_bytes"] < 1.02 * row["formula_bytes"]
    for row in copied:
        if row["arm"] == "dcp.async_save":
            beside = row["copied_bytes"] - row["shard_parameter_bytes"] - row["shard_optimizer_bytes"]
            assert 0 <= beside < 1024  # the mesh of the DTensors, which is a tensor
    whole = next(row for row in held if row["arm"] == lazy)
    assert whole["numel"] == sum(row["shard_numel"] for row in ours)
    assert whole["designed_bytes"] <= whole["held_bytes"] < 1.05 * whole["designed_bytes"]


@pytest.mark.slow
def test_peers_traffic(tmp_path: Path) -> None:
    """Peers send what the design says, and little beside; with DDP only what is a rank's own, or a slice."""
    rows = _quick_run("peers_traffic", tmp_path)
    assert [(row["kind"], row["sliced"]) for row in rows] == [("fsdp", False), ("ddp", False), ("ddp", True)]
    for row in rows:
        assert row["pieces_bytes"] < row["message_bytes"]
        assert row["wire_bytes"] is None or row["message_bytes"] < row["wire_bytes"]
    sharded, replicated, sliced = rows
    for row in (sharded, sliced):
        assert row["designed_bytes"] <= row["pieces_bytes"] < 1.1 * row["designed_bytes"], row
        assert (row["wire_bytes"] or row["message_bytes"]) < 1.1 * row["pieces_bytes"], row
    assert sharded["pieces_bytes"] < 1.02 * sharded["designed_bytes"]
    assert (sharded["wire_bytes"] or sharded["message_bytes"]) < 1.02 * sharded["pieces_bytes"]
    # Three nodes hold together what each of two held alone.
    assert sliced["own_bytes"] < 0.6 * replicated["own_bytes"], (sliced, replicated)
    assert 0 < replicated["pieces_bytes"] < 0.1 * replicated["numel"]


@pytest.mark.slow
def test_peers_restore(tmp_path: Path) -> None:
    """Lost nodes have fetched a window each; nobody else fetched anything."""
    rows = _quick_run("peers_restore", tmp_path)
    shard = 120_576 / 4
    lost = [row["fetched_bytes"][0] / shard / 8 for row in rows]
    assert [round(nodes / 5.5) for nodes in lost] == [0, 1, 2, 0, 0]
    assert all(min(row["seconds"]["restored"]) > 0 for row in rows)
    assert [bool(row["seconds"]["fetched"]) for row in rows] == [nodes > 0 for nodes in lost]
    assert not [note for note in _notes("peers_restore", tmp_path) if note.startswith("Left out")]


@pytest.mark.slow
def test_peers_overhead(tmp_path: Path) -> None:
    """Only a training with peers has replicators, and they take CPU time."""
    rows = _quick_run("peers_overhead", tmp_path)
    replicators = {row["arm"]: row["replicator_seconds"] for row in rows}
    assert list(replicators) == ["memckpt, no peers", "memckpt, peers", "nothing (null pair)"]
    assert [seconds is not None and seconds > 0 for seconds in replicators.values()] == [False, True, False]
    assert [bool(row["stall_ms"]) for row in rows] == [True, True, False]


@pytest.mark.slow
def test_hot_paths(tmp_path: Path) -> None:
    """Every path of a record is measured."""
    measured = [row["what"] for row in _quick_run("hot_paths", tmp_path)]
    paths = ("gradients to their slot", "redo of a record", "stripes", "write of")
    for path in (*paths, "messages over the wire"):
        assert any(what.startswith(path) for what in measured)
    assert "memckpt" in [row["what"] for row in _rows("hot_paths_tensors", tmp_path)]


@pytest.mark.slow
def test_since(tmp_path: Path) -> None:
    """The code of either commit is measured in turns."""
    (row,) = _quick_run("since", tmp_path)
    assert len(row["pairs"]) == 2
    assert all(one["stall"] > 0 and one["step"] > one["stall"] / 2 for pair in row["pairs"] for one in pair)


# The peers of the field


def test_the_first_difference_of_two_runs_is_named() -> None:
    whole = Record({1: "0x1p+0", 2: "0x1p-1"}, {1: 5, 2: 6}, {"parameters": "a", "optimizer": "b"})
    assert difference(whole, whole) == ""
    assert difference(whole, Record(whole.losses, {1: 5, 2: 7}, whole.digests)) == "data of step 2"
    assert difference(whole, Record({1: "0x1p+0"}, whole.data, whole.digests)) == "loss of step 2"
    assert difference(whole, Record(whole.losses, whole.data, {"parameters": "a"})) == "optimizer at the end"


@pytest.mark.slow
def test_a_kill_of_the_field_loses_all_steps_of_an_unprotected_training(tmp_path: Path) -> None:
    """It is killed and started again, and trains the same from its first step on."""
    kills = draw_kills(seed=1, steps=8, count=2)
    found = measure_survival(LOOPS[0].unprotected, Scale("tiny", 2, 4, 1, 3, 2), kills, tmp_path / "run")
    assert found.failure == ""
    assert found.lost == [kill.step - 1 for kill in kills]
    assert len(found.seconds) == 2
    assert found.record.digests


@pytest.mark.slow
def test_peers_of_the_field(tmp_path: Path) -> None:
    """memckpt is exact under every loop, and repeats a step at its first resume only; what is not there is said."""
    rows = _quick_run("peers_of_the_field", tmp_path)
    assert [row["arm"] for row in rows] == [arm.name for loop in LOOPS for arm in (loop.unprotected, *loop.arms)]
    ours = [row for row in rows if row["program"].startswith("memckpt")]
    assert [row["exact"] for row in ours] == ["yes"] * 4
    assert [row["lost"] for row in ours] == [[1, 0]] * 4
    for row in rows:
        assert row["pairs"] or row["exact"].startswith("not run: ")
