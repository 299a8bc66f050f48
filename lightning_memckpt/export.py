"""``memckpt export --format lightning``: a checkpoint as a file that ``Trainer.fit(ckpt_path=...)`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_memckpt.protection import STATE
from memckpt import ExportedState
from memckpt.errors import ForeignStateError


def checkpoint_of(state: ExportedState) -> dict[str, Any]:
    """The dictionary that Lightning's own files hold.

    What ``on_save_checkpoint`` hooks have added is in it, unless it refers to tensors of modules beside the model.

    Raises:
        ForeignStateError: the run was not trained with Lightning's callback.
    """
    ours = state.provided.get(STATE)
    if ours is None:
        raise ForeignStateError(
            f"expected a run that MemCheckpoint has protected, found one that provides {sorted(state.provided)}; "
            "choose another format"
        )
    user: dict[str, Any] = ours["user"]
    callbacks = {
        name.removeprefix("callbacks/"): value for name, value in user.items() if name.startswith("callbacks/")
    }
    checkpoint: dict[str, Any] = {
        "epoch": ours["loops"]["epoch_progress"]["current"]["processed"],
        "global_step": state.step,
        "pytorch-lightning_version": ours["lightning"],
        "state_dict": state.model,
        "loops": {"fit_loop": ours["loops"]},
        "callbacks": callbacks,
        "optimizer_states": state.optimizers,
        "lr_schedulers": ours["trainer"]["schedulers"],
    }
    extras = {name.removeprefix("checkpoint/"): value for name, value in user.items() if name.startswith("checkpoint/")}
    return {**checkpoint, **{key: value for key, value in extras.items() if key not in checkpoint}}


def write(state: ExportedState, target: Path) -> None:
    """Write the file."""
    torch.save(checkpoint_of(state), target)
