"""Gradients that no step has used yet at the end of a batch, which is no restore point while there are any."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.data.prefetch import gradients as _gradients
from memckpt.state.tensors import local, same_bits, version

_log = logging.getLogger("memckpt")
#: Indices of the optimizers that own a parameter. Empty for flat parameters, which no optimizer owns directly: they
#: step its shards.
Family = tuple[int, ...]
#: Consecutive ends of batches without a restore point before a warning: where parameters change meanwhile, and always.
_CHANGING, _MANY = 20, 100
#: Elements of each parameter that are compared to see that.
_ELEMENTS = 64


class PendingGradients:
    """Gradients that no optimizer step has used yet: while there are any, the end of a batch is no restore point.

    Parameters are tracked by the set of optimizers that own them (their *family*). A step of any owner uses the
    gradients of the whole family; steps of other optimizers do not.

    Some gradients are never used. In adversarial training a generator's backward reaches the critic, whose gradients
    are discarded before its own backward. At the end of the batch they look like accumulated ones, so a family counts
    as pending until its gradients were seen to be discarded once. From then on they are assumed to be, and each time
    that is verified. If they are used after all, a warning follows and the family counts as pending from then on.

    Args:
        optimizers: all optimizers of the session.
        failed: called with the reason when an assumed restore point turns out not to have been one.
    """

    def __init__(self, optimizers: Sequence[Optimizer], failed: Callable[[str], None]) -> None:
        self._optimizers = optimizers
        self._failed = failed
        self._families: dict[int, Family] = {}
        self._members: dict[Family, list[torch.Tensor]] = {}
        #: Families with unused gradients. The value: whether `param.grad` shows it.
        self._waiting: dict[Family, bool] = {}
        #: Families that were pending at the end of a batch, with their gradients at that time.
        self._left: dict[Family, list[tuple[torch.Tensor, weakref.ref[torch.Tensor], int]]] = {}
        #: Those of them whose gradients were assumed to be discarded.
        self._assumed: set[Family] = set()
        #: Whether gradients left at the end of a batch are discarded, as far as observed.
        self._thrown_away: dict[Family, bool] = {}
        self._blocked = 0
        #: Elements of the parameters whose gradients have waited for half of `_CHANGING` ends of batches.
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Called with the first gradient of a family: the family, its parameters, and the one that has got it.
        self.first: Callable[[Family, list[torch.Tensor], torch.Tensor], None] | None = None
        self.regroup()

    def regroup(self) -> None:
        """Read the optimizers' groups again."""
        owners: dict[int, tuple[torch.Tensor, set[int]]] = {}
        for number, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    owners.setdefault(id(param), (param, set()))[1].add(number)
        families = {key: tuple(sorted(found)) for key, (_, found) in owners.items()}
        one = {family: family for family in families.values()}  # one object each, as backward evicts caches
        self._families = {key: one[family] for key, family in families.items()}
        self._members = {}
        for param, found in owners.values():
            self._members.setdefault(tuple(sorted(found)), []).append(param)

    # Events

    def seen(self, param: torch.Tensor | None) -> None:
        """Note a new gradient of a parameter; None for a flat parameter, whose shards the optimizers step."""
        _gradients.made += 1
        family = () if param is None else self._families.get(id(param))
        if family is None:
            return  # no optimizer uses it
        if self._left and family in self._left:
            self._look_at_left(family, param)
        if family not in self._waiting:
            self._waiting[family] = bool(family)
            if self.first is not None and param is not None:
                self.first(family, self._members[family], param)

    def unreduced(self) -> None:
        """Note a backward whose gradients are invisible until they are reduced with those of a later one."""
        for family in self._members:
            self._waiting[family] = False

    def stepped(self, number: int) -> None:
        """Note that an optimizer has used its gradients, or skipped its step."""
        for family in [one for one in self._left if number in one]:
            self._look_at_left(family, None)
        for family in [one for one in self._waiting if number in one or not one]:
            del self._waiting[family]

    def stepped_by_another(self, params: Sequence[torch.Tensor]) -> None:
        """Note that an optimizer of no session has used the gradients of these parameters.

        They are taken for discarded, unless they are seen to be used once more.
        """
        used = set(map(id, params))
        for family in self._waiting:
            if all(param.grad is None or id(param) in used for param in self._members.get(family, ())):
                self._thrown_away.setdefault(family, True)

    # Restore points

    def at_restore_point(self) -> bool:
        """Whether a batch that ends here leaves no gradient pending."""
        for family, shows in list(self._waiting.items()):
            if shows and all(param.grad is None for param in self._members.get(family, ())):
                del self._waiting[family]
                self._left.pop(family, None)
        blocking = [
            family for family, shows in self._waiting.items() if not shows or not self._thrown_away.get(family, False)
        ]
        for family in [one for one, shows in self._waiting.items() if shows]:
            self._leave_family(family, assumed=not blocking)
        self._count_blocked(blocking)
        return not blocking

    def _count_blocked(self, blocking: Sequence[Family]) -> None:
        """Count the batches in a row without a restore point, and warn where these are more than accumulations have."""
        self._blocked = self._blocked + 1 if blocking else 0
        if self._blocked == _CHANGING // 2:
            members = [param for family in blocking for param in self._members.get(family, ())]
            self._noted = [(param, local(param).flatten()[:_ELEMENTS].clone()) for param in members]
        if self._blocked not in (_CHANGING, _MANY):
            return
        noted, self._noted = self._noted, []
        changes = any(not same_bits(local(param).flatten()[:_ELEMENTS], before) for param, before in noted)
        names = ", ".join(sorted({type(self._optimizers[n]).__qualname__ for one in blocking for n in one}))
        waiting = f"gradients of {names or 'some optimizer'} wait for its step"
        if changes:
            _log.warning(
                "memckpt: none of the last %d batches ended at a restore point, and nothing of them can be resumed: "
                "%s, while something else trains its parameters. Give that optimizer to attach(), or call "
                "commit(gradients_pending=False) behind each of its steps",
                self._blocked,
                waiting,
            )
        elif self._blocked == _MANY:
            _log.warning(
                "memckpt: none of the last %d batches ended at a restore point: %s. If they are discarded later, call "
                "commit(gradients_pending=False)",
                self._blocked,
                waiting,
            )

    def waive(self) -> None:
        """Ignore pending gradients: the caller of commit has declared that there are none."""
        self._waiting.clear()
        self._left.clear()
        self._assumed.clear()
        self._blocked = 0

    def _leave_family(self, family: Family, assumed: bool) -> None:
        if assumed:
            self._assumed.add(family)
        if family not in self._left:
            self._left[family] = [
                (param, weakref.ref(param.grad), version(param.grad))
                for param in self._members.get(family, ())
                if param.grad is not None
            ]

    def _look_at_left(self, family: Family, fired: torch.Tensor | None) -> None:
        """Decide whether gradients that were left at the end of a batch were discarded or are being used.

        Args:
            family: the family that the gradients belong to.
            fired: the parameter whose gradient was just accumulated, which has incremented its counter once.
        """
        left = self._left.pop(family)
        assumed = family in self._assumed
        self._assumed.discard(family)
        kept = fired is not None and torch.is_grad_enabled()  # backward then makes a new tensor of both
        for param, gradient, counted in left:
            held = gradient()
            moves = 1 if param is fired else 0
            kept = kept or (held is not None and held is param.grad and version(held) <= counted + moves)
        self._thrown_away[family] = not kept and self._thrown_away.get(family, True)
        if kept and assumed:
            names = ", ".join(sorted({type(self._optimizers[number]).__qualname__ for number in family}))
            reason = f"gradients of {names} that were left over at the end of a batch, and usually discarded, were used"
            _log.warning(
                "memckpt: %s: a resume from that batch would not be exact. The state is written anew at the next batch "
                "that leaves none",
                reason,
            )
            self._failed(reason)

    # State for a resume

    def capture(self) -> dict[str, Any]:
        """This object's part of a restore point's rank state."""
        return {
            "thrown_away": [[list(family), known] for family, known in sorted(self._thrown_away.items())],
            "left": [list(family) for family in sorted(self._left) if family in self._waiting],
        }

    def resume(self, captured: dict[str, Any]) -> None:
        """Restore what :meth:`capture` returned; zeros stand for the gradients that were left over."""
        self.waive()
        self._thrown_away = {tuple(family): known for family, known in captured["thrown_away"]}
        for family in captured["left"]:
            self._waiting[tuple(family)] = True
            self._leave_family(tuple(family), assumed=True)
