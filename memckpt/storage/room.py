"""Room in a store: what may be let go of so that something new fits. Torch-free.

What the newest state in the store is made of stays, and is read before anything else goes: it has to be good. So does
what retention keeps for good. The last checkpoints but one, which are kept in case, go, oldest first, then the batches
that nothing needs without them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from memckpt.errors import DamagedStateError, StorageError, StorageFullError
from memckpt.storage.catalog import PASSED, Catalog, Checkpoint, examine, remove, remove_batch, superseded
from memckpt.storage.chain import StoredPoint, stored_points, unneeded_batches
from memckpt.storage.format import Batch, Part
from memckpt.storage.store import Store
from memckpt.storage.tidying import read_pins

_log = logging.getLogger("memckpt.storage")


def size_text(nbytes: int) -> str:
    """A number of bytes in the unit that suits it."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def no_room(what: str, url: str, needed: int, free: int | None, spare: int = 0, refused: str = "") -> StorageFullError:
    """The error that says so.

    Args:
        what: is to be written.
        url: of the store.
        needed: bytes.
        free: bytes that are; None: nobody says.
        spare: bytes that could be let go of.
        refused: what the storage said when it was tried.
    """
    found = "no room" if free is None else f"{size_text(free)} free"
    also = f", and {size_text(spare)} that could be let go of" if spare else ""
    why = f" ({refused})" if refused else ""
    return StorageFullError(
        f"{url} has no room for {what}: expected {size_text(needed)}, found {found}{also}{why}. Make room there, or "
        "give the run a storage.url with more; training goes on meanwhile, and as soon as there is room it is used",
        needed,
        free,
        spare,
    )


class _Spare(NamedTuple):
    """What may go, oldest first."""

    checkpoints: list[Checkpoint]
    batches: list[Batch]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.checkpoints) + sum(one.nbytes for one in self.batches)


def make_room(store: Store, catalog: Catalog, what: str, needed: int, keep_every_steps: int | None) -> None:
    """See that so many bytes are free; if they are not, let go of what the newest state does without.

    Nothing is let go of where that would not be enough.

    Args:
        store: to be written to.
        catalog: what it holds.
        what: is to be written.
        needed: bytes.
        keep_every_steps: checkpoints whose step is a multiple of it stay.

    Raises:
        StorageFullError: there is no room, and none can be made.
        StorageError: the newest state cannot be read, so that nothing else may go.
    """
    free = store.free()
    if free is None or free >= needed:
        return
    points = stored_points(catalog)
    spare = _spare(store, catalog, points[0], keep_every_steps) if points else _Spare([], [])
    if free + spare.nbytes < needed:
        raise no_room(what, store.url, needed, free, spare.nbytes)
    spare = _spare(store, catalog, _newest_good(store, points), keep_every_steps)
    if free + spare.nbytes < needed:
        raise no_room(what, store.url, needed, free, spare.nbytes)
    _let_go(store, spare, needed)


def keep_room(store: Store, catalog: Catalog, needed: int, keep_every_steps: int | None, good: Part) -> None:
    """See that so many bytes are free for what comes next, as far as that can be had.

    Args:
        store, catalog, needed, keep_every_steps: as for :func:`make_room`.
        good: a part of the newest checkpoint, which has just been read back.
    """
    free = store.free()
    newest = next(iter(stored_points(catalog)), None)
    if free is not None and free < needed and newest is not None:
        if newest.checkpoint.parts.get(good.node) != good:
            newest = _newest_good(store, stored_points(catalog))
        _let_go(store, _spare(store, catalog, newest, keep_every_steps), needed)


def let_go_blindly(store: Store, catalog: Catalog, keep_every_steps: int | None) -> int:
    """The same where a write has been refused all the same (a quota): all that may go does. Returns its bytes."""
    points = stored_points(catalog)
    if not points or not _spare(store, catalog, points[0], keep_every_steps).nbytes:
        return 0
    spare = _spare(store, catalog, _newest_good(store, points), keep_every_steps)
    _let_go(store, spare, None)
    return spare.nbytes


def _spare(store: Store, catalog: Catalog, needed: StoredPoint, keep_every_steps: int | None) -> _Spare:
    """What the store may do without, as long as it has what a state is made of."""
    if PASSED in catalog.unreadable or PASSED in catalog.damaged:
        return _Spare([], [])  # what has to be kept is not known
    try:
        pins = read_pins(store)
    except (StorageError, DamagedStateError) as error:
        _log.warning("no checkpoint is let go of to make room: %s", error)
        return _Spare([], [])
    gone = superseded(catalog.checkpoints, 1, keep_every_steps, unsure=catalog.unsure | pins)
    gone = [one for one in gone if one.key != needed.checkpoint.key]
    kept = [one for one in catalog.complete if one not in gone]
    used = {batch.commit_path for batch in needed.batches}
    batches = [one for one in unneeded_batches(catalog, kept) if one.commit_path not in used]
    return _Spare(gone[::-1], batches)


def _newest_good(store: Store, points: Sequence[StoredPoint]) -> StoredPoint:
    """The newest state that the store can produce, now. Raises StorageError."""
    problems = []
    for point in points:
        found = examine(store, point.files)
        if found.unreadable:
            raise StorageError(f"nothing is let go of, as what is newest cannot be read: {found.unreadable[0]}")
        if not found.damaged:
            return point
        problems += found.damaged
    raise StorageError(f"nothing is let go of, as no state in storage is whole: {problems[0]}")


def _let_go(store: Store, spare: _Spare, needed: int | None) -> None:
    """Delete what may go until so many bytes are free; None: all of it."""

    def enough() -> bool:
        free = store.free()
        return needed is not None and free is not None and free >= needed

    for checkpoint in spare.checkpoints:
        if enough():
            return
        remove(store, checkpoint)
        _log.warning("let go of step %d, as the storage is full", checkpoint.step)
    for batch in spare.batches:
        if enough():
            return
        remove_batch(store, batch)
