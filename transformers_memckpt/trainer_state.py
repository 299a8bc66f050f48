"""State of a Trainer beside tensors: read at each commit, restored on a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

import memckpt
from memckpt import ComparedKind
from memckpt.capture.beside.attributes import modules_beside
from memckpt.capture.beside.param_groups import scaler_state
from memckpt.capture.data import graft as dataloader
from memckpt.errors import UnsupportedStateError
from transformers_memckpt import notes

# Fields of TrainerState that training changes.
_STATE = (
    "global_step", "epoch", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos",
    "num_input_tokens_seen",
)  # fmt: skip
# Fields that follow from the arguments, unless a callback or a file sets others.
_SCHEDULE = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps")
# Largest JSON of a model's configuration, in characters, that is stored with each step for an export.
_LARGE_CONFIG = 16 << 10
#: Of the trainer; `_initial_global_step` came with transformers 5.19.
_TRAINER = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")


class History:
    """`log_history` as bytes; each entry is encoded once, not at every step."""

    def __init__(self) -> None:
        self._entries: list[Any] = []
        self._encoded = b""

    def encode(self, history: list[Any]) -> bytes:
        """The history as lines of JSON, as in the Trainer's own files.

        Raises:
            UnsupportedStateError: an entry has a value that is no number, string, list or dictionary.
        """
        known = len(self._entries)
        if len(history) < known or (known and history[known - 1] is not self._entries[-1]):
            self._entries, self._encoded, known = [], b"", 0
        for index, entry in enumerate(history[known:], known):
            try:
                line = json.dumps(entry, default=_plain)
            except TypeError as error:
                raise UnsupportedStateError(f"state.log_history[{index}]", str(error)) from error
            self._encoded += line.encode() + b"\n"
        self._entries = list(history)
        return self._encoded

    @staticmethod
    def decode(encoded: bytes) -> list[Any]:
        """The decoded list."""
        return [json.loads(line) for line in encoded.splitlines()]


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as a Python number."""
    if hasattr(value, "item") and getattr(value, "size", None) in (1, None):
        return value.item()
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def attribute_roots(trainer: Any) -> dict[str, object]:
    """Root objects for names of plain attributes; a callback by its class, if that is unique."""
    callbacks = trainer.callback_handler.callbacks
    classes = [type(each).__name__ for each in callbacks]
    alone = {
        f"callbacks.{name}": each for name, each in zip(classes, callbacks, strict=True) if classes.count(name) == 1
    }
    return {"model": trainer.model, "trainer": trainer, **alone}


def beside(trainer: Any) -> dict[str, nn.Module]:
    """Modules of the Trainer and its callbacks beside the model (a reference model, an average of weights), by name."""
    owners = {name: each for name, each in attribute_roots(trainer).items() if name != "model"}
    found = modules_beside([trainer.model], owners)
    found.pop("trainer.model_wrapped", None)
    if getattr(trainer.args, "sync_ref_model", None) is False:
        found.pop("trainer.ref_model", None)  # TRL's, which training then leaves as it is
    return found


