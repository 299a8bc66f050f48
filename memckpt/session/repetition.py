"""The last step of a dead attempt, taken once more: a resume proves that it repeats what was held.

Training restores the state before the resumed record and takes its step for real. No record is staged meanwhile. At the
commit the held state is put back by the ordinary restore, which compares each tensor before it overwrites it, so that
training goes on from what was held whatever the verdict is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.live_state import LiveState
from memckpt.recovery.comparison import Comparison, Findings
from memckpt.session.held_record import HeldRecord
from memckpt.session.rank_state import RankState
from memckpt.session.ranks import Ranks
from memckpt.state import codec, rng
from memckpt.state.layout import Layout
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.redo import GradientSource, apply_ops
from memckpt.state.tensors import local


class RepeatedSteps:
    """Compares each step that an optimizer takes with the one that the record says it took.

    Gradients only explain a difference: what they lead to is compared anyway.

    Args:
        live: the live state.
        params: the live parameters, in the order of the layout.
        layout: of the held state.
        meta: of the record.
        gradients: those that the dead attempt had staged.
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
        #: Why steps could not be compared, in words; empty if they could.
        self.problem = ""

    def stepped(self, number: int, optimizer: Optimizer) -> None:
        """An optimizer has just taken a step; its gradients are still there. Never raises into the user's step."""
        try:
            self._compare(number, optimizer)
        except Exception as error:  # what it is becomes the verdict's reason
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
        elif found is not None and held.optimizer not in self._live.changing_optimizers:
            staged = self._gradients(self._meta, held, index)
            if staged is None or found.is_sparse or staged.is_sparse:
                return
            used = apply_ops(staged.to(local(found).device), held.ops, index)
            self.comparison.tensor("gradient", name, local(found), used)

    def _label(self, number: int, index: int) -> str:
        name = type(self._live.optimizers[number]).__name__
        return f"step {index + 1} of {name} (optimizer {number})"

    def end(self) -> None:
        """The record ends: steps that the dead attempt took and this one did not are differences, too."""
        if self.problem:
            return
        for held in self._meta.sub_steps:
            if held.index >= self._taken.get(held.optimizer, 0):
                self.comparison.absence(self._label(held.optimizer, held.index), "not taken", "taken")


class Repetition:
    """One repeated step, from the restore of the state before it to its commit. Owns what is held of it.

    Args:
        record, step: which is repeated.
        held: the record, where it is held.
        state: this rank's decoded state after the record.
    """

    def __init__(
        self, record: int, step: int, held: HeldRecord, state: Mapping[str, Any], live: LiveState, ranks: Ranks
    ) -> None:
        self.record = record
        self.step = step
        self.held = held
        self.state = state
        self._live = live
        self._ranks = ranks
        #: None where the record does not say which steps it took: its state was captured, or is a checkpoint.
        self.steps: RepeatedSteps | None = None
        known = held.steps()
        if known is not None:
            self.steps = RepeatedSteps(live, held.params, *known)

    def close(self) -> None:
        """Training ends before the step has."""
        self.held.close()

    def finish(self, rank_state: bytes, states: RankState) -> list[Findings] | None:
        """Put the held state back, comparing.

        Args:
            rank_state: this rank's as the repeated step has left it, encoded.
            states: knows which parts of it are what.

        Returns:
            The findings of all ranks, by rank; None if some agent has gone and nothing was put back.

        Raises:
            MemckptError: the held state cannot be put back; the same on every rank.
        """
        if not all(self._ranks.gather(self.held.advance())):
            return None
        found: list[Findings] = []
        self._ranks.together(lambda: found.append(self._put_back(rank_state, states)))
        return self._ranks.gather(found[0])

    def _put_back(self, rank_state: bytes, states: RankState) -> Findings:
        comparison = Comparison()
        if self.steps is not None:
            self.steps.end()
            comparison = self.steps.comparison
            comparison.problem = self.steps.problem
        differing = states.compare(codec.decode(rank_state), self.state, comparison)
        if "optimizers" in self.state:
            found = self._live.capture_optimizers(self.held.spec)
            comparison.value("state", "optimizers", found, self.state["optimizers"])
        self._live.restore_trainable(self.state["trainable"])
        self._live.restore_groups(self.state["groups"])
        with rng.preserved():
            self.held.put_back(comparison)
        if "optimizers" in self.state:
            self._live.restore_optimizers(self.state["optimizers"])
        self._live.restore_state_order(self.state["state_order"])
        states.put_back({name: self.state["provided"][name] for name in differing})
        rng.restore(self.state["rng"])
        return comparison.findings(self._live.tensors())


def compare_following(rank_state: bytes, held: bytes, states: RankState, ranks: Ranks) -> list[Findings]:
    """Compare what a captured state has of the steps behind it: rank states. Nothing is put back."""
    comparison = Comparison()
    states.compare(codec.decode(rank_state), codec.decode(held), comparison)
    return ranks.gather(comparison.findings())


def any_accelerator(live: LiveState, ranks: Ranks) -> bool:
    """Whether some rank trains on an accelerator."""
    own = any(local(tensor).device.type != "cpu" for tensor in live.tensors().values())
    return any(ranks.gather(own))
