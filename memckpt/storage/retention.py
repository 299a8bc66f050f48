"""Retention: which checkpoints, and which files of dead writers, may be deleted. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memckpt.storage.catalog import Catalog, Checkpoint, Key
from memckpt.storage.format import COMMITS, Part, Place, place_of
from memckpt.storage.store import finished_name


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
