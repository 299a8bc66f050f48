"""One part of a checkpoint with parameters and optimizer state, and the records to redo on it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import Any

import torch

from memckpt.recovery.redo_threads import RedoThreads
from memckpt.recovery.target import RestoreTarget, common_device, progress
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import (
    SMALL_GROUP_ELEMENTS,
    GradientSource,
    OptimizerFactory,
    RedoGroup,
    RedoTarget,
    chunks,
)
from memckpt.state.spec import ParamSpec
from memckpt.state.tensors import local
from memckpt.storage import batch as batches
from memckpt.storage import dcp
from memckpt.storage.base import StoredNames
from memckpt.storage.chain import StoredPoint
from memckpt.storage.format import NodeState, Part, decode_node_state
from memckpt.storage.store import Store


class StoredUnit:
    """The state of a node's ranks that hold the same shards; it can be restored into any of these ranks."""

    def __init__(self, store: Store, point: StoredPoint, part: Part, records: batches.RecordReader) -> None:
        self._store = store
        self._point = point
        self._records = records
        self.part = part
        self.state: NodeState = decode_node_state(store.read(part.state_path))
        self.layout = Layout(self.state.spec)
        self.names = StoredNames(self.state.spec)

    def load(self, target: RestoreTarget, also: dict[str, torch.Tensor], wanted: Collection[int] | None = None) -> None:
        """Read the checkpoint's parameters, static tensors and optimizer state.

        Args:
            target: the live state, in this unit's layout.
            also: other tensors of the part, by their names in the store.
            wanted: indices of parameters to read, without others and without static tensors; None: all.
        """
        tensors = dict(also)
        if wanted is None:
            static = self.layout.spec.static
            tensors |= {self.names.tensor(spec): local(target.tensors[spec.name]) for spec in static}
        plain = plain_state(self.state)
        absent = set(self.state.missing)
        for index, spec, param in self._params(target, wanted):
            tensors[self.names.tensor(spec.tensor)] = local(param)
            for owner in spec.owners:
                values = dict(plain.get(index, {}).get(owner.optimizer, {}))
                for state in owner.state:
                    if (index, owner.optimizer, state.key) not in absent:
                        room = values[state.key] = target.state_tensor(param, state)
                        tensors[self.names.state(spec, owner.optimizer, state)] = local(room)
                if values:
                    target.optimizers[owner.optimizer].state[param] = values
        if tensors:
            dcp.load_into(self._store, self.part.base_directory, tensors, self.names.shards())

    def redo(self, target: RestoreTarget, build: OptimizerFactory, wanted: Collection[int] | None = None) -> None:
        """Redo the records on the loaded state."""
        layout = self.layout
        redo_targets = []
        for index, spec, param in self._params(target, wanted):
            states = {
                one.optimizer: _held(target.optimizers[one.optimizer].state.get(param, {})) for one in spec.owners
            }
            held = local(param)
            parameter = torch.nn.Parameter(held, requires_grad=held.is_floating_point() or held.is_complex())
            redo_targets.append(RedoTarget(index, 0, held.numel(), parameter, states))
        groups = [RedoGroup(layout, chunk, build) for chunk in chunks(redo_targets, SMALL_GROUP_ELEMENTS)]
        device = common_device(one.parameter for one in redo_targets)
        records = self._point.gradient_batches(self.part)
        nbytes = sum(redo_target.stop for redo_target in redo_targets) * 4
        by_batch = [(batch, [record for record, _ in some]) for batch, some in groupby(records, lambda one: one[1])]
        with (
            progress("redoing records", nbytes * len(records)) as advance,
            RedoThreads(layout) as threads,
            closing(self._records.read_in_turn([batch for batch, _ in by_batch])) as batches_read,
        ):
            for batch, (_, numbers) in zip(batches_read, by_batch, strict=True):
                metas = [decode_meta(self._records.data(batch, batches.meta_name(number))) for number in numbers]
                gradients = partial(self._records.gradient, batch, layout, device=device)
                for group in groups:
                    done = sum(one.stop for one in group.redo_targets) * 4 * len(metas)
                    redo = partial(group.apply_all, metas, gradients)
                    threads.run(group.redo_targets, redo, partial(advance, done))
                threads.wait()  # before another batch takes its place
        for redo_target in redo_targets:
            target.bring_home(redo_target)

    def last_record(self) -> tuple[RecordMeta, GradientSource] | None:
        """The record that is redone last, with its gradients; None if the checkpoint itself has the state."""
        redone = self._point.gradient_batches(self.part)
        if not redone:
            return None
        record, batch = redone[-1]
        meta = decode_meta(self._records.data(batch, batches.meta_name(record)))
        return meta, partial(self._records.gradient, batch, self.layout)

    def _params(
        self, target: RestoreTarget, wanted: Collection[int] | None
    ) -> Iterator[tuple[int, ParamSpec, torch.Tensor]]:
        for index, (spec, param) in enumerate(zip(self.layout.spec.params, target.params, strict=True)):
            if wanted is None or index in wanted:
                yield index, spec, param


def _held(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state of one parameter, with this rank's local tensors."""
    return {key: local(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def plain_state(state: NodeState) -> dict[int, Any]:
    """The optimizer state that is not a tensor: {parameter: {optimizer: {key: value}}}."""
    plain: dict[int, Any] = codec.decode(state.plain) if state.plain else {}
    return plain
