"""How a state is fetched from peers' memory: messages of trainers, their agent and its replicator."""

from __future__ import annotations

import msgspec

from memckpt.state.records import Branch, RankGroup
from memckpt.state.spec import StateSpec


class FromNode(msgspec.Struct, frozen=True, tag="node"):
    """Source of a state: all of it from a node that holds it."""

    node: str


class FromFragments(msgspec.Struct, frozen=True, tag="fragments"):
    """Source of a state: decoded from fragments, and what these leave out from a replica.

    Attributes:
        fragments: (node, index) of all fragments that hold some of what is needed, ascending; more than are needed, so
            that damaged ones can be skipped.
        data: k, the number of different fragments needed.
        period: T, the number of records that make a state; 1 where there is a replica.
        replica: node and ranks of a replica of what these share with it, so that only private state is decoded. None:
            all is.
    """

    generation: str
    fragments: tuple[tuple[str, int], ...]
    data: int
    period: int
    replica: tuple[str, RankGroup] | None = None


class WantedState(msgspec.Struct, frozen=True):
    """State of some ranks after a record, to be fetched. `before`: the state before that record is wanted, too."""

    ranks: RankGroup
    record: int
    source: FromNode | FromFragments
    before: bool = False


class Recover(msgspec.Struct, frozen=True, tag="recover"):
    """From a trainer, for its node: fetch what is missing here, hand out what others miss. Answer: Recovered.

    Attributes:
        record: the one that the plan chose.
        serve: sets of ranks whose state after it is handed out from here; `before`: also that before it.
        fetch: what this node is to get.
        history: timelines up to that record, oldest first.
        adopt: what is fetched may be of ranks that this attempt does not have: it goes to storage from here.
    """

    record: int
    serve: tuple[RankGroup, ...]
    fetch: tuple[WantedState, ...]
    memory_budget_bytes: int | None
    history: tuple[Branch, ...] = ()
    before: bool = False
    adopt: bool = False


class BadSourceSeen(msgspec.Struct, frozen=True, array_like=True):
    """A source, as in BadSource, from which nothing right could be read; `silent`: it may answer later."""

    node: str
    ranks: RankGroup
    generation: str
    silent: bool = False


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """Answer to Recover. `problem`: why it failed, in words; `bad`: sources to be left out when it is tried again.

    With a problem and nothing bad the reason lies in the node itself, and no source is to blame.
    """

    problem: str = ""
    bad: tuple[BadSourceSeen, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0


class RecoveryProgress(msgspec.Struct, frozen=True, tag="progress"):
    """From the replicator, passed on to the trainers: bytes more of what is missing are here."""

    nbytes: int


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """To the replicator: report the layout of a state. Answer: Described.

    `recovery` numbers the recoveries of an agent: when a new one begins, reads of earlier ones are given up.
    """

    wanted: WantedState
    recovery: int = 0


class Described(msgspec.Struct, frozen=True, tag="described"):
    """Answer to Describe; `problem`: why there is no answer."""

    ranks: RankGroup
    spec: StateSpec | None = None
    problem: str = ""
    bad: tuple[BadSourceSeen, ...] = ()
    recovery: int = 0


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """To the replicator: fetch a state into the regions that come along: slots, then static. Answer: Filled."""

    wanted: WantedState
    spec: StateSpec
    recovery: int = 0


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """Answer to Fill: scalars of the records that make the state, by number; step and rank states of the last one.

    `before`: step and rank states of the record before it; None where that was not asked for. `problem`, `bad`: as in
    Recovered. `recovery`: for which it was read, as in Describe.
    """

    ranks: RankGroup
    metas: dict[int, bytes] = {}
    step: int = 0
    rank_states: dict[int, bytes] = {}
    nbytes: int = 0
    problem: str = ""
    bad: tuple[BadSourceSeen, ...] = ()
    recovery: int = 0
    before: tuple[int, dict[int, bytes]] | None = None


# This file's part of what is said on each connection

TrainerToAgent = Recover
AgentToTrainer = Recovered | RecoveryProgress
AgentToReplicator = Describe | Fill
ReplicatorToAgent = Described | Filled | RecoveryProgress
