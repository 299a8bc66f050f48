"""What a person does to a store: keeps a checkpoint from retention, deletes one, deletes what nobody needs. Torch-free.

Retention, in the writer process, does the rest by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import msgspec

from memckpt.errors import DamagedStateError, StorageError
from memckpt.storage.catalog import Catalog, Checkpoint, Key, leftovers, remove, remove_batch, uncommitted
from memckpt.storage.chain import stored_points, unneeded_batches
from memckpt.storage.format import Batch
from memckpt.storage.store import Store, is_missing

#: Which checkpoints retention keeps because somebody has said so.
PINNED = "pinned.json"


def read_pins(store: Store) -> frozenset[Key]:
    """The keys of the checkpoints that retention has to keep.

    Raises:
        StorageError: what is written there cannot be read.
        DamagedStateError: it is not what was written.
    """
    try:
        return frozenset(msgspec.json.decode(store.read(PINNED), type=list[Key]))
    except StorageError as error:
        if is_missing(error):
            return frozenset()
        raise
    except msgspec.MsgspecError as error:
        raise DamagedStateError(
            f"{PINNED} in {store.url}: expected the checkpoints that are pinned, found something else ({error}). "
            "Remove the file and pin them again; until then retention deletes nothing"
        ) from error


def write_pins(store: Store, pins: Iterable[Key]) -> None:
    """Have retention keep these checkpoints, and no others of its own accord. Raises StorageError."""
    if ordered := sorted(pins):
        store.write(PINNED, msgspec.json.encode(ordered))
    else:
        store.delete(PINNED)


def only_on(catalog: Catalog, one: Checkpoint) -> list[int]:
    """The steps that the store can produce on this checkpoint and on no other one, in order; its own is among them."""
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
    """What nothing refers to.

    Attributes:
        unfinished: files of checkpoints and batches that were never committed.
        incomplete: checkpoints that lack parts of other nodes, older than a whole one.
        batches: records that can be redone on no checkpoint that is there.
    """

    unfinished: tuple[str, ...]
    incomplete: tuple[Checkpoint, ...]
    batches: tuple[Batch, ...]

    def __bool__(self) -> bool:
        return bool(self.unfinished or self.incomplete or self.batches)


def find_garbage(
    catalog: Catalog, pins: Collection[Key], node: str | None, abandoned: Callable[[str], bool] = lambda path: False
) -> Garbage:
    """What may go from a store.

    Args:
        catalog: what it holds; all of it has been read.
        pins: keys of checkpoints that stay, whatever becomes of them.
        node: whose writer is known not to run; None: all may.
        abandoned: says of a file that was never committed whether nobody can be writing it.
    """
    if catalog.unreadable:
        raise StorageError(
            f"what refers to what is not known: {next(iter(catalog.unreadable.values()))}. Nothing is deleted; "
            "try again when it can be read"
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
    """Delete it all. Raises StorageError for the first that is refused."""
    for one in garbage.incomplete:
        remove(store, one)
    for batch in garbage.batches:
        remove_batch(store, batch)
    for path in garbage.unfinished:
        store.delete(path)
