"""Whose a store is: one run's, whose id is on every commit file, and in a file that claims the store. Torch-free.

The id is made once, when a run first sees its storage, and kept in the run directory. What other runs have in a store
is neither read nor deleted. Files without an id, of versions before there was one, are the owner's.
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

from memckpt.errors import DamagedStateError, ForeignStateError, StorageError
from memckpt.storage.store import LocalStore, Store, is_missing

_log = logging.getLogger("memckpt.storage")
#: In a store: which run it belongs to.
CLAIM = "owner.json"
#: In a run directory: which run it is, and where its store is.
_KEPT = "run.json"
#: How that file names the store that lies in the run directory, and moves with it.
INSIDE = "."


class Claim(msgspec.Struct, frozen=True):
    """The content of the file that claims a store.

    Attributes:
        run: id of the run that the store belongs to.
        created: seconds since 1970.
    """

    run: str
    created: float


class Kept(msgspec.Struct, frozen=True):
    """What a run directory keeps of its run.

    Attributes:
        run: its id; empty: none yet.
        url: of the store, where it lies outside the run directory.
        claimed: the url of the store that it has claimed, or INSIDE; empty: none, or a version that did not note it.
        directory, inode: path and inode of the run directory when that was written.
    """

    run: str
    url: str = ""
    claimed: str = ""
    directory: str = ""
    inode: int = 0


def new_run(run_dir: Path) -> str:
    """An id that no other run has; it begins with the name of the run directory, for people."""
    name = re.sub(r"[^\w.-]+", "-", run_dir.resolve().name).strip("-") or "run"
    return f"{name}-{secrets.token_hex(4)}"


def kept_run(run_dir: Path) -> str:
    """The id that a run directory keeps; empty if it keeps none. Raises as :func:`read_kept`."""
    return read_kept(run_dir).run


def kept_url(run_dir: Path) -> str:
    """The url of the store that the run has used last; empty: in the run directory, or not known. Raises as above."""
    return read_kept(run_dir).url


def read_kept(run_dir: Path) -> Kept:
    """What a run directory keeps.

    Raises:
        DamagedStateError: the file is there, and is not what was written.
        StorageError: it cannot be read.
    """
    try:
        return msgspec.json.decode(LocalStore(run_dir).read(_KEPT), type=Kept)
    except StorageError as error:
        if is_missing(error):
            return Kept("")
        raise
    except msgspec.MsgspecError as error:
        raise DamagedStateError(
            f"{run_dir / _KEPT}: expected the run's id, found something else ({error}). Remove the file; if storage "
            "belongs to another run then, the error says how to go on with it"
        ) from error


def keep_run(run_dir: Path, run: str, url: str = "", claimed: str = "") -> None:
    """Keep a run's id in its directory, where its store is, if it lies elsewhere, and which one it has claimed.

    Raises StorageError.
    """
    store, kept = LocalStore(run_dir), Kept(run, url, claimed)
    if not run_dir.is_dir():
        store.write(_KEPT, msgspec.json.encode(kept) + b"\n")  # makes the directory
    store.write(_KEPT, msgspec.json.encode(_with_place(kept, run_dir)) + b"\n")


def url_outside(store: Store, run_dir: Path) -> str:
    """The url of a store; empty for one that lies in the run directory, and moves with it."""
    inside = isinstance(store, LocalStore) and run_dir.resolve() in store.root.parents
    return "" if inside else store.url


def _with_place(kept: Kept, run_dir: Path) -> Kept:
    here = run_dir.resolve()
    return msgspec.structs.replace(kept, directory=str(here), inode=os.stat(here).st_ino)


def is_current(kept: Kept, run_dir: Path, run: str, url: str, claimed: str) -> bool:
    """Whether a run directory keeps all that it is to keep."""
    return run_dir.is_dir() and kept == _with_place(Kept(run, url, claimed), run_dir)


def original_of(run_dir: Path, kept: Kept) -> str:
    """The run directory that this one is a copy of; empty: it is none, or that cannot be told.

    One that was moved has its inode still, or what it was before is not there any more.
    """
    if not kept.directory or not lies_elsewhere(
        run_dir, Path(kept.directory), lambda found: found.st_ino == kept.inode
    ):
        return ""
    try:
        same = read_kept(Path(kept.directory)).run == kept.run
    except (OSError, DamagedStateError):  # StorageError is an OSError: what is there cannot be looked at
        return ""
    return kept.directory if same else ""


def lies_elsewhere(run_dir: Path, there: Path, is_it: Callable[[os.stat_result], bool]) -> bool:
    """Whether the directory that a file in `run_dir` speaks of is seen at another path, so that `run_dir` is a copy.

    Args:
        run_dir: where the file was found.
        there: where the directory was, or is.
        is_it: whether what is found at a path is that directory. Where it is `run_dir`, that was moved, or has several
            paths. Where it is at neither path (removed, or another mount namespace), nobody can tell: False.
    """
    here = run_dir.resolve()
    try:
        return here != there and not is_it(os.stat(here)) and is_it(os.stat(there))
    except OSError:
        return False


def refuse_copy(url: str, run: str, run_dir: Path, original: str) -> None:
    """Raise ForeignStateError if a run directory is a copy of another one, which `url` belongs to as well."""
    if original:
        raise ForeignStateError(
            f"{run_dir} is a copy of {original}: both are the run {run!r}, whose checkpoints are in {url}, and two "
            f"runs must not write there. Give this one another storage.url, and remove its {_KEPT}. If the other "
            f"directory is not used any more: `memckpt ls {run_dir} --url {url} --adopt`"
        )


def read_claim(store: Store) -> Claim | None:
    """Who has claimed a store; None: nobody.

    Raises:
        DamagedStateError: the file is not what was written.
        StorageError: it cannot be read.
    """
    try:
        return msgspec.json.decode(store.read(CLAIM), type=Claim)
    except StorageError as error:
        if is_missing(error):
            return None
        raise
    except msgspec.MsgspecError as error:
        raise DamagedStateError(f"{CLAIM}: expected the id of a run, found something else: {error}") from error


def claim(store: Store, run: str, replace: bool = False) -> bool:
    """Claim a store that nobody has claimed; False: somebody was faster. Raises StorageError.

    Args:
        replace: write anew what is there and cannot be used.
    """
    content = msgspec.json.encode(Claim(run, time.time())) + b"\n"
    if replace:
        store.write(CLAIM, content)
        return True
    return store.write_new(CLAIM, content)


def choose_run(owner: str, given: str | None, kept: Sequence[str], inside: bool) -> str | None:
    """Which run this is, as far as that is known; None: one that has no id yet.

    Args:
        owner: of the store; empty: nobody.
        given: the configured id.
        kept: what the nodes' run directories keep, in the order of ranks; empty for those that keep none.
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
        url: of the store.
        owner: the run that it belongs to; empty: to none.
        run: this one's id; None: it has none yet.
        run_dir: its directory, where it is known.
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
