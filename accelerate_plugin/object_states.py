"""States of prepared and registered objects: read at each commit, restored on a resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_plugin.support import Prepared, other_objects
from memckpt import ComparedKind
from memckpt.capture import data as dataloader
from memckpt.capture.attributes import AttributesOf
from memckpt.capture.scaler import scaler_state
from memckpt.errors import UsageError


class ObjectStates:
    """Schedulers, the gradient scaler, and registered objects of the user's. `prepared`: None before `prepare`."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._registered: dict[str, Any] = {}
        self.prepared: Prepared | None = None
        #: The gradient scaler's scale at the last commit.
        self._scale: Any = None

    def register(self, name: str, obj: Any, attributes: Sequence[str]) -> None:
        """Include an object. Arguments and errors are those of :meth:`MemCheckpointPlugin.register`."""
        if name in self._registered:
            raise UsageError(f"register({name!r}): expected a new name, found one that is registered already")
        if attributes:
            obj = AttributesOf(name, obj, attributes)
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise UsageError(
                f"register({name!r}): expected an object with state_dict() and load_state_dict(), found "
                f"{type(obj).__qualname__}"
            )
        self._registered[name] = obj

    def scaler_skipped(self, stepped: bool) -> bool:
        """Whether the gradient scaler has skipped a step since the last commit; `stepped`: whether one has been made.

        Accelerate's own flag stays set until an optimizer's next step: in a loop that accumulates by hand also after
        batches whose gradients are still pending. A skipped step changes the scale.
        """
        if not self._accelerator.optimizer_step_was_skipped:
            return False
        return stepped or self._scale is None or self._accelerator.scaler.get_scale() != float(self._scale)

    def capture(self) -> dict[str, Any]:
        """All of these states, as values that the engine can store."""
        assert self.prepared is not None
        scaler = self._accelerator.scaler
        scaling = None if scaler is None else scaler_state(scaler)
        self._scale = None if scaling is None else scaling.get("scale")
        return {
            "schedulers": [each.state_dict() for each in self.prepared.schedulers],
            "scaler": scaling,
            # A scheduler that is stepped after the loop over batches reads it.
            "skipped": [each.step_was_skipped for each in self.prepared.optimizers],
            "custom": [each.state_dict() for each in self._accelerator._custom_objects],
            "registered": {name: each.state_dict() for name, each in self._registered.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`capture` returned. Raises ForeignStateError if other objects were there then."""
        assert self.prepared is not None
        _load("scheduler", self.prepared.schedulers, state["schedulers"])
        _load("object of register_for_checkpointing", self._accelerator._custom_objects, state["custom"])
        if state["registered"].keys() != self._registered.keys():
            raise other_objects(f"register() of {sorted(state['registered'])} and not of {sorted(self._registered)}")
        for name, obj in self._registered.items():
            obj.load_state_dict(state["registered"][name])
        if (state["scaler"] is None) != (self._accelerator.scaler is None):
            raise other_objects("a gradient scaler" if state["scaler"] is not None else "no gradient scaler")
        if state["scaler"] is not None:
            self._accelerator.scaler.load_state_dict(state["scaler"])
            self._scale = state["scaler"].get("scale")
        for optimizer, skipped in zip(self.prepared.optimizers, state["skipped"], strict=True):
            optimizer._is_overflow = skipped


def _load(kind: str, objects: list[Any], states: list[Any]) -> None:
    if len(objects) != len(states):
        raise other_objects(f"{len(states)} {kind}(s) and not {len(objects)}")
    for each, held in zip(objects, states, strict=True):
        each.load_state_dict(held)


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
