"""Putting a checkpoint from a store into live tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.recovery.target import RestoreTarget
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.storage import dcp
from memckpt.storage.base import by_value_name, model_name, state_name
from memckpt.storage.catalog import Checkpoint
from memckpt.storage.format import NodeState, decode_node_state
from memckpt.storage.store import Store


class StoredCheckpoint:
    """A verified checkpoint, seen by one rank; a rank that it does not know is given the state of another one.

    Attributes:
        state: what belongs to the tensors of the part that has the parameters.
        own: the same of the part with the rank's own state.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint, rank: int) -> None:
        self._store = store
        self._rank = rank % checkpoint.world_size
        self.checkpoint = checkpoint
        self._part, self._own_part = checkpoint.full_part(), checkpoint.part_of(self._rank)
        self.state: NodeState = decode_node_state(store.read(self._part.state_path))
        self.own = self.state
        if self._own_part is not self._part:
            self.own = decode_node_state(store.read(self._own_part.state_path))

    @property
    def rank_state(self) -> bytes:
        """This rank's, encoded."""
        return self.own.rank_states[self._rank]

    @torch.no_grad()
    def restore(self, tensors: dict[str, torch.Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Read everything into the live tensors, in place; optimizer state is made as needed."""
        layout = Layout(self.state.spec)
        target = RestoreTarget(layout, tensors, optimizers)
        target.forget_optimizer_state()
        shared = {model_name(spec.name): tensors[spec.name] for spec in layout.spec.static}
        absent = set(self.state.missing)
        plain: dict[int, Any] = codec.decode(self.state.plain) if self.state.plain else {}
        for index, (spec, param) in enumerate(zip(layout.spec.params, target.params, strict=True)):
            shared[model_name(spec.tensor.name)] = param
            for owner in spec.owners:
                values = dict(plain.get(index, {}).get(owner.optimizer, {}))
                for state in owner.state:
                    if (index, owner.optimizer, state.key) not in absent:
                        room = values[state.key] = target.state_tensor(param, state)
                        shared[state_name(owner.optimizer, spec.tensor.name, state.key)] = room
                if values:
                    optimizers[owner.optimizer].state[param] = values
        own_spec, full = self.own.spec, self._own_part.full
        own = {
            by_value_name(spec.name, self._rank, own_spec.local_ranks, full): tensors[spec.name]
            for spec in own_spec.by_value
        }
        if self._own_part is self._part:
            dcp.load_into(self._store, self._part.base_directory, {**shared, **own})
        else:
            dcp.load_into(self._store, self._part.base_directory, shared)
            if own:
                dcp.load_into(self._store, self._own_part.base_directory, own)
        target.order_state_keys()
