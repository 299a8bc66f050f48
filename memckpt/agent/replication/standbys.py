"""Standby replicas: replicas of other nodes' ranks, on which their records are redone here as their own agents redo
them.

A standby replica is an ordinary generation that is redone eagerly, with slots for R = D + 2 records (one more where it
stays a record behind what it may apply, so that a resume can repeat the newest); it takes
(12 + R (4 + 12/T)) bytes per parameter and copy (fp32, Adam). Its regions are filled by the replicator, which is told
how far redo has got: a record is acknowledged once the one two before it is applied, if it may be. So the owner, which
is at most D records ahead of what is acknowledged, finds the slots free; one that is not is not overwritten.

Where an owner has not waited and has skipped records, its standby replica skips them, too. It can produce nothing then
until it has had T records in a row: their anchors overwrite all of its state by value, and it is exact again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from memckpt.agent.replication.standby import StandbyReplica, as_standby
from memckpt.errors import AgentError, MemckptError
from memckpt.memory.generation import Generation
from memckpt.memory.generation_regions import Allowance
from memckpt.memory.redo_news import RedoNews
from memckpt.protocol.standby import (
    CloseStandby,
    OpenStandby,
    StandbyApplied,
    StandbyFailed,
    StandbyOpened,
    StandbyRecord,
    StandbyRefused,
    StandbySkip,
)
from memckpt.protocol.trainer import Alarm, Credit, Drift
from memckpt.state.records import Branch, HeldRecords, RankGroup, timeline_of

_log = logging.getLogger("memckpt.agent")
#: The owner's ranks, and the name of their generation.
StandbyKey = tuple[RankGroup, str]


class StandbyReplicas:
    """All standby replicas of a node. Belongs to the agent's event loop; :meth:`close` it.

    Those of the attempt that runs take records. Those of earlier ones stand still: they are there for the case that
    this one ends before it is protected itself.

    Args:
        node: its name.
        notify: takes what a redo thread says of a standby replica, from that thread.
        beside: bytes that the node holds beside standby replicas.

    Attributes:
        attempt: the nonce of the one that runs; None between attempts.
        optimizers: classes that the node's own ranks use; no other one that a peer names is imported.
    """

    def __init__(self, node: str, notify: Callable[[StandbyKey, RedoNews], None], beside: Callable[[], int]) -> None:
        self._node = node
        self._notify = notify
        self._beside = beside
        self._all: dict[StandbyKey, StandbyReplica] = {}
        self._number = 0
        self.attempt: str | None = None
        self.optimizers: frozenset[str] = frozenset()
        self._watermark = 0
        self._budget: int | None = None
        self._threads = 1

    @property
    def nbytes(self) -> int:
        """Shared memory of all standby replicas, in bytes."""
        return sum(one.nbytes for one in self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def close(self) -> None:
        for key in list(self._all):
            self._drop(key)

    def _drop(self, key: StandbyKey) -> None:
        self._all.pop(key).close()

    # Attempts

    def begin(self, attempt: str, record: int | None, budget: int | None, threads: int) -> None:
        """An attempt begins; it goes on behind `record`, or uses nothing of what is here (None).

        Args:
            budget: the configured limit on the node's memory, in bytes.
            threads: number of threads for redo.
        """
        self.attempt, self._watermark = attempt, record or 0
        self._budget, self._threads = budget, threads
        for standby in self._all.values():
            if standby.opened.attempt == attempt:
                continue  # the plan is made once more
            if record is not None:
                standby.forget_beyond(record)

    def halt(self) -> None:
        """The attempt is over; all that its replicator had received is here."""
        self.attempt = None

    def watermark_advanced(self, watermark: int, whole: bool) -> None:
        """The watermark has got so far; `whole`: every node is protected by this attempt."""
        self._watermark = max(self._watermark, watermark)
        for key, standby in list(self._all.items()):
            if standby.opened.attempt == self.attempt:
                standby.let_go_on(self._redo_limit(standby))
            elif whole:
                self._drop(key)

    def _redo_limit(self, standby: StandbyReplica) -> int:
        """Up to which record redo may go.

        An owner has a record only once the one D before it was acknowledged for every node, known here or not: an
        agent that is new in its attempt has yet to hear of it. One that does not wait goes back no further itself.
        """
        newest = standby.generation.newest
        return max(self._watermark, newest - standby.opened.spec.slots)

    # Messages of the replicator

    def open(self, message: OpenStandby) -> tuple[StandbyOpened | StandbyRefused, list[int]]:
        """Make room for an owner's generation: the answer, and the descriptors of its regions."""
        key = message.ranks, message.generation
        try:
            standby = self._make(message)
        except Exception as error:  # of foreign code, too: an optimizer that another node names, and its constructor
            problem = _in_words(error)
            _log.warning("no standby replica is made of ranks %s of another node: %s", list(message.ranks), problem)
            return StandbyRefused(*key, problem), []
        self._all[key] = standby
        generation = standby.generation
        _log.info(
            "ranks %s of another node get a standby replica here from record %d on", list(message.ranks), message.base
        )
        return StandbyOpened(*key, generation.number, generation.spec), [one.fd for one in generation.regions]

    def _make(self, message: OpenStandby) -> StandbyReplica:
        if message.attempt != self.attempt:
            raise AgentError("it belongs to another attempt than the one that runs here")
        if message.spec.mode == "snapshot":
            raise AgentError("its steps cannot be redone")
        from memckpt.state.optimizers import resolve  # imports torch

        for optimizer in message.spec.optimizers:
            if f"{optimizer.module}.{optimizer.qualname}" not in self.optimizers:
                used = ", ".join(sorted(self.optimizers))
                raise AgentError(
                    f"expected an optimizer class that the ranks of this node use ({used}), found "
                    f"{optimizer.module}.{optimizer.qualname}, which is not imported for a peer"
                )
            resolve(optimizer.module, optimizer.qualname)
        key = message.ranks, message.generation
        if key in self._all:  # of a replicator that has died
            self._drop(key)
        try:
            return self._allocate(message)
        except MemckptError as error:
            former = [one for one, standby in self._all.items() if standby.opened.attempt != self.attempt]
            if not former:
                raise
            _log.warning(
                "dropping standby replicas of an earlier attempt before this one's are whole (a gap in protection): %s",
                error,
            )
            for one in former:
                self._drop(one)
            return self._allocate(message)

    def _allocate(self, message: OpenStandby) -> StandbyReplica:
        self._number += 1
        key = message.ranks, message.generation
        generation = Generation(
            self._number,
            as_standby(message.spec, message.ranks),
            Allowance(self.nbytes + self._beside(), self._budget),
            threads=self._threads,
            notify=lambda said: self._notify(key, said),
        )
        return StandbyReplica(message, generation)

    def record(self, message: StandbyRecord) -> StandbyFailed | None:
        """A record is whole in its slot; what the replicator is to know if it is of no use."""
        key = message.ranks, message.generation
        standby = self._all.get(key)
        if standby is None or standby.opened.attempt != self.attempt:
            return None
        if standby.generation.redo_limit is None:
            standby.generation.redo_limit = self._watermark
        try:
            standby.take(message)
        except Exception as error:  # of foreign code, too: what a peer has sent is decoded, its optimizers are made
            problem = f"record {message.record}: {_in_words(error)}"
            _log.error("the replica of ranks %s of another node: %s", list(message.ranks), problem)
            self._drop(key)
            return StandbyFailed(*key, problem)
        standby.let_go_on(self._redo_limit(standby))
        return None

    def skip(self, message: StandbySkip) -> None:
        """Nothing more comes up to a record."""
        standby = self._all.get((message.ranks, message.generation))
        if standby is not None and standby.opened.attempt == self.attempt:
            standby.skip(message.record)

    def close_one(self, message: CloseStandby) -> None:
        """Close a standby replica that nobody needs any more."""
        key = message.ranks, message.generation
        if key in self._all:
            self._drop(key)

    def told(self, key: StandbyKey, message: RedoNews) -> StandbyApplied | StandbyFailed | None:
        """Handle news of a redo thread; returns what the replicator has to know of it."""
        standby = self._all.get(key)
        if standby is None:
            return None  # it was dropped since
        match message:
            case Credit():
                return StandbyApplied(*key, message.applied)
            case Alarm():
                _log.error("the replica of ranks %s of another node: %s", list(key[0]), message.reason)
                self._drop(key)
                return StandbyFailed(*key, message.reason)
            case Drift() if message.record > standby.exact_from:
                _log.info(
                    "drift of %g ulp at record %d of ranks %s in %s",
                    message.max_ulp,
                    message.record,
                    list(key[0]),
                    message.tensor,
                )
        return None

    # Recovery

    def inventory(self, fingerprint_of: Callable[[RankGroup], Sequence[str] | None]) -> tuple[HeldRecords, ...]:
        """What can be produced, for the plan.

        Args:
            fingerprint_of: a rank of these, of the model that is to be resumed; None: there is nothing to compare with.
        """
        found: dict[tuple[object, ...], HeldRecords] = {}
        for standby in self._all.values():
            held = standby.held(self._node, fingerprint_of(standby.opened.ranks))
            if held is None:
                continue
            # An owner has several where a generation has begun after another one.
            key = held.ranks, held.history
            found[key] = held if key not in found else _merged(found[key], held)
        return tuple(found.values())

    def find(self, ranks: RankGroup, record: int, history: Sequence[Branch], behind: int = 0) -> StandbyReplica | None:
        """One that can produce the state of these ranks after a record that is of this history, and `behind` before."""
        wanted = set(range(record - behind, record + 1))
        for standby in reversed(self._all.values()):
            opened = standby.opened
            same = timeline_of(opened.history, record) == timeline_of(history, record)
            if opened.ranks == ranks and same and wanted <= set(standby.standing_still()):
                return standby
        return None


def _in_words(error: Exception) -> str:
    """What an error says; of one that is not ours also what it is."""
    return str(error) if isinstance(error, MemckptError) else f"{type(error).__name__}: {error}"


def _merged(one: HeldRecords, other: HeldRecords) -> HeldRecords:
    steps = dict(zip(one.records + other.records, one.steps + other.steps, strict=True))
    return msgspec.structs.replace(
        other,
        records=tuple(sorted(steps)),
        steps=tuple(steps[record] for record in sorted(steps)),
        newest=max(one.newest, other.newest),
        problem=one.problem or other.problem,
    )
