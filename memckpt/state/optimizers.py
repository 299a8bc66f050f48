"""Optimizers as data: their state, and how to build an equal one elsewhere.

Redo runs the user's own optimizer class on other tensors; memckpt has no optimizer mathematics.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer_module

from memckpt.errors import UnsupportedError
from memckpt.state import codec, rng
from memckpt.state.spec import ITEM_BYTES, OptimizerSpec, StateSpec, StateTensorSpec
from memckpt.state.tensors import give_gradient, is_dtensor, local
from memckpt.state.traces import Traces, leaving_no_trace

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
    """Whether its parameters may be cut into pieces, and need no test. Exact class only: a subclass may do anything."""
    return type(optimizer) in ELEMENTWISE


def may_change_gradients(optimizer: Optimizer) -> bool:
    """Whether its step may change the gradients that it is given, as torch's SGD does with nesterov and foreach."""
    nesterov = isinstance(optimizer, torch.optim.SGD) and any(group["nesterov"] for group in optimizer.param_groups)
    return nesterov or not is_elementwise(optimizer)


def cannot_be_redone(optimizer: Optimizer) -> str:
    """Reason why its class cannot be redone from gradients; empty if none is known."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS evaluates the loss several times within one step"
    if modules := own_modules(optimizer):
        return f"{type(optimizer).__qualname__} keeps state in a module, its attribute {next(iter(modules))!r}"
    return ""


def is_importable(cls: type[Optimizer]) -> bool:
    """Whether another process can import the class by name; False for one defined in the user's script."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return False
    try:
        return resolve(cls.__module__, cls.__qualname__) is cls
    except UnsupportedError:
        return False


def resolve(module: str, qualname: str) -> type[Optimizer]:
    """The optimizer class of that name. Raises UnsupportedError: there is none."""
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
    """Refuse known bugs of torch's optimizers. Raises UnsupportedError."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        low = any(p.dtype in (torch.bfloat16, torch.float16) and p.device.type == "cpu" for p in group["params"])
        if group.get("fused") and low:
            raise UnsupportedError(
                "fused SGD does not update bf16/fp16 parameters on CPU (pytorch issue 191763); use fused=False"
            )


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Every group without its parameters and functions; values keep their types (a tensor rate stays a tensor)."""
    return [
        {key: value for key, value in group.items() if key != "params" and not callable(value)}
        for group in optimizer.param_groups
    ]


def odd_hyperparameters(optimizer: Optimizer) -> list[str]:
    """Keys of groups whose values no record can hold: functions and objects."""
    return [
        key
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params" and type(value) not in _PLAIN and (callable(value) or codec.unencodable_paths(value))
    ]


_PLAIN = frozenset({type(None), bool, int, float, str})


