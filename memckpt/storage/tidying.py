"""Manual maintenance of a store: pinning checkpoints and deleting garbage. Torch-free.

Retention runs in the writer process by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import msgspec

from memckpt.errors import MALFORMED, DamagedStateError, StorageError
from memckpt.storage.catalog import Catalog, Checkpoint, Key, remove, remove_batch
from memckpt.storage.chain import stored_points, unneeded_batches
from memckpt.storage.format import Batch
from memckpt.storage.retention import leftovers, uncommitted
from memckpt.storage.store import Store, is_missing

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
