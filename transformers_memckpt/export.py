"""``memckpt export --format transformers``: a directory for ``Trainer.train(resume_from_checkpoint=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainerControl
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from memckpt import ExportedState
from transformers_memckpt.protection import STATE
from transformers_memckpt.trainer_state import History


def write(state: ExportedState, target: Path) -> None:
    """Write the files of the Trainer's own ``checkpoint-N``, as it saves them after that step.

    Omits ``training_args.bin`` and the tokenizer's files, which no resume reads. Raises ForeignStateError.
    """
    ours = state.provided_as(STATE, "of a transformers.Trainer that memckpt has protected")
    held, file = ours["states"], ours["file"]
    target.mkdir()
    save_file(state.untied(state.model), target / SAFE_WEIGHTS_NAME, {"format": "pt"})
    if file["config"]:
        (target / CONFIG_NAME).write_text(file["config"])
    (optimizer,) = state.optimizers
    torch.save(optimizer, target / OPTIMIZER_NAME)
    torch.save(held["scheduler"], target / SCHEDULER_NAME)
    if held["scaler"] is not None:
        torch.save(held["scaler"], target / SCALER_NAME)
    distributed = len(state.generators) > 1
    for rank, generators in state.generators.items():
        name = f"rng_state_{rank}.pth" if distributed else "rng_state.pth"
        torch.save(_random_states(generators, distributed), target / name)
    callbacks: Any = _callbacks(held["callbacks"], file["arguments"])  # in the form of a file, not of a Trainer
    trainer_state = TrainerState(
        **{**held["state"], "total_flos": held["state"]["total_flos"] + held["trainer"]["current_flos"]},
        **file["state"],
        **held["schedule"],
        log_history=History.decode(held["history"]),
        stateful_callbacks=callbacks,
    )
    trainer_state.save_to_json(str(target / TRAINER_STATE_NAME))


def _random_states(generators: Mapping[str, Any], distributed: bool) -> dict[str, Any]:
    states = {"python": generators["python"], "numpy": generators["numpy"], "cpu": generators["torch"]}
    if not distributed and generators["device"] is not None:  # else the Trainer restores those of all devices, or none
        states["cuda"] = generators["device"]
    return states


def _callbacks(attributes: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Callbacks that are `ExportableState`, by class; a list if there are several of one class."""
    found: dict[str, Any] = {"TrainerControl": TrainerControl().state()}
    for name, given in arguments.items():
        if name not in attributes:
            continue  # could not be stored
        kind, one = name.partition(":")[0].rpartition(".")[2], {"args": given, "attributes": attributes[name]}
        if kind not in found:
            found[kind] = one
        elif isinstance(found[kind], list):
            found[kind].append(one)
        else:
            found[kind] = [found[kind], one]
    return found
