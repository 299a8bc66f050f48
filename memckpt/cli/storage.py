"""``memckpt ls``, ``verify`` and ``export``: the checkpoints that a run has in storage."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from memckpt.cli.common import (
    AsJson,
    Node,
    Run,
    Url,
    count,
    err,
    nbytes_text,
    no_agent,
    out,
    plain_table,
    print_json,
    store_of,
    time_text,
)
from memckpt.errors import (
    AgentNotFoundError,
    ConfigurationError,
    DamagedStateError,
    ForeignStateError,
    NothingHeldError,
    StorageError,
    StorageFullError,
    UsageError,
)
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status, save_to
from memckpt.storage.catalog import (
    PASSED,
    Catalog,
    Checkpoint,
    Key,
    move_aside,
    note_passed,
    read_catalog,
    still_there,
)
from memckpt.storage.chain import StoredPoint, stored_points
from memckpt.storage.format import Batch, place_of
from memckpt.storage.local_store import LocalStore, sync_directory
from memckpt.storage.owner import CLAIM, INSIDE, keep_run, kept_run, original_of, read_kept, refuse_other, url_outside
from memckpt.storage.presence import missing_data, without
from memckpt.storage.store import Store
from memckpt.storage.tidying import PINNED, read_pins
from memckpt.storage.verification import examine, verify_files

Repair = Annotated[bool, typer.Option(help="Move damaged files into a directory of the store.")]
Adopt = Annotated[
    bool, typer.Option("--adopt", help="Become the run that owns the store: RUN's directory takes its id.")
]
To = Annotated[
    Path, typer.Option(help="Target file; for dcp, accelerate, transformers a directory. It must not exist.")
]
Step = Annotated[int | None, typer.Option(help="Step to export. Default: the newest.")]
Format = Annotated[
    str,
    typer.Option("--format", help="torch, lightning, accelerate, transformers, dcp, or safetensors (the model)."),
]
Source = Annotated[str, typer.Option("--from", help="storage, or memory: the newest step that the agent holds.")]
#: Directory of a store for damaged files.
_ASIDE = "damaged"
#: Top-level names in a store of memckpt.
_OURS = {"base", "commit", "log", "state", _ASIDE, CLAIM, PINNED}
#: Seconds that an agent may take to save the state that it holds.
_SAVE_SECONDS = 1800.0


def catalog_of(store: Store, run: Path) -> Catalog:
    """The contents of a store. Raises NothingHeldError if it is empty, ForeignStateError if it has other files only."""
    catalog = read_catalog(store)
    if catalog.checkpoints or catalog.damaged or catalog.batches or catalog.unreadable:
        return catalog
    if isinstance(store, LocalStore):
        names = {path.name for path in store.root.iterdir()} if store.root.is_dir() else set()
        if names and not names & _OURS:
            raise ForeignStateError(
                f"{store.url} holds other files ({', '.join(sorted(names)[:3])}) and no checkpoints of memckpt; give "
                "the run directory, or the checkpoints' location with --url"
            )
    near = sorted(str(path.parents[1]) for path in run.glob("*/storage/commit"))[:5]
    hint = f"; there are some of {', '.join(near)}" if near else "; give the location with --url if it is another one"
    raise NothingHeldError(f"no checkpoints in {store.url}{hint}")


def check_owner(store: Store, catalog: Catalog, run: Path, adopt: bool, only_looks: bool = False) -> None:
    """Check that a store belongs to the run in a directory, if the directory has a run id.

    Args:
        store, catalog: the store and its contents.
        run: the run directory.
        adopt: whether the directory takes the id of the store's owner.
        only_looks: print a warning, in place of an error, if the store belongs to another run.

    Raises:
        ForeignStateError: the store belongs to another run.
        UsageError: there is no owner to adopt.
    """
    kept = kept_run(run)
    if adopt:
        if not catalog.owner:
            raise UsageError(f"--adopt: expected a store that belongs to a run, found that {store.url} belongs to none")
        copied = bool(original_of(run, read_kept(run))) if kept else False
        url = url_outside(store, run)
        keep_run(run, catalog.owner, url, url or INSIDE)
        if kept != catalog.owner or copied:
            err.print(f"{run} is the run {catalog.owner} from now on", markup=False, soft_wrap=True)
    elif kept and only_looks and catalog.owner not in ("", kept):
        said = f"{store.url} belongs to the run {catalog.owner}, but {run} is the run {kept}"
        err.print(said, style="yellow", markup=False, soft_wrap=True)
    elif kept and not only_looks:
        refuse_other(store.url, catalog.owner, kept, run)
    if catalog.others:
        said = f"{store.url} also has files of other runs, which are left alone: {', '.join(catalog.others)}"
        err.print(said, style="yellow", markup=False, soft_wrap=True)


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


def _name(one: Checkpoint) -> str:
    return f"step {one.step}, attempt {one.timeline.number}"


def ls(run: Run, url: Url = None, adopt: Adopt = False, as_json: AsJson = False) -> None:
    """List the checkpoints that a run has in storage, newest first, and the steps logged since.

    A store of another run is listed with a warning. Exit status 4 if there are no checkpoints, 5 if there are other
    files only.
    """
    store = store_of(run, url)
    catalog = catalog_of(store, run)
    check_owner(store, catalog, run, adopt, only_looks=True)
    missing = missing_data(store, catalog)
    pins, problem = _pins_of(store)
    newest = next(iter(stored_points(without(catalog, missing))), None)
    if as_json:
        print_json(
            {
                "url": store.url,
                "owner": catalog.owner or None,
                "step": newest.step if newest is not None else None,
                "checkpoints": [
                    _in_json(one) | {"lacks_data": _lacks(one, missing), "pinned": one.key in pins}
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
        if _lacks(one, missing):
            parts = "[red]data are missing[/]"
        elif one.key in pins:
            parts += ", pinned"
        table.add_row(*cells, str(one.world_size), *([] if whole else [parts]))
    out.print(table)
    if catalog.batches:
        size = nbytes_text(sum(file.nbytes for one in catalog.batches for file in one.files))
        reach = f"; the newest that can be produced is step {newest.step}" if newest is not None else ""
        logged = f"logged: {_steps_text(catalog.batches)} in {count(len(catalog.batches), 'batch', 'batches')} ({size})"
        out.print(logged + reach, markup=False)
    for said in catalog.damaged.values():
        err.print(f"damaged: {said}", style="red", markup=False, soft_wrap=True)
    for said in missing.values():
        err.print(f"damaged: {said}", style="red", markup=False, soft_wrap=True)
    for said in [*catalog.unreadable.values(), *([problem] if problem else [])]:
        err.print(f"not readable: {said}", style="yellow", markup=False, soft_wrap=True)


def _lacks(one: Checkpoint, missing: Mapping[str, str]) -> bool:
    return any(part.commit_path in missing for part in one.parts.values())


def _pins_of(store: Store) -> tuple[frozenset[Key], str]:
    """The keys of pinned checkpoints, and the reason why they are unknown (empty: they are known)."""
    try:
        return read_pins(store), ""
    except (StorageError, DamagedStateError) as error:
        return frozenset(), str(error)


def _batch_in_json(one: Batch) -> dict[str, Any]:
    return {
        "steps": [one.steps[0], one.steps[-1]],
        "records": [one.first, one.last],
        "timeline": one.timeline.number,
        "bytes": sum(file.nbytes for file in one.files),
        "created": one.created,
        "node": one.node,
    }


def _steps_text(batches: Sequence[Batch]) -> str:
    steps = [step for one in batches for step in one.steps]
    return f"steps {min(steps)} to {max(steps)}"


# Verify


@contextlib.contextmanager
def _reading(nbytes: int) -> Iterator[Callable[[str], Callable[[int], None]]]:
    """A progress bar on a terminal. Yields a function from an item's name to its progress callback (bytes)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=nbytes)

        def begin(name: str) -> Callable[[int], None]:
            bar.update(task, description=name)
            return lambda amount: bar.advance(task, amount)

        yield begin


