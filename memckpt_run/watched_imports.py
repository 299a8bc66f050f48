"""Imports ahead of a script, and what they do that a fork would not repeat."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

_LOADERS: tuple[Any, ...] = (
    importlib.machinery.SourceFileLoader,
    importlib.machinery.SourcelessFileLoader,
    importlib.machinery.ExtensionFileLoader,
)
#: Files that hold no state: a fork may share them.
_HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")
#: Variables that libraries read where Python does not see it, as they are loaded.
_READ_BY_LIBRARIES = (
    "ATEN_", "BLIS_", "CUBLAS_", "CUDA_", "DNNL_", "GLIBC_", "GOMP_", "GOTO_", "HIP_", "KMP_", "LD_", "MALLOC_", "MKL_",
    "NCCL_", "NUMEXPR_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "ROCM_", "TORCH_", "VECLIB_",
)  # fmt: skip


class Traces:
    """What imports leave in this process, by the module that has done it; used inside :meth:`watching`.

    Attributes:
        threads: identifiers of threads that were there behind a module's code and not before it.
        descriptors: open descriptors, in the same way.
        random: generators whose state a module has changed.
        read: modules that have read a variable of the environment first, by its name. A walk through all variables,
            as for those with a prefix, is no such reading.
    """

    def __init__(self) -> None:
        self.threads: dict[int, str] = {}
        self.descriptors: dict[int, str] = {}
        self.random: dict[str, str] = {}
        self.read: dict[str, str] = {}
        self._stack = ["the start"]
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
        """A module's code has run."""
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
        """Who reads a variable at import; None if nobody is known to."""
        if variable in self.read:
            return self.read[variable]
        return "a library" if variable.startswith(_READ_BY_LIBRARIES) else None

    def problems(self) -> list[str]:
        """Why attempts cannot be forked from this process, each naming a module."""
        pools_end()
        alive = threads_of_process()
        targets = descriptors_of_process()
        found = [f"{module} starts a thread as it is imported" for tid, module in self.threads.items() if tid in alive]
        if len(alive) > 1 and not found:
            found.append(f"{len(alive) - 1} threads run: {', '.join(each.name for each in threading.enumerate()[1:])}")
        for fd, module in self.descriptors.items():
            if fd in targets and targets[fd] not in _HARMLESS:
                device = targets[fd].startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))
                what = f"uses an accelerator ({targets[fd]})" if device else f"leaves {targets[fd]} open"
                found.append(f"{module} {what} as it is imported")
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            found.append("a module opens CUDA as it is imported")
        found += [f"{module} uses {name} as it is imported" for name, module in self.random.items()]
        if children_of_process():
            found.append("a module starts processes as it is imported")
        return sorted(set(found))


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
    """The states of the global random generators of what is imported.

    Of Python's, which seeds itself anew in each fork, only what a seed determines: some draws, as modules make them for
    identifiers, leave that alone.

    Args:
        known: names of those that were there before.
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
