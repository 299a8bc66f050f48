"""Optimizers as data: what state they keep, and how to build the same one elsewhere.

Redo runs the user's own optimizer class on other tensors; no optimizer mathematics of our own.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer_module

from memckpt.errors import UnsupportedError
from memckpt.state import codec, rng
from memckpt.state.layout import OptimizerSpec, StateTensorSpec
from memckpt.state.tensors import is_dtensor, local

#: Classes whose update of an element depends on that element alone, so that tensors may be cut and redone in pieces.
#: Any other class gets whole tensors.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
_PROBE_ELEMENTS = 8


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether its parameters may be cut into pieces. Subclasses may do anything, so the class must match exactly."""
    return type(optimizer) in ELEMENTWISE


def is_importable(cls: type[Optimizer]) -> bool:
    """Whether another process finds this class under its name (not so for one defined in the user's script)."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return False
    try:
        return resolve(cls.__module__, cls.__qualname__) is cls
    except UnsupportedError:
        return False


def resolve(module: str, qualname: str) -> type[Optimizer]:
    """The optimizer class of that name.

    Raises:
        UnsupportedError: there is none.
    """
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"optimizer class {module}.{qualname} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UnsupportedError(f"{module}.{qualname} is not an optimizer class")
    return found


def refuse_unsupported(optimizer: Optimizer) -> None:
    """Refuse what cannot be redone from gradients, and known bugs of the library, by name.

    Raises:
        UnsupportedError: with the reason and the remedy.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss inside its step, so its step cannot be redone from gradients; "
            "expected an optimizer that steps from the gradients alone (SGD, Adam, ...)"
        )
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        low = any(p.dtype in (torch.bfloat16, torch.float16) and p.device.type == "cpu" for p in group["params"])
        if group.get("fused") and low:
            raise UnsupportedError(
                "fused SGD does not update bf16/fp16 parameters on CPU (pytorch issue 191763); use fused=False"
            )


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Every group without its parameters, with the values' own types (a tensor learning rate stays a tensor)."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def attributes(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Instance attributes that another process can be given, and the names of those it cannot.

    Hooks, the state and the groups are left out on purpose; so are methods that a scheduler has wrapped.
    """
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups") or name.endswith("_hooks") or callable(value):
            continue
        if name.startswith(("_opt_called", "_warned_capturable", "_zero_grad_profile_name", "_step_count")):
            continue
        if codec.unencodable_paths(value):
            dropped.append(name)
        else:
            kept[name] = value
    return kept, dropped


def rebuild(cls: type[Optimizer], instance_attributes: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the class with the given groups (``params`` included), no state and no hooks."""
    optimizer = cls.__new__(cls)
    optimizer.__setstate__({**instance_attributes, "state": defaultdict(dict), "param_groups": groups})
    return optimizer


