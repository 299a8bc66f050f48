"""A unit, the ranks of a node that hold the same shards: base and log, and their way to storage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from memckpt.agent.saving.saver import Saver
from memckpt.agent.unit_host import Host, Siblings
from memckpt.errors import AgentError, MemckptError
from memckpt.memory.generation import Generation, branch_off, describe, make_generation
from memckpt.memory.pending_generation import Difference, PendingGeneration
from memckpt.memory.region import Allowance
from memckpt.memory.slots import AGREEMENT_RECORDS
from memckpt.processes.attempt import Attempt
from memckpt.processes.log import Seldom
from memckpt.protocol import trainer as said
from memckpt.protocol.channel import AgentToTrainer
from memckpt.protocol.trainer import Drift
from memckpt.state.records import Branch, HeldRecords, RankGroup, timeline_of
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt.agent")


class Unit:
    """Belongs to the agent's event loop. Owns generations and saver; `name`: of its parts of a checkpoint."""

    def __init__(self, node: str, ranks: RankGroup, name: str, host: Host, siblings: Siblings) -> None:
        self._node, self.ranks = node, ranks
        self._host, self._siblings = host, siblings
        self._seldom_due, self._seldom_complete = Seldom(), Seldom()
        self._pending = PendingGeneration(lambda message: host.notify(ranks, message), self._make_room)
        #: What the present attempt has gone on from; None: it has not, or not yet.
        self._resumed: ResumedState | None = None
        #: Number of the generation for whose slots ranks wait, and these ranks; None while none waits.
        self._wanted: tuple[int, set[int]] | None = None
        #: Whom to answer once the memory of a generation is reserved, or the kernel has refused it.
        self._awaiting: list[tuple[Generation, Callable[[MemckptError | None], None]]] = []
        #: Timelines, oldest first; the last one is that of the newest record.
        self.history: tuple[Branch, ...] = ()
        self.saver = Saver(name, ranks, host, siblings)
        self.generations = HeldGenerations(ranks, self.saver.drop_generation)

    def _tell_trainers(self, message: AgentToTrainer, besides: int | None = None) -> None:
        self._host.tell_ranks(self.ranks, message, besides=besides)

    def _beside(self) -> int:
        return self._siblings.bytes_beside(self.ranks)

    @property
    def held(self) -> Generation | None:
        """The newest complete generation; None while nothing is held."""
        return self.generations.newest

    @property
    def nbytes(self) -> int:
        """Shared memory of all its generations."""
        pending = self._pending.generation
        return self.generations.nbytes + (pending.nbytes if pending is not None else 0)

    def close(self) -> None:
        self.saver.close()
        self.generations.drop_all()
        self._pending.drop_generation()

    def begin_attempt(self) -> None:
        """Prepare for new trainers: those of the last attempt are dead, and all that they had sent is read."""
        self.saver.abort()
        if self._pending.generation is not None:
            _log.warning("the generation that an earlier attempt had begun was not complete; it is dropped")
        self._pending.begin_attempt()
        self._resumed = self.generations.redo_limit = None
        self._wanted = None
        self._awaiting.clear()

    def inventory(self, fingerprint: tuple[str, ...] | None) -> HeldRecords:
        """Its part of the recovery plan; `fingerprint` is of a rank that holds the same tensors, where there is one."""
        held = self.held
        difference = held.spec.difference(fingerprint) if held is not None and fingerprint is not None else None
        if held is None or difference is not None:
            return HeldRecords(node=self._node, ranks=self.ranks, problem=difference or "")
        producible = self.generations.producible_at_rest()
        steps = {record: one.ledger.steps.get(record, 0) for record, one in producible.items()}
        return describe(held.spec, self._node, self.ranks, self.history, steps, held.common)

    # What trainers say

    def prepare(self, rank: int, message: said.Prepare) -> Generation:
        """The generation that a rank is to write, as soon as it is reserved (:meth:`when_reserved`)."""
        if not self._pending.is_for(rank, message):
            self._finish_reserving()  # what it replaces is of no use, and other ranks still wait for it
        differing = self._pending.ask(rank, message)
        if differing is not None:
            self._bring_together(message.record, differing)
        generation, fresh = self._pending.allocate(rank, message, self.generations.nbytes, self._beside())
        generation.reason = message.reason
        if fresh and (not self.history or self.history[-1].timeline != message.timeline):
            self.history = (Branch(message.timeline, None),) if self.held is None else self.history
        return generation

    def when_reserved(self, generation: Generation, answer: Callable[[MemckptError | None], None]) -> None:
        """Call `answer` as soon as a generation's memory is reserved; with the error where there is no room."""
        if generation.regions.reserving:
            self._awaiting.append((generation, answer))
        else:
            answer(None)

    def memory_reserved(self, number: int) -> None:
        """Go on with a generation whose memory is reserved, or was refused."""
        for generation in {self._generation(number), *(one for one, _ in self._awaiting if one.number == number)}:
            if generation is not None:
                self._finish_reserving(generation)

    def _finish_reserving(self, only: Generation | None = None) -> None:
        """Wait until memory is reserved, of one generation or (None) of all that ranks wait for."""
        awaiting = [one for one in self._awaiting if only in (None, one[0])]
        self._awaiting = [one for one in self._awaiting if one not in awaiting]
        for generation in {only} if only is not None else {one for one, _ in awaiting}:
            error = None
            try:
                generation.regions.finish_reserving()
            except MemckptError as refused:
                error = refused
                if generation is self._pending.generation:
                    self._pending.drop_generation()
            for one, answer in awaiting:
                if one is generation:
                    answer(error)

    def _bring_together(self, record: int, differing: Difference) -> None:
        """Order one generation of ranks that are about to begin differing ones, of which none could be complete."""
        changing, apart, missing = differing
        names = ", ".join(sorted(changing | apart))
        if names:
            _log.info("a new generation begins after record %d: not all ranks had seen %s change", record + 1, names)
            self._tell_trainers(said.Begin(record + 1, f"another rank has seen {names} change", changing, apart))
        else:
            what = f"only some have {', '.join(sorted(missing))}" if missing else "in their parameters or optimizers"
            self._tell_trainers(said.Gap(f"the ranks of this node differ: {what}"))

    def _make_room(self, reason: str) -> None:
        self.generations.drop_all()
        self._tell_trainers(said.Gap(reason))

    def discard(self) -> None:
        self.generations.drop_all()
        self._resumed, self.history = None, ()
        self.saver.log.begin_anew()

    def resume(self, message: said.Resume) -> tuple[Generation, said.Prepared]:
        """Go back to a record, for all ranks; a later call may ask for an older record, and all ranks must."""
        record = message.record
        if self._resumed is None or record < self._resumed.record:
            if self.history and self.history[-1].timeline == message.timeline:
                self.history = self.history[:-1]
            self._resumed = ResumedState(self.generations.producer_of(record), record, message.before)
            self.generations.stand_at(record, self._resumed.behind)
            follows = timeline_of(self.history, record)
            if follows is not None:
                self.saver.log.branch(record, follows)
            self.history = branch_off(self.history, record, message.timeline)
            _log.info("ranks %s resume at record %d", list(self.ranks), record)
        if self._resumed.record != record or self.held is None:
            raise AgentError(f"ranks of one node resume at different records: {self._resumed.record} and {record}")
        return self.held, self._resumed.prepared()

    # What peers have given back

    def make_room_for(self, spec: StateSpec, budget: int | None) -> Generation:
        """Make room for a state that is fetched from peers; it may be used once it is reserved (:meth:`when_reserved`).

        What is held stays until that is here, if both fit. Raises MemoryBudgetError: it does not fit alone either.
        """
        number, notify = self._pending.next_number(), partial(self._host.notify, self.ranks)

        def make() -> Generation:
            held = Allowance(self._beside() + self.generations.nbytes, budget)
            return make_generation(number, spec, held, threads=1, notify=notify)

        try:
            return make()
        except MemckptError:
            if self.held is None:
                raise
            self.generations.drop_all()
            return make()

    def take_over(self, generation: Generation, history: tuple[Branch, ...]) -> None:
        """Hold what was fetched in the place of what was held."""
        self.generations.take_over(generation)
        self.history = history

    # A generation that has begun

    def generation_committed(self, rank: int, message: said.GenerationCommit) -> None:
        """Take a rank's part of a new generation."""
        generation = self._generation(message.generation)
        if generation is None:
            return
        generation.redo_limit = self.generations.redo_limit
        if generation.start(rank, message) and generation is self._pending.generation:
            self._take_built(generation, message.record)

    def _take_built(self, generation: Generation, record: int) -> None:
        """Hold a new generation, which is complete after a record."""
        self._pending.give_away()
        self.generations.follow_with(generation, record)
        if (more := self._seldom_complete.count()) is not None:
            _log.info("generation %d is complete after record %d%s", generation.number, record, more)
        self._tell_trainers(said.Protected(generation.number, record))

    def want_slots(self, rank: int, message: said.NeedSlots) -> None:
        """Note that a rank has written its part of a start, and waits for :meth:`make_slots`."""
        if self._wanted is None or self._wanted[0] != message.generation:
            self._wanted = message.generation, set()
        self._wanted[1].add(rank)

    def make_slots(self, attempt: Attempt, elsewhere: Callable[[int], bool | None], now: bool = False) -> None:
        """Make the generation whole that ranks wait for, once the one before it has gone.

        That one goes as soon as all ranks of the job can go back to the new base. Where that cannot be known both are
        held, if they fit. `elsewhere`: whether all ranks outside of this unit can go back to a record; None: not known
        yet.
        """
        number, waiting = self._wanted or (0, set())
        if not any(attempt.is_here(rank) for rank in waiting):
            return
        generation = self._generation(number)
        if generation is None:
            self._answer_slots(said.SlotsMade(number, dropped=True))
            return
        if generation.regions.reserving:
            return
        known: bool | None = True
        if not generation.regions.whole:
            # One that has asked has written its part, and has let go of the old one's memory.
            others = [rank for rank in self.ranks if rank not in waiting and attempt.is_here(rank)]
            begins = generation.begins or 0
            if not now and any(generation.started_by(one) or not attempt.is_through(one, begins) for one in others):
                return  # another one is about to wait, too
            if generation is self.held and self.generations.before:
                known = elsewhere(generation.base or 0)
                if known is None and not now:
                    return
                if known:
                    self.generations.drop_older()
        try:
            self._make_whole(generation, or_gap=known is False and attempt.all_connected)
        except MemckptError as error:
            self._slots_made(number, error)
        else:
            self.when_reserved(generation, partial(self._slots_made, number))

    def _slots_made(self, number: int, error: MemckptError | None) -> None:
        if error is not None:
            _log.error("generation %d has room for its start and for no record: %s", number, error)
        if self._wanted is not None and self._wanted[0] == number:
            self._answer_slots(said.SlotsMade(number, problem="" if error is None else str(error)))

    def _make_whole(self, generation: Generation, or_gap: bool) -> None:
        """Reserve all slots; with `or_gap` the old generation goes if both do not fit, as no rank dies."""
        try:
            generation.make_whole(self._beside() + self.nbytes - generation.nbytes)
        except MemckptError as error:
            if not or_gap or not self.generations.before:
                raise
            _log.warning("the old generation goes before all ranks have got past it (a gap in protection): %s", error)
            self.generations.drop_older()
            self._tell_trainers(said.Gap(str(error)))
            generation.make_whole(self._beside() + self.nbytes - generation.nbytes)

    def _answer_slots(self, answer: said.SlotsMade) -> None:
        self._wanted = None
        self._tell_trainers(answer)

    def commit(self, rank: int, message: said.Commit, attempt: Attempt) -> None:
        """Take a rank's part of a record, which is whole."""
        generation = self._generation(message.generation)
        if generation is None:
            return
        generation.redo_limit = self.generations.redo_limit
        generation.commit(rank, message)
        if generation is self._pending.generation and generation.complete:
            self._take_built(generation, message.record)
        if generation is self.held:
            self.generations.drop_passed(message.record)
            self.saver.after_commit(generation, attempt)

    def _generation(self, number: int) -> Generation | None:
        for generation in (self.held, self._pending.generation):
            if generation is not None and generation.number == number:
                return generation
        return None

    def order_generation(self, message: said.NeedGeneration, asker: int) -> said.Begin:
        """Have the other ranks begin a new generation after a record; returns the answer for who has asked."""
        if (more := self._seldom_due.count()) is not None:
            _log.info("a new generation begins after record %d: %s%s", message.record, message.reason, more)
        order = said.Begin(message.record, message.reason, message.changing, at_step_because=message.at_step_because)
        self._tell_trainers(order, besides=asker)
        return order


