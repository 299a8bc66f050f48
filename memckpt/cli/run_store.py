"""A run's store, as commands open it, name what is in it and read it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from memckpt.cli.common import err
from memckpt.errors import ForeignStateError, NothingHeldError, UsageError
from memckpt.storage.catalog import PINNED, Catalog, Checkpoint, read_catalog
from memckpt.storage.format import Batch
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import CLAIM, keep_run, kept_run, original_of, place_of_store, read_kept, refuse_other
from memckpt.storage.store import Store

Adopt = Annotated[
    bool, typer.Option("--adopt", help="Become the run that owns the store: RUN's directory takes its id.")
]
#: Directory of a store for damaged files.
ASIDE = "damaged"
#: Top-level names in a store of memckpt.
_OURS = {"base", "commit", "log", "state", ASIDE, CLAIM, PINNED}


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

    To `adopt` is to take the id of the store's owner. Raises ForeignStateError if the store belongs to another run,
    which is only a warning with `only_looks`; UsageError if there is no owner to adopt.
    """
    kept = kept_run(run)
    if adopt:
        if not catalog.owner:
            raise UsageError(f"--adopt: expected a store that belongs to a run, found that {store.url} belongs to none")
        copied = bool(original_of(run, read_kept(run))) if kept else False
        keep_run(run, catalog.owner, place_of_store(store, run))
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


def checkpoint_name(one: Checkpoint) -> str:
    return f"step {one.step}, attempt {one.timeline.number}"


def steps_text(batches: Sequence[Batch]) -> str:
    steps = [step for one in batches for step in one.steps]
    return f"steps {min(steps)} to {max(steps)}"


@contextlib.contextmanager
def reading_progress(nbytes: int) -> Iterator[Callable[[str], Callable[[int], None]]]:
    """A progress bar on a terminal. Yields a function from an item's name to its progress callback (bytes)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=nbytes)

        def begin(name: str) -> Callable[[int], None]:
            bar.update(task, description=name)
            return lambda amount: bar.advance(task, amount)

        yield begin