def _may_come(catalog: Catalog) -> set[tuple[int, str, int]]:
    """Keys of incomplete checkpoints newer than all complete ones: other nodes may be writing them now."""
    keys = set()
    for one in catalog.checkpoints:
        if one.complete:
            break
        keys.add(one.key)
    return keys


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
    with _reading(total) as reading:
        for one in catalog.checkpoints:
            found.look_at(store, one, reading(f"step {one.step}"))
        for batch in catalog.batches:
            found.look_at_batch(store, batch, reading(_steps_text([batch])))
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
            self.unreadable[_name(one)] = unread
        elif wrong:
            self._is_damaged(one, wrong)
        elif one.complete:
            self.good.append(one)
        elif any(place is not None and place.key == one.key for place in map(place_of, self._catalog.unreadable)):
            self.unreadable[_name(one)] = ["parts are missing, or cannot be read"]
        elif one.key in self._may_come:
            self.unfinished.append(one)
        elif still_there(store, one):
            self._is_damaged(one, [])

    def _is_damaged(self, one: Checkpoint, wrong: list[str]) -> None:
        self.damaged[_name(one)] = wrong if one.complete else ["parts are missing", *wrong]
        places = (place_of(part.commit_path) for part in one.parts.values())
        self._places |= {place for place in places if place is not None}
        self._bad.append(one.key)

    def look_at_batch(self, store: Store, batch: Batch, progress: Callable[[int], None]) -> None:
        """Read the file of a batch."""
        wrong, unread = examine(store, batch.files, progress)
        name = f"{_steps_text([batch])}, attempt {batch.timeline.number}, node {batch.node}"
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
        aside = f"{_ASIDE}/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
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
        out.print(f"{_name(one)}: parts of other nodes are missing (so far)", style="yellow", markup=False)
    good, batches = found.good, found.batches
    size = nbytes_text(sum(one.nbytes for one in good))
    newest = f", the newest is step {good[0].step}" if good else ""
    out.print(f"{count(len(good), 'good checkpoint')} ({size}){newest}", markup=False)
    if batches:
        size = nbytes_text(sum(one.nbytes for one in batches))
        counted = count(len(batches), "good batch", "good batches")
        out.print(f"{counted} of {_steps_text(batches)} ({size})", markup=False)
    if found.damaged:
        said = f"damaged and moved to {aside}"
        if aside is None:
            said = "damaged; a resume skips them, --repair moves them aside"
        out.print(f"{len(found.damaged)} {said}", style="red", markup=False)
    if found.unreadable:
        said = "not readable, and left alone: a resume waits for the newest one, and then ends with an error"
        out.print(f"{len(found.unreadable)} {said}", style="yellow", markup=False)


