"""Restore of a state from a store into live tensors: a checkpoint, and the records to redo on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from math import prod

import msgspec
import torch
from torch.optim import Optimizer

from memckpt.errors import DamagedStateError, UnsupportedError
from memckpt.recovery.restore import HostState, RedoThreads, RestoreTarget, common_device, is_restored, progress
from memckpt.state.layout import Layout
from memckpt.state.optimizers import rebuild_like
from memckpt.state.records import RankGroup, RecordMeta, decode_meta
from memckpt.state.redo import (
    SMALL_GROUP_ELEMENTS,
    GradientSource,
    OptimizerFactory,
    RedoGroup,
    chunks,
)
from memckpt.state.spec import ParamSpec, Shard, StateSpec, StateTensorSpec, TensorSpec
from memckpt.state.tensors import fill, local, shard_of
from memckpt.storage import batch as batches
from memckpt.storage import dcp
from memckpt.storage.catalog import Checkpoint
from memckpt.storage.chain import StoredPoint
from memckpt.storage.format import NodeState, Part, decode_node_state
from memckpt.storage.node_files import StoredNames, join_states, write_commit, write_files
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
        """Read the checkpoint's parameters, static tensors and optimizer state, and `also` tensors by stored name.

        `wanted` are indices of the parameters to read, without others and without static tensors; None: all.
        """
        tensors = dict(also)
        if wanted is None:
            static = [spec for spec in self.layout.spec.static if not spec.elsewhere]
            tensors |= {self.names.tensor(spec): local(target.tensors[spec.name]) for spec in static}
        tensors |= {name: local(tensor) for name, tensor in self.make_room(target, wanted).items()}
        if tensors:
            dcp.load_into(self._store, self.part.base_directory, tensors, self.names.shards())

    def make_room(self, target: RestoreTarget, wanted: Collection[int] | None = None) -> dict[str, torch.Tensor]:
        """Parameters, and room for the optimizer state that there is, by their names in the store."""
        return _make_room(target, self.state, self.names, wanted)

    def redo(self, target: RestoreTarget, build: OptimizerFactory, wanted: Collection[int] | None = None) -> None:
        """Redo the records on the loaded state."""
        layout = self.layout
        redo_targets = target.redo_targets(wanted)
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


def _make_room(
    target: RestoreTarget, state: NodeState, names: StoredNames, wanted: Collection[int] | None = None
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for spec, owner, part, tensor in target.make_room(state.missing, state.plain, wanted):
        if owner is None or part is None:
            found[names.tensor(spec.tensor)] = tensor
        else:
            found[names.state(spec, owner.optimizer, part)] = tensor
    return found


class StoredState:
    """A verified state in a store, as seen by one rank; a rank unknown to it gets the state of another one.

    If the rank holds other shards than are stored for it, its tensors are assembled from all parts of the checkpoint
    (*resharding*); optimizer state that cannot be cut is refused. `exact`: training continues as if uninterrupted.
    `state`: metadata of the (first) part that the rank's parameters come from; `own`: of that with its own state.
    """

    def __init__(self, store: Store, point: StoredPoint, rank: int, spec: StateSpec) -> None:
        checkpoint = point.checkpoint
        self._store = store
        self._records = batches.RecordReader(store)
        self._rank = rank % checkpoint.world_size
        self.point = point
        self._unit: StoredUnit | None = StoredUnit(store, point, checkpoint.part_serving(self._rank), self._records)
        self._other_shards: OtherShards | None = None
        self.state: NodeState = self._unit.state
        self._own_part = checkpoint.part_of(self._rank)
        self.own = self.state
        if self._own_part != self._unit.part:
            self.own = decode_node_state(store.read(self._own_part.state_path))
        if self.state.spec.sharding() != spec.sharding():
            self._other_shards = OtherShards(store, point, self._records, self._unit)
            self._unit = None
            self.state = self._other_shards.state
            refuse_what_cannot_be_cut(self.state.spec, spec)
        self.resharded = self._other_shards is not None
        #: Nodes that hold slices hold the same state as those that hold all of it.
        sliced = max(self.state.spec.slice_count, spec.slice_count) > 1
        cut = not sliced or any(map(_is_cut, [*self.state.spec.tensors(), *spec.tensors()]))
        self.exact = not (self.resharded and cut) and point.world_size == spec.world_size

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
        """Read the state into the live tensors, in place; optimizer state is created as needed."""
        target = RestoreTarget(Layout(self.state.spec), tensors, optimizers)
        build = build or (lambda index, groups: rebuild_like(optimizers[index], groups))
        target.forget_optimizer_state()
        if self._unit is not None:
            self._restore_unit(self._unit, target, build)
        elif self._other_shards is not None:
            self._other_shards.restore(target, self._by_value(tensors, sharded=False), build)
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
        names = StoredNames(self.own.spec)
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


#: The overlap of two shards: slices of the one, and of the other.
_Overlap = tuple[tuple[slice, ...], tuple[slice, ...]]


def refuse_what_cannot_be_cut(stored: StateSpec, live: StateSpec) -> None:
    """Refuse optimizer state that belongs to a shard as a whole: it fits no other shard."""
    now = {param.tensor.name: param.tensor for param in live.params} | {one.name: one for one in live.static}
    for param in stored.params:
        name = param.tensor.name
        if not (_is_cut(param.tensor) or (name in now and _is_cut(now[name]))):
            continue
        for owner in param.owners:
            for state in owner.state:
                if not state.elementwise and prod(state.shape) > 1:
                    optimizer = stored.optimizers[owner.optimizer].qualname
                    raise UnsupportedError(
                        f"the state {state.key!r} that {optimizer} keeps for {name} cannot be assembled for other "
                        f"shards of it: expected a single value, or one for each element, found {list(state.shape)}; "
                        "resume with the number of ranks and the sharding that the run had, or use resume='never' to "
                        "start over"
                    )


def _is_cut(tensor: TensorSpec) -> bool:
    return tensor.shape != tensor.whole_shape and not tensor.elsewhere


class OtherShards:
    """A stored state of which a rank needs other shards than are stored for it.

    `state` is of the first rank's part; everything that is not sharded comes from there.
    """

    def __init__(self, store: Store, point: StoredPoint, records: batches.RecordReader, opened: StoredUnit) -> None:
        self._store = store
        self._point = point
        self._records = records
        #: Parts that are opened, by path: each one's state is read and decoded once.
        self._units = {opened.part.state_path: opened}
        self._first = self._unit(point.checkpoint.part_serving(0))
        self.state = join_states(point.checkpoint, lambda part: self._unit(part).state)
        self._taken: set[tuple[str, RankGroup]] = set()
        self._filled: Counter[tuple[str, int, str]] = Counter()

    def _unit(self, part: Part) -> StoredUnit:
        path = part.state_path
        if path not in self._units:
            self._units[path] = StoredUnit(self._store, self._point, part, self._records)
        return self._units[path]

    def restore(self, target: RestoreTarget, own: Mapping[str, torch.Tensor], build: OptimizerFactory) -> None:
        """Fill the live tensors and create the optimizer state."""
        redone = bool(self._point.batches)
        self._load(target, own, with_params=not redone)
        if redone:
            for part in self._point.checkpoint.full_parts:
                unit = self._unit(part)
                self._redo(unit, target, build)
                self._take_by_value(unit, target.tensors)
                if unit is not self._first:
                    del self._units[part.state_path]  # states of all nodes need not be held at once
            self._check_filled(target)

    # Tensors in the checkpoint

    def _load(self, target: RestoreTarget, own: Mapping[str, torch.Tensor], with_params: bool) -> None:
        names = self._first.names
        live: dict[str, torch.Tensor] = dict(own)
        for spec in self.state.spec.static:
            live[names.tensor(spec)] = target.tensors[spec.name]
        for spec in self.state.spec.by_value:
            if spec.shard is not None:
                live[names.by_value(spec, 0)] = target.tensors[spec.name]
        if with_params:
            live |= _make_room(target, self.state, names)
        shards = {name: shard for name, tensor in live.items() if (shard := shard_of(tensor)) is not None}
        checkpoint = self._point.checkpoint
        tensors = {name: local(tensor) for name, tensor in live.items()}
        dcp.load_into(self._store, checkpoint.directory, tensors, shards, checkpoint.tensor_nodes)

    # Parameters that have to be redone

    def _redo(self, unit: StoredUnit, target: RestoreTarget, build: OptimizerFactory) -> None:
        """Redo the parameters of a part that this rank needs, and copy their overlap."""
        params = unit.state.spec.params
        wanted = [index for index, spec in enumerate(params) if self._is_wanted(unit, spec.tensor, target.tensors)]
        if not wanted:
            return
        host = HostState(unit.state.spec, by_value=False, wanted={params[index].tensor.name for index in wanted})
        redone = RestoreTarget(unit.layout, host.tensors, host.optimizers)
        unit.load(redone, {}, wanted)
        unit.redo(redone, build, wanted)
        for index in wanted:
            self._copy_redone(params[index], redone, target)

    def _is_wanted(self, unit: StoredUnit, spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> bool:
        place = spec.name, spec.shard.offsets if spec.shard is not None else (0,) * len(spec.shape)
        if place in self._taken:
            return False  # another part has it as well; for unsharded tensors the first part counts
        live = tensors[spec.name]
        if _overlap(spec, live) is None and (local(live).numel() or unit is not self._first):
            return False
        self._taken.add(place)
        return True

    def _copy_redone(self, spec: ParamSpec, redone: RestoreTarget, target: RestoreTarget) -> None:
        name = spec.tensor.name
        source, live = redone.tensors[name], target.tensors[name]
        overlap = _overlap(spec.tensor, live)
        self._copy((name, -1, ""), overlap, source, live)
        for owner in spec.owners:
            values = redone.optimizers[owner.optimizer].state.get(source, {})
            if not values:
                continue
            specs: dict[str, StateTensorSpec] = {state.key: state for state in owner.state}
            mine = target.optimizers[owner.optimizer].state[live]
            for key, value in values.items():
                state = specs.get(key)
                if not isinstance(value, torch.Tensor) or state is None:
                    mine.setdefault(key, value)
                elif state.elementwise:
                    if key not in mine:
                        mine[key] = target.state_tensor(live, state)
                    self._copy((name, owner.optimizer, key), overlap, value, mine[key])
                elif key not in mine:
                    mine[key] = target.state_tensor(live, state)
                    mine[key].copy_(value)

    def _copy(
        self, what: tuple[str, int, str], overlap: _Overlap | None, source: torch.Tensor, live: torch.Tensor
    ) -> None:
        self._filled[what] += 0
        if overlap is not None:
            piece = source.detach()[overlap[0]]
            local(live)[overlap[1]].copy_(piece)
            self._filled[what] += piece.numel()

    def _check_filled(self, target: RestoreTarget) -> None:
        """Check that every element was filled: others would keep their old value, or have a random one."""
        for param in self.state.spec.params:
            self._filled[param.tensor.name, -1, ""] += 0
        for (name, _, key), elements in self._filled.items():
            expected = local(target.tensors[name]).numel()
            if elements != expected:
                what = f"{key} of {name}" if key else name
                raise DamagedStateError(
                    f"step {self._point.step}: expected {expected} elements of {what} in the parts of the checkpoint, "
                    f"found {elements}"
                )

    def _take_by_value(self, unit: StoredUnit, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the sharded tensors that records carry by value."""
        rank = unit.part.served[0]
        last = self._point.last_batch_of(rank)
        for spec in unit.state.spec.by_value:
            if last is not None and spec.shard is not None:
                name = batches.by_value_name(self._point.record, rank, spec.name)
                copy_overlap(spec, self._records.tensor(last, name), tensors[spec.name])


