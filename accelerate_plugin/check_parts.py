"""Named parts of the captured state, for the comparison of a repeated step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memckpt import ComparedKind
from memckpt.capture import data as dataloader


def check_parts(state: Mapping[str, Any]) -> dict[tuple[ComparedKind, str], Any]:
    """The parts of the plugin's captured state, under the user's names for them."""
    parts: dict[tuple[ComparedKind, str], Any] = {}
    for index, loader in enumerate(state["loaders"]):
        position = dataloader.comparable(loader["position"], between_passes=not loader["active"])
        # No iteration is active: the progress of the last one does not matter.
        place = {} if not loader["active"] else {"batches": loader["batches"], "padding": loader["padding"]}
        parts["data position", f"loader {index}"] = {"position": position, "iteration": loader["iteration"], **place}
    parts["data position", "loop"] = {name: state[name] for name in ("epoch", "batch", "micro_step")}
    for index, scheduler in enumerate(state["schedulers"]):
        parts["hyperparameters", f"LR scheduler {index}"] = scheduler
    parts["hyperparameters", "gradient scaler"] = {"state": state["scaler"], "skipped": state["skipped"]}
    for index, custom in enumerate(state["custom"]):
        parts["registered", f"object {index} of register_for_checkpointing"] = custom
    for name, registered in state["registered"].items():
        parts["registered", name] = registered
    return parts
