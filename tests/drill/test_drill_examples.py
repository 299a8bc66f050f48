"""A drill of each example passes, by the command line, as a new user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "lightning_gpt": ("--run-dir", "own", "--steps", "40"),
    "digits_cnn": ("--run-dir", "own", "--epochs", "2"),
    "transformers_trainer": ("--run-dir", "own", "--steps", "40"),
    "accelerate_gpt": ("own", "--cpu"),
    "fabric_gpt": ("own",),
    "plain_loop": ("own", "--size", "tiny", "--steps", "60"),
}


@pytest.mark.slow
@pytest.mark.parametrize("example", CASES)
def test_a_drill_of_each_example_passes(example: str, tmp_path: Path) -> None:
    drill = [sys.executable, "-m", "memckpt", "drill", "--kills", "3", "--steps", "16", "--seed", "4"]
    script = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *CASES[example]]
    ended = subprocess.run(
        [*drill, "--json", "found.json", "--dir", "drill", "--", *script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Equal, bit for bit: 3 kills left no trace in the training." in ended.stdout
    found = json.loads((tmp_path / "found.json").read_bytes())
    assert (found["outcome"], found["repeats_itself"], found["differences"]) == ("equal", True, [])
    assert {kill["kind"] for kill in found["kills"]} == {"trainer", "agent", "both"}
    assert [kill["check"] for kill in found["kills"] if kill["kind"] == "trainer"] == ["equal"]
