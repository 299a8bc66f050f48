"""A sharded training for torchrun with every rank on its own node; whole nodes die where they are told to.

Arguments: directory, kind ("fsdp" or "ddp"), then deaths as rank:step, one per attempt. A node that has died comes back
under another name, with an empty agent.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import memckpt
from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig
from memckpt.processes.address import NODE_VARIABLE
from tests.support.cluster.sharded_cases import Distributed, Setup

STEPS = 12
RANKS = 4


def setup_of(kind: str) -> Setup:
    return Setup(kind=kind, world_size=RANKS)


def main() -> None:
    directory, kind, *deaths = sys.argv[1:]
    torch.set_num_threads(1)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    times_lost = sum(int(death.split(":")[0]) == rank for death in deaths[:attempt])
    os.environ[NODE_VARIABLE] = f"node{rank}.{times_lost}"
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training = Distributed(setup_of(kind), lambda place: None, seed=attempt)
    config = MemckptConfig(
        redo="lazy", agent=AgentConfig(linger_seconds=60), storage=None, peers=ErasureConfig(data=2, tolerate=2)
    )
    session = memckpt.attach(
        training.model, training.optimizers, run_dir=Path(directory) / "run", resume=None, config=config
    )
    for name, each in training.registered.items():
        session.register(name, each)
    report = session.restore()
    start = 0 if report is None else report.step
    if report is not None:
        print(f"rank {rank} resumed at step {report.step} from {report.tier}", flush=True)
    losses = {}
    for step in range(start, STEPS):
        if attempt < len(deaths) and deaths[attempt] == f"{rank}:{step}":
            print(f"node of rank {rank} dies at step {step}", flush=True)
            assert session.agent_pid is not None
            os.kill(session.agent_pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        losses[step] = training.step(step)
        session.commit()
    found = {"state": training.local_state(), "losses": losses}
    (Path(directory) / f"result-{rank}").write_bytes(pickle.dumps(found))
    session.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's shutdown sometimes hangs, with and without memckpt


if __name__ == "__main__":
    main()
