"""What happens to a run, told to its journal: from messages as they pass, and from the status each second."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memckpt.journal import events as journal
from memckpt.journal.journal import Journal, latest_attempt
from memckpt.processes.address import AgentAddress
from memckpt.processes.attempt import Attempt, TrainerHandle
from memckpt.processes.log import Seldom
from memckpt.protocol import trainer as said
from memckpt.protocol.channel import AgentToTrainer, TrainerToAgent
from memckpt.protocol.status import Status
from memckpt.protocol.storing import Saved, SaveFailed
from memckpt.state.records import RankGroup

#: Seconds between two looks at the status while trainers are here.
_LOOK_SECONDS = 1.0
#: Seconds between samples: the first ones; their growth, as a share of the time since the first; the last ones.
_SAMPLE_SECONDS, _SAMPLE_GROWTH, _SAMPLE_SECONDS_AT_LAST = 5.0, 0.002, 300.0
#: Seconds for which an agent waits until the number of a new attempt is in the journal.
_NUMBER_SECONDS = 1.0
#: Weight of a new sample in the average stall; number of commits whose stalls are shown.
_STALL_WEIGHT, _RECENT = 0.05, 64
#: Bounds of the classes in which stalls are counted, in milliseconds.
STALL_BOUNDS_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1_000.0, 5_000.0, 30_000.0)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Figures:
    """Figures of an agent since it started."""

    check: str = ""  #: the finding of the attempt's resume check, in one line
    verdict: str = ""  #: its verdict; empty before there is one
    advice: journal.Advised | None = None  #: the setting that would pay; None if no other one would
    max_drift_ulp: float = 0.0
    stall_ms: float | None = None  #: moving average of what a step waits for us; None before the first commit
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))  #: of the newest commits, in ms
    commits: int = 0
    stalled_ms: float = 0.0  #: sum of all stalls
    stall_counts: list[int] = field(default_factory=lambda: [0] * (len(STALL_BOUNDS_MS) + 1))  #: commits by stall
    committed_at: float | None = None  #: time of the newest commit (monotonic clock)
    events: Counter[str] = field(default_factory=Counter)  #: number of events by name
    recoveries: Counter[str] = field(default_factory=Counter)  #: number of recoveries by tier
    recovery_seconds: float = 0.0
    steps_lost: int = 0  #: by recoveries, as far as it is known
    stored_bytes: int = 0  #: of checkpoints
    stored_at: float | None = None  #: when storage got its newest step, in seconds since 1970

    def add_stall(self, stall_ms: float) -> None:
        """Count how long a step has waited."""
        before = stall_ms if self.stall_ms is None else self.stall_ms
        self.stall_ms = before + _STALL_WEIGHT * (stall_ms - before)
        self.stalls.append(stall_ms)
        self.commits += 1
        self.stalled_ms += stall_ms
        self.stall_counts[bisect_left(STALL_BOUNDS_MS, stall_ms)] += 1

    @property
    def seconds_since_commit(self) -> float | None:
        """None before the first commit."""
        return time.monotonic() - self.committed_at if self.committed_at is not None else None


class Observer:
    """Belongs to the agent's event loop. Owns the journal. `status` makes the agent's status."""

    def __init__(
        self,
        address: AgentAddress,
        by_operator: bool,
        status: Callable[[], Status],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = Figures()
        self._by_operator, self._status, self._clock = by_operator, status, clock
        self.journal = Journal(address.run_dir, address.node)
        #: Number of the newest attempt that the journal knew of as the agent started.
        self._former_attempt = latest_attempt(address.run_dir, address.node)
        self._stored_step: int | None = None
        self._attempt: Attempt | None = None
        #: The attempt whose begin is noted, by its nonce.
        self._noted = ""
        #: When the trainers of the last attempt ended, or this one began; None once its first step is noted.
        self._down_since: float | None = None
        self._look_at = -math.inf
        self._sampled_from = self._sample_at = math.inf
        #: As far as the last sample counted: commits, and their stalls; and the longest stall since.
        self._commits, self._stalled_ms, self._longest_ms = 0, 0.0, 0.0
        self._drift_ulp = 0.0
        self._logged: dict[str, float] = {}  #: learning rate and losses since the last sample
        self._memory, self._peers, self._storage = (
            Tier(name, self.note_event, clock) for name in ("memory", "peers", "storage")
        )
        self._replica_lag, self._peers_lag = (Lag(name, self.note_event, clock) for name in ("replica", "peers"))
        self._stalls = Stalls(self.note_event, clock)
        self._seldom_due, self._seldom_protected = Seldom(clock=clock), Seldom(clock=clock)
        #: Mode of protection, and its reason, of each unit's newest generation.
        self._protected_how: dict[RankGroup, tuple[str, str]] = {}
        self._gap: tuple[int, int] | None = None

    def note_event(self, event: journal.AnyEvent) -> None:
        """Add an event to the journal, and count it. Never blocks."""
        self.journal.add(event)
        figures = self.figures
        figures.events[journal.name_of(event)] += 1
        if isinstance(event, journal.Recovered):
            figures.recoveries[event.tier] += 1
            figures.recovery_seconds += event.seconds
            figures.steps_lost += event.steps_lost or 0
        elif isinstance(event, journal.Advised):
            figures.advice = event if event.line else None

    def _note_now_and_then(self, seldom: Seldom, event: journal.AnyEvent) -> None:
        """Count an event of a generation, and note it seldom: a script that changes weights has one at each step."""
        if seldom.count() is None:
            self.figures.events[journal.name_of(event)] += 1
        else:
            self.note_event(event)

    @property
    def unprotected(self) -> str:
        """Why memory does not hold what trainers do; empty if it does."""
        return self._memory.reason

    # The agent

    @property
    def latest_attempt(self) -> int:
        """Number of the newest attempt that this node knows of, dead with its agent or not; 0: none."""
        return max(self._former_attempt, self.journal.attempt)

    def started(self, replaces: int | None) -> None:
        """Note that the agent serves; `replaces`: pid of one that died without leaving."""
        self.note_event(journal.AgentStarted(os.getpid(), self._by_operator, replaces))

    def close(self, reason: str) -> None:
        self.note_event(journal.AgentLeft(reason))
        self.journal.close()

    # Messages as they pass

    def heard(self, trainer: TrainerHandle, attempt: Attempt, message: TrainerToAgent) -> None:
        """Note what a trainer of the attempt says, before it is handled."""
        self._attempt = attempt
        match message:
            case said.Commit(step=step, stall_ms=stall_ms):
                self.figures.add_stall(stall_ms)
                self._longest_ms = max(self._longest_ms, stall_ms)
                self._stalls.add(step, stall_ms)
                self._step_ended(step)
            case said.GenerationCommit():
                self._step_ended(message.step)
            case said.Note():
                self.note_event(message.event)
            case said.TrainingFigures():
                self._logged.update(message.values)
            case said.Checked():
                self.figures.check, self.figures.verdict = message.line, message.verdict
                self.note_event(journal.ResumeChecked(message.verdict, message.line))
            case said.Configure():
                self._configured(trainer, attempt, message)
            case said.Void():
                self.note_event(journal.Voided(trainer.rank, message.record, message.reason))
            case said.NeedGeneration():
                self._note_now_and_then(self._seldom_due, journal.GenerationDue(message.record, message.reason))
            case said.Preempted():
                self.note_event(journal.Preempted(trainer.rank))
            case said.Goodbye(finished=True):
                others = [one for one in attempt.trainers.values() if one is not trainer]
                if attempt.all_here and all(one.finished for one in others):
                    self.note_event(journal.Finished(self._status().step))

    def told(self, ranks: RankGroup, message: AgentToTrainer) -> None:
        match message:
            case Saved():
                self.figures.stored_bytes += message.nbytes
                self.note_event(journal.Stored(ranks, message.step, message.record, message.nbytes, message.seconds))
            case SaveFailed():
                self.note_event(journal.NotStored(ranks, message.step, message.reason))
            case said.Protected():
                self._protected(ranks, message)
            case said.Gap() | said.Alarm():
                self._memory.update(message.reason)
            case said.Drift():
                self.figures.max_drift_ulp = max(self.figures.max_drift_ulp, message.max_ulp)
                if message.sure or message.max_ulp >= 2 * self._drift_ulp:
                    self._drift_ulp = max(self._drift_ulp, message.max_ulp)
                    self.note_event(journal.Drifted(message.record, message.max_ulp, message.tensor))

    def _step_ended(self, step: int) -> None:
        self.figures.committed_at = time.monotonic()
        if self._down_since is not None:
            self.note_event(journal.FirstStep(step, round(self._clock() - self._down_since, 3)))
            self._down_since = None

    def _configured(self, trainer: TrainerHandle, attempt: Attempt, message: said.Configure) -> None:
        timeline = message.timeline
        if timeline is None or timeline.nonce == self._noted:
            return
        self._noted = timeline.nonce
        self.journal.attempt = timeline.number
        self.figures.verdict = ""
        came = tuple(sorted((one.rank, one.process.pid) for one in attempt.trainers.values()))
        # One that rejoins has got somewhere before it said hello to this agent.
        rejoined = trainer.next_record > 0
        self.note_event(journal.AttemptBegan(attempt.world_size, came, rejoined))
        # The next attempt takes another number even if agents and trainers die together from here on.
        self.journal.settle(_NUMBER_SECONDS)
        now = self._clock()
        if self._down_since is None and not rejoined:
            self._down_since = now
        self._sampled_from = self._sample_at = self._look_at = now
        self._peers.restart()
        self._gap = None

    def _protected(self, ranks: RankGroup, message: said.Protected) -> None:
        status = self._status()
        before, how = self._protected_how.get(ranks), (status.mode, status.mode_reason)
        self._protected_how[ranks] = how
        event = journal.Protected(ranks, message.record, message.generation, *how, status.held_bytes)
        if how == before:
            self._note_now_and_then(self._seldom_protected, event)
        else:
            self.note_event(event)
        self._memory.update("")

    # Trainers that go

    def trainer_left(self, trainer: TrainerHandle, last: bool) -> None:
        """Note the end of a trainer's connection; `last`: no other one is here."""
        if not trainer.finished:
            kind = journal.TrainerDied if trainer.process.dying() else journal.TrainerLeft
            self.note_event(kind(trainer.rank, trainer.process.pid, self._status().step))
        if last:
            self._down_since = self._clock()

    def fencing(self, dying: Sequence[TrainerHandle]) -> None:
        """Note that a new attempt waits until these are dead."""
        self.note_event(journal.Fenced(tuple(trainer.process.pid for trainer in dying)))

    # The clock

    def deadline(self) -> float | None:
        """When to look next, by the clock; None while no trainer is here."""
        attempt = self._attempt
        here = attempt is not None and any(attempt.is_here(rank) for rank in attempt.trainers)
        return self._look_at if here else None

    def look_at_clock(self) -> None:
        """Look at the status, once a second."""
        now = self._clock()
        if now < self._look_at or self._attempt is None:
            return
        self._look_at = now + _LOOK_SECONDS
        status = self._status()
        newest = status.newest_committed
        lag = newest - status.applied if newest is not None and status.applied is not None else None
        self._compare_status(status, newest, lag)
        if now >= self._sample_at:
            self._sample(status, now, newest, lag)

    def _compare_status(self, status: Status, newest: int | None, lag: int | None) -> None:
        """Note what has changed; `lag`: records that the replica is behind the newest one."""
        storage, peers = status.storage, status.peers
        self._storage.update(storage.alarm if storage is not None else "")
        step = storage.step if storage is not None else None
        if step is not None and step != self._stored_step:  # a checkpoint, or a batch of records
            self._stored_step, self.figures.stored_at = step, time.time()
        if lag is not None:
            self._replica_lag.update(lag, status.slots - 1)
        self._stalls.note_stalls()
        if peers is None:
            return
        self._peers.update("" if peers.protected else peers.problem or "not every record is where it belongs")
        if newest is not None and peers.watermark is not None and peers.every == 1:
            self._peers_lag.update(newest - peers.watermark, status.slots)
        if peers.gap is not None and peers.gap != self._gap:
            self._gap = peers.gap
            self.note_event(journal.PeersGap(*peers.gap))

    def _sample(self, status: Status, now: float, newest: int | None, lag: int | None) -> None:
        grown = (now - self._sampled_from) * _SAMPLE_GROWTH
        self._sample_at = now + min(max(_SAMPLE_SECONDS, grown), _SAMPLE_SECONDS_AT_LAST)
        figures, peers = self.figures, status.peers
        commits, stalled = figures.commits - self._commits, figures.stalled_ms - self._stalled_ms
        self.note_event(
            journal.Sample(
                step=status.step,
                stored_step=status.storage.step if status.storage is not None else None,
                peers_record=peers.watermark if peers is not None else None,
                record=newest,
                commits=commits,
                stall_ms=round(stalled / commits, 3) if commits else None,
                longest_stall_ms=round(self._longest_ms, 3),
                lag_records=max(0, lag) if lag is not None else None,
                drift_ulp=status.max_drift_ulp,
                held_bytes=status.held_bytes,
                peers_bytes=peers.held_bytes if peers is not None else 0,
                agent_bytes=resident_bytes(),
                sent_bytes=peers.bytes_sent if peers is not None else 0,
                logged=self._logged,
            )
        )
        self._logged = {}
        self._commits, self._stalled_ms, self._longest_ms = figures.commits, figures.stalled_ms, 0.0


