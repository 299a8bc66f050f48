"""Which checkpoints a store holds, whether they are whole, and which may go. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from memckpt.errors import DamagedStateError, StorageError
from memckpt.state.records import Timeline
from memckpt.storage.format import (
    BASES,
    COMMITS,
    LOGS,
    MERGED,
    STATES,
    Batch,
    Part,
    Place,
    decode_commit,
    directory_key,
    place_of,
)
from memckpt.storage.owner import CLAIM, read_claim
from memckpt.storage.store import Store, StoredFile, finished_name, is_missing, matches

#: What orders checkpoints and batches: number and nonce of the attempt, then the (last) record.
Key = tuple[int, str, int]
#: So many commit files that cannot be read, and the rest are not tried: each may take a minute.
_TRIED = 3
#: Which checkpoints were passed over at a resume because they could not be read; retention keeps them.
PASSED = "passed.json"


@dataclass(frozen=True)
class Checkpoint:
    """The parts of one record on one timeline, by node (by unit, where ranks of a node hold different shards)."""

    timeline: Timeline
    record: int
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What orders checkpoints: later attempts first of all."""
        return self.timeline.number, self.timeline.nonce, self.record

    @property
    def step(self) -> int:
        return next(iter(self.parts.values())).step

    @property
    def world_size(self) -> int:
        return next(iter(self.parts.values())).world_size

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for part in self.parts.values() for file in part.files)

    @property
    def part_files(self) -> list[StoredFile]:
        return [file for part in self.parts.values() for file in part.files]

    @property
    def created(self) -> float:
        return max(part.created for part in self.parts.values())

    @property
    def complete(self) -> bool:
        """Whether the states of all ranks are there, and the parameters of all of them."""
        ranks = {rank for part in self.parts.values() for rank in part.ranks}
        served = {rank for part in self.parts.values() if part.full for rank in part.served}
        return ranks & served >= set(range(self.world_size))

    @property
    def full_parts(self) -> list[Part]:
        """Those with parameters and optimizer state, that of the first rank first."""
        return sorted((part for part in self.parts.values() if part.full), key=lambda part: (part.served, part.node))

    @property
    def directory(self) -> str:
        """Where the tensors of all parts are."""
        return next(iter(self.parts.values())).checkpoint_directory

    @property
    def merged_path(self) -> str:
        """The file that makes one checkpoint of all parts, for stock tools."""
        return f"{self.directory}/{MERGED}"

    @property
    def tensor_nodes(self) -> list[str]:
        """Whose parts have tensors; what several have is that of the first."""
        rest = sorted((part for part in self.parts.values() if not part.full), key=lambda part: part.ranks)
        with_tensors = (
            part
            for part in [*self.full_parts, *rest]
            if any(file.path.startswith(f"{part.base_directory}/") for file in part.files)
        )
        return [part.node for part in with_tensors]

    def part_serving(self, rank: int) -> Part:
        """The part with a rank's parameters and optimizer state."""
        return next(part for part in self.full_parts if rank in part.served)

    def part_of(self, rank: int) -> Part:
        """The part with a rank's state."""
        return next(part for part in self.parts.values() if rank in part.ranks)


@dataclass(frozen=True)
class Catalog:
    """All that a store holds of the run that it belongs to.

    Attributes:
        checkpoints: newest first.
        damaged: which commit files could not be used, and why.
        files: whatever is there, of half-written checkpoints too.
        batches: logged records, oldest first.
        owner: id of that run; empty: the store belongs to none yet.
        claimed: whether that is written down, beside the ids on commit files.
        others: ids of runs that have written commit files there all the same, which count for nothing.
        unreadable: which commit files could not be read, which directories of them not be listed, and why; nothing is
            known of them.
        passed: the keys of checkpoints that a resume could not read and that were passed over, or may have been.
        unlisted: directories, of data too, that could not be listed.
    """

    checkpoints: tuple[Checkpoint, ...]
    damaged: dict[str, str]
    files: tuple[str, ...] = ()
    batches: tuple[Batch, ...] = ()
    owner: str = ""
    claimed: bool = False
    others: tuple[str, ...] = ()
    unreadable: dict[str, str] = field(default_factory=dict)
    passed: frozenset[Key] = frozenset()
    unlisted: tuple[str, ...] = ()

    @property
    def complete(self) -> tuple[Checkpoint, ...]:
        return tuple(one for one in self.checkpoints if one.complete)

    @property
    def unsure(self) -> frozenset[Key]:
        """The keys of what retention has to keep, as it may be whole: what was passed over, what has unread parts."""
        places = (place_of(path) for path in self.unreadable)
        return self.passed | {place.key for place in places if place is not None}

    @property
    def latest_attempt(self) -> int:
        """The highest number of an attempt that has begun to write, whether it got anywhere or not; 0: none has."""
        places = (place_of(finished_name(path)) for path in self.files)
        hidden = (directory_key(path) for path in self.unlisted)
        numbers = [place.number for place in places if place is not None]
        return max([*numbers, *(key[0] for key in hidden if key is not None)], default=0)

    def hides(self, path: str) -> bool:
        """Whether what a file belongs to may have a commit file that could not be listed."""
        _, *middle = path.split("/")
        return any(middle[: one.count("/")] == one.split("/")[1:] for one in self.unlisted if one.startswith(COMMITS))