# Export


def export(
    run: Run,
    to: To,
    step: Step = None,
    form: Format = "torch",
    source: Source = "storage",
    node: Node = None,
    url: Url = None,
    adopt: Adopt = False,
    as_json: AsJson = False,
) -> None:
    """Write a step in a format that other tools read: from storage, or from the memory of a run that is training.

    Exit status 4 if there is no such step, 5 if the store belongs to another run, 8 if the step is damaged, 6 if there
    is no room for it, 11 if no agent answers.
    """
    from memckpt.storage.export import formats

    if to.exists():
        raise UsageError(f"{to} exists: choose another name, or remove it first")
    known = formats()
    if form not in known:
        raise ConfigurationError(f"--format: expected one of {', '.join(sorted(known))}, found {form!r}")
    if source not in ("storage", "memory"):
        raise ConfigurationError(f"--from: expected storage or memory, found {source!r}")
    if source == "memory":
        found = _export_held(AgentAddress.of(run, node), step, to, form)
    else:
        found = _export_stored(store_of(run, url), run, step, to, form, adopt)
    nbytes = sum(path.stat().st_size for path in [to, *to.rglob("*")] if path.is_file())
    if as_json:
        print_json({"step": found.step, "to": str(to), "format": form, "bytes": nbytes})
    else:
        out.print(f"step {found.step} is in {to} ({form}, {nbytes_text(nbytes)})", markup=False, soft_wrap=True)


