"""The real launcher: torchrun restarts a Lightning DDP training whose ranks are killed; it ends as if nothing was."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine_harness import Lab

pytestmark = pytest.mark.slow
_LIMIT_SECONDS = 240


def torchrun(lab: Lab, directory: Path, kind: str, agents: str, deaths: list[str]) -> tuple[list[Any], str]:
    """Run the job under torchrun; what its ranks left, and what it printed."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # More restarts than deaths: on loopback gloo's ranks do not always find each other again, with or without us.
    command += [f"--max-restarts={len(deaths) + 8}", "-m", "tests.torchrun_job", str(directory), kind, agents, *deaths]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("MEMCKPT_NODE", None)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends its workers, which have sessions of their own
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"torchrun did not end:\n{output[-6000:]}")
    assert process.returncode == 0, output[-6000:]
    return [pickle.loads((directory / f"{kind}-{rank}").read_bytes()) for rank in range(2)], output


@pytest.mark.parametrize("agents", ["one", "two"])
def test_torchrun_restarts_go_on_at_the_very_step(lab: Lab, agents: str) -> None:
    expected, _ = torchrun(lab, lab.directory / "plain", "plain", agents, [])
    found, output = torchrun(lab, lab.directory / "job", "protected", agents, ["0:5", "1:14", "all:27"])
    for death in ("rank 0 at step 5", "rank 1 at step 14", "at step 27"):
        assert f"killed {death}" in output or death in output, output[-4000:]
    for step in (5, 14, 27):
        assert f"resumed at step {step} from local memory" in output, output[-4000:]
    for ours, theirs in zip(found, expected, strict=True):
        assert min(ours["losses"]) == 27
        assert all(theirs["losses"][step] == loss for step, loss in ours["losses"].items())
        assert {name for name in ("state", "optimizer", "rng") if ours[name] != theirs[name]} == set()
