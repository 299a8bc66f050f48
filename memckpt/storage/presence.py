"""Presence of the data files that commit files name, by name and size, without reading data. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace

from memckpt.storage.catalog import Catalog, Checkpoint
from memckpt.storage.format import Batch, Part
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store, StoredFile


def missing_data(store: Store, catalog: Catalog) -> dict[str, str]:
    """Commit files whose data are missing or, in directories, have another size; by path, with the problem.

    Raises:
        StorageError: a directory cannot be listed.
    """
    listed = set(catalog.files)
    found: dict[str, str] = {}
    contents: list[Part | Batch] = [part for one in catalog.checkpoints for part in one.parts.values()]
    for content in [*contents, *catalog.batches]:
        problem = next((each for file in content.files if (each := _problem(store, file, listed))), "")
        # Retention deletes the commit file before the data, and may have run since the listing.
        if problem and content.commit_path in store.find(content.commit_path.rpartition("/")[0]):
            found[content.commit_path] = problem
    return found


def _problem(store: Store, file: StoredFile, listed: Collection[str]) -> str:
    if isinstance(store, LocalStore):
        nbytes = file.nbytes
        with contextlib.suppress(PermissionError):  # an unreadable directory proves nothing missing
            try:
                nbytes = (store.root / file.path).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return f"{file.path}: the file is missing"
        return "" if nbytes == file.nbytes else f"{file.path}: expected {file.nbytes} bytes, found {nbytes}"
    there = file.path in listed or file.path in store.find(file.path.rpartition("/")[0])
    return "" if there else f"{file.path}: the file is missing"


def without(catalog: Catalog, missing: Collection[str]) -> Catalog:
    """The catalog without the parts and batches whose commit files are in `missing`."""
    if not missing:
        return catalog
    kept = (
        Checkpoint(
            one.timeline,
            one.record,
            {node: part for node, part in one.parts.items() if part.commit_path not in missing},
        )
        for one in catalog.checkpoints
    )
    batches = tuple(batch for batch in catalog.batches if batch.commit_path not in missing)
    return replace(catalog, checkpoints=tuple(one for one in kept if one.parts), batches=batches)
