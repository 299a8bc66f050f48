"""The warm process: imports what a training's script imports, and becomes the training in forks of itself.

It runs inside of Python's own start, from `sitecustomize` (see :mod:`memckpt_run.warm_site`). What has been set
up by then is what every start sets up; :func:`serve` returns in a fork, and Python goes on to the script.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import site
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from memckpt_run import recording
from memckpt_run.attempts import end_with_parent
from memckpt_run.messages import Fork, Forked, FromWarm, Here, Import, Ready, Refused, receive_order, send
from memckpt_run.recording import Module, Recorded
from memckpt_run.watched_imports import Traces

_COMM = Path("/proc/self/comm")
#: How much lower than training it imports, as a niceness: less, and it would not get ready beside busy cores.
_BACKGROUND = 5
#: Packages that are imported ahead wherever they lie.
_OURS = frozenset(
    {"memckpt", "memckpt_run", "lightning_memckpt", "accelerate_plugin", "transformers_memckpt", "memckpt_hydra"}
)


@dataclass(frozen=True)
class Imported:
    """What has been imported ahead.

    Attributes:
        files: time of change, in nanoseconds, and size of each module's file.
        readers: modules that have read a variable of the environment as they were imported, by its name.
    """

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)

    def refusal(self, order: Fork, streams: Sequence[int]) -> str | None:
        """Why no attempt can be forked from it; None if one can."""
        stale = _changed(self.files)
        if stale is not None:
            return f"{stale} has changed since it was imported"
        for name in order.variables.keys() & self.readers.keys():
            return f"the environment variable {name} has changed, which {self.readers[name]} reads as it is imported"
        if any(os.isatty(fd) is not os.isatty(new) for fd, new in enumerate(streams)):
            return "a standard stream was a terminal at the first start and is none now, or the reverse"
        return None


def serve(number: int) -> None:
    """Do what a supervisor asks for. Returns in attempts only.

    Args:
        number: descriptor of the link to the supervisor.
    """
    link = socket.socket(fileno=number)
    link.set_inheritable(False)
    _say(link, Here())
    comm = _COMM.read_text()
    _COMM.write_text("memckpt-warm")
    imported = Imported()
    while True:
        received = receive_order(link)
        if received is None:
            os._exit(0)  # the supervisor is gone
        order, fds = received
        if isinstance(order, Import):
            answer, imported = _import(order, *fds)
            _say(link, answer)
        else:
            refusal = imported.refusal(order, fds)
            if refusal is not None:
                _say(link, Refused(refusal))
            elif _fork(link, order, fds):
                _COMM.write_text(comm.rstrip("\n"))
                return
        for fd in fds:
            os.close(fd)


def _say(link: socket.socket, message: FromWarm) -> None:
    """Answer the supervisor; this process ends where that is gone."""
    try:
        send(link, message)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _fork(link: socket.socket, order: Fork, streams: Sequence[int]) -> bool:
    """Start an attempt that is no child of this process; True in the attempt.

    The process between them ends at once, so that the supervisor adopts the attempt. That begins when it has.
    """
    said, saying = os.pipe2(os.O_CLOEXEC)
    waits, goes = os.pipe2(os.O_CLOEXEC)
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(saying, str(pid).encode())
            os._exit(0)
        for fd in (said, saying, goes):
            os.close(fd)
        if not os.read(waits, 1):
            os._exit(75)  # the warm process has died meanwhile
        os.close(waits)
        link.close()
        _become(order, streams)
        return True
    os.close(saying)
    os.close(waits)
    pid = int(os.read(said, 32))
    os.waitpid(between, 0)
    _say(link, Forked(pid))
    os.write(goes, b"g")
    os.close(said)
    os.close(goes)
    return False


def _become(order: Fork, streams: Sequence[int]) -> None:
    """What a start has of its own, in an attempt."""
    end_with_parent(order.farewell, order.parent)
    if streams:
        os.setsid()
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd)
        os.close(stream)
    for name, value in order.variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # a seed of its own, as after any start; Python's generator sees to that by itself
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # a fork has another
    signal.pthread_sigmask(signal.SIG_SETMASK, order.mask)


def _import(order: Import, file: int) -> tuple[Ready | Refused, Imported]:
    """Import ahead what the file names."""
    began = time.monotonic()
    recorded = msgspec.json.decode(os.pread(file, os.fstat(file).st_size, 0), type=Recorded)
    before = list(sys.path)
    environment = dict(os.environ)
    traces = Traces()
    sys.path[:] = recorded.path
    try:
        with _in_background(), traces.watching():
            count, missing = import_modules(recorded.modules, order.also)
    finally:
        sys.path[:] = before
    problems = traces.problems() + _environment_problems(recorded, environment, traces) + _misplaced(recorded.modules)
    if problems:
        return Refused("; ".join(problems[:3])), Imported()
    recording.forked = True
    gc.collect()
    gc.freeze()  # what a collection in a fork would write to, and so copy
    return Ready(count, round(time.monotonic() - began, 3), missing), Imported(_files(), traces.read)


def import_modules(modules: Sequence[Module], also: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Import those of installed packages, and those of the user's that are asked for.

    Returns:
        The number of the former that there are now, and for each of `also` that could not be imported the reason.
    """
    known = {module.name for module in modules}
    wanted = [module.name for module in modules if _is_wanted(module, also)]
    missing = {}
    for name in [*wanted, *(name for name in also if name not in known)]:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except (ImportError, AttributeError) as error:
                # It may have been made in another way at the time, or belong to what the script has set up.
                if name in also:
                    missing[name] = f"{type(error).__name__}: {error}"
    return sum(name in sys.modules for name in wanted), missing


