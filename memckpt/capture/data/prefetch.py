"""How many batches a loop takes from a loader before it trains on them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

_DEEPEST = 8
_UNCLEAR = (
    "the loop took {} batches before its first commit and {} before each later one. So a restart takes the last {} "
    "again, as a loop needs it that fetches ahead of its steps. If yours left some out, it trains them twice"
)
_AMBIGUOUS = (
    "the training died before its third commit, which tells whether a loop fetches ahead. It had taken {0} batches for "
    "each commit, of which the last may have waited for the next step"
)
_IRREGULAR = (
    "the loop fetches batches ahead of its steps, and not always as many. A restart may lose or repeat some. Commit "
    "before the next batch is fetched"
)
TAKEN_APART = (
    "another thread than the one that trains takes the batches. A restart may lose those that waited between the two. "
    "Let the training thread take them"
)


class _Gradients:
    """Count of the gradients that backward has made in this process: it tells which batches were trained at once."""

    made = 0


#: Not the class itself: with each write to a class Python forgets what it knows of its attributes.
gradients = _Gradients()


class Prefetch:
    """Compares batches taken with commits, beginning with an iteration at which no batch was waiting.

    A loop that fetches ahead takes more before its first commit than before any other. It takes as many again before
    the first commit of a restart, so these have to be the ones that wait.

    Attributes:
        ahead: number of batches that were taken and not yet trained, at the newest commit.
        depth: the largest number of them; None as long as that is not known.
        doubt: why that may be wrong, in words; empty if it is not.
        disproved: what it was, once an iteration has ended as only those of a loop that fetches ahead do.
        at_end: whether the newest commit belongs to a batch that waited when its iteration ended.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self.depth: int | None = None
        self.doubt = self.disproved = ""
        self.at_end = False
        self._each = 0
        self._first = self._taken = self._commits = 0
        self._begins = self._seen_alive = False
        self._taker: int | None = None
        self._unclear = ""
        #: Counts of gradients at the newest batch, the newest commit, and the end of an iteration.
        self._made: int | None = None
        self._made_at_commit = gradients.made
        self._made_at_end: int | None = None
        #: Gradients behind each batch before the next one was taken; 0: not always as many, or none.
        self._gap: int | None = None
        #: Whether gradients were made behind the last commit before a batch was taken.
        self._used_earlier_batch = False
        self._took_again = False
        #: Batches taken before a commit at the end of an iteration, if these were fewer than before the first one.
        self._short = 0
        # What is still referred to is taken to be in use: a loop that leaves batches out drops them.
        self._batches: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_DEEPEST + 1)

    def began(self) -> None:
        """Note that another iteration begins."""
        self._begins = True

    def took(self, batch: Any) -> None:
        """Note a batch."""
        self._taker = threading.get_ident()
        if self._made is None:
            self._used_earlier_batch = gradients.made > self._made_at_commit
        self._compare_gradients()
        self._made, self._made_at_end = gradients.made, None
        if self.depth is None:
            tensor = _tensor_in(batch)
            if tensor is not None:
                self._batches.append(weakref.ref(tensor))

    def ended(self) -> None:
        """Note that the iteration has no further batch, before it is known whether some of its batches wait."""
        self._made_at_end = gradients.made

    def prove(self) -> None:
        """Note that the repeated step of a resume was equal: its batch was the one that had waited."""
        if self._took_again:
            self._disprove(_UNCLEAR.partition("{")[0])

    def _disprove(self, beginning: str) -> None:
        if self.doubt.startswith(beginning):
            self.disproved, self.doubt = self.doubt, ""

    def _compare_gradients(self) -> None:
        if self._made is not None:
            gap = gradients.made - self._made
            self._gap = gap if self._gap in (None, gap) else 0

    @property
    def _one_at_a_time(self) -> bool:
        """Whether as many gradients were made behind each batch before the next one was taken: none waits."""
        return bool(self._gap) and not self._used_earlier_batch

    def waits(self, since: int) -> bool:
        """Whether a batch of an iteration that has ended has yet to be trained, `since` having been taken since."""
        trains = self._first or self._each  # and is no loader for validation
        behind_end = trains and self._made_at_end is not None and gradients.made > self._made_at_end
        return self.ahead > 0 or (since > 0 and bool(self.depth or behind_end))

    def committed(self, since: int, *, inside: bool, ended: bool, last: bool) -> None:
        """Note a commit, before its state is captured.

        Args:
            since: number of batches taken since the last one.
            inside: whether it is in an iteration.
            ended: whether the iteration over them has ended.
            last: whether the iteration has no further batch.
        """
        self._compare_gradients()
        if inside and self.taken_apart:
            self.doubt = self.doubt or TAKEN_APART
        self.at_end = ended and self.waits(since)
        begins, self._begins = self._begins, False
        trained, self._made_at_commit = gradients.made > self._made_at_commit, gradients.made
        self._made = None
        if self.depth is None:
            self._learn(since, trained and inside, ended or last)
        elif not self.depth and 0 < since < self._each and not (self._one_at_a_time or ended or last):
            # A loop that fetches ahead had left out as many batches before each commit until now.
            self._first = max(self._first, self._each)
            self._settle(since, alive=0)
        if not self.depth:
            return
        if begins and (self._waiting <= 0 or since == self.depth + self._each):
            self._taken = self._commits = 0  # what still waited of the last iteration was left
        if ended and not since and self.ahead:  # a batch that had been left out would not be trained behind the end
            self._disprove(_UNCLEAR.partition("{")[0])
        self._taken += since
        self._commits += 1
        if self._waiting not in range(self.depth + 1):
            self.doubt = self.doubt or _IRREGULAR
        self.ahead = min(max(self._waiting, 0), self.depth)

    @property
    def taken_apart(self) -> bool:
        """Whether another thread than the calling one has taken the last batch."""
        return self._taker not in (None, threading.get_ident())

    def keeps(self, since: int) -> bool:
        """Whether a loop may have yet to train the last batches that it took."""
        return self.depth is not None or self._alive >= since

    @property
    def _alive(self) -> int:
        return sum(each() is not None for each in self._batches)

    def lose(self) -> None:
        """Note that fewer batches are remembered than are ahead."""
        self.ahead, self.doubt = 0, self.doubt or _IRREGULAR

    @property
    def _waiting(self) -> int:
        return self._taken - self._commits * self._each

    def _learn(self, since: int, trained: bool, last: bool) -> None:
        """Learn from a commit.

        Args:
            since: number of batches taken since the last one.
            trained: whether gradients were made behind it, inside an iteration.
            last: whether the iteration has no further batch: a list of them may have been too short.
        """
        alive = self._alive
        waits = since >= 2 and not self._one_at_a_time  # fetched ahead, left some out, or accumulated out of a list
        if not self._first:
            self._first = since
            self._seen_alive = alive >= 2
            if since and not waits:
                self.depth, self._each = 0, since
                self._disprove(_AMBIGUOUS.format(since))
            self.ahead = int(waits and alive >= 2)
            self._unclear = _AMBIGUOUS.format(since) if waits else ""
        elif waits and self._first == since and not self._taken:
            self._taken, self._commits = 2 * since, 2  # a loop that fetches ahead may have left out a batch
            self.ahead = 0
        elif since and last and since < self._first:
            self._short = since
        elif since:
            self._settle(since, alive)
        elif self._short and trained:  # it was no list: the last batch had waited
            short, self._short = self._short, 0
            self._settle(short, alive)
            self._taken, self._commits = self._taken + short, self._commits + 1
        elif trained and not last and not self._taken:
            self._settle(1, alive=0)  # several are taken at a time, and trained one by one, in what order ever

    def _settle(self, since: int, alive: int) -> None:
        self._each = since
        self._taken, self._commits = self._taken or self._first, self._commits or 1
        self.ahead, self._unclear = 0, ""
        self.depth = min(max(self._first - since, 0), _DEEPEST)
        if not self.depth:
            self._disprove(_AMBIGUOUS.format(since))
        elif not (self._seen_alive and alive > self.depth):
            self.doubt = _UNCLEAR.format(self._first, since, self.depth)
        self._batches.clear()

    def state(self) -> dict[str, Any]:
        """What is known, as plain values."""
        known = {"depth": self.depth, "each": self._each}
        first = self._first if self._taken and self.depth is None else 0
        return {**known, "first": first, "unclear": self._unclear or self.doubt, "ahead": self.ahead}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what the killed process knew, and did not know."""
        self.doubt, self._took_again, self._first = state["unclear"], state["ahead"] > 0, state["first"]
        if state["depth"] is not None:
            self.depth, self._each = state["depth"], state["each"]


def _tensor_in(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((found for found in map(_tensor_in, batch) if found is not None), None)
    return None
