"""A tap between a loader and its sampler: notes the start of a pass, counts draws, and replays without loading."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from memckpt.capture.data.passes import Pass, Phase
from memckpt.errors import DataPositionError
from memckpt.state import rng

#: Parts of a batch, and elements of one, that a checksum of its content looks at.
_SAMPLED = 64


class PassKeeper(Protocol):
    """The part of a grafted loader's record that a tap uses."""

    current: Pass
    holding: bool
    """While true, samplers appear empty: nothing may be dispatched yet."""
    watch_sampler: bool

    def phase(self) -> Phase: ...
    def enter(self, phase: Phase) -> None: ...
    def preserved(self) -> AbstractContextManager[None]: ...
    def drawn(self, current: Pass) -> None: ...
    def differs(self, problem: str) -> None: ...
    def remedy(self, record: dict[str, Any]) -> str: ...


class SamplerTap:
    """Replaces the sampler in the loader's iterator. Delegates everything but iteration."""

    def __init__(self, sampler: Any, keeper: PassKeeper) -> None:
        self.tapped = sampler
        self._keeper = keeper

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("tapped", "_keeper"):
            raise AttributeError(name)
        return getattr(self.tapped, name)

    def __len__(self) -> int:
        return len(self.tapped)

    def __iter__(self) -> Iterator[Any]:
        before = self._keeper.phase()
        indices = iter(self.tapped)
        kind = _StatefulTapIterator if _is_stateful(indices) else _TapIterator
        return kind(self.tapped, indices, before, self._keeper)


class _StatefulSamplerTap(SamplerTap):
    """For samplers with a state: callers look for these methods, so only this class has them."""

    def state_dict(self) -> Any:
        return self.tapped.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.tapped.load_state_dict(state)


def tap(sampler: Any, keeper: PassKeeper) -> SamplerTap:
    """The tap that an iterator gets in place of `sampler`."""
    return (_StatefulSamplerTap if _is_stateful(sampler) else SamplerTap)(sampler, keeper)


def _is_stateful(candidate: object) -> bool:
    return hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict")


class _TapIterator(Iterator[Any]):
    """Draws as early as the sampler: torch's samplers draw at their first next(), torchdata's in iter()."""

    def __init__(self, sampler: Any, indices: Iterator[Any], before: Phase, keeper: PassKeeper) -> None:
        self._sampler = sampler
        self._indices: Any = indices  # may have methods for a state, too
        self._before = before
        self._keeper = keeper
        self._pass = keeper.current
        self._started = False
        self._ahead: deque[tuple[Any, Any]] = deque()
        self._state: Any = None

    def __next__(self) -> Any:
        if self._keeper.holding or self._pass.drained:
            raise StopIteration
        if not self._started:
            self._start()
            self._started = True
        if self._ahead:
            index, self._state = self._ahead.popleft()
        else:
            index, self._state = self._draw(), None
        self._pass.dispatch(index_digest(index, self._pass.dispatched_digest))
        self._keeper.drawn(self._pass)
        return index

    def _start(self) -> None:
        replay = self._pass.replay
        if replay is not None and replay["sampler_start"] is not None:
            self._replay(replay)
            self._pass.replay = None  # only after success: a second try must not continue with other data
        elif self._pass.sampler_start is None:
            self._pass.sampler_start = (self._before, self._keeper.phase())

    def _draw(self) -> Any:
        # The first draw is where samplers shuffle, and is noted for every pass.
        watched = self._keeper.watch_sampler and self._pass.dispatched > 0
        before = rng.capture() if watched else None
        try:
            index = next(self._indices)
        except StopIteration:
            self._pass.sampler_ended = True
            raise
        if before is not None:
            after = rng.capture()
            moved = {name: state for name, state in before.items() if state != after[name]}
            if moved:
                self._pass.note_draw(moved)
        return index

    def _replay(self, recorded: dict[str, Any]) -> None:
        """Repeat the draws of the killed process under the generators it had then, loading nothing.

        This includes batches dispatched but not handed out: after them the live generators are right.
        """
        at_iter, at_first_draw = recorded["sampler_start"]
        batches, dispatched = recorded["batches"], recorded["dispatched"]
        digest = 0
        self._ahead.clear()
        with self._keeper.preserved():
            self._keeper.enter(at_iter)
            self._indices = iter(self._sampler)
            self._keeper.enter(at_first_draw)
            for drawn in range(dispatched):
                if drawn == batches and not recorded["draws_lost"]:
                    self._check(digest, recorded["digest"], batches, recorded)
                if drawn in recorded["draws"]:
                    rng.restore({**rng.capture(), **recorded["draws"][drawn]})
                try:
                    index = next(self._indices)
                except StopIteration:
                    raise DataPositionError(
                        f"{self._describe()} ended after {drawn} batches, expected at least {dispatched} as in the "
                        f"run that is continued. {self._keeper.remedy(recorded)}"
                    ) from None
                digest = index_digest(index, digest)
                if drawn >= batches:
                    self._ahead.append((index, self._indices_state()))
            if not recorded["draws_lost"]:
                self._check(digest, recorded["dispatched_digest"], dispatched, recorded)
            if recorded["digest"] is None:  # a derived position: later ones build on these draws
                self._pass.digest = self._pass.dispatched_digest = digest
            if recorded["sampler_ended"]:
                # Samplers may act at their end (count their epochs).
                try:
                    next(self._indices)
                except StopIteration:
                    self._pass.sampler_ended = True
                else:
                    self._keeper.differs(
                        f"{self._describe()} goes on after {dispatched} batches, expected its end there as in the "
                        f"run that is continued. {self._keeper.remedy(recorded)}"
                    )

    def _indices_state(self) -> Any:
        return None

    def _check(self, found: int, expected: int | None, batches: int, recorded: dict[str, Any]) -> None:
        if expected is not None and found != expected:
            self._keeper.differs(
                f"{self._describe()} does not repeat the indices of its first {batches} batches: expected checksum "
                f"{expected:#010x}, found {found:#010x}. {self._keeper.remedy(recorded)}"
            )

    def _describe(self) -> str:
        inner = getattr(self._sampler, "sampler", None)
        name = type(self._sampler).__name__
        return f"the sampler {name}" if inner is None else f"the sampler {name} over {type(inner).__name__}"


