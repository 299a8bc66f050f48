"""The live training state that a restore fills: tensors by name, and optimizer state created as needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.state.layout import Layout
from memckpt.state.redo import RedoTarget
from memckpt.state.spec import StateTensorSpec, TensorSpec, is_ours
from memckpt.state.tensors import is_like, local

#: Bytes from which on a copy takes long enough for a progress bar.
_PROGRESS_BYTES = 1 << 30


def is_restored(spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a held by-value tensor is restored: not what compression had left out, where nothing like it is live."""
    return not is_ours(spec.name) or is_like(tensors.get(spec.name), spec)


def common_device(params: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of all parameters; None if they are on several."""
    devices = {param.device for param in params}
    return devices.pop() if len(devices) == 1 else None


class RestoreTarget:
    """Live tensors and optimizers, in the layout of the state that is restored into them."""

    def __init__(self, layout: Layout, tensors: dict[str, torch.Tensor], optimizers: Sequence[Optimizer]) -> None:
        self.layout = layout
        self.tensors = tensors
        self.optimizers = optimizers
        self.params = [tensors[param.tensor.name] for param in layout.spec.params]
        #: The previous state, by parameter and optimizer; kept only for a comparison.
        self.before: dict[tuple[int, int], dict[str, Any]] = {}

    def forget_optimizer_state(self, keep: bool = False) -> None:
        """Drop the optimizers' state for the parameters that are about to be restored.

        Args:
            keep: hold it in `before`. Its element-wise tensors are then restored into, not allocated anew: a second
                copy of all of them may not fit on the device.
        """
        for index, (spec, param) in enumerate(zip(self.layout.spec.params, self.params, strict=True)):
            for owner in spec.owners:
                state = self.optimizers[owner.optimizer].state.pop(param, None)
                if keep and state is not None:
                    self.before[index, owner.optimizer] = dict(state)

    def order_state_keys(self) -> None:
        """Order the keys of the optimizers' state as the optimizers create them: state_dict() shows the order."""
        orders: dict[tuple[int, int], list[str]] = {
            (id(param), owner.optimizer): list(owner.keys)
            for spec, param in zip(self.layout.spec.params, self.params, strict=True)
            for owner in spec.owners
        }
        for index, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    found = optimizer.state.pop(param, None)
                    if found is not None:
                        order = orders.get((id(param), index), [])
                        optimizer.state[param] = {**{key: found[key] for key in order if key in found}, **found}

    def state_before(self, index: int, optimizer: int, spec: StateTensorSpec) -> torch.Tensor | None:
        """The previous element-wise state, to be restored into; None if there is none, or it does not fit."""
        found = self.before.get((index, optimizer), {}).get(spec.key)
        if not spec.elementwise or not isinstance(found, torch.Tensor):
            return None
        held = local(found)
        return found if (tuple(held.shape), held.dtype) == (spec.shape, getattr(torch, spec.dtype)) else None

    def room_for(self, index: int, optimizer: int, spec: StateTensorSpec) -> torch.Tensor:
        """The tensor that a state of the parameter with that index is restored into."""
        before = self.state_before(index, optimizer, spec)
        return before if before is not None else self.state_tensor(self.params[index], spec)

    def state_tensor(self, param: torch.Tensor, spec: StateTensorSpec) -> torch.Tensor:
        """Uninitialised room for state, about to be overwritten. A DTensor if it is element-wise and `param` is one."""
        dtype = getattr(torch, spec.dtype)
        if spec.elementwise:
            return torch.empty_like(param, dtype=dtype, requires_grad=False)
        return torch.empty(spec.shape, dtype=dtype, device="cpu" if spec.on_cpu else param.device)

    def bring_home(self, redo_target: RedoTarget) -> None:
        """Move the results of redo that are in tensors of its own into the live optimizer's state."""
        param = self.params[redo_target.param]
        whole = redo_target.stop - redo_target.start == local(param).numel()
        specs = {(o.optimizer, s.key): s for o in self.layout.spec.params[redo_target.param].owners for s in o.state}
        for optimizer, values in redo_target.states.items():
            for key, value in values.items():
                live = self.optimizers[optimizer].state[param]
                spec = specs.get((optimizer, key))
                if not isinstance(value, torch.Tensor) or spec is None or not spec.elementwise:
                    live[key] = value
                    continue
                if key not in live:
                    live[key] = self.room_for(redo_target.param, optimizer, spec)
                home = local(live[key]) if whole else local(live[key]).view(-1)[redo_target.start : redo_target.stop]
                if home.data_ptr() != value.data_ptr():
                    home.copy_(value)


@contextmanager
def progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal if there is much to copy; yields a function that takes the bytes done."""
    if nbytes < _PROGRESS_BYTES or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"memckpt: {what}", total=nbytes)
        yield lambda amount: bar.advance(task, amount)