def rebuild(cls: type[Optimizer], instance_attributes: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the class with the given groups (``params`` included), no state and no hooks."""
    optimizer = cls.__new__(cls)
    optimizer.__setstate__({**instance_attributes, "state": defaultdict(dict), "param_groups": groups})
    return optimizer


def rebuild_from_spec(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> Optimizer:
    """Like :func:`rebuild`, from a class known by name. Raises UnsupportedError if it cannot be imported."""
    return rebuild(resolve(spec.module, spec.qualname), codec.decode(spec.attributes), groups)


def rebuild_like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A sibling of a live optimizer, without state and hooks. Raises UnsupportedError: an attribute has no copy."""
    return rebuild(type(optimizer), private_attributes(optimizer), groups)


def on_host(value: Any) -> Any:
    """A value with tensors in host memory, for steps on the host.

    In a group ``capturable`` is off, which needs a device; its steps are the same but for rounding. Torch takes tensors
    as rates of foreach steps with it alone.
    """
    if type(value) is dict:
        off = {name: False for name in ("capturable", "foreach") if value.get("capturable") and value.get(name)}
        return {key: on_host(each) for key, each in value.items()} | off
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Hide the steps of a redo from hooks that the user registered for all optimizers."""
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


class StateDescription(NamedTuple):
    """An optimizer's state for one parameter: its tensors, and all keys, plain values included, in order."""

    tensors: tuple[StateTensorSpec, ...]
    keys: tuple[str, ...]


DryRuns = dict[Any, StateDescription]


def describe_state(
    optimizer: Optimizer, param: torch.Tensor, group: dict[str, Any], dry_runs: DryRuns, captured: bool = False
) -> StateDescription:
    """The state that the optimizer keeps, or will keep after its first step, for one parameter.

    Existing state is read; otherwise a dry run of one step on a stand-in finds it, and is kept in `dry_runs`, a dict
    for one optimizer. RNG streams, parameter and optimizer stay unchanged. `captured`: the state is never redone. Then
    every tensor shaped like the parameter counts as element-wise, and state without room in a slot is left out. A
    stand-in that cannot be stepped yields an empty description; otherwise it raises UnsupportedError.
    """
    elementwise = is_elementwise(optimizer)
    state = optimizer.state.get(param)
    if state:
        return _describe(state, param, captured)
    # Element-wise state always has the parameter's shape, so a few elements suffice.
    held = local(param)
    shape = (_PROBE_ELEMENTS,) if elementwise else tuple(held.shape)
    settings = tuple(sorted((name, repr(value)) for name, value in group.items() if name != "params"))
    grad_dtype = getattr(param, "grad_dtype", None) or param.dtype
    key = (shape, param.dtype, grad_dtype, str(param.device), settings)
    if key not in dry_runs:
        stand_in = torch.nn.Parameter(torch.zeros(shape, dtype=param.dtype, device=param.device))
        try:
            clone = _dry_steps(optimizer, stand_in, group, 1, grad_dtype)
            dry_runs[key] = _describe(clone.state.get(stand_in, {}), stand_in, captured)
        except UnsupportedError:
            # A class that cannot step a tensor without elements never does: training would have failed.
            if not captured and held.numel():
                raise
            dry_runs[key] = StateDescription((), ())
    found = dry_runs[key]
    tensors = []
    for spec in found.tensors:
        same = spec.shape == shape
        full = tuple(held.shape) if same else spec.shape
        tensors.append(StateTensorSpec(spec.key, full, spec.dtype, same, spec.on_cpu))
    return StateDescription(tuple(tensors), found.keys)


#: (parameter, optimizer, key) of optimizer state that does not exist.
Missing = tuple[tuple[int, int, str], ...]


def beside_tensors(spec: StateSpec, state_of: Callable[[int, int], Mapping[str, Any]]) -> tuple[Missing, bytes]:
    """What of a spec's optimizer state does not exist, and what of it is no tensor, encoded.

    `state_of` returns the state of a parameter in an optimizer, both by index.
    """
    missing: list[tuple[int, int, str]] = []
    plain: dict[int, dict[int, dict[str, Any]]] = {}
    for index, param in enumerate(spec.params):
        for owner in param.owners if not param.tensor.elsewhere else ():
            state = state_of(index, owner.optimizer)
            lacks = (one.key for one in owner.state if not isinstance(state.get(one.key), torch.Tensor))
            missing += [(index, owner.optimizer, key) for key in lacks]
            values = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
            if values:
                plain.setdefault(index, {})[owner.optimizer] = values
    return tuple(missing), codec.encode(plain) if plain else b""


def fits_slots(value: object, param: torch.Tensor) -> bool:
    """Whether captured state of a parameter fits a slot: a dense tensor; a DTensor only if placed as the parameter."""
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or dtype_name(value.dtype) not in ITEM_BYTES
    ):
        return False
    if not is_dtensor(value):
        return type(value.detach()) is torch.Tensor
    return is_dtensor(param) and value.shape == param.shape and value.placements == param.placements


def fits_room(value: object, param: torch.Tensor, room: StateTensorSpec) -> bool:
    """Whether captured state can be copied into its room in a layout."""
    if not isinstance(value, torch.Tensor) or not fits_slots(value, param):
        return False
    like = is_dtensor(value) == is_dtensor(param) and local(value).shape == local(param).shape
    held = local(value)
    return (tuple(held.shape), dtype_name(held.dtype), like) == (room.shape, room.dtype, room.elementwise)


def _describe(state: dict[str, Any], param: torch.Tensor, captured: bool) -> StateDescription:
    shape = local(param).shape
    tensors = tuple(
        StateTensorSpec(
            key=key,
            shape=tuple(local(value).shape),
            dtype=dtype_name(value.dtype),
            # For any class: a DTensor's state has to be restored as a DTensor, whether or not it may be cut.
            elementwise=local(value).shape == shape and is_dtensor(value) == is_dtensor(param),
            on_cpu=value.device.type == "cpu" and param.device.type != "cpu",
        )
        for key, value in state.items()
        if (fits_slots(value, param) if captured else isinstance(value, torch.Tensor))
    )
    return StateDescription(tensors, tuple(state))


