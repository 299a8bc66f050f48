"""The late device: an accelerator made of threads, on which nothing is done when its launch returns.

A backend of torch of its own ("late"), in C++ beside this file. Kernels run in one thread for each stream. Freed memory
is reused at once, and poisoned in the order of its stream. Races are found by the order of events, whatever the timing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]*"))
_BUILDS = Path(__file__).parents[3] / "build" / "late"


#: Begins what a process prints when it finds a race.
RACE = "late: race:"


class UnavailableError(Exception):
    """The device cannot be built here."""


def library() -> Path:
    """The built device; takes about half a minute when torch or the sources have changed."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        raise UnavailableError(f"the late device is written for torch 2.13, found {torch.__version__}")
    compiler = shutil.which("c++")
    if compiler is None:
        raise UnavailableError("the late device is built with a C++ compiler, and there is no c++")
    digest = hashlib.sha256(b"".join([torch.__version__.encode(), *(each.read_bytes() for each in _SOURCES)]))
    built = _BUILDS / f"late-{digest.hexdigest()[:16]}.so"
    _BUILDS.mkdir(parents=True, exist_ok=True)
    with (_BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(compiler, built)
    return built


def _compile(compiler: str, built: Path) -> None:
    from torch.utils import cpp_extension

    unfinished = built.with_suffix(".unfinished")
    source = next(path for path in _SOURCES if path.suffix == ".cpp")
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(source), "-o", str(unfinished)]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    done = subprocess.run([*command, "-lc10", "-ltorch_cpu"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the late device could not be built:\n{' '.join(command)}\n{done.stderr[-4000:]}")
    unfinished.replace(built)


def load() -> None:
    """Give this process the device. Not to be undone, and to be done in a process that is not forked afterwards."""
    if hasattr(torch, "late"):
        return
    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend("late")
    torch.ops.late.register_hooks()
    torch._register_device_module("late", _module())
    atexit.register(_wait_for_all)  # threads of streams run no kernel when torch is taken down


def _wait_for_all() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def _module() -> types.ModuleType:
    """``torch.late``: what torch and its users ask of a device's module."""
    module: Any = types.ModuleType("torch.late")
    module.is_available = module.is_initialized = module._is_compiled = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = torch.ops.late.device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.device = lambda device: torch.accelerator.device_index(torch.device(device).index)
    module.cudart = _PageLocking
    module.synchronize = torch.accelerator.synchronize
    module.Stream = lambda device="late", priority=0: torch.Stream(device or "late", priority=priority)
    module.Event = lambda **settings: torch.Event("late", **settings)
    module.current_stream = torch.accelerator.current_stream
    module.stream = _stream
    module.manual_seed = module.manual_seed_all = lambda seed: torch.ops.late.manual_seed(_signed(seed))
    module.get_rng_state = lambda device=-1: torch.ops.late.rng_state(_index(device))
    module.set_rng_state = lambda state, device=-1: torch.ops.late.set_rng_state(state, _index(device))
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]


@contextlib.contextmanager
def _stream(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class _PageLocking:
    """CUDA's runtime, of which page-locking is used."""

    seconds = 0.0
    most_bytes = 1 << 62
    #: By address.
    locked: ClassVar[dict[int, int]] = {}

    @classmethod
    def cudaHostRegister(cls, address: int, nbytes: int, flags: int) -> int:
        time.sleep(cls.seconds)
        if sum(cls.locked.values()) + nbytes > cls.most_bytes:
            return 2
        cls.locked[address] = nbytes
        torch.ops.late.lock_pages(address, nbytes)
        return 0

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:
        cls.locked.pop(address, None)
        return 0 if torch.ops.late.unlock_pages(address) else 1


def limit_page_locking(seconds: float = 0.0, most_bytes: int = 1 << 62) -> None:
    """Let each call that page-locks take so long, and refuse what would make more than so many bytes in all."""
    _PageLocking.seconds, _PageLocking.most_bytes = seconds, most_bytes


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return -1 if index is None else index


def _signed(seed: int) -> int:
    return seed if seed < 1 << 63 else seed - (1 << 64)


def be_slow(compute: int = 0, others: int = 0) -> None:
    """Delay each kernel by so many microseconds on average: those of default streams, and those of all others."""
    torch.ops.late.set_delays(compute, others)


def take_waits() -> dict[str, int]:
    """How often the host has waited for the device since the last call, by what waited.

    Other threads than the main one may wait for streams and events: those waits are not counted.
    """
    return dict(torch.ops.late.take_waits())


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host waits without asking to, as ``set_sync_debug_mode`` does, and at the end if it has asked."""
    take_waits()
    torch.ops.late.forbid_waits(True)
    try:
        yield
    finally:
        torch.ops.late.forbid_waits(False)
    waits = take_waits()
    assert not waits, f"host waits: {waits}"


def memory_sizes() -> tuple[int, int]:
    """Bytes that the device has taken, and the most that were freed and waited for another stream at a time."""
    reserved, most_waiting = torch.ops.late.memory_sizes()
    return reserved, most_waiting


def races() -> list[str]:
    """Kernels that used the same memory, one writing, with no order between them."""
    return list(torch.ops.late.races())


if __name__ == "__main__":
    try:
        print(library())
    except UnavailableError as error:
        print(f"late device: left out: {error}", file=sys.stderr)
