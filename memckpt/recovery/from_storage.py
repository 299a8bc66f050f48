"""Putting a state from a store into live tensors: a checkpoint, and the records to redo on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.recovery.target import RestoreTarget, progress
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.optimizers import rebuild_like
from memckpt.state.records import decode_meta
from memckpt.state.redo import Member, OptimizerFactory, RedoGroup, chunks
from memckpt.storage import batch as batches
from memckpt.storage import dcp
from memckpt.storage.base import by_value_name, model_name, state_name
from memckpt.storage.chain import StoredPoint
from memckpt.storage.format import NodeState, decode_node_state
from memckpt.storage.store import Store


class StoredState:
    """A verified state in a store, seen by one rank; a rank that it does not know is given the state of another one.

    Attributes:
        point: which one.
        state: what belongs to the tensors of the checkpoint's part that has the parameters.
        own: the same of the part with the rank's own state.
    """

    def __init__(self, store: Store, point: StoredPoint, rank: int) -> None:
        checkpoint = point.checkpoint
        self._store = store
        self._records = batches.RecordReader(store)
        self._rank = rank % checkpoint.world_size
        self.point = point
        self._part, self._own_part = checkpoint.full_part(), checkpoint.part_of(self._rank)
        self.state: NodeState = decode_node_state(store.read(self._part.state_path))
        self.own = self.state
        if self._own_part is not self._part:
            self.own = decode_node_state(store.read(self._own_part.state_path))

    @property
    def rank_state(self) -> bytes:
        """This rank's, encoded."""
        last = self.point.last_batch_of(self._rank)
        if last is None:
            return self.own.rank_states[self._rank]
        return self._records.data(last, batches.rank_state_name(self.point.record, self._rank))

    @torch.no_grad()
    def restore(
        self,
        tensors: dict[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        build: OptimizerFactory | None = None,
    ) -> None:
        """Read everything into the live tensors, in place; optimizer state is made as needed.

        Args:
            tensors: the live tensors by name.
            optimizers: the live optimizers.
            build: makes an optimizer like the live one of an index; None copies the live one.

        Raises:
            DamagedStateError: a file does not hold what it should.
            StorageError: one cannot be read.
        """
        layout = Layout(self.state.spec)
        target = RestoreTarget(layout, tensors, optimizers)
        target.forget_optimizer_state()
        self._restore_checkpoint(target)
        if self.point.batches:
            self._redo(target, build or (lambda index, groups: rebuild_like(optimizers[index], groups)))
            self._restore_by_value(tensors)
        target.order_state_keys()

    # The checkpoint

    def _restore_checkpoint(self, target: RestoreTarget) -> None:
        tensors, layout = target.tensors, target.layout
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
                    target.optimizers[owner.optimizer].state[param] = values
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

    # The records

    def _redo(self, target: RestoreTarget, build: OptimizerFactory) -> None:
        layout = target.layout
        members = []
        for index, (spec, param) in enumerate(zip(layout.spec.params, target.params, strict=True)):
            states = {one.optimizer: dict(target.optimizers[one.optimizer].state.get(param, {})) for one in spec.owners}
            parameter = torch.nn.Parameter(param.data, requires_grad=param.is_floating_point() or param.is_complex())
            members.append(Member(index, 0, param.numel(), parameter, states))
        groups = [RedoGroup(layout, chunk, build) for chunk in chunks(members)]
        records = self.point.gradient_batches()
        with progress("redoing records", layout.numel * 4 * len(records)) as advance:
            for record, batch in records:
                meta = decode_meta(self._records.data(batch, batches.meta_name(record)))
                for group in groups:
                    group.apply(meta, partial(self._records.gradient, batch, layout))
                advance(layout.numel * 4)
        for member in members:
            target.bring_home(member)

    def _restore_by_value(self, tensors: dict[str, torch.Tensor]) -> None:
        last = self.point.last_batch_of(self._rank)
        if last is None:
            return
        for spec in self.own.spec.by_value:
            name = batches.by_value_name(self.point.record, self._rank, spec.name)
            tensors[spec.name].data.copy_(self._records.tensor(last, name))