class ResumedState:
    """A record to which all ranks go back; with `before` the replica stays one record behind it if it can."""

    def __init__(self, generation: Generation, record: int, before: bool) -> None:
        self.record = record
        #: Rank states of the records after a captured one, by record and rank.
        self._following = generation.following(record)
        #: Why its step is not repeated though that is wanted, in words.
        self._not_repeated = generation.why_not_repeated(record) if before else ""
        self._before = _before(generation, record) if before and not self._not_repeated else None
        self._earlier = tuple(_earlier(generation, record)) if generation.replica is None else ()
        self._generation = generation
        #: By how many records the replica stays behind.
        self.behind = int(self._before is not None)

    def prepared(self) -> said.Prepared:
        """Have the replica stand there; make the message with all that a rank needs to restore it."""
        held = self._generation
        missing: tuple[tuple[int, int, str], ...] = ()
        metas: tuple[bytes, ...] = ()
        plain = b""
        if held.replica is not None:
            held.replica.freeze()
            missing, plain = held.replica.describe_state()
            # It goes on with the next commits: by then no rank reads the state before this record any more.
            held.replica.advance_to(self.record - self.behind)
            if self._before is not None:
                metas = (self._before.meta,)
        else:
            metas = held.metas_for(self.record)
        return said.Prepared(
            generation=held.number,
            spec=held.spec,
            record=self.record,
            metas=metas,
            rank_states=held.ledger.rank_states(self.record),
            missing=missing,
            plain=plain,
            before=self._before,
            earlier=self._earlier,
            not_repeated=self._not_repeated,
            following=self._following,
        )


