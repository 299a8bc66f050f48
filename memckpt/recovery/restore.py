"""Restore of a held state into live tensors: copied from mapped memory, never a view of it."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.errors import DamagedStateError
from memckpt.memory.region import GenerationRegions
from memckpt.memory.slots import SlotRing
from memckpt.recovery.target import RedoThreads, RestoreTarget, as_parameter, common_device, is_restored, progress
from memckpt.state import codec
from memckpt.state.layout import Layout, Piece
from memckpt.state.optimizers import Missing, rebuild_like
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import OptimizerFactory, RedoGroup, RedoTarget, StagedGradients, tensor_at
from memckpt.state.spec import OwnerSpec, StateTensorSpec
from memckpt.state.tensors import fill, local


class Restorer:
    """Restores one rank from one node's memory. Only reads the regions; a kill at any point is harmless.

    `build` makes an optimizer like the live one of an index; None copies the live one. `record_redo_seconds` is the
    time to redo a record of all parameters at the last restore; None where nothing was redone.
    """

    def __init__(
        self,
        layout: Layout,
        regions: GenerationRegions,
        ring: SlotRing,
        tensors: dict[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        build: OptimizerFactory | None = None,
    ) -> None:
        self._layout = layout
        self._factory = build
        self._slots: mmap.mmap = regions.slots.map
        self._static = regions.static
        self._replica = regions.replica
        self._ring = ring
        self._target = RestoreTarget(layout, tensors, optimizers)
        self._tensors = tensors
        self._optimizers = optimizers
        self._params = self._target.params
        self.record_redo_seconds: float | None = None

    @torch.no_grad()
    def restore(
        self,
        record: int,
        rank: int | None,
        metas: Sequence[bytes],
        missing: Missing,
        plain: bytes,
    ) -> None:
        """Copy the state after `record` into the live tensors, with by-value tensors of `rank` (None: none).

        `metas` are of the window of records up to and including it (lazy), or of records behind the replica's (eager).
        `missing`, `plain`: state that does not exist in the replica, and state that is not a tensor (eager).
        """
        self._target.forget_optimizer_state()
        if self._replica is None:
            self._restore_by_redo(record, [decode_meta(meta) for meta in metas])
        else:
            self._restore_from_replica(missing, plain)
            for meta in metas:
                self._redo_behind_replica(decode_meta(meta))
        self._target.order_state_keys()
        self._restore_static()
        if rank is not None:
            self._restore_by_value(record, rank)

    # Eager: copy the replica

    def _restore_from_replica(self, missing: Missing, plain: bytes) -> None:
        assert self._replica is not None
        places = iter(self._layout.replica_offsets)
        with progress("restoring", self._layout.replica_bytes) as advance:
            for spec, owner, state, tensor in self._target.make_room(missing, plain):
                if owner is None or state is None:
                    offset, states = next(places)
                    held = tensor_at(self._replica.map, offset, spec.tensor.shape, spec.tensor.dtype)
                else:
                    offset = states[owner.optimizer, state.key]
                    held = tensor_at(self._replica.map, offset, state.shape, state.dtype)
                local(tensor).copy_(held)
                advance(held.nbytes)

    def _redo_behind_replica(self, meta: RecordMeta) -> None:
        """Redo one record in the live tensors, as the replica will."""
        self._ring.check(meta.record, self._layout.spec.local_ranks)
        for piece in self._layout.due(meta.record):
            self._target.bring_home(self._anchored(piece, meta))
        redo_targets = self._target.redo_targets()
        gradients = StagedGradients(self._slots, self._layout, common_device(self._params))
        RedoGroup(self._layout, redo_targets, self._build).apply(meta, gradients)
        for redo_target in redo_targets:
            self._target.bring_home(redo_target)

    # Lazy: anchors, then the records since

    def _restore_by_redo(self, record: int, metas: Sequence[RecordMeta]) -> None:
        by_number = {meta.record: meta for meta in metas}
        period = self._layout.spec.period
        expected = range(record - period + 1, record + 1)
        if sorted(by_number) != list(expected):
            raise DamagedStateError(
                f"expected the records {expected.start} to {record}, found {sorted(by_number)}: the window has a hole"
            )
        ranks = self._layout.spec.local_ranks
        for number in expected:
            self._ring.check(number, ranks)
        gradients = StagedGradients(self._slots, self._layout, common_device(self._params))
        clock = _RedoClock()
        with progress("restoring", self._layout.numel * 12) as advance, RedoThreads(self._layout) as threads:
            for anchoring in sorted(by_number.values(), key=lambda meta: meta.record):
                due = self._layout.due(anchoring.record)
                group = self.at_anchors(due, anchoring)
                since = [by_number[number] for number in range(anchoring.anchors_of + 1, record + 1)]
                redo = clock.timed(partial(group.apply_all, since, gradients))
                threads.run(group.redo_targets, redo, partial(self._bring_home, group.redo_targets, advance))
            threads.wait()
            # A parameter is redone from its anchor, of any of the records, on: (T + 1) / 2 records on average.
            self.record_redo_seconds = clock.busy / threads.width * 2 / (period + 1)

    def at_anchors(self, pieces: Sequence[Piece], anchoring: RecordMeta) -> RedoGroup:
        """Pieces in the live tensors' memory, set to the anchors that a record carries, to be redone from there."""
        return RedoGroup(self._layout, [self._anchored(piece, anchoring) for piece in pieces], self._build)

    def _bring_home(self, redo_targets: Sequence[RedoTarget], advance: Callable[[int], None]) -> None:
        for redo_target in redo_targets:
            self._target.bring_home(redo_target)
            advance((redo_target.stop - redo_target.start) * 12)

    def _build(self, index: int, groups: list[dict[str, Any]]) -> Optimizer:
        return self._factory(index, groups) if self._factory else rebuild_like(self._optimizers[index], groups)

    def _anchored(self, piece: Piece, meta: RecordMeta) -> RedoTarget:
        """A redo target in the live parameter's memory, set to its anchor."""
        spec = self._layout.spec.params[piece.param]
        param = self._params[piece.param]
        whole = piece.stop - piece.start == spec.tensor.numel
        target = local(param) if whole else local(param).view(-1)[piece.start : piece.stop]
        absent = set(meta.missing)
        plain = codec.decode(meta.plain) if meta.plain else {}
        base = self._layout.slot_offset(meta.record)
        states: dict[int, dict[str, Any]] = {
            owner.optimizer: dict(plain.get(piece.param, {}).get(owner.optimizer, {})) for owner in spec.owners
        }
        for owner, state, offset in self._layout.piece_parts(piece):
            if owner is None or state is None:
                anchor = tensor_at(self._slots, base + offset, tuple(target.shape), spec.tensor.dtype)
                target.copy_(anchor)
                continue
            if (piece.param, owner.optimizer, state.key) in absent:
                continue
            shape = tuple(target.shape) if state.elementwise else state.shape
            anchor = tensor_at(self._slots, base + offset, shape, state.dtype)
            room = self._room_for(piece, owner, state, whole)
            room.copy_(anchor)
            states[owner.optimizer][state.key] = room
        return RedoTarget(piece.param, piece.start, piece.stop, as_parameter(target), states)

    def _room_for(self, piece: Piece, owner: OwnerSpec, state: StateTensorSpec, whole: bool) -> torch.Tensor:
        """The live tensor's memory for element-wise state; else a tensor private to the redo target."""
        param = self._params[piece.param]
        if not state.elementwise:
            return local(self._target.state_tensor(param, state))
        live = self._optimizers[owner.optimizer].state[param]
        if state.key not in live:
            live[state.key] = self._target.state_tensor(param, state)
        tensor = local(live[state.key])
        return tensor if whole else tensor.view(-1)[piece.start : piece.stop]

    # Static and by-value tensors

    def _restore_static(self) -> None:
        for spec, offset in zip(self._layout.spec.static, self._layout.static_offsets, strict=True):
            assert self._static is not None
            held = tensor_at(self._static.map, offset, spec.shape, spec.dtype)
            fill(self._tensors[spec.name], held)

    def _restore_by_value(self, record: int, rank: int) -> None:
        self._ring.check(record, [rank])
        self._ring.check_by_value(record, [rank])
        base = self._layout.by_value_base(record)
        for spec, offset in zip(self._layout.spec.by_value, self._layout.by_value_offsets(rank), strict=True):
            if not is_restored(spec, self._tensors):
                continue
            held = tensor_at(self._slots, base + offset, spec.shape, spec.dtype)
            fill(self._tensors[spec.name], held)


class _RedoClock:
    """Seconds that redo has kept threads busy, copies and waits left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.busy = 0.0

    def timed(self, redo: Callable[[], None]) -> Callable[[], None]:
        """The same redo, timed in whichever thread it runs."""

        def run() -> None:
            began = time.perf_counter()
            redo()
            took = time.perf_counter() - began
            with self._lock:
                self.busy += took

        return run


def replica_digest(params: Sequence[torch.Tensor], optimizers: Sequence[Optimizer]) -> int:
    """A sum over the bits of parameters and their state, an int below 2^61: equal on ranks with equal replicas."""
    total = 0
    for param in params:
        tensors = [local(param)]
        for optimizer in optimizers:
            if param in optimizer.state:
                state = optimizer.state[param]
                tensors += [local(state[key]) for key in sorted(state) if isinstance(state[key], torch.Tensor)]
        for position, tensor in enumerate(tensors):
            bits = tensor.contiguous().view(-1).view(torch.uint8)
            words = bits[: bits.numel() // 8 * 8].view(torch.int64) if bits.data_ptr() % 8 == 0 else bits
            total = (total * 31 + int(words.sum()) + int(bits[bits.numel() // 8 * 8 :].sum()) + position) % (1 << 61)
    return total
