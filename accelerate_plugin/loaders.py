"""Data positions of prepared loaders: followed in place, read at each step, restored on a resume.

Accelerate's loaders take one round of batches from an ordinary DataLoader ahead of the user. So the DataLoader inside
is grafted (`memckpt.capture.data`) and counts fetched batches, and the loader around it counts those given to the
user. It keeps its identity; while it is followed its class is a subclass made for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader

from accelerate_plugin.prepared import other_objects
from memckpt.capture.data import graft as dataloader
from memckpt.capture.data.follower import TAKEN_LATE, FollowedLoaders
from memckpt.capture.data.iteration import drop_iterator, parts_of, record_of
from memckpt.capture.data.own_state import OwnObjects
from memckpt.capture.data.places import Place
from memckpt.capture.data.prefetch import Prefetch
from memckpt.errors import ForeignStateError, UnsupportedError, UsageError

_FOLLOWER = "_memckpt_follower"
#: Attributes of Accelerate's loaders that we rely on, some of them private.
_RELIED_ON = ("base_dataloader", "iteration", "end_of_dataloader", "begin", "end", "get_sampler", "_drop_last")


class Follower:
    """One prepared loader, followed from `prepare` to `close`.

    Raises:
        UnsupportedError: Accelerate prepared it in a way that cannot be followed.
        UsageError: it is followed already.
    """

    def __init__(self, loader: Any, name: str, training: Followers) -> None:
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
        self._training = training
        self._opened: int | None = None
        #: Ended iterations at the resume.
        self._resumed_at = 0
        self._held: dict[str, Any] | None = None
        self._consumed = self._taken = 0
        self._iterates = False
        self._left = False
        self._prefetch = Prefetch()
        self._per_batch, self._lookahead = 1, 1
        self._padding: _Padding | None = None
        #: What `iter()` has returned last.
        self.given: Callable[[], Iterator[Any] | None] = lambda: None
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
        """One line on why an exact resume cannot be promised; None if no reason is known."""
        reason = dataloader.unreplayable(self._base) or self._prefetch.doubt
        return f"{self.name}: {reason}" if reason else None

    def remark(self) -> str | None:
        """One line on what a resume rests on or costs; None if there is nothing to say."""
        line = dataloader.remark(self._base)
        return None if line is None else f"{self.name}: {line}"

    # Capture

    @property
    def at(self) -> tuple[int, int]:
        """Iteration and batch that the user is at; changes with every batch."""
        return self._iteration, self._consumed

    @property
    def _waits_at_end(self) -> bool:
        """Whether a batch of the iteration that has ended has yet to be trained, or was the last one to be."""
        return not self._iterates and (self._prefetch.at_end or self._prefetch.waits(self._taken))

    @property
    def _iteration(self) -> int:
        """Number of the user's iteration; the loader counts it when it ends."""
        number: int = self._loader.iteration
        return number - int(self._waits_at_end and not self._left)

    @property
    def active(self) -> bool:
        """Whether the user is iterating over it, or has yet to train a batch that the last iteration gave."""
        return self._iterates or self._waits_at_end

    @property
    def batches(self) -> int:
        """Number of batches of the current iteration given to the user, and trained."""
        return self._consumed - self._prefetch.ahead

    @property
    def over(self) -> bool:
        """Whether the user's current iteration has no further batch."""
        return self.active and not self._prefetch.ahead and (self._left or bool(self._loader.end_of_dataloader))

    @property
    def taken_apart(self) -> bool:
        return self._prefetch.taken_apart

    def place(self) -> Place:
        """The user's position in it."""
        return Place(self.at, self.active, self.over)

    def state(self) -> dict[str, Any]:
        """The user's position in it, as plain values."""
        if self._held is not None:
            return self._held
        exhausted = self.over
        ahead = 0
        if self.active and self._per_batch and not exhausted:
            ahead = max(dataloader.handed_out(self._base) - self.batches * self._per_batch, 0)
        return {
            "active": self.active,
            "exhausted": exhausted,
            "left": self._left,
            "batches": self.batches,
            "iteration": self._iteration,
            "prefetch": self._prefetch.state(),
            "used": iterator_used(self._base),
            "padding": None if self._padding is None or not self.active else self._padding.first,
            "position": dataloader.position(self._base, exhausted=exhausted, ahead=ahead),
        }

    def leave(self) -> None:
        """Note that the user takes no further batch from this iteration."""
        self._left = True

    def committing(self) -> None:
        """Note that the user has called commit()."""
        since, last = self._taken if self.active else 0, bool(self._loader.end_of_dataloader)
        self._prefetch.committed(since, inside=self.active, ended=not self._iterates, last=last)
        self._taken = 0
        if self._prefetch.depth:
            dataloader.look_ahead(self._base, self._lookahead + self._prefetch.depth * self._per_batch)

    def committed(self) -> None:
        """Note that a commit was one, and has ended."""

    # Resume

    def continue_after(self, state: dict[str, Any]) -> None:
        """Continue after `state` with the next iteration if it was captured in one, else begin the iteration due then.

        Leaves the global generators as they are.

        Raises:
            DataPositionError: the loader differs from the one that `state` was read from.
        """
        self._loader.iteration = state["iteration"]
        self._opened, self._resumed_at = None, self._training.ended
        self._prefetch.load(state["prefetch"])
        if self._prefetch.depth:
            dataloader.look_ahead(self._base, self._lookahead + self._prefetch.depth * self._per_batch)
        if state["used"]:
            drop_unused_iterator(self._base)
        if state["active"]:
            self._held = state
            dataloader.resume(self._base, state["position"])
        else:
            dataloader.recreate_persistent_iterator(self._base, state["position"])
            dataloader.restore_generators(self._base, state["position"])

    def open(self) -> Iterator[Any]:
        """The result of `iter()`: nothing happens before its first batch is asked for."""
        if self._held is not None:
            if self._opened is not None and self._opened != self._training.ended:
                self._leave_held(self._held)
            elif self._opened is None and self._training.ended != self._resumed_at and not self._held["exhausted"]:
                record = record_of(self._base)
                assert record is not None, "the loader is grafted"
                record.depart(TAKEN_LATE)
            self._opened = self._training.ended
        self._training.on_open()
        return self._iterate()

    def _leave_held(self, held: dict[str, Any]) -> None:
        """Give up the iteration that would have continued after `held`: another one begins, and it was never advanced.

        The killed process had left it, too: `zip` ends with its shortest iterator, and asks no other.
        """
        self._held = None
        dataloader.resume(self._base, {**held["position"], "exhausted": True})
        self._drain({**held, "left": True})

    def _iterate(self) -> Iterator[Any]:
        self._training.begin()
        self._left = False
        held, self._held = self._held, None
        if held is not None and held["exhausted"]:
            self._pass_over(held)
            return
        self._consumed = 0 if held is None else held["batches"]
        if held is not None:
            # Code that ran since `hold` may have moved the loader's own generators.
            dataloader.resume(self._base, held["position"], on_live=self._training.on_live)
        if self._padding is not None:
            self._padding.begin_iteration(None if held is None else held["padding"])
        self._iterates = True
        self._prefetch.began()
        if not self._prefetch.ahead:
            self._taken = 0
        try:
            for batch in self._class.__iter__(self._loader):
                if self._left:
                    raise UsageError(
                        f"{self.name} was asked for another batch after commit(epoch_over=True); leave the loop over "
                        "it there, or commit without"
                    )
                if held is not None:
                    self._begin_no_more()
                    dataloader.go_live(self._base)
                    self._look_around(held["batches"])
                    held = None
                self._consumed += 1
                self._taken += 1
                self._prefetch.took(batch)
                yield batch
            self._prefetch.ended()
            self._training.ended += 1
        finally:
            self._iterates = False

    def _look_around(self, behind: int) -> None:
        around, record = self.given(), record_of(self._base)
        if not behind or around is None or record is None:
            return
        try:
            length: float = len(self._loader)
        except TypeError:  # a dataset without a length
            length = float("inf")
        self._training.look_around(around, length, self.name, record, "ckpt")

    def _begin_no_more(self) -> None:
        """Have Accelerate forget that it has begun just now: in the killed process it had, maybe ahead of others."""
        gradients = self._loader.gradient_state
        begun = gradients.dataloader_references
        if self._loader in begun[:-1] and begun[-1] is self._loader:
            gradients.dataloader_references = begun[:-1]

    def _pass_over(self, held: dict[str, Any]) -> None:
        """Leave the loader as the killed process had: its last batch of this iteration was taken."""
        dataloader.resume(self._base, held["position"], on_live=self._training.on_live)
        self._drain(held)
        self._training.ended += 1

    def _drain(self, held: dict[str, Any]) -> None:
        loader, gradients = self._loader, self._loader.gradient_state
        begun, last = gradients.dataloader_references, loader.end_of_dataloader
        loader.begin()
        for _ in self._base:
            raise ForeignStateError(
                f"{self.name}: expected no batch after its last one, found one; build the loader over the "
                'same data in both runs, or start over with resume="never"'
            )
        if held["left"]:
            gradients.dataloader_references, loader.end_of_dataloader = begun, last
        else:
            loader.end_of_dataloader = True
            loader.iteration += 1
            loader.end()
        dataloader.go_live(self._base)

    def release(self) -> None:
        """Restore the loader's original class and behaviour."""
        if self._loader.__dict__.pop(_FOLLOWER, None) is None:
            return
        _set_class(self._loader, self._class)
        if self._padding is not None:
            self._padding.release()
        dataloader.release(self._base)