class TrainerStates:
    """The states of one trainer, its scheduler, its gradient scaler, and its callbacks but `skip`, our own.

    `left_out`: callbacks whose state cannot be stored, with the reason.
    """

    def __init__(self, trainer: Any, skip: object) -> None:
        self._trainer = trainer
        self._skip = skip
        self._history = History()
        self._began_with: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}

    def compute_schedule(self, max_steps: int, epochs: int) -> None:
        """Compute the schedule that the arguments give, before any callback can change it."""
        given = TrainerState(max_steps=max_steps, num_train_epochs=epochs)
        given.compute_steps(self._trainer.args, max_steps)
        self._began_with = {name: getattr(given, name) for name in _SCHEDULE}

    def capture(self) -> dict[str, Any]:
        """All of these states, as values that the engine can store."""
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "state": {name: getattr(trainer.state, name) for name in _STATE},
            "began_with": self._began_with,
            "schedule": {
                name: now for name, began in self._began_with.items() if (now := getattr(trainer.state, name)) != began
            },
            "history": self._history.encode(trainer.state.log_history),
            "trainer": {name: getattr(trainer, name) for name in _TRAINER if hasattr(trainer, name)},
            "loss": trainer._tr_loss,
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": scaler_state(scaler) if scaler is not None else None,
            "callbacks": {
                name: _state_of(callback) for name, callback in self._callbacks() if name not in self.left_out
            },
        }

    def for_file(self) -> dict[str, Any]:
        """Data for an export only; constant while training runs."""
        trainer = self._trainer
        config: Any = getattr(trainer.model, "config", None)
        text = config.to_json_string() if hasattr(config, "to_json_string") else ""
        exportable = {name: each for name, each in self._callbacks() if isinstance(each, ExportableState)}
        arguments = {name: each.state().get("args", {}) for name, each in exportable.items()}
        return {
            "config": text if len(text) <= _LARGE_CONFIG else "",
            "state": {name: getattr(trainer.state, name) for name in (*_SCHEDULE, "train_batch_size")},
            "arguments": {name: each for name, each in arguments.items() if not memckpt.unencodable_paths(each)},
        }

    def lost_schedule(self, held: dict[str, Any]) -> dict[str, Any]:
        """Held changes of the schedule that are not restored: the arguments now give another schedule."""
        changed: dict[str, Any] = held["schedule"]
        return {name: now for name, now in changed.items() if held["began_with"][name] != self._began_with[name]}

    def restore_counters(self, held: dict[str, Any]) -> None:
        """Restore counters and history, which other callbacks may read before training starts."""
        lost = self.lost_schedule(held)
        changed = {name: value for name, value in held["schedule"].items() if name not in lost}
        for name, value in (held["state"] | changed).items():
            setattr(self._trainer.state, name, value)
        self._trainer.state.log_history = self._history.decode(held["history"])

    def restore(self, held: dict[str, Any]) -> None:
        """Restore what :meth:`capture` returned."""
        trainer = self._trainer
        self.restore_counters(held)
        for name, value in held["trainer"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = held["loss"].to(trainer.args.device)
        trainer.lr_scheduler.load_state_dict(held["scheduler"])
        if held["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(held["scaler"])
        for name, callback in self._callbacks():
            if name in held["callbacks"]:
                _load(callback, held["callbacks"][name])

    def leave_out(self) -> bool:
        """Find callbacks whose state the engine cannot store; True if there is a new one."""
        before = len(self.left_out)
        for name, callback in self._callbacks():
            if name not in self.left_out and (paths := memckpt.unencodable_paths(_state_of(callback))):
                self.left_out[name] = ", ".join(paths[:3])
        return len(self.left_out) > before

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        """Callbacks with a state, by a name that is stable over restarts."""
        seen: dict[str, int] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if callback is self._skip or isinstance(callback, TrainerControl):
                continue
            if isinstance(callback, ExportableState) or _is_stateful(callback):
                name = type(callback).__qualname__
                seen[name] = seen.get(name, 0) + 1
                yield f"{name}:{seen[name]}", callback


def _is_stateful(callback: object) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _state_of(callback: Any) -> Any:
    return callback.state_dict() if _is_stateful(callback) else callback.state().get("attributes", {})


def _load(callback: Any, state: Any) -> None:
    if _is_stateful(callback):
        callback.load_state_dict(state)
    else:
        for name, value in state.items():
            setattr(callback, name, value)


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
        ("hyperparameters", "arguments"): {
            name: one for name, one in state["settings"].items() if name not in notes.OF_STATE
        },
        ("hyperparameters", "LR scheduler"): states["scheduler"],
        ("hyperparameters", "gradient scaler"): states["scaler"],
        ("logged values", "loss"): {"since the last log": states["loss"], **states["trainer"]},
        ("logged values", "TrainerState"): states["state"] | states["schedule"],
        ("logged values", "log_history"): [_without_clocks(entry) for entry in History.decode(states["history"])],
    }
    for name, callback in states["callbacks"].items():
        parts["registered", f"callback {name}"] = callback
    for name, value in {**state["attributes"], **state["objects"]}.items():
        parts["registered", f"attribute {name}"] = value
    return parts


def _without_clocks(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_CLOCKS)}
