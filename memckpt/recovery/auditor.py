"""The auditor: the process that redoes pieces of the state while training runs.

Slots hold a piece's anchor at some record, its anchor T records later, and all gradients in between. This process
redoes the piece from the one to the other as a restore would, and compares. What it reads may be written over: stamps
are checked after each copy, and an audit that comes too late is thrown away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memckpt.errors import DamagedStateError
from memckpt.memory.region import GenerationRegions, Region
from memckpt.memory.slots import SlotRing
from memckpt.processes.helper import AgentEnd, step_back
from memckpt.processes.launch import extend_search_path
from memckpt.protocol.audit import Audit, Audited, AuditedGeneration, AuditorReady, ForgetAudits
from memckpt.protocol.channel import AuditorChannel
from memckpt.protocol.trainer import Arithmetic
from memckpt.recovery.restore import HostState, Restorer
from memckpt.state import codec
from memckpt.state.layout import Layout, Piece
from memckpt.state.optimizers import dtype_of
from memckpt.state.records import RecordMeta, SubStep, decode_meta
from memckpt.state.redo import RedoGroup, RedoTarget, StagedGradients
from memckpt.state.tensors import same_bits, ulp_distance

#: Units of a dtype's precision, for each root of a number of steps, that other kernels' rounding explains.
_ROUNDING = 32.0


@dataclass
class _Running:
    """An audit on its way: pieces that stand before record `next`."""

    key: int
    first: int
    pieces: Sequence[Piece]
    group: RedoGroup
    next: int


class _Slots:
    """A generation's slots. Owns the region."""

    def __init__(self, generation: AuditedGeneration, region: Region) -> None:
        self.layout = Layout(generation.spec)
        self._rounds_otherwise = not _compute_as(generation.arithmetic) or generation.accelerated
        self._threads = generation.threads
        self._region = region
        self._regions = GenerationRegions(self.layout, region, None, None)
        self._ring = SlotRing(region, self.layout, generation.number)
        self._staged = StagedGradients(region.map, self.layout)
        self.metas: dict[int, RecordMeta] = {}

    def close(self) -> None:
        del self._staged
        self._region.close()

    def start_audit(self, audit: Audit, first: int) -> _Running:
        wanted = set(audit.pieces)
        pieces = [piece for piece in self.layout.due(first) if (piece.param, piece.start) in wanted]
        return _Running(audit.key, first, pieces, self._at_anchors(first, pieces), self.metas[first].anchors_of + 1)

    def _at_anchors(self, record: int, pieces: Sequence[Piece]) -> RedoGroup:
        spec = self.layout.spec
        host = HostState(spec, by_value=False, wanted={spec.params[piece.param].tensor.name for piece in pieces})
        restorer = Restorer(self.layout, self._regions, self._ring, host.tensors, host.optimizers, build=host.build)
        group = restorer.at_anchors(pieces, self.metas[record])
        self._ring.check(record, spec.local_ranks)
        return group

    def can_go_on(self, running: _Running) -> bool:
        return running.next in self.metas

    def go_on(self, running: _Running) -> tuple[float, str] | None:
        """Redo one more record, or compare behind the last one: by how much the pieces differ at most, and where."""
        # Cut pieces have the same bits with any number of threads.
        whole = any(self.layout.spec.params[piece.param].whole for piece in running.pieces)
        torch.set_num_threads(self._threads if whole else 1)
        period = self.layout.spec.period
        if running.next < running.first + period:
            meta = self.metas[running.next]
            copies = self._copied(running.group, meta)
            running.group.apply(
                meta, lambda meta, step, param, cut=None: copies[step.optimizer, step.index, param, cut]
            )
            running.next += 1
            return None
        anchored = self._at_anchors(running.next, running.pieces)
        steps = period if self._rounds_otherwise else 0
        pairs = zip(running.group.redo_targets, anchored.redo_targets, strict=True)
        return max((self._difference(ours, theirs, steps) for ours, theirs in pairs), default=(0.0, ""))

    def _copied(self, group: RedoGroup, meta: RecordMeta) -> dict[Any, torch.Tensor | None]:
        """Copies of the gradients that a record's steps use, whole or of these pieces."""

        def copy(step: SubStep, target: RedoTarget, cut: tuple[int, int] | None) -> torch.Tensor | None:
            staged = self._staged(meta, step, target.param, cut)
            return None if staged is None else staged.clone()

        found = {
            (step.optimizer, step.index, target.param, cut): copy(step, target, cut)
            for step in meta.sub_steps
            for target, cut in group.stepped(step)
        }
        self._ring.check(meta.record, self.layout.spec.local_ranks)
        return found

    def _difference(self, redone: RedoTarget, anchored: RedoTarget, steps: int) -> tuple[float, str]:
        spec = self.layout.spec.params[redone.param]
        worst = _distance(redone.parameter.detach(), anchored.parameter.detach(), steps), spec.tensor.name
        for owner in spec.owners:
            ours, theirs = (one.states.get(owner.optimizer, {}) for one in (redone, anchored))
            for key in {*theirs, *(state.key for state in owner.state if state.key in ours)}:
                distance = _distance(ours.get(key), theirs.get(key), steps)
                worst = max(worst, (distance, f"{spec.tensor.name} ({key})"), key=lambda one: one[0])
        return worst


