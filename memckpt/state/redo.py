"""Redo: advance a state by one record with the user's own optimizer class.

The same code runs in the agent on the replica (eager), else where a state is restored or audited. Staged gradients
are never changed: factors are multiplied into temporaries, so a kill during redo is harmless.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from memckpt.state import ambient, codec, encodings
from memckpt.state.ambient import as_recorded
from memckpt.state.layout import Layout
from memckpt.state.optimizers import dtype_of, may_change_gradients, on_host, without_global_hooks
from memckpt.state.records import GradientOp, RecordMeta, SparseGradient, SubStep
from memckpt.state.spec import ITEM_BYTES
from memckpt.state.tensors import give_gradient, with_strides

OptimizerFactory = Callable[[int, list[dict[str, Any]]], Optimizer]
#: Elements advanced together; bounds the temporaries that factors are multiplied into.
_GROUP_ELEMENTS = 16 << 20
#: The same where groups are advanced side by side: enough of them for all cores.
SMALL_GROUP_ELEMENTS = 1 << 20


class GradientSource(Protocol):
    """Reads staged gradients of records."""

    def __call__(
        self, meta: RecordMeta, sub_step: SubStep, param: int, cut: tuple[int, int] | None = None, /
    ) -> torch.Tensor | None:
        """A gradient, which must not be changed, in host memory or on the parameter's device; None if there was none.

        `cut`: first element, and the one behind the last, of a piece with one dimension; None: all of it.
        """
        ...


def tensor_at(buffer: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor that is a view of `buffer` at byte `offset`; it keeps the mapping alive."""
    numel = prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=dtype_of(dtype))
    return torch.frombuffer(buffer, dtype=dtype_of(dtype), count=numel, offset=offset).view(shape)


class StagedGradients:
    """Reads the gradients of records from a ring of slots; decodes encoded ones on `device`, or in host memory."""

    def __init__(self, buffer: mmap.mmap, layout: Layout, device: torch.device | None = None) -> None:
        self._device = device
        self._buffer = buffer
        self._layout = layout

    def __call__(
        self, meta: RecordMeta, sub_step: SubStep, param: int, cut: tuple[int, int] | None = None
    ) -> torch.Tensor | None:
        if param in sub_step.absent:
            return None
        described = self._layout.spec.params[param]
        spec, dtype = described.tensor, described.grad_dtype
        offset = self._layout.slot_offset(meta.record) + self._layout.gradient_offset(
            sub_step.optimizer, sub_step.index, param
        )
        for sparse in sub_step.sparse:
            if sparse.param == param:
                return self._sparse(sparse, offset, spec.shape, dtype)
        encoding = self._layout.spec.encoding(param)
        if encoding is not None:
            parts = encodings.views(self._buffer, offset, encoding, spec.numel, dtype)
            found = encodings.decode(encoding, parts, spec.numel, dtype_of(dtype), cut, self._device)
            return found.view(spec.shape) if cut is None else found
        if cut is not None:
            return tensor_at(self._buffer, offset + cut[0] * ITEM_BYTES[dtype], (cut[1] - cut[0],), dtype)
        return tensor_at(self._buffer, offset, spec.shape, dtype)

    def _sparse(self, sparse: SparseGradient, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        indices_shape = (sparse.sparse_dim, sparse.nnz)
        indices = tensor_at(self._buffer, offset, indices_shape, "int64")
        offset += prod(indices_shape) * ITEM_BYTES["int64"]
        values = tensor_at(self._buffer, offset, (sparse.nnz, *shape[sparse.sparse_dim :]), dtype)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=sparse.coalesced, check_invariants=False)


def apply_ops(gradient: torch.Tensor, ops: Iterable[GradientOp], param: int) -> torch.Tensor:
    """The gradient that the optimizer used: each recorded change of `param` applied in order, never in place."""
    for op in ops:
        if param not in op.params:
            continue
        operand = codec.decode(op.value)
        if gradient.is_sparse:
            gradient = _with_values(gradient, change_values(op.kind, operand, gradient._values()))
        else:
            gradient = change_values(op.kind, operand, gradient)
    return gradient


def change_values(kind: str, operand: Any, values: torch.Tensor) -> torch.Tensor:
    """`values` after one recorded change, as a new tensor, with the bits and the dtype of a change in place."""
    room = torch.empty_like(values)  # without it a factor would promote values without dimensions
    if kind == "clamp":
        return torch.clamp(values, operand[0], operand[1], out=room)
    # A device rounds a factor in its memory to the gradient's dtype first, and one of the host not. Scalers do not.
    factor: torch.Tensor = operand.to("cpu" if kind == "unscale" else values.device).reshape(())
    if kind in ("mul", "unscale"):
        return torch.mul(values, factor, out=room)
    if kind == "div":
        return torch.div(values, factor, out=room)
    raise ValueError(f"gradient operation: expected 'mul', 'unscale', 'div' or 'clamp', found {kind!r}")


def _with_values(gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        gradient._indices(), values, gradient.shape, is_coalesced=gradient.is_coalesced(), check_invariants=False
    )


@dataclass
class RedoTarget:
    """A parameter, or a piece of one, that redo advances in place; `states`: by optimizer, in that one's form."""

    param: int
    start: int
    stop: int
    parameter: torch.nn.Parameter
    states: dict[int, dict[str, Any]] = field(default_factory=dict)


