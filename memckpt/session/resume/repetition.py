"""Repetition of a dead attempt's last step, which proves that the resume is exact.

Training restores the state before the resumed record and takes its step again. No record is staged meanwhile. At the
commit the ordinary restore puts the held state back, and compares each tensor before it overwrites it. So training goes
on from the held state, whatever the verdict is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.evidence import Evidence
from memckpt.capture.live_state import LiveState
from memckpt.errors import AgentGoneError, DamagedStateError
from memckpt.recovery.comparison import Comparison, Findings
from memckpt.session.link import AgentLink
from memckpt.session.rank_state import RankState
from memckpt.session.ranks import Ranks
from memckpt.session.resume.chosen import Chosen
from memckpt.state import codec, rng
from memckpt.state.layout import Layout
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.redo import GradientSource, apply_ops
from memckpt.state.tensors import local

_log = logging.getLogger("memckpt")


class RepeatedSteps:
    """Compares each optimizer step with the recorded one.

    Differences of gradients only explain a verdict: the state behind the step is compared anyway.

    Args:
        gradients: source of the gradients that the dead attempt had staged.

    Attributes:
        problem: why steps could not be compared, in words; empty if they could.
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

    Attributes:
        steps: compares optimizer steps; None where the record has none, as its state was captured or is a checkpoint.
    """

    def __init__(
        self,
        held: Chosen,
        write: Callable[[Chosen, Comparison], object],
        link: AgentLink,
        live: LiveState,
        ranks: Ranks,
    ) -> None:
        self.record, self.step = held.held.record, held.held.step
        self.held = held
        self._write = write
        self._link = link
        self._live = live
        self._ranks = ranks
        self.steps: RepeatedSteps | None = None
        known = held.recorded_steps(live)
        if known is not None:
            self.steps = RepeatedSteps(live, *known)

    def close(self) -> None:
        """Release the held record; training ends before the step does."""
        self.held.close()

    def finish(self, rank_state: bytes, states: RankState) -> list[Findings] | None:
        """Compare the live state with the held one, and put the held one back; collective.

        Returns:
            The findings of all ranks, by rank; None if some agent is gone and nothing was put back.

        Raises:
            DamagedStateError: the held state cannot be put back; on every rank.
        """
        if not all(self._ranks.gather(self._advance_replica())):
            return None
        return self._ranks.together(lambda: self._try_to_put_back(rank_state, states))

    def _advance_replica(self) -> bool:
        """Have the replica redo the step. Returns False if its agent is gone."""
        try:
            self.held.advance_replica(self._link)
        except AgentGoneError as error:
            _log.warning("memckpt: the agent has gone while record %d was repeated: %s", self.record, error)
            return False
        return True

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
    """Compare a step behind a captured state with what is held of it; collective. Nothing is put back.

    Args:
        held: encoded rank state that the dead attempt had after it, with a sample of its tensors.
    """
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


def any_accelerator(live: LiveState, ranks: Ranks) -> bool:
    """Whether some rank trains on an accelerator; collective."""
    own = any(local(tensor).device.type != "cpu" for tensor in live.tensors().values())
    return any(ranks.gather(own))
