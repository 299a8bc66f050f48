"""The events of a run: the typed schema of its journal. Torch-free.

A line of the journal is one JSON object. It has the fields of :class:`Envelope`, the field ``event`` with the event's
name, and the fields of that event's class. A reader ignores fields that it does not know, and shows events that it does
not know as they are (:class:`Unknown`), so both may be added without a new schema.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from memckpt.errors import MALFORMED, DamagedStateError
from memckpt.state.records import RankGroup

#: Number of the schema; raised when a field changes its meaning.
SCHEMA = 1
#: A value that a decision changes.
Value = Union[None, bool, int, float, str]  # noqa: UP007


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every line.

    Attributes:
        time: seconds since 1970 (UTC) by the node's clock.
        node: name of the node whose agent has written it.
        attempt: number of the attempt, one more for each start of the training; 0 before the first.
    """

    time: float
    node: str
    attempt: int


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Base of all events."""


# The agent and the attempts


class AgentStarted(Event, frozen=True, tag="agent_started"):
    """An agent has begun to serve the run.

    Attributes:
        pid: its process id.
        by_operator: whether it was started beside the job, and not by a trainer.
        replaces: pid of the agent before it, if that one died without leaving (killed); None otherwise.
        schema: of the lines that follow.
    """

    pid: int
    by_operator: bool
    replaces: int | None = None
    schema: int = SCHEMA


class AgentLeft(Event, frozen=True, tag="agent_left"):
    """An agent has ended as it should, for this reason."""

    reason: str


class AttemptBegan(Event, frozen=True, tag="attempt_began"):
    """Trainers have come.

    Attributes:
        world_size: number of ranks of the job.
        trainers: rank and pid of those of this node that had come by then.
        rejoined: whether they were training already, and have come from an agent that is gone.
    """

    world_size: int
    trainers: tuple[tuple[int, int], ...]
    rejoined: bool = False


class StartedOver(Event, frozen=True, tag="started_over"):
    """Nothing is resumed, for this reason. From the trainer of rank 0."""

    reason: str


class Recovered(Event, frozen=True, tag="recovered"):
    """A state is restored. From the trainer of rank 0.

    Attributes:
        step: restored step.
        record: its record.
        tier: source of the state: ``"local memory"``, ``"peers"``, ``"storage"``, or the name of another place.
        seconds: duration of the restore, without the start of the process.
        steps_lost: number of committed steps beyond the restored one; None where it is not known.
        exact: False where training does not go on bit for bit, as the number of ranks or the mesh has changed.
        repeated: step that is taken once more first, as a proof; None if no step is.
    """

    step: int
    record: int
    tier: str
    seconds: float
    steps_lost: int | None
    exact: bool = True
    repeated: int | None = None


class FirstStep(Event, frozen=True, tag="first_step"):
    """The first step of an attempt is committed.

    Attributes:
        step: that step.
        seconds: from the end of the former attempt's trainers to this commit, or from this attempt's begin where there
            was none.
    """

    step: int
    seconds: float


class ResumeChecked(Event, frozen=True, tag="resume_check"):
    """Verdict of a resume check: ``"equal"``, ``"rounding"``, ``"different"`` or ``"none"``, and its line."""

    verdict: str
    line: str


class TrainerDied(Event, frozen=True, tag="trainer_died"):
    """A trainer has died before training had finished; `step` is the newest that its node holds."""

    rank: int
    pid: int
    step: int | None


class TrainerLeft(Event, frozen=True, tag="trainer_left"):
    """A trainer that lives on has closed its connection: it has ended its session, or goes on without protection."""

    rank: int
    pid: int
    step: int | None


class Fenced(Event, frozen=True, tag="fenced"):
    """Trainers of the former attempt are waited for until they are dead, before a new attempt begins."""

    pids: tuple[int, ...]


class Preempted(Event, frozen=True, tag="preempted"):
    """A rank got SIGTERM."""

    rank: int


class Finished(Event, frozen=True, tag="finished"):
    """Training has finished after this step."""

    step: int | None


# Protection


class Protected(Event, frozen=True, tag="protected"):
    """A generation (a fresh start of base and log) is complete: what follows can be recovered.

    Attributes:
        ranks: ranks of the generation.
        record: record after which it begins.
        generation: its number.
        mode: redo mode.
        mode_reason: why this mode.
        held_bytes: shared memory of the node.
    """

    ranks: RankGroup
    record: int
    generation: int
    mode: str
    mode_reason: str
    held_bytes: int


class GenerationDue(Event, frozen=True, tag="generation_due"):
    """A rank has asked for a new generation after a record, for this reason."""

    record: int
    reason: str


class GapEnded(Event, frozen=True, tag="gap_ended"):
    """Training is protected again, after `steps` steps that were not; from a trainer of the node."""

    step: int
    steps: int


class Degraded(Event, frozen=True, tag="degraded"):
    """A tier does not do what it was configured for. `tier`: ``"memory"``, ``"peers"`` or ``"storage"``."""

    tier: str
    reason: str


class Whole(Event, frozen=True, tag="whole"):
    """A tier does so again, after `seconds`; for peers also for the first time in an attempt."""

    tier: str
    seconds: float


class PeersGap(Event, frozen=True, tag="peers_gap"):
    """The records `first` to `last` were in no peer's memory."""

    first: int
    last: int


class Stalled(Event, frozen=True, tag="stalled"):
    """Protection has kept ranks from training for a second or more at a step. Several within ten seconds are one event.

    Attributes:
        step: newest step by then.
        longest_ms: the longest stall, in milliseconds.
        count: number of such stalls.
    """

    step: int | None
    longest_ms: float
    count: int


