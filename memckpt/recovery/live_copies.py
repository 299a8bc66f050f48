"""Copies of live tensors in host memory, for comparison with a state that is restored over them as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.recovery.comparison import ComparedKind, Comparison
from memckpt.recovery.target import is_restored
from memckpt.state.spec import StateSpec
from memckpt.state.tensors import local


class LiveCopies:
    """The live tensors and the optimizers' state before a restore from storage.

    Storage is read in its own order, and records are redone in place: only at the end do the live tensors have the held
    state.
    """

    def __init__(
        self,
        state: StateSpec,
        own: StateSpec,
        tensors: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._state = state
        self._tensors = tensors
        self._optimizers = optimizers
        kinds: dict[str, ComparedKind] = {param.tensor.name: "parameter" for param in state.params}
        kinds |= dict.fromkeys((spec.name for spec in state.static), "frozen")
        kinds |= dict.fromkeys((spec.name for spec in own.by_value if is_restored(spec, tensors)), "buffer")
        self._kinds = kinds
        self._copies = {name: _copy(tensors[name]) for name in kinds}
        #: By name of the parameter and index of the optimizer.
        self._states = {
            (param.tensor.name, owner.optimizer): {
                key: _copy(value) if isinstance(value, torch.Tensor) else value
                for key, value in optimizers[owner.optimizer].state.get(tensors[param.tensor.name], {}).items()
            }
            for param in state.params
            for owner in param.owners
        }

    @torch.no_grad()
    def compare(self, comparison: Comparison) -> None:
        """Compare the copies with the live tensors; each copy is freed after its comparison."""
        for name, kind in self._kinds.items():
            comparison.tensor(kind, name, self._copies.pop(name), local(self._tensors[name]))
        for (name, index), copies in self._states.items():
            held: dict[str, Any] = self._optimizers[index].state.get(self._tensors[name], {})
            comparison.states(name, copies, held, apart=())
        self._states.clear()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).to("cpu", copy=True)


def copied_bytes(state: StateSpec, own: StateSpec) -> int:
    """Upper bound of the copies' host memory, in bytes."""
    params = sum(
        param.tensor.nbytes + sum(one.nbytes for owner in param.owners for one in owner.state) for param in state.params
    )
    return params + sum(spec.nbytes for spec in (*state.static, *own.by_value))
