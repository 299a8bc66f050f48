"""The warm process: imports what a training's script imports, and becomes the training in forks of itself.

It runs inside of Python's start, from `sitecustomize`. :func:`serve` returns in a fork, which goes on to the script.
:class:`Traces` watches what imports do that a fork would not repeat.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import os
import random
import signal
import site
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memckpt_run import recording
from memckpt_run.attempts import end_with_parent
from memckpt_run.messages import Fork, Forked, FromWarm, Here, Import, Ready, Refused, receive_order, send
from memckpt_run.recording import Module, Recorded

_COMM = Path("/proc/self/comm")
#: How much lower than training it imports, as a niceness: less, and it would not get ready beside busy cores.
_BACKGROUND = 5
#: Packages that are imported ahead wherever they lie.
_OURS = frozenset(
    {"memckpt", "memckpt_run", "lightning_memckpt", "accelerate_plugin", "transformers_memckpt", "memckpt_hydra"}
)


@dataclass(frozen=True)
class Imported:
    """What has been imported ahead: time of change and size of `files`, and `readers` of environment variables."""

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
    """Do what the supervisor at the other end of a descriptor asks for. Returns in attempts only."""
    link = socket.socket(fileno=number)
    link.set_inheritable(False)
    _say(link, Here())
    comm = _COMM.read_text()
    _COMM.write_text("memckpt-warm")
    imported = Imported()
    while True:
        order, fds = receive_order(link)
        if order is None:
            os._exit(0)  # the supervisor is gone
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
    """Start an attempt that the supervisor adopts, as the process between them ends at once; True in the attempt."""
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
    began = time.monotonic()
    recorded = msgspec.json.decode(os.pread(file, os.fstat(file).st_size, 0), type=Recorded)
    before = list(sys.path)
    traces = Traces()
    sys.path[:] = recorded.path
    try:
        with _in_background(), traces.watching():
            count, missing = import_modules(recorded.modules, order.also, order.without)
    finally:
        sys.path[:] = before
    problems = traces.problems() + _environment_problems(recorded, traces) + _misplaced(recorded.modules)
    if problems:
        return Refused("; ".join(problems[:3]), traces.packages(order.without)), Imported()
    recording.forked = True
    gc.collect()
    gc.freeze()  # what a collection in a fork would write to, and so copy
    return Ready(count, round(time.monotonic() - began, 3), missing), Imported(_files(), traces.read)


def import_modules(
    modules: Sequence[Module], also: Sequence[str], without: Sequence[str] = ()
) -> tuple[int, dict[str, str]]:
    """Import installed modules, and the user's that are asked for; returns a count, and reasons of failures."""
    known = {module.name for module in modules}
    installed = [module for module in modules if module.name.partition(".")[0] not in without]
    wanted = [module.name for module in installed if _is_wanted(module, also)]
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


def _environment_problems(recorded: Recorded, traces: Traces) -> list[str]:
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


_LOADERS: tuple[Any, ...] = (
    importlib.machinery.SourceFileLoader,
    importlib.machinery.SourcelessFileLoader,
    importlib.machinery.ExtensionFileLoader,
)
#: Files that hold no state: a fork may share them.
_HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")
#: Variables that libraries read where Python does not see it, as they are loaded. Not CUDA_*, HIP_*, ROCM_*, NVIDIA_*,
#: NCCL_* and CUBLAS_WORKSPACE_CONFIG: they are read as a device, a communicator or a handle is opened, behind the fork.
_READ_BY_LIBRARIES = (
    "ATEN_", "BLIS_", "CUBLAS_LOG", "CUBLASLT_", "DNNL_", "GLIBC_", "GOMP_", "GOTO_", "KMP_", "LD_", "MALLOC_", "MKL_",
    "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_", "VECLIB_",
)  # fmt: skip


#: A module that is not known, and what no module has imported.
_SOME, _START = "a module", "the start"


def _package(module: str) -> str:
    return module.partition(".")[0]


