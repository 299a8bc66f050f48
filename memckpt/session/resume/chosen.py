"""A state that is held, in this node's memory or in storage, and can be written to the live tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from memckpt.capture.live_state import LiveState
from memckpt.capture.slot_writer import SlotWriter
from memckpt.protocol.trainer import Before, Prepared
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.plan import RestoreRecord
from memckpt.recovery.restore import Restorer
from memckpt.session.connection import PreparedRegions
from memckpt.session.link import AgentLink
from memckpt.session.resume.report import HeldState
from memckpt.session.staging import RestorePoint
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import GradientSource, StagedGradients
from memckpt.state.spec import StateSpec

#: The live parameters in the order of a layout, that layout, and a record's optimizer steps and gradients.
RecordedSteps = tuple[list[torch.Tensor], Layout, RecordMeta, GradientSource]


@dataclass
class ChosenInMemory:
    """A record in this node's memory. Owns the regions until training takes the writer that was opened on them.

    Attributes:
        state: decoded rank state that is restored; that of the record before it where the step is repeated.
        metas: encoded records to redo; those of the record before where its step is repeated.
        writer: writer on the regions, which owns them; None before the first restore, and once training has taken it.
        following: encoded rank states of the records behind it that are still to be compared, by record.
        restored: whether the restore has begun.
        diverges: always None: each rank gets its own state back.
        resharded: always False, for the same reason.
    """

    plan: RestoreRecord
    held: HeldState
    state: dict[str, Any]
    point: RestorePoint
    regions: PreparedRegions
    metas: tuple[bytes, ...]
    writer: SlotWriter | None = None
    following: dict[int, bytes] = field(default_factory=dict)
    restored: bool = False
    diverges: int | None = None
    resharded: bool = False

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
        drift = self.message.drift
        return "" if drift is None else str(drift)

    @property
    def message(self) -> Prepared:
        """The agent's answer: how the record is produced."""
        return self.regions.message

    @property
    def spec(self) -> StateSpec:
        """Layout of the state."""
        return self.message.spec

    tensors_spec = spec

    # Writing to the live tensors

    def restore(self, live: LiveState, rank: int) -> float | None:
        """Write the state to the live tensors.

        Returns:
            The duration of the redo of one record, in seconds; None where nothing was redone.
        """
        assert self.writer is not None
        restorer = Restorer(self.writer.layout, self.regions, self.writer.ring, live.tensors(), live.optimizers)
        missing, plain = self.message.missing, self.message.plain
        restorer.restore(self.held.record, rank, self.metas, missing, plain)
        return restorer.record_redo_seconds

    def is_recut(self, live: LiveState) -> bool:
        """Whether the live tensors are cut into other shards: a node's memory has this rank's own."""
        return False

    # The step that is repeated

    def repeat_from(self, before: Before, rank: int) -> None:
        """Restore the state before the record, from which its step is repeated."""
        self.state, self.metas = codec.decode(before.rank_states[rank]), before.metas
        self.held = replace(self.held, step=before.step, record=self.plan.record - 1, rank_state=self.state["provided"])

    def unrepeated(self, rank: int) -> ChosenInMemory | None:
        """The record itself where its step is to be repeated; None where it is not."""
        if self.message.before is None:
            return None
        return self._at(self.plan.record, self.plan.step, self.message.rank_states[rank], self.message.metas)

    def take_repeated(self, rank: int) -> ChosenInMemory | None:
        """The record whose step is repeated from this state, which owns the writer then; None if no step is."""
        repeated = self.unrepeated(rank)
        if repeated is not None:
            self.writer = None
        return repeated

    def recorded_steps(self, live: LiveState) -> RecordedSteps | None:
        """The optimizer steps of a record that is repeated; None where it has none."""
        assert self.writer is not None
        before = self.message.before
        if before is None or not before.meta or self.writer.snapshots:
            return None
        layout = self.writer.layout
        return self.writer.params, layout, decode_meta(before.meta), StagedGradients(self.regions.slots.map, layout)

    def advance_replica(self, link: AgentLink) -> None:
        """Have the agent's replica, if there is one, redo the step of the record: the state before is not needed."""
        message = msgspec.structs.replace(self.message, before=None)
        if self.regions.replica is not None:
            advanced = link.advance(self.plan.record)
            message = msgspec.structs.replace(message, missing=advanced.missing, plain=advanced.plain, metas=())
            self.metas = ()
        self.regions.message = message

    def forgo_repetition(self) -> None:
        """Do not repeat the record's step; the state before it stays one that can be restored."""
        message = self.message
        assert message.before is not None
        earlier = message.earlier or (message.before,)
        self.regions.message = msgspec.structs.replace(message, before=None, earlier=earlier)

    def earlier(self, rank: int) -> list[ChosenInMemory]:
        """The records before it, newest first, in the same regions; none where its step is to be repeated."""
        if self.message.before is not None:
            return []
        return [
            self._at(self.plan.record - back, before.step, before.rank_states[rank], before.metas)
            for back, before in enumerate(self.message.earlier, 1)
        ]

    def _at(self, record: int, step: int, rank_state: bytes, metas: tuple[bytes, ...]) -> ChosenInMemory:
        state = codec.decode(rank_state)
        plan = replace(self.plan, record=record, step=step, lost=self.plan.lost + self.plan.record - record)
        held = replace(self.held, step=step, record=record, rank_state=state["provided"], newest_step=step)
        point = RestorePoint.known(record, step, state)
        return replace(self, plan=plan, held=held, state=state, point=point, metas=metas, following={})

    def take_writer(self) -> SlotWriter:
        """The writer, once; the caller closes it."""
        writer, self.writer = self.writer, None
        assert writer is not None
        return writer

    def close(self) -> None:
        """Close the regions, unless training has taken them."""
        if self.writer is not None:
            self.take_writer().close()
        elif not self.restored:
            self.regions.close()


