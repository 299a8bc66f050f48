"""Bookkeeping of one pass over a loader: one iteration from its first batch to its last."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from memckpt.errors import DataPositionError

_UNDO_DEPTH = 8
"""Number of batches that a position can go back, at least; a loader that is read further ahead remembers more."""

_MOST_DRAWS = 8
"""Number of a pass's draws that moved the global generators and are kept: each takes a few KiB of every record."""

Phase = dict[str, Any]
"""States of the generators at one moment: ``{"global": RngState, "own": OwnState}``."""

WorkerStates = dict[int, Phase]
"""Worker id to its generators after a batch; a worker that has produced none is absent."""


@dataclass(slots=True, eq=False)
class Pass:
    """Progress of one pass.

    A batch is dispatched when the loader draws its indices from the sampler, and handed out when the caller receives
    it. With workers dispatching runs ahead, so both are counted, and both have a running checksum of the indices.
    """

    construction: Phase
    """Before the pass's iterator was made: decides the workers' base seed."""
    samples: int | None = None
    """Length of the dataset as the pass began; None where it has none."""
    choices: dict[str, int] = field(default_factory=dict)
    """Checksums, as the pass began, of what datasets choose samples by and training has changed; by path."""
    forked: dict[str, Any] = field(default_factory=dict)
    """What datasets chose samples by as the workers were made, which keep their copies: see `OwnObjects.copied`."""
    worker_start: WorkerStates = field(default_factory=dict)
    worker_states: WorkerStates = field(default_factory=dict)
    """After the newest batch that was handed out."""
    sampler_start: tuple[Phase, Phase] | None = None
    """Before the sampler's iter(), and before its first next(). Some samplers draw in one, some in the other."""
    batches: int = 0
    digest: int = 0
    dispatched: int = 0
    dispatched_digest: int = 0
    sampler_ended: bool = False
    drained: bool = False
    """The pass is over although its sampler may have more: dispatch nothing."""
    exhausted: bool = False
    """The caller takes no further batch from this pass."""
    ended: bool = False
    """The loader has no further batch."""
    repeats: bool = False
    """It has ended, and gave what the one before it gave; known for streams."""
    draws: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Global generators before a draw from the sampler that moved them, by the draw's number, without the first one.

    Only those that it moved."""
    draws_lost: bool = False
    """There were more of them than are kept."""
    skipped: int = 0
    """Batches handed out by earlier processes; this process's workers have not seen them."""
    replay: dict[str, Any] | None = None
    """The recorded pass to which the sampler still has to be advanced."""
    lookahead: int = 0
    """Number of batches by which the loader is read ahead of its consumer."""
    refetch: deque[Phase] = field(default_factory=deque)
    """Before the loading of each batch that the killed process had read ahead and that has to be loaded again."""
    fetching: Phase | None = None
    """Before the loading in progress, if that happens in this process."""
    _fetches: deque[Phase] = field(init=False)
    _in_flight: deque[int] = field(default_factory=deque)
    _undo: deque[tuple[int, int | None, Phase | None]] = field(init=False)

    def __post_init__(self) -> None:
        self._fetches, self._undo = deque(), deque()
        self.look_ahead(self.lookahead)

    def look_ahead(self, batches: int) -> None:
        """Remember what is needed to go back by this number of batches."""
        self.lookahead = batches
        self._fetches = deque(self._fetches, maxlen=batches)
        self._undo = deque(self._undo, maxlen=max(_UNDO_DEPTH, batches))

    def dispatch(self, digest: int) -> None:
        self.dispatched += 1
        self.dispatched_digest = digest
        self._in_flight.append(digest)

    def note_draw(self, moved: dict[str, Any]) -> None:
        """Note that the draw that comes next has moved the global generators, which were in these states before."""
        self.draws[self.dispatched] = moved
        kept = [number for number in self.draws if number < self.batches]
        if len(kept) > _MOST_DRAWS:
            self.draws_lost = True
            del self.draws[kept[0]]

    def hand_out(self, worker_id: int | None = None, state: Phase | None = None, digest: int | None = None) -> None:
        """Count a batch for the caller; if a worker made it, note that worker's generators.

        Args:
            worker_id, state: of the worker.
            digest: running checksum of the batches' content, where there are no indices.
        """
        self._undo.append(
            (self.digest, worker_id, self.worker_states.get(worker_id) if worker_id is not None else None)
        )
        self.batches += 1
        if self.fetching is not None:
            self._fetches.append(self.fetching)
            self.fetching = None
        if self._in_flight:
            self.digest = self._in_flight.popleft()
        if digest is not None:
            self.digest = digest
        if worker_id is not None and state is not None:
            self.worker_states[worker_id] = state

    def record(self, ahead: int = 0) -> dict[str, Any]:
        """The pass as plain values, as it was `ahead` batches ago.

        Shares the generator states, which never change, and copies the rest.

        Raises:
            DataPositionError: `ahead` goes back further than is remembered.
        """
        digest, worker_states = self.digest, dict(self.worker_states)
        if not 0 <= ahead <= len(self._undo):
            raise DataPositionError(
                f"expected to go back by at most {len(self._undo)} batches, found a caller that is {ahead} ahead"
            )
        for _, (before, worker_id, state) in zip(range(ahead), reversed(self._undo), strict=False):
            digest = before
            if worker_id is not None and state is not None:
                worker_states[worker_id] = state
            elif worker_id is not None:
                del worker_states[worker_id]
        fetches = list(self._fetches)
        return {
            "construction": self.construction,
            "samples": self.samples,
            "choices": self.choices,
            "forked": self.forked,
            "worker_start": dict(self.worker_start),
            "worker_states": worker_states,
            "sampler_start": self.sampler_start,
            "batches": self.batches - ahead,
            "digest": digest,
            "dispatched": self.dispatched,
            "dispatched_digest": self.dispatched_digest,
            "sampler_ended": self.sampler_ended,
            "ended": self.ended,
            "repeats": self.repeats,
            "draws": dict(self.draws),
            "draws_lost": self.draws_lost,
            "fetches": _counted(fetches[len(fetches) - ahead :]) if len(fetches) >= ahead else [],
        }

    @classmethod
    def resumed(cls, record: dict[str, Any], lookahead: int) -> Pass:
        """The pass at the recorded point, before its dispatched batches are dispatched again."""
        start = record["sampler_start"]
        return cls(
            construction=record["construction"],
            samples=record["samples"],
            choices=record["choices"],
            forked=record.get("forked", {}),
            worker_start=dict(record["worker_start"]),
            worker_states=dict(record["worker_states"]),
            sampler_start=None if start is None else (start[0], start[1]),
            batches=record["batches"],
            digest=record["digest"] or 0,
            dispatched=record["batches"],
            dispatched_digest=record["digest"] or 0,
            skipped=record["batches"],
            draws=dict(record["draws"]),
            draws_lost=record["draws_lost"],
            ended=record.get("ended", False),
            repeats=record.get("repeats", False),
            replay=record,
            lookahead=lookahead,
            refetch=deque(_repeated(record["fetches"])),
        )

    def rewind(self) -> None:
        """Go back to the beginning, for data that can only be read again from there."""
        self.replay = None
        self.worker_states = dict(self.worker_start)
        self.batches = self.digest = self.dispatched = self.dispatched_digest = self.skipped = 0
        self.draws, self.draws_lost, self.ended = {}, False, False


def _counted(fetches: list[Phase]) -> list[tuple[int, Phase]]:
    """Runs of equal phases, with their lengths: keeps a position small if nothing draws."""
    counted: list[tuple[int, Phase]] = []
    for phase in fetches:
        if counted and counted[-1][1] == phase:
            counted[-1] = counted[-1][0] + 1, phase
        else:
            counted.append((1, phase))
    return counted


def _repeated(counted: list[tuple[int, Phase]]) -> list[Phase]:
    return [phase for count, phase in counted for _ in range(count)]
