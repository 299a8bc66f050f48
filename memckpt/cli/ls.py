"""``memckpt ls``: the checkpoints that a run has in storage."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from memckpt.cli.common import AsJson, Run, Url, count, err, out, plain_table, print_json, store_of, time_text
from memckpt.cli.run_store import Adopt, catalog_of, check_owner, steps_text
from memckpt.errors import DamagedStateError, StorageError
from memckpt.storage.catalog import PINNED, Checkpoint, Key, missing_data, read_keys, without
from memckpt.storage.chain import stored_points
from memckpt.storage.format import Batch
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
