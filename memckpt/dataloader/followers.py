"""The followed loaders of one training, whichever adapter follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from memckpt.dataloader.places import Place


class Followed(Protocol):
    """One loader that is followed."""

    @property
    def active(self) -> bool:
        """Whether the user is iterating over it."""

    @property
    def batches(self) -> int:
        """Number of batches of the current iteration that the user was given."""

    def place(self) -> Place:
        """The user's position in it."""

    def state(self) -> dict[str, Any]:
        """The user's position in it, as plain values."""

    def leave(self) -> None:
        """Note that the user takes no further batch from the current iteration."""

    def committing(self) -> None:
        """Note that the user has called commit()."""

    def committed(self) -> None:
        """Note that a commit was one, and has ended."""

    def hold(self, state: dict[str, Any]) -> None:
        """Continue after `state`. Raises DataPositionError if the loader differs from the one of `state`."""

    def unreplayable(self) -> str | None:
        """One line on why an exact resume cannot be promised; None if no reason is known."""

    def remark(self) -> str | None:
        """One line on what a resume rests on or costs; None if there is nothing to say."""

    def release(self) -> None:
        """Restore the loader as it was before it was followed."""


FollowedT = TypeVar("FollowedT", bound=Followed)


class FollowedLoaders(Generic[FollowedT]):
    """The followed loaders of one training, in the order in which they were given.

    Args:
        on_live: called when a resumed iteration is about to yield its first batch, or to end; restores the global
            generators.

    Attributes:
        ended: number of iterations over them, and of epochs, that have ended.
    """

    def __init__(self, on_live: Callable[[], None]) -> None:
        self.on_live = on_live
        self.ended = 0
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
    def batches(self) -> int | None:
        """Number of batches of the current iteration that the user was given; None outside of iterations."""
        return max((each.batches for each in self._all if each.active), default=None)

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

    def hold(self, states: Sequence[dict[str, Any]]) -> None:
        """Have each continue after its state; there are as many. Raises as :meth:`Followed.hold`."""
        for follower, state in zip(self._all, states, strict=True):
            follower.hold(state)

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