def read_catalog(store: Store, known: dict[str, Part | Batch] | None = None) -> Catalog:
    """List everything, and read every commit file. What other runs than the store's owner have there is left out.

    `known` has commit files that were read before, by path: they never change, and are not read again. It is brought up
    to what there is.

    Raises:
        StorageError: the store cannot be listed; where a directory of one checkpoint cannot, that is noted.
        UnsupportedError: a newer version has written to it.
    """
    damaged: dict[str, str] = {}
    claim = None
    try:
        claim = read_claim(store)
    except DamagedStateError as error:
        damaged[CLAIM] = str(error)
    unlisted: dict[str, str] = {}
    tops = (BASES, STATES, LOGS, COMMITS)
    files = [path for top in tops for path in store.find(top, unfinished=True, unlisted=unlisted)]
    unreadable: dict[str, str] = {}
    contents = _read_commits(store, files, damaged, unreadable, {} if known is None else known)
    unreadable.update({path: why for path, why in unlisted.items() if path.startswith(COMMITS)})
    passed = _read_passed(store, damaged, unreadable)
    oldest = min((one for one in contents if one.run), key=lambda one: one.created, default=None)
    owner = claim.run if claim is not None else oldest.run if oldest is not None else ""
    foreign = [one for one in contents if one.run not in ("", owner)]
    contents = [one for one in contents if one.run in ("", owner)]
    if foreign:
        # Of an attempt that has committed nothing yet nobody knows whose it is.
        own = {one.timeline for one in contents}
        files = [path for path in files if (place := place_of(finished_name(path))) is None or place.timeline in own]
    found: dict[Key, Checkpoint] = {}
    for part in (one for one in contents if isinstance(one, Part)):
        one = Checkpoint(part.timeline, part.record)
        found.setdefault(one.key, one).parts[part.node] = part
    ordered = sorted(found.values(), key=lambda one: one.key, reverse=True)
    batches = sorted(
        (one for one in contents if isinstance(one, Batch)), key=lambda one: (one.timeline, one.first, one.node)
    )
    others = tuple(sorted({one.run for one in foreign}))
    return Catalog(
        tuple(ordered),
        damaged,
        tuple(files),
        tuple(batches),
        owner,
        claim is not None,
        others,
        unreadable,
        passed,
        tuple(unlisted),
    )


def _read_commits(
    store: Store,
    files: Iterable[str],
    damaged: dict[str, str],
    unreadable: dict[str, str],
    known: dict[str, Part | Batch],
) -> list[Part | Batch]:
    """The contents of all commit files among `files`; why one cannot be used goes to `damaged` or `unreadable`."""
    before = dict(known)
    known.clear()
    for path in files:
        if not path.startswith(COMMITS) or path != finished_name(path):
            continue
        if path in before:
            known[path] = before[path]
            continue
        if len(unreadable) >= _TRIED:
            unreadable[path] = f"{path}: it was not tried, as others could not be read"
            continue
        try:
            known[path] = decode_commit(store.read(path), path)
        except DamagedStateError as error:
            damaged[path] = str(error)
        except StorageError as error:
            if not is_missing(error):  # else retention, in the writer process, was faster
                unreadable[path] = str(error)
    return list(known.values())


def _read_passed(store: Store, damaged: dict[str, str], unreadable: dict[str, str]) -> frozenset[Key]:
    try:
        return frozenset(msgspec.json.decode(store.read(PASSED), type=list[Key]))
    except StorageError as error:
        if not is_missing(error):
            unreadable[PASSED] = str(error)
    except msgspec.MsgspecError as error:
        damaged[PASSED] = f"{PASSED}: expected the checkpoints that were passed over, found something else: {error}"
    return frozenset()


def note_passed(store: Store, catalog: Catalog, add: Iterable[Key] = (), drop: Iterable[Key] = ()) -> None:
    """Note which checkpoints could not be read, for retention to keep, and which need not be kept for that any more.

    Raises StorageError.
    """
    passed = (catalog.passed | set(add)) - set(drop)
    if passed == catalog.passed:
        return
    if passed:
        store.write(PASSED, msgspec.json.encode(sorted(passed)))
    else:
        store.delete(PASSED)


class Examined(NamedTuple):
    """What a look at files has found, in words: what is proved bad, and of what nothing is known."""

    damaged: list[str]
    unreadable: list[str]


