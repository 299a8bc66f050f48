"""One generation of base and log on a node: its regions and what is known about its records.

What all modes share is :class:`Generation`. Which records a node can produce is the mode's: :class:`LazyGeneration`
needs the slots of a whole window, :class:`EagerGeneration` its replica, :class:`SnapshotGeneration` one slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memckpt.errors import DamagedStateError, UnsupportedError
from memckpt.memory.ledger import Ledger, RankStates
from memckpt.memory.redo_news import MemoryReserved, RedoNews
from memckpt.memory.region import Allowance, GenerationRegions
from memckpt.memory.slots import SlotRing, max_local_ranks
from memckpt.protocol.storing import LogRecord
from memckpt.protocol.trainer import Commit, Drift, GenerationCommit
from memckpt.state.layout import Layout
from memckpt.state.records import Branch, HeldRecords, RankGroup, Timeline
from memckpt.state.spec import StateSpec

if TYPE_CHECKING:
    from memckpt.memory.replica import Replica


#: A step's number, its scalars, and the rank states after it by rank.
Sendable = tuple[int, bytes, dict[int, bytes]]


class Generation(ABC):
    """Owns the regions of one generation; :meth:`close` frees them. :func:`make_generation` makes one.

    Complete once every local rank has committed its part of the start; until then it can produce nothing. No other one
    has its `number`. With `begins`, the record after which it begins, only what its start takes is reserved until it is
    made whole. A thread reserves much memory, and calls `notify` at its end. Raises MemoryBudgetError.
    """

    #: Redoes steps as they are committed; only an :class:`EagerGeneration` has one.
    replica: Replica | None = None

    def __init__(
        self,
        number: int,
        spec: StateSpec,
        allowance: Allowance,
        begins: int | None,
        notify: Callable[[RedoNews], None],
    ) -> None:
        self.number = number
        self.spec = spec
        self.layout = Layout(spec)
        if len(spec.local_ranks) > max_local_ranks():
            raise UnsupportedError(
                f"expected at most {max_local_ranks()} ranks on a node, found {len(spec.local_ranks)}"
            )
        #: The record after which it begins, if only its start was reserved at first.
        self.begins = begins
        self._reserved = lambda: notify(MemoryReserved(number))
        self.regions = GenerationRegions.create(self.layout, allowance, begins, self._reserved)
        try:
            self.ring = SlotRing(self.regions.slots, self.layout, number)
        except BaseException:  # raised again; they have no other owner
            self.regions.close()
            raise
        #: Why its mode was chosen, in words.
        self.reason = ""
        #: What the audit has found first: its records do not give the states that training had.
        self.drift: Drift | None = None
        self.base: int | None = None
        self.complete = False
        #: Whether other nodes have given it back.
        self._fetched = False
        self.ledger = Ledger(spec.local_ranks)
        self._started: set[int] = set()
        self._missing: tuple[tuple[int, int, str], ...] = ()
        self._plain = b""
        #: Up to which record redo may go on as far as peers are concerned; None: as far as it likes.
        self.redo_limit: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are reserved for it."""
        return self.regions.nbytes

    def make_whole(self, held_bytes: int) -> None:
        """As :meth:`GenerationRegions.make_whole`."""
        self.regions.make_whole(held_bytes, self._reserved)

    def close(self) -> None:
        self.regions.close()

    # What the ranks commit

    def start(self, rank: int, message: GenerationCommit) -> bool:
        """A rank has written its part of the start; True when that makes the generation complete."""
        if self.base not in (None, message.record):
            raise DamagedStateError(
                f"generation {self.number}: rank {rank} begins after record {message.record}, others after {self.base}"
            )
        if self.begins not in (None, message.record):
            raise DamagedStateError(
                f"generation {self.number}: rank {rank} begins after record {message.record}, room was asked for one "
                f"that begins after {self.begins}"
            )
        self.base = message.record
        if rank == self.spec.local_ranks[0]:
            first = message.record - len(message.metas) + 1
            self.ledger.metas.update({first + index: meta for index, meta in enumerate(message.metas)})
            self._missing, self._plain = message.missing, message.plain
        self._keep_rank_state(rank, message.record, message.step, message.rank_state)
        self._started.add(rank)
        # Where the ranks do not agree on what it holds once, nothing can be produced, and another one follows.
        self.complete = self._all_started and self.agrees(message.record)
        return self.complete

    @property
    def _all_started(self) -> bool:
        return self._started == set(self.spec.local_ranks)

    def started_by(self, rank: int) -> bool:
        """Whether a rank has written its part of the start."""
        return rank in self._started

    def commit(self, rank: int, message: Commit) -> None:
        """A rank's part of a record is whole."""
        if message.meta:
            self.ledger.metas.update({message.record: message.meta})
        self._keep_rank_state(rank, message.record, message.step, message.rank_state)
        if not self.complete and self._all_started:
            self.complete = self._is_complete_late()

    def _is_complete_late(self) -> bool:
        """Whether later records can be produced: a start may be read after the base's by-value tensors are gone."""
        return bool(self._find_producible())

    def _keep_rank_state(self, rank: int, record: int, step: int, state: bytes) -> None:
        self.ledger.add_rank_state(rank, record, step, state)
        newest = self.newest
        oldest_state = newest - self.layout.ring * self.spec.every
        self.ledger.drop_before(newest - self.spec.slots, oldest_state, self._records_with_kept_states())

    def _records_with_kept_states(self) -> set[int]:
        """Records whose rank states are kept longer than those of others."""
        return set()

    @property
    def newest(self) -> int:
        """The newest record that a local rank has committed; 0 if none has."""
        return max(self.ledger.committed.values(), default=0)

    @property
    def common(self) -> int:
        """The oldest of the newest records of ranks that have committed; 0 if none has."""
        return min(self.ledger.committed.values(), default=0)

    def raise_redo_limit(self, redo_limit: int | None) -> None:
        """Peers have got so far: let redo go on."""
        self.redo_limit = redo_limit

    # What can be produced

    def producible(self) -> list[int]:
        """Numbers of the records whose state this node can produce; the replica must be frozen."""
        return self._find_producible() if self.complete else []

    def producible_at_rest(self) -> list[int]:
        """The records that can be produced while no trainer runs, oldest first; a replica stands still from now on."""
        return self.producible()

    @abstractmethod
    def _find_producible(self) -> list[int]:
        """Numbers of the records whose state the regions hold, oldest first."""

    def _logged(self, oldest: int) -> list[int]:
        """Records from `oldest` on that every rank has committed, with their by-value tensors."""
        if self.base is None:
            return []
        return [
            record
            for record in range(max(oldest, self.base), self.common + 1)
            if self.ledger.knows(record) and self._has_by_value(record)
        ]

    def _oldest_in_slots(self) -> int:
        """The oldest record that no slot's next record is written over.

        While training waits for peers, the slot of the record after the newest still holds one of the window.
        """
        newest = self.newest
        filling = not self._is_sealed(newest + 1 - self.layout.ring)
        return newest - self.spec.slots + filling

    def agrees(self, record: int) -> bool:
        """Whether all local ranks have had the same of what is held once, and it is held."""
        return not self.layout.shared or self._has_by_value(record)

    def _is_sealed(self, record: int) -> bool:
        """Whether the slot of a record holds it, and is not being filled with a later one."""
        return _passes(self.ring.check, record, self.spec.local_ranks)

    def _has_by_value(self, record: int) -> bool:
        """The same of the record's by-value tensors."""
        return _passes(self.ring.check_by_value, record, self.spec.local_ranks)

    @abstractmethod
    def sendable(self, with_base: bool = True) -> dict[int, Sendable]:
        """Records whose bytes are here for peers; `with_base`: also a replica that stands, and stays, at the base."""

    def _logged_for_peers(self) -> list[int]:
        """Records with slots that no rank fills again."""
        oldest = self.common + 2 - self.layout.ring  # the slot that is being filled is that of the one before
        return [number for number in sorted(self.ledger.metas) if oldest <= number <= self.common]

    def refill(
        self,
        record: int,
        step: int,
        metas: dict[int, bytes],
        rank_states: dict[int, bytes],
        before: tuple[int, dict[int, bytes]] | None = None,
    ) -> None:
        """Hold the window of records, filled into the slots, that makes the state after `record`.

        `before`: step and rank states of the record before it, whose window is here as well. Raises DamagedStateError:
        it is not all there.
        """
        states = {record: RankStates(step, rank_states)}
        if before is not None:
            states[record - 1] = RankStates(*before)
        base = min(states)
        window = range(base - self.spec.period + 1, record + 1)
        missing = [number for number in window if not metas.get(number)]
        lacking = sorted({rank for one in states.values() for rank in {*self.spec.local_ranks} - one.by_rank.keys()})
        if missing or lacking:
            raise DamagedStateError(
                f"a fetched state: expected the records {window[0]} to {record} and the states of ranks "
                f"{list(self.spec.local_ranks)}, found none of records {missing}, ranks {lacking}"
            )
        for number in window:
            for rank in self.spec.local_ranks:
                self.ring.seal(number, rank, by_value=number >= base)
        self.ledger.replace({number: metas[number] for number in window}, states)
        self.base, self.complete = base, True
        self._fetched = True

    def why_not_repeated(self, record: int) -> str:
        """Why the step of `record` cannot be repeated from the state before it, in words; empty if it can."""
        if record == self.base and self._fetched:
            return f"record {record} came from other nodes, without the one before it"
        if record == self.base:
            return f"a generation began at record {record}"
        if record - 1 in self.producible():
            return ""
        return f"record {record - 1} is not held any more"

    def settle(self, record: int, behind: int = 0) -> None:
        """Make `record` the newest: redo up to `behind` records before it, drop what lies beyond it."""
        self.ledger.drop_beyond(record)

    def metas_for(self, record: int) -> tuple[bytes, ...]:
        """The records that produce `record` lazily: the window of T that closes with it."""
        return self.ledger.metas_of(range(record - self.spec.period + 1, record + 1))

    def following(self, record: int) -> dict[int, dict[int, bytes]]:
        """Rank states of the records after a snapshot, by record and rank."""
        return {}

    def log_record(self, record: int) -> LogRecord | None:
        """Everything but the tensors of a record that was made in this generation, if all of it is still known."""
        return self.ledger.log_record(record) if self.base is not None and record > self.base else None

    @property
    def records_held(self) -> int:
        """How many records' tensors are still in the log; the slot that is being filled is not among them."""
        return sum(1 for record in self.ledger.metas if record > self.newest + 1 - self.layout.ring)

    def steps_of(self, since: int, until: int) -> tuple[int, int]:
        """The framework's numbers, about, of the step after a record and of that of a later one."""
        newest = self.common
        step = self.ledger.steps.get(newest) or newest
        each = max(step - (self.ledger.steps.get(newest - 1) or step - 1), 1)
        return max(step - (newest - since) * each, 1), max(step - (newest - until) * each, 1)

    @property
    def newest_step(self) -> int | None:
        """The step of the newest record whose state is held."""
        return self.ledger.newest_step


