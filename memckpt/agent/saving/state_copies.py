"""Copies of the whole state, made while training runs by the redo thread (eager) or by trainers at a commit (lazy)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from memckpt.errors import MemckptError
from memckpt.memory.budget import check_budget
from memckpt.memory.generation import Generation
from memckpt.memory.redo_news import CopyReserved, ReplicaCopied
from memckpt.memory.region import AT_ONCE_BYTES, Region, Reservation, bytes_being_reserved
from memckpt.protocol.channel import AgentToTrainer
from memckpt.protocol.storing import CopyRankPart, RankPartCopied, Saved, SaveFailed

_log = logging.getLogger("memckpt.agent")
_FIRST_LEAD, _LONGEST_LEAD = 2, 512
#: Numbers of orders. Two may name the same record, the first one for a generation that has been let go of.
_numbers = itertools.count(1)


# Who asks, and how the answer is awaited

Done = Callable[["Saved | SaveFailed"], None]


@dataclass(frozen=True)
class Run:
    """The run, for its own storage. Its trainers are told."""

    url: str


@dataclass(frozen=True)
class Export:
    """An export, for which `done` is called once; `record`: the one to save where other units save the same."""

    url: str
    done: Done
    record: int | None = None


@dataclass(frozen=True)
class Peers:
    """Other nodes, which get a copy of the state into their memory in place of records."""


Asker = Run | Export | Peers


T = TypeVar("T")


class Answer(Generic[T]):
    """A value that one flow awaits. A flow whose answer is never given goes no further."""

    def __init__(self) -> None:
        self._given: tuple[T, ...] = ()
        self.go_on: Callable[[], None] = lambda: None

    def give(self, value: T) -> None:
        """Carry on the flow that awaits this."""
        self._given = (value,)
        self.go_on()

    def __await__(self) -> Generator[Answer[T], None, T]:
        if not self._given:
            yield self
        return self._given[0]


def carry_on(flow: Coroutine[Answer[Any], None, None]) -> None:
    """Run a flow until it awaits an answer that is not there yet; that answer carries it on."""
    try:
        awaited = flow.send(None)
    except StopIteration:
        return
    awaited.go_on = partial(carry_on, flow)


# Copies


@dataclass(frozen=True)
class StateCopy:
    """The state of a generation after a record; `missing` and `plain` as in RecordMeta, of all optimizer state."""

    generation: Generation
    record: int
    region: Region  #: memory with the state as a replica has it, then the by-value tensors
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""
    seconds: float = 0.0  #: that trainers took to copy it


@dataclass(frozen=True)
class _Order:
    """A copy that is being made, with the ranks' parts that are there."""

    number: int
    asker: Asker
    generation: Generation
    record: int
    region: Region
    reservation: Reservation  #: of the region's memory; nobody has got the order before it has ended
    answer: Answer[StateCopy | SaveFailed | None] = field(default_factory=Answer)
    parts: dict[int, RankPartCopied] = field(default_factory=dict)


