"""Loaders of a loop that is written by hand: grafted, and followed from one iteration of the user to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader

from memckpt import dataloader
from memckpt.dataloader.followers import FollowedLoaders
from memckpt.dataloader.iteration import LoaderRecord, record_of
from memckpt.dataloader.places import Place
from memckpt.errors import ForeignStateError, UsageError


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
    """

    def __init__(self, follower: Follower, inner: Iterator[Any], held: dict[str, Any] | None, number: int) -> None:
        self._follower = follower
        self.inner = inner
        self.held = held
        self.number = number
        self.batches = 0 if held is None else int(held["batches"])
        self.ended = False
        self.left = False

    def __next__(self) -> Any:
        return self._follower.take(self)

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
        dataloader.graft(loader)
        if self._record_of(loader).around is not None:
            raise UsageError(
                f"{name}: expected a loader that is not followed yet, found one that another session follows"
            )
        self.name = name
        self.loader = loader
        self._counter = counter
        self._training = training
        self._held: dict[str, Any] | None = None
        self._opened: int | None = None
        self._iterations = 0
        # Weak: an iteration that the user has left is gone.
        self._newest: weakref.ref[Iteration] | None = None
        self._at = (0, 0)
        self._ended = False
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
        return None if newest is None or newest.ended else newest

    @property
    def active(self) -> bool:
        """Whether the user is iterating over it."""
        return self._iteration is not None

    @property
    def batches(self) -> int:
        """Number of batches of the current iteration that the user was given."""
        return self._at[1]

    @property
    def waits(self) -> bool:
        """Whether no batch has been taken since :meth:`hold` told it to continue in an iteration."""
        return self._held is not None

    def place(self) -> Place:
        """The user's position in it."""
        iteration = self._iteration
        if iteration is None:
            return Place(self._at, False, self._ended)
        return Place(self._at, True, iteration.left or iteration.batches >= self._length())

    def _length(self) -> float:
        try:
            return len(self.loader)
        except TypeError:  # a dataset without a length
            return float("inf")

    def state(self) -> dict[str, Any]:
        """The user's position in it, as plain values."""
        if self._held is not None:
            return self._held
        iteration = self._iteration
        left = iteration is not None and iteration.left
        inner = None if iteration is None else iteration.inner
        return {
            "active": iteration is not None,
            "left": left,
            "batches": 0 if iteration is None else iteration.batches,
            "counted": None if self._counter is None else self._counter._num_iter_calls,
            "position": dataloader.position(self.loader, exhausted=left, iterator=inner),
        }

    def leave(self) -> None:
        """Note that the user takes no further batch from the current iteration."""
        iteration = self._iteration
        if iteration is not None:
            iteration.left = True

    def unreplayable(self) -> str | None:
        """One line on why an exact resume cannot be promised; None if no reason is known."""
        reason = dataloader.unreplayable(self.loader)
        return None if reason is None else f"{self.name}: {reason}"

    # Resume

    def hold(self, state: dict[str, Any]) -> None:
        """Continue after `state` with the next iteration if it was captured in one, else begin the iteration due then.

        Leaves the global generators as they are.

        Raises:
            DataPositionError: the loader differs from the one that `state` was read from.
        """
        position = state["position"]
        if self._counter is not None and state["counted"] is not None:
            # The iteration that continues is counted once more.
            self._counter._num_iter_calls = state["counted"] - int(state["active"])
        if state["active"]:
            self._held, self._opened = state, None
            dataloader.resume(self.loader, position)
        else:
            dataloader.recreate_persistent_iterator(self.loader, position)
            dataloader.restore_generators(self.loader, position)

    def _open(self, make: Callable[[], Iterator[Any]]) -> Iteration:
        """The result of `iter()` over the loader; `make` is its own."""
        held = self._held
        if held is not None and self._opened is not None and self._opened != self._training.ended:
            self._leave_held(held, make)
            held = None
        elif held is not None:
            self._opened = self._training.ended
            # Code that ran since `hold` may have moved the loader's own generators.
            dataloader.resume(self.loader, held["position"])
        iteration = Iteration(self, make(), held, self._iterations)
        self._iterations += 1
        return iteration

    def _leave_held(self, held: dict[str, Any], make: Callable[[], Iterator[Any]]) -> None:
        """Give up the iteration that would have continued after `held`: another one begins, and it was never advanced.

        The killed process had left it, too: `zip` ends with its shortest iterator, and asks no other.
        """
        self._held = None
        dataloader.resume(self.loader, {**held["position"], "exhausted": True})
        for _ in make():
            raise ForeignStateError(
                f"{self.name}: expected no batch after its last one, found one; build the loader over the same data "
                'in both runs, or start over with resume="never"'
            )
        dataloader.go_live(self.loader)

    def take(self, iteration: Iteration) -> Any:
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
        if iteration.held is not None and iteration.held is self._held:
            self._held = None
            self._training.on_live()
        try:
            batch = next(iteration.inner)
        except StopIteration:
            if not iteration.ended:
                iteration.ended = self._ended = True
                self._training.ended += 1
            raise
        iteration.batches += 1
        self._newest, self._ended = weakref.ref(iteration), False
        self._at = iteration.number, iteration.batches
        return batch

    def release(self) -> None:
        """Restore the loader as it was before it was followed."""
        record = record_of(self.loader)
        if record is not None:
            record.around = None
            dataloader.release(self.loader)


class Followers(FollowedLoaders[Follower]):
    """The followed loaders of one training that is a loop written by hand."""

    def follow(self, loader: DataLoader[Any], counter: CountsIterations | None) -> None:
        """Follow a loader until :meth:`release`; once, however often it is given. Raises as :class:`Follower`."""
        if all(each.loader is not loader for each in self._all):
            self._all.append(Follower(loader, counter, f"loader {len(self._all)}", self))


def check_parts(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The parts of the states that decide which batches follow, under the user's names for them."""
    return {
        f"loader {number}": {
            "position": dataloader.comparable(state["position"], between_passes=not state["active"]),
            "active": state["active"],
            "batches": state["batches"],
            "counted": state["counted"],
        }
        for number, state in enumerate(states)
    }
