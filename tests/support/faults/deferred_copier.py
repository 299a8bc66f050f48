"""A copier that makes copies as late as its contract permits, as a GPU may: for trainings on a CPU.

Until a copy is made its destination holds other bytes, which an early reader finds; a source that changes too early is
copied with its new values.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from memckpt.capture.staging_check import StagingCheck
from memckpt.memory.region import Region
from memckpt.session import link, session
from memckpt.state import codec


class DeferredCopier:
    """Copies only when sources may change, or when somebody waits for the copies."""

    asynchronous = True
    caveat = ""

    def __init__(self) -> None:
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()
        #: Number of copies made before changes, and of copies made for waiters.
        self.made = [0, 0]

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.shape == source.shape
        assert destination.dtype == source.dtype
        if destination.numel():
            destination.view(-1).view(torch.uint8).fill_(0xA5)
        with self._lock:
            self._begun.append((destination, source))

    def copy_as_it_is(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.copy(destination, source.clone())

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        host = torch.empty_like(source.detach(), device="cpu")
        self.copy(host.view(-1), source.detach().reshape(-1))
        return host

    def _make(self, count: int) -> int:
        begun, self._begun = self._begun[:count], self._begun[count:]
        with torch.no_grad():
            for destination, source in begun:
                destination.copy_(source)
        return len(begun)

    def wait_before_changes(self) -> None:
        with self._lock:
            self.made[0] += self._make(len(self._begun))

    def behind_training(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def token(self) -> Callable[[], None]:
        with self._lock:
            last = self._begun[-1] if self._begun else None

        def wait() -> None:
            with self._lock:
                place = next((i for i, each in enumerate(self._begun) if each is last), -1)
                self.made[1] += self._make(place + 1)

        return wait

    def ticket(self) -> int:
        with self._lock:
            return sum(self.made) + len(self._begun)

    def done(self) -> int:
        with self._lock:
            return sum(self.made)

    def recording_graph(self) -> bool:
        return False

    def adopt(self, region: Region, parts: Sequence[tuple[int, int]] = (), at_once: int | None = None) -> None:
        return


class LateThread:
    """A thread that runs only when somebody waits for it."""

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target: Callable[[], None] | None = target

    def start(self) -> None:
        return

    def join(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target()


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat small tensors as tensors on a device: they arrive as late as all others."""
    monkeypatch.setattr(codec, "on_host", lambda tensor: False)
    # The check reads gradients in host memory only, where factors do not have to be waited for.
    monkeypatch.setattr(StagingCheck, "compare", lambda *arguments: None)


def defer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sessions of this process, and of those forked from it, copy and send as late as they may."""
    copiers: Callable[[Any], DeferredCopier] = lambda device: DeferredCopier()  # noqa: E731
    monkeypatch.setattr(session, "copier_for", copiers)
    monkeypatch.setattr(link, "threading", types.SimpleNamespace(Thread=LateThread))
