"""A session's link to its node's agent: made, used for commits, lost and made again."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from memckpt.config import MemckptConfig
from memckpt.errors import AgentGoneError, StorageError
from memckpt.journal.events import TrainerEvent
from memckpt.processes.address import AgentAddress
from memckpt.protocol.messages import TrainerToAgent
from memckpt.protocol.status import MetricsSettings
from memckpt.protocol.trainer import (
    PROTOCOL_VERSION,
    Arithmetic,
    Configure,
    Hello,
    Inventory,
    Note,
    Preempted,
    Prepare,
    Resume,
)
from memckpt.session.agent_client import AgentClient, Notice
from memckpt.session.agent_regions import PreparedRegions, SnapshotOrder
from memckpt.session.ranks import Ranks, find_launcher
from memckpt.state.records import Timeline
from memckpt.state.search_path import user_search_path
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt")
#: Longest time, in seconds, that an agent may take to end once what it holds is in storage.
_LEAVING_SECONDS = 10.0
#: Longest time, in seconds, from when an agent that dies closes its connections to its end: it may hold much memory.
_DYING_SECONDS = 10.0


class AgentLink:
    """Owns the connection and the thread that sends commits whose copies end later. Not thread-safe.

    Args:
        address: address of the agent.
        ranks: ranks of the job.
        config: settings of the session.
        accelerated: whether this rank trains on an accelerator.

    Attributes:
        owner: id of the run, which its checkpoints carry; empty before it is known.
        claimed: whether the store says that it is this run's.
        waited_for_redo: seconds that training has waited for the agent's redo.
        waits: whether training waits for acknowledgements of peers.
    """

    def __init__(self, address: AgentAddress, ranks: Ranks, config: MemckptConfig, accelerated: bool = False) -> None:
        self._address = address
        self._ranks = ranks
        self._accelerated = accelerated
        self._config = config.agent
        self._storage = config.storage
        self._audit = config.audit_budget
        self.owner = ""
        self.claimed = False
        self.waited_for_redo = 0.0
        self.waits = config.peers is not None and config.peers.ack == "wait" and ranks.world_size > 1
        self._timeline: Timeline | None = None
        self._client: AgentClient | None = None
        self._sender: threading.Thread | None = None
        self._send_problem: AgentGoneError | None = None

    @property
    def up(self) -> bool:
        """Whether there is a connection; a dead agent is noticed at the next use."""
        return self._client is not None

    @property
    def client(self) -> AgentClient:
        """The connection; there must be one."""
        assert self._client is not None
        return self._client

    @property
    def attempt(self) -> int:
        """Number of this attempt; 0 before it is known."""
        return self._timeline.number if self._timeline is not None else 0

    @property
    def agent_pid(self) -> int | None:
        return self._client.agent_pid if self._client is not None else None

    # Requests

    def connect(self, spec: StateSpec, next_record: int, rejoining: bool) -> Inventory:
        """Connect to the agent, starting it if there is none, and introduce this rank; what the node holds."""
        self._client = AgentClient.connect(self._address, self._config)
        hello = Hello(
            version=PROTOCOL_VERSION,
            nonce=self._ranks.nonce,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            local_ranks=self._ranks.local_ranks,
            unit=self._ranks.unit,
            launcher=find_launcher(self._ranks.world_size),
            fingerprint=tuple(spec.fingerprint()),
            rejoining=rejoining,
            next_record=next_record,
            fence_seconds=self._config.fence_seconds,
            liveness_seconds=self._config.liveness_seconds,
            accelerated=self._accelerated,
        )
        return self._client.hello(hello)

    def begin(self, spec: StateSpec) -> Inventory:
        """Connect as :meth:`connect` does when an attempt begins, and have all in storage that is on its way there.

        An agent of this node that was told to end answers no more, while it writes what it holds. One that was told so
        after it had taken the connection, or has died since, is left for another one.
        """
        try:
            inventory = self.connect(spec, next_record=0, rejoining=False)
        except AgentGoneError:
            serving = self._address.serving()
            if serving is not None and serving.pid == self.agent_pid and not serving.ends(within=_DYING_SECONDS):
                raise
            self.abandon()
            inventory = self.connect(spec, next_record=0, rejoining=False)
        # An agent that holds something has come later than one that leaves, which then has nothing newer.
        if not any(each.records and not each.standby for each in inventory.held):
            grace = self._storage.grace_seconds if self._storage is not None else 0.0
            self._address.await_leaving(grace + _LEAVING_SECONDS, _log)
        return inventory

    def begin_again(self, spec: StateSpec, before: Inventory) -> Inventory:
        """Do what :meth:`begin` does once more, unless the agent that has answered `before` is the node's still."""
        serving = self._address.serving()
        if serving is not None and serving.pid == before.agent_pid:
            return before
        self.abandon()
        return self.begin(spec)

    def reconnect(self, spec: StateSpec, next_record: int) -> None:
        """Connect to another agent in the same attempt, starting it if there is none.

        Args:
            spec: layout of the live state.
            next_record: number of the current record.
        """
        assert self._timeline is not None
        self.connect(spec, next_record, rejoining=True)
        self.configure(self._timeline)

    def configure(self, timeline: Timeline) -> None:
        """Send the run's settings and this attempt's timeline."""
        self._timeline = timeline
        linger, storage = self._config.linger_seconds, self._storage
        if storage is not None:
            storage = replace(storage, owner=self.owner or None)
        paths, claimed = user_search_path(), self.claimed
        threads, agent = torch.get_num_threads(), self._config
        metrics = MetricsSettings(agent.metrics_port, agent.metrics_host, agent.metrics_file)
        self.client.configure(
            Configure(
                linger,
                timeline,
                storage,
                threads,
                search_path=paths,
                claimed=claimed,
                metrics=metrics,
                audit=self._audit,
                arithmetic=Arithmetic(
                    torch.backends.cpu.get_cpu_capability(),
                    torch.get_float32_matmul_precision(),
                    torch.are_deterministic_algorithms_enabled(),
                    str(torch.get_default_dtype()).removeprefix("torch."),
                ),
            )
        )

    def prepare(
        self,
        spec: StateSpec,
        record: int,
        discard: bool = False,
        reason: str = "",
        whole: bool = False,
        optional: bool = False,
    ) -> PreparedRegions:
        """Allocate a generation.

        Args:
            spec: its layout.
            record: record after which it begins.
            discard: whether held generations are dropped.
            reason: why the state has its redo mode, in words.
            whole: whether all slots are allocated, and not only the start of the generation.
            optional: whether what is held stays where both do not fit; then this is refused.

        Raises:
            MemoryBudgetError: it does not fit.
        """
        assert self._timeline is not None
        timeline = self._timeline
        threads, budget = self._config.threads, self._config.memory_budget_bytes
        return self.client.prepare(Prepare(spec, timeline, threads, budget, discard, record, reason, whole, optional))

    def resume(self, record: int, timeline: Timeline, repeat: bool) -> PreparedRegions:
        """Have the agent produce the state after a record; with `repeat` the state before it as well."""
        return self.client.resume(Resume(record, timeline, self._config.linger_seconds, repeat))

    # News and commits

    def notices(self) -> list[Notice]:
        """Notices of the agent since the last call, without waiting. Raises AgentGoneError if it is gone."""
        if self._send_problem is not None:
            problem, self._send_problem = self._send_problem, None
            raise problem
        return self._client.notices() if self._client is not None else []

    def take_order(self, record: int) -> SnapshotOrder | None:
        """The order for a snapshot after `record` or an earlier one; the caller closes it. None if there is none."""
        return self._client.take_order(record) if self._client is not None else None

    def send(self, message: TrainerToAgent) -> None:
        self.client.send(message)

    def note(self, event: TrainerEvent) -> None:
        """Tell the run's journal; nothing happens where there is no agent."""
        if self._client is not None:
            with contextlib.suppress(AgentGoneError):  # the next commit finds that, and says so
                self._client.send(Note(event))

    def send_later(self, make: Callable[[], TrainerToAgent]) -> None:
        """Make and send a message in a thread, as `make` waits for copies from an accelerator."""
        client = self.client

        def run() -> None:
            try:
                client.send(make())
            except AgentGoneError as error:
                self._send_problem = error
            except Exception as error:  # raised at the next commit, in the training thread
                _log.exception("memckpt: a commit could not be made")
                self._send_problem = AgentGoneError(f"a commit could not be made: {type(error).__name__}: {error}")

        self.finish_sending()
        self._sender = threading.Thread(target=run, name="memckpt-commit", daemon=True)
        self._sender.start()

    def tell_preempted(self) -> None:
        """Tell the agent that this rank got SIGTERM. Called from a signal handler."""
        if self._client is not None:
            try:
                self._client.send(Preempted())
            except AgentGoneError as error:
                _log.warning("memckpt: the agent cannot be told of the SIGTERM: %s", error)

    def finish_sending(self) -> None:
        """Wait until the last commit has been sent."""
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    def wait_for_room(self, record: int, spec: StateSpec, began: int) -> float:
        """Wait until the slot of `record` is free.

        With eager redo the agent must have applied the former record of the slot. Where training waits for peers, every
        node must be able to produce the newest record that is acknowledged for all of them. A replica also needs that
        record's by-value tensors, which lie in its slot; a replica that trails needs those of the record before. While
        a state is captured, only the capture before it is whole.

        Args:
            record: number of the record that is about to begin.
            spec: layout of its generation.
            began: record after which the generation began.

        Returns:
            The seconds that it took.
        """
        started = time.perf_counter()
        if self.waits and spec.mode == "snapshot":
            if record % spec.every == 0:
                self.client.wait_for_watermark(max(record - spec.every, began))
        elif self.waits:
            standing = 1 + spec.trails if spec.mode == "eager" else 0
            self.client.wait_for_watermark(record - spec.slots + standing)
        if spec.mode == "eager":
            waited = time.perf_counter()
            self.client.wait_applied(record - spec.slots)
            self.waited_for_redo += time.perf_counter() - waited
        return time.perf_counter() - started

    def save_record(self, record: int, url: str, timeout: float, name: str = "storage") -> None:
        """Have the agent write a record to a store.

        Args:
            record: number of the record.
            url: URL of the store.
            timeout: time limit, in seconds.
            name: name of the store, in words.

        Raises:
            StorageError: it could not be written, or not in time.
        """
        saved = self.client.save_record(record, url, timeout)
        if saved is None:
            raise StorageError(f"what is held in memory has not got to {name} within {timeout:.0f} s")
        if saved.problem:
            raise StorageError(f"what is held in memory does not get to {name}: {saved.problem}")

    # End

    def abandon(self, dismiss: bool = False) -> None:
        """Close the connection without a goodbye; with `dismiss`, an agent that was started for it leaves at once."""
        client, self._client = self._client, None
        if client is not None:
            client.abandon(dismiss)

    def close(self, finished: bool) -> None:
        """Say goodbye; with `finished` wait until the agent has written the final step to storage and leaves."""
        client, self._client = self._client, None
        if client is None:
            return
        if finished and self._storage is not None and self._ranks.rank == self._ranks.local_ranks[0]:
            _log.info("memckpt: the final step is being brought to storage")
        client.close(finished, self._storage.timeout_seconds if self._storage is not None else 0.0)
