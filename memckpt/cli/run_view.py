"""What can be seen of a run: the status of its agent, findings in its storage, and the problems that follow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from memckpt.cli.common import count, place_of, seconds_text
from memckpt.errors import AgentGoneError, MemckptError, StorageError
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.protocol.status import Status
from memckpt.storage.catalog import Catalog, missing_data, read_catalog, without
from memckpt.storage.chain import stored_points
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import kept_run, refuse_other
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
        if agent is None or agent.applied is None or not agent.committed:
            return None
        return max(0, max(record for _, record in agent.committed) - agent.applied)

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
        return View(self.address, agent, problem, None if self._memory_only else self._look_into_storage(agent))

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
    if max_behind is not None and agent.peers is not None and agent.committed:
        newest, known = max(record for _, record in agent.committed), agent.peers.watermark or 0
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
