"""Benchmarks are complete, their results are quoted, and those that rely on how frameworks are made still run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.run_all import NAMES
from tests.support.cluster.netns import problem

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


def test_results_are_a_table_each_that_a_document_quotes() -> None:
    """A file of results says which command made it, has one table, and is linked where its figures are quoted."""
    pages = [*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md")]
    quoted = "".join(page.read_text() for page in pages)
    files = sorted((_ROOT / "benchmarks/results").glob("*.md"))
    assert files
    for file in files:
        text = file.read_text()
        (command,) = re.findall(
            r"^Made by `OMP_WAIT_POLICY=passive python -m benchmarks\.(\w+)[^`]*`:$", text, re.MULTILINE
        )
        assert command in (*NAMES, "gpu")
        assert file.stem.startswith(command)
        assert len(re.findall(r"^\|[-:| ]+\|$", text, re.MULTILINE)) == 1, f"{file.name}: expected one table"
        assert f"benchmarks/results/{file.name})" in quoted, f"{file.name}: no document links it"


@pytest.mark.slow
def test_framework_overhead(tmp_path: Path) -> None:
    """Every framework trains on its three sides; memckpt's has a session, whose stall is counted."""
    ratios = _quick_run("framework_overhead", tmp_path)
    differences = _rows("framework_overhead_minimal", tmp_path)
    frameworks = {"plain loop", "Lightning", "Accelerate", "transformers.Trainer"}
    assert {row["framework"] for row in ratios if row["arm"] == "memckpt" and row["stall_ms"] > 0} == frameworks
    assert {row["framework"] for row in ratios if row["arm"].startswith("nothing")} == frameworks
    assert len(ratios) == 11
    assert {row["framework"] for row in differences if row["stall_us"] > 0} == frameworks
    assert _notes("framework_overhead", tmp_path) == []


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
    """Peers send what the design says, and little beside; with DDP only what is a rank's own."""
    rows = _quick_run("peers_traffic", tmp_path)
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
def test_governor(tmp_path: Path) -> None:
    """Both nodes train on each side; without the governor no step is timed."""
    reason = problem()
    if reason is not None:
        pytest.skip(reason)
    measured = _quick_run("governor", tmp_path)
    settings = {row["setting"] for row in measured}
    assert len(settings) == 3
    for setting in settings:
        rows = {row["arm"]: row for row in measured if row["setting"] == setting}
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
    rows = _quick_run("transport", tmp_path)
    assert [row["security"] for row in rows] == ["plain", "curve"]
    assert all(row["ratio"] > 0 for row in rows)
    assert _rows("transport_threads", tmp_path)
    assert _rows("transport_aes", tmp_path)


@pytest.mark.slow
def test_hot_paths_tensors(tmp_path: Path) -> None:
    """Every arm trains; only those with a session count stalls."""
    stalls = {row["arm"]: row["tensor_stall_us"] > 0 for row in _quick_run("hot_paths_tensors", tmp_path)}
    arms = {"plain": False, "copy": False, "hook": False, "memckpt, lazy T=8": True, "memckpt, eager": True}
    assert stalls == arms


@pytest.mark.slow
def test_compression(tmp_path: Path) -> None:
    """Every table is made; sizes are those of the encodings, and a union is not larger than all of its parts."""
    command = [sys.executable, "-m", "benchmarks.compression", "--quick", "--results", str(tmp_path)]
    subprocess.run(command, cwd=_ROOT, check=True, timeout=1200)
    parts = ("training", "residual", "bytes", "union", "write", "recovery", "frequency", "compress")
    tables = {part: _rows(f"compression_{part}", tmp_path) for part in parts}
    assert all(tables.values())
    assert all(1 <= union <= row["ranks"] for row in tables["union"] for union in row["unions"])
    for row in tables["bytes"]:
        if row["how"] == "measured":
            # Beside compressed gradients: small parameters as they are, states of both ranks, names.
            assert 0 < row["logged"] < row["gradients"] + 50_000
            # An entry is four bytes of position and four of value.
            entries = {"TopK(0.1)": 0.1, "TopK(0.01)": 0.01}[row["compressor"]] * row["numel"]
            assert 8 * entries < row["wire"] < 8 * entries + 10_000
    kept, dropped = ({row["residual"]: row for row in tables["residual"]}[one] for one in ("keep", "drop"))
    assert kept["logged"] > dropped["logged"] + 2 * 4 * 100_000
    assert [row["records"] for row in tables["recovery"]][-1] == 50


@pytest.mark.slow
def test_simulation(tmp_path: Path) -> None:
    """More nodes have more failures, and the more a scheme holds, the more of the time is useful."""
    rows = _quick_run("simulation", tmp_path)
    assert [(row["shape"], row["nodes"]) for row in rows] == [(1.0, 1000), (1.0, 10_000), (0.8, 1000), (0.8, 10_000)]
    for few, many in (rows[:2], rows[2:]):
        assert 5 * few["failures"] < many["failures"]
        assert many["ettr"] == sorted(many["ettr"])
        assert 0 < few["memory_bytes"] < many["memory_bytes"] < 12 * few["memory_bytes"]


@pytest.mark.slow
def test_simulated_run(tmp_path: Path) -> None:
    """Every failure of the trace has a restart; the simulator has read the same trace."""
    rows = _quick_run("simulated_run", tmp_path)
    assert [row["seed"] for row in rows] == [1]
    for row in rows:
        failures = sum(row["failures"].values())
        assert failures > 0
        assert sum(row["real"]["recoveries"].values()) == failures
        assert sum(row["simulated_recoveries"].values()) == failures
        assert row["simulated"]["ettr"] > 0
    assert not [note for note in _notes("simulated_run", tmp_path) if note.startswith("Left out")]


@pytest.mark.slow
def test_tuning(tmp_path: Path) -> None:
    """Every case trains, from the settings that it is made for."""
    rows = {row["case"]: row for row in _quick_run("tuning", tmp_path)}
    assert list(rows) == ["defaults", "slow agent", "never fails", "fails often"]
    assert rows["slow agent"]["start"].startswith("eager")
    for name in ("never fails", "fails often"):
        assert rows[name]["start"] == "lazy, T=8, D=3"
    assert len(rows["fails often"]["sections"]) >= 3
    assert all(row["sections"] and row["end"] for row in rows.values())


@pytest.mark.slow
def test_since(tmp_path: Path) -> None:
    """The code of either commit is measured in turns."""
    (row,) = _quick_run("since", tmp_path)
    assert len(row["pairs"]) == 2
    assert all(one["stall"] > 0 and one["step"] > one["stall"] / 2 for pair in row["pairs"] for one in pair)