class Followers(FollowedLoaders[Follower]):
    """The followed loaders of one training, in the order of `prepare`.

    Args:
        on_open: called by `iter()` of a loader.
        begin: called when an iteration's first batch is asked for, before anything else.
        on_live: called when a resumed iteration is about to yield new batches; restores the global generators.
    """

    def __init__(self, on_open: Callable[[], None], begin: Callable[[], None], on_live: Callable[[], None]) -> None:
        super().__init__(on_live)
        self.on_open, self.begin = on_open, begin

    def follow(self, loaders: Sequence[Any]) -> None:
        """Follow these loaders until :meth:`release`. Raises as :class:`Follower`."""
        for number, loader in enumerate(loaders):
            self._all.append(Follower(loader, f"loader {number}", self))

    def continue_after(self, states: Sequence[dict[str, Any]]) -> None:
        """Have each continue after its state.

        Raises:
            ForeignStateError: there are more or fewer loaders than states.
            DataPositionError: as :meth:`Follower.continue_after`.
        """
        if len(states) != len(self):
            raise other_objects(f"{len(states)} prepared loader(s) and not {len(self)}")
        super().continue_after(states)


def begun_loaders(accelerator: Any) -> list[tuple[int, bool, int]]:
    """The prepared loaders that have begun an iteration and not ended it, by number, with their place at an end.

    Accelerate lets the one that began last decide where an accumulation ends, also when its loop was left long ago.
    """
    numbers = {id(loader): number for number, loader in enumerate(accelerator._dataloaders)}
    begun = accelerator.gradient_state.dataloader_references[1:]
    # One that has begun again is there twice, and leaves both places when it ends.
    last = [each for at, each in enumerate(begun) if each not in begun[at + 1 :]]
    return [
        (numbers.get(id(each), -1), bool(getattr(each, "end_of_dataloader", False)), getattr(each, "remainder", -1))
        for each in last
    ]


