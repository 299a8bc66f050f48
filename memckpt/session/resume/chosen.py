"""A state that is held, in this node's memory or in storage, and its restore into the live tensors."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from memckpt.capture.evidence import Evidence
from memckpt.capture.live_state import LiveState
from memckpt.capture.param_groups import LINKS, describe_groups, restore_groups, restore_modes, restore_state_order
from memckpt.capture.slot_writer import SlotWriter
from memckpt.protocol.trainer import Before, Prepared
from memckpt.recovery.comparison import Comparison, LiveCopies
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.plan import RestoreRecord
from memckpt.recovery.restore import Restorer, replica_digest
from memckpt.session.connection import PreparedRegions
from memckpt.session.ranks import LocalTraining
from memckpt.session.resume.report import HeldState, Proof, prove
from memckpt.session.staging import Staging
from memckpt.state import codec, rng
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import GradientSource, StagedGradients
from memckpt.state.spec import StateSpec
from memckpt.state.tensors import local

_log = logging.getLogger("memckpt")
#: Parts of a rank state that are put back elsewhere.
_NOT_WRITTEN = ("provided", "evidence", "gradients", "rng")
#: The live parameters in the order of a layout, that layout, and a record's optimizer steps and gradients.
RecordedSteps = tuple[list[torch.Tensor], Layout, RecordMeta, GradientSource]


class HeldGeneration:
    """A generation in this node's memory, as its agent has produced a state of it. Owned until its writer is taken.

    `writer` owns the regions; it is None before the first restore, and once it is taken.
    """

    def __init__(self, regions: PreparedRegions) -> None:
        self.regions = regions
        self.writer: SlotWriter | None = None
        self._taken = False

    @property
    def message(self) -> Prepared:
        """The agent's answer: how the state is produced."""
        return self.regions.message

    def open_writer(self, staging: Staging) -> SlotWriter:
        """The writer, opened once."""
        if self.writer is None:
            self.writer = staging.open(self.regions)
            # On an H100 a restore of 1.5B parameters took 9 s behind the locks, and 14 s beside them.
            self.writer.wait_for_page_locks()
        return self.writer

    def take_writer(self) -> SlotWriter:
        """The writer, once; the caller closes it."""
        writer, self.writer = self.writer, None
        assert writer is not None
        self._taken = True
        return writer

    def close(self) -> None:
        """Close the regions, unless the writer was taken."""
        if self.writer is not None:
            self.take_writer().close()
        elif not self._taken:
            self._taken = True
            self.regions.close()


@dataclass
class ChosenInMemory:
    """A record in this node's memory. Each rank gets its own state back.

    Attributes:
        state: decoded rank state.
        metas: encoded records. Lazy: the T records to redo. Eager: those after the record at which the replica stands.
        following: encoded rank states of the records behind it that are still to be compared, by record.
    """

    plan: RestoreRecord
    held: HeldState
    state: dict[str, Any]
    metas: tuple[bytes, ...]
    generation: HeldGeneration
    following: dict[int, bytes] = field(default_factory=dict)
    diverges: ClassVar[int | None] = None
    resharded: ClassVar[bool] = False

    @property
    def lost(self) -> int | None:
        """Number of committed records beyond it."""
        return self.plan.lost

    @property
    def newest_known(self) -> int:
        """The newest record that was committed."""
        return self.plan.record + self.plan.lost

    @property
    def not_exact(self) -> str:
        """What the audit had found in what is restored, in words; empty if nothing."""
        drift = self.generation.message.drift
        return "" if drift is None else str(drift)

    @property
    def spec(self) -> StateSpec:
        """Layout of the state."""
        return self.generation.message.spec

    tensors_spec = spec

    @property
    def writer(self) -> SlotWriter | None:
        """The writer on its generation, once a state of it was restored."""
        return self.generation.writer

    def restore(self, live: LiveState, rank: int, staging: Staging) -> float | None:
        """Write the state to the live tensors. Returns the seconds that redo of a record took, None without redo."""
        writer, message = self.generation.open_writer(staging), self.generation.message
        restorer = Restorer(writer.layout, self.generation.regions, writer.ring, live.tensors(), live.optimizers)
        restorer.restore(self.plan.record, rank, self.metas, message.missing, message.plain)
        return restorer.record_redo_seconds

    def is_recut(self, live: LiveState) -> bool:
        """Whether the live tensors are cut into other shards: a node's memory has this rank's own."""
        return False

    def earlier(self, rank: int) -> list[ChosenInMemory]:
        """The records before it, newest first, in the same generation."""
        message = self.generation.message
        earlier = message.earlier or filter(None, [message.before])
        return [self.at(before, rank, back) for back, before in enumerate(earlier, 1)]

    def at(self, before: Before, rank: int, back: int = 1) -> ChosenInMemory:
        """The state so many records before it."""
        record, state = self.plan.record - back, codec.decode(before.rank_states[rank])
        plan = replace(self.plan, record=record, step=before.step, lost=self.plan.lost + back)
        held = replace(
            self.held, step=before.step, record=record, rank_state=state["provided"], newest_step=before.step
        )
        return replace(self, plan=plan, held=held, state=state, metas=before.metas, following={})

    def recorded_steps(self, live: LiveState) -> RecordedSteps | None:
        """The optimizer steps of the record, which is repeated; None where it has none."""
        writer, before = self.writer, self.generation.message.before
        assert writer is not None
        if before is None or not before.meta or writer.snapshots:
            return None
        gradients = StagedGradients(self.generation.regions.slots.map, writer.layout)
        return writer.params, writer.layout, decode_meta(before.meta), gradients


