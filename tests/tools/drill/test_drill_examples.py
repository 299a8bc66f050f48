"""A drill of each example passes, by the command line, as a new user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: Longest time of one drill; it starts Python ten times.
LIMIT_SECONDS = 900
CASES = {
    "lightning_gpt": ("--run-dir", "own", "--steps", "40"),
    "digits_cnn": ("--run-dir", "own", "--epochs", "2"),
    "transformers_trainer": ("--run-dir", "own", "--steps", "40"),
    "accelerate_gpt": ("own", "--cpu"),
    "fabric_gpt": ("own",),
    "plain_loop": ("own", "--size", "tiny", "--steps", "60"),
}


def drill(tmp_path: Path, options: Sequence[str], script: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """What a drill prints, and what it finds."""
    command = [sys.executable, "-m", "memckpt", "drill", *options, "--seed", "4"]
    ended = subprocess.run(
        [*command, "--json", "found.json", "--dir", "drill", "--", *script],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, json.loads((tmp_path / "found.json").read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("example", CASES)
def test_a_drill_of_each_example_passes(example: str, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *CASES[example]]
    printed, found = drill(tmp_path, ["--kills", "3", "--steps", "16"], script)
    assert "Equal, bit for bit: 3 kills left no trace in the training." in printed
    assert (found["outcome"], found["repeats_itself"], found["differences"]) == ("equal", True, [])
    assert (found["overhead"]["problem"], found["overhead"]["changed"]) == ("", None)
    assert found["overhead"]["unprotected"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drill", "found.json"], "results are the user's"
    assert {kill["kind"] for kill in found["kills"]} == {"trainer", "agent", "both"}
    assert [kill["check"] for kill in found["kills"] if kill["kind"] == "trainer"] == ["equal"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[sys.executable], [sys.executable, "-m", "torch.distributed.run"]])
def test_nodes_are_lost_and_come_back_from_their_peers(launcher: list[str], tmp_path: Path) -> None:
    """A sharded training of two nodes that configures no peers: it is told so, and gets some."""
    script = [*launcher, str(ROOT / "examples/many_nodes.py"), "--size", "tiny", "--steps", "60", "--run-dir", "own"]
    options = ["--nodes", "2", "--kills", "2", "--steps", "24", "--kinds", "trainer,node"]
    printed, found = drill(tmp_path, options, script)
    assert "Equal, bit for bit: 2 kills left no trace in the training." in printed
    assert "No peers: the script configures none" in printed
    assert (found["outcome"], found["repeats_itself"], found["differences"]) == ("equal", True, [])
    tiers = {kill["kind"]: kill["tier"] for kill in found["kills"]}
    assert tiers["node"] == "peers"
    assert set(tiers) == {"trainer", "node"}
