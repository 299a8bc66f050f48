"""``memckpt ls`` and ``memckpt verify``: what a run has in storage, listed, and read and checked."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.markup import escape

from memckpt.cli.common import AsJson, Run, Url, count, err, out, plain_table, print_json, store_of, time_text
from memckpt.cli.run_view import ASIDE, Adopt, catalog_of, check_owner, checkpoint_name, reading_progress, steps_text
from memckpt.errors import DamagedStateError, StorageError
from memckpt.storage.catalog import (
    PASSED,
    PINNED,
    Catalog,
    Checkpoint,
    Key,
    missing_data,
    move_aside,
    note_passed,
    read_keys,
    still_there,
    without,
)
from memckpt.storage.chain import stored_points
from memckpt.storage.format import Batch, Committed, place_of
from memckpt.storage.owner import CLAIM
from memckpt.storage.store import Store, examine
from memckpt.user_messages import nbytes_text


def ls(run: Run, url: Url = None, adopt: Adopt = False, as_json: AsJson = False) -> None:
    """List the checkpoints that a run has in storage, newest first, and the steps logged since.

    A store of another run is listed with a warning. Exit status 4 if there are no checkpoints, 5 if there are other
    files only.
    """
    store = store_of(run, url)
    catalog = catalog_of(store, run)
    check_owner(store, catalog, run, adopt, only_looks=True)
    missing = missing_data(store, catalog)
    pins: frozenset[Key] = frozenset()
    unknown = []
    try:
        pins = read_keys(store, PINNED)
    except (StorageError, DamagedStateError) as error:
        unknown.append(str(error))
    newest = next(iter(stored_points(without(catalog, missing))), None)
    lacking = {
        one.key for one in catalog.checkpoints if any(part.commit_path in missing for part in one.parts.values())
    }
    if as_json:
        print_json(
            {
                "url": store.url,
                "owner": catalog.owner or None,
                "step": newest.step if newest is not None else None,
                "checkpoints": [
                    _in_json(one) | {"lacks_data": one.key in lacking, "pinned": one.key in pins}
                    for one in catalog.checkpoints
                ],
                "batches": [_batch_in_json(one) for one in catalog.batches],
                "damaged": catalog.damaged,
                "unreadable": catalog.unreadable,
                "missing": missing,
            }
        )
        return
    columns = ["step", "attempt", "written", "size", "ranks"]
    title = f"{store.url} ({catalog.owner})" if catalog.owner else store.url
    whole = not missing and not pins and len(catalog.complete) == len(catalog.checkpoints)
    table = plain_table(*columns, *([] if whole else ["parts"]), title=escape(title))
    for one in catalog.checkpoints:
        cells = [str(one.step), str(one.timeline.number), time_text(one.created), nbytes_text(one.nbytes)]
        parts = "all" if one.complete else f"[yellow]only of {escape(', '.join(sorted(one.parts)))}[/]"
        if one.key in lacking:
            parts = "[red]data are missing[/]"
        elif one.key in pins:
            parts += ", pinned"
        table.add_row(*cells, str(one.world_size), *([] if whole else [parts]))
    out.print(table)
    if catalog.batches:
        size = nbytes_text(sum(one.nbytes for one in catalog.batches))
        reach = f"; the newest that can be produced is step {newest.step}" if newest is not None else ""
        logged = f"logged: {steps_text(catalog.batches)} in {count(len(catalog.batches), 'batch', 'batches')} ({size})"
        out.print(logged + reach, markup=False)
    for said in [*catalog.damaged.values(), *missing.values()]:
        err.print(f"damaged: {said}", style="red", markup=False, soft_wrap=True)
    for said in [*catalog.unreadable.values(), *unknown]:
        err.print(f"not readable: {said}", style="yellow", markup=False, soft_wrap=True)


def _in_json(one: Checkpoint) -> dict[str, Any]:
    return {
        "step": one.step,
        "record": one.record,
        "timeline": one.timeline.number,
        "bytes": one.nbytes,
        "created": one.created,
        "world_size": one.world_size,
        "nodes": sorted(one.parts),
        "complete": one.complete,
    }


def _batch_in_json(one: Batch) -> dict[str, Any]:
    return {
        "steps": [one.steps[0], one.steps[-1]],
        "records": [one.first, one.last],
        "timeline": one.timeline.number,
        "bytes": one.nbytes,
        "created": one.created,
        "node": one.node,
    }


Repair = Annotated[bool, typer.Option(help="Move damaged files into a directory of the store.")]


def verify(run: Run, url: Url = None, repair: Repair = False, adopt: Adopt = False, as_json: AsJson = False) -> None:
    """Read and check every file that a run has in storage; training may go on meanwhile.

    With --repair damaged checkpoints are moved into a directory of the store; nothing is deleted. Unreadable files are
    left alone, as they may be good. Exit status 8 if something is damaged and --repair is not given, 10 if a file
    cannot be read. It is 4 if there is nothing, 5 with --repair if the store belongs to another run.
    """
    store = store_of(run, url)
    catalog = catalog_of(store, run)
    check_owner(store, catalog, run, adopt, only_looks=not repair)
    found = _Findings(store, catalog)
    total = sum(one.nbytes for one in catalog.checkpoints) + sum(one.nbytes for one in catalog.batches)
    with reading_progress(total) as begin:
        for one in catalog.checkpoints:
            found.check_checkpoint(one, begin(f"step {one.step}"))
        for batch in catalog.batches:
            found.check_batch(batch, begin(steps_text([batch])))
    aside = found.repair() if repair and found.damaged else None
    if as_json:
        print_json(found.in_json() | {"repaired": repair, "aside": aside})
    else:
        _show(found, aside)
    if found.damaged and aside is None:
        raise typer.Exit(DamagedStateError.exit_code)
    if found.unreadable:
        raise typer.Exit(StorageError.exit_code)


class _Findings:
    """What is good, damaged, unreadable (which is neither), or unfinished: other nodes' parts may still be written.

    Problems are by the name of a checkpoint, a batch or a file.
    """

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store, self._catalog = store, catalog
        self.good: list[Checkpoint] = []
        self.unfinished: list[Checkpoint] = []
        self.batches: list[Batch] = []
        self.damaged: dict[str, list[str]] = {path: [problem] for path, problem in catalog.damaged.items()}
        self.unreadable: dict[str, list[str]] = {path: [problem] for path, problem in catalog.unreadable.items()}
        newest = itertools.takewhile(lambda one: not one.complete, catalog.checkpoints)
        self._may_come = {one.key for one in newest}
        self._unread = {place.key for path in catalog.unreadable if (place := place_of(path)) is not None}
        #: Damaged checkpoints and batches that can be moved: their commit files, and keys of checkpoints.
        self._commits = set(catalog.damaged)
        self._bad: list[Key] = []

    def check_checkpoint(self, one: Checkpoint, progress: Callable[[int], None]) -> None:
        """Read all files of a checkpoint."""
        name, parts = checkpoint_name(one), list(one.parts.values())
        wrong, unread = examine(self._store, one.part_files, progress)
        if one.complete and not wrong and not unread:
            self.good.append(one)
        elif (wrong or unread or one.key not in self._may_come) and not still_there(self._store, parts):
            return  # deleted by retention while it was read
        elif unread:
            self.unreadable[name] = unread
        elif not wrong and one.key in self._unread:
            self.unreadable[name] = ["parts are missing, or cannot be read"]
        elif not wrong and one.key in self._may_come:
            self.unfinished.append(one)
        else:
            self._add_damaged(name, wrong if one.complete else ["parts are missing", *wrong], parts)
            self._bad.append(one.key)

    def check_batch(self, batch: Batch, progress: Callable[[int], None]) -> None:
        """Read the file of a batch."""
        name = f"{steps_text([batch])}, attempt {batch.timeline.number}, node {batch.node}"
        wrong, unread = examine(self._store, batch.files, progress)
        if not wrong and not unread:
            self.batches.append(batch)
        elif not still_there(self._store, [batch]):
            return  # deleted by retention
        elif unread:
            self.unreadable[name] = unread
        else:
            self._add_damaged(name, wrong, [batch])

    def _add_damaged(self, name: str, wrong: list[str], contents: Iterable[Committed]) -> None:
        self.damaged[name] = wrong
        self._commits |= {one.commit_path for one in contents}

    def repair(self) -> str:
        """Move damaged checkpoints and batches aside; returns the target directory in the store."""
        store, catalog = self._store, self._catalog
        aside = f"{ASIDE}/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        move_aside(store, catalog, {place for path in self._commits if (place := place_of(path)) is not None}, aside)
        for path in (CLAIM, PASSED):
            if path in catalog.damaged:
                store.move(path, f"{aside}/{path}")
        if PASSED not in catalog.damaged and PASSED not in catalog.unreadable:
            note_passed(store, catalog, drop=self._bad)
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


def _show(found: _Findings, aside: str | None) -> None:
    for style, problems in (("red", found.damaged), ("yellow", found.unreadable)):
        for name, wrong in problems.items():
            err.print(f"{name}: {'; '.join(wrong)}", style=style, markup=False)
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
