"""A Lightning DDP training for torchrun: dies where it is told to, once per attempt.

Arguments: directory, "protected" or "plain", "one" or "two" (agents), then deaths as rank:step, one per attempt.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memckpt import MemCheckpoint
from memckpt.config import AgentConfig, MemckptConfig
from memckpt.processes.address import NODE_VARIABLE
from memckpt_run import recording
from tests.support.faults.frozen import freeze

EPOCHS = 3


class Net(pl.LightningModule):
    def __init__(self, deaths: list[str], marker: Path) -> None:
        super().__init__()
        self.marker = marker
        self.net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))
        self.deaths = deaths
        self.losses: dict[int, str] = {}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.deaths:
            rank, step = self.deaths[0].split(":")
            if rank in ("all", str(self.global_rank)) and self.global_step == int(step):
                while not os.path.exists(os.environ.get("JOB_WAITS", "/")):
                    select.select([], [], [], 0.01)
                self.marker.touch()
                print(f"killed rank {self.global_rank} at step {step}\n", end="", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses[self.global_step] = float(loss.detach()).hex()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    directory, kind, agents, *deaths = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    # In one write: torchrun's Python is unbuffered, and another rank's line may come between this one and its end.
    print(f"rank {rank} forked {recording.forked}\n", end="", flush=True)
    if agents == "two":
        os.environ[NODE_VARIABLE] = f"node{rank}"
    pl.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
    config = MemckptConfig(redo="lazy", anchor_period_steps=4, agent=AgentConfig(linger_seconds=60), storage=None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(timeout=timedelta(seconds=240 if "JOB_WAITS" in os.environ else 60)),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        callbacks=[MemCheckpoint(Path(directory) / "run", config=config)] if kind == "protected" else [],
    )
    died = len(list(Path(directory).glob("died-*")))
    net = Net(deaths[died:], Path(directory) / f"died-{died}")
    trainer.fit(net, DataLoader(data, batch_size=4, shuffle=True))
    optimizer, rng = freeze(trainer.optimizers[0].state_dict()), freeze(torch.get_rng_state())
    found = {"state": freeze(net.state_dict()), "optimizer": optimizer, "rng": rng, "losses": net.losses}
    (Path(directory) / f"{kind}-{rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