class Lagging(Event, frozen=True, tag="lagging"):
    """A tier has been as far behind training as slots allow for five seconds: training waits for it, or overtakes it.

    Attributes:
        tier: ``"replica"`` (redo) or ``"peers"``.
        behind: records that it is behind.
        limit: records that the slots allow.
    """

    tier: str
    behind: int
    limit: int


class CaughtUp(Event, frozen=True, tag="caught_up"):
    """The end of :class:`Lagging`, after `seconds`."""

    tier: str
    seconds: float


class Drifted(Event, frozen=True, tag="drifted"):
    """The audit has found a replica that differs from training, by twice as much as before or for the first time.

    Attributes:
        record: whose anchor showed it.
        max_ulp: largest difference, in units in the last place.
        tensor: where first.
    """

    record: int
    max_ulp: float
    tensor: str


class Voided(Event, frozen=True, tag="voided"):
    """A rank could not stage a record, for this reason; a new generation follows."""

    rank: int
    record: int
    reason: str


class Decision(Event, frozen=True, tag="decision"):
    """A setting that the system chooses by itself has changed. `name`: what is decided, as ``"storage interval"``."""

    name: str
    old: Value
    new: Value
    reason: str


class Advised(Event, frozen=True, tag="advised"):
    """A setting would pay. `line`: to paste into the configuration; empty: what was advised would not any more."""

    line: str
    reason: str


# Storage


class Stored(Event, frozen=True, tag="stored"):
    """A checkpoint is in storage, whole and verified.

    Attributes:
        ranks: ranks whose state it has.
        step: its step.
        record: its record.
        nbytes: its bytes.
        seconds: duration of the write.
    """

    ranks: RankGroup
    step: int
    record: int
    nbytes: int
    seconds: float


class NotStored(Event, frozen=True, tag="not_stored"):
    """A checkpoint could not be written, for this reason. Repeated failures of one reason are one event."""

    ranks: RankGroup
    step: int
    reason: str


# The journal itself


class Sample(Event, frozen=True, tag="sample"):
    """Figures of a running training: every 5 seconds at first, then rarer, at last every 5 minutes.

    Attributes:
        step: newest step in this node's memory.
        stored_step: newest step that this agent has made restorable from storage; None before the first.
        peers_record: newest record that peers have acknowledged for every node; None without peers.
        record: newest committed record.
        commits: commits of this node's ranks since the last sample.
        stall_ms: mean stall of these commits, in milliseconds; None where there were none.
        longest_stall_ms: the longest of them.
        lag_records: records that the replica is behind; None without a replica.
        drift_ulp: the largest that the audit has found so far.
        held_bytes: shared memory of base and log.
        peers_bytes: memory of other nodes' records here.
        agent_bytes: the agent's own resident memory.
        sent_bytes: bytes sent to peers in this attempt.
    """

    step: int | None
    stored_step: int | None
    peers_record: int | None
    record: int | None
    commits: int
    stall_ms: float | None
    longest_stall_ms: float
    lag_records: int | None
    drift_ulp: float
    held_bytes: int
    peers_bytes: int
    agent_bytes: int
    sent_bytes: int


class Lost(Event, frozen=True, tag="lost"):
    """From here on events are not in the journal, as it could not be written, or not as fast as they came."""

    count: int


#: Events of the agent.
AgentEvent = Union[  # noqa: UP007
    AgentStarted,
    AgentLeft,
    AttemptBegan,
    FirstStep,
    ResumeChecked,
    TrainerDied,
    TrainerLeft,
    Fenced,
    Preempted,
    Finished,
    Protected,
    GenerationDue,
    Degraded,
    Whole,
    PeersGap,
    Stalled,
    Lagging,
    CaughtUp,
    Drifted,
    Voided,
    Decision,
    Stored,
    NotStored,
    Sample,
    Lost,
]
#: Events that only a trainer knows of, and sends to its agent.
TrainerEvent = Union[StartedOver, Recovered, GapEnded, Advised]  # noqa: UP007
#: All of them.
AnyEvent = Union[AgentEvent, TrainerEvent]  # noqa: UP007


class Unknown(msgspec.Struct, frozen=True):
    """An event of a later version: its name, and its other fields."""

    name: str
    fields: dict[str, Any]


class Entry(msgspec.Struct, frozen=True):
    """One line of a journal."""

    envelope: Envelope
    event: AnyEvent | Unknown


def name_of(event: AnyEvent | Unknown) -> str:
    """The event's name in the journal."""
    return event.name if isinstance(event, Unknown) else str(event.__struct_config__.tag)


_encoder = msgspec.json.Encoder()
_envelopes = msgspec.json.Decoder(Envelope)
_events = msgspec.json.Decoder(AnyEvent)


def encode(envelope: Envelope, event: AnyEvent | Unknown) -> bytes:
    """One line, without its end."""
    fields = {"event": event.name, **event.fields} if isinstance(event, Unknown) else msgspec.to_builtins(event)
    return _encoder.encode(msgspec.to_builtins(envelope) | fields)


def decode(line: bytes) -> Entry:
    """The inverse of :func:`encode`.

    Raises:
        DamagedStateError: the line is torn, or no event.
    """
    try:
        envelope = _envelopes.decode(line)
        try:
            return Entry(envelope, _events.decode(line))
        except msgspec.ValidationError:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            if not isinstance(fields.get("event"), str):
                raise
            for name in Envelope.__struct_fields__:
                fields.pop(name, None)
            return Entry(envelope, Unknown(fields.pop("event"), fields))
    except MALFORMED as error:
        raise DamagedStateError(f"expected an event of a journal, found something else: {error}") from error
