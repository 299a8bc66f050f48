"""The agent: one process per node and run that outlives trainers and holds base and log. One thread owns it all."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import msgspec

from memckpt.agent.auditing import Auditing
from memckpt.agent.connections import Connection, Connections
from memckpt.agent.fencing import Gate
from memckpt.agent.lifetime import Lifetime
from memckpt.agent.metrics import Metrics, describe, measure
from memckpt.agent.observer import Observer
from memckpt.agent.replication.peer_tier import Peers
from memckpt.agent.unit import Unit
from memckpt.agent.units import Units
from memckpt.errors import AgentError, MemckptError, RunBusyError
from memckpt.journal.events import AnyEvent
from memckpt.memory.generation import Generation
from memckpt.memory.pages import LifePage, look_seconds
from memckpt.memory.redo_news import CopyReserved, MemoryReserved, RedoNews, ReplicaCopied
from memckpt.processes.address import AgentAddress, peer
from memckpt.processes.attempt import Attempt, TrainerHandle
from memckpt.processes.control import relieve
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.helper_process import WriterProcess
from memckpt.processes.launch import extend_search_path
from memckpt.protocol import trainer as said
from memckpt.protocol.channel import AgentToTrainer, TrainerToAgent
from memckpt.protocol.descriptors import raise_limit
from memckpt.protocol.replication import AskPhases, Join, Listen, Recover, ReplicatorLost, WatermarkAdvanced
from memckpt.protocol.status import MetricsSettings, Status, StatusRequest, StopRequest
from memckpt.protocol.storing import RankPartCopied, RecordSaved, Saved, SaveFailed, SaveRecord, SaveTo, WriterToAgent
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.agent")
#: How many records ahead all ranks are told to copy their state for an export.
_SAVE_AHEAD = 4


class Agent:
    """Serves one run on one node until it is told to leave.

    `by_operator`: it was started beside the job: it waits for the first trainer, and keeps its own `linger_seconds`.
    `stopping` is called right before it stops to answer. `metrics`: where they are shown, against what trainers say.
    """

    def __init__(
        self,
        address: AgentAddress,
        linger_seconds: float,
        by_operator: bool = False,
        stopping: Callable[[], None] = lambda: None,
        metrics: MetricsSettings | None = None,
    ) -> None:
        self._stopping: Callable[[], None] | None = stopping
        self._address = address
        #: The page in which the loop shows that it lives.
        self._life = LifePage.create()
        self._loop = EventLoop(self._life)
        self._connections = Connections(address, self._loop, self._handle, self._trainer_left)
        self._attempt: Attempt | None = None
        self._past_nonces: set[str] = set()
        self._observer = Observer(address, by_operator, self._status, self._loop.clock)
        self._metrics = Metrics(address, metrics, self._loop.post, lambda: measure(self._status(), self._observer))
        self._liveness_seconds = 15.0
        self._units = Units(address.node, self)
        self._lifetime = Lifetime(self._units, self, linger_seconds, by_operator, self._loop.clock)
        self._peers = Peers(self._loop, self._units, self._peers_changed)
        self._auditing = Auditing(self._loop, self._handle_news)
        #: In front of the attempt that is about to begin, while trainers of the present one are dying.
        self._gate = Gate(self._loop, self._connections, self._observer, self._lifetime, self._held_bytes)
        self._loop.each_turn(self._units.look_at_clock, self._units.deadline)
        self._loop.each_turn(self._tell_replicator, lambda: None)
        self._loop.each_turn(self._lifetime.look_at_clock, self._lifetime.deadline)
        self._loop.each_turn(self._observer.look_at_clock, self._observer.deadline)

    def start_writer(
        self,
        kind: Literal["checkpoint", "record"],
        received: Callable[[WriterToAgent], None],
        ended: Callable[[str], None],
    ) -> WriterProcess:
        return WriterProcess(f"memckpt.agent.saving.writer.{kind}_writer", self._loop, received, ended)

    # Life

    def listen(self) -> None:
        """Begin to answer. The caller holds the address's starting lock."""
        dead = self._address.serving()  # one that leaves takes its name away
        self._connections.listen()
        self._observer.started(None if dead is None else dead.pid)
        self._metrics.configure()

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until told to leave; `ready` is called first, and ends it by raising."""
        _log.info("serving %s as node %s, pid %d", self._address.run_dir, self._address.node, os.getpid())
        try:
            ready()
            while self._lifetime.over is None:
                self._loop.turn()
        finally:
            _log.info("leaving: %s", self._lifetime.over or "error")
            self._close()

    def leave_run(self, reason: str) -> None:
        """End :meth:`run` as soon as what is held is in storage; safe to call from a signal handler."""
        self._loop.post(partial(self._stop, reason))

    def _stop(self, reason: str) -> None:
        self._read_commits()
        self._units.preempt(ending=True)
        self._stop_answering()
        self._gate.turn_away()
        self._tell_trainers(said.Leaving())
        self._peers.leave_node()  # trainers start another agent, which listens where this one does
        # Last, as a replica may have to go forward first, which takes its time.
        self._lifetime.end_when_saved(reason, ordered=True)

    def _save_to(self, connection: Connection, url: str) -> None:
        training = self._attempt if self._lifetime.idle_since is None else None
        ahead = training.newest_record + _SAVE_AHEAD if training is not None else 0
        self._units.save_to(url, partial(self._connections.answer, connection), training is not None, ahead)

    def checkpoint_failed(self) -> None:
        if self._lifetime.checkpoint_failed():
            self._tell_trainers(said.HoldingOn(self._units.alarm, self._lifetime.linger_seconds))

    def _stop_answering(self) -> None:
        """Answer no more: from here on a trainer that looks for an agent starts another one."""
        stopping, self._stopping = self._stopping, None
        if stopping is not None:
            stopping()
        self._connections.stop_listening()

    def _close(self) -> None:
        self._stop_answering()
        self._gate.close()
        if self._lifetime.finishing:
            self._peers.finish()
        self._peers.close()
        self._auditing.close()
        farewell = said.Leaving(last=True, unsaved=self._lifetime.unsaved)
        # State goes first, so that a trainer which sees the connection end knows that nothing is left.
        self._units.close()
        self._connections.close(farewell)
        self._metrics.close()
        self._observer.close(self._lifetime.over or "an error, which its log has")
        self._life.close()
        self._loop.close()

    # Trainers

    def _trainer_left(self, connection: Connection) -> None:
        assert connection.trainer is not None
        if self._attempt is not None and self._attempt.nonce == connection.nonce:
            connection.trainer.left, connection.trainer.left_at = True, self._loop.clock()
            self._units.make_slots(self._attempt)
            last = not self._attempt.living()
            self._observer.trainer_left(connection.trainer, last)
            if last:
                self._auditing.close()  # nothing comes any more, and its imports take memory
            if last and not self._gate.shut:
                self._lifetime.trainers_left()

    def _held_bytes(self) -> int:
        return sum(one.nbytes for one in self._units)

    def _tell_replicator(self) -> None:
        """Tell what memory is held; if a trainer goes on without us, others need not wait for this node."""
        self._peers.replicator.tell_own(self._held_bytes())
        if self._attempt is None or self._gate.shut:
            return
        for trainer in self._attempt.deserters(self._loop.clock() - self._liveness_seconds):
            trainer.left_at = math.inf  # told once
            _log.warning("rank %d goes on without protection: peers do not wait for this node", trainer.rank)
            self._peers.tell_deserted()

    @property
    def _trainers(self) -> Iterator[Connection]:
        return self._connections.of_attempt(self._attempt.nonce if self._attempt is not None else "")

    def _read_commits(self) -> None:
        """Take what trainers have sent so far, before anything else is decided: it counts, whether they live or not."""
        for connection in self._trainers:
            self._connections.read(connection)

    def _tell_trainers(self, message: AgentToTrainer) -> None:
        for connection in self._trainers:
            self._connections.answer(connection, message)

    def tell_ranks(
        self, ranks: RankGroup, message: AgentToTrainer, *, besides: int | None = None, fd: int | None = None
    ) -> None:
        self._observer.told(ranks, message)
        for connection in self._trainers:
            trainer = connection.trainer
            if trainer is not None and trainer.unit == ranks and trainer.rank != besides:
                self._connections.answer(connection, message, [fd] if fd is not None else None)

    # Peers

    def _peers_changed(self, message: WatermarkAdvanced | ReplicatorLost) -> None:
        for unit in self._units:
            self._raise_redo_limit(unit)  # which may have waited for its answer
        self._tell_trainers(message)

    def _raise_redo_limit(self, unit: Unit) -> None:
        unit.generations.raise_redo_limit(self._peers.redo_limit(unit))

    def bytes_for_peers(self) -> int:
        return self._peers.replicator.kept_bytes

    def has_lost_file(self) -> bool:
        return self._address.was_removed()

    def note_event(self, event: AnyEvent) -> None:
        self._observer.note_event(event)

    # From redo threads, and from the auditor

    def notify(self, ranks: RankGroup, message: RedoNews) -> None:
        self._loop.post(partial(self._handle_news, ranks, message))

    def _handle_news(self, ranks: RankGroup, message: RedoNews | said.Cleared) -> None:
        unit = self._units.get(ranks)
        if unit is None:
            return  # it was dropped meanwhile
        match message:
            case MemoryReserved():
                unit.memory_reserved(message.generation)
                return
            case CopyReserved():
                unit.saver.state_copies.reserved(message.order)
                return
            case ReplicaCopied():
                unit.saver.state_copies.copied(message)
                return
        if isinstance(message, said.Drift):
            _log.info("drift of %g ulp at record %d in %s", message.max_ulp, message.record, message.tensor)
            trainers = self._attempt.trainers.values() if self._attempt is not None else ()
            # An accelerator rounds otherwise than redo here.
            rounds_alike = not any(trainer.accelerated for trainer in trainers if trainer.unit == ranks)
            message = unit.generations.drifted(message, exact=message.sure or rounds_alike)
        if isinstance(message, said.Alarm):
            _log.error("%s", message.reason)
            unit.generations.drop_all()
        self.tell_ranks(ranks, message)

    # Messages

    def _handle(self, connection: Connection, message: TrainerToAgent) -> None:
        match message:
            case said.Hello():
                self._hello(connection, message)
                return
            case StatusRequest():
                self._connections.answer(connection, self._status())
                return
            case SaveTo():
                self._save_to(connection, message.url)
                return
            case StopRequest():
                reason = f"stopped by pid {connection.process.pid}"
                if not message.save:
                    self._lifetime.over = reason
                elif self._lifetime.idle_since is None:
                    self._stop(reason)  # its trainers have the state, and bring it to the next agent
                else:
                    self._lifetime.stop_when_saved(reason)
                return
        trainer = connection.trainer
        if trainer is None or self._attempt is None or connection.nonce != self._attempt.nonce:
            pid = connection.process.pid
            _log.info("ignored %s from pid %d: not of the current attempt", type(message).__name__, pid)
            return
        self._observer.heard(trainer, self._attempt, message)
        self._handle_trainer(connection, trainer, self._attempt, message)

    def _hello(self, connection: Connection, hello: said.Hello) -> None:
        if hello.version != said.PROTOCOL_VERSION:
            raise AgentError(
                f"expected protocol {said.PROTOCOL_VERSION}, found {hello.version}: trainer and agent differ in "
                "version; stop the agent (memckpt stop) and start again"
            )
        if not self._connections.listening:
            self._connections.turn_away(connection)  # it came before the end was known
            return
        if hello.nonce in self._past_nonces:
            raise RunBusyError("this attempt was superseded by a later one")
        if self._attempt is None or self._attempt.nonce != hello.nonce:
            if not self._gate.lets_in(connection, hello, self._attempt):
                return  # handled again once they are dead
            self._new_attempt(hello)
        assert self._attempt is not None
        connection.nonce = hello.nonce
        rank, unit, launcher = hello.rank, hello.unit, hello.launcher
        connection.trainer = self._attempt.trainers[rank] = TrainerHandle(
            rank, unit, connection.process, launcher, hello.next_record, hello.accelerated
        )
        self._lifetime.trainer_came()
        self._units.introduce(hello)
        self._peers.replicator.fingerprints[rank] = hello.fingerprint
        held = () if hello.rejoining else self._units.inventory(hello)  # one that is back asks for nothing
        self._liveness_seconds = hello.liveness_seconds
        self._loop.beat_seconds = look_seconds(hello.liveness_seconds)
        inventory = said.Inventory(held, os.getpid(), self._observer.latest_attempt)
        self._connections.answer(connection, inventory, [self._life.fd])
        if hello.rejoining and len(hello.unit) > 1 and set(hello.unit) <= set(self._attempt.trainers):
            # The others may be one record ahead of this one, never two: it has not entered the next backward yet.
            self.tell_ranks(hello.unit, said.Begin(hello.next_record + 1, "a new agent took over"))

    def _new_attempt(self, hello: said.Hello) -> None:
        if self._attempt is not None:
            self._read_commits()
            for old in self._trainers:
                self._connections.drop(old)
            for trainer in self._attempt.trainers.values():
                trainer.process.close()
            self._past_nonces.add(self._attempt.nonce)
        self._lifetime.begin_attempt(first=self._attempt is None)
        self._observer.figures.check = ""
        self._peers.begin_attempt()
        for unit in self._units:
            self._auditing.drop_unit(unit.ranks)
        self._units.begin_attempt()
        self._attempt = Attempt(hello.nonce, hello.world_size, hello.local_ranks)

    def _handle_trainer(
        self, connection: Connection, trainer: TrainerHandle, attempt: Attempt, message: TrainerToAgent
    ) -> None:
        """Do what a trainer asks for. AgentError: it breaks the protocol. It goes on after other MemckptErrors."""
        unit = self._units[trainer.unit]
        match message:
            case said.Prepare():
                self._auditing.drop_unit(trainer.unit)  # its memory is about to be let go of
                if message.discard and attempt.is_first_to_discard(trainer):
                    self._units.discard(attempt)
                generation = unit.prepare(trainer.rank, message)
                prepared = said.Prepared(generation.number, generation.spec, begins=message.record)
                unit.when_reserved(generation, partial(self._send_regions, connection, prepared, generation))
            case said.Observed():
                unit.saver.schedule.observe(message)
            case said.NeedSlots():
                unit.want_slots(trainer.rank, message)
                self._units.make_slots(attempt, now=trainer.unit if message.now else ())
            case said.Resume():
                generation, prepared = unit.resume(message)
                prepared = msgspec.structs.replace(prepared, drift=generation.drift)
                unit.when_reserved(generation, partial(self._send_regions, connection, prepared, generation))
                if generation.drift is not None:
                    self._connections.answer(connection, generation.drift)  # nothing may have been done about it yet
            case said.Checked():
                level = logging.WARNING if message.verdict == "different" else logging.INFO
                _log.log(level, "resume check: %s", message.line)
            case said.Note() | said.TrainingFigures():
                pass  # the observer has heard it
            case SaveRecord():
                self._save_record(connection, message)
            case said.Configure():
                if not self._lifetime.by_operator:
                    self._lifetime.linger_seconds = message.linger_seconds
                self._metrics.configure(message.metrics)
                self._auditing.configure(message)
                extend_search_path(message.search_path)
                self._units.configure(trainer.unit, message, self._connections.address.run_dir)
            case said.GenerationCommit():
                trainer.next_record = message.record + 1
                unit.generation_committed(trainer.rank, message)
                self._committed(unit, trainer, attempt)
            case said.Commit():
                trainer.next_record = message.record + 1
                unit.commit(trainer.rank, message, attempt)
                self._committed(unit, trainer, attempt)
            case Listen():
                self._connections.answer(connection, self._peers.replicator.listen(message))
            case Join():
                self._peers.join(message)
                for each in self._units:
                    self._raise_redo_limit(each)
            case AskPhases():
                ranks = attempt.local_ranks
                phases, fd = self._peers.phases(ranks.index(trainer.rank), len(ranks))
                self._connections.answer(connection, phases, [fd])
            case Recover():
                self._peers.recover(message, partial(self._connections.answer, connection))
            case RankPartCopied():
                unit.saver.state_copies.add_part(trainer.rank, message)
            case said.Void():
                _log.warning("rank %d could not stage record %d: %s", trainer.rank, message.record, message.reason)
                trainer.next_record = message.record + 1
                self._units.make_slots(attempt)
            case said.NeedGeneration():
                self._order_generation(unit, message, connection)
            case said.Preempted():
                stored = self._units.preempt()
                what = "what is held goes to storage now" if stored else "without storage, what is held stays in memory"
                _log.warning("rank %d got SIGTERM: %s", trainer.rank, what)
            case said.Goodbye():
                trainer.finished = message.finished
                if attempt.all_finished:
                    # Its connection ends when everything is gone.
                    self._lifetime.end_when_saved("training finished", finishing=True)
                else:
                    self._connections.answer(connection, said.OthersStay())
                    self._connections.drop(connection)
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from a trainer")

    def _committed(self, unit: Unit, trainer: TrainerHandle, attempt: Attempt) -> None:
        """Have audits, peers and ranks that wait for slots go on with what a unit has committed."""
        self._auditing.committed(unit, trainer.accelerated)
        self._peers.sync(unit)
        self._raise_redo_limit(unit)
        self._units.make_slots(attempt)

    def _order_generation(self, unit: Unit, message: said.NeedGeneration, asker: Connection) -> None:
        assert asker.trainer is not None
        order = unit.order_generation(message, asker.trainer.rank)
        # The asker last: once it has its answer, the order lies in every other rank's socket, and none of them can
        # pass the record without a backward that needs the asker.
        self._connections.answer(asker, order)

    def _send_regions(
        self, connection: Connection, message: said.Prepared, generation: Generation, error: MemckptError | None
    ) -> None:
        if error is not None:
            self._connections.refuse(connection, error)
            return
        prepared = msgspec.structs.replace(message, whole=generation.regions.whole)
        self._connections.answer(connection, prepared, [region.fd for region in generation.regions])

    def _save_record(self, connection: Connection, message: SaveRecord) -> None:
        def answer(saved: Saved | SaveFailed) -> None:
            problem = saved.reason if isinstance(saved, SaveFailed) else ""
            self._connections.answer(connection, RecordSaved(message.record, problem))

        self._units.save_record(message.record, message.url, answer)

    def _status(self) -> Status:
        trainers = self._attempt.living() if self._attempt is not None else []
        units = sorted(self._units, key=lambda one: one.ranks)
        return describe(
            self._connections.address,
            trainers,
            units,
            self._lifetime,
            self._observer,
            self._peers.status,
            self._metrics.state,
            self._auditing.status,
        )


def serve(
    address: AgentAddress,
    linger_seconds: float,
    ready: Callable[[], None],
    by_operator: bool = False,
    stopping: Callable[[], None] = lambda: None,
    metrics: MetricsSettings | None = None,
) -> None:
    """Run an :class:`Agent` until it is told to leave; `ready`: called once it answers. Raises RunBusyError."""
    raise_limit()
    agent = Agent(address, linger_seconds, by_operator, stopping, metrics)
    if by_operator:
        relieve(address)
    with address.starting():
        other = address.connect()
        if other is not None:
            pid = peer(other)[0]
            other.close()
            raise RunBusyError(f"an agent already serves {address.run_dir} on node {address.node} (pid {pid})")
        address.say_if_copied(_log)
        agent.listen()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: agent.leave_run(f"signal {signal.Signals(received).name}"))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    agent.run(ready)
