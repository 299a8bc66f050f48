"""State from user code: callbacks, and hooks of the LightningModule and the datamodule.

State that the safe codec does not take is left out and logged once, and training continues. A callback with a file
handle in its state must not cost the user the protection of everything else.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any

import lightning
import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memckpt
from lightning_memckpt.internals import callback_fields, set_callback_fields
from lightning_memckpt.notes import list_callbacks
from memckpt.capture.beside import attributes
from memckpt.capture.beside.attributes import same

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # Lightning 2.5
    _RESTORED_BY_VALUE: tuple[type[pl.Callback], ...] = ()
else:
    # Its hooks move whole models in and out of a checkpoint; its average model is staged as a module instead.
    _RESTORED_BY_VALUE = (WeightAveraging,)

_SHARDING = (FSDPStrategy, ModelParallelStrategy)
# Prefix that FSDP1 adds to names, and removes in a state_dict().
_FLAT_PREFIX = "_fsdp_wrapped_module."
_REFERENCE = "\0staged tensor"
_SEPARATOR = "\0"


def modules_beside(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, nn.Module]:
    """Modules that training changes and the LightningModule does not contain (an average of the weights), by name."""
    callbacks = {f"callbacks.{key}": callback for key, callback in callbacks_by_key(trainer)}
    return attributes.modules_beside([pl_module], {**callbacks, "model": pl_module})


def callbacks_by_key(trainer: pl.Trainer) -> Iterator[tuple[str, pl.Callback]]:
    """Every callback with a unique key: its state key, numbered if several have the same."""
    seen: dict[str, int] = {}
    for callback in list_callbacks(trainer):
        key = callback.state_key
        seen[key] = seen.get(key, 0) + 1
        yield (key if seen[key] == 1 else f"{key}#{seen[key]}"), callback


def attribute_roots(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, object]:
    """Root objects for names of plain attributes: a callback by its state key, and by its class if that is unique."""
    untyped: Any = trainer
    roots: dict[str, object] = {"module": pl_module, "model": pl_module}  # as the engine's findings name it
    if untyped.datamodule is not None:
        roots["datamodule"] = untyped.datamodule
    classes = [type(callback).__name__ for callback in untyped.callbacks]
    for key, callback in callbacks_by_key(trainer):
        roots[f"callbacks.{key}"] = callback
        if classes.count(type(callback).__name__) == 1:
            roots.setdefault(f"callbacks.{type(callback).__name__}", callback)
    return roots


class UserState:
    """Captures and restores the state that user code returns from its hooks.

    Args:
        beside: modules staged beside the module, from :func:`modules_beside`.
        skip: our own callback, which has no state.

    Attributes:
        left_out: state that is not stored, with the reason; the caller logs it.
        hook_seconds: shortest time that user hooks have taken in a capture.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        beside: Mapping[str, nn.Module],
        *,
        skip: pl.Callback,
    ) -> None:
        self._trainer: Any = trainer
        self._pl_module = pl_module
        self._beside = beside
        self._skip = skip
        self._checked = False
        #: Whether the datamodule's load_state_dict() makes up for the loaders that a restart builds once more.
        self._makes_up = False
        self._dropped: set[str] = set()
        self.left_out: list[str] = []
        self.hook_seconds = float("inf")
        self._saving = self._overriding("on_save_checkpoint")

    def _overriding(self, hook: str) -> list[Any]:
        objects: list[Any] = [
            callback
            for callback in self._trainer.callbacks
            if callback is not self._skip and not isinstance(callback, _RESTORED_BY_VALUE)
        ]
        return [each for each in [*objects, self._pl_module] if is_overridden(hook, each)]

    def capture(self, loops: dict[str, Any]) -> dict[str, Any]:
        """The state for a restart; values may share memory with live ones until they are encoded."""
        started = time.perf_counter()
        pieces = self._states()
        for key, callback in callbacks_by_key(self._trainer):
            if callback is not self._skip and (fields := callback_fields(callback)):
                pieces[f"fields/{key}"] = fields
        if self._saving:
            for key, value in self._checkpoint_extras(loops, pieces).items():
                pieces[f"checkpoint/{key}"] = value
        self.hook_seconds = min(self.hook_seconds, time.perf_counter() - started)
        if not self._checked:
            self._checked = True
            self.leave_out_unencodable(pieces)
        return self.without_left_out(pieces)

    def _states(self) -> dict[str, Any]:
        pieces: dict[str, Any] = {}
        for key, callback in callbacks_by_key(self._trainer):
            if callback is not self._skip and (state := callback.state_dict()):
                pieces[f"callbacks/{key}"] = state
        datamodule = self._trainer.datamodule
        if datamodule is not None and (state := datamodule.state_dict()):
            pieces["datamodule"] = state
        return pieces

    def states(self, loops: dict[str, Any]) -> dict[str, Any]:
        """Copies of the states of callbacks and datamodule, and of the module's hooks if it makes the loaders."""
        pieces = self._states()
        if self._saving and is_overridden("train_dataloader", self._pl_module):
            # Its counters may be in what its hooks add to a checkpoint.
            extras = self._checkpoint_extras(loops, pieces)
            pieces |= {f"checkpoint/{key}": value for key, value in extras.items()}
        return {name: copy.deepcopy(piece) for name, piece in pieces.items() if not memckpt.unencodable_paths(piece)}

    def set_states(self, pieces: Mapping[str, Any]) -> None:
        """Give callbacks and datamodule these states, or the ones that a restart has given them."""
        if "datamodule" in pieces and self._trainer.datamodule is not None and not self._makes_up:
            self._trainer.datamodule.load_state_dict(copy.deepcopy(pieces["datamodule"]))
        for key, callback in callbacks_by_key(self._trainer):
            self._load(key, callback, pieces)

    def leave_out_unencodable(self, pieces: Mapping[str, Any]) -> bool:
        """Find pieces that the codec does not take, and leave them out from now on; True if there are any."""
        found = False
        for name, piece in pieces.items():
            if name not in self._dropped and (paths := memckpt.unencodable_paths(piece)):
                self._dropped.add(name)
                self.left_out.append(f"{name}: {', '.join(paths[:3])}{' and more' if len(paths) > 3 else ''}")
                found = True
        return found

    def without_left_out(self, pieces: Mapping[str, Any]) -> dict[str, Any]:
        """`pieces` without those that cannot be stored."""
        return {name: piece for name, piece in pieces.items() if name not in self._dropped}

    def _checkpoint_extras(self, loops: dict[str, Any], pieces: Mapping[str, Any]) -> dict[str, Any]:
        """Entries that `on_save_checkpoint` hooks add to a checkpoint, with staged tensors replaced by references."""
        checkpoint = self._checkpoint(loops, pieces)
        before = dict(checkpoint)
        names = set(checkpoint["state_dict"])
        with isolate_rng():
            for each in self._saving:
                if isinstance(each, pl.Callback):
                    each.on_save_checkpoint(self._trainer, self._pl_module, checkpoint)
                else:
                    each.on_save_checkpoint(checkpoint)
        extras = {
            key: value
            for key, value in checkpoint.items()
            if key not in before or value is not before[key] or (key == "state_dict" and set(value) != names)
        }
        if not extras:
            return extras
        references = self._references()
        return {
            key: apply_to_collection(value, Tensor, lambda tensor: references.get(_identity(tensor), tensor))
            for key, value in extras.items()
        }

    def _checkpoint(self, loops: dict[str, Any], pieces: Mapping[str, Any]) -> dict[str, Any]:
        """The dictionary that hooks expect, with the live tensors; without optimizer states."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": self._state_dict(),
            "loops": {"fit_loop": loops},
            "callbacks": {
                name.removeprefix("callbacks/"): state
                for name, state in pieces.items()
                if name.startswith("callbacks/")
            },
            "optimizer_states": [],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }

    def _state_dict(self) -> dict[str, Tensor]:
        """The module's own state_dict, of live tensors."""
        strategy = self._trainer.strategy
        if not isinstance(strategy, _SHARDING):
            state: dict[str, Tensor] = strategy.lightning_module_state_dict()
            return state
        # The strategy would gather the model from all ranks at every step: hooks see this rank's shards.
        found = {name: param.detach() for name, param in self._pl_module.named_parameters(remove_duplicate=False)}
        for path, module in self._pl_module.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    found[f"{path}.{key}" if path else key] = buffer.detach()
        return {name.replace(_FLAT_PREFIX, ""): tensor for name, tensor in found.items()}

    def _staged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for owner, module in {"": self._pl_module, **self._beside}.items():
            for named in (module.named_parameters, module.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    yield f"{_REFERENCE}{_SEPARATOR}{owner}{_SEPARATOR}{name}", tensor

    def _references(self) -> dict[tuple[Any, ...], str]:
        return {_identity(tensor): name for name, tensor in self._staged_tensors() if tensor.numel()}

    def restore_early(self, pieces: Mapping[str, Any]) -> None:
        """Give callbacks and datamodule their state at the time at which Lightning would: before any `on_fit_start`."""
        self.set_states(pieces)
        if "datamodule" in pieces and self._trainer.datamodule is not None:
            self._makes_up = not same(self._trainer.datamodule.state_dict(), pieces["datamodule"])

    def check_datamodule(self, pieces: Mapping[str, Any]) -> str:
        """Why the datamodule is not as it was when `pieces` were captured, in words; empty if it is."""
        datamodule = self._trainer.datamodule
        if datamodule is None or "datamodule" not in pieces:
            return ""
        if not same(datamodule.state_dict(), pieces["datamodule"]) and not self._makes_up:
            datamodule.load_state_dict(copy.deepcopy(pieces["datamodule"]))  # a start hook has reset it
        if same(datamodule.state_dict(), pieces["datamodule"]):
            return ""
        return (
            f"{type(datamodule).__name__}.load_state_dict() does not bring back what its state_dict() had returned; "
            "make it restore all of it"
        )

    def restore_late(self, pieces: Mapping[str, Any], loops: dict[str, Any]) -> None:
        """Restore again what a start hook has reset, and run the `on_load_checkpoint` hooks, with live tensors."""
        self.load_extras(pieces, loops)
        for key, callback in callbacks_by_key(self._trainer):
            saved = pieces.get(f"callbacks/{key}")
            if saved is not None and not same(callback.state_dict(), saved):
                self._load(key, callback, pieces)
            set_callback_fields(callback, copy.deepcopy(pieces.get(f"fields/{key}", {})))

    def load_extras(self, pieces: Mapping[str, Any], loops: dict[str, Any]) -> None:
        """Run the `on_load_checkpoint` hooks."""
        extras = {
            name.removeprefix("checkpoint/"): piece for name, piece in pieces.items() if name.startswith("checkpoint/")
        }
        loading = self._overriding("on_load_checkpoint")
        if loading:
            checkpoint = {**self._checkpoint(loops, pieces), **self._resolved(copy.deepcopy(extras))}
            for each in loading:
                if isinstance(each, pl.Callback):
                    each.on_load_checkpoint(self._trainer, self._pl_module, checkpoint)
                else:
                    each.on_load_checkpoint(checkpoint)

    @staticmethod
    def _load(key: str, callback: pl.Callback, pieces: Mapping[str, Any]) -> None:
        saved = pieces.get(f"callbacks/{key}")
        if saved is None:
            return
        saved = copy.deepcopy(saved)
        if "dirpath" in saved and hasattr(callback, "dirpath"):
            # ModelCheckpoint drops its scores if the directory differs, as it does by default: each start has a logger
            # version of its own. It is the same run, so its scores count.
            saved["dirpath"] = callback.dirpath
        callback.load_state_dict(saved)

    def _resolved(self, extras: dict[str, Any]) -> dict[str, Any]:
        live = dict(self._staged_tensors())

        def resolve(text: str) -> Any:
            return live.get(text, text) if text.startswith(_REFERENCE) else text

        resolved: dict[str, Any] = apply_to_collection(extras, str, resolve)
        return resolved


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    # A DTensor has no memory of its own.
    held: Tensor = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
    return held.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
