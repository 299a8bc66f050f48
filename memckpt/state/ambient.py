"""Settings of torch that a step's arithmetic depends on: recorded with each step, and set again while it is redone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memckpt.state import codec

#: The product with 1 is 0 only where the thread flushes denormal numbers: torch does not tell.
_DENORMAL = 5e-324
#: Whether torch has a precision for each backend.
_HAS_PRECISIONS = hasattr(torch.backends.cuda.matmul, "fp32_precision")
#: Held while settings of the whole process are not the process's own.
_lock = threading.RLock()


class Ambient(NamedTuple):
    """Settings around one step. Those up to `flush` are a thread's own, the others the whole process's."""

    autocast: str = ""  #: its dtype on the parameters' device; empty: it is off
    flush: bool = False
    precision: tuple[str, ...] = ()  #: that of products of float32 matrices; empty: as by default
    reduced_fp16: Any = True
    reduced_bf16: Any = True
    deterministic: bool = False
    deterministic_warns: bool = False
    default_dtype: str = "float32"
    threads: int = 0  #: torch's number of threads; 0: that at the start

    def encode(self) -> bytes:
        """The encoding; empty for settings as they are by default."""
        return b"" if self == _DEFAULT else codec.encode(self._asdict())

    def changed_to(self, other: Ambient) -> Iterator[str]:
        """Yield each difference in words."""
        for name, value in self._asdict().items():
            if (now := getattr(other, name)) != value:
                yield f"{name} was {value} in the run that is continued, and is {now}"


_DEFAULT = Ambient()


def ambient_of(device: str, usual_threads: int | None = None) -> Ambient:
    """The current settings. `usual_threads`: number of threads that need not be recorded; None: none is."""
    threads = torch.get_num_threads()
    matmul = torch.backends.cuda.matmul
    autocast = torch.is_autocast_enabled(device)
    return Ambient(
        str(torch.get_autocast_dtype(device)).removeprefix("torch.") if autocast else "",
        not _DENORMAL * 1.0,
        _precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        str(torch.get_default_dtype()).removeprefix("torch."),
        threads if usual_threads not in (None, threads) else 0,
    )


def _matmuls() -> tuple[Any, Any]:
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul


def _precision() -> tuple[str, ...]:
    # The older interface raises where the newer one has been used.
    if _HAS_PRECISIONS:
        found = tuple(one.fp32_precision for one in _matmuls())
        return () if {*found} <= {"none", "ieee"} else found
    usual = torch.get_float32_matmul_precision()
    return () if usual == "highest" else (usual,)


def _set_precision(wanted: tuple[str, ...]) -> None:
    if not _HAS_PRECISIONS:
        torch.set_float32_matmul_precision(wanted[0] if wanted else "highest")
        return
    for one, value in zip(_matmuls(), wanted or ("none", "none"), strict=False):
        one.fp32_precision = value


def decode(recorded: bytes) -> Ambient:
    """Inverse of :meth:`Ambient.encode`."""
    return Ambient(**codec.decode(recorded)) if recorded else _DEFAULT


@contextlib.contextmanager
def as_recorded(wanted: Ambient, device: str, own_thread: bool) -> Iterator[None]:
    """Use these settings in the calling thread, on the type of device that the step is redone on.

    `own_thread`: leave settings of the whole process: the step does not depend on them, and is redone beside others.
    """
    now = ambient_of(device)
    if now == wanted:
        yield
        return
    with contextlib.ExitStack() as stack:
        if wanted.threads and not own_thread:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(wanted.threads)
        if now.autocast != wanted.autocast:
            dtype = getattr(torch, wanted.autocast) if wanted.autocast else None
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=bool(wanted.autocast)))
        if now.flush != wanted.flush:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            stack.callback(torch.set_flush_denormal, now.flush)
            torch.set_num_threads(1)  # it is a thread's own
            torch.set_flush_denormal(wanted.flush)
        if not own_thread:
            stack.enter_context(_lock)
            stack.callback(_set_process, now)
            _set_process(wanted)
        yield


def _set_process(wanted: Ambient) -> None:
    _set_precision(wanted.precision)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = wanted.reduced_fp16
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = wanted.reduced_bf16
    torch.use_deterministic_algorithms(wanted.deterministic, warn_only=wanted.deterministic_warns)
    torch.set_default_dtype(getattr(torch, wanted.default_dtype))
