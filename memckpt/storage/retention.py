"""What may be deleted from a store: superseded checkpoints, files of dead writers, and what makes room.

What is superseded and what is left over are pure functions. A command deletes by hand; pins say what stays. Torch-free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from memckpt.errors import MALFORMED, DamagedStateError, StorageError, StorageFullError
from memckpt.storage.catalog import PASSED, Catalog, Checkpoint, Key, remove, remove_batch
from memckpt.storage.chain import StoredPoint, stored_points, unneeded_batches
from memckpt.storage.format import COMMITS, Batch, Part, Place, place_of
from memckpt.storage.store import Store, finished_name, is_missing
from memckpt.storage.verification import examine
from memckpt.user_messages import nbytes_text


def superseded(
    checkpoints: Sequence[Checkpoint],
    keep_last: int,
    keep_every_steps: int | None,
    called_for: Part | None = None,
    unsure: Collection[Key] = (),
) -> list[Checkpoint]:
    """The checkpoints that retention deletes.

    Retention keeps the last `keep_last` complete checkpoints; those at multiples of `keep_every_steps`; incomplete ones
    newer than the newest complete one, whose other parts may still be written; the one of `called_for`, however old its
    attempt is; and those in `unsure`, which do not count as any of the former.

    Args:
        checkpoints: newest first; the newest complete one has been verified.
        keep_last: number of checkpoints.
        keep_every_steps: interval in steps; None: none are kept for their step.
        called_for: a part that has just been committed.
        unsure: keys of checkpoints that could not be read and may be complete.
    """
    kept = 0
    gone = []
    for one in checkpoints:
        if called_for is not None and one.parts.get(called_for.node) == called_for:
            kept += one.complete
        elif one.key in unsure:
            continue
        elif one.complete:
            kept += 1
            marked = bool(keep_every_steps) and one.step % (keep_every_steps or 1) == 0
            if kept > keep_last and not marked:
                gone.append(one)
        elif kept:
            gone.append(one)
    return gone


def leftovers(catalog: Catalog, node: str, abandoned: Sequence[Part]) -> list[str]:
    """Uncommitted files of dead writers, which may be deleted.

    These are: files of `abandoned` parts; the node's own files of checkpoints older than the newest complete one; and
    any node's files of earlier attempts. Other nodes' files of the current attempt may still be written, and so may
    newer ones: an agent that was told to leave saves while its successor is already running.

    Args:
        catalog: contents of the store.
        node: the node whose writer asks; it is not writing now.
        abandoned: parts whose writer is known to be dead.
    """
    newest = next(iter(catalog.complete), None)
    dead = {place_of(part.commit_path) for part in abandoned}
    return [
        path
        for path, place in uncommitted(catalog).items()
        if place in dead or (newest is not None and _outlived(place, newest, node))
    ]


def uncommitted(catalog: Catalog) -> dict[str, Place]:
    """Files without a commit file, being written or abandoned, and the checkpoint or batch they belong to."""
    committed = {place_of(path) for path in catalog.files if path.startswith(COMMITS) and path == finished_name(path)}
    keys = {place.key for place in committed if place is not None and place.first is None}
    found = {}
    for path in catalog.files:
        finished = finished_name(path)
        place = place_of(finished)
        if place is None or (path == finished and (place in committed or (not place.node and place.key in keys))):
            continue
        if catalog.hides(path):
            continue
        found[path] = place
    return found


def _outlived(place: Place, newest: Checkpoint, node: str) -> bool:
    if place.first is not None:
        # Batches are written by another process, which may be writing this one.
        return place.number < newest.timeline.number
    # Merged metadata is written by the last node to finish: no node still writes an older checkpoint.
    return place.key < newest.key and (place.node in (node, "") or place.number < newest.timeline.number)


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
    _delete_for_room(store, spare, needed)


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
        _delete_for_room(store, _spare(store, catalog, newest, keep_every_steps), needed)


def delete_blindly(store: Store, catalog: Catalog, keep_every_steps: int | None) -> int:
    """Delete everything spare after a write failed although bytes were free (a quota). Returns the bytes deleted."""
    points = stored_points(catalog)
    if not points or not _spare(store, catalog, points[0], keep_every_steps).nbytes:
        return 0
    spare = _spare(store, catalog, _newest_good(store, points), keep_every_steps)
    _delete_for_room(store, spare, None)
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


def _delete_for_room(store: Store, spare: _Spare, needed: int | None) -> None:
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


#: File in a store with the keys of pinned checkpoints, which retention keeps.
PINNED = "pinned.json"


def read_pins(store: Store) -> frozenset[Key]:
    """The keys of pinned checkpoints.

    Raises:
        StorageError: the file cannot be read.
        DamagedStateError: the file has other content.
    """
    try:
        return frozenset(msgspec.json.decode(store.read(PINNED), type=list[Key]))
    except StorageError as error:
        if is_missing(error):
            return frozenset()
        raise
    except MALFORMED as error:
        raise DamagedStateError(
            f"{PINNED} in {store.url}: expected the keys of pinned checkpoints, found something else ({error}). "
            "Remove the file and pin them again; until then retention deletes nothing"
        ) from error


def write_pins(store: Store, pins: Iterable[Key]) -> None:
    """Replace the set of pinned checkpoints. Raises StorageError."""
    if ordered := sorted(pins):
        store.write(PINNED, msgspec.json.encode(ordered))
    else:
        store.delete(PINNED)


def only_on(catalog: Catalog, one: Checkpoint) -> list[int]:
    """Steps that the store can produce only from this checkpoint, in order; its own step is among them."""
    rest = tuple(other for other in catalog.checkpoints if other.key != one.key)
    elsewhere = {point.key for point in stored_points(replace(catalog, checkpoints=rest))}
    return sorted(
        {
            step
            for point in stored_points(catalog)
            if point.checkpoint.key == one.key and point.key not in elsewhere
            for step in _steps_of(point.batches, point.step, one.step)
        }
    )


def _steps_of(batches: Collection[Batch], newest: int, oldest: int) -> set[int]:
    logged = {step for batch in batches for step in batch.steps if oldest <= step <= newest}
    return logged | {newest}


@dataclass(frozen=True)
class Garbage:
    """Unreferenced files of a store.

    Attributes:
        unfinished: files of checkpoints and batches that were never committed.
        incomplete: checkpoints with missing parts that are older than a complete one.
        batches: batches that can be redone on none of the checkpoints.
    """

    unfinished: tuple[str, ...]
    incomplete: tuple[Checkpoint, ...]
    batches: tuple[Batch, ...]

    def __bool__(self) -> bool:
        return bool(self.unfinished or self.incomplete or self.batches)


def find_garbage(
    catalog: Catalog, pins: Collection[Key], node: str | None, abandoned: Callable[[str], bool] = lambda path: False
) -> Garbage:
    """Find the garbage of a store.

    Args:
        catalog: contents of the store.
        pins: keys of checkpoints that are never garbage.
        node: the node whose writer is known not to run; None: every writer may run.
        abandoned: whether no process can be writing an uncommitted file.

    Raises:
        StorageError: part of the catalog could not be read.
    """
    if catalog.unreadable:
        raise StorageError(
            f"references are not known, as a file cannot be read: {next(iter(catalog.unreadable.values()))}. Nothing "
            "is deleted; try again when it can be read"
        )
    unfinished = set(leftovers(catalog, node or "", ())) | {path for path in uncommitted(catalog) if abandoned(path)}
    stay = catalog.unsure | set(pins)
    newest = next(iter(catalog.complete), None)
    incomplete = [
        one
        for one in catalog.checkpoints
        if not one.complete and newest is not None and one.key < newest.key and one.key not in stay
    ]
    batches = unneeded_batches(catalog, catalog.complete) if catalog.complete else []
    return Garbage(tuple(sorted(unfinished)), tuple(incomplete), tuple(batches))


def delete(store: Store, garbage: Garbage) -> None:
    """Delete all garbage. Raises StorageError at the first delete that fails."""
    for one in garbage.incomplete:
        remove(store, one)
    for batch in garbage.batches:
        remove_batch(store, batch)
    for path in garbage.unfinished:
        store.delete(path)