def _earlier(generation: Generation, record: int) -> Iterator[said.Before]:
    """Windows of the records before it, newest first, as far back as the slots reach."""
    while not generation.why_not_repeated(record):
        yield _before(generation, record)
        record -= 1


def _before(generation: Generation, record: int) -> said.Before:
    ledger = generation.ledger
    metas = () if generation.replica is not None else generation.metas_for(record - 1)
    return said.Before(
        metas, ledger.metas.get(record, b""), ledger.rank_states(record - 1), ledger.steps.get(record - 1, 0)
    )


#: Generations before the newest one that are held at most, for as long as peers stand still.
_MOST_BEFORE = 5


class HeldGenerations:
    """Owns a unit's complete generations, oldest first. `forget` gets one that ceases to be the newest."""

    def __init__(self, ranks: RankGroup, forget: Callable[[Generation], None]) -> None:
        self._ranks, self._forget = ranks, forget
        self.newest: Generation | None = None
        #: Those before it, oldest first, until every rank of the job is known to have got past them: a rank that is
        #: killed while it writes a generation leaves only what it had before, and all go back to that.
        self.before: list[Generation] = []
        #: The record up to which peers let redo go on; None: as far as it likes.
        self.redo_limit: int | None = None

    def __iter__(self) -> Iterator[Generation]:
        return (one for one in (*self.before, self.newest) if one is not None)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self)

    # What they can produce

    def producible_at_rest(self) -> dict[int, Generation]:
        """The records that can be produced while no trainer runs, oldest first, each with the generation that can."""
        found: dict[int, Generation] = {}
        for generation in self:
            found |= dict.fromkeys(generation.producible_at_rest(), generation)
        return found

    def can_produce(self, record: int) -> bool:
        """Whether the state after a record can be produced now."""
        return any(record in one.producible() for one in self)

    def producer_of(self, record: int) -> Generation:
        """The generation that produces a record. Raises AgentError if none does."""
        generation = self.producible_at_rest().get(record)
        if generation is None:
            raise AgentError(f"record {record} was to be resumed, but it cannot be produced here")
        return generation

    def why_not_repeated(self, record: int) -> str:
        """Why the step of `record` cannot be repeated from the state before it, in words; empty if it can."""
        generation = self.producible_at_rest().get(record)
        return generation.why_not_repeated(record) if generation is not None else f"record {record} is not held"

    def stand_at(self, record: int, behind: int = 0) -> Generation:
        """Go back to a record that can be produced, and drop later ones; the replica stays `behind` it."""
        generation = self.producer_of(record)
        if generation is not self.newest:
            _log.info("the generation after %d, which not every rank had completed, is dropped", generation.number)
            self.before.remove(generation)
            self.take_over(generation)
        self.drop_older()
        generation.settle(record, behind)
        return generation

    def drifted(self, drift: Drift, exact: bool) -> Drift:
        """Note what the audit has found in a generation, if redo is to be `exact` there; returns it with its steps."""
        for generation in self:
            if generation.number == drift.generation:
                drift = msgspec.structs.replace(drift, steps=generation.steps_of(drift.since, drift.record))
                if exact and generation.drift is None:
                    generation.drift = drift
        return drift

    # What comes and goes

    def follow_with(self, generation: Generation, record: int) -> None:
        """Hold a generation that is complete after a record, and those before it while they may be needed."""
        old, self.newest = self.newest, generation
        if old is not None:
            self._forget(old)
            self.before.append(old)
            self.drop_passed(record)
        if len(self.before) > _MOST_BEFORE:
            # The oldest has what peers have got to, and the last what a rank goes back to that dies in the newest.
            given_up = self.before.pop(1)
            _log.warning(
                "peers have not got past record %d, and %d generations begun since are held: that after record %d is "
                "given up here, and peers alone keep its records",
                self.redo_limit or 0,
                len(self.before) + 1,
                given_up.base or 0,
            )
            given_up.close()

    def take_over(self, generation: Generation) -> None:
        """Hold a generation in the place of all that is held."""
        self.drop_all()
        self.newest = generation

    def drop_all(self) -> None:
        self.drop_older()
        newest, self.newest = self.newest, None
        if newest is not None:
            self._forget(newest)
            newest.close()

    def drop_older(self) -> None:
        """Hold the newest one only."""
        before, self.before = self.before, []
        for generation in before:
            generation.close()

    def raise_redo_limit(self, record: int | None) -> None:
        """Let redo go on up to a record (None: as far as it likes), and let go of what peers make needless."""
        self.redo_limit = record
        if self.newest is not None and self.newest.complete:
            self.newest.raise_redo_limit(record)
            self.drop_passed(self.newest.newest)

    def drop_passed(self, record: int) -> None:
        """Drop generations that no rank can need any more, once the unit's ranks have got to `record`.

        Every rank is through the record before: it took part in this one's backward. Of that one a rank has nothing
        where it could not stage it, and begins a generation with the next; then the job goes back to the one before.
        """
        if self.newest is None or not self.before:
            return
        spec = self.newest.spec
        if len(self._ranks) == spec.world_size:
            # No rank is elsewhere: once the generation is complete, all of the job have it.
            self.drop_older()
            return
        # Ranks elsewhere may find out that much later that they do not agree on what they hold once.
        later = AGREEMENT_RECORDS if spec.mode == "lazy" else 0
        limit = self.redo_limit
        bases = [one.base or 0 for one in (*self.before[1:], self.newest)]
        while self.before and record > bases[0] + 1 + later and (limit is None or limit >= bases[0]):
            bases.pop(0)
            self.before.pop(0).close()
