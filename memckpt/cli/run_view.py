"""What can be seen of a run: its agent's status, findings in its store, problems; and the store as commands open it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from memckpt.cli.common import count, err, place_of, seconds_text
from memckpt.errors import AgentGoneError, ForeignStateError, MemckptError, NothingHeldError, StorageError, UsageError
from memckpt.journal.journal import find_finish
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.protocol.status import Status
from memckpt.storage.catalog import PINNED, Catalog, Checkpoint, missing_data, read_catalog, without
from memckpt.storage.chain import stored_points
from memckpt.storage.format import Batch
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import CLAIM, keep_run, kept_run, original_of, place_of_store, read_kept, refuse_other
from memckpt.storage.store import Store
from memckpt.storage.urls import open_store

#: Time limit for reading the catalog.
_STORAGE_SECONDS = 10.0


@dataclass(frozen=True)
class Stored:
    """Findings in storage."""

    url: str
    checkpoints: int = 0  #: number of complete ones, without those whose data are missing
    step: int | None = None  #: of the newest state that can be produced
    created: float | None = None  #: its time
    nbytes: int = 0  #: of the newest checkpoint
    damaged: int = 0  #: number of unusable commit files
    problem: str = ""  #: why storage could not be read; empty if it could
    batches: int = 0
    unreadable: int = 0  #: number of commit files that cannot be read
    missing: int = 0  #: number of commit files with missing data


@dataclass(frozen=True)
class View:
    """A run's status at one moment."""

    address: AgentAddress
    agent: Status | None  #: None: no agent answered
    agent_problem: str  #: why the agent could not be asked; empty if it could, or if there is none
    stored: Stored | None  #: findings in storage; None: storage was not read
    finished: bool = False  #: whether no agent is there since training has finished

    @property
    def empty(self) -> bool:
        """Whether nothing is held or stored, and everything could be read."""
        stored = self.stored
        nothing_stored = stored is None or not (
            stored.checkpoints or stored.damaged or stored.unreadable or stored.missing or stored.problem
        )
        return self.agent is None and not self.agent_problem and nothing_stored

    @property
    def lag_records(self) -> int | None:
        """Records committed and not yet applied to the replica; None: there is no replica (lazy)."""
        agent = self.agent
        if agent is None or agent.applied is None or agent.newest_committed is None:
            return None
        return max(0, agent.newest_committed - agent.applied)

    @property
    def steps_behind(self) -> int | None:
        """Steps by which storage is behind memory, lost with the machine; None: unknown."""
        if self.agent is None or self.agent.step is None or self.stored is None or self.stored.step is None:
            return None
        return max(0, self.agent.step - self.stored.step)

    def as_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.address.run_dir),
            "node": self.address.node,
            "agent": self.agent,
            "agent_problem": self.agent_problem,
            "lag_records": self.lag_records,
            "stored": self.stored,
            "steps_behind": self.steps_behind,
            "finished": self.finished,
        }


class Looker:
    """Reads a run's status, once or repeatedly. An object store is listed again only after the agent has written to it.

    The store is that of `url`; None: the agent's, or the run directory's. With `memory_only` storage is not read.
    `storage_error`: error of the last read of storage; None: it succeeded.
    """

    def __init__(self, address: AgentAddress, url: str | None, memory_only: bool = False) -> None:
        self.address, self._url, self._memory_only = address, url, memory_only
        self._seen: tuple[object, Stored] | None = None
        self.storage_error: MemckptError | None = None

    def view_run(self) -> View:
        """The current status. An agent that does not answer is reported in the view, not raised."""
        agent, problem = None, ""
        try:
            agent = ask_status(self.address)
        except AgentGoneError as error:
            problem = str(error)
        stored = None if self._memory_only else self._look_into_storage(agent)
        gone = agent is None and not problem
        finished = gone and find_finish(self.address.run_dir, self.address.node) is not None
        return View(self.address, agent, problem, stored, finished)

    def _look_into_storage(self, agent: Status | None) -> Stored:
        tier = agent.storage if agent is not None else None
        url = self._url or (tier.url if tier is not None else place_of(self.address.run_dir, None))
        version = (url, tier.step, tier.saving) if tier is not None else (url,)
        if self._seen is not None and self._seen[0] == version:
            return self._seen[1]
        self.storage_error = None
        try:
            store = open_store(url)
            catalog, missing = read_within(store, _STORAGE_SECONDS)
            if kept := kept_run(self.address.run_dir):
                refuse_other(url, catalog.owner, kept, self.address.run_dir)
        except MemckptError as error:
            # Shown, not raised: memory is reported regardless, and a watch survives a mount that is away for a minute.
            self.storage_error = error
            return Stored(url, problem=str(error))
        catalog = without(catalog, missing)
        whole, newest = catalog.complete, next(iter(stored_points(catalog)), None)
        stored = Stored(url, len(whole), batches=len(catalog.batches), missing=len(missing))
        stored = replace(stored, damaged=len(catalog.damaged), unreadable=len(catalog.unreadable))
        if newest is not None:
            created = max([newest.checkpoint.created, *(batch.created for batch in newest.batches)])
            stored = replace(stored, step=newest.step, created=created, nbytes=whole[0].nbytes)
        self._seen = None if isinstance(store, LocalStore) else (version, stored)
        return stored