class LazyGeneration(Generation):
    """Anchors and gradients only: a restore redoes the window of T records that ends with the one it restores."""

    def _find_producible(self) -> list[int]:
        return [
            record
            for record in self._logged(self._oldest_in_slots())
            # An abandoned attempt may have filled some slots of its window.
            if all(self._is_sealed(number) for number in range(record - self.spec.period + 1, record + 1))
        ]

    def sendable(self, with_base: bool = True) -> dict[int, Sendable]:
        return {number: self.ledger.sendable(number) for number in self._logged_for_peers()}


class EagerGeneration(Generation):
    """A replica of the whole state, which a redo thread advances behind the ranks; it calls `notify` on that thread."""

    replica: Replica

    def __init__(
        self,
        number: int,
        spec: StateSpec,
        allowance: Allowance,
        begins: int | None,
        notify: Callable[[RedoNews], None],
        threads: int,
    ) -> None:
        super().__init__(number, spec, allowance, begins, notify)
        from memckpt.memory.replica import Replica  # imports torch, which agents without replicas do without

        assert self.regions.replica is not None
        try:
            self.replica = Replica(
                self.layout, self.regions.slots, self.regions.replica, self.ring, threads, notify, number
            )
        except BaseException:  # raised again; they have no other owner
            self.regions.close()
            raise

    def close(self) -> None:
        self.replica.close()
        super().close()

    def _is_complete_late(self) -> bool:
        return False

    def start(self, rank: int, message: GenerationCommit) -> bool:
        if super().start(rank, message):
            self.replica.begin_at(message.record, self._missing, self._plain)
            for record, meta in sorted(self.ledger.metas.items()):
                if record > message.record:
                    self.replica.offer(record, meta)
            self._let_redo_go_on()
        return self.complete

    def commit(self, rank: int, message: Commit) -> None:
        super().commit(rank, message)
        if self.complete:
            if message.meta:
                self.replica.offer(message.record, message.meta)
            self._let_redo_go_on()

    def raise_redo_limit(self, redo_limit: int | None) -> None:
        super().raise_redo_limit(redo_limit)
        if self.complete:
            self._let_redo_go_on()

    def _let_redo_go_on(self) -> None:
        """Redo what every rank everywhere has committed.

        With several ranks that is known of record t only when one of ours has committed t + 1. It could do so only
        with gradients that needed every rank's commit of t.
        """
        if len(self.ledger.committed) < len(self.spec.local_ranks):
            return
        limit = self.common
        if self.spec.world_size > 1:
            limit = min(limit, self.newest - 1)
        if self.redo_limit is not None:
            limit = min(limit, self.redo_limit)
        # A step can be repeated only while the state before it is still there, that of the oldest that may be resumed.
        self.replica.allow(limit - self.spec.trails)

    def _find_producible(self) -> list[int]:
        return self._logged(max(self.replica.applied, self._oldest_in_slots() + 1))

    def sendable(self, with_base: bool = True) -> dict[int, Sendable]:
        assert self.base is not None
        found: dict[int, Sendable] = {}
        if with_base and self.replica.stands_at(self.base):
            virtual = range(self.base - self.spec.period + 1, self.base)
            found = {number: (0, b"", {}) for number in virtual}
            step, _, rank_states = self.ledger.sendable(self.base)
            found[self.base] = (step, b"", rank_states)
        logged = [number for number in self._logged_for_peers() if number > self.base]
        return found | {number: self.ledger.sendable(number) for number in logged}

    def why_not_repeated(self, record: int) -> str:
        why = super().why_not_repeated(record)
        if not why or record == self.base or self.replica.applied < record:
            return why
        why = "an attempt since repeated no step, or what is held has gone to storage"
        if not self.spec.trails:
            why = "the attempt before was not started with resume_check='replay'"
        return f"the replica has gone past record {record - 1}: {why}"

    def producible_at_rest(self) -> list[int]:
        self.replica.freeze()
        return self.producible()

    def settle(self, record: int, behind: int = 0) -> None:
        self.replica.forget_beyond(record)
        self.replica.advance_to(record - behind)
        self.replica.freeze()
        super().settle(record, behind)