def _is_wanted(module: Module, also: Sequence[str]) -> bool:
    if any(module.name == name or module.name.startswith(f"{name}.") for name in also):
        return True
    return module.name.partition(".")[0] in _OURS or module.origin.startswith(_installed())


def _installed() -> tuple[str, ...]:
    """Directories of the standard library and of installed packages. What lies elsewhere is the user's."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_path(name) for name in names} | set(site.getsitepackages()) | {site.getusersitepackages()}
    return tuple(f"{os.path.realpath(each)}/" for each in found) + tuple(f"{each}/" for each in found)


def _environment_problems(recorded: Recorded, before: dict[str, str], traces: Traces) -> list[str]:
    """Variables that the script sets and imports read: set behind the imports, they would not be seen."""
    found = []
    for name, value in recorded.changed.items():
        reader = traces.reader_of(name)
        if reader is not None and os.environ.get(name) != value:
            found.append(
                f"the training sets the environment variable {name}, which {reader} reads as it is imported: set it "
                "before `memckpt run`"
            )
    return found


def _misplaced(modules: Sequence[Module]) -> list[str]:
    """Modules that have come from another file than in the training."""
    found = []
    for module in modules:
        spec = getattr(sys.modules.get(module.name), "__spec__", None)
        origin = getattr(spec, "origin", None)
        if origin is not None and origin != module.origin:
            found.append(f"{module.name} is {origin} here and {module.origin} in the training")
    return found


def _files() -> dict[str, tuple[int, int]]:
    """Time of change, in nanoseconds, and size of each imported module's file."""
    paths = {getattr(getattr(module, "__spec__", None), "origin", None) for module in list(sys.modules.values())}
    found = {}
    for path in paths:
        if isinstance(path, str) and os.path.isabs(path):
            with contextlib.suppress(OSError):
                state = os.stat(path)
                found[path] = (state.st_mtime_ns, state.st_size)
    return found


def _changed(files: dict[str, tuple[int, int]]) -> str | None:
    """A file that is not what it was; None if all are."""
    for path, before in files.items():
        try:
            state = os.stat(path)
        except OSError:
            return path
        if (state.st_mtime_ns, state.st_size) != before:
            return path
    return None


@contextlib.contextmanager
def _in_background() -> Iterator[None]:
    """Leave the cores to training meanwhile, where that can be undone."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, own + _BACKGROUND)
            os.setpriority(os.PRIO_PROCESS, 0, own)
            os._exit(0)
        os._exit(1)
    if os.waitpid(pid, 0)[1]:
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, own + _BACKGROUND)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, own)
