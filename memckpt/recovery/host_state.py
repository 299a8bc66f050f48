"""Room for a state in host memory, without the model and the optimizers that it belongs to."""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Any, cast

import torch
from torch.optim import Optimizer

from memckpt.state import codec
from memckpt.state.layout import StateSpec, TensorSpec
from memckpt.state.optimizers import dtype_of, rebuild_from_spec
from memckpt.storage.base import StoredNames
from memckpt.storage.format import NodeState


class _Shell:
    """What a restore needs of an optimizer when there is no training: a place for its state."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = collections.defaultdict(dict)
        self.param_groups: list[dict[str, Any]] = []


class HostState:
    """Room for a state, to be filled by a restore.

    Args:
        spec: of the state.
        by_value: whether there is room for by-value tensors, too.
        wanted: names of the tensors for which there is room; None: all.

    Attributes:
        tensors: by name; stepped parameters are Parameters.
        optimizers: what a restore takes for optimizers, with :meth:`build` to redo on them.
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
        """An optimizer like the one of an index that made the state."""
        return rebuild_from_spec(self._spec.optimizers[index], groups)

    def described(self, rank_states: dict[int, bytes]) -> tuple[dict[str, torch.Tensor], NodeState]:
        """All but by-value tensors, by the names they have in a store, and what belongs to them."""
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
