"""How records get from an agent to its replicator, and how far peers have them: typed, validated, no pickle."""

from __future__ import annotations

import msgspec

from memckpt.state.records import Branch, HeldFragments, RankGroup
from memckpt.state.spec import StateSpec


class SendGeneration(msgspec.Struct, frozen=True, tag="send generation"):
    """To the replicator: a generation is complete. Its regions come along: slots, then static and replica if present.

    Attributes:
        generation: its name, no two alike; `number` is what its slots are stamped with.
        records: with what belongs to each: virtual ones and the base.
        missing, plain: of the replica's state at `base` (eager).
        history: timelines, oldest first.
        serve: for readers only: send nothing, hand it out.
    """

    ranks: RankGroup
    generation: str
    number: int
    spec: StateSpec
    base: int
    records: dict[int, tuple[int, bytes, dict[int, bytes]]]
    missing: tuple[tuple[int, int, str], ...]
    plain: bytes
    history: tuple[Branch, ...]
    serve: bool = False


class SendRecord(msgspec.Struct, frozen=True, tag="send record"):
    """To the replicator: a record is whole on this node."""

    ranks: RankGroup
    generation: str
    record: int
    step: int
    meta: bytes
    rank_states: dict[int, bytes]


class CopyState(msgspec.Struct, frozen=True, tag="copy state"):
    """From the replicator: have the state after a record, which lies a little ahead, copied for peers.

    Answer: StateCopied or StateNotCopied, for each set of ranks that share their shards.
    """

    record: int


class StateNotCopied(msgspec.Struct, frozen=True, tag="state not copied"):
    """To the replicator: the state after that record has not been copied, as the order came too late, or something else
    is being copied."""

    record: int


class StateCopied(msgspec.Struct, frozen=True, tag="state copied"):
    """To the replicator: the state after a record; its copy comes along, laid out as one for storage, then the static
    region where there is one.

    `missing`, `plain`: as in RecordMeta, of all optimizer state. `history`: timelines, oldest first.
    """

    ranks: RankGroup
    record: int
    generation: str
    spec: StateSpec
    step: int
    rank_states: dict[int, bytes]
    missing: tuple[tuple[int, int, str], ...]
    plain: bytes
    history: tuple[Branch, ...]


class GiveUp(msgspec.Struct, frozen=True, tag="give up"):
    """To the replicator: send no more of what the generation begins with, the replica has to go on. Answer: GivenUp."""

    ranks: RankGroup
    generation: str


class GivenUp(msgspec.Struct, frozen=True, tag="given up"):
    """Answer to GiveUp."""

    ranks: RankGroup
    generation: str


class Holds(msgspec.Struct, frozen=True, tag="holds"):
    """To the replicator: bytes of this node's memory in base and log, those being written too."""

    nbytes: int


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """To the replicator: the attempt is over. Nothing is sent or taken until the next one; what is kept stays."""


class Halted(msgspec.Struct, frozen=True, tag="halted"):
    """Answer to Halt: of the attempt nothing more comes from the replicator."""


class ListFragments(msgspec.Struct, frozen=True, tag="fragments?"):
    """To the replicator. Answer: Fragments; what belongs to another model than this fingerprint's has a problem."""

    fingerprints: dict[int, tuple[str, ...]]


class Fragments(msgspec.Struct, frozen=True, tag="fragments"):
    """Answer to ListFragments."""

    fragments: tuple[HeldFragments, ...]


class KeepRoom(msgspec.Struct, frozen=True, tag="keep room"):
    """From the replicator: memory in which it keeps fragments of a window; its descriptor comes along.

    The agent has it until the replicator drops it, and hands it to the next replicator with this very message, before
    Listen. `window`: what its owner has said of it, encoded. `unit`, `slot`: as in Place.
    """

    owner: RankGroup
    generation: str
    window: bytes
    unit: int
    slot: int


class LetGoOfRoom(msgspec.Struct, frozen=True, tag="let go of room"):
    """From the replicator: this memory is not needed any more."""

    owner: RankGroup
    generation: str
    slot: int


class Deserted(msgspec.Struct, frozen=True, tag="deserted"):
    """To the replicator: a trainer of this node goes on without its agent, so that no record becomes whole here."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To the replicator: training is over here. What peers still wait for goes out, nothing else. Answer: Drained."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Answer to Drain: peers have all of it, or do not take it."""


class WatermarkAdvanced(msgspec.Struct, frozen=True, tag="watermark advanced"):
    """From the replicator, and to trainers where they wait for it: the watermark has got to `record`.

    `whole`: all nodes are protected: up to the tolerated number of them may be lost. `waits_suspended`: nobody is to
    wait, since some node has lost all that it had and can begin anew only if training goes on, or stands still for too
    long; or links do not carry every record.
    """

    record: int
    whole: bool
    waits_suspended: bool = False


class ReplicatorLost(msgspec.Struct, frozen=True, tag="replicator lost"):
    """To trainers: their node has no replicator for a while, so that peers get nothing from it; why, and for how
    long.
    """

    reason: str


AgentToTrainer = WatermarkAdvanced | ReplicatorLost
AgentToReplicator = (
    KeepRoom | ListFragments | SendGeneration | SendRecord | Deserted | StateCopied | StateNotCopied | GiveUp | Holds |
    Drain | Halt
)  # fmt: skip
ReplicatorToAgent = Fragments | Halted | Drained | KeepRoom | LetGoOfRoom | WatermarkAdvanced | CopyState | GivenUp
