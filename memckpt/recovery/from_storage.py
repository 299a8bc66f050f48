"""Restore of a state from a store into live tensors: a checkpoint, and the records to redo on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from memckpt.recovery.resharding import Resharding, copy_overlap, refuse_what_cannot_be_cut
from memckpt.recovery.stored_unit import StoredUnit
from memckpt.recovery.target import RestoreTarget, is_restored
from memckpt.state.layout import Layout
from memckpt.state.optimizers import rebuild_like
from memckpt.state.records import RecordMeta
from memckpt.state.redo import GradientSource, OptimizerFactory
from memckpt.state.spec import StateSpec, TensorSpec
from memckpt.state.tensors import fill, local
from memckpt.storage import batch as batches
from memckpt.storage import dcp
from memckpt.storage.base import StoredNames
from memckpt.storage.chain import StoredPoint
from memckpt.storage.format import NodeState, decode_node_state
from memckpt.storage.store import Store


class StoredState:
    """A verified state in a store, as seen by one rank; a rank unknown to it gets the state of another one.

    If the rank holds other shards than are stored for it, its tensors are assembled from all parts of the checkpoint
    (*resharding*).

    Args:
        store: the store.
        point: the state in it.
        rank: the rank that restores it.
        spec: spec of what the rank holds now.

    Attributes:
        point: the state.
        resharded: whether the rank's tensors have to be assembled from other ranks' shards.
        exact: whether training continues as if uninterrupted: the rank existed, with these shards.
        state: metadata of the part that the rank's parameters come from; of several parts, of the first.
        own: metadata of the part with the rank's own state.

    Raises:
        UnsupportedError: the rank needs shards of optimizer state that cannot be cut.
        DamagedStateError, StorageError: the state cannot be read.
    """

    def __init__(self, store: Store, point: StoredPoint, rank: int, spec: StateSpec) -> None:
        checkpoint = point.checkpoint
        self._store = store
        self._records = batches.RecordReader(store)
        self._rank = rank % checkpoint.world_size
        self.point = point
        self._unit: StoredUnit | None = StoredUnit(store, point, checkpoint.part_serving(self._rank), self._records)
        self._resharding: Resharding | None = None
        self.state: NodeState = self._unit.state
        self._own_part = checkpoint.part_of(self._rank)
        self.own = self.state
        if self._own_part != self._unit.part:
            self.own = decode_node_state(store.read(self._own_part.state_path))
        if self.state.spec.sharding() != spec.sharding():
            self._unit = None
            self._resharding = Resharding(store, point, self._records)
            self.state = self._resharding.state
            refuse_what_cannot_be_cut(self.state.spec, spec)
        self.resharded = self._resharding is not None
        self.exact = not self.resharded and point.world_size == spec.world_size

    @property
    def rank_state(self) -> bytes:
        """This rank's state, encoded."""
        last = self.point.last_batch_of(self._rank)
        if last is None:
            return self.own.rank_states[self._rank]
        return self._records.data(last, batches.rank_state_name(self.point.record, self._rank))

    def last_record(self) -> tuple[RecordMeta, GradientSource] | None:
        """The record that is redone last, with its gradients; None if the checkpoint itself has the state."""
        return self._unit.last_record() if self._unit is not None else None

    @torch.no_grad()
    def restore(
        self,
        tensors: dict[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        build: OptimizerFactory | None = None,
    ) -> None:
        """Read the state into the live tensors, in place; optimizer state is created as needed.

        Args:
            tensors: the live tensors by name.
            optimizers: the live optimizers.
            build: makes an optimizer like the live one of an index; None copies the live one.

        Raises:
            DamagedStateError: a file's content is wrong.
            StorageError: a file cannot be read.
        """
        target = RestoreTarget(Layout(self.state.spec), tensors, optimizers)
        build = build or (lambda index, groups: rebuild_like(optimizers[index], groups))
        target.forget_optimizer_state()
        if self._unit is not None:
            self._restore_unit(self._unit, target, build)
        else:
            assert self._resharding is not None
            self._resharding.restore(target, self._by_value(tensors, sharded=False), build)
        self._restore_by_value(tensors)
        target.order_state_keys()

    def _restore_unit(self, unit: StoredUnit, target: RestoreTarget, build: OptimizerFactory) -> None:
        own = {name: local(tensor) for name, tensor in self._by_value(target.tensors, sharded=True).items()}
        if self._own_part == unit.part:
            unit.load(target, own)
        else:
            unit.load(target, {})
            if own:
                dcp.load_into(self._store, self._own_part.base_directory, own)
        if self.point.batches:
            unit.redo(target, build)

    # The rank's own tensors

    def _own_tensors(self, tensors: Mapping[str, torch.Tensor], sharded: bool) -> list[TensorSpec]:
        by_value = self.own.spec.by_value
        return [spec for spec in by_value if (sharded or spec.shard is None) and is_restored(spec, tensors)]

    def _by_value(self, tensors: dict[str, torch.Tensor], sharded: bool) -> dict[str, torch.Tensor]:
        """The rank's own tensors by their names in the store; with `sharded` also its shards of larger ones."""
        names = StoredNames(self.own.spec, self._own_part.format)
        return {names.by_value(spec, self._rank): tensors[spec.name] for spec in self._own_tensors(tensors, sharded)}

    def _restore_by_value(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore them from the last record, if there is one."""
        last = self.point.last_batch_of(self._rank)
        if last is None:
            return
        for spec in self._own_tensors(tensors, sharded=not self.resharded):
            name = batches.by_value_name(self.point.record, self._rank, spec.name)
            value = self._records.tensor(last, name)
            if self.resharded:
                copy_overlap(spec, value, tensors[spec.name])
            else:
                fill(tensors[spec.name], value)
