"""Messages about checkpoints, between an agent, its trainers and the command line."""

from __future__ import annotations

import msgspec

from memckpt.state.records import Timeline


class TakeSnapshot(msgspec.Struct, frozen=True, tag="snapshot?"):
    """Order to all local ranks: copy the state after `record` into the region whose descriptor comes along (lazy).

    `order` is another number in each order of an agent: where the generation changes, two may name the same record.
    """

    record: int
    order: int


class SnapshotTaken(msgspec.Struct, frozen=True, tag="snapshot"):
    """A rank's part of a snapshot is copied into the region of this `order`; or `missed`: the record had passed."""

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
    """From a trainer at its start: write all that the node holds of one record. Answer: RecordSaved.

    The attempt's ranks hold other shards than those of the last one, so that memory cannot go straight back into them.
    """

    record: int
    url: str


class RecordSaved(msgspec.Struct, frozen=True, tag="record saved"):
    """All that the node holds of a record is in storage; `problem`: why it is not, empty if it is.

    Not Saved: that is told of any checkpoint, and one that a snapshot of the dead attempt has begun may be of the same
    record, and of one unit only.
    """

    record: int
    problem: str = ""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A checkpoint is in storage, whole and verified. `untidy`: what else could not be done there, in words."""

    step: int
    record: int
    nbytes: int
    seconds: float
    cpu_seconds: float
    timeline: Timeline | None = None
    untidy: str = ""


class SaveFailed(msgspec.Struct, frozen=True, tag="unsaved"):
    """A checkpoint could not be written; training goes on and a later one will be tried."""

    step: int
    reason: str
    missing: int | None = None  #: bytes that have to be free there before a retry; None: something else is wrong


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """To the trainers: storage can produce every record up to this one, from a checkpoint and logged records."""

    step: int
    record: int


# This file's part of what is said on each connection

TrainerToAgent = SaveRecord | SnapshotTaken | SaveTo
AgentToTrainer = RecordSaved | TakeSnapshot | Saved | SaveFailed | Logged
WriterToAgent = Saved | SaveFailed