class _StatefulTapIterator(_TapIterator):
    """For iterators with a state, which the user's own checkpoints of the loader contain."""

    def state_dict(self) -> Any:
        """The state after the batch given last, although a replay has drawn further."""
        return self._indices_state() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        self._indices.load_state_dict(state)

    def _indices_state(self) -> Any:
        return self._indices.state_dict()


def index_digest(index: Any, digest: int) -> int:
    """Continue a 32-bit running checksum with the indices of one batch.

    Equal in every process: objects of unknown types count by their type only.
    """
    if isinstance(index, (list, tuple)):
        try:
            return zlib.crc32(array("q", index).tobytes(), digest ^ len(index))
        except (TypeError, OverflowError):
            digest = zlib.crc32(b"(", digest ^ len(index))
            for item in index:
                digest = index_digest(item, digest)
            return digest
    if isinstance(index, (bool, int, float, str, bytes, type(None))):
        return zlib.crc32(repr(index).encode(), digest)
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    if isinstance(index, (np.ndarray, np.generic)):
        return zlib.crc32(index.tobytes(), digest)
    if isinstance(index, dict):
        return index_digest([part for item in index.items() for part in item], digest)
    return zlib.crc32(type(index).__qualname__.encode(), digest)


def content_digest(batch: Any, digest: int) -> int:
    """Continue a 32-bit running checksum with a sample of a batch's content: a few elements of each part."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch[:_SAMPLED]:
            digest = content_digest(part, digest)
        return zlib.crc32(b"(", digest ^ len(batch))
    if isinstance(batch, torch.Tensor):
        if batch.device.type != "cpu" or not batch.is_contiguous():
            return index_digest(list(batch.shape), digest)
        batch = batch.detach().reshape(-1)[:: max(batch.numel() // _SAMPLED, 1)].contiguous().view(torch.uint8).numpy()
    elif isinstance(batch, np.ndarray) and not batch.dtype.hasobject:
        batch = batch.reshape(-1)[:: max(batch.size // _SAMPLED, 1)].copy()
    return index_digest(batch, digest)