def _beside(to: Path, stack: contextlib.ExitStack) -> LocalStore:
    """A temporary store beside the target."""
    to.parent.mkdir(parents=True, exist_ok=True)
    room = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent))
    return LocalStore(Path(room).resolve())


def _export_held(address: AgentAddress, step: int | None, to: Path, form: str) -> Checkpoint:
    """Export the newest step that the agent holds. The agent writes a checkpoint of it; training goes on."""
    if step is not None:
        raise UsageError("--step: memory has its newest step only; leave it out, or use --from storage")
    held = ask_status(address)
    if held is None:
        raise AgentNotFoundError(f"{no_agent(address)}: nothing is held in memory")
    _check_room(to, held.held_bytes)
    with contextlib.ExitStack() as stack:
        beside = _beside(to, stack)
        with err.status("the agent saves its newest step"):
            save_to(address, str(beside.root), _SAVE_SECONDS)
        found = read_catalog(beside).checkpoints[0]
        _write(beside, found, to, form)
    return found


def _export_stored(store: Store, run: Path, step: int | None, to: Path, form: str, adopt: bool) -> Checkpoint:
    """Export a step from storage. If retention deletes the newest one meanwhile, the next newest is taken."""
    while True:
        catalog = catalog_of(store, run)
        check_owner(store, catalog, run, adopt)
        point = _chosen(catalog, step)
        if step is None and catalog.unreadable:
            raise StorageError(f"the newest step is not known: {next(iter(catalog.unreadable.values()))}; give --step")
        try:
            with contextlib.ExitStack() as stack:
                where, found = _verified(store, point, to, stack)
                _write(where, found, to, form)
            return found
        except (StorageError, DamagedStateError):
            if step is not None or point.checkpoint.key in {one.key for one in catalog_of(store, run).checkpoints}:
                raise
            err.print(f"step {point.step} was deleted meanwhile: the newest one is taken", soft_wrap=True)


def _verified(store: Store, point: StoredPoint, to: Path, stack: contextlib.ExitStack) -> tuple[Store, Checkpoint]:
    """A verified checkpoint and its store; a step that has to be redone is first written to a temporary store."""
    nbytes = sum(file.nbytes for file in point.files)
    _check_room(to, point.checkpoint.nbytes * (2 if point.batches else 1))
    with _reading(nbytes) as reading:
        problems = verify_files(store, point.files, reading(f"step {point.step}"))
    if problems:
        raise DamagedStateError(f"step {point.step} is damaged: {'; '.join(problems)}")
    if not point.batches:
        return store, point.checkpoint
    from memckpt.recovery.materialize import as_checkpoint

    beside = _beside(to, stack)
    return beside, as_checkpoint(store, point, beside)


def _chosen(catalog: Catalog, step: int | None) -> StoredPoint:
    points = stored_points(catalog, also=step)
    for point in points:
        if step is None or point.step == step:
            return point
    steps = sorted({point.step for point in points})
    wanted = "a complete checkpoint" if step is None else f"step {step}"
    raise NothingHeldError(f"expected {wanted}, found steps {steps}")


def _check_room(to: Path, nbytes: int) -> None:
    """Check for room before minutes of reading. An export is hardly ever larger than the checkpoint."""
    directory = next(one for one in to.resolve().parents if one.is_dir())
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise StorageFullError(f"expected {nbytes_text(nbytes)} of room in {directory}, found {nbytes_text(free)}")


def _write(store: Store, found: Checkpoint, to: Path, form: str) -> None:
    """Write under a temporary name and rename, so that `to` is always complete."""
    from memckpt.storage.export import export as export_checkpoint

    partial = to.with_name(f".{to.name}.partial-{secrets.token_hex(4)}")
    try:
        export_checkpoint(store, found, partial, form)
        partial.rename(to)
        sync_directory(to.parent)
    except BaseException as error:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"could not write {to}: {error}") from error
        raise