def restore_begun(accelerator: Any, begun: Sequence[tuple[int, bool, int]], in_loop: bool = False) -> str | None:
    """Restore what :func:`begun_loaders` returned; one line on why accumulations may end otherwise now, or None.

    `in_loop`: a loader has gone on already, and knows its place.
    """
    loaders, references, line = accelerator._dataloaders, [None], None
    for number, last, remainder in begun:
        loader = loaders[number] if 0 <= number < len(loaders) else None
        if loader is not None and not in_loop:
            loader.end_of_dataloader, loader.remainder = last, remainder
        elif loader is None and number >= 0:
            line = "a loop over a loader that is prepared later was left early, and decided where an accumulation ends"
        references.append(loader)
    accelerator.gradient_state.dataloader_references = references
    return line


def iterator_used(base: DataLoader[Any]) -> bool:
    """Whether a loader has been iterated, or draws in its first iteration as in later ones.

    torchdata makes the first iterator, and draws, where Accelerate asks for the loader's state: in `prepare`.
    """
    return not getattr(base, "_initial_iter_for_state_dict", False)


def drop_unused_iterator(base: DataLoader[Any]) -> None:
    """Have a loader's first iteration draw as later ones do."""
    if not iterator_used(base):
        drop_iterator(base)


class GeneratorsElsewhere:
    """Generators below loaders that went to `accelerator.prepare` by themselves: for evaluation, say."""

    def __init__(self) -> None:
        self._own: weakref.WeakKeyDictionary[DataLoader[Any], OwnObjects] = weakref.WeakKeyDictionary()

    def _own_of(self, base: DataLoader[Any]) -> OwnObjects:
        if base not in self._own:
            loader = weakref.ref(base)
            self._own[base] = OwnObjects(lambda: parts_of(held) if (held := loader()) is not None else {})
        return self._own[base]

    def capture(self, bases: Sequence[DataLoader[Any]]) -> list[dict[str, Any]]:
        return [self._own_of(base).capture_generators() for base in bases]

    def restore(self, bases: Sequence[DataLoader[Any]], states: Sequence[Mapping[str, Any]]) -> str | None:
        """Set the generators; returns why that could not be done, in words; None if it could."""
        for base, state in zip(bases, states, strict=False):
            own = self._own_of(base)
            now = own.capture_generators()
            if {path: each["kind"] for path, each in now.items()} != {path: state[path]["kind"] for path in state}:
                return (
                    f"a loader of {type(base.dataset).__name__} has other generators than in the run that is continued"
                )
            own.restore({"generators": dict(state), "attributes": {}})
        return None