@dataclass
class ChosenInStorage:
    """A state in a store. Owns nothing.

    Attributes:
        newest_known: newest record that some memory knows of; None if none does.
        diverges: first rank that was seeded as this one, if generators have to differ again from those of other ranks.
    """

    held: HeldState
    state: dict[str, Any]
    stored: StoredState
    newest_known: int | None
    diverges: int | None = None
    generation: ClassVar[None] = None

    @classmethod
    def of(cls, stored: StoredState, tier: str, newest_known: int | None) -> ChosenInStorage:
        """The state that a reader reads."""
        point, state = stored.point, codec.decode(stored.rank_state)
        held = HeldState(point.step, point.record, tier, state["provided"], point.world_size, point.step)
        return cls(held, state, stored, newest_known)

    @property
    def not_exact(self) -> str:
        """What the audit had found in what is restored when it was written, in words; empty if nothing."""
        return self.stored.point.inexact

    @property
    def spec(self) -> StateSpec:
        """Layout of this rank's own state."""
        return self.stored.own.spec

    @property
    def tensors_spec(self) -> StateSpec:
        """Layout of parameters, static tensors and optimizer state."""
        return self.stored.state.spec

    @property
    def resharded(self) -> bool:
        """Whether the ranks, or their shards, are not those of the run that wrote it."""
        return not self.stored.exact

    @property
    def lost(self) -> int | None:
        """Number of committed records beyond it; None where no memory knows."""
        return None if self.newest_known is None else max(0, self.newest_known - self.stored.point.record)

    def restore(self, live: LiveState, rank: int, staging: Staging) -> None:
        """Write the state to the live tensors, as :meth:`ChosenInMemory.restore` does."""
        self.stored.restore(live.tensors(), live.optimizers)

    def is_recut(self, live: LiveState) -> bool:
        """Whether the live tensors are cut into other shards than the state was."""
        held = sorted((one.name, one.shape, one.shard) for one in self.spec.tensors() if one.shard is not None)
        return sorted(live.pieces()) != held

    def recorded_steps(self, live: LiveState) -> RecordedSteps | None:
        """The optimizer steps of the state's last record; None where it has none."""
        last, tensors, spec = self.stored.last_record(), live.tensors(), self.tensors_spec
        return None if last is None else ([tensors[one.tensor.name] for one in spec.params], Layout(spec), *last)


Chosen = ChosenInMemory | ChosenInStorage