def try_steps(optimizer: Optimizer, host: bool = False) -> list[str]:
    """Try two steps on stand-ins of each group's smallest parameter; names what the second changes elsewhere.

    `host`: try them in host memory, as another process redoes them. Raises UnsupportedError: it cannot take them.
    """
    found: list[str] = []
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if local(param).numel()]
        if params:
            smallest = min(params, key=lambda param: local(param).numel())
            stand_in = torch.nn.Parameter(torch.ones_like(local(smallest), device="cpu" if host else None))
            _dry_steps(optimizer, stand_in, group, 2, getattr(smallest, "grad_dtype", None) or smallest.dtype, found)
    return found


def why_not_on_host(optimizer: Optimizer) -> str:
    """Why other processes, which have no device, cannot redo its steps, in words; empty if they can."""
    devices = {param.device.type for group in optimizer.param_groups for param in group["params"]}
    if devices == {"cpu"} or is_elementwise(optimizer):
        return ""
    try:
        try_steps(optimizer, host=True)
    except UnsupportedError as error:
        return f"steps of {type(optimizer).__qualname__} need a device: {error}"
    return ""


def _dry_steps(
    optimizer: Optimizer,
    stand_in: torch.nn.Parameter,
    group: dict[str, Any],
    steps: int,
    grad_dtype: torch.dtype,
    changed: list[str] | None = None,
) -> Optimizer:
    """Step a sibling of the optimizer on a stand-in; `changed` gets the names of what the last step changes."""
    gradient = torch.full_like(stand_in, 0.5, requires_grad=False, dtype=grad_dtype)
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    give_gradient(stand_in, gradient.to_sparse() if sparse else gradient)
    with rng.preserved(), without_global_hooks(), without_collectives(), leaving_no_trace(optimizer):
        try:
            settings = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
            own = private_attributes(optimizer)
            if stand_in.device != group["params"][0].device:
                own, settings = on_host(own), on_host(settings)
            clone = rebuild(type(optimizer), own, [{**settings, "params": [stand_in]}])
            for _ in range(steps):
                traces = Traces(optimizer)
                clone.step()
            if changed is not None:
                changed += traces.changed()
        except Exception as error:
            raise UnsupportedError(
                f"expected an optimizer whose step() needs gradients alone, found {type(optimizer).__qualname__}: "
                f"tried on a parameter of shape {list(stand_in.shape)} it raised {error!r}, so it needs a closure, or "
                "a call before step()"
            ) from error
    return clone


_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@contextlib.contextmanager
def without_collectives() -> Iterator[None]:
    """Make this thread's calls of torch.distributed fail.

    A step that communicates cannot be redone on one rank; and in a trial it would wait for ranks that do not take part.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise UnsupportedError("its step communicates with other ranks")
            return original(*args, **kwargs)

        return call

    # In both modules: the package re-exports the functions under names of its own.
    replaced = [(module, name, getattr(module, name)) for module in (dist, distributed_c10d) for name in _COLLECTIVES]
    for module, name, original in replaced:
        setattr(module, name, refusing(original))
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


#: Attributes that torch sets, including its schedulers and gradient scaler.
_NOT_OURS = ("_opt_called", "_warned_capturable", "_zero_grad_profile_name", "_step_count", "grad_scale", "found_inf")


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The instance attributes of the optimizer itself, without hooks, state, groups, methods and modules."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
        and not name.endswith("_hooks")
        and not name.startswith(_NOT_OURS)
        # Schedulers wrap step() in an attribute of the instance.
        and not (callable(value) and (hasattr(type(optimizer), name) or isinstance(value, types.MethodType)))
        and not isinstance(value, nn.Module)
        and getattr(value, "optimizer", None) is not optimizer  # its scheduler, which a step does not use
    }


def own_modules(optimizer: Optimizer) -> dict[str, nn.Module]:
    """Attributes that are modules of other parameters than the optimizer steps."""
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, nn.Module) and not any(id(param) in stepped for param in value.parameters())
    }


def attributes(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Instance attributes (:func:`own_attributes`) that can be sent to another process, and the names of other ones."""
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in own_attributes(optimizer).items():
        if codec.unencodable_paths(value):
            dropped.append(name)
        else:
            kept[name] = value
    return kept, dropped


def private_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Copies of the instance attributes that share nothing with the optimizer. Raises UnsupportedError: one has none.

    Parameters that attributes refer to become empty ones.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            # Not the live parameter, which a step would change, nor a copy, which would double the model.
            memo[id(param)] = torch.nn.Parameter(torch.empty(0))
    copies = {}
    for name, value in own_attributes(optimizer).items():
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise UnsupportedError(
                f"attribute {name!r} of {type(optimizer).__qualname__} cannot be copied ({type(error).__name__}: "
                f"{error}), so its steps cannot be tried on copies"
            ) from error
    return copies
