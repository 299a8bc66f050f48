"""A copier that makes copies as late as its contract permits, in the order in which they were begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from memckpt.capture.copier import HostCopier


class DeferredCopier(HostCopier):
    """Copies only when sources may change, or when a token is waited for. Until then destinations hold other bytes."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__()
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

    def copy_as_they_are(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for destination, source in zip(destinations, sources, strict=True):
            self.copy(destination.view(source.shape), source.clone())

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