class Restoration:
    """Restores states that are held, in place.

    Attributes:
        seconds: duration of all restores so far.
        record_redo_seconds: duration of the redo of one record at the last restore; None where nothing was redone.
    """

    def __init__(self, training: LocalTraining, staging: Staging) -> None:
        self._training = training
        self._ranks = training.ranks
        self._live = training.live
        self._staging = staging
        self.seconds = 0.0
        self.record_redo_seconds: float | None = None

    def fill(self, chosen: Chosen) -> Proof | None:
        """Restore tensors, optimizer state and groups, and compare them with the record's sample; collective.

        It may be called again, for the same state or another one. Returns None where other ranks or shards than the
        record's are restored, or there is no sample.
        """
        started = time.perf_counter()
        self._live.put_shards_in_place()
        evidence, problem = None, ""
        try:
            evidence = self.write(chosen)
        except Exception as error:  # becomes a finding: redo runs the user's classes with what was recorded
            problem = f"{type(error).__name__}: {error}"
            _log.info("memckpt: step %d cannot be restored from %s", chosen.held.step, chosen.held.tier, exc_info=error)
        found = self._ranks.first_reason(problem)
        if found or evidence is None:
            what = f"the state after step {chosen.held.step}, from {chosen.held.tier},"
            return Proof(f"{what} cannot be made: {found}", differs=True, broken=True)
        if chosen.generation is not None:
            self._agree_on_replicas(chosen.generation.open_writer(self._staging))
        self.seconds += time.perf_counter() - started
        return None if any(self._ranks.gather(chosen.resharded)) else self._prove(evidence, chosen)

    def write(self, chosen: Chosen, comparison: Comparison | None = None) -> Evidence:
        """Write a state to the live tensors, at any time; returns what samples it. Not collective.

        `comparison` compares with it what the live tensors had before.
        """
        # Live objects keep what they are given, and the state may be written once more.
        state = copy.deepcopy({key: one for key, one in chosen.state.items() if key not in _NOT_WRITTEN})
        restore_groups(self._live, state)
        self._live.growth.written.update(state["written"])
        self._live.part_views(state["views"])
        copies = None
        if comparison is not None:
            copies = LiveCopies(chosen.tensors_spec, chosen.spec, self._live.tensors(), self._live.optimizers)
        with rng.preserved():
            self.record_redo_seconds = chosen.restore(self._live, self._ranks.rank, self._staging)
        if "optimizers" in state:  # what is in no slot
            self._live.restore_optimizers(state["optimizers"], chosen.is_recut(self._live))
        restore_state_order(self._live, state)
        if copies is not None and comparison is not None:
            copies.compare(comparison)
        return Evidence(chosen.spec, self._live)  # not the writer's: a repeated step may have replaced modules

    def restore_rng(self, chosen: Chosen) -> None:
        """Restore the RNG states of torch, numpy and python; the last call before training goes on."""
        # Once more: what the loop set above its batches, it had set before the batches behind the held one.
        restore_modes(self._live, chosen.state)
        rng.restore(chosen.state["rng"])
        if chosen.diverges is not None:
            rng.diverge(chosen.diverges)

    def adopt_writer(self, writer: SlotWriter) -> None:
        """Have training go on in a held generation, after a repeated step."""
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

    def _prove(self, evidence: Evidence, chosen: Chosen) -> Proof | None:
        """Compare the live state with the sample that its record carries; collective. None where some rank has none."""
        if not all(self._ranks.gather("evidence" in chosen.state)):
            return None
        comparison = Comparison()
        compare_sample(evidence, chosen.state["evidence"], comparison)
        held = _comparable(chosen.state)
        for name, value in _comparable(describe_groups(self._live)).items():
            comparison.value("hyperparameters", name, value, held.get(name, value))
        findings = comparison.findings(self._live.tensors())
        # Something else may have written to them: they are compared whole from now on.
        self._live.growth.written.update(one.name for one in findings.differences if one.kind == "parameter")
        everybody = self._ranks.gather(findings)
        return prove(everybody, self._training.any_accelerator(), chosen.held.step, chosen.held.tier)


def compare_sample(evidence: Evidence, held: Mapping[str, Any], comparison: Comparison) -> None:
    """Compare the live state with a sample that a record carries."""
    with torch.no_grad():
        pairs = evidence.pairs(held)
    if pairs is None:
        comparison.absence("the state", "other tensors", "those of the record")
    for pair in pairs or ():
        comparison.tensor(pair.kind, pair.name, pair.now, pair.before)


def _comparable(described: Mapping[str, Any]) -> dict[str, Any]:
    """Without what ``get_extra_state()`` returns, which may depend on the clock, and links to what the script makes."""
    modules = {key: value for key, value in described.get("modules", {}).items() if key != "extra"}
    return {**{key: value for key, value in described.items() if key != LINKS}, "modules": modules}
