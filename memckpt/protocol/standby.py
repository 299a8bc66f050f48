"""What an agent and its replicator say to each other about mirrors: the replicator receives, the agent redoes."""

from __future__ import annotations

import msgspec

from memckpt.state.layout import StateSpec
from memckpt.state.records import Branch


class OpenMirror(msgspec.Struct, frozen=True, tag="mirror?"):
    """From the replicator: make room for a replica of an owner's, and slots. Answer: MirrorOpened or MirrorRefused.

    Attributes as in SendGeneration; `attempt` is the nonce of the one that writes it.
    """

    ranks: tuple[int, ...]
    generation: str
    attempt: str
    base: int
    spec: StateSpec
    history: tuple[Branch, ...]


class MirrorOpened(msgspec.Struct, frozen=True, tag="mirror"):
    """Answer to OpenMirror; regions come along: slots, then static where present, and replica.

    Slots are stamped with `number`; `spec` is the mirror's own: of its layout.
    """

    ranks: tuple[int, ...]
    generation: str
    number: int
    spec: StateSpec


class MirrorRefused(msgspec.Struct, frozen=True, tag="no mirror"):
    """Answer to OpenMirror: there is none, and why."""

    ranks: tuple[int, ...]
    generation: str
    reason: str


class MirrorRecord(msgspec.Struct, frozen=True, tag="mirror record"):
    """From the replicator: a record of an owner's is whole, in its slot; a virtual one is in the replica already."""

    ranks: tuple[int, ...]
    generation: str
    record: int
    step: int
    meta: bytes
    rank_states: dict[int, bytes]


class MirrorSkip(msgspec.Struct, frozen=True, tag="mirror skip"):
    """From the replicator: what is missing up to `record` does not come any more, and its slots are needed."""

    ranks: tuple[int, ...]
    generation: str
    record: int


class MirrorApplied(msgspec.Struct, frozen=True, tag="mirror applied"):
    """To the replicator: a mirror's replica has got to record `applied`: the slots up to that one are free."""

    ranks: tuple[int, ...]
    generation: str
    applied: int


class MirrorFailed(msgspec.Struct, frozen=True, tag="mirror failed"):
    """To the replicator: a mirror is gone, as its redo has failed."""

    ranks: tuple[int, ...]
    generation: str
    reason: str


class CloseMirror(msgspec.Struct, frozen=True, tag="close mirror"):
    """From the replicator: nobody needs this mirror any more."""

    ranks: tuple[int, ...]
    generation: str
