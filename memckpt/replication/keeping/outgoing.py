"""One generation of a node's own records, on its way to the holders of their fragments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from memckpt.replication.transport.wire import Window


class Stripes(Protocol):
    """The bytes of a record, as :class:`Blob` has them."""

    nbytes: int
    stripes: int

    def stripe(self, index: int) -> bytes | memoryview: ...

    def release(self) -> None: ...


class Source(Protocol):
    """Bytes of one generation's records."""

    def open(self, record: int) -> Stripes | None:
        """The bytes of a record; None if they are not there any more."""
        ...

    def intact(self, record: int) -> bool:
        """Whether what has been read of a record until now was the record's."""
        ...

    def step(self, record: int) -> int:
        """The framework's step of a record."""
        ...

    def close(self) -> None: ...


class Outgoing:
    """One generation that is sent.

    Args:
        window: the generation as holders are told of it, for fragment 0.
        source: the bytes of its records; closed with it.
        records: records that are there when it begins: virtual ones up to its base.
        slots: slots of the ring in which records lie; None: as many as a holder keeps.
    """

    def __init__(self, window: Window, source: Source, records: Sequence[int], slots: int | None = None) -> None:
        self.window = window
        self.source = source
        self.records = deque(records)
        self._slots = window.kept if slots is None else slots
        self._blobs: dict[int, Stripes] = {}

    @property
    def generation(self) -> str:
        return self.window.generation

    def add(self, record: int) -> None:
        """Append a record. Records further back than a window reaches are not needed again."""
        self.records.append(record)
        while len(self.records) > self.window.kept:
            self.release_record(self.records.popleft())

    def left(self, record: int) -> int:
        """Records that training may still commit before it overwrites the slot of this one."""
        newest = self.records[-1] if self.records else record
        return record // self.window.every + self._slots - 1 - newest // self.window.every

    def blob(self, record: int) -> Stripes | None:
        """The bytes of a record; None if they are not there any more."""
        found = self._blobs.get(record)
        if found is None:
            found = self.source.open(record)
            if found is not None:
                self._blobs[record] = found
        return found

    def release_record(self, record: int) -> None:
        """Release the bytes of a record, which no stream reads at present."""
        blob = self._blobs.pop(record, None)
        if blob is not None:
            blob.release()

    def close(self) -> None:
        for record in list(self._blobs):
            self.release_record(record)
        self.source.close()
