"""What can be seen of a run: the status of its agent, and findings in its storage."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from memckpt.cli.common import place_of
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
    """Findings in storage.

    Attributes:
        url: location.
        checkpoints: number of complete checkpoints.
        batches: number of batches of records.
        step, created: step and time of the newest state that can be produced.
        nbytes: bytes of the newest checkpoint.
        damaged: number of unusable commit files.
        unreadable: number of commit files that could not be read.
        missing: number of commit files whose data are missing; the other counts ignore them.
        problem: why storage could not be read; empty if it could.
    """

    url: str
    checkpoints: int = 0
    step: int | None = None
    created: float | None = None
    nbytes: int = 0
    damaged: int = 0
    problem: str = ""
    batches: int = 0
    unreadable: int = 0
    missing: int = 0


@dataclass(frozen=True)
class View:
    """A snapshot of a run's status.

    Attributes:
        address: address of the agent.
        agent: status of the agent; None: no agent answered.
        agent_problem: why the agent could not be asked; empty if it could, or if there is none.
        stored: findings in storage; None: storage was not read.
    """

    address: AgentAddress
    agent: Status | None
    agent_problem: str
    stored: Stored | None

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

    Args:
        address: address of the agent.
        url: URL of the store; None: the agent's, or the run directory's.
        memory_only: whether storage is not read.
    """

    def __init__(self, address: AgentAddress, url: str | None, memory_only: bool = False) -> None:
        self.address = address
        self._url = url
        self._memory_only = memory_only
        self._seen: tuple[object, Stored] | None = None
        #: Error of the last read of storage; None: it succeeded.
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
        damaged, unreadable = len(catalog.damaged), len(catalog.unreadable)
        stored = Stored(
            url,
            len(whole),
            damaged=damaged,
            batches=len(catalog.batches),
            unreadable=unreadable,
            missing=len(missing),
        )
        if newest is not None:
            created = max([newest.checkpoint.created, *(batch.created for batch in newest.batches)])
            stored = replace(stored, step=newest.step, created=created, nbytes=whole[0].nbytes)
        self._seen = None if isinstance(store, LocalStore) else (version, stored)
        return stored


def read_within(store: Store, seconds: float) -> tuple[Catalog, dict[str, str]]:
    """The catalog, and its commit files whose data are missing, within a time limit.

    A store that does not answer in time keeps its daemon thread until the process ends.

    Raises:
        StorageError: the store did not answer in time, or cannot be read.
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
