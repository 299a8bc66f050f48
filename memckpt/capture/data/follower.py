"""Loaders of a loop that is written by hand: grafted, and followed from one iteration of the user to the next."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import DataLoader

from memckpt.capture.data import graft as dataloader
from memckpt.capture.data.iteration import LoaderRecord, record_of
from memckpt.capture.data.places import Place
from memckpt.capture.data.prefetch import Prefetch
from memckpt.capture.data.surroundings import is_in_cycle, may_cycle, what_counts_anew
from memckpt.errors import DataPositionError, ForeignStateError, UsageError

_log = logging.getLogger("memckpt")


class Followed(Protocol):
    """One loader that is followed; :class:`Follower` says what each of these does."""

    @property
    def active(self) -> bool: ...
    @property
    def batches(self) -> int: ...
    @property
    def taken_apart(self) -> bool: ...
    def place(self) -> Place: ...
    def state(self) -> dict[str, Any]: ...
    def leave(self) -> None: ...
    def committing(self) -> None: ...
    def committed(self) -> None: ...
    def continue_after(self, state: dict[str, Any]) -> None: ...
    def unreplayable(self) -> str | None: ...
    def remark(self) -> str | None: ...
    def release(self) -> None: ...


FollowedT = TypeVar("FollowedT", bound=Followed)


class FollowedLoaders(Generic[FollowedT]):
    """The followed loaders of one training, in the order in which they were given.

    Args:
        on_live: called when a resumed iteration is about to yield its first batch, or to end; restores the global
            generators.

    Attributes:
        ended: number of iterations over them, and of epochs, that have ended.
        place_asked: whether the user's loop has asked how many batches lie behind: it counts on from there.
    """

    def __init__(self, on_live: Callable[[], None]) -> None:
        self.on_live = on_live
        self.ended = 0
        self.place_asked = False
        self._all: list[FollowedT] = []

    def __iter__(self) -> Iterator[FollowedT]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def active(self) -> bool:
        """Whether the user is iterating over one of them."""
        return any(each.active for each in self._all)

    @property
    def taken_apart(self) -> bool:
        """Whether another thread than the one that trains takes the batches of one: it may have ended ahead of it."""
        return any(each.taken_apart for each in self._all)

    @property
    def batches(self) -> int | None:
        """Number of batches of the current iteration that the user was given; None outside of iterations.

        With several loaders it is that over the one that was followed first: a later one's pass may outlive an epoch.
        """
        return next((each.batches for each in self._all if each.active), None)

    def places(self) -> list[Place]:
        """The user's position in each."""
        return [each.place() for each in self._all]

    def leave(self) -> None:
        """Note that the user takes no further batch from the current iterations."""
        for each in self._all:
            each.leave()

    def committing(self) -> None:
        """Note that the user has called commit(), whether that ends a record or not."""
        for each in self._all:
            each.committing()

    def committed(self) -> None:
        """Note that a commit was one, and has ended."""
        for each in self._all:
            each.committed()

    def states(self) -> list[dict[str, Any]]:
        """The user's positions, as plain values."""
        return [each.state() for each in self._all]

    def continue_after(self, states: Sequence[dict[str, Any]]) -> None:
        """Have each continue after its state; there are as many. Raises as :meth:`Followed.continue_after`."""
        for follower, state in zip(self._all, states, strict=True):
            follower.continue_after(state)

    def look_around(self, iteration: Iterator[Any], length: float, name: str, record: LoaderRecord, asked: str) -> None:
        """Say what counts anew around a pass that goes on in its middle; a whole one has `length` batches.

        Called at its first batch. `asked`: the user's name for what has the number of batches behind.
        """
        anew = None if self.place_asked else what_counts_anew(iteration, length)
        if anew == "count":
            _log.warning(
                "memckpt: %s goes on in the middle of its pass, and enumerate() counts from 0 again; where the count "
                "matters, write enumerate(loader, %s.batch)",
                name,
                asked,
            )
        elif anew == "bound":
            record.depart(_BOUNDED.format(asked))

    def unreplayable(self) -> Iterator[str]:
        """One line for each reason why an exact resume cannot be promised."""
        yield from filter(None, (each.unreplayable() for each in self._all))

    def remarks(self) -> Iterator[str]:
        """One line for each loader of which a resume rests on something, or costs something."""
        yield from filter(None, (each.remark() for each in self._all))

    def release(self) -> None:
        """Restore all of them."""
        for each in self._all:
            each.release()
        self._all.clear()