def _iterate(loader: Any) -> Iterator[Any]:
    follower: Follower = loader.__dict__[_FOLLOWER]
    iteration = follower.open()
    follower.given = weakref.ref(iteration)
    return iteration


def _set_class(loader: Any, kind: type[Any]) -> None:
    # Accelerate's loaders shadow this name with a property that claims to be a DataLoader.
    object.__dict__["__class__"].__set__(loader, kind)


def _make_generator(loader: Any) -> None:
    """Give a SeedableRandomSampler the generator of its first iteration now: a resume restores its state."""
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator(torch.get_default_device())
        sampler.generator.manual_seed(sampler.initial_seed)


def _pads_last_round(loader: Any) -> bool:
    """Whether a dispatcher completes its last round with samples of its first; True if the length is unknown."""
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

    There are as many as processes, and each commit carries them.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._slice: Any = loader.slice_fn
        self._due = False
        self._given: list[torch.Tensor] | None = None
        self.first: list[torch.Tensor] | None = None
        loader.slice_fn = self

    def begin_iteration(self, first: list[torch.Tensor] | None) -> None:
        """Begin an iteration: keep its first samples, or replace them by `first`."""
        self._due, self._given, self.first = True, first, None

    def __call__(self, batch: Any, part: slice, **arguments: Any) -> Any:
        """Replacement of the dispatcher's `slice_fn`; its first result in an iteration is kept."""
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
    """Graft torchdata's StatefulDataLoaders on creation.

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
