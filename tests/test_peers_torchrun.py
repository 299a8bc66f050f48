"""The real launcher: nodes are lost as a whole, torchrun starts anew, and training goes on from peers' memory."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys

import pytest

from memckpt.agent.address import AgentAddress
from tests.engine_harness import Lab
from tests.peers_job import RANKS, STEPS, setup_of
from tests.sharded_lab import check_same, job_of, reference

pytestmark = pytest.mark.slow
_LIMIT_SECONDS = 240


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_lost_nodes_are_replaced_and_training_goes_on_from_peers(lab: Lab, kind: str) -> None:
    expected = reference(lab, job_of(lab, setup_of(kind), None, last_step=STEPS))
    deaths = ["1:5", "3:8"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [f"--max-restarts={len(deaths)}", "-m", "tests.peers_job", str(lab.directory), kind, *deaths]
    # Without it all restarts share one store, where gloo finds the addresses of the dead: docs/operations.md.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = lab.directory / "torchrun.log"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        code = process.wait(_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends its workers, which have sessions of their own
        process.wait(timeout=60)
        pytest.fail(f"torchrun did not end:\n{log.read_text()[-6000:]}")
    output_text = log.read_text()
    assert code == 0, output_text[-6000:]
    for rank, step in [death.split(":") for death in deaths]:
        assert f"node of rank {rank} dies at step {step}" in output_text
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+) from peers", output_text)]
    assert len(resumed) == RANKS * len(deaths), output_text[-6000:]
    for number, death in enumerate(deaths):
        # What its peers had not acknowledged yet is made once more: at most as many records as are in flight.
        died, again = int(death.split(":")[1]), resumed[number * RANKS : (number + 1) * RANKS]
        assert len(set(again)) == 1
        assert died - 3 <= again[0] <= died, again
    for death in deaths:  # a lost node of a real cluster takes this along
        rank = death.split(":")[0]
        AgentAddress.of(lab.directory / "run", f"node{rank}.0").socket_path.unlink()
    check_same([pickle.loads((lab.directory / f"result-{rank}").read_bytes()) for rank in range(RANKS)], expected)