_MIXED = (
    "batches of several iterations wait for their steps at a time. A restart goes back in the newest one only. Commit "
    "before the next batches are fetched"
)
_CYCLED = (
    "itertools.cycle hands out again the batches that it has kept. A restart keeps only those behind it. Iterate the "
    "loader anew each time: a generator function with `while True: yield from loader`"
)


_BOUNDED = (
    "islice() or a range() bounds its pass, and counts from 0 again behind a resume: the pass becomes longer than it "
    "was. Bound what is left: islice(loader, n - {0}.batch)"
)
_LEFT = (
    "its pass has given batches for one step, and none since. If it was left there (a validation that is broken off), "
    "the first pass behind a resume goes on in it. Let go of its iterator"
)
#: Why a pass that goes on need not be the one that the dead process was in.
TAKEN_LATE = (
    "the commit was in the middle of a pass over it, and since the resume an epoch or another pass has ended before it "
    "was iterated. That pass goes on, where the dead process may have begun a new one. Take `iter(loader)` in the loop "
    "itself, and not in a generator function around it"
)


class CountsIterations(Protocol):
    """A wrapper that begins the epochs of a distributed sampler by itself: Fabric's loader."""

    _num_iter_calls: int


class Iteration(Iterator[Any]):
    """One iteration of the user over a followed loader.

    Attributes:
        inner: the loader's own iterator.
        held: the state after which it continues; None if it is an iteration from the beginning.
        number: number of iterations over the loader that have begun before it.
        batches: number of its batches that the user was given, in earlier processes as well.
        ended: whether its end has been reached.
        left: whether the user takes no further batch from it.
        taken: number of batches that the user has taken since the last record.
        counted: how many of them were taken before the last call of commit().
        steps: number of commits before which the user has taken a batch.
        may_cycle: whether its first batch tells if ``itertools.cycle`` asks for it.
    """

    def __init__(self, follower: Follower, inner: Iterator[Any], held: dict[str, Any] | None, number: int) -> None:
        self._follower = follower
        self.inner = inner
        self.held = held
        self.number = number
        self.batches = 0 if held is None else int(held["batches"])
        self.ended = False
        self.left = False
        self.taken = self.counted = 0
        self.steps = 0
        self.may_cycle = False

    def __next__(self) -> Any:
        return self._follower.next_batch(self)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]  # raises TypeError as the loader does


