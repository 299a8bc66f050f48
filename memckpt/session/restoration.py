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
from memckpt.recovery.comparison import Comparison
from memckpt.recovery.restore import replica_digest
from memckpt.session.agent_regions import PreparedRegions
from memckpt.session.chosen_state import Chosen, ChosenInMemory, ChosenInStorage
from memckpt.session.held_record import InMemory, InStorage, restorer_of
from memckpt.session.link import AgentLink
from memckpt.session.local_training import LocalTraining
from memckpt.session.repetition import Repetition, any_accelerator
from memckpt.session.report import RestoreReport
from memckpt.session.resume_check import Proof, prove
from memckpt.session.resume_proof import ResumeProof
from memckpt.session.staging import Staging
from memckpt.state import codec, rng
from memckpt.state.tensors import local

_log = logging.getLogger("memckpt")
_OTHER_RANKS = "the number of ranks or their shards have changed, and what is private to a rank is another's"


class Restoration:
    """Restores a chosen state, in place.

    Args:
        training: training whose tensors are restored.
        link: connection to the agent, whose replica advances after a repeated step.
        staging: adopts the writer of the resumed generation.
        proof: gets the states and gradients to compare with.

    Attributes:
        report: of the restore; None before it, and where training starts over.
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

    def restore_tensors(self, chosen: Chosen, tap: Tap, go_on: Callable[[SlotWriter, int], None]) -> RestoreReport:
        """Restore parameters, buffers, optimizer state, groups, and the presence of gradients.

        Args:
            chosen: a state that is not restored yet.
            tap: gets the layout in which gradients were reduced.
            go_on: called with the writer of the resumed generation and the restored record, unless the step is repeated
                or the state comes from a store.
        """
        self._live.put_shards_in_place()
        if isinstance(chosen, ChosenInMemory):
            report = self._restore_from_memory(chosen, tap, go_on)
        else:
            report = self._restore_from_storage(chosen, tap)
        self.report = report
        self._pending.regroup()
        if "gradients" in chosen.state:
            # Zeros stand for gradients that there were; pending ones are marked.
            restore_gradients(self._live, chosen.state["gradients"])
            self._pending.resume(chosen.state["pending"])
        if self._ranks.rank == 0:
            what = report.step, report.record, report.tier, round(report.seconds, 3), report.steps_lost
            self._link.note(Recovered(*what, report.exact, report.repeated))
        return report

    def restore_rng(self, chosen: Chosen) -> None:
        """Restore the RNG states of torch, numpy and python; the last call before training goes on."""
        # Once more: what the loop set above its batches, it had set before the batches behind the held one.
        restore_modes(self._live, chosen.state)
        rng.restore(chosen.state["rng"])
        if chosen.diverges is not None:
            rng.diverge(chosen.diverges)

    # From memory

    def _restore_from_memory(
        self, chosen: ChosenInMemory, tap: Tap, go_on: Callable[[SlotWriter, int], None]
    ) -> RestoreReport:
        started = time.perf_counter()
        plan = chosen.plan
        restore_groups(self._live, chosen.state)
        regions = chosen.take_regions()  # owned by the writer from here on
        writer = self._staging.open(regions)
        try:
            self._restore_held(plan.record, regions, writer)
            self._restore_optimizers(chosen.state)
            self._agree_on_replicas(writer)
            proved = self._prove(writer.evidence, chosen)
            if regions.message.before is not None:
                held = InMemory(plan.record, self._ranks.rank, regions, writer, self._live, self._link)
                state = codec.decode(regions.message.rank_states[self._ranks.rank])
                self._proof.repetition = Repetition(plan.record, plan.step, held, state, self._live, self._ranks)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._restore_reduction(chosen.state, tap)
        if self._proof.repetition is None:
            self._proof.set_gradients_aside(chosen, writer, tap)
            self._staging.adopt(writer)
            go_on(writer, plan.record)
        seconds, held_state, proof = time.perf_counter() - started, chosen.held, self._proof
        return RestoreReport(
            held_state.step,
            held_state.record,
            plan.tier,
            seconds,
            plan.lost,
            check=proof.check,
            repeated=proof.repeated,
        ).because(self._why_not_exact(proved))

    def _restore_held(self, record: int, regions: PreparedRegions, writer: SlotWriter) -> None:
        message = regions.message
        metas = message.metas
        if message.before is not None:
            record, metas = record - 1, message.before.metas
        restorer = restorer_of(regions, writer, self._live)
        with rng.preserved():
            restorer.restore(record, self._ranks.rank, metas, message.missing, message.plain)
        self.record_redo_seconds = restorer.record_redo_seconds

    def adopt(self, writer: SlotWriter) -> None:
        """Adopt the writer of a held generation, after a repeated step."""
        try:
            self._agree_on_replicas(writer)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._staging.adopt(writer)

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

    # From a store

    def _restore_from_storage(self, chosen: ChosenInStorage, tap: Tap) -> RestoreReport:
        started = time.perf_counter()
        stored, repeated = chosen.stored, chosen.repeated
        chosen.restored = True
        restore_groups(self._live, chosen.state)
        with rng.preserved():
            stored.restore(self._live.tensors(), self._live.optimizers)
        pieces = sorted(self._live.pieces())
        held = sorted((one.name, one.shape, one.shard) for one in stored.own.spec.tensors() if one.shard is not None)
        self._restore_optimizers(chosen.state, resharded=pieces != held)
        point = stored.point
        if stored.exact:
            self._restore_reduction(chosen.state, tap)
        if repeated is not None:
            last, state = repeated.point, codec.decode(repeated.rank_state)
            in_storage = InStorage(repeated, self._live)
            self._proof.repetition = Repetition(last.record, last.step, in_storage, state, self._live, self._ranks)
        proved = self._prove(Evidence(stored.own.spec, self._live), chosen) if stored.exact else None
        seconds = time.perf_counter() - started
        return RestoreReport(
            point.step,
            point.record,
            chosen.held.tier,
            seconds,
            chosen.lost,
            () if stored.exact else (_OTHER_RANKS,),
            self._proof.check,
            repeated=self._proof.repeated,
        ).because(self._why_not_exact(proved))

    # From either

    def _prove(self, evidence: Evidence, chosen: Chosen) -> Proof:
        """Compare the live state with the sample that its record carries; collective."""
        comparison = Comparison()
        with torch.no_grad():
            pairs = evidence.pairs(chosen.state["evidence"])
        if pairs is None:
            comparison.absence("the state", "other tensors", "those of the record")
        for pair in pairs or ():
            comparison.tensor(pair.kind, pair.name, pair.now, pair.before)
        for name, value in describe_groups(self._live).items():
            comparison.value("hyperparameters", name, value, chosen.state.get(name, value))
        everybody = self._ranks.gather(comparison.findings(self._live.tensors()))
        return prove(everybody, any_accelerator(self._live, self._ranks), chosen.held.step, chosen.held.tier)

    def _why_not_exact(self, proof: Proof | None) -> str:
        """Take the proof for the resume check; returns why the restored state is another one, empty if it is not."""
        if proof is None:
            return ""
        self._proof.check.prove(proof)
        return proof.line if proof.differs or proof.rounds else ""

    def _restore_optimizers(self, state: Mapping[str, Any], resharded: bool = False) -> None:
        """Restore optimizer state that is in no slot."""
        if "optimizers" in state:
            self._live.restore_optimizers(state["optimizers"], resharded)
        restore_state_order(self._live, state)

    def _restore_reduction(self, state: Mapping[str, Any], tap: Tap) -> None:
        if isinstance(tap, BucketTap):
            tap.resume_layout(state["reduction"])
