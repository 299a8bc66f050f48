"""The events of a run: the typed schema of its journal. Torch-free.

A line of the journal is one JSON object: the fields of :class:`Envelope`, ``event`` with the event's name, and its
fields. A reader ignores unknown fields and shows unknown events as they are, so both may be added.
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
    """Fields of every line."""

    time: float  #: seconds since 1970 (UTC) by the node's clock
    node: str  #: name of the node whose agent has written it
    attempt: int  #: number of the attempt, one more for each start of the training; 0 before the first


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Base of all events. Each one's docstring and the comments behind its fields are its text in the reference."""


# The agent and the attempts


class AgentStarted(Event, frozen=True, tag="agent_started"):
    """An agent has begun to serve the run."""

    pid: int  #: its process id
    by_operator: bool  #: whether it was started beside the job, and not by a trainer
    replaces: int | None = None  #: pid of the agent before it, if that one was killed; None otherwise
    schema: int = SCHEMA  #: of the lines that follow


class AgentLeft(Event, frozen=True, tag="agent_left"):
    """An agent has ended as it should, for this reason."""

    reason: str


class AttemptBegan(Event, frozen=True, tag="attempt_began"):
    """Trainers have come."""

    world_size: int  #: number of ranks of the job
    trainers: tuple[tuple[int, int], ...]  #: rank and pid of those of this node that had come by then
    rejoined: bool = False  #: whether they were training already, and have come from an agent that is gone


class StartedOver(Event, frozen=True, tag="started_over"):
    """Nothing is resumed, for this reason. From the trainer of rank 0."""

    reason: str


class Recovered(Event, frozen=True, tag="recovered"):
    """A state is restored. From the trainer of rank 0."""

    step: int  #: restored step
    record: int  #: its record
    tier: str  #: source of the state: ``"local memory"``, ``"peers"``, ``"storage"``, or the name of another place
    seconds: float  #: duration of the restore, without the start of the process
    steps_lost: int | None  #: number of committed steps beyond the restored one; None where it is not known
    exact: bool = True  #: False where training does not go on bit for bit, as far as is known before its first step
    repeated: int | None = None  #: step that is taken once more first, as a proof; None if no step is
    reasons: tuple[str, ...] = ()  #: why it is not exact


class FirstStep(Event, frozen=True, tag="first_step"):
    """The first step of an attempt is committed."""

    step: int  #: that step
    seconds: float  #: from the end of the former attempt's trainers to this commit; else from this attempt's begin


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
    """A generation (a fresh start of base and log) is complete: what follows can be recovered."""

    ranks: RankGroup  #: ranks of the generation
    record: int  #: record after which it begins
    generation: int  #: its number
    mode: str  #: redo mode
    mode_reason: str  #: why this mode
    held_bytes: int  #: shared memory of the node


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
    """Protection has made a step wait for a second or more. Several within ten seconds are one event."""

    step: int | None  #: newest step by then
    longest_ms: float  #: the longest stall, in milliseconds
    count: int  #: number of such stalls


class Lagging(Event, frozen=True, tag="lagging"):
    """A tier has been as far behind training as slots allow for five seconds; training waits for it or overtakes it."""

    tier: str  #: ``"replica"`` (redo) or ``"peers"``
    behind: int  #: records that it is behind
    limit: int  #: records that the slots allow


class CaughtUp(Event, frozen=True, tag="caught_up"):
    """The end of :class:`Lagging`, after `seconds`."""

    tier: str
    seconds: float


class Drifted(Event, frozen=True, tag="drifted"):
    """The audit has found a replica that differs from training, by twice as much as before or for the first time."""

    record: int  #: whose anchor showed it
    max_ulp: float  #: largest difference, in units in the last place
    tensor: str  #: where first


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
    """A checkpoint is in storage, whole and verified."""

    ranks: RankGroup  #: ranks whose state it has
    step: int  #: its step
    record: int  #: its record
    nbytes: int  #: its bytes
    seconds: float  #: duration of the write


class NotStored(Event, frozen=True, tag="not_stored"):
    """A checkpoint could not be written, for this reason. Repeated failures of one reason are one event."""

    ranks: RankGroup
    step: int
    reason: str


# The journal itself


class Sample(Event, frozen=True, tag="sample"):
    """Figures of a running training: every 5 seconds at first, then rarer, at last every 5 minutes."""

    step: int | None  #: newest step in this node's memory
    stored_step: int | None  #: newest step of which this node's part is in storage; None before the first
    peers_record: int | None  #: newest record that peers have acknowledged for every node; None without peers
    record: int | None  #: newest committed record
    commits: int  #: commits of this node's ranks since the last sample
    stall_ms: float | None  #: mean stall of these commits, in milliseconds; None where there were none
    longest_stall_ms: float  #: the longest of them
    lag_records: int | None  #: records that the replica is behind; None without a replica
    drift_ulp: float  #: the largest that the audit has found so far
    held_bytes: int  #: shared memory of base and log
    peers_bytes: int  #: memory of other nodes' records here
    agent_bytes: int  #: the agent's own resident memory
    sent_bytes: int  #: bytes sent to peers in this attempt
    logged: dict[
        str, float
    ] = {}  #: learning rate (``lr``) and losses that came since the last sample, the newest of each


class Lost(Event, frozen=True, tag="lost"):
    """From here on events are not in the journal, as it could not be written, or not as fast as they came."""

    count: int


#: Events that only a trainer knows of, and sends to its agent.
TrainerEvent = Union[StartedOver, Recovered, GapEnded, Advised]  # noqa: UP007
AnyEvent = Union[  # noqa: UP007
    AgentStarted, AgentLeft, AttemptBegan, FirstStep, ResumeChecked, TrainerDied, TrainerLeft, Fenced, Preempted,
    Finished, Protected, GenerationDue, Degraded, Whole, PeersGap, Stalled, Lagging, CaughtUp, Drifted, Voided,
    Decision, Stored, NotStored, Sample, Lost, TrainerEvent,
]  # fmt: skip


class Unknown(msgspec.Struct, frozen=True):
    """An event of a later version."""

    name: str
    fields: dict[str, Any]


class Entry(msgspec.Struct, frozen=True):
    """One line of a journal."""

    envelope: Envelope
    event: AnyEvent | Unknown


def name_of(event: AnyEvent | Unknown) -> str:
    return event.name if isinstance(event, Unknown) else str(event.__struct_config__.tag)


_encoder = msgspec.json.Encoder()
_envelopes = msgspec.json.Decoder(Envelope)
_events = msgspec.json.Decoder(AnyEvent)


def encode(envelope: Envelope, event: AnyEvent | Unknown) -> bytes:
    """One line, without its end."""
    fields = {"event": event.name, **event.fields} if isinstance(event, Unknown) else msgspec.to_builtins(event)
    return _encoder.encode(msgspec.to_builtins(envelope) | fields)


def decode(line: bytes) -> Entry:
    """The inverse of :func:`encode`. Raises DamagedStateError where the line is torn, or no event."""
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
