"""A session's client of its node's agent: found or started, asked, given commits, lost and found again.

At the end: the losses that a script logs, on their way to it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.config import MemckptConfig
from memckpt.errors import AgentGoneError, MemoryBudgetError, StorageError
from memckpt.journal.events import TrainerEvent
from memckpt.memory.pages import PhasesPage
from memckpt.memory.region import Region
from memckpt.processes.address import AgentAddress
from memckpt.processes.launch import user_search_path
from memckpt.protocol import trainer
from memckpt.protocol.channel import TrainerToAgent
from memckpt.protocol.replication import AskPhases, Listen, Listening, PhasesAre, Recover, Recovered, RecoveryProgress
from memckpt.protocol.status import MetricsSettings
from memckpt.protocol.storing import Logged, RecordSaved, Saved, SaveRecord
from memckpt.session.connection import AgentConnection, CopyOrder, Notice, PreparedRegions, Reconnection, refusal
from memckpt.session.ranks import Ranks, find_launcher
from memckpt.state import codec
from memckpt.state.records import Timeline
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt")
#: Longest time, in seconds, that an agent may take to end once what it holds is in storage.
_LEAVING_SECONDS = 10.0
#: Longest time, in seconds, from when an agent that dies closes its connections to its end: it may hold much memory.
_DYING_SECONDS = 10.0
#: Time limit on the redo of a record, as a multiple of the limit on an answer.
_RECORD_LIMITS = 10
#: Interval of warnings while training waits for peers.
_PATIENCE_SECONDS = 30.0
#: Most losses of one call that are kept, and seconds from one message with them to the next.
_MOST_LOGGED, _LOGGED_SECONDS = 8, 1.0


class AgentLink:
    """A rank's requests and commits to its agent, over one connection after the other. Not thread-safe.

    Owns the connection, and the thread that sends commits whose copies end later. A dead agent is noticed at the next
    use: each request may raise AgentGoneError.

    Attributes:
        owner: id of the run, which its checkpoints carry; empty before it is known.
        claimed: whether the store says that it is this run's.
        waited_for_redo: seconds that training has waited for the agent's redo.
        waits: whether training waits for acknowledgements of peers.
        reconnection: schedule of connecting again.
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
        # Where training waits for peers, other nodes wait for this one until it is overdue.
        self.reconnection = Reconnection(address, pauses=not self.waits)
        self._timeline: Timeline | None = None
        self._connection: AgentConnection | None = None
        self._sender: threading.Thread | None = None
        self._send_problem: AgentGoneError | None = None

    @property
    def up(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @property
    def connection(self) -> AgentConnection:
        """The connection; there must be one."""
        assert self._connection is not None
        return self._connection

    @property
    def attempt(self) -> int:
        """Number of this attempt; 0 before it is known."""
        return self._timeline.number if self._timeline is not None else 0

    @property
    def agent_pid(self) -> int | None:
        return self._connection.agent_pid if self._connection is not None else None

    # Start

    def connect(self, spec: StateSpec) -> trainer.Inventory:
        """Connect as an attempt begins; returns what the node holds, once an agent that leaves has stored its own.

        An agent that was told to end answers no more while it writes what it holds. One that was told so, or has died,
        after it took the connection is left for another one.
        """
        try:
            inventory = self._introduce(spec, next_record=0, rejoining=False)
        except AgentGoneError:
            serving = self._address.serving()
            if serving is not None and serving.pid == self.agent_pid and not serving.ends(within=_DYING_SECONDS):
                raise
            self.abandon()
            inventory = self._introduce(spec, next_record=0, rejoining=False)
        # An agent that holds something has come later than one that leaves, which then has nothing newer.
        if not any(each.records for each in inventory.held):
            grace = self._storage.grace_seconds if self._storage is not None else 0.0
            self._address.await_leaving(grace + _LEAVING_SECONDS, _log)
        return inventory

    def connect_again(self, spec: StateSpec, before: trainer.Inventory) -> trainer.Inventory:
        """Do what :meth:`connect` does once more, unless the agent that has answered `before` is the node's still."""
        serving = self._address.serving()
        if serving is not None and serving.pid == before.agent_pid:
            return before
        self.abandon()
        return self.connect(spec)

    def reconnect(self, spec: StateSpec, next_record: int) -> None:
        """Connect to another agent in the same attempt, starting it if there is none."""
        assert self._timeline is not None
        self._introduce(spec, next_record, rejoining=True)
        self.configure(self._timeline)

    def _introduce(self, spec: StateSpec, next_record: int, rejoining: bool) -> trainer.Inventory:
        """Connect to the agent, starting it if there is none, and introduce this rank; what the node holds."""
        self._connection = connection = AgentConnection.open(self._address, self._config)
        hello = trainer.Hello(
            version=trainer.PROTOCOL_VERSION,
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
        inventory, fds = connection.request(hello, trainer.Inventory)
        connection.watch_life(fds[0])
        return inventory

    def configure(self, timeline: Timeline) -> None:
        """Send the run's settings and this attempt's timeline."""
        self._timeline = timeline
        agent, storage = self._config, self._storage
        if storage is not None:
            storage = replace(storage, owner=self.owner or None)
        self.send(
            trainer.Configure(
                agent.linger_seconds,
                timeline,
                storage,
                torch.get_num_threads(),
                search_path=user_search_path(),
                claimed=self.claimed,
                metrics=MetricsSettings(agent.metrics_port, agent.metrics_host, agent.metrics_file),
                audit=self._audit,
                arithmetic=trainer.Arithmetic(
                    torch.backends.cpu.get_cpu_capability(),
                    torch.get_float32_matmul_precision(),
                    torch.are_deterministic_algorithms_enabled(),
                    str(torch.get_default_dtype()).removeprefix("torch."),
                ),
            )
        )

    # Generations

    def prepare(
        self,
        spec: StateSpec,
        record: int,
        discard: bool = False,
        reason: str = "",
        whole: bool = False,
    ) -> PreparedRegions:
        """Allocate a generation that begins after `record`, the start of it or (`whole`) all slots.

        Raises:
            MemoryBudgetError: it does not fit.
        """
        assert self._timeline is not None
        threads, budget = self._config.threads, self._config.memory_budget_bytes
        message = trainer.Prepare(spec, self._timeline, threads, budget, discard, record, reason, whole)
        while True:
            regions = self._request_regions(message)
            if (regions.message.begins, regions.message.spec) == (record, spec):
                return regions
            regions.close()  # the answer to a question that was given up

    def resume(self, record: int, timeline: Timeline, before: bool) -> PreparedRegions:
        """Have the agent produce the state after a record; with `before` also that before it."""
        return self._request_regions(trainer.Resume(record, timeline, before))

    def _request_regions(self, message: trainer.Prepare | trainer.Resume) -> PreparedRegions:
        connection = self.connection
        answer, fds = connection.request(message, trainer.Prepared, patient=True)
        connection.applied = max(connection.applied, answer.record - (answer.before is not None))
        return PreparedRegions(answer, Region.open_all(fds))

    def ask_for_generation(
        self, record: int, reason: str, changing: frozenset[str] = frozenset(), at_step_because: str = ""
    ) -> trainer.Begin:
        """Have all local ranks begin a new generation after `record` or later. Returns the order that they all get."""
        connection = self.connection
        order, _ = connection.request(trainer.NeedGeneration(record, reason, changing, at_step_because), trainer.Begin)
        while order.record < record:  # the answer to an earlier question, which another rank's order had met
            connection.notices.append(order)
            order, _ = connection.receive_answer(trainer.Begin)
        return order

    def make_slots(self, generation: int) -> bool:
        """Allocate the slots of a generation whose start is written, once all local ranks ask.

        Returns False if another generation follows. Raises MemoryBudgetError where they do not fit; the start is kept.
        """
        connection, limit = self.connection, self._config.start_seconds
        self.send(trainer.NeedSlots(generation))
        until = time.monotonic() + limit
        while generation not in connection.slots_made:
            if connection.alarmed:
                return False
            received = connection.poll(max(0.0, until - time.monotonic()))
            if received is None:
                # The agent's loop runs, and a rank is not through its record: then both generations are held.
                self.send(trainer.NeedSlots(generation, now=True))
                received = connection.ask_for_life(limit)
            connection.keep_news(*received)
        made = connection.slots_made.pop(generation)
        if made.problem:
            raise MemoryBudgetError(made.problem)
        return not made.dropped

    # Commits

    def notices(self) -> list[Notice]:
        """Notices of the agent since the last call, without waiting."""
        if self._send_problem is not None:
            problem, self._send_problem = self._send_problem, None
            raise problem
        return self._connection.read_notices() if self._connection is not None else []

    def send(self, message: TrainerToAgent) -> None:
        """Send a message that has no answer."""
        self.connection.send(message)

    def send_later(self, make: Callable[[], TrainerToAgent], caller_waits: bool = True) -> None:
        """Make and send a message in a thread, as `make` waits for copies from an accelerator.

        The caller waits until the last one is sent, or the thread does.
        """
        connection = self.connection
        if caller_waits:
            self.finish_sending()
        last = self._sender

        def run() -> None:
            if last is not None:
                last.join()
            try:
                connection.send(make())
            except AgentGoneError as error:
                self._send_problem = error
            except Exception as error:  # raised at the next commit, in the training thread
                _log.exception("memckpt: a commit could not be made")
                self._send_problem = AgentGoneError(f"a commit could not be made: {type(error).__name__}: {error}")

        self._sender = threading.Thread(target=run, name="memckpt-commit", daemon=True)
        self._sender.start()

    def finish_sending(self) -> None:
        """Wait until the last commit has been sent."""
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    def tell_journal(self, event: TrainerEvent) -> None:
        """Tell the run's journal; nothing happens where there is no agent."""
        self.send_if_connected(trainer.Note(event))

    def send_if_connected(self, message: TrainerToAgent) -> None:
        """Send a message that may be lost."""
        if self._connection is not None:
            with contextlib.suppress(AgentGoneError):  # the next commit finds that, and says so
                self._connection.send(message)

    def tell_preempted(self) -> None:
        """Tell the agent that this rank got SIGTERM. Called from a signal handler."""
        if self._connection is not None:
            try:
                self._connection.send(trainer.Preempted())
            except AgentGoneError as error:
                _log.warning("memckpt: the agent cannot be told of the SIGTERM: %s", error)

    @property
    def order(self) -> CopyOrder | None:
        """The order for a copy at a later record; None if there is none."""
        return self._connection.order if self._connection is not None else None

    def take_order(self, record: int) -> CopyOrder | None:
        """The order for a copy after `record` or an earlier one; the caller closes it. None if there is none."""
        order = self.order
        if order is None or order.record > record:
            return None
        self.connection.order = None
        return order

    def save_record(self, record: int, url: str, timeout: float, name: str = "storage") -> None:
        """Have the agent write a record to a store. Raises StorageError if that fails, or is not done in time."""
        connection = self.connection
        self.send(SaveRecord(record, url))
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            received = connection.channel.poll(left)
            if received is None:
                break
            saved, _ = received
            if isinstance(saved, RecordSaved):
                if saved.problem:
                    raise StorageError(f"what is held in memory does not get to {name}: {saved.problem}")
                return
            connection.keep_news(*received)
        raise StorageError(f"what is held in memory has not got to {name} within {timeout:.0f} s")

    # Waits before a slot is used again

    def wait_for_room(self, record: int, spec: StateSpec, began: int) -> float:
        """Wait until the slot of `record` is free, in a generation that `began` after that record; returns the seconds.

        With eager redo the agent must have applied the former record of the slot. Where training waits for peers, every
        node must be able to produce the newest record that is acknowledged for all of them. A replica also needs that
        record's by-value tensors, which lie in its slot; a replica that trails needs those of the record before. While
        a state is captured, only the capture before it is whole.
        """
        started = time.perf_counter()
        if self.waits and spec.mode == "snapshot":
            if record % spec.every == 0:
                self.wait_for_watermark(max(record - spec.every, began))
        elif self.waits:
            standing = 1 + spec.trails if spec.mode == "eager" else 0
            self.wait_for_watermark(record - spec.slots + standing)
        if spec.mode == "eager":
            waited = time.perf_counter()
            self.wait_applied(record - spec.slots)
            self.waited_for_redo += time.perf_counter() - waited
        return time.perf_counter() - started

    def wait_for_watermark(self, record: int) -> None:
        """Wait until peers have acknowledged `record` for every node, or waits are suspended; log warnings."""
        connection, waited = self.connection, 0
        while connection.watermark < record and not connection.waits_suspended:
            if connection.alarmed:
                return
            received = connection.poll(_PATIENCE_SECONDS)
            if received is not None:
                connection.keep_news(*received)
                continue
            waited += 1
            _log.warning(
                "memckpt: training waits for peers since %.0f s: record %d is to be acknowledged for every node, %d "
                "is; see `memckpt status`",
                waited * _PATIENCE_SECONDS,
                record,
                connection.watermark,
            )
            connection.keep_news(*connection.ask_for_life(self._config.start_seconds))

    def wait_applied(self, record: int) -> None:
        """Wait until the replica has applied `record`; returns early after an alarm.

        Raises AgentGoneError also where the agent applies no record for ten time limits.
        """
        connection = self.connection
        limit, applied = _RECORD_LIMITS * self._config.start_seconds, connection.applied
        until = time.monotonic() + limit
        while connection.applied < record:
            if connection.alarmed:
                return
            if connection.applied > applied:
                applied, until = connection.applied, time.monotonic() + limit
            if time.monotonic() >= until:
                raise AgentGoneError(f"it answers, and has applied no record for {limit:g} s")
            connection.keep_news(*connection.receive())

    # Peers

    def listen(self, message: Listen) -> Listening:
        """Have the node listen for its peers. Returns the records of theirs that it keeps."""
        answer, _ = self.connection.request(message, Listening)
        return answer

    def open_phases(self) -> tuple[PhasesPage, int]:
        """Page on which this rank marks the phases of its steps, which the caller closes, and its index there."""
        answer, fds = self.connection.request(AskPhases(), PhasesAre)
        return PhasesPage.open(fds[0]), answer.position

    def recover(self, message: Recover, progress: Callable[[RecoveryProgress], None]) -> Recovered:
        """Have the agent fetch states that this node lacks, and serve those that others lack, without a time limit."""
        connection, waited = self.connection, 0
        connection.send(message)
        while True:
            received = connection.poll(_PATIENCE_SECONDS)
            if received is None:
                waited += 1
                _log.warning(
                    "memckpt: the agent (pid %d) fetches from peers, and has said nothing for %.0f s; see its log",
                    connection.agent_pid,
                    waited * _PATIENCE_SECONDS,
                )
                continue
            waited = 0
            match received[0]:
                case RecoveryProgress() as news:
                    progress(news)
                case Recovered() as answer:
                    return answer
                case trainer.Refused() as answer:
                    raise refusal(answer)
                case _:
                    connection.keep_news(*received)

    # End

    def abandon(self, dismiss: bool = False) -> None:
        """Close the connection without a goodbye; with `dismiss`, an agent that was started for it leaves at once.

        A commit that is being sent is lost with it, and so is what the next one would say of that.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not dismiss:
            connection.channel.shut_down()  # wakes the thread that sends
        self.finish_sending()
        self._send_problem = None
        connection.close(dismiss)

    def close(self, finished: bool) -> list[Saved | Logged]:
        """Say goodbye; with `finished` wait until the agent has written the final step to storage and leaves.

        Returns what it has said meanwhile of writes to storage.
        """
        self.reconnection.close()
        connection, self._connection = self._connection, None
        if connection is None or connection.channel.fileno() < 0:
            return []
        if finished and self._storage is not None and self._ranks.leads:
            _log.info("memckpt: the final step is being brought to storage")
        try:
            connection.say_goodbye(finished, self._storage.timeout_seconds if self._storage is not None else 0.0)
        finally:
            connection.close()
        return [notice for notice in connection.notices if isinstance(notice, (Saved, Logged))]


class LoggedValues:
    """The newest losses and the learning rate, which `send` gets once a second. Waits for no device."""

    def __init__(self, send: Callable[[trainer.TrainingFigures], None]) -> None:
        self._send, self._due = send, 0.0
        self._values: dict[str, float] = {}

    def note_losses(self, values: Mapping[str, Any]) -> None:
        """Note losses and ``lr`` among values; what is on a device is left out."""
        for name in [one for one in values if "loss" in str(one) or one == "lr"][:_MOST_LOGGED]:
            value = values[name]
            if isinstance(value, torch.Tensor) and value.numel() == 1 and codec.on_host(value):
                value = value.item()
            if isinstance(value, Real) and math.isfinite(value):
                self._values[str(name)] = float(value)

    def send_if_due(self, optimizers: Sequence[Optimizer]) -> None:
        """Send what there is, with the rate of the first group, if it is time."""
        if (now := time.monotonic()) >= self._due:
            self._due = now + _LOGGED_SECONDS
            self.note_losses(optimizers[0].param_groups[0])
            self._send(trainer.TrainingFigures(self._values))
            self._values = {}
