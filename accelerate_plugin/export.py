"""``memckpt export --format accelerate``: a checkpoint as a directory for ``Accelerator.load_state``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from safetensors.torch import save_file

from accelerate_plugin.plugin import STATE
from memckpt import ExportedState

#: A file of ours, not Accelerate's: step, epoch and batch of the state.
PLACE_NAME = "memckpt.json"


def write(state: ExportedState, target: Path) -> None:
    """Write the directory, with Accelerate's file names.

    `Accelerator.load_state` restores models, optimizers, schedulers, the gradient scaler, registered objects and each
    process's generators; not the data position, which ``memckpt.json`` names.

    Raises:
        ForeignStateError: the run was not trained with `MemCheckpointPlugin`.
    """
    ours = state.provided_as(STATE, "that MemCheckpointPlugin has protected")
    target.mkdir()
    for number, tensors in enumerate(_models(state.model, ours["models"])):
        save_file(state.untied(tensors), target / f"{_numbered(SAFE_MODEL_NAME, number)}.safetensors", {"format": "pt"})
    for number, optimizer in enumerate(state.optimizers):
        torch.save(optimizer, target / f"{_numbered(OPTIMIZER_NAME, number)}.bin")
    for number, scheduler in enumerate(ours["schedulers"]):
        torch.save(scheduler, target / f"{_numbered(SCHEDULER_NAME, number)}.bin")
    if ours["scaler"] is not None:
        torch.save(ours["scaler"], target / SCALER_NAME)
    for number, custom in enumerate(ours["custom"]):
        torch.save(custom, target / f"custom_checkpoint_{number}.pkl")
    for rank, generators in state.generators.items():
        states = _random_states(generators, ours["micro_step"], alone=len(state.generators) == 1)
        torch.save(states, target / f"{RNG_STATE_NAME}_{rank}.pkl")
    place = {"step": state.step, "epoch": ours["epoch"], "batch": ours["batch"]}
    (target / PLACE_NAME).write_text(json.dumps(place) + "\n")


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}_{number}"


def _models(tensors: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Each model's own tensors; with several models, names begin with the model's number."""
    if count == 1:
        return [tensors]
    return [
        {name.removeprefix(f"{number}."): tensor for name, tensor in tensors.items() if name.startswith(f"{number}.")}
        for number in range(count)
    ]


def _random_states(generators: Any, micro_step: int, alone: bool) -> dict[str, Any]:
    states = {
        "step": micro_step,
        "random_state": generators["python"],
        "numpy_random_seed": generators["numpy"],
        "torch_manual_seed": generators["torch"],
    }
    if alone and generators["device"] is not None:  # Accelerate restores those of all devices, or none
        states["torch_cuda_manual_seed"] = [generators["device"]]
    return states
