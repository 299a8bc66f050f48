"""The checkpoints and batches in a store: listing, and which of their data are there. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

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
    Committed,
    Part,
    Place,
    decode_commit,
    directory_key,
    place_of,
)
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import CLAIM, read_claim
from memckpt.storage.store import Store, StoredFile, finished_name, is_missing, read_json

#: Sort key of checkpoints and batches: number and nonce of the attempt, then the (last) record.
Key = tuple[int, str, int]
#: Unreadable commit files after which the rest are not tried: each may take a minute.
_TRIED = 3
#: Files in a store with keys of checkpoints that retention keeps: pinned ones, and those that a resume skipped as
#: unreadable.
PINNED, PASSED = "pinned.json", "passed.json"


@dataclass(frozen=True)
class Checkpoint:
    """The parts of one record on one timeline, by node, or by unit where ranks of a node hold different shards."""

    timeline: Timeline
    record: int
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Sort key: the attempt, then the record."""
        return self.timeline.number, self.timeline.nonce, self.record

    @property
    def step(self) -> int:
        return next(iter(self.parts.values())).step

    @property
    def world_size(self) -> int:
        return next(iter(self.parts.values())).world_size

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def part_files(self) -> list[StoredFile]:
        return [file for part in self.parts.values() for file in part.files]

    @property
    def created(self) -> float:
        return max(part.created for part in self.parts.values())

    @property
    def complete(self) -> bool:
        """Whether all ranks' states, and the parameters of all of them, are present."""
        ranks = {rank for part in self.parts.values() for rank in part.ranks}
        served = {rank for part in self.parts.values() if part.full for rank in part.served}
        return ranks & served >= set(range(self.world_size))

    @property
    def full_parts(self) -> list[Part]:
        """Parts with parameters and optimizer state, the first rank's first."""
        return sorted((part for part in self.parts.values() if part.full), key=lambda part: (part.served, part.node))

    @property
    def directory(self) -> str:
        """Directory of all parts' tensors."""
        return f"{BASES}/{next(iter(self.parts.values())).place}"

    @property
    def merged_path(self) -> str:
        """The metadata file that joins all parts into one checkpoint, for stock tools."""
        return f"{self.directory}/{MERGED}"

    @property
    def tensor_nodes(self) -> list[str]:
        """Nodes whose parts have tensors; if several have the same tensor, the first counts."""
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
    """Contents of a store, as far as they belong to its owner."""

    checkpoints: tuple[Checkpoint, ...]  #: newest first
    damaged: dict[str, str]  #: unusable commit files, with the reason
    files: tuple[str, ...] = ()  #: paths of all files, including those of unfinished checkpoints
    batches: tuple[Batch, ...] = ()  #: batches of logged records, oldest first
    owner: str = ""  #: id of the owning run; empty: none yet
    claimed: bool = False  #: whether there is a claim file
    others: tuple[str, ...] = ()  #: ids of other runs with commit files in the store, which are ignored
    #: Commit files that could not be read, and directories of them that could not be listed, with the reason.
    unreadable: dict[str, str] = field(default_factory=dict)
    passed: frozenset[Key] = frozenset()  #: keys of checkpoints that a resume may have skipped as unreadable
    unlisted: tuple[str, ...] = ()  #: directories, including those of data, that could not be listed

    @property
    def complete(self) -> tuple[Checkpoint, ...]:
        return tuple(one for one in self.checkpoints if one.complete)

    @property
    def stranded(self) -> str:
        """What no state can be made of where there is no complete checkpoint, in words; empty if there is nothing."""
        steps = [step for one in self.batches for step in one.steps]
        parts = [part.step for one in self.checkpoints if not one.complete for part in one.parts.values()]
        said = []
        if steps:
            said.append(f"records of steps {min(steps)} to {max(steps)}, without a checkpoint to redo them on")
        if parts:
            said.append(f"parts of a checkpoint of step {max(parts)}, which is not complete")
        return " and ".join(said)

    @property
    def unsure(self) -> frozenset[Key]:
        """Keys that retention must keep, as they may be complete: skipped checkpoints, and those with unread parts."""
        places = (place_of(path) for path in self.unreadable)
        return self.passed | {place.key for place in places if place is not None}

    @property
    def latest_attempt(self) -> int:
        """The highest number of an attempt that has begun to write, committed or not; 0: none has."""
        places = (place_of(finished_name(path)) for path in self.files)
        hidden = (directory_key(path) for path in self.unlisted)
        numbers = [place.number for place in places if place is not None]
        return max([*numbers, *(key[0] for key in hidden if key is not None)], default=0)

    def hides(self, path: str) -> bool:
        """Whether a file may have a commit file in a directory that could not be listed."""
        _, *middle = path.split("/")
        return any(middle[: one.count("/")] == one.split("/")[1:] for one in self.unlisted if one.startswith(COMMITS))