def read_within(store: Store, seconds: float) -> tuple[Catalog, dict[str, str]]:
    """The catalog, and its commit files whose data are missing, within a time limit.

    A store that does not answer in time keeps its daemon thread until the process ends. Raises StorageError if it does
    not, or cannot be read.
    """
    found: list[tuple[Catalog, dict[str, str]] | BaseException] = []

    def read() -> None:
        try:
            catalog = read_catalog(store)
            found.append((catalog, missing_data(store, catalog)))
        except BaseException as error:  # raised again in the thread that waits
            found.append(error)

    reader = threading.Thread(target=read, name="memckpt-storage", daemon=True)
    reader.start()
    reader.join(seconds)
    if not found:
        raise StorageError(f"{store.url} has not answered within {seconds:.0f} s")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def alarms_of(agent: Status) -> Iterator[str]:
    """Problems that a live agent reports itself, one sentence each."""
    if agent.unprotected:
        yield f"training goes on without protection in memory: {agent.unprotected}"
    if agent.storage is not None and agent.storage.alarm:
        yield f"the last checkpoint could not be written: {agent.storage.alarm}"
    if agent.storage is not None and agent.storage.untidy:
        yield f"old files in storage could not be deleted: {agent.storage.untidy}"
    if agent.peers is not None and not agent.peers.protected:
        yield f"other nodes do not protect this run{f': {agent.peers.problem}' if agent.peers.problem else ''}"
    elif agent.peers is not None and agent.peers.problem:
        yield agent.peers.problem
    if "DIFFERENT" in agent.check:
        yield f"the last resume was not exact: {agent.check}"


def problems_of(
    agent: Status, stored: Stored | None, max_behind: int | None, max_age: float | None = None
) -> Iterator[str]:
    """Problems of a run that should be training and protected, one sentence each.

    Storage (None: not read) may be `max_behind` steps behind memory, and other nodes as many records. The last commit
    may be `max_age` seconds ago. None: any number.
    """
    if not agent.trainers:
        yield "no trainer is connected"
    if agent.step is None:
        yield "nothing is held yet"
    # A state restored from peers or storage is held before this agent gets its first commit.
    age = agent.uptime_seconds if agent.seconds_since_commit is None else agent.seconds_since_commit
    if max_age is not None and age > max_age:
        yield f"nothing has been committed for {seconds_text(age)}: more than {max_age:g} s"
    yield from alarms_of(agent)
    newest = agent.newest_committed
    if max_behind is not None and agent.peers is not None and newest is not None:
        known = agent.peers.watermark or 0
        if newest - known > max_behind:
            where = f"have record {known}" if known else "have nothing"
            late = f"{count(newest - known, 'record')} behind record {newest} in memory"
            yield f"other nodes {where}, {late}: more than {max_behind}"
    if stored is None:
        return
    if stored.problem:
        yield f"storage cannot be read: {stored.problem}"
        return
    for number, what in ((stored.damaged, "damaged"), (stored.unreadable, "not readable")):
        if number:
            yield f"{count(number, 'file')} in storage {'is' if number == 1 else 'are'} {what}; see memckpt verify"
    if stored.missing:
        yield f"the data of {count(stored.missing, 'commit file')} in storage are missing; see memckpt verify"
    if max_behind is not None and agent.step is not None:
        behind = agent.step - (stored.step if stored.step is not None else 0)
        if behind > max_behind:
            where = "has nothing" if stored.step is None else f"has step {stored.step}"
            yield f"storage {where}, {count(behind, 'step')} behind step {agent.step} in memory: more than {max_behind}"


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
    if not run.is_dir() and isinstance(store, LocalStore) and store.root.is_relative_to(run.resolve()):
        raise NothingHeldError(f"no checkpoints in {store.url}: there is no directory {run}")
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
