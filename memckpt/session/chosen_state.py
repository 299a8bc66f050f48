"""A state that is chosen to be resumed, from its opening to its restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from memckpt.capture.slot_writer import SlotWriter
from memckpt.protocol.trainer import Before, Prepared
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.plan import RestoreRecord
from memckpt.session.connection import PreparedRegions
from memckpt.session.report import HeldState
from memckpt.session.staging import RestorePoint
from memckpt.state import codec


@dataclass
class ChosenInMemory:
    """A record in this node's memory. Owns the regions until training takes the writer that was opened on them.

    Attributes:
        plan: plan with the record's number and source.
        held: description for the user.
        state: decoded rank state that is restored; that of the record before it where the step is repeated.
        point: the record with its own rank state.
        regions: regions of its generation.
        metas: encoded records to redo; those of the record before where its step is repeated.
        writer: writer on the regions, which owns them; None before the first restore, and once training has taken it.
        following: encoded rank states of the records behind it that are still to be compared, by record.
        restored: whether the restore has begun.
        diverges, resharded: always None and False: each rank gets its own state back.
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

    def repeat_from(self, before: Before, rank: int) -> None:
        """Restore the state before the record, from which its step is repeated."""
        self.state, self.metas = codec.decode(before.rank_states[rank]), before.metas
        self.held = replace(self.held, step=before.step, record=self.plan.record - 1, rank_state=self.state["provided"])

    def unrepeated(self, rank: int) -> ChosenInMemory | None:
        """The record itself where its step is to be repeated; None where it is not, or a replica stands before it."""
        if self.message.before is None or not self.message.earlier:
            return None
        return self._at(self.plan.record, self.plan.step, self.message.rank_states[rank], self.message.metas)

    def forgo_repetition(self) -> None:
        """Do not repeat the record's step."""
        self.regions.message = msgspec.structs.replace(self.message, before=None)

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
        held: description for the user.
        state: decoded rank state that is restored.
        stored: reader of the state.
        newest_known: newest record that some memory knows of; None if none does.
        repeated: reader of the state after `stored`, whose step is repeated; None if no step is.
        not_exact: always empty: checkpoints are not audited.
        diverges: first rank that was seeded as this one, if generators have to differ again from those of other ranks.
        restored: whether the restore has begun.
    """

    held: HeldState
    state: dict[str, Any]
    stored: StoredState
    newest_known: int | None
    repeated: StoredState | None = None
    diverges: int | None = None
    restored: bool = False
    not_exact: str = ""

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

    def close(self) -> None:
        """No-op: no file stays open between two reads."""


Chosen = ChosenInMemory | ChosenInStorage
