"""The live training state that a restore fills: tensors by name, and optimizer state created as needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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

    def forget_optimizer_state(self) -> None:
        """Drop the optimizers' state for the parameters that are about to be restored."""
        for spec, param in zip(self.layout.spec.params, self.params, strict=True):
            for owner in spec.owners:
                self.optimizers[owner.optimizer].state.pop(param, None)

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
                    live[key] = self.state_tensor(param, spec)
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
