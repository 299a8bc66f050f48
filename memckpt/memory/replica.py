"""The replica: the full state in the agent's memory, advanced record by record by a redo thread (eager redo).

Imports torch, so a lazy agent never imports this module.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from memckpt.errors import AgentError
from memckpt.memory.redo_news import RedoNews, ReplicaCopied
from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing
from memckpt.protocol.trainer import Alarm, Credit, Drift
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.optimizers import Missing, beside_tensors, rebuild_from_spec
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import RedoGroup, RedoTarget, StagedGradients, chunks, tensor_at
from memckpt.state.tensors import allowed_rounding, relative_distance

#: Replicas of one agent take turns: together they may use as many threads as one.
_turn = threading.Lock()


class Replica:
    """Owns a redo thread over regions that belong to the caller.

    Records are offered in order; the thread applies them while :meth:`allow` permits, and calls `notify` with credits,
    drift and alarms. It stops at record boundaries only, so the replica is whole whenever :meth:`freeze` has returned.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Region,
        replica: Region,
        ring: SlotRing,
        threads: int,
        notify: Callable[[RedoNews], None],
        generation: int = 0,
    ) -> None:
        torch.set_num_threads(threads)
        self._generation = generation
        self._layout = layout
        self._ring = ring
        self._notify = notify
        self._slots = slots
        self._slots_map = slots.map
        self._replica_map = replica.map
        self._copy_at: tuple[int, Region] | None = None
        self._gradients = StagedGradients(slots.map, layout)
        self._values: list[torch.Tensor] = []
        self._states: list[dict[tuple[int, str], torch.Tensor]] = []
        for param, (value, states) in zip(layout.spec.params, layout.replica_offsets, strict=True):
            self._values.append(tensor_at(replica.map, value, param.tensor.shape, param.tensor.dtype))
            self._states.append(
                {
                    (owner.optimizer, state.key): tensor_at(
                        replica.map, states[owner.optimizer, state.key], state.shape, state.dtype
                    )
                    for owner in param.owners
                    for state in owner.state
                }
            )
        self._groups: list[RedoGroup] = []
        self._redo_targets: list[RedoTarget] = []
        self._condition = threading.Condition()
        self._metas: dict[int, bytes] = {}
        self.applied = 0
        self._limit = 0
        self._frozen = True
        self._busy = False
        self._closing = False
        self._broken: str | None = None
        self.records_applied = 0
        self.seconds_applying = 0.0
        self._thread = threading.Thread(target=self._run, name="memckpt-redo", daemon=True)
        self._thread.start()

    # State in and out

    def begin_at(self, record: int, missing: Missing, plain: bytes) -> None:
        """The regions now hold the state after `record` (written by the trainers); start redo from there."""
        absent = set(missing)
        extra: dict[int, dict[int, dict[str, Any]]] = codec.decode(plain) if plain else {}
        redo_targets = []
        for index, value in enumerate(self._values):
            states: dict[int, dict[str, Any]] = {}
            for owner in self._layout.spec.params[index].owners:
                state = {
                    spec.key: self._states[index][owner.optimizer, spec.key]
                    for spec in owner.state
                    if (index, owner.optimizer, spec.key) not in absent
                }
                state.update(extra.get(index, {}).get(owner.optimizer, {}))
                states[owner.optimizer] = state
            parameter = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
            redo_targets.append(RedoTarget(index, 0, value.numel(), parameter, states))
        with self._condition:
            self._redo_targets = redo_targets
            here = [one for one in redo_targets if not self._layout.spec.params[one.param].tensor.elsewhere]
            self._groups = [RedoGroup(self._layout, chunk, self._build) for chunk in chunks(here)]
            self.applied = self._limit = record
            self._metas.clear()
            self._frozen = False

    def _build(self, index: int, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return rebuild_from_spec(self._layout.spec.optimizers[index], groups)

    def describe_state(self) -> tuple[Missing, bytes]:
        """What of the optimizer state does not exist, and what of it is not a tensor; the replica must be frozen."""
        targets = self._redo_targets
        return beside_tensors(self._layout.spec, lambda index, optimizer: targets[index].states.get(optimizer, {}))

    # Control, from the agent's own thread

    def offer(self, record: int, meta: bytes) -> None:
        with self._condition:
            self._metas[record] = meta
            self._condition.notify_all()

    def allow(self, limit: int) -> None:
        """Let redo go on up to and including record `limit`."""
        with self._condition:
            self._limit = max(self._limit, limit)
            self._condition.notify_all()

    def freeze(self) -> int:
        """Stop at the next record boundary and return the number of the last applied record."""
        with self._condition:
            self._frozen = True
            self._condition.wait_for(lambda: not self._busy)
            return self.applied

    def stands_at(self, record: int) -> bool:
        """Whether it has the state after `record`, and may not go on from there yet."""
        with self._condition:
            return self.applied == self._limit == record and not self._busy

    def advance_to(self, record: int) -> None:
        """Unfreeze, and apply exactly up to `record`. Raises AgentError: redo failed, or a record is not there."""
        with self._condition:
            self._condition.wait_for(lambda: not self._busy)
            missing = [number for number in range(self.applied + 1, record + 1) if number not in self._metas]
            if missing and self._broken is None:
                raise AgentError(f"the replica cannot get to record {record}: record {missing[0]} is not there")
            self._limit = record
            self._frozen = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self.applied >= record or self._broken is not None)
            if self._broken is not None:
                raise AgentError(self._broken)

    def forget_beyond(self, record: int) -> None:
        """Drop what was offered beyond `record`: it belongs to an abandoned timeline."""
        with self._condition:
            self._metas = {number: meta for number, meta in self._metas.items() if number <= record}

    def copy_at(self, record: int, region: Region) -> bool:
        """Have the thread copy the state after `record` and its by-value tensors into a region; False: too late.

        It does so before the credit for the record is given, and notifies ReplicaCopied.
        """
        with self._condition:
            if record <= self.applied + self._busy:
                return False
            self._copy_at = record, region
            return True

    def forget_copy(self) -> None:
        """Copy nothing after all; the region is not touched any more when this returns."""
        with self._condition:
            self._condition.wait_for(lambda: not self._busy)
            self._copy_at = None

    def copy_ahead(self, record: int, region: Region) -> tuple[Missing, bytes]:
        """Make the state after `record` in a region; the frozen replica stays behind. As :meth:`advance_to`.

        Returns :meth:`describe_state` of the copy.
        """
        missing, plain = self._copy(record, region)
        ahead = Replica(self._layout, self._slots, region, self._ring, torch.get_num_threads(), lambda message: None)
        try:
            ahead.begin_at(self.applied, missing, plain)
            for number, meta in self._metas.items():
                ahead.offer(number, meta)
            ahead.advance_to(record)
            ahead.freeze()
            return ahead.describe_state()
        finally:
            ahead.close()

    def close(self) -> None:
        """Stop the thread and let go of all views on the regions."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()
        self._groups, self._redo_targets, self._values, self._states = [], [], [], []
        self._copy_at = None
        del self._gradients, self._slots_map, self._replica_map

    # The redo thread

    def _ready(self) -> bool:
        if self._closing:
            return True
        return (
            not self._frozen and self._broken is None and self.applied < self._limit and self.applied + 1 in self._metas
        )

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(self._ready)
                if self._closing:
                    return
                record = self.applied + 1
                meta = decode_meta(self._metas.pop(record))
                self._busy = True
            problem, copied = None, None
            with _turn:
                started = time.perf_counter()
                try:
                    self._apply(meta)
                except Exception as error:  # whatever it was, training goes on and the trainers are told
                    problem = f"redo of record {record} failed in the agent: {type(error).__name__}: {error}"
                seconds = time.perf_counter() - started
            if problem is None and self._copy_at is not None and self._copy_at[0] == record:
                copied = self._copy_into(record, self._copy_at[1])
            with self._condition:
                self._busy = False
                if problem is None:
                    self.applied = record
                    self.records_applied += 1
                    self.seconds_applying += seconds
                else:
                    self._broken = problem
                if copied is not None:
                    self._copy_at = None
                self._condition.notify_all()
            if copied is not None:
                self._notify(copied)
            self._notify(Credit(record) if problem is None else Alarm(problem))

    def _copy_into(self, record: int, region: Region) -> ReplicaCopied:
        started = time.perf_counter()
        try:
            missing, plain = self._copy(record, region)
        except Exception as error:  # a checkpoint less; what is held in memory is as good as before
            problem = f"the replica was not copied: {type(error).__name__}: {error}"
            return ReplicaCopied(record, region, 0.0, problem=problem)
        return ReplicaCopied(record, region, time.perf_counter() - started, missing, plain)

    def _copy(self, record: int, region: Region) -> tuple[Missing, bytes]:
        layout = self._layout
        room = torch.frombuffer(region.map, dtype=torch.uint8)
        room[: layout.state_bytes].copy_(torch.frombuffer(self._replica_map, dtype=torch.uint8)[: layout.state_bytes])
        nbytes = layout.by_value_bytes
        if nbytes:
            self._ring.check_by_value(record, layout.spec.local_ranks)
            base = layout.by_value_base(record)
            by_value = torch.frombuffer(self._slots_map, dtype=torch.uint8, count=nbytes, offset=base)
            room[layout.state_bytes : layout.state_bytes + nbytes].copy_(by_value)
        return self.describe_state()

    def _apply(self, meta: RecordMeta) -> None:
        self._ring.check(meta.record, self._layout.spec.local_ranks)
        with torch.no_grad():
            self._anchor(meta)
        for group in self._groups:
            group.apply(meta, self._gradients)
        for redo_target in self._redo_targets:
            self._keep_in_replica(redo_target)

    def _keep_in_replica(self, redo_target: RedoTarget) -> None:
        """Optimizers make their state tensors at the first step, some at every step: bring them home."""
        for owner in self._layout.spec.params[redo_target.param].owners:
            state = redo_target.states.get(owner.optimizer, {})
            for spec in owner.state:
                value = state.get(spec.key)
                home = self._states[redo_target.param][owner.optimizer, spec.key]
                if isinstance(value, torch.Tensor) and value.data_ptr() != home.data_ptr():
                    home.copy_(value)
                    state[spec.key] = home

    # Anchors and the audit

    def _anchor(self, meta: RecordMeta) -> None:
        """Overwrite the pieces that this record anchors; measure first by how much they had drifted."""
        missing = set(meta.missing)
        plain: dict[int, dict[int, dict[str, Any]]] = codec.decode(meta.plain) if meta.plain else {}
        worst, where, rounded = 0.0, "", True
        base = self._layout.slot_offset(meta.record)
        for piece in self._layout.due(meta.record):
            redo_target = self._redo_targets[piece.param]
            name = self._layout.spec.params[piece.param].tensor.name
            for owner, spec, offset in self._layout.piece_parts(piece):
                if owner is None or spec is None:
                    home = self._values[piece.param]
                    dtype, cut = self._layout.spec.params[piece.param].tensor.dtype, True
                else:
                    home = self._states[piece.param][owner.optimizer, spec.key]
                    state = redo_target.states.setdefault(owner.optimizer, {})
                    if (piece.param, owner.optimizer, spec.key) in missing:
                        if isinstance(state.get(spec.key), torch.Tensor):
                            worst, where, rounded = float("inf"), f"{name} ({spec.key} is gone)", False
                            del state[spec.key]
                        continue
                    dtype, cut = spec.dtype, spec.elementwise
                    if not isinstance(state.get(spec.key), torch.Tensor):
                        state[spec.key] = home
                target = home.view(-1)[piece.start : piece.stop] if cut else home
                anchor = tensor_at(self._slots_map, base + offset, tuple(target.shape), dtype)
                distance = relative_distance(target, anchor)
                if distance:
                    target.copy_(anchor)
                    ulp = distance / torch.finfo(target.dtype).eps if math.isfinite(distance) else distance
                    is_rounding = distance <= allowed_rounding(dtype)
                    if (not is_rounding, ulp) > (not rounded, worst):
                        worst, where = ulp, name if spec is None else f"{name} ({spec.key})"
                        rounded = is_rounding
            for optimizer, values in plain.get(piece.param, {}).items():
                redo_target.states.setdefault(optimizer, {}).update(values)
        if worst:
            since = meta.record - self._layout.spec.period
            self._notify(Drift(meta.record, worst, where, self._generation, since, rounded=rounded))
