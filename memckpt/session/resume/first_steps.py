"""Comparison of a resume's first steps with those of the dead attempt: of gradients that it left, or a whole step.

*Witness*: the gradients that had landed of the next step are copied before their slot is reused, and compared as
backward computes them again. One near the loss depends on most of a forward: on parameters, data and generators.

*Repetition*: training restores the state before the resumed record and takes its step again. No record is staged
meanwhile. At the commit the ordinary restore puts the held state back over copies of what there is, which are compared
with it. So training goes on from the held state, whatever the verdict is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.copier import Copier
from memckpt.capture.evidence import Evidence
from memckpt.capture.live_state import LiveState
from memckpt.capture.slot_writer import SlotWriter
from memckpt.errors import DamagedStateError
from memckpt.memory.slots import Landing
from memckpt.recovery.comparison import Comparison, Difference, Findings
from memckpt.session.rank_state import RankState
from memckpt.session.ranks import Ranks
from memckpt.session.resume.chosen import Chosen
from memckpt.session.resume.report import Testimony
from memckpt.state import codec, rng
from memckpt.state.layout import Layout
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.redo import GradientSource, apply_ops
from memckpt.state.tensors import Distance, local, same_bits, version

_log = logging.getLogger("memckpt")
#: Limit on the gradients that a rank sets aside, in bytes.
WITNESS_BYTES = 64 << 20
_ADDED = "what had landed was added to gradients that were used and not zeroed"
_NONE_YET = "the dead attempt had no gradients of the next step yet"
#: Maximum number of differences that are kept.
_NAMED = 8


@dataclass
class _Kept:
    """A gradient that was set aside, or its first elements.

    Attributes:
        fired: number of gradients that backward has computed for the parameter since.
        found: the new gradient, while it is being copied.
        compared: whether they are compared, or the copy has begun.
        left: gradient of the parameter when it was restored, and its version counter; None if there was none.
        added: whether backward has added to `left` without a zeroing in between.
    """

    name: str
    landing: Landing
    held: torch.Tensor
    param: torch.Tensor
    fired: int = 0
    found: torch.Tensor | None = None
    difference: Difference | None = None
    compared: bool = False
    left: tuple[torch.Tensor, int] | None = None
    added: bool = False


class Witness:
    """Gradients of a record that one rank has set aside. Taps call :meth:`gradient`, which never raises."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._kept: dict[int, _Kept] = {}  # by id() of the parameter, which `_Kept` keeps alive
        self._problem = ""
        self._reduces = False
        self._left_looked_at = False

    def set_aside(self, writer: SlotWriter, record: int, tap: str, limit: int | None = None) -> None:
        """Copy the gradients staged for `record`, in their order, before its slot is reused. Never raises."""
        try:
            self._problem = self._set_aside(writer, record, tap, WITNESS_BYTES if limit is None else limit)
        except Exception as error:  # a resume never fails for that: it becomes the reason of the verdict
            _log.exception("memckpt: setting gradients aside failed")
            self.decline(f"setting gradients aside failed: {type(error).__name__}: {error}")

    def note_left(self, reduces: bool) -> None:
        """Note the restored gradients, which are zeros whatever the dead attempt had there. Taps are installed.

        With `reduces` gradients come in buckets, so that several are accumulated before the first is seen.
        """
        self._reduces = reduces
        # No tap sees the gradient of a parameter that is frozen now, and unfrozen before the next backward.
        self._kept = {key: kept for key, kept in self._kept.items() if kept.param.requires_grad}
        for kept in self._kept.values():
            gradient = kept.param.grad
            kept.left = None if gradient is None else (gradient, version(gradient))

    def _mark_added_to(self, fired: torch.Tensor) -> None:
        """Mark gradients that are accumulated into restored zeros, whatever the dead attempt had there."""
        for kept in self._kept.values():
            gradient = kept.param.grad
            if kept.left is not None and gradient is kept.left[0]:
                moves = 1 if self._reduces or kept.param is fired else 0
                kept.added = version(gradient) <= kept.left[1] + moves

    def decline(self, reason: str) -> None:
        """Drop all gradients: there is nothing to compare with, for this reason."""
        self._kept.clear()
        self._problem = reason

    def _set_aside(self, writer: SlotWriter, record: int, tap: str, room: int) -> str:
        before = None if writer.landings is None else writer.landings.tap(record)
        if before is None or writer.landings is None:
            return _NONE_YET
        if before != tap:
            return f"the dead attempt took its gradients by another tap ({before}, now {tap})"
        landed = sorted(writer.landings.landed(record), key=lambda one: one.order)
        if not landed:
            return _NONE_YET
        for one in landed:
            staged = writer.gradient_places.staged(record, writer.owners[one.param][0], 0, one.param).reshape(-1)
            staged = staged[: room // staged.element_size()]
            if staged.numel():  # shards may be empty, and so may what is left of the room
                room -= staged.nbytes
                param = writer.params[one.param]
                self._kept[id(param)] = _Kept(writer.spec.params[one.param].tensor.name, one, staged.clone(), param)
        return ""

    @property
    def waits(self) -> bool:
        """Whether gradients are still to be compared."""
        return bool(self._kept)

    # While backward runs

    def gradient(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Compare a gradient that backward has computed, if it is the one that was staged."""
        if not self._left_looked_at:
            self._left_looked_at = True
            self._mark_added_to(param)
        kept = self._kept.get(id(param))
        if kept is None or kept.compared:
            return
        kept.fired += 1
        if kept.fired < kept.landing.firing:
            return
        kept.compared = True
        try:
            self._compare_gradient(kept, gradient)
        except Exception as error:  # a hook must not end the user's training: it becomes the reason of the verdict
            self._give_up(kept, error)

    def _give_up(self, kept: _Kept, error: Exception) -> None:
        del self._kept[id(kept.param)]
        self._problem = self._problem or f"comparing {kept.name} failed: {type(error).__name__}: {error}"

    def _compare_gradient(self, kept: _Kept, gradient: torch.Tensor) -> None:
        found = local(gradient.detach())
        if found.is_sparse or found.dtype != kept.held.dtype:
            layout = "sparse" if found.is_sparse else f"{found.dtype}"
            kept.difference = Difference("gradient", kept.name, f"{layout} in place of dense {kept.held.dtype}")
            return
        found = found.reshape(-1)[: kept.held.numel()]
        if not self._copier.asynchronous:
            _compare(kept, found)
            return
        kept.found = torch.empty_like(kept.held, pin_memory=found.device.type != "cpu")
        self._copier.copy(kept.found, found)

    # At the commit

    def testify(self) -> Testimony:
        """The result, at the end of the record. Waits for copies that have begun. Never raises."""
        self._copier.token()()
        for kept in list(self._kept.values()):
            try:
                if kept.found is not None:
                    _compare(kept, kept.found)
            except Exception as error:  # the user's training goes on: it becomes the reason of the verdict
                self._give_up(kept, error)
        kept_ones, self._kept = self._kept, {}
        testimony = Testimony(problem=self._problem)
        for kept in kept_ones.values():
            testimony.gradients += 1
            testimony.nbytes += kept.held.nbytes
            if kept.difference is not None and kept.added and _is_used(kept.param):
                testimony.gradients -= 1
                testimony.nbytes -= kept.held.nbytes
                testimony.problem = testimony.problem or _ADDED
                continue
            if not kept.compared:
                kept.difference = Difference("gradient", kept.name, "not made, and the dead attempt had made it")
            if kept.difference is not None:
                testimony.differing += 1
                if len(testimony.differences) < _NAMED:
                    testimony.differences.append((kept.landing.order, kept.difference))
        return testimony


def _is_used(param: torch.Tensor) -> bool:
    """Whether the gradient keeps its value after the step: the loop zeroes gradients before a backward.

    Then the dead attempt had accumulated into values that a resume does not have. They are zeroed before an optimizer
    uses them; otherwise they would be pending. A loop that zeroes before its commit had zeros there, as a resume has.
    """
    gradient = param.grad
    return gradient is not None and bool(local(gradient).any())


def _compare(kept: _Kept, found: torch.Tensor) -> None:
    kept.found = None
    if same_bits(found, kept.held):
        return
    distance = Distance()
    distance.add(found, kept.held)
    dtype = str(kept.held.dtype).removeprefix("torch.")
    kept.difference = Difference("gradient", kept.name, distance.text, distance.relative, distance.ulp, dtype)


class RepeatedSteps:
    """Compares each optimizer step with the recorded one, by the gradients that the dead attempt had staged.

    Differences of gradients only explain a verdict: the state behind the step is compared anyway.

    `problem`: why steps could not be compared, in words; empty if they could.
    """

    def __init__(
        self,
        live: LiveState,
        params: Sequence[torch.Tensor],
        layout: Layout,
        meta: RecordMeta,
        gradients: GradientSource,
    ) -> None:
        self._live = live
        self._params = params
        self._layout = layout
        self._meta = meta
        self._gradients = gradients
        self._taken: dict[int, int] = {}
        self.comparison = Comparison()
        self.problem = ""

    def stepping(self, number: int, optimizer: Optimizer) -> None:
        """Compare a step that an optimizer is about to take. Never raises."""
        try:
            self._compare(number, optimizer)
        except Exception as error:  # becomes the reason of the verdict
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _compare(self, number: int, optimizer: Optimizer) -> None:
        index = self._taken.get(number, 0)
        self._taken[number] = index + 1
        held = next((one for one in self._meta.sub_steps if (one.optimizer, one.index) == (number, index)), None)
        label = self._label(number, index)
        if held is None:
            self.comparison.absence(label, "taken", "not taken")
            return
        self.comparison.value("hyperparameters", label, hyperparameters(optimizer), codec.decode(held.groups))
        for param in self._layout.optimizer_params(number):
            self._compare_gradient(param, held)

    def _compare_gradient(self, index: int, held: SubStep) -> None:
        name = self._layout.spec.params[index].tensor.name
        found = self._params[index].grad
        if (found is None) != (index in held.absent):
            presence = ("None", "a tensor")
            self.comparison.absence(f"gradient of {name}", presence[found is not None], presence[found is None])
        elif found is not None:
            staged = self._gradients(self._meta, held, index)
            if staged is None or found.is_sparse or staged.is_sparse:
                return
            # What a fused step divides by, it does within.
            ops = [op for op in held.ops if op.kind != "div"]
            used = apply_ops(staged.to(local(found).device), ops, index)
            self.comparison.tensor("gradient", name, local(found), used)

    def _label(self, number: int, index: int) -> str:
        name = type(self._live.optimizers[number]).__name__
        return f"step {index + 1} of {name} (optimizer {number})"

    def end_steps(self) -> None:
        """End the record: recorded steps that were not taken are differences, too."""
        if self.problem:
            return
        for held in self._meta.sub_steps:
            if held.index >= self._taken.get(held.optimizer, 0):
                self.comparison.absence(self._label(held.optimizer, held.index), "not taken", "taken")


class Repetition:
    """One repeated step, from the restore of the state before it to its commit. Owns the state after it.

    `steps` compares optimizer steps; None where the record has none: its state was captured, or is a checkpoint.
    """

    def __init__(
        self,
        held: Chosen,
        write: Callable[[Chosen, Comparison], object],
        live: LiveState,
        ranks: Ranks,
    ) -> None:
        self.record, self.step = held.held.record, held.held.step
        self.held = held
        self._write = write
        self._live = live
        self._ranks = ranks
        self.steps: RepeatedSteps | None = None
        known = held.recorded_steps(live)
        if known is not None:
            self.steps = RepeatedSteps(live, *known)

    def close(self) -> None:
        """Release the held record; training ends before the step does."""
        if self.held.generation is not None:
            self.held.generation.close()

    def finish(self, rank_state: bytes, states: RankState) -> list[Findings]:
        """Compare the live state with the held one, and put the held one back; the findings of all ranks. Collective.

        Raises DamagedStateError where the held state cannot be put back.
        """
        return self._ranks.together(lambda: self._try_to_put_back(rank_state, states))

    def _try_to_put_back(self, rank_state: bytes, states: RankState) -> Findings:
        try:
            return self._put_back(rank_state, states)
        except Exception as error:  # redo runs the user's classes with what was recorded
            raise DamagedStateError(
                f"resume: expected to put the state after step {self.step} back, which was repeated, found "
                f"{type(error).__name__}: {error}. What was held is still held: start again with "
                "resume_check='witness' (with 'auto' the next start repeats no step), which leaves such a state for an "
                "older one"
            ) from error

    def _put_back(self, rank_state: bytes, states: RankState) -> Findings:
        comparison = Comparison()
        if self.steps is not None:
            self.steps.end_steps()
            comparison = self.steps.comparison
            comparison.problem = self.steps.problem
        held = self.held.state
        differing = states.compare(codec.decode(rank_state), held, comparison)
        if "optimizers" in held:
            found = self._live.capture_optimizers(self.held.spec)
            comparison.value("state", "optimizers", found, held["optimizers"])
        self._write(self.held, comparison)
        states.put_back({name: held["provided"][name] for name in differing})
        rng.restore(held["rng"])
        return comparison.findings(self._live.tensors())


def compare_following(
    rank_state: bytes, held: bytes, evidence: Evidence, states: RankState, ranks: Ranks
) -> list[Findings]:
    """Compare a step behind a captured state with the rank state held of it; collective. Nothing is put back."""
    comparison, before = Comparison(), codec.decode(held)
    states.compare(codec.decode(rank_state), before, comparison)
    compare_sample(evidence, before["evidence"], comparison)
    return ranks.gather(comparison.findings())


def compare_sample(evidence: Evidence, held: Mapping[str, Any], comparison: Comparison) -> None:
    """Compare the live state with a sample that a record carries."""
    with torch.no_grad():
        pairs = evidence.pairs(held)
    if pairs is None:
        comparison.absence("the state", "other tensors", "those of the record")
    for pair in pairs or ():
        comparison.tensor(pair.kind, pair.name, pair.now, pair.before)
