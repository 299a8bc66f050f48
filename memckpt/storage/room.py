"""Making room in a full store by deleting spare checkpoints. Torch-free.

All files of the newest state stay, and are verified before anything is deleted. Checkpoints that retention keeps for
good stay, too. Deleted are the checkpoints that `keep_last` would keep beside the newest, oldest first, then the
batches that only they need.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from memckpt.errors import DamagedStateError, StorageError, StorageFullError
from memckpt.storage.catalog import PASSED, Catalog, Checkpoint, remove, remove_batch
from memckpt.storage.chain import StoredPoint, stored_points, unneeded_batches
from memckpt.storage.format import Batch, Part
from memckpt.storage.retention import superseded
from memckpt.storage.store import Store
from memckpt.storage.tidying import read_pins
from memckpt.storage.verification import examine
from memckpt.user_messages import nbytes_text

_log = logging.getLogger("memckpt.storage")


def no_room(what: str, url: str, needed: int, free: int | None, spare: int = 0, refused: str = "") -> StorageFullError:
    """The error of a full store.

    Args:
        what: description of the data to write.
        url: URL of the store.
        needed: bytes to write.
        free: free bytes; None: unknown.
        spare: bytes that could be deleted.
        refused: the storage's own error message, if a write failed.
    """
    found = "no room" if free is None else f"{nbytes_text(free)} free"
    also = f", and {nbytes_text(spare)} that could be deleted" if spare else ""
    why = f" ({refused})" if refused else ""
    return StorageFullError(
        f"{url} has no room for {what}: expected {nbytes_text(needed)}, found {found}{also}{why}. Make room there, or "
        "give the run a storage.url with more; nothing waits for it, and it is tried again as soon as there is room",
        needed,
        free,
        spare,
    )


class _Spare(NamedTuple):
    """Checkpoints and batches that may be deleted, oldest first."""

    checkpoints: list[Checkpoint]
    batches: list[Batch]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.checkpoints) + sum(one.nbytes for one in self.batches)


def make_room(store: Store, catalog: Catalog, what: str, needed: int, keep_every_steps: int | None) -> None:
    """Make sure that `needed` bytes are free, deleting what the newest state does not need.

    Nothing is deleted if that would not be enough.

    Args:
        store: the store.
        catalog: contents of the store.
        what: description of the data to write, for the error.
        needed: bytes.
        keep_every_steps: checkpoints at multiples of this step stay.

    Raises:
        StorageFullError: there is no room, and none can be made.
        StorageError: the newest state cannot be read, so nothing else may be deleted.
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
    """Free up to `needed` bytes for the next checkpoint; a shortage is no error.

    Args:
        store, catalog, needed, keep_every_steps: as for :func:`make_room`.
        good: a part of the newest checkpoint that has just been read back.
    """
    free = store.free()
    newest = next(iter(stored_points(catalog)), None)
    if free is not None and free < needed and newest is not None:
        if newest.checkpoint.parts.get(good.node) != good:
            newest = _newest_good(store, stored_points(catalog))
        _let_go(store, _spare(store, catalog, newest, keep_every_steps), needed)


def let_go_blindly(store: Store, catalog: Catalog, keep_every_steps: int | None) -> int:
    """Delete everything spare after a write failed although bytes were free (a quota). Returns the bytes deleted."""
    points = stored_points(catalog)
    if not points or not _spare(store, catalog, points[0], keep_every_steps).nbytes:
        return 0
    spare = _spare(store, catalog, _newest_good(store, points), keep_every_steps)
    _let_go(store, spare, None)
    return spare.nbytes


def _spare(store: Store, catalog: Catalog, needed: StoredPoint, keep_every_steps: int | None) -> _Spare:
    """What may be deleted while the state `needed` stays."""
    if PASSED in catalog.unreadable or PASSED in catalog.damaged:
        return _Spare([], [])  # the checkpoints to keep are not known
    try:
        pins = read_pins(store)
    except (StorageError, DamagedStateError) as error:
        _log.warning("no checkpoint is deleted to make room: %s", error)
        return _Spare([], [])
    gone = superseded(catalog.checkpoints, 1, keep_every_steps, unsure=catalog.unsure | pins)
    gone = [one for one in gone if one.key != needed.checkpoint.key]
    kept = [one for one in catalog.complete if one not in gone]
    used = {batch.commit_path for batch in needed.batches}
    batches = [one for one in unneeded_batches(catalog, kept) if one.commit_path not in used]
    return _Spare(gone[::-1], batches)


def _newest_good(store: Store, points: Sequence[StoredPoint]) -> StoredPoint:
    """The newest state whose files verify. Raises StorageError."""
    problems = []
    for point in points:
        found = examine(store, point.files)
        if found.unreadable:
            raise StorageError(f"nothing is deleted, as the newest state cannot be read: {found.unreadable[0]}")
        if not found.damaged:
            return point
        problems += found.damaged
    raise StorageError(f"nothing is deleted, as no state in storage is intact: {problems[0]}")


def _let_go(store: Store, spare: _Spare, needed: int | None) -> None:
    """Delete spare checkpoints and batches until `needed` bytes are free; None: all of them."""

    def enough() -> bool:
        free = store.free()
        return needed is not None and free is not None and free >= needed

    for checkpoint in spare.checkpoints:
        if enough():
            return
        remove(store, checkpoint)
        _log.warning("deleted step %d, as the storage is full", checkpoint.step)
    for batch in spare.batches:
        if enough():
            return
        remove_batch(store, batch)
