"""How a state is fetched from peers' memory: messages of trainers, their agent and its replicator."""

from __future__ import annotations

import msgspec

from memckpt.state.records import Branch, RankGroup
from memckpt.state.spec import StateSpec


class FromNode(msgspec.Struct, frozen=True, tag="node"):
    """Source of a state: all of it from a node that holds it."""

    node: str


class FromFragments(msgspec.Struct, frozen=True, tag="fragments"):
    """Source of a state: decoded from fragments, and what these leave out from a replica."""

    generation: str
    #: (node, index) of all that hold some of it, ascending; more than are needed, so that damaged ones can be skipped.
    fragments: tuple[tuple[str, int], ...]
    data: int  #: k, the number of different fragments needed
    period: int  #: T, the number of records that make a state; 1 where there is a replica
    replica: tuple[str, RankGroup] | None = None  #: node and ranks with what is not private; None: all is decoded


class WantedState(msgspec.Struct, frozen=True):
    """State of some ranks after a record, to be fetched. `before`: the state before that record is wanted, too."""

    ranks: RankGroup
    record: int
    source: FromNode | FromFragments
    before: bool = False


class Recover(msgspec.Struct, frozen=True, tag="recover"):
    """From a trainer, for its node: fetch what is missing here, hand out what others miss. Answer: Recovered."""

    record: int  #: the one that the plan chose
    serve: tuple[RankGroup, ...]  #: sets of ranks whose state after it is handed out from here
    fetch: tuple[WantedState, ...]  #: what this node is to get
    memory_budget_bytes: int | None
    history: tuple[Branch, ...] = ()  #: timelines up to that record, oldest first
    before: bool = False  #: hand out the state before it as well
    adopt: bool = False  #: what is fetched may be of ranks that this attempt has not: it goes to storage from here


class BadSourceSeen(msgspec.Struct, frozen=True, array_like=True):
    """A source, as in BadSource, from which nothing right could be read; `silent`: it may answer later."""

    node: str
    ranks: RankGroup
    generation: str
    silent: bool = False


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """Answer to Recover. With a problem and nothing bad the reason lies in the node itself, and not in a source."""

    problem: str = ""  #: why it failed, in words
    bad: tuple[BadSourceSeen, ...] = ()  #: sources to be left out when it is tried again
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
    """Answer to Fill: the records that make the state, by number."""

    ranks: RankGroup
    metas: dict[int, bytes] = {}  #: their scalars
    step: int = 0  #: of the record itself
    rank_states: dict[int, bytes] = {}  #: after it
    nbytes: int = 0  #: that were read
    problem: str = ""  #: as in Recovered
    bad: tuple[BadSourceSeen, ...] = ()  #: the same
    recovery: int = 0  #: for which it was read, as in Describe
    before: tuple[int, dict[int, bytes]] | None = None  #: step and rank states of the record before it, if asked for


TrainerToAgent = Recover
AgentToTrainer = Recovered | RecoveryProgress
AgentToReplicator = Describe | Fill
ReplicatorToAgent = Described | Filled | RecoveryProgress