def copy_overlap(stored: TensorSpec, source: torch.Tensor, live: torch.Tensor) -> None:
    """Copy the overlap of a stored shard and the live one."""
    overlap = _overlap(stored, live)
    if overlap is not None:
        fill(local(live)[overlap[1]], source[overlap[0]])


def _overlap(stored: TensorSpec, live: torch.Tensor) -> _Overlap | None:
    """The overlap of a stored shard and the live one; None if they are disjoint."""
    ours, theirs = [], []
    held = local(live)
    offsets = _offsets(shard_of(live), held.dim())
    for at, size, live_at, live_size in zip(
        _offsets(stored.shard, len(stored.shape)), stored.shape, offsets, held.shape, strict=True
    ):
        start, stop = max(at, live_at), min(at + size, live_at + live_size)
        if start >= stop:
            return None
        ours.append(slice(start - at, stop - at))
        theirs.append(slice(start - live_at, stop - live_at))
    return tuple(ours), tuple(theirs)


def _offsets(shard: Shard | None, dimensions: int) -> tuple[int, ...]:
    return shard.offsets if shard is not None else (0,) * dimensions


def as_checkpoint(store: Store, point: StoredPoint, into: Store) -> Checkpoint:
    """Write a state that needs redo as another checkpoint: rank 0's, with whole tensors."""
    part = point.checkpoint.part_serving(0)
    whole = join_states(point.checkpoint, lambda one: decode_node_state(store.read(one.state_path)))
    spec = unsharded(whole.spec)
    stored = StoredState(store, point, 0, spec)
    host = HostState(spec, by_value=True)
    stored.restore(host.tensors, host.optimizers, host.build)
    tensors, state = host.described({0: stored.rank_state})
    names = StoredNames(spec)
    tensors |= {names.by_value(one, 0): host.tensors[one.name] for one in spec.by_value}
    written = msgspec.structs.replace(
        part,
        timeline=point.timeline,
        record=point.record,
        step=point.step,
        created=time.time(),
        world_size=1,
        ranks=(0,),
        serves=(0,),
        content=spec.content(),
    )
    written = write_files(into, written, state, tensors)
    write_commit(into, written)
    return Checkpoint(point.timeline, point.record, {part.node: written})


def unsharded(spec: StateSpec) -> StateSpec:
    """The spec of a single rank that holds the whole of each tensor of this state."""
    replace = msgspec.structs.replace

    def tensor(one: TensorSpec) -> TensorSpec:
        return replace(one, shape=one.whole_shape, shard=None)

    def param(one: ParamSpec) -> ParamSpec:
        shape = one.tensor.whole_shape
        owners = tuple(
            replace(
                owner, state=tuple(replace(each, shape=shape) if each.elementwise else each for each in owner.state)
            )
            for owner in one.owners
        )
        return replace(one, tensor=tensor(one.tensor), owners=owners)

    return replace(
        spec,
        params=tuple(param(one) for one in spec.params),
        static=tuple(tensor(one) for one in spec.static),
        by_value=tuple(tensor(one) for one in spec.by_value),
        local_ranks=(0,),
        world_size=1,
        replicas=(),
        slice_number=0,
        slice_count=1,
    )