def _compute_as(other: Arithmetic) -> bool:
    """Take over another process's settings. Returns False if its kernels round otherwise than those here."""
    torch.set_float32_matmul_precision(other.matmul_precision)
    torch.use_deterministic_algorithms(other.deterministic)
    torch.set_default_dtype(dtype_of(other.default_dtype))
    return other.capability in ("", torch.backends.cpu.get_cpu_capability())


def _distance(found: object, held: object, steps: int) -> float:
    """How far a redone value is from the anchored one, in units in the last place; 0: as near as it should be.

    `steps` is the number of steps in which another device has rounded otherwise; with 0 all bits are to be the same.
    """
    if isinstance(found, torch.Tensor) and isinstance(held, torch.Tensor):
        if found.shape != held.shape or found.dtype != held.dtype:
            return math.inf
        return 0.0 if same_bits(found, held) or _explained(found, held, steps) else ulp_distance(found, held)
    return 0.0 if type(found) is type(held) and codec.encode(found) == codec.encode(held) else math.inf


def _explained(found: torch.Tensor, held: torch.Tensor, steps: int) -> bool:
    """Whether NaNs, numbers that some processes flush to zero, or rounding explain a difference of bits."""
    if not (found.is_floating_point() or found.is_complex()):
        return False
    limits = torch.finfo(found.dtype)
    wide = [torch.view_as_real(one) if one.is_complex() else one for one in (found, held)]
    ours, theirs = (one.double() for one in wide)
    flushed = (ours.abs() < limits.tiny) & (theirs.abs() < limits.tiny)
    difference = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()) | flushed, 0.0, ours - theirs)
    # Relative to the piece and not to each element: sums that nearly cancel lose their last places.
    scale = max(float(one.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()) for one in (ours, theirs))
    return float(difference.square().mean().sqrt()) <= _ROUNDING * limits.eps * math.sqrt(steps) * scale


class Auditor:
    """Does what the agent asks for, a record at a time. :meth:`close` it."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slots] = {}
        self._running: list[_Running] = []
        self._counted = time.process_time()

    def handle(self, message: Audit | ForgetAudits, fds: list[int]) -> Audited | None:
        """Take a message; the answer, if it is known at once."""
        if isinstance(message, ForgetAudits):
            self._running = [one for one in self._running if one.key != message.key]
            slots = self._slots.pop(message.key, None)
            if slots is not None:
                slots.close()
            return None
        if message.generation is not None:
            extend_search_path(message.generation.search_path)
            self._slots[message.key] = _Slots(message.generation, Region.open(fds[0]))
        slots = self._slots[message.key]
        slots.metas |= {record: decode_meta(meta) for record, meta in message.metas.items()}
        # Also what a running audit awaits: where its slot is filled anew by now, its next step finds that out.
        awaited = (one.next for one in self._running if one.key == message.key)
        oldest = min([max(slots.metas) - slots.layout.ring, *awaited])
        slots.metas = {record: meta for record, meta in slots.metas.items() if record >= oldest}
        if message.first is None:
            return None
        try:
            self._running.append(slots.start_audit(message, message.first))
        except DamagedStateError:
            return self._answer(message.key, message.first, late=True)
        except Exception as error:  # the agent says it: training goes on, and is not audited
            return self._answer(message.key, message.first, problem=_problem(error))
        return None

    @property
    def busy(self) -> bool:
        """Whether something can be done before another message comes."""
        return any(self._slots[one.key].can_go_on(one) for one in self._running)

    def go_on(self) -> Audited | None:
        """Do a little of what there is; the answer to an audit that has ended."""
        one = next(one for one in self._running if self._slots[one.key].can_go_on(one))
        try:
            found = self._slots[one.key].go_on(one)
        except DamagedStateError:
            return self._end_audit(one, late=True)
        except MemoryError as error:  # says nothing of the step
            return self._end_audit(one, problem=_problem(error))
        except Exception as error:  # a restore would redo it alike
            first = self._slots[one.key].layout.spec.params[one.pieces[0].param].tensor.name
            return self._end_audit(one, ulp=math.inf, tensor=first, problem=_problem(error))
        return None if found is None else self._end_audit(one, ulp=found[0], tensor=found[1] if found[0] else "")

    def _end_audit(self, one: _Running, **found: Any) -> Audited:
        self._running.remove(one)
        return self._answer(one.key, one.first, **found)

    def _answer(self, key: int, first: int, **found: Any) -> Audited:
        before, self._counted = self._counted, time.process_time()
        return Audited(key, first, self._counted - before, **found)

    def close(self) -> None:
        self._running.clear()
        for slots in self._slots.values():
            slots.close()


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def serve(channel: AuditorChannel) -> None:
    """Audit what the agent asks for until it is gone."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()  # torch imports much with the first step
    channel.send(AuditorReady(time.process_time()))
    auditor = Auditor()
    try:
        with torch.no_grad():
            while True:
                received = channel.poll(0.0 if auditor.busy else None)
                if received is not None:
                    message, fds = received
                    answer = auditor.handle(message, fds)
                else:
                    answer = auditor.go_on()
                if answer is not None:
                    channel.send(answer)
    finally:
        auditor.close()


def main(end: AgentEnd) -> None:
    step_back()
    serve(end.channel)