class SnapshotGeneration(Generation):
    """The whole state by value, in one slot each N records: no step is redone."""

    def _snapshots(self) -> list[int]:
        """The newest records with a slot, oldest first; one more than there are slots.

        A rank may have begun to fill the slot of a record that another one has not committed yet.
        """
        if self.base is None:
            return []
        every = self.spec.every
        known = self.ledger.records_with_states
        found = [number for number in known if number == self.base or number % every == 0]
        return sorted(number for number in found if number >= self.base)[-self.layout.ring - 1 :]

    def _records_with_kept_states(self) -> set[int]:
        # A resume at a snapshot compares the rank state of the next record with what training makes of it.
        snapshots = self._snapshots()
        return {*snapshots, *(number + 1 for number in snapshots)}

    def _find_producible(self) -> list[int]:
        common = self.common
        return [record for record in self._snapshots() if record <= common and self._is_whole(record)]

    def _is_whole(self, record: int) -> bool:
        """Whether a snapshot is known with all that belongs to it, and its slot still holds it."""
        sealed = self._is_sealed(record) and self._has_by_value(record)
        return self.ledger.knows(record) and record in self.ledger.metas and sealed

    def sendable(self, with_base: bool = True) -> dict[int, Sendable]:
        return {number: self.ledger.sendable(number) for number in self._snapshots() if self._is_whole(number)}

    def why_not_repeated(self, record: int) -> str:
        if self.spec.every > 1:
            return f"state is copied every {self.spec.every} steps, and no step is redone"
        return super().why_not_repeated(record)

    def following(self, record: int) -> dict[int, dict[int, bytes]]:
        return self.ledger.rank_states_after(record)

    @property
    def records_held(self) -> int:
        return min(len(self._snapshots()), self.layout.ring)

    @property
    def newest_step(self) -> int | None:
        held = [record for record in self._snapshots() if self.ledger.knows(record)]
        return self.ledger.steps[held[-1]] if held else None


