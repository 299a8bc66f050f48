"""The user's loop over data: loaders that continue at their place, epochs that are counted over restarts.

At the end: what Lightning Fabric has wrapped, known by names of classes, since Fabric need not be installed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memckpt.capture.data.follower import Followers, check_parts
from memckpt.capture.data.places import DrawsAtOpen, PlaceWatch
from memckpt.capture.data.prefetch import TAKEN_APART
from memckpt.capture.data.surroundings import counts_passes_anew
from memckpt.errors import ForeignStateError, UnsupportedError, UsageError
from memckpt.recovery.comparison import ComparedKind
from memckpt.session.rank_state import OWN, RankState
from memckpt.session.ranks import Ranks
from memckpt.session.resume.report import HeldState

#: Name of its state in the rank state.
STATE = f"{OWN}loop"
_log = logging.getLogger("memckpt")
_NOT_FOLLOWED = (
    "epochs() counts the epochs, and no loader was given to session.loader(): an epoch that was interrupted takes all "
    "of its batches again, unless the loop over them begins at session.batch"
)
_MOVES = (
    "the number {0}.{1} of a dataset changes while training runs, and starts over; if samples depend on it, "
    "register('data', dataset, attributes=['{1}'])"
)
_WRITTEN = (
    "training writes to the tensor {0}.{1} of a dataset, which starts over; if samples depend on it, "
    "register('data', dataset, attributes=['{1}'])"
)
_BEHIND = (
    "a commit() behind the loop over a followed loader ends no record, as a restart enters that loop once more. Its "
    "step belongs to the next record, and the last epoch's is not held when training has ended. To have it held, step "
    "with the last batch, too, inside the loop: if (number + 1) % n == 0 or number + 1 == len(loader)"
)
_AGAIN = (
    "commit() is called again though no batch was taken since. Each call counts a step, and a restart goes on with the "
    "next batch: call it once for each batch, behind all that belongs to it"
)
_RANGE = (
    "the loop over range() counts its passes from 0 again behind a resume, and trains too many; write `for epoch in "
    "session.epochs(n)`"
)
LoaderT = TypeVar("LoaderT")
#: The place in a state that has none.
_NOWHERE: Mapping[str, Any] = {"epoch": None, "batch": 0, "loaders": []}
_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy", "FSDPStrategy")
#: They derive from the supported ones without behaving like them.
_UNSUPPORTED = ("DeepSpeedStrategy", "SingleDeviceXLAStrategy")


class Loop:
    """The place of one rank's loop: epoch, batch, and a position in each followed loader.

    Attributes:
        epoch: the current or next epoch of `epochs`.
        batch: number of batches of this epoch before the last commit.
        found: why the place that is held is not taken up exactly, as far as :meth:`continue_at` has found.
    """

    def __init__(self, rank_state: RankState, ranks: Ranks, restore_rng: Callable[[], None]) -> None:
        self._rank_state = rank_state
        self._ranks = ranks
        self._restore_rng = restore_rng
        self._followers = Followers(self._go_live, self._note_open, self._resume_again)
        self._draws = DrawsAtOpen()
        self._watch = PlaceWatch()
        self._said: set[str] = set()
        self._begun = False
        self._held: Mapping[str, Any] | None = None
        self._rng_pending = False
        self._in_epochs = False
        self._counts_epochs = False
        self._ended_at_commit = 0
        #: Batches in a row with a second commit; whether the last commit was one, None before the first.
        self._twice = 0
        self._again: bool | None = None
        #: Whether passes were over before the one that is resumed.
        self._had_passes = False
        #: Whether a commit behind this epoch's batches has been left to the next record.
        self._has_remainder = False
        self.epoch = 0
        self.batch = 0
        self.found: tuple[str, ...] = ()

    def follow(self, loader: LoaderT) -> LoaderT:
        """Follow a loader. Arguments, result and errors are those of :meth:`memckpt.Session.loader`."""
        if self._begun:
            raise UsageError(
                "loader(): expected it before restore() and the first commit(), found it behind: follow all loaders "
                "first, then restore"
            )
        found, counter = bare_loader(loader)
        if not isinstance(found, DataLoader):
            raise UnsupportedError(
                f"loader(): expected a torch DataLoader, or what fabric.setup_dataloaders() returned, found "
                f"{type(loader).__name__}; register() an object with state_dict() and load_state_dict()"
            )
        self._followers.follow(found, counter)
        self._provide()
        self._find_departures()
        for line in self._followers.remarks():
            self._say_once(line, logging.INFO)
        return loader

    def _say_once(self, line: str, level: int) -> None:
        if line not in self._said and self._ranks.rank == 0:
            _log.log(level, "memckpt: %s", line)
        self._said.add(line)

    def _provide(self) -> None:
        if not self._rank_state.has(STATE):
            self._rank_state.provide(STATE, self._capture, _parts)

    def _find_departures(self) -> None:
        for line in self._followers.unreplayable():
            self._rank_state.inexact(line)
        for line in filter(None, (each.disproved() for each in self._followers)):
            self._rank_state.retract(line)
        for dataset, name in {
            (id(each), name): (each, name) for one in self._followers for each, name in one.moving()
        }.values():
            if not self._rank_state.carries(dataset, name):
                self._rank_state.inexact(_MOVES.format(type(dataset).__name__, name))
        for dataset, name in (pair for one in self._followers for pair in one.written()):
            if not self._rank_state.carries(dataset, name):
                self._rank_state.inexact(_WRITTEN.format(type(dataset).__name__, name))

    def _warn(self, line: str | None) -> None:
        if line is not None:
            self._rank_state.inexact(line)

    # Resume

    def continue_at(self, held: HeldState | None) -> None:
        """Continue at the place of `held`, once; leaves the global generators as they are.

        Raises ForeignStateError for other loaders, UnsupportedError for another number of ranks, and DataPositionError
        where a loader differs from its former self.
        """
        if self._begun:
            return
        self._begun = True
        if held is None:
            return
        state = self._held = held.rank_state.get(STATE, _NOWHERE)
        expected, found = len(state["loaders"]), len(self._followers)
        if expected != found:
            raise ForeignStateError(
                f"expected {expected} loader(s) given to session.loader(), as in the run that is continued, found "
                f'{found}; follow the same loaders in both runs, or start over with resume="never"'
            )
        if found and held.world_size != self._ranks.world_size:
            raise UnsupportedError(
                f"expected {held.world_size} rank(s), as in the run that is continued, found {self._ranks.world_size}: "
                'the place in the data does not carry over to another number; start as many, or use resume="never"'
            )
        self.epoch, self.batch = state["epoch"] or 0, state["batch"]
        self._had_passes = bool(state["loaders"]) and state["epoch"] is None and held.step > state["batch"]
        self._followers.continue_after(state["loaders"])
        self._rng_pending = any(each.waits for each in self._followers)
        self.found = tuple(self._followers.unreplayable())
        self._rank_state.take_over({"inexact": self.found})

    def _go_live(self) -> None:
        """Undo what the loop has done above its batches: the killed process had done it before; restore generators."""
        if self._rng_pending:
            self._rng_pending = False
            self._rank_state.put_settings_back(known=self._in_epochs)
            self._warn(self._draws.find())
            self._restore_rng()

    def _note_open(self) -> None:
        if self._rng_pending:
            self._draws.note_open()
        elif self._had_passes and self._again is not None:
            self._had_passes = False
            if not self._followers.place_asked and counts_passes_anew(sys._getframe(1)):
                self._say_once(_RANGE, logging.WARNING)

    def _resume_again(self) -> None:
        self._rng_pending = True

    # Epochs

    def epochs(self, total: int) -> Iterator[int]:
        """As :meth:`memckpt.Session.epochs`."""
        self._provide()
        if self._held is not None and self._held["epoch"] is None:
            raise ForeignStateError(
                "epochs(): expected a held state that was committed in a loop over epochs(), found one that was not; "
                'count epochs as in the run that is continued, or start over with resume="never"'
            )
        if (
            self._held is not None
            and not self._rng_pending
            and any(each["iterations"] for each in self._held["loaders"])
        ):
            raise UsageError(
                "epochs(): expected loaders that nobody has iterated since restore(), found one that gave a batch, "
                "which the loop would miss; look at the data before restore()"
            )
        if self._rng_pending and not self._counts_epochs:
            self._rank_state.keep_changed_settings()
        self._in_epochs = self._counts_epochs = True
        self._held = None
        try:
            while self.epoch < total:
                yield self.epoch
                # Say what a restart would do after the loop over batches, if that is not exact.
                self._warn(self._watch.left(self._followers.places()))
                self._followers.ended += 1
                self.epoch += 1
                self.batch, self._has_remainder = 0, False
        finally:
            self._in_epochs = False

    # Each commit

    def note_call(self, numbered: bool) -> None:
        """Note that the user has called commit(), with or without a number, whether that ends a record or not."""
        took = {each.took for each in self._followers}
        again, before = False in took and True not in took, self._again
        self._twice = self._twice + (again and not before) if again or before else 0
        if self._twice == 3 and not numbered:
            self._say_once(_AGAIN, logging.WARNING)
        self._again, self._had_passes = again, self._had_passes and not numbered
        self._followers.committing()

    def check_record_end(self, epoch_over: bool) -> bool:
        """Check the place of a commit: False where its step belongs to the next record.

        That is so once behind the loop over an epoch's batches: an accumulation's remainder. A restart takes the
        batches behind the loop's last commit again, and that step.

        Raises:
            UsageError: a restart would take the epoch's batches again.
        """
        self._begun = True
        outside = self._in_epochs and len(self._followers) and not self._followers.active
        if outside and self._followers.taken_apart:
            self._warn(TAKEN_APART)
        elif outside and self.batch and not self._has_remainder:
            self._has_remainder = True
            self._say_once(_BEHIND, logging.WARNING)
            return False
        elif outside:
            raise UsageError(
                "commit(): expected it inside the loop over a followed loader, found it outside, where a restart "
                "would take the epoch's batches again; call it as the last statement of that loop (behind it an "
                "accumulation's remainder may be committed, once), or count steps and not epochs() where one step "
                "takes them all"
            )
        if epoch_over:
            self._followers.leave()
        self._find_departures()
        if self._followers.ended != self._ended_at_commit:
            reason = "an epoch, or another iteration over a loader, ended before it"
            self._rank_state.unrepeatable = self._rank_state.unrepeatable or reason
        return True

    def note_place_asked(self) -> None:
        """Note that the user's loop has asked how many batches lie behind."""
        self._followers.place_asked = True

    def prove(self) -> None:
        """Note that the repeated step of the resume was equal, and so the batch that it took."""
        for each in self._followers:
            each.prove()

    def note_record_end(self) -> None:
        """Note the place in the data at which a record has ended."""
        self.batch = self._batch_now()
        self._ended_at_commit = self._followers.ended
        if not len(self._followers):
            if self._in_epochs and self.batch > 1 and not self._followers.place_asked:
                self._warn(_NOT_FOLLOWED)
            return
        self._followers.committed()
        self._warn(self._watch.committed(self._followers.places(), self._in_epochs))

    def _batch_now(self) -> int:
        batches = self._followers.batches
        return self.batch + 1 if batches is None else batches

    def _capture(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch if self._counts_epochs else None,
            "batch": self._batch_now(),
            "loaders": self._followers.states(),
        }

    def release(self) -> None:
        """Restore all loaders as they were."""
        self._followers.release()


