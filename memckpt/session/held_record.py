"""Access to the record whose step is repeated, in this node's memory or in storage."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from memckpt.capture.evidence import Evidence
from memckpt.capture.live_state import LiveState
from memckpt.capture.slot_writer import SlotWriter
from memckpt.errors import AgentGoneError
from memckpt.protocol.trainer import Advanced
from memckpt.recovery.comparison import Comparison
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.live_copies import LiveCopies
from memckpt.recovery.restore import Restorer
from memckpt.session.connection import PreparedRegions
from memckpt.session.link import AgentLink
from memckpt.state.layout import Layout
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import GradientSource, StagedGradients
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt")


def restorer_of(regions: PreparedRegions, writer: SlotWriter, live: LiveState) -> Restorer:
    """Restorer of a generation into the live state. `writer` is on these regions."""
    return Restorer(writer.layout, regions, writer.ring, live.tensors(), live.optimizers)


class HeldRecord(Protocol):
    """The held state after one record. The caller that repeats the record's step closes it.

    Attributes:
        spec: layout of the state.
    """

    spec: StateSpec

    @property
    def params(self) -> list[torch.Tensor]:
        """The live parameters, in the order of the layout."""

    def steps(self) -> tuple[Layout, RecordMeta, GradientSource] | None:
        """Layout, optimizer steps and gradients of the record; None where the record has no steps."""

    def advance(self) -> bool:
        """Prepare for :meth:`put_back`. Returns False if the held state is gone."""

    def put_back(self, comparison: Comparison) -> None:
        """Write the state to the live tensors, and pass their former values to `comparison`.

        Raises:
            MemckptError: the state cannot be read.
        """

    def evidence(self) -> Evidence:
        """The live tensors, as the record's sample has them."""

    def take_writer(self) -> SlotWriter | None:
        """Writer of the generation that holds the record, which the caller closes; None where a new one begins."""

    def close(self) -> None:
        """Release what is open."""


class InMemory:
    """A record in the regions of this node's agent. Owns the writer until it is taken.

    Args:
        record: number of the record.
        rank: rank whose by-value tensors are put back.
        regions: regions of the generation; their message says how the record and the one before are produced.
        writer: writer on these regions.
        live: the live state.
        link: connection to the agent, whose replica is one record behind.
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
        if before is None or not before.meta or self._writer.snapshots:
            return None
        layout = self._writer.layout
        return layout, decode_meta(before.meta), StagedGradients(self._regions.slots.map, layout)

    def advance(self) -> bool:
        if self._regions.replica is not None:
            try:
                self._advanced = self._link.advance(self._record)
            except AgentGoneError as error:
                _log.warning("memckpt: the agent has gone while record %d was repeated: %s", self._record, error)
                return False
        return True

    def put_back(self, comparison: Comparison) -> None:
        assert self._writer is not None
        restorer = restorer_of(self._regions, self._writer, self._live)
        metas, advanced = self._regions.message.metas, self._advanced
        restorer.restore(self._record, self._rank, metas, advanced.missing, advanced.plain, comparison)

    def evidence(self) -> Evidence:
        assert self._writer is not None
        return self._writer.evidence

    def take_writer(self) -> SlotWriter | None:
        writer, self._writer = self._writer, None
        return writer

    def close(self) -> None:
        writer = self.take_writer()
        if writer is not None:
            writer.close()


class InStorage:
    """A record in a store. A new generation begins with the next record."""

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

    def evidence(self) -> Evidence:
        return Evidence(self.spec, self._live)

    def take_writer(self) -> SlotWriter | None:
        return None

    def close(self) -> None:
        """No-op: no file stays open between two reads."""
