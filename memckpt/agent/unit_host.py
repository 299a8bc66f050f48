"""The agent and the other units of its node, as a unit knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from memckpt.journal.events import AnyEvent
from memckpt.memory.redo_news import RedoNews
from memckpt.processes.helper_process import WriterProcess
from memckpt.protocol.channel import AgentToTrainer
from memckpt.protocol.storing import WriterToAgent
from memckpt.state.records import RankGroup


class Host(Protocol):
    """The agent. All but :meth:`notify` belong to the event loop."""

    def start_writer(
        self,
        kind: Literal["checkpoint", "record"],
        received: Callable[[WriterToAgent], None],
        ended: Callable[[str], None],
    ) -> WriterProcess:
        """Start a process that writes; `received` gets its answers, `ended` the reason of its end."""

    def tell_ranks(
        self, ranks: RankGroup, message: AgentToTrainer, *, besides: int | None = None, fd: int | None = None
    ) -> None:
        """Send a message, with a descriptor, to the trainers of these ranks; `besides` names one that is left out."""

    def notify(self, ranks: RankGroup, message: RedoNews) -> None:
        """Hand the event loop a message from the redo thread of these ranks' unit; called on that thread."""

    def checkpoint_failed(self) -> None:
        """Note that a checkpoint could not be written, and that nothing that is held is still to be written."""

    def note_event(self, event: AnyEvent) -> None:
        """Add an event to the run's journal, and count it. Never blocks."""

    def bytes_for_peers(self) -> int:
        """Memory that holds other nodes' records, in bytes."""

    def has_lost_file(self) -> bool:
        """Whether the file by which trainers find this agent has been removed."""


class Siblings(Protocol):
    """Requests of a unit to the other units of its node."""

    def announce(self, ranks: RankGroup, record: int) -> None:
        """Tell the other units that the unit of these ranks takes a checkpoint after a record."""

    def hurry(self, lead: int) -> None:
        """Have all give orders `lead` records ahead from now on: one for a copy was too late for some ranks."""

    def bytes_beside(self, ranks: RankGroup) -> int:
        """Memory that the node holds beside the unit of these ranks, in bytes."""
