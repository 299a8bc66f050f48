"""The agent's part in the peers tier: what it has its replicator send, and the states it has it fetch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from memckpt.agent.replication.handing_out import OwnRecords, by_value, can_send, hand_out
from memckpt.agent.replication.own_replicator import OwnReplicator
from memckpt.agent.saving.state_copies import StateCopy
from memckpt.agent.unit import Unit
from memckpt.agent.units import Units
from memckpt.errors import AgentError, MemckptError
from memckpt.memory.generation import Generation
from memckpt.memory.pages import PhasesPage
from memckpt.processes.event_loop import EventLoop
from memckpt.protocol import replication
from memckpt.protocol.channel import AgentToReplicator, ReplicatorToAgent
from memckpt.protocol.replication import (
    BadSourceSeen,
    Describe,
    Described,
    Fill,
    Filled,
    Join,
    PeerJob,
    PhasesAre,
    Recover,
    Recovered,
    RecoveryProgress,
    WantedState,
)
from memckpt.protocol.status import PeersReport, PeersStatus
from memckpt.state.records import RankGroup
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt.agent")
#: Seconds without a report after which the replicator stands still; it reports every second.
_QUIET_SECONDS = 5.0


class Peers:
    """Belongs to the agent's event loop. Owns the replicator. `tell` gets watermarks, and why it is lost."""

    def __init__(
        self,
        loop: EventLoop,
        units: Units,
        tell: Callable[[replication.WatermarkAdvanced | replication.ReplicatorLost], None],
    ) -> None:
        self._clock = loop.clock
        self._units, self._tell = units, tell
        self.replicator = OwnReplicator(loop, self)
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
        self._newest = replication.WatermarkAdvanced(0, False)
        #: The newest record that is acknowledged for every node of the job; None: no peers take part.
        self.watermark: int | None = None

    def finish(self) -> None:
        """Have peers get what they still wait for: training has ended as it should."""
        if self._job is not None:
            self.replicator.drain()

    def leave_node(self) -> None:
        """Leave the place of this node to another agent, which trainers start while this one saves what it holds."""
        self._give_up_recovery("the agent leaves")
        self._job = None
        self._records.clear()
        self.replicator.leave_peers()

    def close(self) -> None:
        self._give_up_recovery("the agent leaves")
        self._job = self.watermark = None
        self._records.clear()
        self.replicator.close()
        self._close_phases()

    def _close_phases(self) -> None:
        phases, self._phases = self._phases, None
        if phases is not None:
            phases.close()

    @property
    def status(self) -> PeersStatus | None:
        """The replicator's last report; if it is old, the replicator stands still, and nothing is protected."""
        if self._job is None or self._report is None or self._reported is None:
            return None
        unprotected = msgspec.structs.replace(self._report, protected=False)
        if self.replicator.process is None:
            problem = self.replicator.problem
            return msgspec.structs.replace(
                unprotected, problem=problem, held_bytes=self.replicator.kept_bytes, links=()
            )
        quiet = self._clock() - self._reported
        if quiet < _QUIET_SECONDS:
            return self._report
        problem = f"the replicator of this node has said nothing for {quiet:.0f} s"
        return msgspec.structs.replace(unprotected, problem=problem)

    def tell_deserted(self) -> None:
        """Have no node wait for records of this one: a trainer goes on without its agent."""
        if self._job is not None:
            self.replicator.send(replication.Deserted())

    def begin_attempt(self) -> None:
        self._give_up_recovery("its attempt is over")
        self.replicator.begin_attempt()
        self._reported = self._job = self.watermark = None
        self._records.clear()
        self._given_up.clear()
        self._newest = replication.WatermarkAdvanced(0, False)
        self._close_phases()

    # Start of an attempt

    def join(self, message: Join) -> None:
        """Take part in the planned attempt. Raises PeerError: the replicator is not where peers look for it."""
        gone = self.replicator.process is None or self.replicator.told is None
        if message.rejoin and (gone or self._job is not None):
            return
        self.replicator.check()
        self._give_up_recovery("the plan is made once more")
        # A plan made before may have been for a later record: what follows this one is sent from its start.
        self.watermark = message.job.record or 0
        self._take_part(message)

    def _take_part(self, message: Join) -> None:
        self._job = message.job
        self.replicator.planned = True
        self._records.clear()
        self.replicator.send(message)

    def phases(self, position: int, ranks: int) -> tuple[PhasesAre, int]:
        """Where a rank, by its position among the node's `ranks`, marks its phases: answer, and descriptor with it."""
        if self._phases is None:
            self._phases = PhasesPage.create(ranks)
            self.replicator.send(PhasesAre(), [self._phases.fd])
        return PhasesAre(position), self._phases.fd

    # Records on their way to peers

    def sync(self, unit: Unit) -> None:
        """Have the replicator send what is whole of a unit and has not been given to it."""
        process = self.replicator.process
        if self._job is None or process is None:
            return
        for message, fds in self._records.due(unit, self._job, self.watermark or 0):
            self.replicator.send(message, fds)
            if self.replicator.process is not process:
                return  # it died meanwhile, and its successor has been given all of it

    def _copy_state(self, record: int) -> None:
        told = self.replicator.told
        if self._job is None or told is None:
            return
        for sent in self._job.units:
            if self._job.nodes[sent.node].name != told.node:
                continue
            unit = self._units.get(sent.ranks)
            held = unit.held if unit is not None else None
            if unit is not None and held is not None and held.complete and held.spec.mode != "snapshot":
                unit.saver.copy_for_peers(held, record, partial(self._state_copied, unit, record))
            else:
                self.replicator.send(replication.StateNotCopied(record))

    def _state_copied(self, unit: Unit, record: int, copy: StateCopy | None) -> None:
        if copy is None:
            self.replicator.send(replication.StateNotCopied(record))
            return
        try:
            if self._job is not None:
                name = self._records.name(self._job, unit.ranks, f"state {record}")
                static = copy.generation.regions.static
                regions = [copy.region] + ([static] if static is not None else [])
                self.replicator.send(by_value(unit, copy, name), [region.fd for region in regions])
        finally:
            copy.region.close()

    def redo_limit(self, unit: Unit) -> int | None:
        """Up to which record redo may go on, as far as peers are concerned; None: as far as it likes."""
        if self.watermark is None or self._job is None:
            return None
        held = unit.held
        waits = self._job.wait and not self._newest.waits_suspended
        if waits or held is None or held.spec.mode != "eager" or held.base is None or not held.ledger.committed:
            return self.watermark
        # Training does not wait for peers, so that the replica cannot either, once the slots run out.
        needed = held.newest - (held.spec.slots - 2 - held.spec.trails)
        name = self._records.sent_name(unit.ranks)
        if self.watermark < held.base < needed and name and name not in self._given_up:
            self.replicator.send(replication.GiveUp(unit.ranks, name))
            if self.replicator.process is not None:  # else none is there to answer, or to read the replica
                return self.watermark
        return max(self.watermark, needed)

    # Recovery

    def recover(self, message: Recover, done: Callable[[Recovered | RecoveryProgress], None]) -> None:
        """Fetch and hand out what a recovery wants; `done` gets progress, then Recovered. Raises PeerError."""
        if self._recovery is not None and not self._recovery.over:
            raise AgentError("a recovery is under way")
        self.replicator.check()
        process = self.replicator.process
        record, behind = message.record, int(message.before)
        for ranks in message.serve:
            unit = self._units.get(ranks)
            if unit is None:
                raise AgentError(f"expected ranks {list(ranks)} on this node, to hand them out, found no state of them")
            if behind and (reason := unit.generations.why_not_repeated(record)):
                assert self.replicator.told is not None
                problem = f"ranks {list(ranks)} cannot be handed out before record {record}: {reason}"
                done(Recovered(problem, (BadSourceSeen(self.replicator.told.node, ranks, ""),)))
                return
            held = unit.generations.stand_at(record, behind)
            self.replicator.send(hand_out(unit, held, record, behind), [region.fd for region in held.regions])
        # A successor knows nothing of what the replicator before it was told to hand out.
        if self.replicator.process is not process or (message.serve and not self.replicator.has_taken_all()):
            done(Recovered("the replicator is gone"))
            return
        self._recoveries += 1
        find = self._units.adopt if message.adopt else self._units.get
        self._recovery = recovery = Recovery(self._recoveries, message, find, self.replicator.send, done)
        recovery.start()

    def _give_up_recovery(self, reason: str) -> None:
        """Drop what a recovery has fetched so far, if one is under way."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.fail(reason)

    # What the replicator says, and what becomes of it

    def replicator_said(self, message: ReplicatorToAgent) -> None:
        match message:
            case replication.WatermarkAdvanced():
                self.watermark, self._newest = message.record, message
                self._tell(message)
            case replication.CopyState():
                self._copy_state(message.record)
            case PeersReport():
                self._report, self._reported = message.status, self._clock()
            case replication.GivenUp():
                self._given_up.add(message.generation)
                self._tell(self._newest)
            case Described() | Filled() | RecoveryProgress():
                if self._recovery is not None and not self._recovery.over:
                    self._recovery.answered(message)
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from the replicator")

    def replicator_died(self) -> None:
        self._give_up_recovery("the replicator is gone")
        self._records.clear()
        # Its successor sends all records anew. If training did not wait for that, no node might be able to go back to
        # what peers have: a second failure would lose all.
        self._tell_that_a_gap_opens(waits_suspended=not self._records_follow())

    def replicator_lost(self, reason: str) -> None:
        self._tell_that_a_gap_opens(waits_suspended=True)
        self._tell(replication.ReplicatorLost(reason))

    def _tell_that_a_gap_opens(self, waits_suspended: bool) -> None:
        if self._job is not None and self._job.wait and self.watermark is not None:
            self._newest = replication.WatermarkAdvanced(self.watermark, False, waits_suspended)
            self._tell(self._newest)

    def _own_units(self) -> list[Unit | None]:
        job, told = self._job, self.replicator.told
        if job is None or told is None:
            return []
        return [self._units.get(one.ranks) for one in job.units if job.nodes[one.node].name == told.node]

    def _records_follow(self) -> bool:
        """Whether another replicator can be given the records of all units of this node."""
        job, units = self._job, self._own_units()
        return job is not None and bool(units) and all(one is not None and can_send(one, job) for one in units)

    def replicator_replaced(self) -> None:
        """Give another replicator its plan and all records anew: owners send once more what was on its way."""
        assert self._job is not None
        job = msgspec.structs.replace(self._job, record=None)
        self._take_part(Join(job, rejoin=True, records=self._records_follow()))
        if self._phases is not None:
            self.replicator.send(PhasesAre(), [self._phases.fd])
        for unit in self._own_units():
            if unit is not None:
                self.sync(unit)


class Recovery:
    """Fetches states, all at once; `done` gets Recovered once all are here, or one cannot be. `number` is unique."""

    def __init__(
        self,
        number: int,
        message: Recover,
        unit: Callable[[RankGroup], Unit | None],
        send: Callable[[AgentToReplicator, list[int]], None],
        done: Callable[[Recovered | RecoveryProgress], None],
    ) -> None:
        self._number, self._message, self._unit = number, message, unit
        self._send, self._done = send, done
        self._started = time.monotonic()
        self._wanted: dict[RankGroup, WantedState] = {wanted.ranks: wanted for wanted in message.fetch}
        self._generations: dict[RankGroup, Generation] = {}
        self._nbytes = 0
        self._bad: list[BadSourceSeen] = []
        self.over = False

    def start(self) -> None:
        """Ask for all of them. Sending may show that the replicator is dead, which fails the recovery."""
        if not self._wanted:
            self._answer_owner("", tuple(self._bad))
        for wanted in list(self._wanted.values()):
            if not self.over:
                self._send(Describe(wanted, self._number), [])

    def answered(self, message: Described | Filled | RecoveryProgress) -> None:
        """Handle the replicator's news of one recovery."""
        if isinstance(message, RecoveryProgress):
            self._done(message)
            return
        known = message.ranks in self._wanted
        expected = known and (message.ranks in self._generations) == isinstance(message, Filled)
        if message.recovery != self._number or not expected:
            kind, ranks = type(message).__name__, list(message.ranks)
            _log.info("ignoring %s of ranks %s: it belongs to an earlier recovery", kind, ranks)
            return
        self._bad += message.bad
        if message.problem:
            self.fail(message.problem, tuple(self._bad) if message.bad else ())
        elif isinstance(message, Described):
            assert message.spec is not None
            self._allocate(message.ranks, _to_be_filled(message.spec, message.ranks))
        else:
            self._take_filled(message)

    def _allocate(self, ranks: RankGroup, spec: StateSpec) -> None:
        try:
            unit = self._unit(ranks)
            if unit is None:
                raise AgentError(f"ranks {list(ranks)} are not on this node")
            generation = unit.make_room_for(spec, self._message.memory_budget_bytes)
        except MemckptError as error:
            self.fail(str(error))
            return
        self._generations[ranks] = generation
        unit.when_reserved(generation, partial(self._fill, ranks, spec, unit, generation))

    def _fill(
        self, ranks: RankGroup, spec: StateSpec, unit: Unit, generation: Generation, error: MemckptError | None
    ) -> None:
        if self._generations.get(ranks) is not generation:
            return  # it was given up meanwhile
        if error is None:
            self._send(Fill(self._wanted[ranks], spec, self._number), [region.fd for region in generation.regions])
        elif unit.held is None:
            self.fail(str(error))
        else:  # both do not fit
            self._generations.pop(ranks).close()
            unit.generations.drop_all()
            self._allocate(ranks, spec)

    def _take_filled(self, message: Filled) -> None:
        generation = self._generations.pop(message.ranks)
        unit = self._unit(message.ranks)
        try:
            assert unit is not None
            generation.refill(self._message.record, message.step, message.metas, message.rank_states, message.before)
        except MemckptError as error:
            generation.close()
            self.fail(str(error))
            return
        unit.take_over(generation, self._message.history)
        self._nbytes += message.nbytes
        del self._wanted[message.ranks]
        if not self._wanted:
            self._answer_owner("", tuple(self._bad))

    def fail(self, problem: str, bad: tuple[BadSourceSeen, ...] = ()) -> None:
        """Give up, for a reason; `bad`: sources to be left out next time, none where the reason lies in this node."""
        if self.over:
            return
        for generation in self._generations.values():
            generation.close()
        self._generations.clear()
        self._answer_owner(problem, bad)

    def _answer_owner(self, problem: str, bad: tuple[BadSourceSeen, ...]) -> None:
        self.over = True
        self._done(Recovered(problem, bad, self._nbytes, time.monotonic() - self._started))


def _to_be_filled(spec: StateSpec, ranks: RankGroup) -> StateSpec:
    """What is fetched is the window of records of a state, to be redone when it is restored; or one captured."""
    mode = "lazy" if spec.mode == "eager" else spec.mode
    return msgspec.structs.replace(spec, mode=mode, local_ranks=ranks, by_value_slots=0)
