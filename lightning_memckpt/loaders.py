"""Data positions: tracked in every loader that Lightning processes, read at each step, restored on a resume.

Lightning passes each training and validation loader through `strategy.process_dataloader` after it has added its
DistributedSampler, and again whenever it reloads them. There a loader is grafted.

User code can have the training loaders built before the held state is known: `trainer.estimated_stepping_batches` in
configure_optimizers() does, and `trainer.fit_loop.setup_data()`. They are kept, as building them may draw random
numbers; they get their positions, and are iterated anew, as soon as these are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise, zip_longest
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader

from lightning_memckpt.internals import TrainerInternals
from memckpt.capture.data import graft as dataloader

Positions = dict[str, Any]
#: State that loaders were built under, by role: "train", "validation".
Built = dict[str, Any]


class Loaders:
    """The loaders of one fit. `notes`: one line for each that cannot be continued exactly; the caller logs them."""

    def __init__(self, trainer: pl.Trainer, internals: TrainerInternals) -> None:
        self._trainer: Any = trainer
        self._internals = internals
        self._held: Positions | None = None
        #: Whether training is about to go on behind a held state.
        self._resuming = False
        self._resumed = False
        #: Batches that the iterator of the first steps had given.
        self._taken: list[int] = []
        #: Whether training has begun: what is built from then on is built earlier by a restart.
        self.training = False
        #: The state that user code may read when it builds loaders, and a restart's return to it for that time.
        self.readable: Callable[[], Any] = lambda: None
        self.reading: Callable[[Any], AbstractContextManager[None]] | None = None
        self._epoch_over = False
        self._given = {"train": 0, "validation": 0}
        self._grafted: list[Any] = []
        self._flat: dict[str, tuple[Any, list[Any]]] = {}
        self.notes: list[str] = []
        #: Called with the reason why resumes are not exact.
        self.inexact: Callable[[str], None] = self._add_note
        #: What the current loaders were built under.
        self.built_under: Built = {}
        #: The training loaders of this building that have been processed, and how far Lightning reads them ahead.
        self._processed: list[DataLoader[Any]] = []
        self._ahead = 0

    @contextmanager
    def building(self, role: str) -> Iterator[None]:
        """Wrap the building of loaders, which is user code: it may draw, and read or move epochs, counters and states.

        A restart builds them under the state that the dead process had then, and goes on with the newer one.
        """
        if role == "train":
            self._processed, self._ahead = [], 0
        if not self._resuming:
            moves = not self.training and not self._trainer.sanity_checking
            generators = dataloader.global_generators()
            self.built_under[role] = {"generators": generators, "moves": moves, "state": self.readable()}
            with self._watching_the_model(role) if self.training else nullcontext():
                yield
            return
        built = self.built_under.get(role)
        if built is None:
            yield
            return
        state = built["state"]  # None: user code had built them before the session began
        reading = nullcontext() if state is None or self.reading is None else self.reading(state)
        with reading, dataloader.under_generators(built["generators"], keep=built["moves"]):
            yield

    @contextmanager
    def _watching_the_model(self, role: str) -> Iterator[None]:
        """Notice a model that is used to build loaders: a restart builds them with other weights."""
        ours = set(self._trainer.lightning_module.modules())
        used: list[nn.Module] = []

        def note_ours(module: nn.Module, _: Any) -> None:
            if not used and module in ours:
                used.append(module)

        handle = register_module_forward_pre_hook(note_ours)
        try:
            yield
        finally:
            handle.remove()
        if used:
            self.inexact(
                f"the model runs while {role} loaders are built in the middle of training, and a restart builds them "
                "with newer weights; build them in setup(), or reload them at every epoch"
            )

    def continue_after(self, positions: Positions, *, epoch_over: bool, built_under: Built) -> None:
        """Give these positions to the first loaders that are processed."""
        self.built_under = built_under
        self._held = positions
        self._resuming = self._resumed = True
        self._epoch_over = epoch_over

    def take_over(self) -> None:
        """Graft training loaders that have been built already, and set them to their held positions.

        Call when the held state is known, with the loops at their place.
        """
        if not self._internals.train_loaders_are_built:
            return
        loaders = self._flattened("train", self._trainer.train_dataloader)
        late = [loader for loader in loaders if isinstance(loader, DataLoader) and not dataloader.is_grafted(loader)]
        ahead = int(any(sized_len(loader) is None for loader in loaders))
        for loader in late:
            dataloader.graft(loader, lookahead=ahead)
            self._grafted.append(loader)
        if late:
            self._add_note(
                "training loaders were built before MemCheckpoint.setup(), by setup() of a datamodule or of another "
                "callback: they are iterated again, so their order differs from that of a run without MemCheckpoint"
            )
        for loader in loaders:
            self._resume(loader)
        if late or self._held is not None:
            self._internals.iterate_train_loaders_anew()

    def process(self, loader: Any) -> Any:
        """Graft a loader that Lightning has just prepared; it keeps its identity and, for `isinstance`, its type."""
        # Validation loaders are set up while the trainer validates, sanity-checks, or claims to validate.
        role = "train" if self._trainer.training else "validation"
        unsized = role == "train" and sized_len(loader) is None
        if unsized and not self._ahead:
            # Lightning reads all loaders one batch ahead if one has no length.
            self._ahead = 1
            for earlier in self._processed:
                dataloader.release(earlier)
                dataloader.graft(earlier, lookahead=1)
        if isinstance(loader, DataLoader):
            dataloader.graft(loader, lookahead=self._ahead if role == "train" else 0)
            self._grafted.append(loader)
            if role == "train":
                self._processed.append(loader)
        elif role == "train" and not _is_stateful(loader):
            self.inexact(
                f"the train loader {type(loader).__name__} starts from its beginning after a restart, as it is not a "
                "DataLoader and lacks state_dict() and load_state_dict()"
            )
        elif unsized:
            self.inexact(
                f"the train loader {type(loader).__name__} has no length, so that Lightning reads it one batch ahead, "
                "and a restart leaves that batch out; give it a __len__()"
            )
        return loader

    def _add_note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def resume_built(self) -> None:
        """Set the training loaders to their held positions, when all are processed and none is iterated."""
        for loader in self._flattened("train", self._trainer.train_dataloader):
            self._resume(loader)

    def _resume(self, loader: Any) -> None:
        if self._held is None:
            return
        index = self._given["train"]
        self._given["train"] += 1
        held = self._held["train"]
        if index >= len(held):
            raise ValueError(
                f"the held state has positions of {len(held)} train loader(s), this run has more; resume with the "
                'same loaders, or start over with MemCheckpoint(resume="never")'
            )
        position = held[index]
        if position is None:
            return
        if isinstance(loader, DataLoader):
            dataloader.resume(loader, position)
        elif _is_stateful(loader):
            loader.load_state_dict(position)
            if self._epoch_over and _still_yields(loader):
                loader.load_state_dict(position)  # it has moved on to the next epoch

    def capture(self, *, epoch_over: bool) -> Positions:
        """The data positions at the end of a training batch."""
        train = self._flattened("train", self._trainer.train_dataloader)
        self._look_at_steps()
        aheads = self._internals.batches_fetched_ahead(len(train))
        return {
            "train": [
                self._position(loader, exhausted=epoch_over, ahead=ahead, iterator=iterator)
                for loader, ahead, iterator in zip_longest(
                    train, aheads, self._internals.train_iterators()[: len(train)]
                )
            ],
            "fetcher": None if epoch_over else self._internals.fetcher_state(),
            "validation": [
                self._position(loader, exhausted=False, ahead=0) if isinstance(loader, DataLoader) else None
                for loader in self._flattened("validation", self._trainer.val_dataloaders)
            ],
        }

    def _look_at_steps(self) -> None:
        """Notice `training_step(dataloader_iter)` that takes more batches in its first step than in later ones."""
        if len(self._taken) == 3 or (fetched := self._internals.fetched_by_steps()) is None:
            return
        self._taken.append(fetched)
        first, *later = (now - before for before, now in pairwise([0, *self._taken]))
        if len(later) == 2 and first > later[0] == later[1] and not self._resumed:
            self.inexact(
                f"training_step(dataloader_iter) took {first} batches in its first step and {later[0]} in later ones: "
                "those taken in advance are left out by a restart; train on all batches that a step takes"
            )

    def look_again(self) -> list[str]:
        """Lines on what a resume of the loaders rests on. What is not exact is declared; some shows only later."""
        for loader in self._grafted:
            if (reason := dataloader.unreplayable(loader)) is not None:
                self.inexact(f"a data loader: {reason}")
            if (remark := dataloader.remark(loader)) is not None:
                self._add_note(f"a data loader: {remark}")
        return self.notes

    @staticmethod
    def _position(loader: Any, *, exhausted: bool, ahead: int, iterator: object = None) -> Any:
        if isinstance(loader, DataLoader):
            return dataloader.position(loader, exhausted=exhausted, ahead=ahead, iterator=iterator)
        return loader.state_dict() if _is_stateful(loader) else None

    def _flattened(self, role: str, iterables: Any) -> list[Any]:
        if iterables is None:
            return []
        known = self._flat.get(role)
        if known is None or known[0] is not iterables:
            known = self._flat[role] = (iterables, list(CombinedLoader(iterables).flattened))
        return known[1]

    def restore_late(self) -> None:
        """Restore iterators and generators; call after all loaders exist and before the global RNG is restored."""
        held, self._held = self._held, None
        if held is None:
            return
        self._set_up_validation(held)
        self._resuming = False
        trainer = self._trainer
        for role, iterables in (("validation", trainer.val_dataloaders), ("train", trainer.train_dataloader)):
            for loader, position in zip(self._flattened(role, iterables), held[role], strict=False):
                if position is not None and isinstance(loader, DataLoader):
                    if role == "validation":
                        dataloader.recreate_persistent_iterator(loader, position)
                    else:
                        dataloader.go_live(loader)  # what had been read ahead is read again
                    dataloader.restore_generators(loader, position)
        if held["fetcher"] is not None:
            self._internals.set_fetcher_state(held["fetcher"])

    def _set_up_validation(self, held: Positions) -> None:
        """Create the validation loaders now if the killed process had them.

        Lightning does so in a fresh start (for its sanity check), but on a restart only in epochs that validate. A
        persistent worker pool would then be created later, and draw from the global RNG.
        """
        trainer = self._trainer
        if not held["validation"]:
            self._internals.forget_val_loaders()  # the first validation builds them, as it did
        elif trainer.val_dataloaders is None and trainer.enable_validation:
            trainer.validating = True
            with self._internals.keeping_val_counts():
                self._internals.val_loop.setup_data()
            trainer.training = True

    def release(self) -> None:
        """Release every grafted loader."""
        for loader in self._grafted:
            if dataloader.is_grafted(loader):
                dataloader.release(loader)
        self._grafted.clear()
        self._flat.clear()


def derived_positions(positions: Positions, batches: int) -> Positions:
    """Positions for another number of ranks, each of which has trained `batches` of the epoch."""
    train = [
        dataloader.derived(position, batches) if isinstance(position, dict) and "pass" in position else position
        for position in positions["train"]
    ]
    return {**positions, "train": train}


def _still_yields(loader: Any) -> bool:
    """Whether a loader at the end of an epoch has another batch.

    If not, the call has made it notice the epoch's end. Nothing else would: the loops re-enter after the last batch and
    ask for none, and a generator does nothing until it is asked.
    """
    for _ in loader:
        return True
    return False


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
