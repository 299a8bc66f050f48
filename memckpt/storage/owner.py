"""Whose a store is. Torch-free.

A run's id is made once, when the run first opens its storage. `run.json` in the run directory and `owner.json` in the
store both have it, and so has each commit file. Files of other runs in a store are neither read nor deleted. A commit
file without an id is of a run without storage, which was saved there by hand: it counts as the owner's.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from memckpt.errors import DamagedStateError, ForeignStateError
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store, read_json

#: File in a store that names the owning run.
CLAIM = "owner.json"
#: File in a run directory that names the run and its store.
_KEPT = "run.json"
#: Value of `Kept.store` for a store in the run directory, which moves with it.
INSIDE = "."


class Claim(msgspec.Struct, frozen=True):
    """Content of the claim file: the id of the owning run."""

    run: str


class Kept(msgspec.Struct, frozen=True):
    """Content of `run.json` in a run directory, whose path and inode at the time of writing it has."""

    run: str = ""  #: id of the run; empty: none yet
    store: str = ""  #: URL of the store that the run has claimed, or INSIDE; empty: none
    directory: str = ""
    inode: int = 0


# The run directory


def new_run(run_dir: Path) -> str:
    """A unique run id; it begins with the name of the run directory, for readability."""
    name = re.sub(r"[^\w.-]+", "-", run_dir.resolve().name).strip("-") or "run"
    return f"{name}-{secrets.token_hex(4)}"


def kept_run(run_dir: Path) -> str:
    """The run id in a run directory; empty: none. Raises as :func:`read_json`."""
    return read_kept(run_dir).run


def kept_url(run_dir: Path) -> str:
    """URL of the run's store; empty: it lies in the run directory, or is unknown. Raises as :func:`read_json`."""
    store = read_kept(run_dir).store
    return "" if store == INSIDE else store


def read_kept(run_dir: Path) -> Kept:
    """Read `run.json`; an empty `Kept` if there is none. Raises as :func:`read_json`."""
    remedy = "Remove the file; if storage belongs to another run then, the error says how to go on with it"
    return read_json(LocalStore(run_dir), _KEPT, Kept(), Kept, "the run's id", remedy)


def keep_run(run_dir: Path, run: str, store: str = "") -> None:
    """Write `run.json` if it is not up to date; the arguments are those of :class:`Kept`. Raises StorageError."""
    here = run_dir.resolve()
    local, kept = LocalStore(run_dir), Kept(run, store, str(here))
    if not run_dir.is_dir():
        local.write(_KEPT, msgspec.json.encode(kept) + b"\n")  # makes the directory
    kept = msgspec.structs.replace(kept, inode=os.stat(here).st_ino)
    if kept != read_kept(run_dir):
        local.write(_KEPT, msgspec.json.encode(kept) + b"\n")


def place_of_store(store: Store, run_dir: Path) -> str:
    """What `Kept.store` says of a store: its URL, or INSIDE."""
    inside = isinstance(store, LocalStore) and run_dir.resolve() in store.root.parents
    return INSIDE if inside else store.url


def original_of(run_dir: Path, kept: Kept) -> str:
    """The run directory that this one is a copy of; empty: it is no copy, or that cannot be determined.

    A moved directory keeps its inode, or its old path no longer exists.
    """
    if not kept.directory or not lies_elsewhere(
        run_dir, Path(kept.directory), lambda found: found.st_ino == kept.inode
    ):
        return ""
    try:
        same = read_kept(Path(kept.directory)).run == kept.run
    except (OSError, DamagedStateError):  # StorageError is an OSError: the other directory cannot be read
        return ""
    return kept.directory if same else ""


def lies_elsewhere(run_dir: Path, there: Path, is_it: Callable[[os.stat_result], bool]) -> bool:
    """Whether the directory that a file in `run_dir` names exists at the path `there`, so that `run_dir` is a copy.

    `is_it` tells whether the directory at a path is the named one. If `run_dir` is, it was moved or has several paths;
    if neither is, the answer is unknown: False.
    """
    here = run_dir.resolve()
    try:
        return here != there and not is_it(os.stat(here)) and is_it(os.stat(there))
    except (OSError, ValueError):  # ValueError: a path that is none
        return False


# The store


def read_claim(store: Store) -> str:
    """The run that claims a store; empty: unclaimed. Raises as :func:`read_json`."""
    return read_json(store, CLAIM, Claim(""), Claim, "the id of a run", "The next start claims the store anew").run


def claim(store: Store, run: str, replace: bool = False) -> bool:
    """Claim an unclaimed store, or `replace` an unusable claim; False: another run was faster. Raises StorageError."""
    content = msgspec.json.encode(Claim(run)) + b"\n"
    if replace:
        store.write(CLAIM, content)
        return True
    return store.write_new(CLAIM, content)


def refuse_other(url: str, owner: str, run: str | None, run_dir: Path | None = None, original: str = "") -> None:
    """Raise ForeignStateError if a store belongs to another run, or to the original of a copied run directory.

    `owner` is the id of the store's owner (empty: unclaimed), `run` that of this run (None: none yet). `original`: the
    directory that `run_dir` is a copy of; empty if it is none.
    """
    if not owner or (owner == run and not original):
        return
    where = f" in {run_dir}" if run_dir is not None else ""
    this, own = f"this is the run {run!r}{where}" if run else f"this run{where} is a new one", ""
    if owner == run:
        this, own = f"{run_dir} is a copy of {original}, which is that run", f", and remove {_KEPT} here"
    raise ForeignStateError(
        f"{url} belongs to the run {owner!r}, and {this}: nothing there is read or deleted. Give this run another "
        f"storage.url{own}. If it is the same run (its directory is lost, or it or the store was copied or moved), "
        f"start it with storage.owner={owner!r} (MEMCKPT_STORAGE_OWNER={owner}), or once "
        f"`memckpt ls {run_dir or 'RUN'} --url {url} --adopt`"
    )
