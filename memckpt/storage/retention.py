"""What may be deleted from a store: superseded checkpoints, files of dead writers, and what makes room.

What is superseded and what is left over are pure functions. A command deletes by hand; pins say what stays. Torch-free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from memckpt.errors import DamagedStateError, StorageError, StorageFullError
from memckpt.storage.catalog import PASSED, PINNED, Catalog, Checkpoint, Key, read_keys, remove, remove_batch
from memckpt.storage.chain import StoredPoint, stored_points, unneeded_batches
from memckpt.storage.format import BASES, COMMITS, MERGED, Batch, Part, Place, place_of
from memckpt.storage.store import Store, examine, finished_name
from memckpt.user_messages import nbytes_text


def superseded(
    checkpoints: Sequence[Checkpoint],
    keep_last: int,
    keep_every_steps: int | None,
    called_for: Part | None = None,
    unsure: Collection[Key] = (),
) -> list[Checkpoint]:
    """The checkpoints that retention deletes, of all (newest first; the newest complete one has been verified).

    It keeps the last `keep_last` complete ones, and those at multiples of `keep_every_steps`. It keeps incomplete ones
    newer than the newest complete one, whose other parts may still be written. It keeps the one of `called_for`, a part
    that has just been committed, and those with a key in `unsure`, which do not count as any of the former.
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

    These are: files of `abandoned` parts, whose writer is known to be dead, with merged metadata if no other node can
    have been writing it. Files of `node`, whose writer asks and is not writing, of checkpoints older than the newest
    complete one. And any node's files of earlier attempts. Others may still be written: an agent that was told to leave
    saves while its successor is already running.
    """
    newest = next(iter(catalog.complete), None)
    dead = {place_of(part.commit_path) for part in abandoned}
    alone = [part for part in abandoned if len(part.ranks) == part.world_size]
    dead |= {place_of(f"{BASES}/{part.place}/{MERGED}") for part in alone}
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
    """The error of a store without room for `what`: bytes to write, free ones (None: unknown), those that could go.

    `refused`: the storage's own error message, if a write failed.
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


class Spare(NamedTuple):
    """What may be deleted: checkpoints and batches, oldest first, and files that were never committed."""

    checkpoints: Sequence[Checkpoint] = ()
    batches: Sequence[Batch] = ()
    files: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoints and batches."""
        return sum(one.nbytes for one in self.checkpoints) + sum(one.nbytes for one in self.batches)


def make_room(store: Store, catalog: Catalog, what: str, needed: int, keep_every_steps: int | None) -> None:
    """Make sure that `needed` bytes are free for `what`, deleting what the newest state does not need.

    Nothing is deleted if that would not be enough. Checkpoints at multiples of `keep_every_steps` stay. Raises
    StorageFullError if no room can be made, StorageError if the newest state cannot be read: then nothing else may go.
    """
    free = store.free()
    if free is None or free >= needed:
        return
    points = stored_points(catalog)
    spare = _spare(store, catalog, points[0], keep_every_steps) if points else Spare()
    if free + spare.nbytes >= needed:  # else nothing need be read
        spare = _spare(store, catalog, _newest_good(store, points), keep_every_steps)
    if free + spare.nbytes < needed:
        raise no_room(what, store.url, needed, free, spare.nbytes)
    _delete_for_room(store, spare, needed)


def keep_room(store: Store, catalog: Catalog, needed: int, keep_every_steps: int | None, good: Part) -> None:
    """Free up to `needed` bytes for the next checkpoint; a shortage is no error.

    `good` is a part of the newest checkpoint that has just been read back; else as for :func:`make_room`.
    """
    free, points = store.free(), stored_points(catalog)
    if free is not None and free < needed and points:
        is_read = points[0].checkpoint.parts.get(good.node) == good
        newest = points[0] if is_read else _newest_good(store, points)
        _delete_for_room(store, _spare(store, catalog, newest, keep_every_steps), needed)


def delete_blindly(store: Store, catalog: Catalog, keep_every_steps: int | None) -> int:
    """Delete everything spare after a write failed although bytes were free (a quota). Returns the bytes deleted."""
    points = stored_points(catalog)
    if not points or not _spare(store, catalog, points[0], keep_every_steps).nbytes:
        return 0
    spare = _spare(store, catalog, _newest_good(store, points), keep_every_steps)
    _delete_for_room(store, spare, None)
    return spare.nbytes


def _spare(store: Store, catalog: Catalog, needed: StoredPoint, keep_every_steps: int | None) -> Spare:
    """What may be deleted while the state `needed` stays."""
    if PASSED in catalog.unreadable or PASSED in catalog.damaged:
        return Spare()  # the checkpoints to keep are not known
    try:
        pins = read_keys(store, PINNED)
    except (StorageError, DamagedStateError) as error:
        _log.warning("no checkpoint is deleted to make room: %s", error)
        return Spare()
    gone = superseded(catalog.checkpoints, 1, keep_every_steps, unsure=catalog.unsure | pins)
    gone = [one for one in gone if one.key != needed.checkpoint.key]
    kept = [one for one in catalog.complete if one not in gone]
    used = {batch.commit_path for batch in needed.batches}
    batches = [one for one in unneeded_batches(catalog, kept) if one.commit_path not in used]
    return Spare(gone[::-1], batches)


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


def _delete_for_room(store: Store, spare: Spare, needed: int | None) -> None:
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


# By hand


def only_on(catalog: Catalog, one: Checkpoint) -> list[int]:
    """Steps that the store can produce only from this checkpoint, in order; its own step is among them."""
    rest = tuple(other for other in catalog.checkpoints if other.key != one.key)
    elsewhere = {point.key for point in stored_points(replace(catalog, checkpoints=rest))}
    lost: set[int] = set()
    for point in stored_points(catalog):
        if point.checkpoint.key == one.key and point.key not in elsewhere:
            logged = {step for batch in point.batches for step in batch.steps}
            lost |= {step for step in logged if one.step <= step <= point.step} | {point.step}
    return sorted(lost)


def find_garbage(
    catalog: Catalog, pins: Collection[Key], node: str | None, is_abandoned: Callable[[str], bool]
) -> Spare:
    """Find unreferenced files, incomplete checkpoints older than a complete one, and batches of no checkpoint.

    Pinned checkpoints stay. `node` is the one whose writer is known not to run; None: every writer may run. Raises
    StorageError if part of the catalog could not be read.
    """
    if catalog.unreadable:
        raise StorageError(
            f"references are not known, as a file cannot be read: {next(iter(catalog.unreadable.values()))}. Nothing "
            "is deleted; try again when it can be read"
        )
    files = set(leftovers(catalog, node or "", ())) | set(filter(is_abandoned, uncommitted(catalog)))
    if not catalog.complete:
        return Spare(files=sorted(files))
    newest, stay = catalog.complete[0], catalog.unsure | set(pins)
    outdated = [one for one in catalog.checkpoints if one.key < newest.key and one.key not in stay]
    incomplete = [one for one in outdated if not one.complete]
    return Spare(incomplete, unneeded_batches(catalog, catalog.complete), sorted(files))


def delete(store: Store, garbage: Spare) -> None:
    """Delete all garbage. Raises StorageError at the first delete that fails."""
    for one in garbage.checkpoints:
        remove(store, one)
    for batch in garbage.batches:
        remove_batch(store, batch)
    for path in garbage.files:
        store.delete(path)
