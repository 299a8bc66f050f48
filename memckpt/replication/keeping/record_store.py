"""What keeps other nodes' records: the contract of fragment stores and standby replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod

from memckpt.replication.coding.code import Code
from memckpt.replication.coding.fragments import Fragment
from memckpt.replication.transport.wire import NotStored, Stored, Window
from memckpt.state.records import RankGroup


class RecordStore(ABC):
    """Memory for other nodes' records, a window for each generation. Belongs to the replicator's loop.

    *When bytes may change.* A payload belongs to its caller again when :meth:`put` returns: it has been copied. Bytes
    of a record may change, or go, until the record is answered with :class:`Stored`. From then on the store can
    produce the state after that record until :meth:`watermark_advanced` names a later one, or a later record that was
    answered takes its slot. A standby replica advances in place, by redo: to the watermark, or to D
    records before the newest where that is later, since its owner's slots go back no further. Fragments do not change
    before they are dropped.

    *Who drops what.* Windows of this attempt go when the watermark passes the base of a later one, or with the record
    that their owner abandons. Windows of earlier attempts go when this attempt is whole. The process that owns the
    memory outlives this one: :meth:`leave` unmaps, and drops nothing.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Reserved memory that belongs to the store, in bytes."""

    @abstractmethod
    def begin(self, attempt: str, record: int | None, code: Code, rejoined: bool = False) -> None:
        """Begin an attempt; it goes on behind `record`, or uses nothing of what is here (None).

        What is of no use to it stays until all of it is protected: it may end before, and another one find better use.

        Args:
            attempt: its nonce.
            record: the record behind which the attempt goes on.
            code: the code of its fragments; belongs to the caller, and is not used after the attempt.
            rejoined: whether the attempt has begun before, with another process, whose memory this is.
        """

    @abstractmethod
    def halt(self) -> None:
        """End the attempt: nothing more is taken until another one begins."""

    @abstractmethod
    def leave(self) -> None:
        """Unmap everything; its keeper keeps it."""

    @abstractmethod
    def open(self, window: Window) -> NotStored | None:
        """Make room for a generation, or begin it anew; an answer only if there is no room."""

    @abstractmethod
    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> Stored | NotStored | None:
        """Copy a fragment; the answer that its owner is to get, if any."""

    @abstractmethod
    def abandon(self, owner: RankGroup, generation: str, record: int) -> None:
        """Drop what has come of a record of which no more comes."""

    @abstractmethod
    def watermark_advanced(self, watermark: int, whole: bool) -> None:
        """Drop what is not needed any more.

        Args:
            watermark: the newest record that is acknowledged for every node, as far as is known here.
            whole: whether every node is protected by windows of this attempt.
        """
