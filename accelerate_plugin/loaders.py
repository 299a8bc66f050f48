"""Data positions of prepared loaders: followed in place, read at each step, given back on a resume.

Accelerate's loaders take one round of batches from an ordinary DataLoader ahead of the user. So the DataLoader inside
is grafted (`memckpt.dataloader`), which knows what was fetched, and the loader around it counts what the user
has been given. It stays the same object; while it is followed it has a subclass of its own class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader

from memckpt import dataloader
from memckpt.errors import ForeignStateError, UnsupportedError, UsageError

_FOLLOWER = "_memckpt_follower"
#: What is relied on of Accelerate's loaders, some of it without being promised.
_RELIED_ON = ("base_dataloader", "iteration", "end_of_dataloader", "begin", "end", "get_sampler", "_drop_last")


class Rounds:
    """Counts what ends in a training: an iteration over a followed loader, or an epoch."""

    def __init__(self) -> None:
        self.ended = 0


class Follower:
    """One prepared loader, followed from `prepare` to `close`.

    Args:
        loader: a loader as Accelerate has prepared it.
        name: how messages call it.
        rounds: of all loaders of the training.
        begin: called when an iteration begins, before anything else.
        on_live: called when a resumed iteration is about to yield what is new: restores the global generators.

    Raises:
        UnsupportedError: Accelerate prepared it in a way that cannot be followed.
        UsageError: it is followed already.
    """

    def __init__(
        self, loader: Any, name: str, rounds: Rounds, *, begin: Callable[[], None], on_live: Callable[[], None]
    ) -> None:
        if not isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
            raise UnsupportedError(
                f"{name}: expected a DataLoaderShard or a DataLoaderDispatcher, found {type(loader).__name__}; "
                "leave it out of prepare() and prepare it with accelerator.prepare()"
            )
        missing = [each for each in _RELIED_ON if not hasattr(loader, each)]
        if missing:
            raise UnsupportedError(
                f"{name}: expected a {type(loader).__name__} with {', '.join(missing)}, found none in Accelerate "
                f"{accelerate.__version__}; docs/accelerate.md names the version that this was tested with"
            )
        if _FOLLOWER in vars(loader):
            raise UsageError(
                f"{name}: expected a loader of this training alone, found one that another plugin follows; "
                "close() that one first"
            )
        self.name = name
        self._loader: Any = loader
        self._rounds = rounds
        self._opened: int | None = None
        self._begin = begin
        self._on_live = on_live
        self._held: dict[str, Any] | None = None
        self._consumed = 0
        #: Whether the user is in an iteration over it.
        self.active = False
        self._left = False
        self._per_batch, self._lookahead = 1, 1
        self._padding: _Padding | None = None
        if isinstance(loader, DataLoaderDispatcher):
            if not loader.split_batches:
                self._per_batch = self._lookahead = loader.state.num_processes
            if loader.state.process_index != 0:
                self._per_batch = 0  # its batches come from the first process
            if _pads_last_round(loader):
                self._padding = _Padding(loader)
        _make_generator(loader)
        dataloader.graft(self._base, lookahead=self._lookahead)
        self._class: type[Any] = type(loader)
        loader.__dict__[_FOLLOWER] = self
        _set_class(loader, type(f"Followed{self._class.__name__}", (self._class,), {"__iter__": _iterate}))

    @property
    def _base(self) -> DataLoader[Any]:
        base: DataLoader[Any] = self._loader.base_dataloader
        return base

    def unreplayable(self) -> str | None:
        """A line on why it cannot be promised to resume exactly; None if nothing is known against it."""
        reason = dataloader.unreplayable(self._base)
        return None if reason is None else f"{self.name}: {reason}"

    # Capture

    @property
    def at(self) -> tuple[int, int]:
        """Which batch of which iteration the user has: changes whenever a batch is asked for."""
        return self._loader.iteration, self._consumed

    @property
    def batches(self) -> int:
        """Batches of the current iteration that the user has been given."""
        return self._consumed

    @property
    def over(self) -> bool:
        """Whether the user is in an iteration that has no further batch for it."""
        return self.active and (self._left or bool(self._loader.end_of_dataloader))

    def state(self) -> dict[str, Any]:
        """Where the user stands in it, as plain values."""
        if self._held is not None:
            return self._held
        exhausted = self.over
        ahead = 0
        if self.active and self._per_batch and not exhausted:
            ahead = max(dataloader.handed_out(self._base) - self._consumed * self._per_batch, 0)
        return {
            "active": self.active,
            "exhausted": exhausted,
            "left": self._left,
            "batches": self._consumed,
            "iteration": self._loader.iteration,
            "padding": None if self._padding is None or not self.active else self._padding.first,
            "position": dataloader.position(self._base, exhausted=exhausted, ahead=ahead),
        }

    def leave(self) -> None:
        """The user takes no further batch from this iteration."""
        self._left = True

    # Resume

    def hold(self, state: dict[str, Any]) -> None:
        """Go on behind `state` with the next iteration if the user was in one, else begin the one that was next.

        Leaves the global generators as they are.

        Raises:
            DataPositionError: the loader is not the one that `state` was read from.
        """
        self._loader.iteration = state["iteration"]
        self._opened = None
        if state["active"]:
            self._held = state
            dataloader.resume(self._base, state["position"])
        else:
            dataloader.recreate_persistent_iterator(self._base, state["position"])
            dataloader.restore_generators(self._base, state["position"])

    def open(self) -> Iterator[Any]:
        """What `iter()` gives: nothing happens before its first batch is asked for."""
        if self._held is not None:
            if self._opened is not None and self._opened != self._rounds.ended:
                self._leave_held(self._held)
            self._opened = self._rounds.ended
        return self._iterate()

    def _leave_held(self, held: dict[str, Any]) -> None:
        """Another iteration is begun, and the one before, which would have gone on behind `held`, was never asked.

        So it was left in the killed process, too: `zip` ends with its shortest, and asks no other.
        """
        self._held = None
        dataloader.resume(self._base, {**held["position"], "exhausted": True})
        self._drain({**held, "left": True})

    def _iterate(self) -> Iterator[Any]:
        self._begin()
        self._left = False
        held, self._held = self._held, None
        if held is not None and held["exhausted"]:
            self._pass_over(held)
            return
        self._consumed = 0 if held is None else held["batches"]
        if held is not None:
            # Whatever ran since `hold` may have moved the loader's own generators.
            dataloader.resume(self._base, held["position"], on_live=self._on_live)
        if self._padding is not None:
            self._padding.begin(None if held is None else held["padding"])
        self.active = True
        try:
            for batch in self._class.__iter__(self._loader):
                if self._left:
                    raise UsageError(
                        f"{self.name} was asked for another batch after commit(epoch_over=True); leave the loop over "
                        "it there, or commit without"
                    )
                if held is not None:
                    dataloader.go_live(self._base)
                    held = None
                self._consumed += 1
                yield batch
            self._rounds.ended += 1
        finally:
            self.active = False

    def _pass_over(self, held: dict[str, Any]) -> None:
        """The killed process had taken its last batch of this iteration: leave the loader as it was left then."""
        dataloader.resume(self._base, held["position"], on_live=self._on_live)
        self._drain(held)
        self._rounds.ended += 1

    def _drain(self, held: dict[str, Any]) -> None:
        loader = self._loader
        loader.begin()
        for _ in self._base:
            raise ForeignStateError(
                f"{self.name}: expected nothing behind its last batch, found another one; build the loader over the "
                'same data in both runs, or start over with resume="never"'
            )
        if not held["left"]:
            loader.end_of_dataloader = True
            loader.iteration += 1
            loader.end()
        dataloader.go_live(self._base)

    def release(self) -> None:
        """Make the loader what it was."""
        if self._loader.__dict__.pop(_FOLLOWER, None) is None:
            return
        _set_class(self._loader, self._class)
        if self._padding is not None:
            self._padding.release()
        dataloader.release(self._base)


def _iterate(loader: Any) -> Iterator[Any]:
    follower: Follower = loader.__dict__[_FOLLOWER]
    return follower.open()


def _set_class(loader: Any, kind: type[Any]) -> None:
    # Accelerate's loaders have a property of this name, which says that they are DataLoaders.
    object.__dict__["__class__"].__set__(loader, kind)


def _make_generator(loader: Any) -> None:
    """Give a SeedableRandomSampler the generator that it would make for itself when it is first iterated.

    In a new process its state has to have a place to go, before that.
    """
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator(torch.get_default_device())
        sampler.generator.manual_seed(sampler.initial_seed)


def _pads_last_round(loader: Any) -> bool:
    """Whether a dispatcher completes its last round with samples of its first, as far as that is known."""
    if loader._drop_last or loader.state.num_processes == 1:
        return False
    sampler = loader.get_sampler()
    try:
        samples = len(sampler)
    except TypeError:
        return True
    return bool(samples % loader.state.num_processes)


class _Padding:
    """The samples that complete a dispatcher's last round: the first ones of the iteration, which a resume skips.

    They are as many as there are processes, and each commit carries them.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._slice: Any = loader.slice_fn
        self._due = False
        self._given: list[torch.Tensor] | None = None
        self.first: list[torch.Tensor] | None = None
        loader.slice_fn = self

    def begin(self, first: list[torch.Tensor] | None) -> None:
        """An iteration begins: keep the first samples, or put these in their place."""
        self._due, self._given, self.first = True, first, None

    def __call__(self, batch: Any, part: slice, **arguments: Any) -> Any:
        """In place of the dispatcher's `slice_fn`; what it cuts first in an iteration are the samples to keep."""
        cut = self._slice(batch, part, **arguments)
        if not self._due:
            return cut
        self._due = False
        if self._given is not None:
            given = iter(self._given)
            cut = recursively_apply(lambda tensor: next(given).to(tensor.device), cut)
        self.first = []
        recursively_apply(self._keep, cut)
        return cut

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.first is not None
        self.first.append(tensor.detach().cpu())
        return tensor

    def release(self) -> None:
        self._loader.slice_fn = self._slice


@contextlib.contextmanager
def grafting_stateful_loaders(lookahead: int) -> Iterator[None]:
    """Graft torchdata's StatefulDataLoaders as they are made.

    Accelerate asks a new one for its state at once, which starts its iterator and workers: later is too late.
    """
    try:
        from torchdata import stateful_dataloader
    except ImportError:
        yield
        return
    original = stateful_dataloader.StatefulDataLoader

    def make(*args: Any, **kwargs: Any) -> Any:
        loader = original(*args, **kwargs)
        dataloader.graft(loader, lookahead=lookahead)
        return loader

    stateful_dataloader.StatefulDataLoader = make
    try:
        yield
    finally:
        stateful_dataloader.StatefulDataLoader = original