class Follower:
    """One loader, followed until `release`.

    Args:
        loader: a DataLoader; it keeps its identity.
        counter: the wrapper of `loader` that the user iterates, if it counts iterations; else None.
        name: its name in messages.
        training: the loaders of the training, of which it is one.

    Raises:
        UsageError: the loader is followed already.
    """

    def __init__(
        self, loader: DataLoader[Any], counter: CountsIterations | None, name: str, training: Followers
    ) -> None:
        dataloader.graft(loader, lookahead=1)  # until it is known whether the loop fetches ahead
        if self._record_of(loader).around is not None:
            raise UsageError(
                f"{name}: expected a loader that is not followed yet, found one that another session follows"
            )
        self.name = name
        self.loader = loader
        self._counter = counter
        self._training = training
        #: States after which iterations continue that have not given a batch yet, in the order of their first ones.
        self._held: list[dict[str, Any]] = []
        self._to_open: list[dict[str, Any]] = []
        #: The newest iteration, and the state of these that it continues, until a commit or its end.
        self._taken_up: tuple[weakref.ref[Iteration], dict[str, Any]] | None = None
        self._opened: int | None = None
        #: Ended iterations at the resume.
        self._resumed_at = 0
        self._iterations = 0
        # Weak: an iteration that the user has left is gone.
        self._known: list[weakref.ref[Iteration]] = []
        self._newest: weakref.ref[Iteration] | None = None
        #: One that has ended while a batch of it waits: a generator around it is gone by then.
        self._trailing: Iteration | None = None
        self._prefetch = Prefetch()
        self._numbers: dict[tuple[int, str], tuple[Any, int | float]] = {}
        #: Counted changes of the datasets' tensors, behind the newest batch or the newest look.
        self._versions: dict[tuple[int, str], tuple[Any, list[int]]] = {}
        self._written: dict[tuple[int, str], Any] = {}
        self._looked_in = -1
        self._taken_to_the_end = 0
        self._at = (0, 0)
        #: Number of the iteration that the last commit was in; -1: in none.
        self._at_commit = -1
        self._ended = False
        #: `_in_turn`: it was thought to be left, and has given a batch later: others come between its batches.
        self._cycled = self._said_left = self._in_turn = False
        self._record_of(loader).around = self._open

    @staticmethod
    def _record_of(loader: DataLoader[Any]) -> LoaderRecord:
        record = record_of(loader)
        assert record is not None, "the loader is grafted"
        return record

    # Capture

    @property
    def _iteration(self) -> Iteration | None:
        """The iteration that the user is in; None between two of them."""
        newest = None if self._newest is None else self._newest()
        waiting = self._prefetch.at_end or self._prefetch.waits(self._taken_to_the_end)
        beside = self._beside(newest)
        if newest is None or (newest.ended and not waiting):
            return beside
        # One that is kept, as by a progress bar, has not been in a commit yet, and the other has given a batch.
        looks = beside is not None and beside.number == self._at_commit and beside.taken and not newest.steps
        return beside if looks else newest

    def _beside(self, look: Iteration | None) -> Iteration | None:
        """The iteration that goes on behind a look at the data: that of the last commit, else the first one since."""
        running = [each for each in self._alive if each is not look and not each.ended and not each.left]
        since = [each for each in running if each.number > self._at_commit and each.taken]
        return next((each for each in running if each.number == self._at_commit), since[0] if since else None)

    @property
    def _alive(self) -> list[Iteration]:
        return [each for each in (reference() for reference in self._known) if each is not None]

    @property
    def _running(self) -> list[Iteration]:
        """The iterations that the user is in, in the order in which they have begun: several under `zip`, say."""
        iteration = self._iteration
        if iteration is None:
            return []
        newest = None if self._newest is None else self._newest()  # a look, where it is another one
        others = [
            each for each in self._alive if each is not newest and not each.ended and (each.taken or each.steps > 1)
        ]
        return [each for each in self._alive if each is iteration or each in others]

    @property
    def active(self) -> bool:
        """Whether the user is iterating over it."""
        return self._iteration is not None

    @property
    def batches(self) -> int:
        """Number of batches of the current iteration that the user was given, and has trained."""
        return max(self._here[1] - self._prefetch.ahead, 0)

    @property
    def _here(self) -> tuple[int, int]:
        """Number of the iteration that the user is in, or was in last, and of its batches."""
        iteration = self._iteration
        return self._at if iteration is None else (iteration.number, iteration.batches)

    @property
    def waits(self) -> bool:
        """Whether no batch has been taken since :meth:`hold` told it to continue in an iteration."""
        return bool(self._held)

    @property
    def taken_apart(self) -> bool:
        """Whether another thread than the calling one has taken its last batch."""
        return self._prefetch.taken_apart

    def place(self) -> Place:
        """The user's position in it."""
        iteration = self._iteration
        if iteration is None or self._cycled:
            return Place(self._here, False, self._ended)
        return Place(self._here, True, iteration.left or iteration.batches >= self._length())

    def _length(self) -> float:
        try:
            return len(self.loader)
        except TypeError:  # a dataset without a length
            return float("inf")

    def state(self) -> dict[str, Any]:
        """The user's position in it, as plain values."""
        iterations = [*(self._state_of(each) for each in self._running), *self._held]
        return {
            "iterations": iterations,
            "counted": None if self._counter is None else self._counter._num_iter_calls,
            "position": None if iterations else dataloader.position(self.loader),
            "prefetch": self._prefetch.state(),
        }

    def _state_of(self, iteration: Iteration) -> dict[str, Any]:
        ahead = 0 if iteration.left else self._prefetch.ahead
        position = partial(dataloader.position, self.loader, exhausted=iteration.left, iterator=iteration.inner)
        try:
            found = position(ahead=min(ahead, iteration.batches))
        except DataPositionError:  # it has learned just now how far the loop fetches ahead, or was wrong
            self._prefetch.lose()
            ahead, found = 0, position(ahead=0)
        return {"left": iteration.left, "batches": iteration.batches - ahead, "position": found}

    @property
    def took(self) -> bool | None:
        """Whether batches were taken since the last call of commit(); None where others may be trained meanwhile."""
        here = self._iteration
        taken = self._taken_to_the_end or any(each.taken > each.counted for each in self._alive)
        return True if taken else None if here is None or here.ended or self._prefetch.depth != 0 else False

    def committing(self) -> None:
        """Note that the user has called commit()."""
        self._taken_up = None
        depth = self._prefetch.depth
        running = self._running
        since = max((each.taken - each.counted for each in running), default=0)
        for each in running:
            each.counted = each.taken
        since = since + self._taken_to_the_end if running else 0
        ended, last = (running[-1].ended, running[-1].batches >= self._length()) if running else (False, False)
        self._prefetch.committed(since, inside=bool(running), ended=ended, last=last)
        self._taken_to_the_end = 0
        if self._prefetch.depth != depth and self._prefetch.depth is not None:
            dataloader.look_ahead(self.loader, self._prefetch.depth)

    def committed(self) -> None:
        """Note that a commit was one, and has ended."""
        iteration = self._iteration
        self._at_commit = -1 if iteration is None else iteration.number
        if iteration is not None:
            self._newest, self._at = weakref.ref(iteration), self._here
        for each in self._alive:
            each.steps += each.taken > 0
            each.taken = each.counted = 0

    def leave(self) -> None:
        """Note that the user takes no further batch from the current iteration."""
        iteration = self._iteration
        if iteration is not None:
            iteration.left = True

    def moving(self) -> list[tuple[Any, str]]:
        """Datasets and their numbers that samples of the current iteration have changed; what is set between is not."""
        if self.loader.num_workers:
            return []
        before, self._numbers = self._numbers, self._record_of(self.loader).own.numbers()
        here = self._here[0]
        same, self._looked_in = self._looked_in == here, here
        if not same or not self.active:
            return []
        return [
            (dataset, key[1])
            for key, (dataset, value) in self._numbers.items()
            if key in before and type(before[key][1]) is type(value) and before[key][1] != value
        ]

    def written(self) -> list[tuple[Any, str]]:
        """Datasets, and their tensors that training has written to within the pass, past their own code.

        What is written between two passes may follow from the epoch, and samples may be kept as they are first read.
        """
        before, self._versions = self._versions, self._record_of(self.loader).own.versions()
        if before and self.active:
            for key, (dataset, now) in self._versions.items():
                if key in before and before[key][1] != now:
                    self._written[key] = dataset
        return [(dataset, name) for (_, name), dataset in self._written.items()]

    def unreplayable(self) -> str | None:
        """One line on why an exact resume cannot be promised; None if no reason is known."""
        reason = dataloader.unreplayable(self.loader) or (_CYCLED if self._cycled else self._prefetch.doubt)
        if not reason and self._prefetch.ahead and (len(self._running) > 1 or self._here[1] < self._prefetch.ahead):
            reason = _MIXED
        if not reason and self._may_be_left():
            reason, self._said_left = _LEFT, True
        return f"{self.name}: {reason}" if reason else None

    def _may_be_left(self) -> bool:
        """Whether the loop may have left its iteration, which something refers to, and goes on in another loader."""
        here = self._iteration
        if here is None or here.steps != 1 or here.taken or self._in_turn:
            return False
        others = (each._iteration for each in self._training if each is not self)
        return any(each is not None and each.steps > 1 for each in others)

    def prove(self) -> None:
        """Note that the repeated step of a resume was equal."""
        self._prefetch.prove()

    def disproved(self) -> str | None:
        """What :meth:`unreplayable` has said and is known not to be so; None if there is nothing."""
        here = self._iteration
        if self._said_left and here is not None and here.steps > 1:
            self._in_turn = True
            return f"{self.name}: {_LEFT}"
        return f"{self.name}: {self._prefetch.disproved}" if self._prefetch.disproved else None

    def remark(self) -> str | None:
        """One line on what a resume rests on or costs; None if there is nothing to say."""
        line = dataloader.remark(self.loader)
        return None if line is None else f"{self.name}: {line}"

    # Resume

    def continue_after(self, state: dict[str, Any]) -> None:
        """Continue after `state` with the next iterations if it was captured in some, else begin the one due then.

        Leaves the global generators as they are.

        Raises:
            DataPositionError: the loader differs from the one that `state` was read from.
        """
        self._held, self._to_open = list(state["iterations"]), list(state["iterations"])
        self._opened, self._resumed_at = None, self._training.ended
        self._known.clear()
        self._newest = None
        self._prefetch.load(state["prefetch"])
        if self._prefetch.depth is not None:
            dataloader.look_ahead(self.loader, max(self._prefetch.depth, _ahead(state)))
        if self._counter is not None and state["counted"] is not None:
            # The iterations that continue are counted once more.
            self._counter._num_iter_calls = state["counted"] - len(self._held)
        if self._held:
            self._resume(self._held[-1])
        else:
            dataloader.recreate_persistent_iterator(self.loader, state["position"])
            dataloader.restore_generators(self.loader, state["position"])

    def _resume(self, held: dict[str, Any]) -> None:
        dataloader.resume(self.loader, held["position"], on_live=self._training.on_live)

    def _open(self, make: Callable[[], Iterator[Any]]) -> Iteration:
        """The result of `iter()` over the loader; `make` is its own."""
        held: dict[str, Any] | None = None
        taken_up, self._taken_up = self._taken_up, None
        if not self._held and taken_up is not None and taken_up[0]() is None:
            # It was a look at the data, as the killed process may have taken one before its pass.
            self._held, self._to_open, self._opened = [taken_up[1]], [], self._training.ended
            self._training.on_look()
        if self._held and self._opened is not None and self._opened != self._training.ended:
            self._leave_held(make)
        elif self._held:
            if self._opened is None and self._training.ended != self._resumed_at:
                self._record_of(self.loader).depart(TAKEN_LATE)
            self._opened = self._training.ended
            # One that is begun again before it has given a batch continues there as well.
            held = self._to_open.pop(0) if self._to_open else self._held[-1]
            # Code that ran since `hold` may have moved the loader's own generators.
            self._resume(held)
        self._trailing = None
        iteration = Iteration(self, make(), held, self._iterations)
        self._training.on_open()  # a new iteration draws
        iteration.may_cycle = may_cycle(sys._getframe(2))  # the caller of the loader's __iter__
        self._iterations += 1
        self._known = [reference for reference in self._known if reference() is not None]
        self._known.append(weakref.ref(iteration))
        return iteration

    def _leave_held(self, make: Callable[[], Iterator[Any]]) -> None:
        """Give up iterations that would have continued: another one begins, and they were never advanced.

        The killed process had left them, too: `zip` ends with its shortest iterator, and asks no other.
        """
        left, self._held, self._to_open = self._held, [], []
        dataloader.resume(self.loader, {**left[-1]["position"], "exhausted": True})
        for _ in make():
            raise ForeignStateError(
                f"{self.name}: expected no batch after its last one, found one; build the loader over the same data "
                'in both runs, or start over with resume="never"'
            )
        dataloader.go_live(self.loader)

    def next_batch(self, iteration: Iteration) -> Any:
        """The next batch of `iteration`.

        Raises:
            StopIteration: there is none.
            UsageError: the user has said that there would be none.
        """
        if iteration.left and not iteration.ended:
            raise UsageError(
                f"{self.name} was asked for another batch after commit(epoch_over=True); leave the loop over it "
                "there, or commit without"
            )
        held = iteration.held
        if held is not None and any(held is each for each in self._held):
            self._held = [each for each in self._held if each is not held]
            self._taken_up, self._at_commit = (weakref.ref(iteration), held), iteration.number
            if not _fetched(held):
                self._training.on_live()
            if iteration.batches:
                length, record = self._length(), self._record_of(self.loader)
                self._training.look_around(iteration, length, self.name, record, "session")
        if iteration.may_cycle:
            iteration.may_cycle = False
            self._cycled = self._cycled or is_in_cycle(iteration)
        if iteration.taken:
            self.written()
        try:
            batch = next(iteration.inner)
        except StopIteration:
            self._taken_up = None
            if not iteration.ended:
                iteration.ended = self._ended = True
                since = iteration.taken - iteration.counted
                self._prefetch.ended()
                looks = self._beside(iteration) is not None
                if not looks and (iteration.steps or self._prefetch.keeps(since)):  # else it was a look at the data
                    self._taken_to_the_end += since
                iteration.taken = iteration.counted = 0
                self._trailing = iteration if self._prefetch.ahead or self._taken_to_the_end else None
                self._training.ended += 1
            raise
        if not iteration.taken and not iteration.steps:
            self._prefetch.began()
        self._prefetch.took(batch)
        iteration.batches += 1
        iteration.taken += 1
        self._newest, self._ended = weakref.ref(iteration), False
        self._at = iteration.number, iteration.batches
        self._versions = self._record_of(self.loader).own.versions()
        return batch

    def release(self) -> None:
        """Restore the loader as it was before it was followed."""
        record = record_of(self.loader)
        if record is not None:
            record.around = None
            dataloader.release(self.loader)


