"""Data positions: tracked in every loader that Lightning processes, read at each step, restored on a resume.

Lightning passes each training and validation loader through `strategy.process_dataloader` after it has added its
DistributedSampler, and again whenever it reloads them. There a loader is grafted.

User code can have the training loaders built before the held state is known: `trainer.estimated_stepping_batches` in
configure_optimizers() does, and `trainer.fit_loop.setup_data()`. They are kept, as building them may draw random
numbers; they get their positions, and are iterated anew, as soon as these are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_memckpt.internals import TrainerInternals
from memckpt import dataloader

Positions = dict[str, list[Any]]


class Loaders:
    """The loaders of one fit.

    Attributes:
        notes: one line for each loader that cannot be continued exactly; the caller logs them.
    """

    def __init__(self, trainer: pl.Trainer, internals: TrainerInternals) -> None:
        self._trainer: Any = trainer
        self._internals = internals
        self._held: Positions | None = None
        self._epoch_over = False
        self._given = {"train": 0, "validation": 0}
        self._grafted: list[Any] = []
        self._flat: dict[str, tuple[Any, list[Any]]] = {}
        self.notes: list[str] = []
        #: The global generators before the training loaders were built, if they were rebuilt while training ran.
        self.built_under: Any = None

    @contextmanager
    def building(self) -> Iterator[None]:
        """Wrap the building of the training loaders, which is user code and may draw random numbers.

        The first loaders are built before training, in a restart as in a first start. Loaders that Lightning reloads
        during training are built before training by a restart, too, under the generators of their first building.
        """
        if self._held is not None:
            if self.built_under is None:
                yield
            else:
                with dataloader.under_generators(self.built_under):
                    yield
            return
        if self._internals.fit_loop._combined_loader is not None:
            self.built_under = dataloader.global_generators()
        yield

    def hold(self, positions: Positions, *, epoch_over: bool, built_under: Any = None) -> None:
        """Give these positions to the first loaders that are processed."""
        self.built_under = built_under
        self._held = positions
        self._epoch_over = epoch_over

    def take_over(self) -> None:
        """Graft training loaders that have been built already, and set them to their held positions.

        Call when the held state is known, with the loops at their place.
        """
        if not self._internals.train_loaders_are_built:
            return
        loaders = self._flattened("train", self._trainer.train_dataloader)
        late = [loader for loader in loaders if isinstance(loader, DataLoader) and not dataloader.is_grafted(loader)]
        for loader in late:
            dataloader.graft(loader)
            self._grafted.append(loader)
        if late:
            self._note(
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
        if isinstance(loader, DataLoader):
            dataloader.graft(loader)
            self._grafted.append(loader)
        elif not _is_stateful(loader) and role == "train":
            self._note(
                f"the train loader {type(loader).__name__} starts from its beginning after a restart: it is not a "
                "DataLoader and lacks state_dict() and load_state_dict()"
            )
        if role == "train":
            self._resume(loader)
        return loader

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

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
        ahead = self._internals.batches_fetched_ahead()
        train = self._flattened("train", self._trainer.train_dataloader)
        return {
            "train": [
                self._position(loader, exhausted=epoch_over, ahead=ahead, iterator=iterator)
                for loader, iterator in zip_longest(train, self._internals.train_iterators()[: len(train)])
            ],
            "validation": [
                self._position(loader, exhausted=False, ahead=0) if isinstance(loader, DataLoader) else None
                for loader in self._flattened("validation", self._trainer.val_dataloaders)
            ],
        }

    def look_again(self) -> list[str]:
        """Lines on loaders that cannot be continued exactly; some show only after a loader has been iterated."""
        for loader in self._grafted:
            reason = dataloader.unreplayable(loader)
            if reason is not None:
                self._note(f"a data loader: {reason}")
        return self.notes

    @staticmethod
    def _position(loader: Any, *, exhausted: bool, ahead: int, iterator: object = None) -> Any:
        if isinstance(loader, DataLoader):
            position = dataloader.position(loader, exhausted=exhausted, iterator=iterator)
            return _consumed(position, ahead) if ahead else position
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
        trainer = self._trainer
        for role, iterables in (("validation", trainer.val_dataloaders), ("train", trainer.train_dataloader)):
            for loader, position in zip(self._flattened(role, iterables), held[role], strict=False):
                if position is not None and isinstance(loader, DataLoader):
                    if role == "validation":
                        dataloader.recreate_persistent_iterator(loader, position)
                    dataloader.restore_generators(loader, position)

    def _set_up_validation(self, held: Positions) -> None:
        """Create the validation loaders now if the killed process had them.

        Lightning does so in a fresh start (for its sanity check), but on a restart only in epochs that validate; a
        persistent worker pool would then be created later, and draw from the global RNG.
        """
        trainer = self._trainer
        if held["validation"] and trainer.val_dataloaders is None and trainer.enable_validation:
            trainer.validating = True
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


def _consumed(position: dict[str, Any], ahead: int) -> dict[str, Any]:
    """The position without the batches that the fetcher holds and training has not seen.

    A loader without a length is read one batch ahead, and the next fetcher will do so again. Such a loader is
    positioned by reading and discarding, so only the number of batches matters.
    """
    current = position["pass"]
    return {**position, "pass": {**current, "batches": max(current["batches"] - ahead, 0)}}


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