class StateCopies:
    """Has one copy made at a time. `order` tells all trainers; `hurried` gets the :attr:`lead` after a late one.

    `notify` gets CopyReserved in a thread, and has the event loop call :meth:`reserved`.
    """

    def __init__(
        self,
        order: Callable[[AgentToTrainer, int], None],
        notify: Callable[[CopyReserved], None],
        hurried: Callable[[int], None] = lambda lead: None,
    ) -> None:
        self._order, self._notify, self._hurried = order, notify, hurried
        self._current: _Order | None = None
        #: Records that an order must be ahead for every trainer to get it in time.
        self.lead = _FIRST_LEAD

    @property
    def asker(self) -> Asker | None:
        """Who wants the one that is being made; None while none is."""
        return self._current.asker if self._current is not None else None

    async def copy_state(self, asker: Asker, generation: Generation, record: int) -> StateCopy | SaveFailed | None:
        """Have the state after `record` copied; the caller owns its region. None: too late, a later record may do.

        Raises MemoryBudgetError, OSError or RuntimeError: there is no memory for it.
        """
        order = self._reserve_copy(asker, generation, record)
        copy = await order.answer
        if isinstance(copy, StateCopy) and not generation.ledger.knows(record):
            # So late that its rank states have been let go of.
            copy.region.close()
            self.hurry()
            return None
        return copy

    def _reserve_copy(self, asker: Asker, generation: Generation, record: int) -> _Order:
        """Make memory for a copy, in a thread where that takes long, and order the copy behind it."""
        purpose = "a copy of the state on its way to storage"
        nbytes, number = generation.layout.copy_bytes, next(_numbers)
        check_budget(nbytes, 0, None, purpose, coming=bytes_being_reserved())
        region, at_once = Region.lay_out("copy", nbytes), nbytes <= AT_ONCE_BYTES
        ended = (lambda: None) if at_once else partial(self._notify, CopyReserved(number))
        try:
            reservation = Reservation(purpose, [(region, 0, nbytes)], ended)
        except RuntimeError:  # no thread
            region.close()
            raise
        generation.ledger.pinned = record
        order = self._current = _Order(number, asker, generation, record, region, reservation)
        if at_once:
            self.reserved(number)
        return order

    def reserved(self, number: int) -> None:
        """Give an order whose memory has been reserved, or was refused; nothing if it has been dropped."""
        order = self._current
        if order is None or order.number != number:
            return
        try:
            order.reservation.finish()
            order.region.populate_in_background()
        except (MemckptError, OSError, RuntimeError) as error:
            self.drop(again=False)
            step = order.generation.newest_step or 0
            order.answer.give(SaveFailed(step, f"the state cannot be copied: {error}"))
            return
        replica = order.generation.replica
        if replica is None:
            self._order(CopyRankPart(order.record, number), order.region.fd)
        elif not replica.copy_at(order.record, order.region):  # the record has passed
            self.hurry()
            self.drop(again=True)

    def add_part(self, rank: int, message: RankPartCopied) -> None:
        """Add a trainer's part, unless its order has been dropped."""
        order = self._current
        if order is None or message.order != order.number:
            return
        parts, ranks = order.parts, order.generation.spec.local_ranks
        parts[rank] = message
        if message.rank_state:
            order.generation.ledger.amend(rank, message.record, message.rank_state)
        if set(parts) < set(ranks):
            return
        if any(part.missed for part in parts.values()):
            self.hurry()
            _log.info("the order for a copy of the state after record %d could not be met; once more", order.record)
            self.drop(again=True)
            return
        if not order.generation.agrees(order.record):
            # It has one copy of what not all ranks had alike; or so late that this cannot be seen any more.
            _log.info("the copy of the state after record %d is of no use; once more", order.record)
            self.drop(again=True)
            return
        first = parts[ranks[0]]
        self._complete(order, first.missing, first.plain, max(part.seconds for part in parts.values()))

    def hurry(self) -> None:
        """Give the next orders earlier: one was too late."""
        self.lead = min(2 * self.lead, _LONGEST_LEAD)
        self._hurried(self.lead)

    def copied(self, message: ReplicaCopied) -> None:
        """Take the redo thread's copy of the replica, or why it has none. Its time is hidden behind the slots."""
        order = self._current
        if order is None or message.region is not order.region:
            return
        if message.problem:
            step = order.generation.newest_step or 0
            self.drop(again=False)
            order.answer.give(SaveFailed(step, message.problem))
        else:
            self._complete(order, message.missing, message.plain, 0.0)

    def _complete(self, order: _Order, missing: tuple[tuple[int, int, str], ...], plain: bytes, seconds: float) -> None:
        self._current = None
        order.answer.give(StateCopy(order.generation, order.record, order.region, missing, plain, seconds))

    def drop(self, again: bool) -> None:
        """Make none after all; with `again` its asker may order another one."""
        order, self._current = self._current, None
        if order is None:
            return
        if order.generation.replica is not None:
            order.generation.replica.forget_copy()
        order.reservation.close()
        order.region.close()
        if again:
            order.answer.give(None)

    def drop_of(self, generation: Generation) -> None:
        if self._current is not None and self._current.generation is generation:
            self.drop(again=True)
