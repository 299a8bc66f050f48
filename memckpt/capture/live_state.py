"""The live training state by name: its tensors, and how each is staged.

Three kinds. *Stepped*: parameters that an optimizer steps, covered by gradients and anchors. *By value*: buffers and
averaged models that change with every step, copied into every record. *Static*: everything else, frozen parameters and
large constant buffers, copied once per generation and watched for changes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from memckpt.capture.beside.modules import ModuleTree, fsdp1_wrappers, put_shards_in_place, without_wrappers
from memckpt.capture.beside.presence import GRADIENTS, LeftGradients
from memckpt.capture.beside.strangers import Strangers
from memckpt.capture.by_value import Holder
from memckpt.capture.spec_request import Growth, SpecRequest
from memckpt.errors import UnsupportedError, UsageError
from memckpt.state import codec
from memckpt.state.captured import OptimizerCapture
from memckpt.state.optimizers import (
    DryRuns,
    attributes,
    cannot_be_redone,
    describe_state,
    dtype_name,
    dtype_of,
    is_elementwise,
    is_importable,
    odd_hyperparameters,
    refuse_unsupported,
    try_steps,
    why_not_on_host,
)
from memckpt.state.slices import cut_to_slice
from memckpt.state.spec import (
    ITEM_BYTES,
    GradientEncoding,
    OptimizerSpec,
    OwnerSpec,
    ParamSpec,
    Shard,
    StateSpec,
    TensorSpec,
    is_ours,
)
from memckpt.state.tensors import (
    fill,
    has_usual_strides,
    is_dense,
    is_dtensor,
    local,
    shard_of,
    why_not_held,
    with_strides,
)

#: Buffers up to this size are copied with every record, without checking whether they change.
SMALL_BYTES = 64 << 10
#: Bound of the search for an element that two tensors have in common.
_MOST_WORK = 10_000
_log = logging.getLogger("memckpt")
#: Name of a parameter that no module holds.
_POSITION = re.compile(r"optimizer(\d+)\.group(\d+)\.param(\d+)")


class LiveState:
    """The live tensors, by name, of a model, its optimizers and extra modules; `places`: as for :class:`ModuleTree`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        extra_modules: Mapping[str, nn.Module],
        places: Mapping[str, Callable[[], nn.Module | None]] = MappingProxyType({}),
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.extra_modules = dict(extra_modules)
        self.growth = Growth()
        #: How a parameter's gradients are encoded, where they are averaged in compressed form; None: none is.
        self.encoding_of: Callable[[torch.Tensor], GradientEncoding | None] | None = None
        #: The slices of parameters that were there from the beginning, by name.
        self.slices: Mapping[str, int] = {}
        #: Findings that no record can hold, in words: why a resume of this run is not exact.
        self.not_carried: dict[str, None] = {}
        self.left = LeftGradients(self)
        self.strangers = Strangers(self)
        #: Number of times that the set of tensors has been found to have changed.
        self.changes = 0
        self._group_names: tuple[list[list[list[int]]], list[list[list[str]]]] | None = None
        self._named_params: list[tuple[str, torch.Tensor]] = []
        self._by_name: dict[str, torch.Tensor] = {}
        self._told: set[str] = set()
        self._dry_runs: list[DryRuns] = [{} for _ in self.optimizers]
        self._shards: dict[str, torch.Tensor] = {}
        #: Names of tensors that have appeared and cannot be copied.
        self._unheld: set[str] = set()
        # FSDP1 replaces parameters in the modules temporarily.
        self._flattened: dict[str, torch.Tensor] = {}
        self.put_shards_in_place()
        if fsdp1_wrappers(model):
            self._flattened = dict(self._parameters())
        self._refuse_same_names()
        self._refuse_shapeless()
        self.tree = ModuleTree({"": model, **self.extra_modules}, self.optimizers, places)
        for optimizer in self.optimizers:
            refuse_unsupported(optimizer)
        self._check()
        self._leave_out_unheld()
        # As a new process makes them: a resume has to make from these what there is later.
        self._born = self._kinds()
        self._born_modules = set(self.tree.modules)
        self._born_params = {name for name, tensor in self.tensors().items() if isinstance(tensor, nn.Parameter)}
        # What a module has let go of, its optimizer still has under the place in its group.
        self._born_positions = {position for position, _ in self._optimizer_positions()}
        #: Tensors that have memory in common, as they were when last looked at.
        self.memory: list[list[list[Any]]] = []
        #: Strides that are not the usual ones, by name: now, and of which tensors a new process makes such.
        self.strides: dict[str, tuple[int, ...]] = {}
        self._born_odd = {name for name, one in self._plain() if not _is_usual(one)}
        #: `defaults` of the optimizers, by which groups are made, as a new process makes them.
        self.born_defaults = [dict(getattr(optimizer, "defaults", {})) for optimizer in self.optimizers]
        #: Tensors in groups by optimizer, group and key, as a new process has them when it goes on; None until then.
        self.born_group_tensors: dict[tuple[int, int, str], torch.Tensor] | None = None
        #: Keys of values in parameter groups, as a new process makes them.
        self.group_keys = {key for optimizer in self.optimizers for group in optimizer.param_groups for key in group}
        #: State of optimizers that could not be captured, as text, in the order of discovery.
        self.left_out: dict[str, None] = {}
        #: Optimizers whose steps cannot be redone, with the reason.
        self.not_redoable: dict[int, str] = {}
        for index, optimizer in enumerate(self.optimizers):
            if reason := self._why_not_redone(optimizer):
                self.not_redoable[index] = reason
        redone = [each for index, each in enumerate(self.optimizers) if index not in self.not_redoable]
        #: Names of the classes of optimizers that no other process can make: only a trainer can redo their steps.
        self.redone_only_here = sorted(
            {
                type(each).__qualname__
                for each in redone
                if not is_importable(type(each)) or attributes(each)[1] or why_not_on_host(each)
            }
        )

    def put_shards_in_place(self) -> None:
        """Put shards, not whole parameters, in the modules; to be called on every rank at the same time."""
        for module in (self.model, *self.extra_modules.values()):
            put_shards_in_place(module)

    def _in_place_of(self, name: str, tensor: torch.Tensor, stepped: set[int]) -> torch.Tensor:
        """The shard of `name` if a whole parameter replaces it temporarily, else `tensor`."""
        known = self._shards.get(name)
        if known is not None and id(tensor) not in stepped and known.shape == tensor.shape:
            return known
        if is_dtensor(tensor):
            self._shards[name] = tensor
        return tensor

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters by name."""
        yield from self._flattened.items()
        stepped = {id(param) for _, param in self._optimizer_positions()}
        for found, param in self.model.named_parameters():
            name = without_wrappers(found)
            if name not in self._flattened:
                yield name, self._in_place_of(name, param, stepped)

    def _refuse_same_names(self) -> None:
        """Refuse a module beside the model whose tensors would have names that others have, wrappers left out."""
        named = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        held = {without_wrappers(name): tensor for name, tensor in named}
        for prefix, module in self.extra_modules.items():
            for name, tensor in itertools.chain(module.named_parameters(prefix), module.named_buffers(prefix)):
                if held.setdefault(name, tensor) is not tensor:
                    raise UsageError(
                        f"extra_modules: expected names that nothing else uses, found {prefix!r}: there is another "
                        f"{name}; choose another name"
                    )

    def _refuse_shapeless(self) -> None:
        """Refuse tensors whose elements are not, or not yet, one beside the other."""
        for prefix, module in [("", self.model), *self.extra_modules.items()]:
            for name, tensor in itertools.chain(module.named_parameters(prefix), module.named_buffers(prefix)):
                if nn.parameter.is_lazy(tensor):
                    raise UnsupportedError(
                        f"expected tensors that have their shapes, found {name}, which gets its shape in the first "
                        "forward; run one forward on a batch, or on zeros of its shape, before attach()"
                    )
                if tensor.layout != torch.strided:
                    raise UnsupportedError(
                        f"expected dense tensors, found {name} of layout {tensor.layout}; register its indices and "
                        "values as buffers, and make the sparse tensor of them in forward()"
                    )

    def _check(self) -> None:
        stepped = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if not stepped:
            raise UnsupportedError("expected at least one parameter in the optimizers, found none")
        self._check_ownership()
        for name, tensor in self.tensors().items():
            if is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements):
                raise UnsupportedError(
                    f"{name} is a DTensor with the placements {tensor.placements}: expected Shard or Replicate, since "
                    "no rank holds the value of a partial sum"
                )
            if type(local(tensor)) is not torch.Tensor:
                raise UnsupportedError(
                    f"{name} is a {type(local(tensor)).__name__}, expected plain tensors, or DTensors of plain tensors"
                )
            if dtype_name(tensor.dtype) not in ITEM_BYTES:
                raise UnsupportedError(f"{name} has dtype {tensor.dtype}, which is not supported")

    def _check_ownership(self) -> None:
        """Refuse optimizers of another model. Parameters beside the model are allowed (a learned temperature)."""
        modules = (self.model, *self.extra_modules.values())
        named = {id(param) for module in modules for param in module.parameters()}
        named |= {id(param) for _, param in self._parameters()}
        strangers = [
            index
            for index, optimizer in enumerate(self.optimizers)
            if not any(id(param) in named for group in optimizer.param_groups for param in group["params"])
        ]
        if len(strangers) == len(self.optimizers):
            raise UnsupportedError(
                f"expected an optimizer of the parameters of the {type(self.model).__name__} that is protected, found "
                f"{', '.join(type(each).__name__ for each in self.optimizers)}, which steps none of them; create it "
                "from the model's current parameters (one created before fully_shard() or a copy has others)"
            )
        for index in strangers:
            _log.warning(
                "memckpt: optimizer %d (%s) steps none of the model's parameters: these are stored by position. "
                "If they belong to a module, pass it to attach() in the model or extra_modules, or its buffers are not "
                "stored",
                index,
                type(self.optimizers[index]).__name__,
            )

    def _why_not_redone(self, optimizer: Optimizer) -> str:
        """Reason why an optimizer's steps cannot be redone; empty if none is known."""
        if reason := cannot_be_redone(optimizer):
            return reason
        name = type(optimizer).__qualname__
        try:
            changed = try_steps(optimizer)
        except UnsupportedError as error:
            return str(error)
        if not changed:
            return ""
        self.not_carried[
            f"{changed[0]} changes in each step of {name}, and is not carried; keep it in the state or in a group"
        ] = None
        return f"{name} changes {changed[0]} in each step, which no record holds"

    # Names

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the training state by name, parameters of the model first. Shared tensors appear once."""
        return {name: tensor for name, tensor in self._all_tensors().items() if name not in self._unheld}

    def _all_tensors(self) -> dict[str, torch.Tensor]:
        """Those of :meth:`tensors`, and those that cannot be copied."""
        named = dict(self._parameters())
        named.update((without_wrappers(name), tensor) for name, tensor in self.model.named_buffers())
        known = {id(tensor) for tensor in named.values()}
        for position, param in self._optimizer_positions():
            if id(param) not in known:
                named[position] = param
                known.add(id(param))
        for prefix, module in self.extra_modules.items():
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                if id(tensor) not in known:
                    named[f"{prefix}.{name}"] = tensor
                    known.add(id(tensor))
        for name in sorted(self.left.kept):
            if name in named:
                named[f"{GRADIENTS}.{name}"] = self.left.of(name, named[name])
        return named

    def holders(self) -> dict[str, tuple[Holder, str]]:
        """What holds each parameter, buffer and kept gradient, and under which key."""
        gradients = {f"{GRADIENTS}.{name}": (self.left, name) for name in self.left.kept}
        return {**self.tree.holders(), **gradients}

    def names(self) -> dict[int, str]:
        """Names of :meth:`tensors`, by the `id` of each."""
        return {id(tensor): name for name, tensor in self.tensors().items()}

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter, of the model, the optimizers and the modules beside it, by name."""
        if not self._named_params:
            stepped = {id(param) for _, param in self._optimizer_positions()}
            named = self.tensors().items()
            self._named_params = [one for one in named if isinstance(one[1], nn.Parameter) or id(one[1]) in stepped]
        return self._named_params

    def unheld_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters that cannot be copied now, of those that a new process has, by name."""
        tensors = self._all_tensors() if self._unheld else {}
        return [(name, tensors[name]) for name in sorted(self._unheld & self._born_params) if name in tensors]

    def parameter(self, name: str) -> torch.Tensor | None:
        """The parameter of that name."""
        if not self._by_name:
            self._by_name = dict(self.named_parameters())
        return self._by_name.get(name)

    def names_of_groups(self) -> list[list[list[str]]]:
        """Names of parameters, by optimizer and group."""
        members = [[[*map(id, group["params"])] for group in each.param_groups] for each in self.optimizers]
        if self._group_names is None or self._group_names[0] != members:
            names = self.names()
            found = [
                [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
                for optimizer in self.optimizers
            ]
            self._group_names = (members, found)
        return self._group_names[1]

    def large_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers above :data:`SMALL_BYTES`: copied with every record only once they are seen to change."""
        params = {id(param) for _, param in self._parameters()}
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if id(tensor) not in params and not tensor.requires_grad and local(tensor).nbytes > SMALL_BYTES
        }

    @property
    def sharded(self) -> bool:
        """Whether some tensor lives on a device mesh: FSDP2, HSDP, tensor parallel."""
        return any(is_dtensor(tensor) for tensor in self.tensors().values())

    def pieces(self) -> list[tuple[str, tuple[int, ...], Shard]]:
        """Name, shape and shard of each tensor of which this rank holds a part."""
        found = ((name, tuple(local(tensor).shape), shard_of(tensor)) for name, tensor in self.tensors().items())
        return [(name, shape, shard) for name, shape, shard in found if shard is not None]

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters that are plain tensors, by name."""
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if isinstance(tensor, nn.Parameter) and not is_dtensor(tensor)
        }

    # What appears, grows or goes while training runs

    def _kinds(self) -> dict[str, str | tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor by its name; its name by each further place of the modules that holds it."""
        kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors().items()}
        return {**self._state_dict_keys(every=True), **kinds}

    def follow(self) -> None:
        """Look for tensors that are new, gone or replaced; called in each commit, before anything is described."""
        # Sharded modules swap shards and whole parameters all the time.
        if self._flattened or self._shards or not self.tree.moved():
            return
        self.note_changes()

    def note_changes(self) -> None:
        """Note that other tensors than before may be in the modules."""
        self.changes += 1
        self.extra_modules = {prefix: root for prefix, root in self.tree.roots.items() if prefix}
        self._forget_names()
        self._leave_out_unheld()
        now = self._kinds()
        for name in [one for one in {**self._born, **now} if self._born.get(one) != now.get(one)]:
            if is_ours(name) or name in self.growth.late or (name in self._unheld and name not in self._born):
                continue
            module, _, key = name.rpartition(".")
            there = self.tree.modules.get(module) if module in self._born_modules else None
            if there is not None and name in self._born_params and key not in there._parameters:
                self._tell_once(
                    f"{name} is a parameter no longer, as where a layer is pruned or parametrized: this run can be "
                    "resumed only if the script does the same before attach()"
                )
            elif there is not None or name in self._born_positions:
                self.growth.late.add(name)
            elif name in now:
                self._tell_once(
                    f"{name} has appeared, and a new process does not have it: its state is recorded, and this run can "
                    f"be resumed only if the script makes {module!r} before attach()"
                )
            else:
                self.growth.late.add(name)
                self.not_carried[
                    f"{name} is gone with its module, which a new process has again; leave the module out before "
                    "attach() when the run is resumed"
                ] = None

    def _leave_out_unheld(self) -> None:
        """Find the tensors that cannot be copied now, and say so of each."""
        tensors = self._all_tensors()
        stepped = {id(param) for _, param in self._optimizer_positions()}
        # A model on the meta device is described only.
        described = stepped & {id(one) for one in tensors.values() if one.is_meta}
        unheld = {n: why for n, one in tensors.items() if id(one) not in described and (why := why_not_held(one))}
        self._unheld = {*unheld}
        for name, why in unheld.items():
            if id(tensors[name]) in stepped:
                raise UnsupportedError(
                    f"expected parameters of optimizers to have their values at each commit, found {name} {why}"
                )
            self.not_carried[
                f"{name} is {why}, which cannot be copied, and is as the new process makes it; register its parts as "
                "dense buffers, and make it of them in forward()"
            ] = None

    def _forget_names(self) -> None:
        self._group_names = None
        self._named_params = []
        self._by_name = {}

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning("memckpt: %s", text)

    def describe_late(self) -> list[list[Any]]:
        """What has become of each tensor that has appeared, changed or gone since the process began."""
        if not self.growth.late:
            return []
        tensors, holders, keys = self.tensors(), self.tree.holders(), self._state_dict_keys(every=True)
        found: list[list[Any]] = []
        for name in sorted(self.growth.late - self._unheld):
            tensor = tensors.get(name)
            if tensor is not None and name in holders:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                on_host = tensor.device.type == "cpu"
                persistent = self._is_persistent(name)
                found.append([name, kind, list(tensor.shape), dtype_name(tensor.dtype), on_host, persistent])
            elif tensor is not None:
                found.append([name, "let go", list(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad])
            elif name in keys:
                found.append([name, "tied", keys[name]])
            elif _POSITION.fullmatch(name) is None:  # groups say which parameters without a module are gone
                found.append([name, "none"])
        return found

    def _let_go(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, trained: bool) -> None:
        """Make an optimizer step a parameter of its own where its module holds another one in its place."""
        place = _POSITION.fullmatch(name)
        if place is None or name in self.tensors():
            return
        optimizer, group, position = map(int, place.groups())
        params = self.optimizers[optimizer].param_groups[group]["params"]
        here = params[position]
        params[position] = nn.Parameter(torch.zeros(shape, dtype=dtype, device=here.device), requires_grad=trained)
        self._forget_names()

    def _is_persistent(self, name: str) -> bool:
        path, _, key = name.rpartition(".")
        return path not in self.tree.modules or key not in self.tree.modules[path]._non_persistent_buffers_set

    @torch.no_grad()
    def place_late(self, described: Sequence[Sequence[Any]]) -> None:
        """Make the modules hold tensors as :meth:`describe_late` found them; their values are restored later."""
        # What had no memory then is as this process makes it.
        others = self.growth.late - {name for name, *_ in described}
        kinds = self._kinds() if others else {}
        self.growth.late -= {name for name in others & kinds.keys() if kinds[name] == self._born.get(name)}
        if not described:
            return
        device = next(iter(self.tensors().values())).device
        # What others are tied to is made first.
        for name, kind, *rest in sorted(described, key=lambda one: one[1] == "tied"):
            if kind == "let go":
                self._let_go(name, tuple(rest[0]), dtype_of(rest[1]), rest[2])
                continue
            path, _, key = name.rpartition(".")
            module = self.tree.modules.get(path)
            if module is None:
                continue  # as it is gone from the run that is continued
            there = module._parameters.get(key, module._buffers.get(key))
            if kind == "none":
                for held in (module._parameters, module._buffers):
                    held.update({key: None} if key in held else {})
                continue
            if kind == "tied":
                tensor = self.tensors()[rest[0]]
                dicts: list[dict[str, Any]] = [module._buffers, module._parameters]
                dicts.pop(isinstance(tensor, nn.Parameter))[key] = tensor
                dicts[0].pop(key, None)
                continue
            shape, dtype, on_host, persistent = tuple(rest[0]), dtype_of(rest[1]), rest[2], rest[3]
            other = module._buffers if kind == "parameter" else module._parameters
            own = name in self.tensors()  # and no other name of a tied one
            if own and there is not None and key not in other and (tuple(there.shape), there.dtype) == (shape, dtype):
                continue
            new = torch.zeros(shape, dtype=dtype, device="cpu" if on_host else device)
            other.pop(key, None)
            vars(module).pop(key, None)
            if kind == "buffer":
                module._buffers[key] = new
                (module._non_persistent_buffers_set.discard if persistent else module._non_persistent_buffers_set.add)(
                    key
                )
            elif own and isinstance(there, nn.Parameter):
                there.data = new  # optimizers and ties keep it
            else:
                module._parameters[key] = nn.Parameter(new, requires_grad=new.is_floating_point() or new.is_complex())
        self.tree.moved()
        self.note_changes()

    def _optimizer_positions(self) -> Iterator[tuple[str, nn.Parameter]]:
        for index, optimizer in enumerate(self.optimizers):
            for group_index, group in enumerate(optimizer.param_groups):
                for position, param in enumerate(group["params"]):
                    yield f"optimizer{index}.group{group_index}.param{position}", param

    def _stepped(self) -> dict[int, list[tuple[int, int]]]:
        """(optimizer, group) pairs by the `id` of each parameter that they may step."""
        owners: dict[int, list[tuple[int, int]]] = {}
        for index, optimizer in enumerate(self.optimizers):
            for group_index, group in enumerate(optimizer.param_groups):
                for param in group["params"]:
                    if param.requires_grad or optimizer.state.get(param):
                        owners.setdefault(id(param), []).append((index, group_index))
        return owners

    def look_at_optimizers(self) -> None:
        """Look for what redo could not make: groups with functions, and state in another layout.

        Products with that round otherwise.
        """
        for index, optimizer in enumerate(self.optimizers):
            if is_elementwise(optimizer) or index in self.not_redoable:
                continue
            if odd := odd_hyperparameters(optimizer):
                self.not_redoable[index] = (
                    f"the value of {odd[0]!r} in a group of {type(optimizer).__qualname__} cannot be recorded"
                )
                continue
            for param, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, dict) else ():
                    if type(value) is torch.Tensor and not is_dtensor(param) and not has_usual_strides(value, param):
                        self.not_redoable[index] = (
                            f"state {key!r} of {type(optimizer).__qualname__} is not laid out row by row, and products "
                            "with it depend on that"
                        )
                        return

    # Layout

    def spec(self, request: SpecRequest) -> StateSpec:
        """The layout's spec of the current state; walks the module tree again."""
        self._forget_names()
        owners = self._stepped()
        params: list[ParamSpec] = []
        encodings: list[GradientEncoding | None] = []
        static: list[TensorSpec] = []
        by_value: list[TensorSpec] = []
        model_params = {id(param) for _, param in self._parameters()}
        for name, tensor in self.tensors().items():
            described = TensorSpec(name, tuple(local(tensor).shape), dtype_name(tensor.dtype), shard_of(tensor))
            small_buffer = id(tensor) not in model_params and described.nbytes <= SMALL_BYTES
            if id(tensor) in owners:
                params.append(self._param_spec(described, tensor, owners[id(tensor)], request))
                encodings.append(self._encoding(tensor))
            elif small_buffer or name in self.growth.changing:
                by_value.append(described)
            else:
                static.append(described)
        keys = self._state_dict_keys()
        once = request.held_once(by_value, self.growth.apart)
        slots = request.slots_with(once)
        shared = once if len(request.local_ranks) > 1 else ()
        spec = StateSpec(
            params=tuple(params),
            optimizers=tuple(self._optimizer_spec(index, request) for index in range(len(self.optimizers))),
            static=tuple(static),
            by_value=tuple(by_value),
            mode=request.mode,
            period=request.period,
            slots=slots,
            local_ranks=request.local_ranks,
            world_size=request.world_size,
            replicas=request.replicas,
            every=request.every,
            aliases=tuple((key, name) for key, name in keys.items() if key != name),
            outside=tuple(name for name in self.tensors() if keys.get(name) != name),
            flattened=bool(self._flattened),
            trails=request.trails,
            by_value_slots=request.by_value_slots(by_value, shared, slots),
            shared=shared,
            apart=tuple(sorted(self.growth.apart)),
            encodings=tuple(encodings) if any(encodings) and request.mode != "snapshot" else (),
            late=tuple(sorted(self.growth.late)),
        )
        here = {name for name, _ in self.named_parameters()} if request.slice_count > 1 else ()

        def slice_of(name: str) -> int | None:
            return self.slices.get(name, crc32(name.encode()) % request.slice_count) if name in here else None

        return cut_to_slice(spec, request.slice_number, request.slice_count, slice_of)

    def _encoding(self, param: torch.Tensor) -> GradientEncoding | None:
        if self.encoding_of is None or self.growth.uncompressed:
            return None
        return self.encoding_of(param)

    def _state_dict_keys(self, every: bool = False) -> dict[str, str]:
        """Names of tensors by their key in the model's ``state_dict()``; runs none of the user's hooks.

        Args:
            every: also of modules beside the model, and of what no state_dict() has.
        """
        names = self.names()
        # Whole parameters that replace shards temporarily.
        names.update((id(param), without_wrappers(name)) for name, param in self.model.named_parameters())
        keys = {}
        roots = {"": self.model, **(self.extra_modules if every else {})}
        modules = ((p, *one) for p, root in roots.items() for one in root.named_modules(remove_duplicate=False))
        for prefix, path, module in modules:
            for key, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None and (every or key not in module._non_persistent_buffers_set):
                    full = ".".join(filter(None, (prefix, path, key)))
                    if id(tensor) in names:
                        keys[without_wrappers(full)] = names[id(tensor)]
        return keys

    def _param_spec(
        self, described: TensorSpec, param: torch.Tensor, owners: list[tuple[int, int]], request: SpecRequest
    ) -> ParamSpec:
        specs = []
        here = local(param)
        whole = not here.is_contiguous() or param.dtype not in (torch.float32, torch.float64)
        for index, group_index in owners:
            optimizer = self.optimizers[index]
            group = optimizer.param_groups[group_index]
            captured = request.mode == "snapshot"
            described_state = describe_state(optimizer, param, group, self._dry_runs[index], captured)
            specs.append(OwnerSpec(index, group_index, described_state.tensors, described_state.keys))
            whole = whole or not is_elementwise(optimizer)
        sparse_bytes = self.growth.sparse_bytes.get(described.name, 0)
        # Gradients have the dtype `grad_dtype` of the parameter if it is set (None: any dtype may be assigned).
        said = getattr(param, "grad_dtype", None) or param.dtype
        grad_dtype = self.growth.grad_dtypes.get(described.name) or dtype_name(said)
        other = grad_dtype if grad_dtype != described.dtype else ""
        stride = tuple(here.stride()) if is_dense(here) and not here.is_contiguous() else ()
        return ParamSpec(described, tuple(specs), whole or sparse_bytes > 0 or bool(other), sparse_bytes, other, stride)

    def _optimizer_spec(self, index: int, request: SpecRequest) -> OptimizerSpec:
        optimizer = self.optimizers[index]
        # Captured attributes are in the rank state: they change, and the layout must not.
        kept = attributes(optimizer)[0] if request.mode != "snapshot" else {}
        return OptimizerSpec(
            module=type(optimizer).__module__,
            qualname=type(optimizer).__qualname__,
            attributes=codec.encode(kept),
            group_sizes=tuple(len(group["params"]) for group in optimizer.param_groups),
            sub_steps=self.growth.sub_steps.get(index, 1),
        )

    # Memory that tensors have in common

    def _plain(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are no shards and nothing of ours, by name."""
        kinds = (torch.Tensor, nn.Parameter)
        return [(name, one) for name, one in self.tensors().items() if type(one) in kinds and not is_ours(name)]

    def look_at_memory(self) -> None:
        """Note which tensors have elements in common, and strides; called where one has moved."""
        odd = ((name, one) for name, one in self._plain() if name in self._born_odd or not _is_usual(one))
        self.strides = {name: one.stride() for name, one in odd if is_dense(one)}
        self.memory = self._find_shared()

    @torch.no_grad()
    def share_memory(self, groups: list[list[list[Any]]]) -> None:
        """Give tensors memory in common, or of their own, as a record's :attr:`memory` says; they keep their values."""
        tensors, live = self.tensors(), self._find_shared()
        for group in live:
            # A parameter keeps its memory: others may know it.
            members = sorted((tensors[name] for name, *_ in group), key=lambda one: not isinstance(one, nn.Parameter))
            for tensor in members[1:] if group not in groups else ():
                if not tensor.is_inference():
                    tensor.data = tensor.detach().clone()
        for group in groups:
            if group not in live and all(_fits(tensors.get(name), *place) for name, *place in group):
                _join([(tensors[name], first, stride) for name, first, stride in group])
        now = self._find_shared()
        for group in (one for one in [*groups, *now] if one not in groups or one not in now):
            self.not_carried[
                f"{' and '.join(name for name, *_ in group)} are not in the same memory as in the run that is resumed; "
                "have the modules hold one and the same tensor (`head.weight = embedding.weight`)"
            ] = None

    def lay_out(self, strides: Mapping[str, Sequence[int]]) -> None:
        """Give tensors the strides that they had: convolutions and products of matrices round by them.

        A record has those of all that have others than the usual ones, but of views with gaps.
        """
        for name, one in self._plain() if not self._flattened else ():
            if is_dense(one) or name in strides:
                made = with_strides(one.data, strides.get(name, _usual_strides(one)))
                if made.stride() != one.stride():
                    one.data = made

    def _find_shared(self) -> list[list[list[Any]]]:
        """Groups of tensors that have elements in common: of each its name, its first byte there and its strides."""
        plain = sorted(
            (begin, -end, name, one) for name, one in self._plain() for begin, end in [_extent(one)] if end > begin
        )
        groups: list[list[tuple[int, int, str, torch.Tensor]]] = []
        reached, near = 0, 0
        for one in plain:
            if one[0] >= reached:
                near = len(groups)  # those before end before it begins
            met = [group for group in groups[near:] if any(_overlap(one[3], other) for *_, other in group)]
            apart = [group for group in groups[near:] if all(group is not each for each in met)]
            groups[near:] = [*apart, [*itertools.chain.from_iterable(met), one]]
            reached = max(reached, -one[1])
        return sorted(
            sorted([name, begin - min(group)[0], list(one.stride())] for begin, _, name, one in group)
            for group in groups
            if len(group) > 1
        )

    # State captured beside the tensors in slots

    def capture_optimizers(self, spec: StateSpec) -> list[Any]:
        """State of the optimizers that has no room in the layout, including their attributes."""
        capture = self._optimizer_capture()
        found = capture.capture(spec)
        for text in capture.left_out:
            self.left_out[text] = None
        return found

    def restore_optimizers(self, captured: list[Any], resharded: bool = False) -> None:
        """Restore what :meth:`capture_optimizers` returned; call after all tensors are restored."""
        self._optimizer_capture().restore(captured, resharded)

    def _optimizer_capture(self) -> OptimizerCapture:
        return OptimizerCapture(self.optimizers, self.tensors(), [self.model, *self.extra_modules.values()])


def state_of(optimizer: Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """An optimizer's state for a parameter, without creating an entry."""
    state: dict[str, Any] = optimizer.state.get(param, {})
    return state


def values_of(optimizer: Optimizer) -> list[Any]:
    """The tensors, numbers and other values that an optimizer keeps for its parameters."""
    try:
        return list(itertools.chain.from_iterable(map(dict.values, optimizer.state.values())))
    except TypeError:  # state that is no dict
        return list(optimizer.state.values())


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have an element in common; where that takes long to tell, whether their extents do."""
    (begin, end), (other_begin, other_end) = map(_extent, (one, other))
    if max(begin, other_begin) >= min(end, other_end) or (is_dense(one) and is_dense(other)):
        return max(begin, other_begin) < min(end, other_end)
    places = ((tuple(each.shape), each.stride(), each.element_size()) for each in (one, other))
    return _have_common(other_begin - begin, *places)


def _usual_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides row by row. ``is_contiguous()`` says the same of others where a dimension has one element."""
    return torch.empty(tensor.shape, device="meta").stride()


def _is_usual(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and (1 not in tensor.shape or tensor.stride() == _usual_strides(tensor))


_Places: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], int]"


@functools.lru_cache(maxsize=4096)
def _have_common(distance: int, *places: _Places) -> bool:
    """Whether elements of these shapes, strides and sizes are in one place; the second ones begin `distance` behind."""
    made = []  # of no memory: nothing is read
    for first, (shape, stride, size) in zip((1 << 40, (1 << 40) + distance), places, strict=True):
        there = {"version": 3, "data": (first, True), "typestr": f"|V{size}", "shape": shape}
        strides = tuple(size * one for one in stride)
        made.append(np.asarray(SimpleNamespace(__array_interface__={**there, "strides": strides})))
    may_share: Any = np.may_share_memory  # its types allow no bound
    found: bool = may_share(*made, max_work=_MOST_WORK)
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    return (begin, begin + _span(tensor, tensor.stride())) if tensor.numel() else (0, 0)


def _span(tensor: torch.Tensor, stride: Sequence[int]) -> int:
    """Bytes from the first to the last element, if a tensor had these strides."""
    return (1 + sum((size - 1) * one for size, one in zip(tensor.shape, stride, strict=True))) * tensor.element_size()


def _fits(tensor: torch.Tensor | None, first: int, stride: Sequence[int]) -> bool:
    """Whether a tensor can be put into another memory, at this byte and with these strides."""
    fits = tensor is not None and tensor.dim() == len(stride) and not first % tensor.element_size()
    return fits and tensor is not None and not tensor.is_inference()


def _join(places: Sequence[tuple[torch.Tensor, int, Sequence[int]]]) -> None:
    """Put tensors into one memory, each at its first byte and with its strides; that of one that fills it, if any."""
    size = max(first + _span(tensor, stride) for tensor, first, stride in places)
    made = torch.empty(size, dtype=torch.uint8, device=places[0][0].device)
    fills = (one for one, _, stride in places if one.stride() == tuple(stride) and _span(one, stride) == size)
    whole = next(fills, made)
    start = whole.storage_offset() * whole.element_size()
    for tensor, first, stride in places:
        values, there = tensor.detach().clone(), torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = (start + first) // tensor.element_size()
        tensor.data = there.set_(whole.untyped_storage(), offset, tensor.shape, tuple(stride))
        fill(tensor, values)