def rebuild_from_spec(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> Optimizer:
    """Like :func:`rebuild`, from a class known by name. Raises UnsupportedError if it cannot be imported."""
    return rebuild(resolve(spec.module, spec.qualname), codec.decode(spec.attributes), groups)


def rebuild_like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A sibling of a live optimizer with other groups: same class, same attributes, no state and no hooks."""
    shared = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups") and not name.endswith("_hooks") and not callable(value)
    }
    return rebuild(type(optimizer), shared, groups)


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Keep hooks that the user registered for all optimizers from seeing the steps of a redo."""
    registries: tuple[dict[int, Any], ...] = (
        _optimizer_module._global_optimizer_pre_hooks,
        _optimizer_module._global_optimizer_post_hooks,
    )
    saved = [dict(registry) for registry in registries]
    for registry in registries:
        registry.clear()
    try:
        yield
    finally:
        for registry, hooks in zip(registries, saved, strict=True):
            registry.update(hooks)


class StateDescription:
    """What an optimizer keeps for one parameter: its tensors, and all keys (plain values included) in their order."""

    def __init__(self, tensors: tuple[StateTensorSpec, ...], keys: tuple[str, ...]) -> None:
        self.tensors = tensors
        self.keys = keys


DryRuns = dict[Any, StateDescription]


def describe_state(
    optimizer: Optimizer, param: torch.Tensor, group: dict[str, Any], dry_runs: DryRuns
) -> StateDescription:
    """What the optimizer keeps, or will keep after its first step, for one parameter.

    State that is there already is read; what is not is found by a dry run of one step on a stand-in. No RNG stream
    moves and neither parameter nor optimizer changes. `dry_runs` remembers results for one optimizer: begin with an
    empty dict.

    Raises:
        UnsupportedError: the optimizer cannot take a step on a stand-in.
    """
    elementwise = is_elementwise(optimizer)
    state = optimizer.state.get(param)
    if state:
        return _describe(state, param)
    # Element-wise state has the parameter's shape whatever that is, so a few elements stand for all of them.
    held = local(param)
    shape = (_PROBE_ELEMENTS,) if elementwise else tuple(held.shape)
    settings = tuple(sorted((name, repr(value)) for name, value in group.items() if name != "params"))
    key = (shape, param.dtype, str(param.device), settings)
    if key not in dry_runs:
        stand_in = torch.nn.Parameter(torch.zeros(shape, dtype=param.dtype, device=param.device))
        clone, _ = _dry_steps(optimizer, stand_in, group, 1)
        dry_runs[key] = _describe(clone.state.get(stand_in, {}), stand_in)
    found = dry_runs[key]
    tensors = []
    for spec in found.tensors:
        same = spec.shape == shape
        full = tuple(held.shape) if same else spec.shape
        tensors.append(StateTensorSpec(spec.key, full, spec.dtype, same, spec.on_cpu))
    return StateDescription(tuple(tensors), found.keys)


def _describe(state: dict[str, Any], param: torch.Tensor) -> StateDescription:
    shape = local(param).shape
    tensors = tuple(
        StateTensorSpec(
            key=key,
            shape=tuple(local(value).shape),
            dtype=dtype_name(value.dtype),
            # Of any class: a DTensor's state has to come back as one, whether or not it may be cut.
            elementwise=local(value).shape == shape and is_dtensor(value) == is_dtensor(param),
            on_cpu=value.device.type == "cpu" and param.device.type != "cpu",
        )
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    )
    return StateDescription(tensors, tuple(state))


@dataclass(frozen=True)
class GradientHabits:
    """What an optimizer's step does to the gradients it is given.

    Attributes:
        changes: their values change, so that they cannot be read after the step. Torch's SGD does that with nesterov
            and foreach (the default on CUDA), and any class may.
        version_moves: by how much their version counters move in a step (fused kernels declare them as outputs).
    """

    changes: bool
    version_moves: int


def gradient_habits(optimizer: Optimizer) -> GradientHabits:
    """Found by a dry run of two steps on the smallest parameter of each group."""
    changes, moves = False, 0
    for group in optimizer.param_groups:
        params = [local(param) for param in group["params"] if local(param).numel()]
        if params:
            smallest = min(params, key=lambda param: param.numel())
            stand_in = torch.nn.Parameter(torch.ones_like(smallest))
            _, habits = _dry_steps(optimizer, stand_in, group, 2)
            changes, moves = changes or habits.changes, max(moves, habits.version_moves)
    return GradientHabits(changes, moves)


def _dry_steps(
    optimizer: Optimizer, stand_in: torch.nn.Parameter, group: dict[str, Any], steps: int
) -> tuple[Optimizer, GradientHabits]:
    """Step a sibling of the optimizer on a stand-in; says what that did to the gradient."""
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    settings = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}
    gradient = torch.full_like(stand_in, 0.5, requires_grad=False)
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    stand_in.grad = gradient.to_sparse() if sparse else gradient
    before, version = gradient.clone(), stand_in.grad._version
    with rng.preserved(), without_global_hooks():
        try:
            clone = rebuild_like(optimizer, [{**settings, "params": [stand_in]}])
            for _ in range(steps):
                clone.step()
        except Exception as error:
            raise UnsupportedError(
                f"{type(optimizer).__qualname__} could not take a step on a stand-in of shape {list(stand_in.shape)} "
                f"({type(error).__name__}: {error}); expected an optimizer that steps from gradients alone"
            ) from error
    if stand_in.grad is None:
        return clone, GradientHabits(True, 0)
    changed = not torch.equal(stand_in.grad.to_dense(), before)
    return clone, GradientHabits(changed, (stand_in.grad._version - version) // steps)
