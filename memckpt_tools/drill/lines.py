"""The lines that a drilled training writes, one JSON object each, and the history that they tell. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar, Union

import msgspec

#: Bytes of a digest, and numbers of a sketch, of one tensor.
DIGEST_BYTES, SKETCHES = 16, 4
#: Kinds of values that are in no state.
ATTRIBUTE, VARIABLE = "attribute", "variable"
#: In the name of an attribute of an optimizer, between its own and that of the class.
OF_OPTIMIZER = " of optimizer "
#: With this character begins a value's own text; without it is a digest.
TEXT = "="
#: Kind and name of a value: ``("parameter", "head.weight")``.
Key = tuple[str, str]


class Line(msgspec.Struct, frozen=True, tag_field="line"):
    """Base of all lines. Times are of the machine's monotonic clock, in seconds."""


class Begun(Line, frozen=True, tag="begun"):
    """A session has begun to train, or goes on from a restored state."""

    pid: int
    ticks: int  #: start of the trainer in clock ticks since boot
    rank: int
    world_size: int
    time: float
    agent: int | None  #: process id of its node's agent; None while there is none
    node: str


class Loaders(Line, frozen=True, tag="loaders"):
    """The DataLoaders that there are, by their datasets' classes and their workers."""

    names: tuple[str, ...]


class Weights(Line, frozen=True, tag="weights"):
    """Bytes of all parameters of a rank."""

    nbytes: int


class Files(Line, frozen=True, tag="files"):
    """Events of files behind a step, such as ``rename saved.tmp``."""

    step: int
    events: tuple[str, ...]


class Tensors(Line, frozen=True, tag="tensors"):
    """Names of the tensors whose digests follow, in their order."""

    keys: tuple[Key, ...]


class Restored(Line, frozen=True, tag="restored"):
    """A state is restored; digests and sketches are as in :class:`Taken`."""

    step: int
    record: int
    tier: str
    seconds: float  #: duration of the restore
    repeated: int | None  #: step that is repeated as a proof; None if no step is
    digests: bytes
    sketches: bytes


class Taken(Line, frozen=True, tag="taken"):
    """A step is committed."""

    step: int  #: the framework's number
    record: int
    time: float  #: when the commit returned
    seconds: float  #: duration of making this line's digests
    losses: tuple[str, ...]  #: what backward began with since the last line, exact, as ``float.hex()`` writes it
    digests: bytes  #: 16 bytes of each tensor
    sketches: bytes  #: 4 float64 of each tensor: random signed sums of its elements
    values: dict[
        str, dict[str, str]
    ]  #: digests of other parts of the state, and of what is in no state, by kind and name
    stalled: float  #: seconds that protection has kept the process from training so far, without the drill's own work
    repeated: bool  #: whether the step was taken once more, as a proof; the state is the held one
    agent: int | None  #: process id of the agent that the session is connected to; None if it is to none
    check: tuple[str, str] | None  #: verdict of the resume check, and its line, where they are new


AnyLine = Union[Begun, Loaders, Weights, Files, Tensors, Restored, Taken]  # noqa: UP007
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyLine)


