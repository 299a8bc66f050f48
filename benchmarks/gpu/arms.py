"""Ways to protect every step, and the cost of a step with each."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import memckpt
from benchmarks.gpu.trainee import Size, Trainee
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.async_saver import AsyncSaver
from benchmarks.workloads.gpt import catch_up
from memckpt.capture.by_value import Batch
from memckpt.config import MemckptConfig, RedoMode

BLOCKS = 3


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wait until all work is done, including the device's."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def host_copy(tensor: Tensor) -> Tensor:
    """A host buffer for a tensor, page-locked for a GPU, and touched."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")


def free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass
class Figures:
    """Figures of one arm.

    Attributes:
        step_ms: milliseconds per step of each block.
        stall_ms: milliseconds per step of the training thread in memckpt.
        to_host_bytes: bytes per step copied from the device.
        first_commit_seconds: seconds of the first commit: memory is reserved and page-locked, the whole state written.
        restore_seconds: seconds of a restore into a fresh model.
        held_bytes: bytes of host memory.
    """

    step_ms: list[float] = field(default_factory=list)
    stall_ms: float | None = None
    to_host_bytes: float | None = None
    first_commit_seconds: float | None = None
    restore_seconds: float | None = None
    state_bytes: int = 0
    held_bytes: int | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    def time(self, step: Callable[[], None], device: torch.device, steps: int, settle: Callable[[], None]) -> None:
        """Run blocks of steps, each after an untimed step."""

        def block() -> None:
            for _ in range(steps):
                step()

        for _ in range(BLOCKS):
            step()
            self.step_ms.append(seconds_of(block, device) / steps * 1e3)
            settle()


def nothing(size: Size, device: torch.device) -> Figures:
    trainee, figures = Trainee(size, device), Figures()
    for _ in range(3):
        trainee.step()
    figures.time(trainee.step, device, size.steps, lambda: None)
    return figures


@contextlib.contextmanager
def _counting(session: memckpt.Session) -> Iterator[list[int]]:
    """Count the bytes that a session copies in the block."""
    copier: Any = session._copier
    original, together, copied = copier.copy, Batch.copy, [0]

    def copy(destination: Tensor, source: Tensor) -> None:
        copied[0] += source.nbytes
        original(destination, source)

    def copy_together(batch: Batch, buffer: Any, base: int, sources: Sequence[Tensor], *how: Any, **named: Any) -> bool:
        copied[0] += 0 if copier.asynchronous else sum(source.nbytes for source in sources)  # the copier sees them
        return together(batch, buffer, base, sources, *how, **named)

    as_they_are = copier.copy_as_they_are

    def copy_as_they_are(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        copied[0] += 0 if copier.asynchronous else sum(source.nbytes for source in sources)
        as_they_are(destinations, sources)

    copier.copy, copier.copy_as_they_are = copy, copy_as_they_are
    try:
        with mock.patch.object(Batch, "copy", copy_together):
            yield copied
    finally:
        del copier.copy, copier.copy_as_they_are


def _train(size: Size, device: torch.device, config: MemckptConfig, directory: Path, figures: Figures) -> list[Tensor]:
    """Measure protected steps. The agent keeps the state; returns the final parameters."""
    trainee = Trainee(size, device)
    session = memckpt.attach(trainee.model, trainee.optimizer, run_dir=directory, config=config)
    session.restore()

    def step() -> None:
        trainee.step()
        session.commit()

    trainee.step()
    figures.first_commit_seconds = seconds_of(session.commit, device)
    for _ in range(max(3, size.period)):  # past the extra checks of the first records, and until the window is full
        step()
    writer = session._staging.writer
    assert writer is not None
    writer.wait_for_page_locks()  # until then a step waits for its copies to what is not locked yet
    stalled = session.stall.total
    figures.time(step, device, size.steps, lambda: catch_up(session))
    figures.stall_ms = (session.stall.total - stalled) * 1e3 / (BLOCKS * (size.steps + 1))
    with _counting(session) as copied:
        for _ in range(size.period):
            step()
    figures.to_host_bytes = copied[0] / size.period
    figures.held_bytes = writer.layout.total_bytes
    figures.state_bytes = trainee.state_bytes
    session.close(finished=False)
    return [param.detach() for param in trainee.model.parameters()]


def protected(size: Size, device: torch.device, redo: RedoMode) -> Figures:
    """memckpt, and then a restore into a fresh model; if the same kernels redo the steps, the states are compared."""
    settings: dict[str, Any] = {"anchor_period_steps": size.period} if redo == "lazy" else {}
    config = MemckptConfig(redo=redo, storage=None, resume_check="off", **settings)
    figures = Figures()
    with scratch_directory() as directory:
        expected = _train(size, device, config, directory, figures)
        free()
        again = Trainee(size, device)
        session = memckpt.attach(again.model, again.optimizer, run_dir=directory, config=config)
        try:
            figures.restore_seconds = seconds_of(session.restore, device)
        finally:
            session.close()
        pairs = zip(expected, again.model.parameters(), strict=True)
        wrong = sum(not torch.equal(one, other) for one, other in pairs)
        if wrong and redo == "lazy":
            raise RuntimeError(f"{wrong} of {len(expected)} parameters are not what they were")
    return figures


def pinned_copy(size: Size, device: torch.device) -> Figures:
    """Copy the whole state into page-locked memory after each step, and back once: the link's rate."""
    trainee, figures = Trainee(size, device), Figures()
    trainee.step()
    room = [host_copy(tensor) for tensor in trainee.tensors()]

    def step() -> None:
        trainee.step()
        for copy, tensor in zip(room, trainee.tensors(), strict=True):
            copy.copy_(tensor, non_blocking=True)

    def back() -> None:
        for copy, tensor in zip(room, trainee.tensors(), strict=True):
            tensor.copy_(copy, non_blocking=True)

    step()
    figures.time(step, device, max(2, size.steps // 4), lambda: None)
    figures.state_bytes = trainee.state_bytes
    figures.to_host_bytes = float(figures.state_bytes)
    figures.restore_seconds = min(seconds_of(back, device) for _ in range(3))
    return figures


def async_save(size: Size, device: torch.device) -> Figures:
    """``torch.distributed.checkpoint.async_save`` after each step; each waits for the one before it."""
    trainee, figures = Trainee(size, device), Figures()
    with scratch_directory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A single checkpoint, overwritten: several of a large model would fill a disk.
        saver = AsyncSaver([directory / "checkpoint"], no_dist=True)

        def step() -> None:
            trainee.step()
            saver.save(trainee.state_dict())

        trainee.step()
        try:
            figures.step_ms = [seconds_of(step, device) * 1e3 for _ in range(2)][1:]
        finally:
            saver.wait()
        figures.state_bytes = trainee.state_bytes
    return figures
