"""Reading the journals of a run: what is there, and what comes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from memckpt.errors import DamagedStateError
from memckpt.journal.events import Entry, decode
from memckpt.journal.journal import file_name, files_of

#: Longest line that is waited for, in bytes, and size of a read. The journal's own lines are far shorter.
_LONGEST_BYTES = 1 << 20
#: Bytes at a journal's end that tell of its newest attempt.
_TAIL_BYTES = 1 << 16


class _Lines:
    """Whole lines of bytes that come in parts; a line longer than `_LONGEST_BYTES` is no event, and is left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._skips = False

    def feed(self, part: bytes) -> list[bytes]:
        """The lines that end in `part`."""
        *lines, rest = (self._rest + part).split(b"\n")
        if self._skips and lines:
            del lines[0]
            self._skips = False
        self._skips = self._skips or len(rest) > _LONGEST_BYTES
        self._rest = b"" if self._skips else rest
        return lines


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
    numbers = [0]
    for path in reversed(files_of(run_dir, node).get(node, [])):
        if not path.is_file():
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:  # a journal is nothing that a start depends on
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            numbers += [entry.envelope.attempt for entry in entries_of(file.read(_TAIL_BYTES).split(b"\n"))]
        if max(numbers):  # an agent without trainers may fill a file, too
            break
    return max(numbers)


class _File:
    """The newest file of one node's journal, followed through its rotations. Owns a descriptor; :meth:`close` it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._lines = _Lines()

    def poll(self) -> list[bytes]:
        """The whole lines that have come since the last call."""
        lines = self._read()
        if self._rotated():
            lines += self._read()  # what came behind the last read, before it was rotated
            self.close()
            self._lines = _Lines()
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            lines += self._read()
        return lines

    def _read(self) -> list[bytes]:
        lines: list[bytes] = []
        while self._fd >= 0 and (part := os.read(self._fd, _LONGEST_BYTES)):
            lines += self._lines.feed(part)
        return lines

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
        self._run_dir = run_dir
        self._node = node
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
