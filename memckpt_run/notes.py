"""Notes of a trainer to its supervisor: lines of an anonymous memory file, named by its path in /proc. Torch-free."""

from __future__ import annotations

import logging
import os

import msgspec

from memckpt.config.observers import Committed, Observer, Watched, with_observer
from memckpt.errors import MALFORMED
from memckpt.processes.address import AgentAddress
from memckpt_run import recording

_log = logging.getLogger("memckpt")
_NAME = "memckpt:notes"
#: What its path in /proc refers to. Another file there: the supervisor is gone, and its process id is another one's.
_TARGET = f"/memfd:{_NAME} (deleted)"
_RUN, _IMPORTS = "run", "imports"


class _Run(msgspec.Struct, frozen=True):
    """Where the agent is that protects the training."""

    run_dir: str
    node: str


class _Note(msgspec.Struct, frozen=True):
    """One line: what the process `pid` tells."""

    name: str
    pid: int
    content: msgspec.Raw


class Notes:
    """The supervisor's end. Owns the memory file; :meth:`close` it."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._read = 0
        self._run: AgentAddress | None = None
        self._imports: dict[int, bytes] = {}

    def environment(self) -> dict[str, str]:
        """Variables of an attempt. Another supervisor above this one gets the notes, too."""
        return with_observer("memckpt_run.notes:Recorder", self._path)

    def run(self) -> AgentAddress | None:
        """The address of the agent that protects the training; None as long as no session has begun."""
        self._update()
        return self._run

    def imports_of(self, pid: int) -> bytes | None:
        """What a process has noted of its imports; None if it has not."""
        self._update()
        return self._imports.get(pid)

    def _update(self) -> None:
        """Read what has been written since the last look."""
        new = os.pread(self._fd, os.fstat(self._fd).st_size - self._read, self._read)
        whole = new.rfind(b"\n") + 1
        self._read += whole
        for line in new[:whole].split(b"\n"):
            if not line:
                continue
            try:
                note = msgspec.json.decode(line, type=_Note)
                if note.name == _RUN:
                    found = msgspec.json.decode(note.content, type=_Run)
                    self._run = AgentAddress.of(found.run_dir, found.node)
                elif note.name == _IMPORTS:
                    self._imports = {note.pid: bytes(note.content)}
            except MALFORMED as error:  # its writer was killed in the middle of it
                _log.debug("memckpt: a note that cannot be read: %s", error)

    def close(self) -> None:
        os.close(self._fd)


class Recorder(Observer):
    """The trainer's end: tells the supervisor which agent protects the training, and what has been imported."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._run: str | None = None

    def begin_session(self, session: Watched) -> None:
        self._run = session.run_dir
        if self._run is not None:
            address = AgentAddress.of(self._run)
            self.leave_note(_RUN, msgspec.json.encode(_Run(str(address.run_dir), address.node)))

    def see_committed(self, committed: Committed) -> None:
        if self._run is not None:  # the first one: what a start imports has been imported
            self._run = None
            self.note_imports()

    def note_imports(self) -> None:
        """Tell what this process has imported; a fork of a warm process has other modules than a start."""
        if recording.forked:
            return
        try:
            imports = recording.record_imports()
        except Exception:  # said: training goes on, and the next start imports everything by itself
            _log.warning("memckpt: what this training has imported cannot be noted for a warm restart", exc_info=True)
        else:
            self.leave_note(_IMPORTS, imports)

    def leave_note(self, name: str, content: bytes) -> None:
        """Add a line with this JSON, which has no line break."""
        note = msgspec.json.encode(_Note(name, os.getpid(), msgspec.Raw(content)))
        try:
            if os.readlink(self._path) != _TARGET:
                raise FileNotFoundError(f"{self._path} is no supervisor's")
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                # A line that was cut off by a kill ends with it.
                os.write(fd, b"\n" + note + b"\n")
            finally:
                os.close(fd)
        except OSError as error:  # the supervisor is gone: training goes on without it
            _log.debug("memckpt: no note for the supervisor: %s", error)
