"""The messages of trainers that belong to the running attempt, and what the agent does with each."""

from __future__ import annotations

import logging

import msgspec

from memckpt.agent.auditing import Auditing
from memckpt.agent.connections import Connection, Connections
from memckpt.agent.group import Group
from memckpt.agent.group_host import Host
from memckpt.agent.groups import Groups
from memckpt.agent.lifetime import Lifetime
from memckpt.agent.replication.peer_tier import Peers
from memckpt.agent.status import Figures
from memckpt.errors import AgentError
from memckpt.journal.events import Advised
from memckpt.memory.generation import Generation
from memckpt.processes.attempt import Attempt, TrainerHandle
from memckpt.protocol.messages import TrainerToAgent
from memckpt.protocol.peer_job import AskPhases, Join, Listen
from memckpt.protocol.recovery import Recover
from memckpt.protocol.storing import RecordSaved, Saved, SaveFailed, SaveRecord, SnapshotTaken
from memckpt.protocol.trainer import (
    Advance,
    Checked,
    Commit,
    Configure,
    GenerationCommit,
    Goodbye,
    NeedGeneration,
    NeedSlots,
    Note,
    Observed,
    OthersStay,
    Preempted,
    Prepare,
    Prepared,
    Resume,
    Void,
)
from memckpt.state.search_path import extend_search_path

_log = logging.getLogger("memckpt.agent")


class TrainerMessages:
    """Belongs to the agent's event loop; owns nothing."""

    def __init__(
        self,
        host: Host,
        connections: Connections,
        groups: Groups,
        peers: Peers,
        lifetime: Lifetime,
        figures: Figures,
        auditing: Auditing,
    ) -> None:
        self._host = host
        self._connections = connections
        self._groups = groups
        self._peers = peers
        self._lifetime = lifetime
        self._figures = figures
        self._auditing = auditing

    def handle(self, connection: Connection, trainer: TrainerHandle, attempt: Attempt, message: TrainerToAgent) -> None:
        """Do what a trainer asks for.

        Raises:
            AgentError: it breaks the protocol.
            MemckptError: it cannot be done; the trainer is told, and goes on.
        """
        group = self._groups[trainer.unit]
        match message:
            case Prepare():
                self._auditing.drop_group(trainer.unit)  # its memory is about to be let go of
                if message.discard:
                    self._groups.discard(attempt)
                generation = group.prepare(trainer.rank, message)
                prepared = Prepared(generation.number, generation.spec, whole=generation.whole, begins=message.record)
                self._send_regions(connection, prepared, generation)
            case Observed():
                group.saver.observe(message)
            case NeedSlots():
                group.want_slots(trainer.rank, message)
                self._groups.make_slots(attempt, now=trainer.unit if message.now else ())
            case Resume():
                generation, prepared = group.resume(message)
                prepared = msgspec.structs.replace(prepared, drift=generation.drift)
                self._send_regions(connection, prepared, generation)
                if generation.drift is not None:
                    self._connections.answer(connection, generation.drift)  # nothing may have been done about it yet
            case Advance():
                self._advance(group, trainer, message)
            case Checked():
                self._figures.check = message.line
                level = logging.WARNING if message.verdict == "different" else logging.INFO
                _log.log(level, "resume check: %s", message.line)
            case Note():
                self._host.note_event(message.event)
                if isinstance(message.event, Advised):
                    self._figures.note_advice(message.event)
            case SaveRecord():
                self._save_record(connection, message)
            case Configure():
                if not self._lifetime.by_operator:
                    self._lifetime.linger_seconds = message.linger_seconds
                self._host.show_metrics(message.metrics)
                self._auditing.configure(message)
                extend_search_path(message.search_path)
                self._groups.configure(trainer.unit, message, self._connections.address.run_dir)
            case GenerationCommit():
                trainer.next_record = message.record + 1
                self._figures.committed()
                group.generation_committed(trainer.rank, message)
                self._auditing.committed(group, trainer.accelerated)
                self._hand_to_peers(group)
                self._groups.make_slots(attempt)
            case Commit():
                trainer.next_record = message.record + 1
                self._figures.committed()
                self._figures.note_stall(message)
                group.commit(trainer.rank, message, attempt)
                self._auditing.committed(group, trainer.accelerated)
                self._hand_to_peers(group)
                self._groups.make_slots(attempt)
            case Listen():
                self._connections.answer(connection, self._peers.listen(message))
            case Join():
                self._peers.join(message)
                for each in self._groups:
                    each.generations.raise_redo_limit(self._peers.redo_limit(each))
            case AskPhases():
                ranks = attempt.local_ranks
                answer, fd = self._peers.phases(ranks.index(trainer.rank), len(ranks))
                self._connections.answer(connection, answer, [fd])
            case Recover():
                self._peers.recover(message, lambda answer: self._connections.answer(connection, answer))
            case SnapshotTaken():
                group.saver.snapshots.taken(trainer.rank, message)
            case Void():
                _log.warning("rank %d could not stage record %d: %s", trainer.rank, message.record, message.reason)
                trainer.next_record = message.record + 1
                self._groups.make_slots(attempt)
            case NeedGeneration():
                self._order_generation(group, message, connection)
            case Preempted():
                if self._groups.preempt():
                    _log.warning("rank %d got SIGTERM: what is held goes to storage now", trainer.rank)
                else:
                    _log.warning(
                        "rank %d got SIGTERM: without storage, what is held stays in memory only", trainer.rank
                    )
            case Goodbye():
                trainer.finished = message.finished
                if attempt.all_finished:
                    # Its connection ends when everything is gone.
                    self._lifetime.end_when_saved("training finished", finishing=True)
                else:
                    self._connections.answer(connection, OthersStay())
                    self._connections.drop(connection)
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from a trainer")

    def _hand_to_peers(self, group: Group) -> None:
        """Something of a group is whole: peers get it, and say up to where it may be redone."""
        self._peers.sync(group)
        group.generations.raise_redo_limit(self._peers.redo_limit(group))

    def _advance(self, group: Group, trainer: TrainerHandle, message: Advance) -> None:
        """All of its ranks get the answer at once: until then one of them may still read the state before."""
        answer = group.advance(trainer.rank, message)
        if answer is not None:
            self._host.tell_ranks(trainer.unit, answer)

    def _order_generation(self, group: Group, message: NeedGeneration, asker: Connection) -> None:
        assert asker.trainer is not None
        order = group.order_generation(message, asker.trainer.rank)
        # The asker last: once it has its answer, the order lies in every other rank's socket, and none of them can
        # pass the record without a backward that needs the asker.
        self._connections.answer(asker, order)

    def _send_regions(self, connection: Connection, message: Prepared, generation: Generation) -> None:
        self._connections.answer(connection, message, [region.fd for region in generation.regions])

    def _save_record(self, connection: Connection, message: SaveRecord) -> None:
        def answer(saved: Saved | SaveFailed) -> None:
            problem = saved.reason if isinstance(saved, SaveFailed) else ""
            self._connections.answer(connection, RecordSaved(message.record, problem))

        self._groups.save_record(message.record, message.url, answer)
