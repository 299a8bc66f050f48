"""The agent, as its groups of ranks know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.trainer import Message


class Host(Protocol):
    """What a group asks of the process that it lives in. All but :meth:`notify` belong to the event loop."""

    def start_writer(
        self,
        what: Literal["checkpoints", "records"],
        received: Callable[[Message], None],
        ended: Callable[[str], None],
    ) -> HelperProcess:
        """Start a process that writes.

        Args:
            what: it writes.
            received: called with each of its answers.
            ended: called with the reason when it is gone.
        """

    def tell(
        self, ranks: tuple[int, ...], message: Message, *, besides: int | None = None, fd: int | None = None
    ) -> None:
        """Send a message, with a descriptor, to the trainers of these ranks; `besides` names one that is left out."""

    def notify(self, ranks: tuple[int, ...], message: Message) -> None:
        """Hand the event loop a message from the redo thread of these ranks' group; called on that thread."""

    def checkpoint_failed(self) -> None:
        """A checkpoint could not be written."""

    def bytes_for_peers(self) -> int:
        """Memory that holds other nodes' records, in bytes."""
