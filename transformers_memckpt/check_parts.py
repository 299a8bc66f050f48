"""Named parts of the captured state, for the comparison of a repeated step, without clock-dependent values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memckpt import ComparedKind
from memckpt.capture import data as dataloader
from transformers_memckpt.trainer_state import History

#: Name suffixes of values that the Trainer derives from the clock: `train_runtime`, `train_tokens_per_second`.
_CLOCKS = ("_runtime", "_per_second")


def check_parts(state: Mapping[str, Any]) -> dict[tuple[ComparedKind, str], Any]:
    """The parts of `Protection`'s captured state, under the user's names for them."""
    states = state["states"]
    parts: dict[tuple[ComparedKind, str], Any] = {
        ("data position", "train loader"): dataloader.comparable(
            state["loader"]["position"], between_passes=state["loader"]["between"]
        ),
        ("data position", "epoch"): {name: state[name] for name in ("epoch", "batches", "stopped")},
        ("hyperparameters", "arguments"): state["settings"],
        ("hyperparameters", "LR scheduler"): states["scheduler"],
        ("hyperparameters", "gradient scaler"): states["scaler"],
        ("logged values", "loss"): {"since the last log": states["loss"], **states["trainer"]},
        ("logged values", "TrainerState"): states["state"],
        ("logged values", "log_history"): [_without_clocks(entry) for entry in History.decode(states["history"])],
    }
    for name, callback in states["callbacks"].items():
        parts["registered", f"callback {name}"] = callback
    for name, value in {**state.get("attributes", {}), **state.get("objects", {})}.items():
        parts["registered", f"attribute {name}"] = value
    return parts


def _without_clocks(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_CLOCKS)}