def _parts(state: Mapping[str, Any]) -> dict[tuple[ComparedKind, str], Any]:
    # Without epochs it is that of the loader that gave the last batch, if there are several.
    loop = {"epoch": state["epoch"], "batch": None if state["epoch"] is None else state["batch"]}
    parts = {"loop": loop, **check_parts(state["loaders"])}
    return {("data position", name): part for name, part in parts.items()}


def bare_model(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The model inside of Fabric's wrapper and of DistributedDataParallel, and the latter.

    FSDP1 keeps its outermost wrapper, which manages its parameters. Raises UnsupportedError for other strategies.
    """
    wrapper: Any = _uncompiled(model)
    if _is(wrapper, "_FabricModule"):
        _refuse(wrapper._strategy)
        model = wrapper._forward_module
        compiled = _uncompiled(model)
        model = compiled if isinstance(compiled, DistributedDataParallel) else model
    if not isinstance(model, DistributedDataParallel):
        return model, None
    inner: nn.Module = model.module
    return inner, model


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of Fabric's wrapper."""
    if _is(optimizer, "_FabricOptimizer"):
        inner: Optimizer = optimizer._optimizer  # type: ignore[attr-defined]  # of Fabric's class
        return inner
    return optimizer


def bare_loader(loader: Any) -> tuple[Any, Any]:
    """The loader inside of Fabric's wrapper, and the wrapper, which counts iterations; else `loader` and None."""
    return (loader._dataloader, loader) if _is(loader, "_FabricDataLoader") else (loader, None)


def _is(found: object, name: str) -> bool:
    # Fabric derives the class of each optimizer from its own.
    return any(each.__name__ == name for each in type(found).__mro__)


def _uncompiled(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _refuse(strategy: object) -> None:
    names = {each.__name__ for each in type(strategy).__mro__}
    if names.isdisjoint(_SUPPORTED) or not names.isdisjoint(_UNSUPPORTED):
        raise UnsupportedError(
            f"expected a Fabric strategy of {', '.join(_SUPPORTED)}, found {type(strategy).__name__}; use one of them "
            "(ModelParallelStrategy for a model larger than a device), or train without memckpt"
        )
