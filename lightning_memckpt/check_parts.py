"""Named parts of the captured state, for the comparison of a repeated step, without clock-dependent values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_memckpt.user_state import callbacks_by_key
from memckpt import ComparedKind
from memckpt.capture import data as dataloader

Parts = dict[tuple[ComparedKind, str], Any]


class CheckParts:
    """Names the parts of `Protection`'s captured state as the user knows them.

    Excluded are the time of the capture, the measurements of `Timer`, and the directory of `ModelCheckpoint`, which
    each start may create anew.

    Args:
        trainer: the trainer with the callbacks.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def __call__(self, state: Mapping[str, Any]) -> Parts:
        """The parts of one captured state."""
        trainer, logging = state["trainer"], state["logging"]
        parts: Parts = {}
        parts["data position", "combination of loaders"] = state["loaders"].get("fetcher")
        for role in ("train", "validation"):
            for index, position in enumerate(state["loaders"][role]):
                known = isinstance(position, dict) and "pass" in position  # else it is the loader's own state
                parts["data position", f"{role} loader {index}"] = (
                    dataloader.comparable(position, between_passes=role == "validation") if known else position
                )
        parts["data position", "loops"] = {
            **state["loops"],
            "validation owed": state["validation_owed"],
            "epoch over": state["epoch_over"],
            **trainer["loop_extras"],
        }
        for index, scheduler in enumerate(trainer["schedulers"]):
            parts["hyperparameters", f"LR scheduler {index}"] = scheduler
        parts["hyperparameters", "precision"] = trainer["precision"]
        parts["hyperparameters", "trainer"] = {
            **state["settings"],
            "accumulate_grad_batches": trainer["accumulate_grad_batches"],
            "should_stop": trainer["should_stop"],
        }
        for name, piece in self._without_clocks(state["user"]).items():
            parts["registered", name] = piece
        for name, value in {**state.get("attributes", {}), **state.get("objects", {})}.items():
            parts["registered", f"attribute {name}"] = value
        parts["logged values", "self.log()"] = logging["results"]
        parts["logged values", "metrics"] = {"metrics": logging["metrics"], "groups": logging["groups"]}
        parts["logged values", "trainer"] = logging["logger"]
        return parts

    def _without_clocks(self, pieces: Mapping[str, Any]) -> dict[str, Any]:
        kept = dict(pieces)
        for key, callback in callbacks_by_key(self._trainer):
            name = f"callbacks/{key}"
            if isinstance(callback, Timer):
                kept.pop(name, None)
            elif isinstance(callback, ModelCheckpoint) and name in kept:
                kept[name] = {field: value for field, value in kept[name].items() if field != "dirpath"}
        return kept
