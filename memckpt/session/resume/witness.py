"""Comparison of the first gradients of a resume with those that the dead attempt had left of the same step.

A gradient near the loss depends on most of a forward: on parameters, data and generators. No step is repeated, and
training does not wait: the gradients in the slot are copied before the slot is reused, compared as backward computes
them again, and dropped at the commit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from memckpt.capture.copier import Copier
from memckpt.capture.slot_writer import SlotWriter
from memckpt.memory.slots import Landing
from memckpt.recovery.comparison import Difference
from memckpt.state.tensors import Distance, local, same_bits, version

_log = logging.getLogger("memckpt")
#: Limit on the gradients that a rank sets aside, in bytes.
WITNESS_BYTES = 64 << 20
_ADDED = "what had landed was added to gradients that were used and not zeroed"
#: Maximum number of differences that are kept.
_NAMED = 8


@dataclass
class _Kept:
    """A gradient that was set aside, or its first elements.

    Attributes:
        landing: order and firing in which it was staged.
        param: the live parameter.
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


@dataclass
class Testimony:
    """Result of one rank; sent between ranks.

    Attributes:
        differences: first few differences with their positions in backward's order.
        problem: why gradients were not compared, in words; empty if all were.
    """

    gradients: int = 0
    nbytes: int = 0
    differing: int = 0
    differences: list[tuple[int, Difference]] = field(default_factory=list)
    problem: str = ""


class Witness:
    """Gradients of a record that one rank has set aside. Taps call :meth:`gradient`, which never raises."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._kept: dict[int, _Kept] = {}  # by id() of the parameter, which `_Kept` keeps alive
        self._problem = ""
        self._reduces = False
        self._left_looked_at = False

    def set_aside(self, writer: SlotWriter, record: int, tap: str, limit: int | None = None) -> None:
        """Copy the gradients staged for `record`, in the order of their staging. Never raises.

        Args:
            writer: writer on the dead attempt's slots, before the slot of `record` is reused.
        """
        try:
            self._problem = self._set_aside(writer, record, tap, WITNESS_BYTES if limit is None else limit)
        except Exception as error:  # a resume never fails for that: it becomes the reason of the verdict
            _log.exception("memckpt: setting gradients aside failed")
            self.decline(f"setting gradients aside failed: {type(error).__name__}: {error}")

    def note_left(self, reduces: bool) -> None:
        """Note the restored gradients, which are zeros whatever the dead attempt had there. Taps are installed.

        Args:
            reduces: whether gradients come in buckets, so that several are accumulated before the first is seen.
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
            return "the dead attempt had no gradients of the next step yet"
        if before != tap:
            return f"the dead attempt took its gradients by another tap ({before}, now {tap})"
        landed = sorted(writer.landings.landed(record), key=lambda one: one.order)
        if not landed:
            return "none of the next step's gradients had landed when the dead attempt ended"
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
        kept.found = torch.empty_like(kept.held, pin_memory=found.is_cuda)
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
