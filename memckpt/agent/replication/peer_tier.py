"""The agent's part in the peers tier: what it has its replicator send, and the states it has it fetch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from memckpt.agent.group import Group
from memckpt.agent.replication.handing_out import OwnRecords, by_value, hand_out, stand_still
from memckpt.agent.replication.own_replicator import OwnReplicator
from memckpt.agent.replication.recovery import Recovery
from memckpt.agent.saving.snapshots import Snapshot
from memckpt.errors import AgentError
from memckpt.memory.phases import PhasesPage
from memckpt.processes.event_loop import EventLoop
from memckpt.protocol.messages import ReplicatorToAgent
from memckpt.protocol.peer_job import Join, Listen, Listening, PeerJob, PhasesAre
from memckpt.protocol.recovery import BadSourceSeen, Described, Filled, Recover, Recovered, RecoveryProgress
from memckpt.protocol.replication import CopyState, Deserted, GivenUp, GiveUp, StateNotCopied, WatermarkAdvanced
from memckpt.protocol.status import PeersReport, PeersStatus
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.agent")
#: Seconds without a report after which the replicator stands still; it reports every second.
_QUIET_SECONDS = 5.0


class Peers:
    """Belongs to the agent's event loop. Owns the replicator.

    Args:
        loop: the agent's.
        group: the group of ranks that share shards, or None.
        adopt: makes a group for ranks that are not here.
        watermark_advanced: called when the watermark has got further.
        lost: called with the reason when there is no replicator for a while, or for the rest of the attempt.

    Attributes:
        watermark: the newest record that is acknowledged for every node of the job; None: no peers take part.
    """

    def __init__(
        self,
        loop: EventLoop,
        group: Callable[[RankGroup], Group | None],
        adopt: Callable[[RankGroup], Group],
        watermark_advanced: Callable[[WatermarkAdvanced], None],
        lost: Callable[[str], None],
    ) -> None:
        self._clock = loop.clock
        self._group = group
        self._adopt = adopt
        self._tell_watermark = watermark_advanced
        self._told_lost = lost
        self._replicator = OwnReplicator(loop, self)
        self._job: PeerJob | None = None
        self._recovery: Recovery | None = None
        self._recoveries = 0
        self._records = OwnRecords()
        #: Names of generations whose virtual records the replicator does not read any more.
        self._given_up: set[str] = set()
        self._report: PeersStatus | None = None
        #: When the replicator last reported in this attempt.
        self._reported: float | None = None
        self._phases: PhasesPage | None = None
        self._newest = WatermarkAdvanced(0, False)
        self.watermark: int | None = None

    def finish(self) -> None:
        """Have peers get what they still wait for: training has ended as it should."""
        if self._job is not None:
            self._replicator.drain()

    def close(self) -> None:
        self._give_up_recovery("the agent leaves")
        self._job = self.watermark = None
        self._records.clear()
        self._replicator.close()
        self._close_phases()

    def _close_phases(self) -> None:
        phases, self._phases = self._phases, None
        if phases is not None:
            phases.close()

    def tell_own(self, nbytes: int) -> None:
        """Tell the replicator what memory base and log of this node's own ranks take, in bytes."""
        self._replicator.tell_own(nbytes)

    @property
    def kept_bytes(self) -> int:
        """Memory of the fragments that the replicator keeps for other nodes, in bytes."""
        return self._replicator.kept_bytes

    @property
    def status(self) -> PeersStatus | None:
        """The replicator's last report; if it is old, the replicator stands still, and nothing is protected."""
        if self._job is None or self._report is None or self._reported is None:
            return None
        if self._replicator.process is None:
            problem = self._replicator.problem
            return msgspec.structs.replace(
                self._report, protected=False, problem=problem, held_bytes=self.kept_bytes, links=()
            )
        quiet = self._clock() - self._reported
        if quiet < _QUIET_SECONDS:
            return self._report
        return msgspec.structs.replace(
            self._report, protected=False, problem=f"the replicator of this node has said nothing for {quiet:.0f} s"
        )

    def tell_deserted(self) -> None:
        """Have nobody wait for records of this node: a trainer goes on without its agent."""
        if self._job is not None:
            self._replicator.send(Deserted())

    def introduce(self, rank: int, fingerprint: tuple[str, ...]) -> None:
        """Note a rank of the attempt, and what its model consists of."""
        self._replicator.fingerprints[rank] = fingerprint

    def begin_attempt(self) -> None:
        """The trainers of the last attempt are dead."""
        self._give_up_recovery("its attempt is over")
        self._replicator.begin_attempt()
        self._reported = self._job = self.watermark = None
        self._records.clear()
        self._given_up.clear()
        self._newest = WatermarkAdvanced(0, False)
        self._close_phases()

    # Start of an attempt

    def listen(self, message: Listen) -> Listening:
        """Have the replicator listen; returns where, and what is kept of others' records.

        Raises:
            AgentError: the replicator does not come up.
        """
        return self._replicator.listen(message)

    def join(self, message: Join) -> None:
        """Take part in the attempt, for which the plan is made.

        Raises:
            PeerError: the replicator is gone, and there is no other one where peers look for it.
        """
        gone = self._replicator.process is None or self._replicator.told is None
        if message.rejoin and (gone or self._job is not None):
            return
        self._replicator.check()
        self._give_up_recovery("the plan is made once more")
        self._take_part(message)

    def _take_part(self, message: Join) -> None:
        self._job = message.job
        self._replicator.planned = True
        if self.watermark is None:
            self.watermark = message.job.record or 0
        self._records.clear()
        self._replicator.send(message)

    def phases(self, position: int, ranks: int) -> tuple[PhasesAre, int]:
        """Where a rank of this node marks its phases: the answer, and the descriptor that goes with it.

        Args:
            position: position of the rank among those of the node.
            ranks: number of the node's ranks.
        """
        if self._phases is None:
            self._phases = PhasesPage.create(ranks)
            self._replicator.send(PhasesAre(), [self._phases.fd])
        return PhasesAre(position), self._phases.fd

    # Records on their way to peers

    def sync(self, group: Group) -> None:
        """Have the replicator send what is whole of a group and has not been given to it."""
        process = self._replicator.process
        if self._job is None or process is None:
            return
        for message, fds in self._records.due(group, self._job, self.watermark or 0):
            self._replicator.send(message, fds)
            if self._replicator.process is not process:
                return  # it died meanwhile, and one that took its place has been given all of it

    def _copy_state(self, record: int) -> None:
        """Have the state of this node's ranks copied after a record."""
        told = self._replicator.told
        if self._job is None or told is None:
            return
        node = told.node
        for unit in self._job.units:
            group = self._group(unit.ranks) if self._job.nodes[unit.node].name == node else None
            held = group.held if group is not None else None
            if group is not None and held is not None and held.complete and held.spec.mode != "snapshot":
                group.saver.copy_for_peers(held, record, partial(self._state_copied, group, record))
            elif self._job.nodes[unit.node].name == node:
                self._replicator.send(StateNotCopied(record))

    def _state_copied(self, group: Group, record: int, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            self._replicator.send(StateNotCopied(record))
            return
        try:
            if self._job is not None:
                name = self._records.name(self._job, group.ranks, f"state {record}")
                static = snapshot.generation.regions.static
                regions = [snapshot.region] + ([static] if static is not None else [])
                self._replicator.send(by_value(group, snapshot, name), [region.fd for region in regions])
        finally:
            snapshot.region.close()

    def redo_limit(self, group: Group) -> int | None:
        """Up to which record redo may go on, as far as peers are concerned; None: as far as it likes."""
        if self.watermark is None or self._job is None:
            return None
        held = group.held
        waits = self._job.wait and not self._newest.waits_suspended
        if waits or held is None or held.spec.mode != "eager" or held.base is None or not held.ledger.committed:
            return self.watermark
        # Training does not wait for peers, so that the replica cannot either, once the slots run out.
        needed = held.newest - (held.spec.slots - 2 - held.spec.trails)
        name = self._records.sent_name(group.ranks)
        if self.watermark < held.base < needed and name and name not in self._given_up:
            self._replicator.send(GiveUp(group.ranks, name))
            if self._replicator.process is not None:  # else nobody is there to answer, or to read the replica
                return self.watermark
        return max(self.watermark, needed)

    # Recovery

    def recover(self, message: Recover, done: Callable[[Recovered | RecoveryProgress], None]) -> None:
        """Fetch what this node is to get, hand out what others are to; `done` gets Recovered, and progress before.

        Raises:
            PeerError: the replicator is gone for good.
        """
        if self._recovery is not None:
            raise AgentError("a recovery is under way")
        self._replicator.check()
        process = self._replicator.process
        for ranks in message.serve:
            state = stand_still(ranks, message, self._group(ranks))
            if isinstance(state, str):
                assert self._replicator.told is not None
                done(Recovered(state, (BadSourceSeen(self._replicator.told.node, ranks, ""),)))
                return
            handed_out = hand_out(ranks, state.held, message.record, state.history, int(message.before))
            self._replicator.send(handed_out, [region.fd for region in state.held.regions])
        # One that has taken the place of another knows nothing of what that one was told to hand out.
        if self._replicator.process is not process or (message.serve and not self._replicator.has_taken_all()):
            done(Recovered("the replicator is gone"))
            return
        self._recoveries += 1
        group = self._adopt if message.adopt else self._group
        self._recovery = recovery = Recovery(self._recoveries, message, group, self._replicator.send, done)
        recovery.start()
        self._end_recovery()

    def _give_up_recovery(self, reason: str) -> None:
        """Drop what a recovery has fetched so far, if one is under way."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.fail(reason)

    def _end_recovery(self) -> None:
        if self._recovery is not None and self._recovery.over:
            self._recovery = None

    # What the replicator says, and what becomes of it

    def replicator_said(self, message: ReplicatorToAgent) -> None:
        """Handle a message of the replicator."""
        match message:
            case WatermarkAdvanced():
                self.watermark, self._newest = message.record, message
                self._tell_watermark(message)
            case CopyState():
                self._copy_state(message.record)
            case PeersReport():
                self._report, self._reported = message.status, self._clock()
            case GivenUp():
                self._given_up.add(message.generation)
                self._tell_watermark(self._newest)
            case Described() | Filled() | RecoveryProgress():
                if self._recovery is not None:
                    self._recovery.answered(message)
                    self._end_recovery()
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from the replicator")

    def replicator_died(self) -> None:
        """Give up what the replicator was doing."""
        self._give_up_recovery("the replicator is gone")
        self._records.clear()
        if self._job is not None and self._job.wait and self.watermark is not None:
            # One that takes its place begins with nothing, so that all others are told the same.
            self._newest = WatermarkAdvanced(self.watermark, False, waits_suspended=True)
            self._tell_watermark(self._newest)

    def replicator_lost(self, reason: str) -> None:
        """Tell trainers that there is no replicator for a while."""
        self._told_lost(reason)

    def replicator_replaced(self) -> None:
        """Give another replicator its plan and all records anew: owners send once more what was on its way."""
        job, told = self._job, self._replicator.told
        assert job is not None
        assert told is not None
        self._take_part(Join(msgspec.structs.replace(job, record=None), rejoin=True))
        if self._phases is not None:
            self._replicator.send(PhasesAre(), [self._phases.fd])
        for unit in job.units:
            group = self._group(unit.ranks)
            if group is not None and job.nodes[unit.node].name == told.node:
                self.sync(group)