class Followers(FollowedLoaders[Follower]):
    """The followed loaders of one training that is a loop written by hand.

    Args:
        on_live: as for all loaders.
        on_open: called when an iteration has begun, before its first batch.
        on_look: called when one that continued was left again before a commit: another one continues.
    """

    def __init__(self, on_live: Callable[[], None], on_open: Callable[[], None], on_look: Callable[[], None]) -> None:
        super().__init__(on_live)
        self.on_open, self.on_look = on_open, on_look

    def follow(self, loader: DataLoader[Any], counter: CountsIterations | None) -> None:
        """Follow a loader until :meth:`release`; once, however often it is given. Raises as :class:`Follower`."""
        if all(each.loader is not loader for each in self._all):
            self._all.append(Follower(loader, counter, f"loader {len(self._all)}", self))


def _ahead(state: dict[str, Any]) -> int:
    return max((_fetched(each) for each in state["iterations"]), default=0)


def _fetched(held: dict[str, Any] | None) -> int:
    """Number of batches that the killed process had fetched ahead and that are loaded again under its generators."""
    return 0 if held is None else sum(count for count, _ in held["position"]["pass"]["fetches"])


def check_parts(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The parts of the states that decide which batches follow, under the user's names for them."""
    return {
        f"loader {number}": {
            "iterations": [
                {"position": dataloader.comparable(each["position"]), "batches": each["batches"]}
                for each in state["iterations"]
            ],
            "position": state["position"] and dataloader.comparable(state["position"], between_passes=True),
            "counted": state["counted"],
        }
        for number, state in enumerate(states)
    }
