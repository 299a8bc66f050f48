"""The lines that a drilled training writes: one JSON object each, in a file for each rank. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Union

import msgspec

#: Bytes of a digest, and numbers of a sketch, of one tensor.
DIGEST_BYTES, SKETCHES = 16, 4
#: Kind and name of a value: ``("parameter", "head.weight")``.
Key = tuple[str, str]


class Line(msgspec.Struct, frozen=True, tag_field="line"):
    """Base of all lines. Times are of the machine's monotonic clock, in seconds."""


class Begun(Line, frozen=True, tag="begun"):
    """A session has begun to train, or goes on from a restored state.

    Attributes:
        pid, ticks: process id of the trainer, and its start in clock ticks since boot.
        rank, world_size: its place in the job.
        time: when.
        agent: process id of its node's agent; None while there is none.
        node: name of its node.
    """

    pid: int
    ticks: int
    rank: int
    world_size: int
    time: float
    agent: int | None
    node: str


class Loaders(Line, frozen=True, tag="loaders"):
    """The DataLoaders that there are, by their datasets' classes and their workers."""

    names: tuple[str, ...]


class Tensors(Line, frozen=True, tag="tensors"):
    """Names of the tensors whose digests follow, in their order."""

    keys: tuple[Key, ...]


class Restored(Line, frozen=True, tag="restored"):
    """A state is restored.

    Attributes:
        step, record: restored step, and its record.
        tier: source of the state.
        seconds: duration of the restore.
        repeated: step that is repeated as a proof; None if no step is.
        digests, sketches: of the tensors then, as in :class:`Taken`.
    """

    step: int
    record: int
    tier: str
    seconds: float
    repeated: int | None
    digests: bytes
    sketches: bytes


class Taken(Line, frozen=True, tag="taken"):
    """A step is committed.

    Attributes:
        step, record: the framework's number of it, and its record's.
        time: when the commit returned.
        seconds: duration of making this line's digests.
        losses: what backward began with since the last line, exact, as ``float.hex()`` writes it.
        digests: of each tensor, 16 bytes each.
        sketches: of each tensor, 4 float64 each: random signed sums of its elements.
        values: digests of other parts of the state, and of what is in no state, by kind and name.
        stalled: seconds that protection has kept the process from training so far, the drill's own work left out.
        repeated: whether the step was taken once more, as a proof; the state is the held one.
        agent: process id of the agent that the session is connected to; None if it is to none.
        check: verdict of the resume check, and its line, where they are new.
    """

    step: int
    record: int
    time: float
    seconds: float
    losses: tuple[str, ...]
    digests: bytes
    sketches: bytes
    values: dict[str, dict[str, str]]
    stalled: float
    repeated: bool
    agent: int | None
    check: tuple[str, str] | None


AnyLine = Union[Begun, Loaders, Tensors, Restored, Taken]  # noqa: UP007
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyLine)


class Writer:
    """Appends lines to a file. One system call writes each line, so a kill leaves whole ones, or a torn last one."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # What a killed process has left of its last line must not run into the next one.
        os.write(self._fd, b"\n")

    def write(self, line: AnyLine) -> None:
        data = memoryview(_encoder.encode(line) + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Reader:
    """Reads a file of lines that grows. :meth:`close` it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._rest = b""

    def poll(self) -> list[AnyLine]:
        """The whole lines that have come since the last call; torn ones, of killed processes, are left out."""
        parts = [self._rest]
        while part := os.read(self._fd, 1 << 22):
            parts.append(part)
        *lines, self._rest = b"".join(parts).split(b"\n")
        found = []
        for line in lines:
            if line:
                try:
                    found.append(_decoder.decode(line))
                except msgspec.DecodeError:
                    continue
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
