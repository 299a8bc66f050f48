"""Progress lines, shared by the Lightning examples."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl

from examples.digest import digest


class PrintSteps(pl.Callback):
    """Prints a line for each step: progress, and a moment to kill the process."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(f"pid {os.getpid()}: training begins", flush=True)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        print(f"step {trainer.global_step}: loss {float(outputs['loss']):.6f}", flush=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(f"done at step {trainer.global_step}: weights {digest(pl_module)}", flush=True)
