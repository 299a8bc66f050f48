"""The journal of a run on a node: JSON lines in the run directory, bounded, written by a thread; and its readers.

Where the disk hangs or is full, events are lost and counted. The files are not synced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from memckpt.errors import DamagedStateError
from memckpt.journal.events import AnyEvent, AttemptBegan, Entry, Envelope, Finished, Lost, decode, encode

_log = logging.getLogger("memckpt.agent")
#: Size in bytes at which a file is rotated, and number of older files that are kept.
FILE_BYTES, OLDER_FILES = 2 << 20, 3
#: Most events that wait to be written.
_MOST_WAITING = 1_000
#: Longest line, in bytes; longer texts are cut.
_LINE_BYTES, _TEXT_CHARACTERS = 8_192, 1_000
#: Longest wait, in seconds, for queued events at the end of the process.
_END_SECONDS = 2.0
_NAME = re.compile(r"events-(?P<node>.+)\.jsonl(?:\.(?P<age>\d+))?")


def file_name(node: str, age: int = 0) -> str:
    """Name of a node's journal in the run directory; older files have an `age` of 1 or more."""
    return f"events-{node}.jsonl" + (f".{age}" if age else "")


def files_of(run_dir: Path, node: str | None = None) -> dict[str, list[Path]]:
    """Files of the journals in a run directory, oldest first, by node; `node`: of that one only."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in run_dir.glob("events-*.jsonl*"):
        match = _NAME.fullmatch(path.name)
        if match is not None and node in (None, match["node"]):
            found.setdefault(match["node"], []).append((int(match["age"] or 0), path))
    return {name: [path for _, path in sorted(files, reverse=True)] for name, files in sorted(found.items())}


class Journal:
    """Owns a thread and a descriptor of the run directory, which may be moved; rotates at `file_bytes`."""

    def __init__(
        self, run_dir: Path, node: str, file_bytes: int = FILE_BYTES, clock: Callable[[], float] = time.time
    ) -> None:
        self._run_dir, self._node = run_dir, node
        self._file_bytes, self._clock = file_bytes, clock
        #: Number of the attempt that events belong to.
        self.attempt = 0
        #: Why events cannot be written now; empty if they can.
        self.problem = ""
        self._directory = -1
        self._lines: queue.Queue[bytes | threading.Event | None] = queue.Queue(_MOST_WAITING)
        #: Events that found no room in the queue, that could not be written, and that were reported as lost.
        self._dropped = self._failed = self._reported = 0
        #: When the first of those that are not reported was lost.
        self._lost_at: float | None = None
        # A daemon: nothing can interrupt a write to a disk that hangs.
        self._thread = threading.Thread(target=self._write, name="memckpt-journal", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Number of events that are not in the journal."""
        return self._dropped + self._failed

    def add(self, event: AnyEvent, at: float | None = None) -> None:
        """Add an event that happened `at` some time (seconds since 1970). Never blocks, nor raises for the journal."""
        try:
            self._lines.put_nowait(self._line(event, at))
        except queue.Full:
            self._lost_at = self._clock() if self._lost_at is None else self._lost_at
            self._dropped += 1

    def _line(self, event: AnyEvent, at: float | None = None) -> bytes:
        envelope = Envelope(time=round(self._clock() if at is None else at, 3), node=self._node, attempt=self.attempt)
        line = encode(envelope, event)
        if len(line) > _LINE_BYTES:
            texts = {
                name: f"{text[:_TEXT_CHARACTERS]} ..."
                for name in event.__struct_fields__
                if isinstance(text := getattr(event, name), str) and len(text) > _TEXT_CHARACTERS
            }
            line = encode(envelope, msgspec.structs.replace(event, **texts))
        return line + b"\n"

    def settle(self, seconds: float) -> bool:
        """Wait `seconds` at most until what was added is written or lost; returns whether that was long enough."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(written)
        return written.wait(seconds)

    def close(self) -> None:
        """End the thread once queued events are written; wait briefly for that. Idempotent."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(_END_SECONDS)

    # The thread

    def _write(self) -> None:
        ended = False
        while not ended:
            batch = [self._lines.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._lines.get_nowait())
            ended = None in batch
            lines = [line for line in batch if isinstance(line, bytes)]
            if lines:
                self._write_lines(lines)
            for waiting in batch:
                if isinstance(waiting, threading.Event):
                    waiting.set()
        if self._directory >= 0:
            os.close(self._directory)

    def _write_lines(self, lines: list[bytes]) -> None:
        missing = self.lost - self._reported
        head = [self._line(Lost(missing), self._lost_at)] if missing else []
        try:
            self._append(b"".join(head + lines))
        except OSError as error:
            self._lost_at = self._clock() if self._lost_at is None else self._lost_at
            self._failed += len(lines)
            if not self.problem:
                _log.warning(
                    "the journal %s cannot be written (%s): events are lost until it can; training and its protection "
                    "do not depend on it",
                    self._run_dir / file_name(self._node),
                    error.strerror or error,
                )
            self.problem = str(error)
            return
        self._reported += missing
        self._lost_at = None
        if self.problem:
            _log.info("the journal is written again; %d events were lost", missing)
            self.problem = ""

    def _append(self, data: bytes) -> None:
        """Append whole lines to the file, opened each time: others rotate and delete it. A torn line is ended first."""
        if self._directory < 0:
            self._directory = os.open(self._run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        file = self._open()
        try:
            size = os.fstat(file).st_size
            if size and size + len(data) > self._file_bytes:
                os.close(file)
                file = -1
                self._rotate()
                file, size = self._open(), 0
            if size and os.pread(file, 1, size - 1) != b"\n":
                data = b"\n" + data
            while data:
                data = data[os.write(file, data) :]
        finally:
            if file >= 0:
                os.close(file)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(file_name(self._node), flags, 0o644, dir_fd=self._directory)

    def _rotate(self) -> None:
        here = self._directory
        for age in range(OLDER_FILES - 1, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.rename(file_name(self._node, age), file_name(self._node, age + 1), src_dir_fd=here, dst_dir_fd=here)


#: Longest line that is waited for, in bytes, and size of a read. The journal's own lines are far shorter.
_LONGEST_BYTES = 1 << 20
#: Bytes at a journal's end that tell of its newest attempt.
_TAIL_BYTES = 1 << 16


def entries_of(lines: Iterable[bytes]) -> list[Entry]:
    """The entries of whole lines; what is torn (a full disk, a crash) is left out."""
    entries = []
    for line in lines:
        if line.strip():
            with contextlib.suppress(DamagedStateError):
                entries.append(decode(line))
    return entries


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """The entries by time; those of one moment as they were written."""
    return sorted(entries, key=lambda entry: entry.envelope.time)


def read_journal(run_dir: Path, node: str | None = None) -> list[Entry]:
    """All events of a run, oldest first; `node`: of that node only. Raises OSError where a file cannot be read."""
    with contextlib.closing(Follower(run_dir, node)) as follower:
        return follower.poll()


def latest_attempt(run_dir: Path, node: str) -> int:
    """Number of the newest attempt in a node's journal; 0 where there is none, or it cannot be read."""
    for entries in _read_ends(run_dir, node):
        if newest := max((entry.envelope.attempt for entry in entries), default=0):
            return newest  # an agent without trainers may fill a file, too
    return 0


def find_finish(run_dir: Path, node: str) -> Entry | None:
    """The event in a node's journal that training has finished, if no attempt has begun since."""
    for entries in _read_ends(run_dir, node):
        for entry in reversed(entries):
            if isinstance(entry.event, Finished | AttemptBegan):
                return entry if isinstance(entry.event, Finished) else None
    return None


def _read_ends(run_dir: Path, node: str) -> Iterator[list[Entry]]:
    """The last entries of each file of a node's journal, the newest file first; of those that can be read."""
    for path in reversed(files_of(run_dir, node).get(node, [])):
        if path.is_file():
            with contextlib.suppress(OSError), path.open("rb") as file:  # no command and no start depends on it
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                yield entries_of(file.read(_TAIL_BYTES).split(b"\n"))


class _File:
    """The newest file of one node's journal, followed through its rotations. Owns a descriptor; :meth:`close` it.

    A line longer than `_LONGEST_BYTES` is no event, and is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._rest, self._skips = b"", False

    def poll(self) -> list[bytes]:
        """The whole lines that have come since the last call."""
        lines = self._read()
        if self._rotated():
            lines += self._read()  # what came behind the last read, before it was rotated
            self.close()
            self._rest, self._skips = b"", False
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            lines += self._read()
        return lines

    def _read(self) -> list[bytes]:
        found: list[bytes] = []
        while self._fd >= 0 and (part := os.read(self._fd, _LONGEST_BYTES)):
            *lines, rest = (self._rest + part).split(b"\n")
            if self._skips and lines:
                del lines[0]
                self._skips = False
            self._skips = self._skips or len(rest) > _LONGEST_BYTES
            self._rest = b"" if self._skips else rest
            found += lines
        return found

    def _rotated(self) -> bool:
        """Whether the path leads to another file than the one that is open."""
        try:
            return self._fd < 0 or not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:  # between two renames
            return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Follower:
    """Reads the journals of a run from their beginning, then what comes; a file rotated twice in between is missed."""

    def __init__(self, run_dir: Path, node: str | None = None) -> None:
        self._run_dir, self._node = run_dir, node
        self._files: dict[str, _File] = {}

    def poll(self) -> list[Entry]:
        """The entries since the last call, by time. Raises OSError where a file cannot be read."""
        found: list[Entry] = []
        for node, paths in files_of(self._run_dir, self._node).items():
            if node not in self._files:
                newest = self._run_dir / file_name(node)
                for path in paths:
                    if path != newest:
                        with contextlib.closing(_File(path)) as older:  # empty if it was rotated meanwhile
                            found += entries_of(older.poll())
                self._files[node] = _File(newest)
            found += entries_of(self._files[node].poll())
        return in_order(found)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