def make_generation(
    number: int,
    spec: StateSpec,
    allowance: Allowance,
    *,
    threads: int,
    notify: Callable[[RedoNews], None],
    begins: int | None = None,
) -> Generation:
    """Reserve the memory of a generation in the mode of its spec. Raises MemoryBudgetError: there is no room."""
    if spec.mode == "eager":
        return EagerGeneration(number, spec, allowance, begins, notify, threads)
    kind = LazyGeneration if spec.mode == "lazy" else SnapshotGeneration
    return kind(number, spec, allowance, begins, notify)


def _passes(check: Callable[[int, Sequence[int]], None], record: int, ranks: Sequence[int]) -> bool:
    """Whether a check of stamps finds nothing."""
    try:
        check(record, ranks)
    except DamagedStateError:
        return False
    return True


def branch_off(history: tuple[Branch, ...], record: int, timeline: Timeline) -> tuple[Branch, ...]:
    """History of an attempt that goes on from `record` on its own timeline."""
    left = [Branch(one.timeline, record if one.left_at is None else min(one.left_at, record)) for one in history]
    return (*left, Branch(timeline, None))


def describe(
    spec: StateSpec, node: str, ranks: RankGroup, history: tuple[Branch, ...], steps: Mapping[int, int], newest: int
) -> HeldRecords:
    """Describe the records of `ranks` that `node` can produce while nothing comes.

    `steps`: step of each of them, oldest first. `newest`: the newest record that all of the ranks have committed.
    """
    return HeldRecords(
        node=node,
        records=tuple(steps),
        steps=tuple(steps.values()),
        ranks=ranks,
        history=history,
        world_size=spec.world_size,
        sharding=spec.sharding(),
        newest=newest if steps else 0,
        replicas=spec.replicas,
    )
