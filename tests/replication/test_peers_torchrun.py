"""The real launcher: nodes are lost as a whole, torchrun starts anew, and training goes on from peers' memory."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys

import pytest

from tests.support.cluster.peers_job import RANKS, STEPS, setup_of
from tests.support.cluster.sharded_cases import job_of
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import check_same, reference
from tests.support.trainings.script_runs import ROOT

pytestmark = pytest.mark.slow
_LIMIT_SECONDS = 240


def torchrun(lab: Lab, restarts: int, *program: str) -> str:
    """Run a program with a rank on each of four nodes; what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
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
    assert lossy.count("tier='peers'") == 2
    done = [re.findall("done at step 12: weights ([0-9a-f]+)", text) for text in (undisturbed, lossy)]
    assert len(done[0]) == 1
    assert done[0] == done[1]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_lost_nodes_are_replaced_and_training_goes_on_from_peers(lab: Lab, kind: str) -> None:
    expected = reference(lab, job_of(lab, setup_of(kind), None, last_step=STEPS))
    deaths = ["1:5", "3:8"]
    output_text = torchrun(lab, len(deaths), "-m", "tests.support.cluster.peers_job", str(lab.directory), kind, *deaths)
    for rank, step in [death.split(":") for death in deaths]:
        assert f"node of rank {rank} dies at step {step}" in output_text
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+) from peers", output_text)]
    assert len(resumed) == RANKS * len(deaths), output_text[-6000:]
    for number, death in enumerate(deaths):
        # What its peers had not acknowledged yet is made once more: at most as many records as are in flight.
        died, again = int(death.split(":")[1]), resumed[number * RANKS : (number + 1) * RANKS]
        assert len(set(again)) == 1
        assert died - 3 <= again[0] <= died, again
    check_same([pickle.loads((lab.directory / f"result-{rank}").read_bytes()) for rank in range(RANKS)], expected)
