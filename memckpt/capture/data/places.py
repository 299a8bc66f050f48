"""Places of a user's loop in its loaders, and what a restart would do there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memckpt.state import rng

_LEFT = (
    "the loop over batches was left after a commit although its loader has more batches, and a restart would "
    "continue in it: pass commit(epoch_over=True) there, or leave the loop before its next batch is trained"
)
_SECOND_LOOP = (
    "a second loop over batches in one epoch: a restart during the second loop runs the first one again; "
    "give each an epoch of its own"
)
_DRAWN = (
    "the loop drew from the global generators after iter() of a loader and before its first batch, and a resume takes "
    "these draws twice; draw behind the batch, or from a torch.Generator that is registered"
)


class DrawsAtOpen:
    """Finds draws between `iter()` of a loader and its first batch: the generators of a resume are restored there."""

    def __init__(self) -> None:
        self._opened: rng.RngState | None = None

    def note_open(self) -> None:
        """Note what the global generators are as `iter()` is called."""
        self._opened = rng.capture()

    def find(self) -> str | None:
        """What to say of draws since `iter()`, as the first batch is asked for; once."""
        opened, self._opened = self._opened, None
        return _DRAWN if opened is not None and opened != rng.capture() else None


class Place(NamedTuple):
    """The user's position in one loader.

    Attributes:
        at: iteration and batch.
        active: whether the user is iterating over it.
        over: whether that iteration, or the last one, has given its last batch, as far as that is known.
    """

    at: tuple[int, int]
    active: bool
    over: bool


class PlaceWatch:
    """Compares the places at the commits of an epoch."""

    def __init__(self) -> None:
        self._places: Sequence[Place] = ()
        self._first: Sequence[Place] | None = None

    def committed(self, places: Sequence[Place], in_epochs: bool) -> str | None:
        """One line on why a restart would not be exact, judged at a commit; None if no reason is known.

        Args:
            places: those of all loaders, in the same order each time.
            in_epochs: whether the loop counts epochs by ours.
        """
        self._places = places
        if self._first is None:
            self._first = places
        first = [(then, now) for then, now in zip(self._first, places, strict=True) if then.active]
        # Loaders that are iterated together with another one may restart as often as they end.
        again = bool(first) and all(then.at[0] != now.at[0] for then, now in first)
        ended = any(not now.active for _, now in first)
        return _SECOND_LOOP if in_epochs and (again or ended) else None

    def left(self, places: Sequence[Place]) -> str | None:
        """As :meth:`committed`, after the loop over batches."""
        self._first = None
        pairs = [(then, now) for then, now in zip(self._places, places, strict=False) if then.active]
        still_there = all(
            then.at == now.at and not now.active and not then.over and not now.over for then, now in pairs
        )
        return _LEFT if pairs and still_there else None
