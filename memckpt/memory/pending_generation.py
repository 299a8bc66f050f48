"""The generation that a node's trainers are about to write: one for all of them, if they ask for the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from memckpt.errors import MemckptError, MemoryBudgetError
from memckpt.memory.budget import check_budget
from memckpt.memory.generation import Generation, make_generation
from memckpt.memory.redo_news import RedoNews
from memckpt.memory.region import Allowance
from memckpt.protocol.trainer import Prepare
from memckpt.state.layout import Layout
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt.agent")


class Difference(NamedTuple):
    """Tensors that some ranks of a node stage by value, that some know to differ, and that others do not have."""

    changing: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


class PendingGeneration:
    """Belongs to the agent's event loop. Owns the generation, None while nothing is about to be written.

    `make_room` is called with the reason if the old generation and the new one do not fit: it lets go of the old one.
    """

    def __init__(self, notify: Callable[[RedoNews], None], make_room: Callable[[str], None]) -> None:
        self._notify = notify
        self._make_room = make_room
        self._number = 0
        #: The record after which a generation was asked for last, and by which ranks.
        self._record = 0
        self._asked: dict[int, StateSpec] = {}
        #: The record after which the one that is allocated begins.
        self._begins = 0
        self.generation: Generation | None = None

    def ask(self, rank: int, message: Prepare) -> Difference | None:
        """Keep what a rank wants to write; returns how others' differ for the record, so that none can complete it."""
        if message.record != self._record or rank in self._asked:
            self._record, self._asked = message.record, {}
        others = [spec for spec in self._asked.values() if spec != message.spec]
        self._asked[rank] = message.spec
        if not others:
            return None
        specs = [message.spec, *others]
        missing = _not_in_all([frozenset(tensor.name for tensor in spec.tensors()) for spec in specs])
        return Difference(
            _not_in_all([frozenset(tensor.name for tensor in spec.by_value) for spec in specs]) - missing,
            _not_in_all([frozenset(spec.apart) for spec in specs]) - missing,
            missing,
        )

    def is_for(self, rank: int, message: Prepare) -> bool:
        """Whether a rank that has asked is to write the generation that there is."""
        one = self.generation
        return (
            one is not None and one.spec == message.spec and self._begins == message.record and not one.started_by(rank)
        )

    def allocate(self, rank: int, message: Prepare, held_bytes: int, beside: int = 0) -> tuple[Generation, bool]:
        """The generation for a rank that has asked, and whether it is a new one.

        Ranks prepare one after the other: the first may have written its part before the last one asks. The held
        generation of `held_bytes` goes if need be; what others hold on this node, `beside`, stays.
        """
        if self.generation is not None and self.is_for(rank, message):
            return self.generation, False
        self.drop_generation()
        self._begins = message.record
        self.next_number()
        try:
            self.generation = self._make(message, held_bytes + beside, held_bytes)
        except MemckptError as error:
            if not held_bytes or not _fits_alone(message, held_bytes, beside):
                raise  # to let go of the old one would be of no use
            # Two generations do not fit: protection lapses until the new one is complete, and that is said.
            _log.warning("the old generation goes before the new one is written (a gap in protection): %s", error)
            self._make_room(str(error))
            self.generation = self._make(message, beside)
        return self.generation, True

    def next_number(self) -> int:
        """A number that no other generation has."""
        self._number += 1
        return self._number

    def _make(self, message: Prepare, held_bytes: int, given_back: int = 0) -> Generation:
        return make_generation(
            self._number,
            message.spec,
            Allowance(held_bytes, message.memory_budget_bytes, given_back),
            threads=message.threads,
            notify=self._notify,
            begins=None if message.whole else message.record,
        )

    def give_away(self) -> None:
        """Hand over the generation, which is complete."""
        self.generation = None

    def drop_generation(self) -> None:
        """Close the generation, which no rank is going to complete."""
        generation, self.generation = self.generation, None
        if generation is not None:
            generation.close()

    def begin_attempt(self) -> None:
        """Drop what the ranks of the attempt before have asked for."""
        self.drop_generation()
        self._asked = {}


def _fits_alone(message: Prepare, held_bytes: int, beside: int) -> bool:
    """Whether there is room for all of a generation once the old one has gone."""
    try:
        check_budget(Layout(message.spec).total_bytes, beside, message.memory_budget_bytes, "", held_bytes)
    except MemoryBudgetError:
        return False
    return True


def _not_in_all(names: Sequence[frozenset[str]]) -> frozenset[str]:
    return frozenset.union(*names) - frozenset.intersection(*names)
