"""The measured training: a GPT with AdamW on fixed batches, with different protection."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import memckpt
from examples.gpt import GPT, SIZES, Corpus
from memckpt import MemckptConfig, Session

#: Sequences in a batch: 512 tokens.
BATCH = 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "single-tensor": {"foreach": False, "fused": False},
}


class Trainee:
    """A model, its optimizer and a batch; :meth:`step` is one training step."""

    def __init__(self, size: str, optimizer: str = "fused", batch: int = BATCH) -> None:
        torch.manual_seed(0)
        # No dropout: it would only add noise.
        self.model = GPT(replace(SIZES[size], dropout=0.0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **OPTIMIZERS[optimizer])
        self.batch = Corpus(self.model.config.context).sample(batch)

    def step(self) -> None:
        self.model.loss(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The tensors of a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[Tensor]:
        """Parameters and element-wise optimizer state: 12 bytes a parameter."""
        return state_tensors(self.model, self.optimizer)


def state_tensors(model: torch.nn.Module, optimizer: Optimizer) -> list[Tensor]:
    tensors = [param.detach() for param in model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    return tensors


class SharedCopy:
    """Shared memory with room for a list of tensors, touched before use."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._map = mmap.mmap(-1, self.nbytes)
        self._views = []
        offset = 0
        for tensor in tensors:
            view = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self._views.append(view.view(tensor.shape).zero_())
            offset += tensor.nbytes

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into it, one by one."""
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory on a disk, if any file system has one; else a memory-backed one."""
    with contextlib.ExitStack() as stack:
        for candidate in (tempfile.gettempdir(), "/var/tmp", os.getcwd()):
            if os.access(candidate, os.W_OK) and not _is_memory(Path(candidate)):
                break
        directory = Path(tempfile.mkdtemp(prefix="memckpt-bench-", dir=candidate))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def _is_memory(path: Path) -> bool:
    """Whether a path is on a memory-backed file system."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if str(path.resolve()).startswith(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind in ("tmpfs", "ramfs")


def redo_config(mode: str) -> MemckptConfig:
    """`"lazy T=8"`, `"lazy T=16"` or `"eager"`."""
    if mode == "eager":
        return MemckptConfig(redo="eager", storage=None)
    period = int(mode.removeprefix("lazy T="))
    return MemckptConfig(redo="lazy", anchor_period_steps=period, storage=None)


def catch_up(session: Session) -> None:
    """Wait until an eager agent has applied all records. Uses a private interface."""
    if session.mode == "eager" and session._link.up:
        session._link.client.wait_applied(int(session.metrics()["step"]))


@contextlib.contextmanager
def protected(trainee: Trainee, mode: str) -> Iterator[Session]:
    """A trainee with a session attached, a generation written and all slots touched."""
    with scratch_directory() as directory:
        session = memckpt.attach(trainee.model, trainee.optimizer, run_dir=directory, config=redo_config(mode))
        try:
            session.restore()
            yield session
        finally:
            session.close()
            gc.collect()


def copy_bandwidth(nbytes: int = 256 << 20, repetitions: int = 5) -> float:
    """Bytes per second that one thread copies from private into shared memory: the lower bound of all costs."""
    source = [torch.ones(1 << 20) for _ in range(nbytes >> 22)]
    target = SharedCopy(source)
    return target.nbytes / best_of(lambda: target.take(source), repetitions)


def best_of(action: Callable[[], object], repetitions: int) -> float:
    """Seconds of the fastest repetition, after a warm-up."""
    action()
    durations = []
    for _ in range(repetitions):
        started = time.perf_counter()
        action()
        durations.append(time.perf_counter() - started)
    return min(durations)