def read_catalog(store: Store, known: dict[str, Part | Batch] | None = None) -> Catalog:
    """List all files and read all commit files. Those of runs other than the store's owner are left out.

    `known` has commit files that were read before, by path; it is updated in place. Raises StorageError if the store
    cannot be listed, UnsupportedError if another version has written to it.
    """
    damaged: dict[str, str] = {}
    claim = ""
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
    passed: frozenset[Key] = frozenset()
    try:
        passed = read_keys(store, PASSED)
    except StorageError as error:
        unreadable[PASSED] = str(error)
    except DamagedStateError as error:
        damaged[PASSED] = str(error)
    oldest = min((one for one in contents if one.run), key=lambda one: one.created, default=None)
    owner = claim or (oldest.run if oldest is not None else "")
    foreign = [one for one in contents if one.run not in ("", owner)]
    contents = [one for one in contents if one.run in ("", owner)]
    if foreign:
        # An attempt without commit files cannot be attributed to a run.
        own = {one.timeline for one in contents}
        files = [path for path in files if (place := place_of(finished_name(path))) is None or place.timeline in own]
    found: dict[Key, Checkpoint] = {}
    batches = []
    for content in contents:
        if isinstance(content, Batch):
            batches.append(content)
        else:
            one = Checkpoint(content.timeline, content.record)
            found.setdefault(one.key, one).parts[content.node] = content
    return Catalog(
        tuple(sorted(found.values(), key=lambda one: one.key, reverse=True)),
        damaged,
        tuple(files),
        tuple(sorted(batches, key=lambda one: (one.timeline, one.first, one.node))),
        owner,
        bool(claim),
        tuple(sorted({one.run for one in foreign})),
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
    """The contents of all commit files in `files`; problems go to `damaged` or `unreadable`."""
    before = dict(known)
    known.clear()
    for path in files:
        if not path.startswith(COMMITS) or path != finished_name(path):
            continue
        if path in before:
            known[path] = before[path]
            continue
        if len(unreadable) >= _TRIED:
            unreadable[path] = f"{path}: not tried, as other files could not be read"
            continue
        try:
            known[path] = decode_commit(store.read(path), path)
        except DamagedStateError as error:
            damaged[path] = str(error)
        except StorageError as error:
            if not is_missing(error):  # else retention, in the writer process, was faster
                unreadable[path] = str(error)
    return list(known.values())


def read_keys(store: Store, path: str) -> frozenset[Key]:
    """The keys in the file PINNED or PASSED; none if it is missing. Raises as :func:`read_json`."""
    expected = f"the keys of {path.partition('.')[0]} checkpoints"
    remedy = "Until the file is removed, retention deletes nothing"
    return frozenset(read_json(store, path, list[Key](), list[Key], expected, remedy))


def write_keys(store: Store, path: str, keys: Iterable[Key]) -> None:
    """Replace the keys in the file PINNED or PASSED. Raises StorageError."""
    if ordered := sorted(keys):
        store.write(path, msgspec.json.encode(ordered))
    else:
        store.delete(path)


def note_passed(store: Store, catalog: Catalog, add: Iterable[Key] = (), drop: Iterable[Key] = ()) -> None:
    """Add keys to, and drop keys from, the skipped checkpoints that retention keeps. Raises StorageError."""
    passed = (catalog.passed | set(add)) - set(drop)
    if passed != catalog.passed:
        write_keys(store, PASSED, passed)


def still_there(store: Store, contents: Iterable[Committed]) -> bool:
    """Whether the commit files of these parts or batches still exist; retention deletes them first."""
    paths = {one.commit_path for one in contents}
    directories = {path.rpartition("/")[0] for path in paths}
    return paths <= {path for directory in directories for path in store.find(directory)}


def remove(store: Store, checkpoint: Checkpoint) -> None:
    """Delete a checkpoint, its commit files first: a partial delete never looks complete."""
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


def move_aside(store: Store, catalog: Catalog, places: Collection[Place], to: str) -> None:
    """Move all files of checkpoints or batches to a directory, below which they keep their paths.

    Commit files, whose `places` these are, come last, so that no file ever looks uncommitted.
    """
    merged = {place.key for place in places if place.first is None}
    for path in sorted(catalog.files, key=lambda path: path.startswith(f"{COMMITS}/")):
        place = place_of(finished_name(path))
        if place is not None and (place in places or (not place.node and place.key in merged)):
            store.move(path, f"{to}/{path}")


def missing_data(store: Store, catalog: Catalog) -> dict[str, str]:
    """Commit files whose data are missing or, in directories, have another size; by path, with the problem.

    Raises StorageError if a directory cannot be listed.
    """
    listed = set(catalog.files)
    found: dict[str, str] = {}
    contents: list[Committed] = [part for one in catalog.checkpoints for part in one.parts.values()]
    for content in [*contents, *catalog.batches]:
        problem = next((each for file in content.files if (each := _problem(store, file, listed))), "")
        if problem and still_there(store, [content]):  # retention may have run since the listing
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
    checkpoints = []
    for one in catalog.checkpoints:
        parts = {node: part for node, part in one.parts.items() if part.commit_path not in missing}
        if parts:
            checkpoints.append(replace(one, parts=parts))
    batches = tuple(batch for batch in catalog.batches if batch.commit_path not in missing)
    return replace(catalog, checkpoints=tuple(checkpoints), batches=batches)
