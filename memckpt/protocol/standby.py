"""What an agent and its replicator say to each other about standby replicas: the replicator receives, the agent
redoes.
"""

from __future__ import annotations

import msgspec

from memckpt.state.records import Branch, RankGroup
from memckpt.state.spec import StateSpec


class OpenStandby(msgspec.Struct, frozen=True, tag="mirror?"):
    """From the replicator: make room for a replica of an owner's, and slots. Answer: StandbyOpened or StandbyRefused.

    Attributes as in SendGeneration; `attempt` is the nonce of the one that writes it.
    """

    ranks: RankGroup
    generation: str
    attempt: str
    base: int
    spec: StateSpec
    history: tuple[Branch, ...]


class StandbyOpened(msgspec.Struct, frozen=True, tag="mirror"):
    """Answer to OpenStandby; regions come along: slots, then static where present, and replica.

    Slots are stamped with `number`; `spec` is the standby replica's own: of its layout.
    """

    ranks: RankGroup
    generation: str
    number: int
    spec: StateSpec


class StandbyRefused(msgspec.Struct, frozen=True, tag="no mirror"):
    """Answer to OpenStandby: there is none, and why."""

    ranks: RankGroup
    generation: str
    reason: str


class StandbyRecord(msgspec.Struct, frozen=True, tag="mirror record"):
    """From the replicator: a record of an owner's is whole, in its slot; a virtual one is in the replica already."""

    ranks: RankGroup
    generation: str
    record: int
    step: int
    meta: bytes
    rank_states: dict[int, bytes]


class StandbySkip(msgspec.Struct, frozen=True, tag="mirror skip"):
    """From the replicator: what is missing up to `record` does not come any more, and its slots are needed."""

    ranks: RankGroup
    generation: str
    record: int


class StandbyApplied(msgspec.Struct, frozen=True, tag="mirror applied"):
    """To the replicator: a standby replica's replica has got to record `applied`: the slots up to that one are free."""

    ranks: RankGroup
    generation: str
    applied: int


class StandbyFailed(msgspec.Struct, frozen=True, tag="mirror failed"):
    """To the replicator: a standby replica is gone, as its redo has failed."""

    ranks: RankGroup
    generation: str
    reason: str


class CloseStandby(msgspec.Struct, frozen=True, tag="close mirror"):
    """From the replicator: nobody needs this standby replica any more."""

    ranks: RankGroup
    generation: str
