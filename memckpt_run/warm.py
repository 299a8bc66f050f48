"""Warm starts: attempts that are forked from a process that has imported what the script imports."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from memckpt_run.attempts import Attempt, Given, PythonCommand, adopting_orphans
from memckpt_run.messages import Fork, Forked, FromWarm, Here, Import, Ready, Refused, receive_answer, send
from memckpt_run.notes import Notes

_log = logging.getLogger("memckpt.run")
_SITE = Path(__file__).parent / "warm_site"
#: Seconds between two looks at a warm process that is being made.
_LOOK_SECONDS = 0.5
#: Longest wait for a fork, in seconds.
_FORK_SECONDS = 10.0


class Warm:
    """An attempt that was forked from a warm process, and is a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


class WarmProcess:
    """A Python that waits for orders before it comes to its script; with ``-c pass`` it only tries to get there."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = environment.get("PYTHONPATH")
        path = str(_SITE) if not before else f"{_SITE}{os.pathsep}{before}"
        added = {"PYTHONPATH": path, "MEMCKPT_WARM": f"{far.fileno()}:{'-' if before is None else f'+{before}'}"}
        far.set_inheritable(True)
        # It keeps this process's signal mask: signals to all processes of a terminal are not meant for it.
        try:
            self._process = subprocess.Popen(command, env={**environment, **added}, close_fds=False)
        except OSError:
            self._link.close()
            raise
        finally:
            far.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, message: Import | Fork, fds: Sequence[int] = ()) -> bool:
        """Ask for something; False if the process is gone. Descriptors are duplicated into it."""
        try:
            send(self._link, message, fds)
        except OSError:
            return False
        return True

    def answer(self, seconds: float) -> FromWarm | None:
        """What it says. Raises BlockingIOError or TimeoutError if that is nothing within so many seconds."""
        self._link.settimeout(seconds)
        return receive_answer(self._link)[0]

    def close(self) -> None:
        """End it: it waits for orders, or is in the middle of imports."""
        self._link.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class WarmStarter:
    """Starts attempts with `cold` until one has told what it imports; forks them then, with modules `also`."""

    def __init__(
        self, command: PythonCommand, cold: Callable[[Given], Attempt], notes: Notes, also: Sequence[str]
    ) -> None:
        self._command, self._cold = command, cold
        self._notes, self._also = notes, also
        #: Packages from whose imports no attempt can be forked.
        self._without: set[str] = set()
        self._process: WarmProcess | None = None
        #: What is done about the warm process as time passes; None: nothing any more.
        self._step: Callable[[Attempt], None] | None = self._await_note
        self._ready = False

    @property
    def pid(self) -> int | None:
        """Process id of the warm process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def how(self) -> str:
        if self._ready:
            return "warm"
        if self._step is None:
            return "cold"
        if self._step == self._await_note:
            return "cold: it has not got to its first protected step"
        return "cold: its imports are not made ahead yet"

    def start(self, given: Given) -> Attempt:
        if self._ready:
            pid = self._fork(given)
            if pid is not None:
                return Warm(pid)
        self._environment = given.environment
        return self._cold(given)

    def prepare_next(self, attempt: Attempt) -> float | None:
        if self._step is not None:
            try:
                self._step(attempt)
            except OSError as error:  # no process or no memory is left: the training is to go on all the same
                self._give_up(f"the warm process cannot be made: {error}")
        return None if self._step is None else _LOOK_SECONDS

    # The steps

    def _await_note(self, attempt: Attempt) -> None:
        """The attempt has not told yet what it has imported."""
        recorded = self._notes.imports_of(attempt.pid)
        if recorded is not None:
            self._recorded = recorded
            self._process = WarmProcess([*self._command.interpreter, "-c", "pass"], self._environment)
            self._step = self._await_trial

    def _await_trial(self, attempt: Attempt) -> None:
        """A Python with no script says whether it gets to where a warm process waits."""
        answer = self._answered()
        if isinstance(answer, Here):
            self._import_ahead()
        elif answer is not None:
            self._give_up("this Python does not run memckpt's sitecustomize")

    def _import_ahead(self) -> None:
        self._end_process()
        self._process = WarmProcess(self._command.words, self._environment)
        if self._order_imports(self._process):
            self._step = self._await_imports
        else:
            self._give_up("the warm process has died")

    def _order_imports(self, process: WarmProcess) -> bool:
        file = os.memfd_create("memckpt:imports", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(file), "wb") as stream:
                stream.write(self._recorded)
            return process.order(Import(list(self._also), sorted(self._without)), [file])
        finally:
            os.close(file)

    def _await_imports(self, attempt: Attempt) -> None:
        answer = self._answered()
        if isinstance(answer, Ready):
            self._ready, self._step = True, None
            _log.info("%d modules are imported ahead of the next start, in %.1f s", answer.modules, answer.seconds)
            for name, reason in answer.missing.items():
                _log.warning("--warm %s: nothing is imported ahead of that name: %s", name, reason)
        elif isinstance(answer, Refused):
            more = set(answer.packages) - self._without
            if not more:
                self._give_up(answer.reason)
                return
            # Lightning imports mpi4py to look for MPI, which is then started: the attempts do so by themselves.
            _log.info("not imported ahead: %s: %s", ", ".join(sorted(more)), answer.reason)
            self._without |= more
            self._import_ahead()
        elif answer is not None and not isinstance(answer, Here):
            self._give_up("the warm process has died as it imported")

    def _answered(self) -> FromWarm | str | None:
        """What the process says; an empty text if it is gone, None if it says nothing yet."""
        assert self._process is not None
        try:
            return self._process.answer(0) or ""
        except BlockingIOError:
            return None

    def _give_up(self, reason: str) -> None:
        _log.warning("restarts will be cold: %s", reason)
        self._end_process()
        self._step = None

    # Forks

    def _fork(self, given: Given) -> int | None:
        """Process id of an attempt; None if there is none, and the next one has to be cold."""
        process = self._process
        assert process is not None
        before, environment = process.environment, given.environment
        names = before.keys() | environment.keys()
        variables = {name: environment.get(name) for name in names if before.get(name) != environment.get(name)}
        order = Fork(variables, [int(number) for number in given.mask], os.getpid(), int(given.farewell))
        with adopting_orphans():
            try:
                asked = process.order(order, given.streams or ())
                answer = process.answer(_FORK_SECONDS) if asked else None
            except TimeoutError:
                answer = None
        if isinstance(answer, Forked):
            return answer.pid
        reason = answer.reason if isinstance(answer, Refused) else "the warm process is gone"
        _log.warning("this start is cold: %s", reason)
        self._end_process()
        self._ready, self._step = False, self._await_note
        return None

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def close(self) -> None:
        self._end_process()