class Writer:
    """Appends lines to a file. One system call writes each line, so a kill leaves whole ones, or a torn last one."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # What a killed process has left of its last line must not run into the next one.
        os.write(self._fd, b"\n")
        self._keys: tuple[Key, ...] | None = None

    def name_tensors(self, keys: tuple[Key, ...]) -> None:
        """Write the names of the tensors whose digests follow, where they are other ones than before."""
        if keys != self._keys:
            self._keys = keys
            self.write(Tensors(keys))

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


LineT = TypeVar("LineT", Taken, Restored, covariant=True)


@dataclass(frozen=True)
class Point(Generic[LineT]):
    """The state behind a committed step, or behind a restore; `keys`: of the tensors whose digests are in its line."""

    line: LineT
    keys: tuple[Key, ...]

    @property
    def step(self) -> int:
        return self.line.step

    @property
    def record(self) -> int:
        return self.line.record


@dataclass
class Attempt:
    """One process of a rank: the restored state (None: training began anew), and the committed steps, in order."""

    begun: Begun
    restored: Point[Restored] | None = None
    points: list[Point[Taken]] = field(default_factory=list)

    @property
    def taken(self) -> list[Taken]:
        return [point.line for point in self.points]

    @property
    def last_record(self) -> int:
        """Newest record that was taken or restored; 0 if there is none."""
        if self.points:
            return self.points[-1].record
        return self.restored.record if self.restored is not None else 0

    @property
    def check(self) -> tuple[str, str]:
        """The last verdict of the resume check, and its line; empty if there was none."""
        return next((line.check for line in reversed(self.taken) if line.check is not None), ("", ""))

    @property
    def resumed_behind(self) -> tuple[int, int]:
        """Step and record behind which training goes on: the repeated ones, if a step is repeated; (0, 0): anew."""
        if self.restored is None:
            return 0, 0
        repeated = next((line for line in self.taken if line.repeated), None)
        if repeated is not None:
            return repeated.step, repeated.record
        return self.restored.step, self.restored.record


@dataclass
class RankHistory:
    """The attempts of one rank, in order, and what else its lines tell."""

    attempts: list[Attempt] = field(default_factory=list)
    loaders: tuple[str, ...] = ()  #: datasets and workers of its DataLoaders
    nbytes: int = 0  #: of its parameters
    files: dict[int, tuple[str, ...]] = field(default_factory=dict)  #: events of files, by the step before them
    _keys: tuple[Key, ...] = ()

    def add(self, line: AnyLine) -> None:
        """Add the next line of the rank's file."""
        if isinstance(line, Begun):
            self.attempts.append(Attempt(line))
        elif isinstance(line, Loaders):
            self.loaders = line.names
        elif isinstance(line, Weights):
            self.nbytes = line.nbytes
        elif isinstance(line, Files):
            self.files[line.step] = line.events
        elif isinstance(line, Tensors):
            self._keys = line.keys
        elif isinstance(line, Restored):
            self.attempts[-1].restored = Point(line, self._keys)
        else:
            self.attempts[-1].points.append(Point(line, self._keys))

    def points(self) -> Iterator[Point[Taken] | Point[Restored]]:
        """All points of all attempts, restored ones too."""
        for attempt in self.attempts:
            if attempt.restored is not None:
                yield attempt.restored
            yield from attempt.points

    @property
    def last_record(self) -> int:
        """Newest record of the newest attempt; 0 if there is none."""
        return self.attempts[-1].last_record if self.attempts else 0

    @property
    def furthest(self) -> int:
        """Newest record of all attempts."""
        return max((attempt.last_record for attempt in self.attempts), default=0)


class RunHistory:
    """The lines of all ranks of a run, followed as they come. :meth:`close` it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._readers: dict[int, Reader] = {}
        self.ranks: dict[int, RankHistory] = {}

    def poll(self) -> bool:
        """Read what has come; True if anything has."""
        for path in self._directory.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            if rank not in self._readers:
                self._readers[rank] = Reader(path)
                self.ranks[rank] = RankHistory()
        news = False
        for rank, reader in self._readers.items():
            for line in reader.poll():
                self.ranks[rank].add(line)
                news = True
        return news

    @property
    def attempts(self) -> int:
        """Number of attempts in which every rank has begun."""
        begun = [each.attempts[-1].begun for each in self.ranks.values() if each.attempts]
        if not begun or len(self.ranks) < max(each.world_size for each in begun):
            return 0
        return min(len(each.attempts) for each in self.ranks.values())

    @property
    def last_record(self) -> int:
        """Newest record that every rank has reached in its newest attempt."""
        return min((each.last_record for each in self.ranks.values()), default=0)

    @property
    def furthest(self) -> int:
        """Newest record that some rank has reached in any attempt."""
        return max((each.furthest for each in self.ranks.values()), default=0)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
