"""The prepared and registered objects: what is refused, which is which, and their states."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memckpt import ComparedKind
from memckpt.capture.beside.objects import as_stateful
from memckpt.capture.beside.param_groups import scaler_state
from memckpt.capture.data import graft as dataloader
from memckpt.errors import ForeignStateError, UnsupportedError, UsageError

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_REASONS = {
    DistributedType.DEEPSPEED: "DeepSpeed's engine owns parameters, optimizer and the step itself",
    DistributedType.MEGATRON_LM: "Megatron-LM steps an optimizer of its own on buffers of its own",
    DistributedType.XLA: "XLA executes a step lazily, after the point where it could be recorded",
}
_PREPARE = "model, optimizer, loader, scheduler = ckpt.prepare(model, optimizer, loader, scheduler)"


def refuse(accelerator: Accelerator) -> None:
    """Refuse an Accelerator whose training cannot be protected. Raises UnsupportedError, with the reason."""
    found = accelerator.distributed_type
    if found not in _SUPPORTED:
        raise UnsupportedError(
            f"expected distributed type {', '.join(each.value for each in _SUPPORTED)}, found {found.value}: "
            f"{_REASONS.get(found, 'it has not been tried')}. Train without it, or without MemCheckpointPlugin"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and (parallelism.tp_enabled or parallelism.cp_enabled):
        raise UnsupportedError(
            "expected data parallelism alone, found a parallelism_config with tensor or context parallelism, which has "
            "not been tried; apply parallelize_module to the model yourself, before prepare()"
        )


def move_orphans_aside(accelerator: Any) -> list[str]:
    """Move aside the directories that save_state() wrote behind the restored state; returns the new paths.

    With automatic_checkpoint_naming Accelerate refuses a directory that exists. Its directory `checkpoints` may hold
    nothing else: it counts what is there.
    """
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return []
    saved = os.path.join(accelerator.project_dir, "checkpoints")
    moved = []
    for name in sorted(os.listdir(saved)) if accelerator.is_local_main_process and os.path.isdir(saved) else ():
        number = re.fullmatch(r"checkpoint_(\d+)", name)
        if number is None or int(number[1]) < accelerator.save_iteration:
            continue
        os.makedirs(f"{saved}_orphans", exist_ok=True)
        target = os.path.join(f"{saved}_orphans", name)
        while os.path.lexists(target):
            target += "_"
        try:
            os.rename(os.path.join(saved, name), target)
        except FileNotFoundError:  # another node has moved it, in a directory that they share
            continue
        moved.append(target)
    accelerator.wait_for_everyone()
    return moved


def other_objects(expected: str) -> ForeignStateError:
    """The error for a run whose objects differ from those of the run that it continues."""
    return ForeignStateError(
        f"expected {expected}, as in the run that is continued; prepare the same objects in both runs, or start "
        'over with resume="never"'
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is sharded already: by fully_shard, parallelize_module, or FullyShardedDataParallel."""
    dtensor = _imported("torch.distributed.tensor", "DTensor")
    return any(_is_flat(each) for each in model.modules()) or any(
        isinstance(each, dtensor) for each in model.parameters()
    )


def _is_flat(module: nn.Module) -> bool:
    return isinstance(module, _imported("torch.distributed.fsdp", "FullyShardedDataParallel"))


def _imported(module: str, name: str) -> Any:
    """A class to compare with, if its module is loaded: importing it takes a second."""
    return getattr(sys.modules.get(module), name, ())


def prepare(accelerator: Any, objects: Sequence[Any], device_placement: list[bool] | None) -> list[Any]:
    """Call `accelerator.prepare`, but keep it from wrapping sharded models into DDP."""
    # An Accelerator that shards handles models that are sharded already.
    shards = accelerator.distributed_type == DistributedType.FSDP
    cut = [not shards and isinstance(each, nn.Module) and is_sharded(each) for each in objects]
    # Models prepared for evaluation get autocast and compilation only, and are then left alone.
    given = [
        accelerator.prepare_model(each, evaluation_mode=True) if found else each
        for each, found in zip(objects, cut, strict=True)
    ]
    result = accelerator.prepare(*given, device_placement=device_placement)
    return list(result) if len(given) > 1 else [result]


def require_training(objects: Sequence[Any]) -> None:
    """Raise UsageError if the arguments of `prepare` contain nothing to train."""
    models = sum(isinstance(each, nn.Module) for each in objects)
    optimizers = sum(isinstance(each, Optimizer) for each in objects)
    if not models or not optimizers:
        raise UsageError(
            f"prepare(): expected a model and its optimizer among the arguments, found {models} model(s) and "
            f"{optimizers} optimizer(s); call {_PREPARE}"
        )


