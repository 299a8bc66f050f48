"""Messages about checkpoints and logged records: an agent, its writer processes, its trainers, the command line."""

from __future__ import annotations

from typing import Literal

import msgspec

from memckpt.state.records import Timeline
from memckpt.state.spec import StateSpec
from memckpt.storage.format import Part


class CopyRankPart(msgspec.Struct, frozen=True, tag="copy rank part"):
    """Order to all local ranks: copy your part of the state after `record` to this region. `order` is unique."""

    record: int
    order: int


class RankPartCopied(msgspec.Struct, frozen=True, tag="rank part copied"):
    """A rank's part of the state is copied into the region of this `order`; or `missed`: the record had passed."""

    record: int
    order: int
    seconds: float
    missed: bool = False
    missing: tuple[tuple[int, int, str], ...] = ()  #: as in RecordMeta, of all optimizer state; of the first rank
    plain: bytes = b""  #: the same
    rank_state: bytes = b""  #: one with what is captured beside tensors; empty: the commit's counts


class SaveTo(msgspec.Struct, frozen=True, tag="save to"):
    """From the command line: write the newest record as a checkpoint to another place. Answer: Saved or SaveFailed."""

    url: str


class SaveRecord(msgspec.Struct, frozen=True, tag="save record"):
    """From a trainer at its start, whose ranks hold other shards: write all of a record. Answer: RecordSaved."""

    record: int
    url: str


class RecordSaved(msgspec.Struct, frozen=True, tag="record saved"):
    """All that the node holds of a record is in storage; `problem`: why not. Saved is told of any checkpoint."""

    record: int
    problem: str = ""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A node's part of a checkpoint is in storage, verified. `untidy`: what else could not be done there, in words.

    `whole`: so were the parts of all other nodes by then.
    """

    step: int
    record: int
    nbytes: int
    seconds: float
    cpu_seconds: float
    timeline: Timeline | None = None
    untidy: str = ""
    whole: bool = True


class SaveFailed(msgspec.Struct, frozen=True, tag="unsaved"):
    """A checkpoint could not be written; training goes on and a later one will be tried."""

    step: int
    reason: str
    missing: int | None = None  #: bytes that have to be free there before a retry; None: something else is wrong


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """To the trainers: storage can produce every record up to this one, from a checkpoint and logged records."""

    step: int
    record: int


# Between an agent and its writer processes


class Save(msgspec.Struct, frozen=True, tag="save"):
    """To the writer process: make a checkpoint of what comes along.

    Source ``"copy"``: the state, the by-value tensors, static ones if present. Source ``"ring"``: slots and static
    tensors, to be redone from `metas`.
    """

    url: str
    part: Part
    spec: StateSpec
    source: Literal["copy", "ring"]
    generation: int
    rank_states: dict[int, bytes]
    keep_last: int
    keep_every_steps: int | None
    by_value_base: int = 0  #: where the by-value tensors of a copy begin
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""
    metas: tuple[bytes, ...] = ()
    threads: int = 1
    urgent: bool = False  #: no training runs that it could disturb, or the machine may be gone soon
    abandoned: tuple[Part, ...] = ()  #: parts whose writer was killed; what is there of them is deleted first
    search_path: tuple[str, ...] = ()  #: where the trainers find modules
    reserve: int = 0  #: bytes that are to be free afterwards, for the log
    witness: str = ""  #: the file without which the store is away


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """To the writer process: note in the store that a checkpoint will be taken after `record`; other nodes look."""

    url: str
    timeline: Timeline
    record: int
    witness: str = ""


class LookForAnnounced(msgspec.Struct, frozen=True, tag="look"):
    """To the writer process: read what the first rank's node has announced for this timeline."""

    url: str
    timeline: Timeline


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """Answer to LookForAnnounced; None: nothing."""

    timeline: Timeline
    record: int | None


class LookForRoom(msgspec.Struct, frozen=True, tag="room?"):
    """To the writer process: see how many bytes are free in a store."""

    url: str
    witness: str = ""


class Room(msgspec.Struct, frozen=True, tag="room"):
    """Answer to LookForRoom: bytes; None: unknown, or the store is away."""

    url: str
    free: int | None


class LogRecord(msgspec.Struct, frozen=True, array_like=True):
    """What belongs to a record beside what lies in its slot: its scalars (RecordMeta) and the rank states, encoded."""

    record: int
    step: int
    meta: bytes
    rank_states: dict[int, bytes]


class OpenLog(msgspec.Struct, frozen=True, tag="log"):
    """To the process that writes records: take them from the slots that come along, in batches.

    What it has of another timeline or generation is written first. A batch is written when it has `batch_steps` records
    or `batch_bytes`, or its oldest has waited for `batch_seconds`.
    """

    url: str
    node: str
    spec: StateSpec
    generation: int
    timeline: Timeline
    follows: Timeline | None  #: as for a batch
    batch_steps: int
    batch_bytes: int
    batch_seconds: float
    run: str = ""
    reserve: int = 0  #: bytes that it leaves free, for the checkpoint that the log has to end in
    witness: str = ""
    fixed_steps: bool = True  #: False: also with fewer records, where writing is fast
    inexact: str = ""  #: as for a batch


class Append(msgspec.Struct, frozen=True, tag="append"):
    """To the same: copy these records out of their slots; `flush`: write also a batch that is not full."""

    records: tuple[LogRecord, ...]
    flush: bool


class Appended(msgspec.Struct, frozen=True, tag="appended"):
    """Answer to Append."""

    taken: int | None  #: the newest record that has been copied out of its slot; None before the first
    written: int | None  #: the newest record that is in storage, with its `step`; None before the first
    step: int
    nbytes: int  #: what this call has written
    hole: str = ""  #: why a record could not be taken or written; the log goes on behind it
    short: str = ""  #: why records wait for room in the storage, which a checkpoint may make; empty: they do not
    batch_steps: int = 0  #: records in a batch from now on
    late: bool = False  #: whether that is because its slot had been filled anew


TrainerToAgent = SaveRecord | RankPartCopied | SaveTo
AgentToTrainer = RecordSaved | CopyRankPart | Saved | SaveFailed | Logged
AgentToWriter = Save | Announce | LookForAnnounced | LookForRoom | OpenLog | Append
WriterToAgent = Announced | Room | Appended | Saved | SaveFailed
