"""``memckpt verify``: every file that a run has in storage is read and checked."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from memckpt.cli.common import AsJson, Run, Url, count, err, out, print_json, store_of
from memckpt.cli.run_store import ASIDE, Adopt, catalog_of, check_owner, checkpoint_name, reading_progress, steps_text
from memckpt.errors import DamagedStateError, StorageError
from memckpt.storage.catalog import PASSED, Catalog, Checkpoint, Key, move_aside, note_passed, still_there
from memckpt.storage.format import Batch, place_of
from memckpt.storage.owner import CLAIM
from memckpt.storage.store import Store
from memckpt.storage.verification import examine
from memckpt.user_messages import nbytes_text

Repair = Annotated[bool, typer.Option(help="Move damaged files into a directory of the store.")]


def verify(run: Run, url: Url = None, repair: Repair = False, adopt: Adopt = False, as_json: AsJson = False) -> None:
    """Read and check every file that a run has in storage; training may go on meanwhile.

    With --repair damaged checkpoints are moved into a directory of the store; nothing is deleted. Unreadable files are
    left alone, as they may be good. Exit status 8 if something is damaged and --repair is not given, 10 if a file
    cannot be read, 4 if there is nothing, 5 with --repair if the store belongs to another run.
    """
    store = store_of(run, url)
    catalog = catalog_of(store, run)
    check_owner(store, catalog, run, adopt, only_looks=not repair)
    found = _Verified(catalog)
    total = sum(one.nbytes for one in catalog.checkpoints) + sum(one.nbytes for one in catalog.batches)
    with reading_progress(total) as begin:
        for one in catalog.checkpoints:
            found.look_at(store, one, begin(f"step {one.step}"))
        for batch in catalog.batches:
            found.look_at_batch(store, batch, begin(steps_text([batch])))
    aside = found.repair(store) if repair and found.damaged else None
    if as_json:
        print_json(found.in_json() | {"repaired": repair, "aside": aside})
    else:
        _show_verified(found, aside)
    if found.damaged and aside is None:
        raise typer.Exit(DamagedStateError.exit_code)
    if found.unreadable:
        raise typer.Exit(StorageError.exit_code)


class _Verified:
    """The result of checking every file: good, damaged, or unreadable, which is neither.

    Attributes:
        good, unfinished: checkpoints; the unfinished ones lack parts that may still be written.
        batches: good batches.
        damaged, unreadable: problems by the name of a checkpoint, a batch or a file.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._may_come = _may_come(catalog)
        self.good: list[Checkpoint] = []
        self.unfinished: list[Checkpoint] = []
        self.batches: list[Batch] = []
        self.damaged: dict[str, list[str]] = {path: [problem] for path, problem in catalog.damaged.items()}
        self.unreadable: dict[str, list[str]] = {path: [problem] for path, problem in catalog.unreadable.items()}
        #: Damaged checkpoints and batches that can be moved: places of their commit files, and keys of checkpoints.
        self._places = {place for path in catalog.damaged if (place := place_of(path)) is not None}
        self._bad: list[Key] = []

    def look_at(self, store: Store, one: Checkpoint, progress: Callable[[int], None]) -> None:
        """Read all files of a checkpoint."""
        wrong, unread = examine(store, one.part_files, progress)
        if (wrong or unread) and not still_there(store, one):
            return  # deleted by retention while it was read
        if unread:
            self.unreadable[checkpoint_name(one)] = unread
        elif wrong:
            self._is_damaged(one, wrong)
        elif one.complete:
            self.good.append(one)
        elif any(place is not None and place.key == one.key for place in map(place_of, self._catalog.unreadable)):
            self.unreadable[checkpoint_name(one)] = ["parts are missing, or cannot be read"]
        elif one.key in self._may_come:
            self.unfinished.append(one)
        elif still_there(store, one):
            self._is_damaged(one, [])

    def _is_damaged(self, one: Checkpoint, wrong: list[str]) -> None:
        self.damaged[checkpoint_name(one)] = wrong if one.complete else ["parts are missing", *wrong]
        places = (place_of(part.commit_path) for part in one.parts.values())
        self._places |= {place for place in places if place is not None}
        self._bad.append(one.key)

    def look_at_batch(self, store: Store, batch: Batch, progress: Callable[[int], None]) -> None:
        """Read the file of a batch."""
        wrong, unread = examine(store, batch.files, progress)
        name = f"{steps_text([batch])}, attempt {batch.timeline.number}, node {batch.node}"
        if not wrong and not unread:
            self.batches.append(batch)
        elif batch.commit_path not in store.find(batch.commit_path.rpartition("/")[0]):
            return  # deleted by retention
        elif unread:
            self.unreadable[name] = unread
        else:
            self.damaged[name] = wrong
            place = place_of(batch.commit_path)
            assert place is not None
            self._places.add(place)

    def repair(self, store: Store) -> str:
        """Move damaged checkpoints and batches aside; returns the target directory in the store."""
        aside = f"{ASIDE}/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        move_aside(store, self._catalog, self._places, aside)
        for path in (CLAIM, PASSED):
            if path in self._catalog.damaged:
                store.move(path, f"{aside}/{path}")
        if PASSED not in self._catalog.damaged and PASSED not in self._catalog.unreadable:
            note_passed(store, self._catalog, drop=self._bad)
        return aside

    def in_json(self) -> dict[str, Any]:
        return {
            "good": len(self.good),
            "steps": [one.step for one in self.good],
            "unfinished": [one.step for one in self.unfinished],
            "batches": len(self.batches),
            "damaged": self.damaged,
            "unreadable": self.unreadable,
        }


def _show_verified(found: _Verified, aside: str | None) -> None:
    for name, wrong in found.damaged.items():
        err.print(f"{name}: {'; '.join(wrong)}", style="red", markup=False)
    for name, wrong in found.unreadable.items():
        err.print(f"{name}: {'; '.join(wrong)}", style="yellow", markup=False)
    for one in found.unfinished:
        out.print(f"{checkpoint_name(one)}: parts of other nodes are missing (so far)", style="yellow", markup=False)
    good, batches = found.good, found.batches
    size = nbytes_text(sum(one.nbytes for one in good))
    newest = f", the newest is step {good[0].step}" if good else ""
    out.print(f"{count(len(good), 'good checkpoint')} ({size}){newest}", markup=False)
    if batches:
        size = nbytes_text(sum(one.nbytes for one in batches))
        counted = count(len(batches), "good batch", "good batches")
        out.print(f"{counted} of {steps_text(batches)} ({size})", markup=False)
    if found.damaged:
        said = f"damaged and moved to {aside}"
        if aside is None:
            said = "damaged; a resume skips them, --repair moves them aside"
        out.print(f"{len(found.damaged)} {said}", style="red", markup=False)
    if found.unreadable:
        said = "not readable, and left alone: a resume waits for the newest one, and then ends with an error"
        out.print(f"{len(found.unreadable)} {said}", style="yellow", markup=False)


def _may_come(catalog: Catalog) -> set[tuple[int, str, int]]:
    """Keys of incomplete checkpoints newer than all complete ones: other nodes may be writing them now."""
    keys = set()
    for one in catalog.checkpoints:
        if one.complete:
            break
        keys.add(one.key)
    return keys
