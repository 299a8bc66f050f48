"""Benchmarks that rely on how several frameworks and adapters are made still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.netns import problem

_ROOT = Path(__file__).resolve().parents[2]


def _quick_run(name: str, results: Path) -> dict[str, Any]:
    """What a quick run of a benchmark reports."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--results", str(results)]
    subprocess.run(command, cwd=_ROOT, check=True, timeout=1200)
    report: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return report


@pytest.mark.slow
def test_framework_overhead(tmp_path: Path) -> None:
    """Every framework trains on its three sides; memckpt's has a session, whose stall is counted."""
    report = _quick_run("framework_overhead", tmp_path)
    ratios, differences = (table["rows"] for table in report["tables"])
    frameworks = {"plain loop", "Lightning", "Accelerate", "transformers.Trainer"}
    assert {row["framework"] for row in ratios if row["arm"] == "memckpt" and row["stall_ms"] > 0} == frameworks
    assert {row["framework"] for row in ratios if row["arm"].startswith("nothing")} == frameworks
    assert len(ratios) == 11
    assert {row["framework"] for row in differences if row["stall_us"] > 0} == frameworks
    assert report["notes"] == []


@pytest.mark.slow
def test_sharded_overhead(tmp_path: Path) -> None:
    """Two ranks train on each side; what they copy and the agent holds is that of their shards, once."""
    report = _quick_run("sharded_overhead", tmp_path)
    ratios, copied, held = (table["rows"] for table in report["tables"])
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
    """Peers send what the design says, and little beside; with DDP only what is a rank's own."""
    report = _quick_run("peers_traffic", tmp_path)
    (rows,) = (table["rows"] for table in report["tables"])
    assert [row["kind"] for row in rows] == ["fsdp", "ddp"]
    for row in rows:
        assert row["pieces_bytes"] < row["message_bytes"]
        assert row["wire_bytes"] is None or row["message_bytes"] < row["wire_bytes"]
    sharded, replicated = rows
    assert sharded["designed_bytes"] <= sharded["pieces_bytes"] < 1.02 * sharded["designed_bytes"]
    assert (sharded["wire_bytes"] or sharded["message_bytes"]) < 1.02 * sharded["pieces_bytes"]
    assert 0 < replicated["pieces_bytes"] < 0.1 * replicated["numel"]


@pytest.mark.slow
def test_peers_restore(tmp_path: Path) -> None:
    """Lost nodes have fetched a window each; nobody else fetched anything."""
    report = _quick_run("peers_restore", tmp_path)
    (rows,) = (table["rows"] for table in report["tables"])
    shard = 120_576 / 4
    lost = [row["fetched_bytes"][0] / shard / 8 for row in rows]
    assert [round(nodes / 5.5) for nodes in lost] == [0, 1, 2, 0, 0]
    assert all(min(row["seconds"]["restored"]) > 0 for row in rows)
    assert [bool(row["seconds"]["fetched"]) for row in rows] == [nodes > 0 for nodes in lost]
    assert report["notes"] == []


@pytest.mark.slow
def test_peers_overhead(tmp_path: Path) -> None:
    """Only a training with peers has replicators, and they take CPU time."""
    report = _quick_run("peers_overhead", tmp_path)
    (rows,) = (table["rows"] for table in report["tables"])
    replicators = {row["arm"]: row["replicator_seconds"] for row in rows}
    assert list(replicators) == ["memckpt, no peers", "memckpt, peers", "nothing (null pair)"]
    assert [seconds is not None and seconds > 0 for seconds in replicators.values()] == [False, True, False]
    assert [bool(row["stall_ms"]) for row in rows] == [True, True, False]


@pytest.mark.slow
def test_governor(tmp_path: Path) -> None:
    """Both nodes train on each side; without the governor no step is timed."""
    reason = problem()
    if reason is not None:
        pytest.skip(reason)
    report = _quick_run("governor", tmp_path)
    assert len(report["tables"]) == 3
    for table in report["tables"]:
        rows = {row["arm"]: row for row in table["rows"]}
        assert set(rows) == {"nothing", "local", "without", "with"}
        assert all(row["step_seconds"] > 0 for row in rows.values())
        for arm in ("without", "with"):
            assert rows[arm]["peers"]["watermark"] > 10  # as it was said a second before
            assert rows[arm]["peers"]["bytes_per_record"] > 0
        # How long steps take is not known there, but what waits to be sent is.
        untimed = {
            "no step has been timed yet",
            "training waits for acknowledgements",
            "there is hardly any room left for records that wait to be sent",
        }
        assert rows["without"]["peers"]["pace"] in untimed
        assert rows["with"]["peers"]["pace"] != "no step has been timed yet"


@pytest.mark.slow
def test_transport(tmp_path: Path) -> None:
    """Both sides deliver everything, encrypted and not; I/O threads and bare encryption are measured beside it."""
    table, threads, bare = _quick_run("transport", tmp_path)["tables"]
    assert threads["rows"]
    assert bare["rows"]
    assert [row["security"] for row in table["rows"]] == ["plain", "curve"]
    assert all(row["ratio"] > 0 for row in table["rows"])


@pytest.mark.slow
def test_hot_paths_tensors(tmp_path: Path) -> None:
    """Every arm trains; only those with a session count stalls."""
    (table,) = _quick_run("hot_paths_tensors", tmp_path)["tables"]
    stalls = {row["arm"]: row["tensor_stall_us"] > 0 for row in table["rows"]}
    arms = {"plain": False, "copy": False, "hook": False, "memckpt, lazy T=8": True, "memckpt, eager": True}
    assert stalls == arms
