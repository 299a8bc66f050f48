"""Ownership of a store: one run, whose id is on every commit file and in a claim file. Torch-free.

The id is made once, when a run first opens its storage, and kept in the run directory. Files of other runs in a store
are neither read nor deleted. Files without an id, written by older versions, count as the owner's.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from memckpt.errors import MALFORMED, DamagedStateError, ForeignStateError, StorageError
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store, is_missing

_log = logging.getLogger("memckpt.storage")
#: File in a store that names the owning run.
CLAIM = "owner.json"
#: File in a run directory with the run's id and the URL of its store.
_KEPT = "run.json"
#: Value of `Kept.claimed` for a store in the run directory, which moves with it.
INSIDE = "."


class Claim(msgspec.Struct, frozen=True):
    """Content of the claim file.

    Attributes:
        run: id of the owning run.
        created: seconds since 1970.
    """

    run: str
    created: float


class Kept(msgspec.Struct, frozen=True):
    """Content of `run.json` in a run directory.

    Attributes:
        run: id of the run; empty: none yet.
        url: URL of a store outside the run directory; else empty.
        claimed: URL of the store that the run has claimed, or INSIDE; empty: none, or written by an older version.
        directory, inode: path and inode of the run directory at the time of writing.
    """

    run: str
    url: str = ""
    claimed: str = ""
    directory: str = ""
    inode: int = 0


def new_run(run_dir: Path) -> str:
    """A unique run id; it begins with the name of the run directory, for readability."""
    name = re.sub(r"[^\w.-]+", "-", run_dir.resolve().name).strip("-") or "run"
    return f"{name}-{secrets.token_hex(4)}"


def kept_run(run_dir: Path) -> str:
    """The run id in a run directory; empty: none. Raises as :func:`read_kept`."""
    return read_kept(run_dir).run


def kept_url(run_dir: Path) -> str:
    """URL of the store last used; empty: it lies in the run directory, or is unknown. Raises as :func:`read_kept`."""
    return read_kept(run_dir).url


def read_kept(run_dir: Path) -> Kept:
    """Read `run.json`; an empty `Kept` if there is none.

    Raises:
        DamagedStateError: the file has other content.
        StorageError: the file cannot be read.
    """
    try:
        return msgspec.json.decode(LocalStore(run_dir).read(_KEPT), type=Kept)
    except StorageError as error:
        if is_missing(error):
            return Kept("")
        raise
    except MALFORMED as error:
        raise DamagedStateError(
            f"{run_dir / _KEPT}: expected the run's id, found something else ({error}). Remove the file; if storage "
            "belongs to another run then, the error says how to go on with it"
        ) from error


def keep_run(run_dir: Path, run: str, url: str = "", claimed: str = "") -> None:
    """Write `run.json`; the arguments are those of :class:`Kept`. Raises StorageError."""
    store, kept = LocalStore(run_dir), Kept(run, url, claimed)
    if not run_dir.is_dir():
        store.write(_KEPT, msgspec.json.encode(kept) + b"\n")  # makes the directory
    store.write(_KEPT, msgspec.json.encode(_with_place(kept, run_dir)) + b"\n")


def url_outside(store: Store, run_dir: Path) -> str:
    """URL of a store; empty for a store in the run directory, which moves with it."""
    inside = isinstance(store, LocalStore) and run_dir.resolve() in store.root.parents
    return "" if inside else store.url


def _with_place(kept: Kept, run_dir: Path) -> Kept:
    here = run_dir.resolve()
    return msgspec.structs.replace(kept, directory=str(here), inode=os.stat(here).st_ino)


def is_current(kept: Kept, run_dir: Path, run: str, url: str, claimed: str) -> bool:
    """Whether `run.json` is up to date."""
    return run_dir.is_dir() and kept == _with_place(Kept(run, url, claimed), run_dir)


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
    """Whether the directory that a file in `run_dir` names exists at another path, so that `run_dir` is a copy.

    Args:
        run_dir: directory in which the file was found.
        there: path of the directory that the file names.
        is_it: whether the directory at a path is the named one. If `run_dir` is, it was moved or has several paths. If
            neither path is (removed, or another mount namespace), the answer is unknown: False.
    """
    here = run_dir.resolve()
    try:
        return here != there and not is_it(os.stat(here)) and is_it(os.stat(there))
    except (OSError, ValueError):  # ValueError: a path that is none
        return False


def refuse_copy(url: str, run: str, run_dir: Path, original: str) -> None:
    """Raise ForeignStateError if a run directory is a copy of `original` and so shares the store at `url` with it."""
    if original:
        raise ForeignStateError(
            f"{run_dir} is a copy of {original}: both are the run {run!r}, whose checkpoints are in {url}, and two "
            f"runs must not write there. Give this one another storage.url, and remove its {_KEPT}. If the other "
            f"directory is not used any more: `memckpt ls {run_dir} --url {url} --adopt`"
        )


def read_claim(store: Store) -> Claim | None:
    """The claim of a store; None: unclaimed.

    Raises:
        DamagedStateError: the claim file has other content.
        StorageError: the claim file cannot be read.
    """
    try:
        return msgspec.json.decode(store.read(CLAIM), type=Claim)
    except StorageError as error:
        if is_missing(error):
            return None
        raise
    except MALFORMED as error:
        raise DamagedStateError(f"{CLAIM}: expected the id of a run, found something else: {error}") from error


def claim(store: Store, run: str, replace: bool = False) -> bool:
    """Claim an unclaimed store; False: another process was faster. Raises StorageError.

    Args:
        replace: overwrite an unusable claim file.
    """
    content = msgspec.json.encode(Claim(run, time.time())) + b"\n"
    if replace:
        store.write(CLAIM, content)
        return True
    return store.write_new(CLAIM, content)


def choose_run(owner: str, given: str | None, kept: Sequence[str], inside: bool) -> str | None:
    """The id of this run; None: it has none yet.

    Args:
        owner: id of the store's owner; empty: unclaimed.
        given: the configured id.
        kept: ids in the nodes' run directories, in the order of ranks; empty strings for directories without one.
        inside: whether the store lies in the run directory, where no other run writes.
    """
    if given is not None:
        return given
    known = [run for run in kept if run]
    if owner in known or (owner and not known and inside):
        return owner
    return known[0] if known else None


def refuse_other(url: str, owner: str, run: str | None, run_dir: Path | None = None) -> None:
    """Raise ForeignStateError if a store belongs to another run.

    Args:
        url: URL of the store.
        owner: id of the store's owner; empty: unclaimed.
        run: id of this run; None: none yet.
        run_dir: directory of this run; None: unknown.
    """
    if not owner or owner == run:
        return
    where = f" in {run_dir}" if run_dir is not None else ""
    adopting = f"memckpt ls {run_dir or 'RUN'} --url {url} --adopt"
    this = f"this is the run {run!r}{where}" if run else f"this run{where} is a new one"
    raise ForeignStateError(
        f"{url} belongs to the run {owner!r}, and {this}: nothing there is read or deleted. Give this run another "
        f"storage.url. If it is the same run (its directory is lost, or the store was copied or moved), start it with "
        f"storage.owner={owner!r} (MEMCKPT_STORAGE_OWNER={owner}), or once `{adopting}`"
    )
