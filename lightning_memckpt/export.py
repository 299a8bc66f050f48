"""``memckpt export --format lightning``: a checkpoint as a file for ``Trainer.fit(ckpt_path=...)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_memckpt.protection import STATE
from memckpt import ExportedState


def _untouched(*counters: str) -> dict[str, Any]:
    counted = {span: dict.fromkeys(counters, 0) for span in ("total", "current")}
    return {"state_dict": {}, "batch_progress": counted}


_COUNTERS = ("ready", "completed", "started", "processed")
_EVALUATION: dict[str, Any] = _untouched(*_COUNTERS)
_EVALUATION["batch_progress"]["is_last_batch"] = False
#: State of the loops beside that of `fit`, which have not run: ``Trainer.validate(ckpt_path=...)`` reads its own.
_OTHER_LOOPS = {"validate_loop": _EVALUATION, "test_loop": _EVALUATION, "predict_loop": _untouched(*_COUNTERS)}


def checkpoint_of(state: ExportedState) -> dict[str, Any]:
    """The contents of Lightning's own file of the batch, as if saved in ``on_train_batch_end``.

    It includes entries that ``on_save_checkpoint`` hooks added, unless they refer to tensors of modules beside the
    model; and hyperparameters, as far as they are plain values. Raises ForeignStateError for another kind of run.
    """
    ours = state.provided_as(STATE, "that MemCheckpoint has protected")
    user: dict[str, Any] = ours["user"]
    file: dict[str, Any] = ours["file"]
    loops = {**ours["loops"], **ours["unedited_loops"]}
    # Loaders with a state_dict() have such a state; those of others have positions of ours.
    positions = [one for one in ours["loaders"]["train"] if one is not None]
    if positions := [one for one in positions if not (isinstance(one, dict) and "pass" in one)]:
        loops["state_dict"] = {**loops["state_dict"], "combined_loader": positions}
    callbacks = {
        name.removeprefix("callbacks/"): value for name, value in user.items() if name.startswith("callbacks/")
    }
    checkpoint: dict[str, Any] = {
        "epoch": ours["loops"]["epoch_progress"]["current"]["processed"],
        "global_step": state.step,
        "pytorch-lightning_version": ours["lightning"],
        "state_dict": state.model,
        "loops": {"fit_loop": loops, **_OTHER_LOOPS},
        "callbacks": callbacks,
        "optimizer_states": state.optimizers,
        "lr_schedulers": ours["trainer"]["schedulers"],
    }
    if ours["trainer"]["precision"]:
        checkpoint[file["precision"]] = ours["trainer"]["precision"]
    checkpoint.update(file["hyperparameters"])
    if "datamodule" in user:
        checkpoint[file["datamodule"]] = user["datamodule"]
    extras = {name.removeprefix("checkpoint/"): value for name, value in user.items() if name.startswith("checkpoint/")}
    return {**checkpoint, **{key: value for key, value in extras.items() if key not in checkpoint}}


def write(state: ExportedState, target: Path) -> None:
    """Write the file."""
    torch.save(checkpoint_of(state), target)