@dataclass
class ChosenInStorage:
    """A state in a store. Owns nothing.

    Attributes:
        newest_known: newest record that some memory knows of; None if none does.
        repeated: reader of the state after `stored`, whose step is repeated; None if no step is.
        diverges: first rank that was seeded as this one, if generators have to differ again from those of other ranks.
    """

    held: HeldState
    state: dict[str, Any]
    stored: StoredState
    newest_known: int | None
    repeated: StoredState | None = None
    diverges: int | None = None
    restored: bool = False

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
        reached = self.repeated if self.repeated is not None else self.stored
        return max(0, self.newest_known - reached.point.record) if self.newest_known is not None else None

    def repeat_from(self, before: StoredState, state: Mapping[str, Any]) -> None:
        """Restore the state before the chosen one, from which its step is repeated."""
        self.repeated, self.stored = self.stored, before
        self.state = dict(state)
        point, newest = before.point, self.held.newest_step
        self.held = HeldState(
            point.step, point.record, self.held.tier, self.state["provided"], point.world_size, newest
        )

    def restore(self, live: LiveState, rank: int) -> None:
        """Write the state to the live tensors, as :meth:`ChosenInMemory.restore` does."""
        self.stored.restore(live.tensors(), live.optimizers)

    def is_recut(self, live: LiveState) -> bool:
        """Whether the live tensors are cut into other shards than the state was."""
        held = sorted((one.name, one.shape, one.shard) for one in self.spec.tensors() if one.shard is not None)
        return sorted(live.pieces()) != held

    def unrepeated(self, rank: int) -> ChosenInStorage | None:
        """The state after the step that is repeated from this one; None if no step is."""
        if self.repeated is None:
            return None
        point, state = self.repeated.point, codec.decode(self.repeated.rank_state)
        held = replace(self.held, step=point.step, record=point.record, rank_state=state["provided"])
        return ChosenInStorage(held, state, self.repeated, self.newest_known)

    def take_repeated(self, rank: int) -> ChosenInStorage | None:
        """The same, as the state that is put back."""
        repeated = self.unrepeated(rank)
        return None if repeated is None else replace(repeated, restored=True)

    def forgo_repetition(self) -> None:
        """No-op: the state before it is found in the store again."""

    def recorded_steps(self, live: LiveState) -> RecordedSteps | None:
        """The optimizer steps of the state's last record; None where it has none."""
        last, tensors = self.stored.last_record(), live.tensors()
        if last is None:
            return None
        spec = self.stored.state.spec
        return ([tensors[param.tensor.name] for param in spec.params], Layout(spec), *last)

    def advance_replica(self, link: AgentLink) -> None:
        """No-op: nothing of it is in an agent."""

    def take_writer(self) -> None:
        """None: a new generation begins with the next record."""

    def close(self) -> None:
        """No-op: no file stays open between two reads."""


Chosen = ChosenInMemory | ChosenInStorage
