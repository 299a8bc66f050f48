"""The record whose step is repeated, where it is held: in this node's memory, or in storage."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from memckpt.capture.live_state import LiveState
from memckpt.capture.slot_writer import SlotWriter
from memckpt.errors import AgentGoneError
from memckpt.protocol.trainer import Advanced
from memckpt.recovery.comparison import Comparison
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.live_copies import LiveCopies
from memckpt.recovery.restore import Restorer
from memckpt.session.agent_regions import PreparedRegions
from memckpt.session.link import AgentLink
from memckpt.state.layout import Layout, StateSpec
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import GradientSource, StagedGradients

_log = logging.getLogger("memckpt")


class HeldRecord(Protocol):
    """The held state after one record. Whoever repeats the record's step closes it.

    Attributes:
        spec: of the state.
    """

    spec: StateSpec

    @property
    def params(self) -> list[torch.Tensor]:
        """The live parameters, in the order of the layout."""

    def steps(self) -> tuple[Layout, RecordMeta, GradientSource] | None:
        """The steps that the record says were taken, and their gradients; None where it does not say."""

    def advance(self) -> bool:
        """Get ready to be put back; False if what is held has gone."""

    def put_back(self, comparison: Comparison) -> None:
        """Put it into the live tensors, and tell the comparison of what was there.

        Raises:
            MemckptError: it cannot be put back.
        """

    def take_writer(self) -> SlotWriter | None:
        """The writer of the generation that holds it, which the caller closes; None: another one begins."""

    def close(self) -> None:
        """Let go of it."""


class InMemory:
    """A record in the regions of this node's agent. Owns the writer on them until it is taken.

    Args:
        record: which.
        rank: whose by-value tensors are put back.
        regions: of the generation; their message says how the record is produced, and the one before.
        writer: on these regions.
        live: the live state.
        link: to the agent, whose replica stands one record behind.
    """

    def __init__(
        self,
        record: int,
        rank: int,
        regions: PreparedRegions,
        writer: SlotWriter,
        live: LiveState,
        link: AgentLink,
    ) -> None:
        self.spec = writer.spec
        self._record = record
        self._rank = rank
        self._regions = regions
        self._writer: SlotWriter | None = writer
        self._live = live
        self._link = link
        self._advanced = Advanced()

    @property
    def params(self) -> list[torch.Tensor]:
        assert self._writer is not None
        return self._writer.params

    def steps(self) -> tuple[Layout, RecordMeta, GradientSource] | None:
        assert self._writer is not None
        before = self._regions.message.before
        if before is None or not before.meta or self._writer.captures:
            return None
        layout = self._writer.layout
        return layout, decode_meta(before.meta), StagedGradients(self._regions.slots.map, layout)

    def advance(self) -> bool:
        if self._regions.replica is not None:
            try:
                self._advanced = self._link.client.advance(self._record)
            except AgentGoneError as error:
                _log.warning("memckpt: the agent has gone while record %d was repeated: %s", self._record, error)
                return False
        return True

    def put_back(self, comparison: Comparison) -> None:
        assert self._writer is not None
        restorer = Restorer(
            self._writer.layout,
            self._regions.slots,
            self._regions.static,
            self._regions.replica,
            self._writer.ring,
            self._live.tensors(),
            self._live.optimizers,
        )
        metas, advanced = self._regions.message.metas, self._advanced
        restorer.restore(self._record, self._rank, metas, advanced.missing, advanced.plain, comparison)

    def take_writer(self) -> SlotWriter | None:
        writer, self._writer = self._writer, None
        return writer

    def close(self) -> None:
        writer = self.take_writer()
        if writer is not None:
            writer.close()


class InStorage:
    """A record in a store. Memory holds nothing, and begins a generation with the next record."""

    def __init__(self, stored: StoredState, live: LiveState) -> None:
        self.spec = stored.own.spec
        self._stored = stored
        self._live = live

    @property
    def params(self) -> list[torch.Tensor]:
        tensors = self._live.tensors()
        return [tensors[param.tensor.name] for param in self._stored.state.spec.params]

    def steps(self) -> tuple[Layout, RecordMeta, GradientSource] | None:
        last = self._stored.last_record()
        return (Layout(self._stored.state.spec), *last) if last is not None else None

    def advance(self) -> bool:
        return True

    def put_back(self, comparison: Comparison) -> None:
        tensors, optimizers = self._live.tensors(), self._live.optimizers
        copies = LiveCopies(self._stored.state.spec, self._stored.own.spec, tensors, optimizers)
        self._stored.restore(tensors, optimizers)
        copies.compare(comparison)

    def take_writer(self) -> SlotWriter | None:
        return None

    def close(self) -> None:
        """Nothing is open between two reads."""
