"""A loader whose batches are fetched before they are trained on, by a wrapper or a loop that reads ahead.

A commit then lies between two fetches that have both happened, and training may have drawn numbers between them. So
position and global generators are noted before each fetch; a resume goes back to the first batch that was not
trained on, and fetches again what had been fetched, each batch under the generators that it was fetched under.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from memckpt.capture.dataloader.errors import DataPositionError
from memckpt.capture.dataloader.graft import (
    graft,
    position,
    recreate_persistent_iterator,
    release,
    restore_generators,
    resume,
    unreplayable,
)
from memckpt.state import rng


class Lookahead:
    """Follows one loader, which it grafts; `release` gives the loader back as it was.

    What `position` returns is made of plain values, as with :func:`memckpt.capture.dataloader.position`.

    Raises:
        TypeError: `loader` is not a DataLoader, or its class forbids its instances to change class.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        graft(loader)
        self._loader = loader
        self._notes: dict[int, tuple[dict[str, Any], rng.RngState]] = {}
        self._replay: dict[int, rng.RngState] = {}
        base = type(loader)
        loader.__class__ = type(base.__name__, (base,), {"__iter__": _iterate, "__slots__": ()})
        _followers[loader] = self

    def position(self, consumed: int) -> dict[str, Any]:
        """Where to go on, in the middle of a pass, after `consumed` of its batches have been trained on.

        Notes of earlier batches are dropped: `consumed` must not become less within a pass.

        Raises:
            DataPositionError: that batch was not fetched in this pass.
        """
        if consumed not in self._notes:
            raise DataPositionError(
                f"expected a position behind batch {consumed} of this pass, found notes of {sorted(self._notes)}"
            )
        for number in [number for number in self._notes if number < consumed]:
            del self._notes[number]
        fetches: list[tuple[int, rng.RngState]] = []
        for number, (_, state) in sorted(self._notes.items()):
            if not fetches or fetches[-1][1] != state:
                fetches.append((number, state))
        return {
            "from": self._notes[consumed][0],
            "fetches": fetches,
            "fetched": max(self._notes) + 1,
            "now": self._generators(),
        }

    def between_passes(self) -> dict[str, Any]:
        """Where to go on when the next thing asked of the loader is a new pass."""
        return {"from": position(self._loader, exhausted=True), "fetches": [], "fetched": 0, "now": None}

    def _generators(self) -> dict[str, Any]:
        return {**position(self._loader), "pass": None}

    def resume(self, held: dict[str, Any]) -> None:
        """Let the loader go on at the position `held`; the global generators may move until training sets them.

        Raises:
            DataPositionError: see :func:`memckpt.capture.dataloader.resume`.
        """
        self._notes.clear()
        if held["now"] is None:
            recreate_persistent_iterator(self._loader, held["from"])
            return
        resume(self._loader, held["from"])
        states = dict(held["fetches"])
        for number in range(held["from"]["pass"]["batches"], held["fetched"]):
            self._replay[number] = states[max(first for first in states if first <= number)]

    def restore_generators(self, held: dict[str, Any]) -> None:
        """Set the loader's own generators; call it when the batches fetched ahead have been fetched again."""
        restore_generators(self._loader, held["now"] or held["from"])

    def unreplayable(self) -> str | None:
        """One line on why this loader cannot be promised to resume exactly; None if nothing is known against it."""
        return unreplayable(self._loader)

    def release(self) -> None:
        """Make the loader what it was; an iteration that is under way can be finished."""
        self._notes.clear()
        _followers.pop(self._loader, None)
        release(self._loader)

    def iterate(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Hand on what `iterator` yields, with a note before each fetch."""
        self._notes.clear()
        while True:
            here = position(self._loader)
            number: int = here["pass"]["batches"]
            state = self._replay.pop(number, None)
            if state is None:
                self._replay.clear()
                state = rng.capture()
            else:
                rng.restore(state)
            self._notes[number] = (here, state)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch


_followers: WeakKeyDictionary[DataLoader[Any], Lookahead] = WeakKeyDictionary()


def _iterate(loader: Any) -> Iterator[Any]:
    base: Any = type(loader).__mro__[1]
    follower = _followers.get(loader)
    iterator: Iterator[Any] = base.__iter__(loader)
    return iterator if follower is None else follower.iterate(iterator)
