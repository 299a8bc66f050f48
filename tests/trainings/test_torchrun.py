"""The real launcher: torchrun restarts a Lightning DDP training whose ranks are killed; it ends as if nothing was."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.peers_harness import free_port
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.supervised_runs import wait_for

pytestmark = pytest.mark.slow
_LIMIT_SECONDS = 280


@dataclass(frozen=True)
class Launch:
    """How the two ranks are started: by torchruns of so many nodes, and protected by one agent or two; warm or cold."""

    torchruns: int
    agents: str
    warm: bool = False

    def arguments(self, restarts: int) -> list[str]:
        found = [f"--nnodes={self.torchruns}", f"--nproc-per-node={2 // self.torchruns}", f"--max-restarts={restarts}"]
        if self.torchruns == 1:
            return [*found, "--standalone"]
        return [*found, "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"]


def torchrun(lab: Lab, directory: Path, kind: str, launch: Launch, deaths: list[str]) -> tuple[list[Any], str]:
    """Run the job; what its ranks left, and what was printed."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", *launch.arguments(len(deaths))]
    if launch.warm:
        command += ["--no-python", sys.executable, "-m", "memckpt", "worker", "--"]
    command += ["-m", "tests.support.cluster.torchrun_job", str(directory), kind, launch.agents, *deaths]
    # Without it all restarts share one store, where gloo finds the addresses of the dead: docs/operations.md.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment.pop("MEMCKPT_NODE", None)
    if launch.warm and deaths:
        environment["JOB_WAITS"] = str(directory / "go")
    log = directory / f"{kind}.log"
    with log.open("ab") as output:
        processes = [
            subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
            for _ in range(launch.torchruns)
        ]
    deadline = time.monotonic() + _LIMIT_SECONDS
    try:
        if "JOB_WAITS" in environment:
            wait_for(log, "are imported ahead", count=2)
            (directory / "go").touch()
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    except (subprocess.TimeoutExpired, AssertionError):
        for process in processes:
            process.send_signal(signal.SIGTERM)  # it ends its workers, which have sessions of their own
            process.wait(timeout=60)
        pytest.fail(f"torchrun did not end:\n{log.read_text()[-6000:]}")
    assert codes == [0] * launch.torchruns, log.read_text()[-6000:]
    return [pickle.loads((directory / f"{kind}-{rank}").read_bytes()) for rank in range(2)], log.read_text()


@pytest.mark.promise("restarts by torchrun continue at the exact step, on one node and on two")
@pytest.mark.parametrize(
    "launch",
    [Launch(1, "one"), Launch(1, "two"), Launch(2, "two"), Launch(1, "one", warm=True)],
    ids=["one-node", "two-agents", "two-nodes", "warm"],
)
def test_torchrun_restarts_go_on_at_the_very_step(lab: Lab, launch: Launch) -> None:
    expected, _ = torchrun(lab, lab.directory / "plain", "plain", launch, [])
    found, output = torchrun(lab, lab.directory / "job", "protected", launch, ["0:5", "1:14", "all:27"])
    for death in ("rank 0 at step 5", "rank 1 at step 14", "at step 27"):
        assert f"killed {death}" in output or death in output, output[-4000:]
    forked = re.findall(r"rank (\d) forked (\w+)", output)
    expected_starts = ["False"] + [str(launch.warm)] * 3
    for rank in "01":
        assert [how for number, how in forked if number == rank] == expected_starts
    for step in (5, 14, 27):
        assert f"resumed at step {step} from local memory" in output, output[-4000:]
    for ours, theirs in zip(found, expected, strict=True):
        assert min(ours["losses"]) == 27
        assert all(theirs["losses"][step] == loss for step, loss in ours["losses"].items())
        assert {name for name in ("state", "optimizer", "rng") if ours[name] != theirs[name]} == set()