class RedoGroup:
    """Targets at one record that are advanced together, with one optimizer object for each of the user's optimizers."""

    def __init__(self, layout: Layout, redo_targets: list[RedoTarget], factory: OptimizerFactory) -> None:
        self._layout = layout
        self.redo_targets = redo_targets
        self._factory = factory
        self._optimizers: dict[int, Optimizer] = {}
        self._owned: dict[int, list[RedoTarget]] = {}
        for redo_target in redo_targets:
            for owner in layout.spec.params[redo_target.param].owners:
                self._owned.setdefault(owner.optimizer, []).append(redo_target)

    def _optimizer(self, index: int, hyperparameters: list[dict[str, Any]]) -> Optimizer:
        optimizer = self._optimizers.get(index)
        if optimizer is None:
            groups: list[dict[str, Any]] = [{**group, "params": []} for group in hyperparameters]
            for redo_target in self._owned[index]:
                group = next(
                    o.group for o in self._layout.spec.params[redo_target.param].owners if o.optimizer == index
                )
                groups[group]["params"].append(redo_target.parameter)
            for group_settings in groups:
                group_settings.pop("param_names", None)  # they name the live parameters
            optimizer = self._optimizers[index] = self._factory(index, groups)
        else:
            for group_settings, values in zip(optimizer.param_groups, hyperparameters, strict=True):
                params = group_settings["params"]
                group_settings.clear()
                group_settings.update({**values, "params": params})
                group_settings.pop("param_names", None)
        for redo_target in self._owned[index]:
            # The same dict: state that the optimizer adds appears in the target's. The first of it may come from an
            # anchor.
            state = redo_target.states.setdefault(index, {})
            if state:
                optimizer.state[redo_target.parameter] = state
        return optimizer

    def apply(self, meta: RecordMeta, gradients: GradientSource) -> None:
        """Advance all targets by one record."""
        with without_global_hooks():
            self.apply_all([meta], gradients)

    def apply_all(self, metas: Sequence[RecordMeta], gradients: GradientSource) -> None:
        """Advance all targets by some records; the caller hides the hooks that are registered for all optimizers."""
        for meta in metas:
            for sub_step in meta.sub_steps:
                self._apply_sub_step(meta, sub_step, gradients)

    def stepped(self, sub_step: SubStep) -> Iterator[tuple[RedoTarget, tuple[int, int] | None]]:
        """The targets that a step advances, each with its cut as a :class:`GradientSource` takes it."""
        for redo_target in self._owned.get(sub_step.optimizer, ()):
            whole = redo_target.stop - redo_target.start == self._layout.spec.params[redo_target.param].tensor.numel
            yield redo_target, None if whole else (redo_target.start, redo_target.stop)

    def _apply_sub_step(self, meta: RecordMeta, sub_step: SubStep, gradients: GradientSource) -> None:
        redo_targets = self._owned.get(sub_step.optimizer)
        if not redo_targets:
            return
        device = redo_targets[0].parameter.device.type
        groups = codec.decode(sub_step.groups)
        optimizer = self._optimizer(sub_step.optimizer, on_host(groups) if device == "cpu" else groups)
        changes = may_change_gradients(optimizer)
        homes = [redo_target.parameter.data for redo_target in redo_targets]
        for redo_target in redo_targets:
            self._lay_out(redo_target, sub_step.optimizer)
        for redo_target, cut in self.stepped(sub_step):
            gradient = gradients(meta, sub_step, redo_target.param, cut)
            if gradient is None:
                redo_target.parameter.grad = None
                continue
            used = apply_ops(gradient.to(redo_target.parameter.device), sub_step.ops, redo_target.param)
            if used is gradient and changes:
                used = used.clone()  # the slot's bytes must not change
            give_gradient(redo_target.parameter, _laid_out_as(redo_target.parameter, used))
        # What is redone beside others depends on no setting of the whole process: it may be cut into pieces.
        own_thread = not any(self._layout.spec.params[one.param].whole for one in redo_targets)
        with as_recorded(ambient.decode(sub_step.ambient), device, own_thread):
            optimizer.step()
        for redo_target, home in zip(redo_targets, homes, strict=True):
            unrebind(redo_target.parameter, home)
            redo_target.parameter.grad = None
            state = optimizer.state.get(redo_target.parameter)
            if state is not None:
                redo_target.states[sub_step.optimizer] = state

    def _lay_out(self, redo_target: RedoTarget, optimizer: int) -> None:
        """Have the parameter and its state in memory as in training; what is brought home is in its order again."""
        parameter, stride = redo_target.parameter, self._layout.spec.params[redo_target.param].stride
        if not stride or parameter.stride() == stride:
            return
        parameter.data = with_strides(parameter.data, stride)
        states = redo_target.states[optimizer]
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                states[key] = with_strides(value, stride)


def unrebind(parameter: torch.nn.Parameter, home: torch.Tensor) -> None:
    """Move what a step has left of a parameter into its memory: some classes rebind ``data`` in place of writing it."""
    if parameter.data_ptr() != home.data_ptr():
        home.copy_(parameter.data)
        parameter.data = home


def _laid_out_as(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in the parameter's memory format, as autograd makes it: fused kernels rely on that."""
    if gradient.is_sparse or gradient.stride() == param.stride():
        return gradient
    return torch.empty_like(param, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def chunks(redo_targets: list[RedoTarget], elements: int = _GROUP_ELEMENTS) -> list[list[RedoTarget]]:
    """Targets in groups of a bounded number of elements, each group to be advanced together."""
    found: list[list[RedoTarget]] = []
    size = 0
    for redo_target in redo_targets:
        if not found or size + redo_target.stop > elements:
            found.append([])
            size = 0
        found[-1].append(redo_target)
        size += redo_target.stop
    return found