@dataclass(frozen=True)
class Prepared:
    """The results of `accelerator.prepare` by kind, in the order given.

    Attributes:
        models: as the user has them, wrapped or not.
        bare: the same without wrappers, except FSDP1's.
        data_parallel: the DDP wrapper; None if there is none.
    """

    models: list[nn.Module]
    bare: list[nn.Module]
    data_parallel: DistributedDataParallel | None
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[Any]

    @property
    def model(self) -> nn.Module:
        """All models as one; with several, parameter names begin with the model's number."""
        return self.bare[0] if len(self.bare) == 1 else nn.ModuleList(self.bare)

    @property
    def torch_optimizers(self) -> list[Optimizer]:
        return [each.optimizer for each in self.optimizers]


def sort_prepared(accelerator: Accelerator, objects: Sequence[Any]) -> Prepared:
    """Classify the prepared objects. Raises UnsupportedError for several DDP models."""
    models = [each for each in objects if isinstance(each, nn.Module)]
    wrappers = [each for model in models for each in _data_parallel(model)]
    if len(wrappers) > 1:
        raise UnsupportedError(
            f"expected one model with trainable parameters under DistributedDataParallel, found {len(wrappers)}: "
            "records of two reductions have no common order; train one of them, or on one process"
        )
    return Prepared(
        models,
        [_without_wrappers(accelerator, model) for model in models],
        wrappers[0] if wrappers else None,
        [each for each in objects if isinstance(each, AcceleratedOptimizer)],
        [each for each in objects if isinstance(each, AcceleratedScheduler)],
        list({id(each): each for each in objects if isinstance(each, DataLoader)}.values()),  # a loader may occur twice
    )


def _without_wrappers(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    inner: nn.Module = getattr(model, "_orig_mod", model)  # torch.compile
    if _is_flat(inner):
        return inner  # the parameters are its own
    bare: nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return bare


def _data_parallel(model: nn.Module) -> Iterator[DistributedDataParallel]:
    compiled = getattr(model, "_orig_mod", None)  # torch.compile
    inner = compiled if isinstance(compiled, nn.Module) else model
    if isinstance(inner, DistributedDataParallel):
        yield inner


class ObjectStates:
    """Schedulers, the gradient scaler, and registered objects of the user's. `prepared`: None before `prepare`."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        #: What carries the objects of :meth:`register`, and the objects themselves; the same of Accelerate's.
        self._registered: dict[str, Any] = {}
        self._given: list[object] = []
        self._custom: list[Any] = []
        self.prepared: Prepared | None = None
        #: The gradient scaler's scale at the last commit.
        self._scale: Any = None

    def register(self, name: str, obj: Any, attributes: Sequence[str]) -> None:
        """Include an object. Arguments and errors are those of :meth:`MemCheckpointPlugin.register`."""
        if name in self._registered:
            raise UsageError(f"register({name!r}): expected a new name, found one that is registered already")
        self._registered[name] = as_stateful(name, obj, attributes)
        if not attributes:
            self._given.append(obj)

    def _custom_states(self) -> list[Any]:
        """What carries the objects of register_for_checkpointing, which may become more."""
        for number, each in enumerate(self._accelerator._custom_objects[len(self._custom) :], len(self._custom)):
            self._custom.append(as_stateful(f"object {number} of register_for_checkpointing", each))
        return self._custom

    def scaler_skipped(self, stepped: bool) -> bool:
        """Whether the gradient scaler has skipped a step since the last commit; `stepped`: whether one has been made.

        Accelerate's own flag stays set until an optimizer's next step: in a loop that accumulates by hand also after
        batches whose gradients are still pending. A skipped step changes the scale.
        """
        if not self._accelerator.optimizer_step_was_skipped:
            return False
        return stepped or self._scale is None or self._accelerator.scaler.get_scale() != float(self._scale)

    def carried(self) -> list[object]:
        """Objects whose state is carried here."""
        assert self.prepared is not None
        objects = *self._accelerator._custom_objects, *self._given
        schedulers = [each.scheduler for each in self.prepared.schedulers]
        return [*self.prepared.schedulers, *schedulers, self._accelerator.scaler, *objects]

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
            "custom": [each.state_dict() for each in self._custom_states()],
            "registered": {name: each.state_dict() for name, each in self._registered.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`capture` returned. Raises ForeignStateError if other objects were there then."""
        assert self.prepared is not None
        _load("scheduler", self.prepared.schedulers, state["schedulers"])
        _load("object of register_for_checkpointing", self._custom_states(), state["custom"])
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
    parts["data position", "loop"] = {name: state[name] for name in ("epoch", "batch", "micro_step", "begun")}
    for index, scheduler in enumerate(state["schedulers"]):
        parts["hyperparameters", f"LR scheduler {index}"] = scheduler
    parts["hyperparameters", "gradient scaler"] = {"state": state["scaler"], "skipped": state["skipped"]}
    for index, custom in enumerate(state["custom"]):
        parts["registered", f"object {index} of register_for_checkpointing"] = custom
    for name, registered in state["registered"].items():
        parts["registered", name] = registered
    return parts
