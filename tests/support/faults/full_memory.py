"""A kernel that refuses the memory of slots."""

from __future__ import annotations

import errno
from typing import Any
from unittest import mock

import pytest

from memckpt.memory import region
from memckpt.memory.region import GenerationRegions


def refuse_slots(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have agents find no memory so many times for the slots of generations whose starts are there."""
    original, failures = GenerationRegions.make_whole, [None] * times

    def refuse(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "a test's")

    def make_whole(self: GenerationRegions, *arguments: Any) -> None:
        if failures and not self.whole:
            failures.pop()
            with mock.patch.object(region, "_fallocate", refuse):
                original(self, *arguments)
        else:
            original(self, *arguments)

    monkeypatch.setattr(GenerationRegions, "make_whole", make_whole)