def examine(store: Store, files: Iterable[StoredFile], progress: Callable[[int], None] | None = None) -> Examined:
    """Read files and compare them with what must be there. `progress` is told of bytes as they are read."""
    found = Examined([], [])
    for file in files:
        try:
            problem = matches(store, file, progress)
        except StorageError as error:
            found.unreadable.append(str(error))
            continue
        if problem is not None:
            found.damaged.append(problem)
    return found


def verify(store: Store, checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> list[str]:
    """Read all files of a checkpoint and compare them with its commit files; what is wrong, in words.

    `progress` is told of bytes as they are read.

    Raises:
        StorageError: some cannot be read.
    """
    problems = [] if checkpoint.complete else ["parts are missing"]
    return problems + verify_files(store, checkpoint.part_files, progress)


def verify_files(store: Store, files: Iterable[StoredFile], progress: Callable[[int], None] | None = None) -> list[str]:
    """Read files and compare them with what must be there; what is wrong, in words.

    Raises:
        StorageError: some cannot be read.
    """
    found = examine(store, files, progress)
    if found.unreadable:
        raise StorageError("; ".join(found.unreadable))
    return found.damaged


def read_back(store: Store, files: Sequence[StoredFile]) -> None:
    """Read files that have just been written, from where they will be read, and leave the memory to others.

    Raises:
        StorageError: they are not what was written.
    """
    problems = verify_files(store, files)
    if problems:
        raise StorageError(f"what was written cannot be read back: {'; '.join(problems)}")
    for file in files:
        store.let_go(file.path)


def still_there(store: Store, checkpoint: Checkpoint) -> bool:
    """Whether no commit file of a checkpoint has been deleted since it was found."""
    directories = {part.commit_path.rpartition("/")[0] for part in checkpoint.parts.values()}
    found = {path for directory in directories for path in store.find(directory)}
    return found >= {part.commit_path for part in checkpoint.parts.values()}


def remove(store: Store, checkpoint: Checkpoint) -> None:
    """Delete a checkpoint: its commit files first, so that what is left is never taken for whole."""
    parts = list(checkpoint.parts.values())
    for part in parts:
        store.delete(part.commit_path)
    store.delete(checkpoint.merged_path)
    for part in parts:
        store.delete(part.state_path)
        store.delete_directory(part.base_directory)


def remove_batch(store: Store, batch: Batch) -> None:
    """Delete a batch, its commit file first."""
    store.delete(batch.commit_path)
    store.delete(batch.log_path)


def leftovers(catalog: Catalog, node: str, abandoned: Sequence[Part]) -> list[str]:
    """Files without a commit file, of writers that were killed: nobody will ever use them.

    That is what of `abandoned` is there; what `node` itself has left of checkpoints older than the newest complete
    one; and what any node has left of earlier attempts. What other nodes have of the current attempt may be on its
    way, and so may what is newer: an agent that was told to leave saves while the next one is here already.

    Args:
        node: whose writer asks, and is not writing.
        abandoned: parts of which it is known that their writer is dead.
    """
    newest = next(iter(catalog.complete), None)
    dead = {place_of(part.commit_path) for part in abandoned}
    return [
        path
        for path, place in uncommitted(catalog).items()
        if place in dead or (newest is not None and _outlived(place, newest, node))
    ]


def uncommitted(catalog: Catalog) -> dict[str, Place]:
    """Files without a commit file, and where they belong: somebody is writing them, or nobody will ever use them."""
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
        # The process that writes records is another one, and may be writing this very batch.
        return place.number < newest.timeline.number
    # What makes one of all parts is written by whoever is the last to finish: all are done with older checkpoints.
    return place.key < newest.key and (place.node in (node, "") or place.number < newest.timeline.number)


def move_aside(store: Store, catalog: Catalog, places: Collection[Place], to: str) -> None:
    """Move what belongs to checkpoints or batches out of the way, commit files last: nothing is ever a leftover.

    Args:
        catalog: what the store holds.
        places: of their commit files.
        to: the directory that the files go to, under their paths.
    """
    merged = {place.key for place in places if place.first is None}
    paths = []
    for path in catalog.files:
        place = place_of(finished_name(path))
        if place is not None and (place in places or (not place.node and place.key in merged)):
            paths.append(path)
    for path in sorted(paths, key=lambda path: path.startswith(f"{COMMITS}/")):
        store.move(path, f"{to}/{path}")


def superseded(
    checkpoints: Sequence[Checkpoint],
    keep_last: int,
    keep_every_steps: int | None,
    called_for: Part | None = None,
    unsure: Collection[Key] = (),
) -> list[Checkpoint]:
    """The checkpoints that retention lets go of.

    Kept are the last `keep_last` complete ones, those whose step is a multiple of `keep_every_steps`, whatever is
    incomplete and newer than the newest complete one, as its other parts may be on their way, that of `called_for`,
    however old its attempt is, and what is `unsure`, which counts for none of the others.

    Args:
        checkpoints: newest first; the newest complete one has been verified.
        called_for: a part that has just been committed.
        unsure: keys of what may be whole, though it could not be read.
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
