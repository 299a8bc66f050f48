"""The restore of a chosen state into the live tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memckpt.capture.evidence import Evidence
from memckpt.capture.param_groups import describe_groups, restore_groups, restore_modes, restore_state_order
from memckpt.capture.presence import restore_gradients
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps.ddp import BucketTap
from memckpt.capture.taps.tap import Tap
from memckpt.journal.events import Recovered
from memckpt.recovery.comparison import Comparison, LiveCopies
from memckpt.recovery.restore import replica_digest
from memckpt.session.link import AgentLink
from memckpt.session.ranks import LocalTraining
from memckpt.session.resume.chosen import Chosen, ChosenInMemory
from memckpt.session.resume.proof import ResumeProof
from memckpt.session.resume.repetition import Repetition, any_accelerator, compare_sample
from memckpt.session.resume.report import Proof, RestoreReport, prove
from memckpt.session.staging import Staging
from memckpt.state import rng
from memckpt.state.tensors import local

_log = logging.getLogger("memckpt")
_OTHER_RANKS = "the number of ranks or their shards have changed, and what is private to a rank is another's"
_NO_SAMPLE = "the record carries no sample of the state, and what was restored is compared with nothing"


class Restoration:
    """Restores a chosen state, in place.

    Attributes:
        record_redo_seconds: duration of the redo of one record at the restore; None where nothing was redone.
    """

    def __init__(self, training: LocalTraining, link: AgentLink, staging: Staging, proof: ResumeProof) -> None:
        self._ranks = training.ranks
        self._live = training.live
        self._pending = training.recorder.pending
        self._link = link
        self._staging = staging
        self._proof = proof
        self.report: RestoreReport | None = None
        self.record_redo_seconds: float | None = None
        self._seconds = 0.0

    def fill(self, chosen: Chosen) -> Proof | None:
        """Restore tensors, optimizer state and groups, and compare them with the record's sample; collective.

        It may be called again, for the same state or another one.

        Returns:
            The comparison; None where other ranks or shards than the record's are restored, or there is no sample.
        """
        started = time.perf_counter()
        self._live.put_shards_in_place()
        evidence, problem = None, ""
        try:
            evidence = self.write(chosen)
        except Exception as error:  # becomes a finding: redo runs the user's classes with what was recorded
            problem = f"{type(error).__name__}: {error}"
            _log.info("memckpt: step %d cannot be restored from %s", chosen.held.step, chosen.held.tier, exc_info=error)
        found = next(filter(None, self._ranks.gather(problem)), "")
        if found or evidence is None:
            what = f"the state after step {chosen.held.step}, from {chosen.held.tier},"
            return Proof(f"{what} cannot be made: {found}", differs=True, broken=True)
        if isinstance(chosen, ChosenInMemory):
            assert chosen.writer is not None
            self._agree_on_replicas(chosen.writer)
        self._seconds += time.perf_counter() - started
        return None if any(self._ranks.gather(chosen.resharded)) else self._prove(evidence, chosen)

    def write(self, chosen: Chosen, comparison: Comparison | None = None) -> Evidence:
        """Write a state that is held to the live tensors, at any time; what samples it is returned. Not collective.

        Args:
            chosen: the state.
            comparison: compares with it what the live tensors had before; None: that is dropped.
        """
        state = chosen.state
        restore_groups(self._live, state)
        self._live.growth.written.update(state["written"])
        self._live.part_views(state["views"])
        if isinstance(chosen, ChosenInMemory) and chosen.writer is None:
            chosen.writer = self._staging.open(chosen.regions)
        copies = None
        if comparison is not None:
            copies = LiveCopies(chosen.tensors_spec, chosen.spec, self._live.tensors(), self._live.optimizers)
        with rng.preserved():
            self.record_redo_seconds = chosen.restore(self._live, self._ranks.rank)
        if "optimizers" in state:  # what is in no slot
            self._live.restore_optimizers(state["optimizers"], chosen.is_recut(self._live))
        restore_state_order(self._live, state)
        if copies is not None and comparison is not None:
            copies.compare(comparison)
        return Evidence(chosen.spec, self._live)  # not the writer's: a repeated step may have replaced modules

    def go_on(
        self, chosen: Chosen, proof: Proof | None, tap: Tap, resume: Callable[[SlotWriter, int], None]
    ) -> RestoreReport:
        """Let training go on behind the state that :meth:`fill` has restored last.

        Args:
            resume: called with the writer of the resumed generation and the restored record, unless the step is
                repeated or the state comes from a store.
        """
        chosen.restored = True
        if proof is not None:
            self._proof.check.prove(proof)
        if not chosen.resharded:
            self._restore_reduction(chosen.state, tap)
        repeated = chosen.take_repeated(self._ranks.rank)
        if repeated is not None:
            self._proof.repetition = Repetition(repeated, self.write, self._link, self._live, self._ranks)
        elif isinstance(chosen, ChosenInMemory):
            self._take_writer(chosen, tap, resume)
        held, check = chosen.held, self._proof.check
        # Logged before: by the choice of the state, and as the verdict of the check.
        unproven = _OTHER_RANKS if chosen.resharded else _NO_SAMPLE
        self.report = self._proof.report = report = RestoreReport(
            held.step,
            held.record,
            held.tier,
            self._seconds,
            chosen.lost,
            tuple(filter(None, [unproven if proof is None else proof.inexact])),
            check,
            repeated=self._proof.repeated,
        )
        self._pending.regroup()
        if "gradients" in chosen.state:
            # Zeros stand for gradients that there were; pending ones are marked.
            restore_gradients(self._live, chosen.state["gradients"])
            self._pending.resume(chosen.state["pending"])
        if self._ranks.rank == 0:
            what = report.step, report.record, report.tier, round(report.seconds, 3), report.steps_lost
            self._link.tell_journal(Recovered(*what, report.exact, report.repeated))
        return report

    def restore_rng(self, chosen: Chosen) -> None:
        """Restore the RNG states of torch, numpy and python; the last call before training goes on."""
        # Once more: what the loop set above its batches, it had set before the batches behind the held one.
        restore_modes(self._live, chosen.state)
        rng.restore(chosen.state["rng"])
        if chosen.diverges is not None:
            rng.diverge(chosen.diverges)

    # From memory

    def _take_writer(self, chosen: ChosenInMemory, tap: Tap, resume: Callable[[SlotWriter, int], None]) -> None:
        """Adopt the writer on the resumed generation."""
        writer = chosen.take_writer()
        try:
            self._proof.set_gradients_aside(chosen, writer, tap)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._staging.adopt_writer(writer)
        resume(writer, chosen.plan.record)

    def adopt_writer(self, writer: SlotWriter) -> None:
        """Adopt the writer of a held generation, after a repeated step."""
        try:
            self._agree_on_replicas(writer)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._staging.adopt_writer(writer)

    def _agree_on_replicas(self, writer: SlotWriter) -> None:
        """Make replicas equal: other kernels or thread counts may give other bits. The first rank's replica wins."""
        ranks = self._ranks
        if all(len(group) == 1 for group in ranks.groups):
            return
        digests = ranks.gather(replica_digest(writer.params, self._live.optimizers))
        if all(len({digests[rank] for rank in group}) == 1 for group in ranks.groups):
            return
        _log.warning("memckpt: replicas differ in bits; every rank takes that of the first rank that holds the same")
        group = ranks.open_replica_group()
        for param in writer.params:
            ranks.broadcast_tensor(local(param), group)
            for optimizer in self._live.optimizers:
                state = optimizer.state.get(param, {})
                for key in sorted(state):
                    if isinstance(state[key], torch.Tensor):
                        ranks.broadcast_tensor(local(state[key]), group)

    # From either

    def _prove(self, evidence: Evidence, chosen: Chosen) -> Proof | None:
        """Compare the live state with the sample that its record carries; collective. None where some rank has none."""
        if not all(self._ranks.gather("evidence" in chosen.state)):
            return None
        comparison = Comparison()
        compare_sample(evidence, chosen.state["evidence"], comparison)
        held = _without_extra_state(chosen.state)
        for name, value in _without_extra_state(describe_groups(self._live)).items():
            comparison.value("hyperparameters", name, value, held.get(name, value))
        findings = comparison.findings(self._live.tensors())
        # Something else may have written to them: they are compared whole from now on.
        self._live.growth.written.update(one.name for one in findings.differences if one.kind == "parameter")
        everybody = self._ranks.gather(findings)
        return prove(everybody, any_accelerator(self._live, self._ranks), chosen.held.step, chosen.held.tier)

    def _restore_reduction(self, state: Mapping[str, Any], tap: Tap) -> None:
        if isinstance(tap, BucketTap):
            tap.resume_layout(state["reduction"])


def _without_extra_state(described: Mapping[str, Any]) -> dict[str, Any]:
    """Without what ``get_extra_state()`` returns: it may depend on the clock."""
    modules = {key: value for key, value in described.get("modules", {}).items() if key != "extra"}
    return {**described, "modules": modules}
