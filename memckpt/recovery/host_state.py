"""Host memory for a state, without its model and optimizers."""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Any, cast

import torch
from torch.optim import Optimizer

from memckpt.state import codec
from memckpt.state.optimizers import dtype_of, rebuild_from_spec
from memckpt.state.spec import StateSpec, TensorSpec
from memckpt.storage.base import StoredNames
from memckpt.storage.format import NodeState


class _Shell:
    """Stand-in for an optimizer in a restore without training: it only holds state."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = collections.defaultdict(dict)
        self.param_groups: list[dict[str, Any]] = []


class HostState:
    """Host memory for a state, to be filled by a restore.

    Args:
        wanted: names of the tensors to allocate; None: all.

    Attributes:
        tensors: tensors by name; stepped parameters are Parameters.
        optimizers: stand-ins for the optimizers in a restore; :meth:`build` makes real ones for redo.
    """

    def __init__(self, spec: StateSpec, by_value: bool, wanted: Collection[str] | None = None) -> None:
        self._spec = spec

        def room(one: TensorSpec) -> torch.Tensor:
            device = "cpu" if wanted is None or one.name in wanted else "meta"
            return torch.empty(one.shape, dtype=dtype_of(one.dtype), device=device)

        named = [param.tensor for param in spec.params] + list(spec.static)
        self.tensors: dict[str, torch.Tensor] = {
            one.name: torch.nn.Parameter(room(one), requires_grad=False) for one in named
        }
        if by_value:
            self.tensors |= {one.name: room(one) for one in spec.by_value}
        self._shells = [_Shell() for _ in spec.optimizers]

    @property
    def optimizers(self) -> list[Optimizer]:
        return cast("list[Optimizer]", self._shells)

    def build(self, index: int, groups: list[dict[str, Any]]) -> Optimizer:
        """An optimizer like the one of that index that made the state."""
        return rebuild_from_spec(self._spec.optimizers[index], groups)

    def described(self, rank_states: dict[int, bytes]) -> tuple[dict[str, torch.Tensor], NodeState]:
        """All tensors except by-value ones, by their names in a store, and their metadata."""
        spec = self._spec
        names = StoredNames(spec)
        tensors = {names.tensor(one): self.tensors[one.name].data for one in spec.static}
        missing: list[tuple[int, int, str]] = []
        plain: dict[int, dict[int, dict[str, Any]]] = {}
        for index, param in enumerate(spec.params):
            tensor = self.tensors[param.tensor.name]
            tensors[names.tensor(param.tensor)] = tensor.data
            for owner in param.owners:
                kept = self._shells[owner.optimizer].state.get(tensor, {})
                for one in owner.state:
                    value = kept.get(one.key)
                    if isinstance(value, torch.Tensor):
                        tensors[names.state(param, owner.optimizer, one)] = value
                    else:
                        missing.append((index, owner.optimizer, one.key))
                values = {key: value for key, value in kept.items() if not isinstance(value, torch.Tensor)}
                if values:
                    plain.setdefault(index, {})[owner.optimizer] = values
        return tensors, NodeState(spec, tuple(missing), codec.encode(plain) if plain else b"", rank_states)
