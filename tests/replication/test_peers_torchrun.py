"""The real launcher: nodes are lost as a whole, torchrun starts anew, and training goes on from peers' memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.script_runs import ROOT

pytestmark = pytest.mark.slow
_LIMIT_SECONDS = 240


def torchrun(lab: Lab, restarts: int, *program: str) -> str:
    """Run a program with a rank on each of four nodes; what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [f"--max-restarts={restarts}", *program]
    # Without it all restarts share one store, where gloo finds the addresses of the dead: docs/operations.md.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = lab.directory / "torchrun.log"
    log.unlink(missing_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        code = process.wait(_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends its workers, which have sessions of their own
        process.wait(timeout=60)
        pytest.fail(f"torchrun did not end:\n{log.read_text()[-6000:]}")
    assert code == 0, log.read_text()[-6000:]
    return log.read_text()


@pytest.mark.promise(
    "up to m whole nodes of a group may be lost anywhere in a step, early and late, one after the other: FSDP2, "
    "HSDP and DDP on four and six nodes go on from peers, bit for bit"
)
def test_the_example_ends_with_the_weights_of_an_undisturbed_run(lab: Lab) -> None:
    example = [str(ROOT / "examples/lost_node.py"), "--size", "tiny", "--steps", "12"]
    undisturbed = torchrun(lab, 0, *example, str(lab.directory / "undisturbed"))
    lossy = torchrun(lab, 2, *example, "--lose", "2:6", "--lose", "1:9", str(lab.directory / "lossy"))
    assert lossy.count("is lost in step") == 2
    assert len(re.findall(r"resumed at step \d+ from peers", lossy)) == 2
    done = [re.findall("done at step 12: weights ([0-9a-f]+)", text) for text in (undisturbed, lossy)]
    assert len(done[0]) == 1
    assert done[0] == done[1]