def resident_bytes() -> int:
    """Resident memory of this process without shared memory, in bytes."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE_BYTES


#: Seconds for which a lag lasts before it is an event.
_LAG_SECONDS = 5.0
#: Stall of a step that is an event, in milliseconds; seconds in which several are one event.
_STALL_MS, _STALLS_SECONDS = 1000.0, 10.0

Note = Callable[[journal.AnyEvent], None]
Clock = Callable[[], float]


class Tier:
    """A tier that is whole or degraded."""

    def __init__(self, name: str, note: Note, clock: Clock) -> None:
        self._name, self._note, self._clock = name, note, clock
        #: Why it is degraded; empty: it is whole; None: it has not been whole yet.
        self._reason: str | None = ""
        self._since = 0.0

    @property
    def reason(self) -> str:
        return self._reason or ""

    def restart(self) -> None:
        """Begin anew: what is not whole yet is not degraded either."""
        self._reason, self._since = None, self._clock()

    def update(self, reason: str) -> None:
        """Note a change; `reason`: why it is degraded, empty if it is whole."""
        if (not reason) == (self._reason == ""):
            return
        now = self._clock()
        if reason:
            self._since = now
            self._note(journal.Degraded(self._name, reason))
        else:
            self._note(journal.Whole(self._name, round(now - self._since, 3)))
        self._reason = reason


class Lag:
    """A tier that is behind training by as many records as slots allow, for a while."""

    def __init__(self, tier: str, note: Note, clock: Clock) -> None:
        self._tier, self._note, self._clock = tier, note, clock
        self._since: float | None = None
        self._noted = False

    def update(self, behind: int, limit: int) -> None:
        """Note a change; called every second or so."""
        now = self._clock()
        if behind < limit:
            if self._noted and self._since is not None:
                self._note(journal.CaughtUp(self._tier, round(now - self._since, 3)))
            self._since, self._noted = None, False
            return
        self._since = now if self._since is None else self._since
        if not self._noted and now - self._since >= _LAG_SECONDS:
            self._noted = True
            self._note(journal.Lagging(self._tier, behind, limit))


class Stalls:
    """Steps that protection has kept waiting for long."""

    def __init__(self, note: Note, clock: Clock) -> None:
        self._note, self._clock = note, clock
        self._step: int | None = None
        self._longest_ms, self._count = 0.0, 0
        self._note_at = 0.0

    def add(self, step: int, stall_ms: float) -> None:
        if stall_ms >= _STALL_MS:
            self._step, self._longest_ms = step, max(stall_ms, self._longest_ms)
            self._count += 1

    def note_stalls(self) -> None:
        now = self._clock()
        if self._count and now >= self._note_at:
            self._note(journal.Stalled(self._step, round(self._longest_ms, 1), self._count))
            self._longest_ms, self._count, self._note_at = 0.0, 0, now + _STALLS_SECONDS