class Traces:
    """What imports leave in this process, by the module that has done it; used inside :meth:`watching`.

    `read`: first reader of each environment variable; a walk through all variables is no reading.
    """

    def __init__(self) -> None:
        self.threads: dict[int, str] = {}
        self.descriptors: dict[int, str] = {}
        self.random: dict[str, str] = {}
        self.read: dict[str, str] = {}
        self._stack = [_START]
        #: What has imported each package first.
        self._importers: dict[str, str] = {}
        self._walked: set[str] = set()
        self._threads = threads_of_process()
        self._descriptors = set(descriptors_of_process())
        self._generators = generators(known=())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for loader in _LOADERS:
                stack.enter_context(_replaced(loader, "exec_module", self._execute))
            stack.enter_context(_replaced(type(os.environ), "__getitem__", self._read))
            stack.enter_context(_replaced(type(os.environ), "__iter__", self._walk))
            yield

    def _execute(self, original: Callable[..., None], loader: Any, module: Any) -> None:
        package, importer = _package(module.__name__), _package(self._stack[-1])
        if package != importer:
            self._importers.setdefault(package, importer)
        self._stack.append(module.__name__)
        self._walked.clear()
        try:
            original(loader, module)
        finally:
            self._walked.clear()
            self._module_ran(self._stack.pop())

    def _walk(self, original: Callable[..., Iterator[str]], environment: Any) -> Iterator[str]:
        for name in original(environment):
            self._walked.add(name)
            yield name

    def _read(self, original: Callable[..., str], environment: Any, name: str) -> str:
        if name in self._walked:
            self._walked.remove(name)
        else:
            self.read.setdefault(name, self._stack[-1])
        return original(environment, name)

    def _module_ran(self, module: str) -> None:
        threads = threads_of_process()
        self.threads.update(dict.fromkeys(threads - self._threads, module))
        self._threads = threads
        descriptors = set(descriptors_of_process())
        self.descriptors.update(dict.fromkeys(descriptors - self._descriptors, module))
        self._descriptors = descriptors
        found = generators(known=self._generators.keys())
        for name, state in found.items():
            if self._generators.get(name, state) != state:
                self.random.setdefault(name, module)
        self._generators = found

    def reader_of(self, variable: str) -> str | None:
        """The module that reads a variable at import; None if none is known to."""
        if variable in self.read:
            return self.read[variable]
        return "a library" if variable.startswith(_READ_BY_LIBRARIES) else None

    def problems(self) -> list[str]:
        """Why attempts cannot be forked from this process, each naming a module where it is known."""
        return sorted({f"{module} {what} as it is imported" for module, what in self._found()})

    def packages(self, without: Collection[str] = ()) -> list[str]:
        """The packages of these modules, as far as known; in place of one among `without` what has imported it."""
        found = set()
        for module, _ in self._found():
            package = _package(module)
            while package in without:
                package = self._importers.get(package, _START)
            found.add(package)
        return sorted(found - {_SOME, _START})

    def _found(self) -> list[tuple[str, str]]:
        pools_end()
        alive = threads_of_process()
        targets = descriptors_of_process()
        found = [(module, "starts a thread") for tid, module in self.threads.items() if tid in alive]
        if len(alive) > 1 and not found:
            found.append((_SOME, f"starts threads ({', '.join(each.name for each in threading.enumerate()[1:])})"))
        for fd, module in self.descriptors.items():
            if fd in targets and targets[fd] not in _HARMLESS:
                device = targets[fd].startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci"))
                what = f"uses an accelerator ({targets[fd]})" if device else f"leaves {targets[fd]} open"
                found.append((module, what))
        found += [(_SOME, f"opens {device}") for device in _opened_devices()]
        found += [(module, f"uses {name}") for name, module in self.random.items()]
        if children_of_process():
            found.append((_SOME, "starts processes"))
        return found


def _opened_devices() -> list[str]:
    """Accelerators that torch has opened here. Asking for the current one would open the driver, and spoil forks."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    names = ["cuda", "xpu", torch._C._get_privateuse1_backend_name()]
    return [name for name in names if getattr(getattr(torch, name, None), "is_initialized", bool)()]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """`instead(original, *arguments)` in place of a method."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, lambda *arguments: instead(original, *arguments))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def pools_end() -> None:
    """End the pools of threads that survive forks (OpenBLAS): their handlers do, before one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def threads_of_process() -> set[int]:
    return {int(tid) for tid in os.listdir("/proc/self/task")}


def children_of_process() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def descriptors_of_process() -> dict[int, str]:
    """What each open descriptor refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # That of the listing is gone.
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def generators(known: Collection[str]) -> dict[str, Any]:
    """The states of the global random generators of what is imported; `known`: names that were there before.

    Of Python's, which each fork seeds anew, only what a seed determines: some draws leave that alone.
    """
    found: dict[str, Any] = {}
    name = "Python's random generator"
    if name not in known:
        random.random()  # computes the next 624 words, which are then there to be drawn
    _, (*words, _), spare = random.getstate()
    found[name] = words, spare
    if (module := _whole("numpy.random")) is not None:
        name, key, *rest = module.get_state()
        found["numpy's random generator"] = (name, key.tobytes(), *rest)
    if (module := _whole("torch")) is not None:
        found["torch's random generator"] = bytes(module.default_generator.get_state().numpy())
    return found


def _whole(name: str) -> Any:
    """A module whose import has ended; None if there is none."""
    module = sys.modules.get(name)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module
