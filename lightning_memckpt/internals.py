"""All private names of Lightning that this package relies on, in one place.

The public hooks cannot express a resume after the last optimizer step. :meth:`TrainerInternals.verify` looks every name
up before training starts: a Lightning that has renamed one is refused by name, instead of resuming wrongly. Lightning
2.4 and older lack the restart stages that this depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

from lightning_memckpt.shadowing import Shadows

OLDEST_LIGHTNING = (2, 5)

_MISSING = object()

#: Lightning's name for the file in a sharded checkpoint that has everything but the shards.
_METADATA_FILENAME = "meta.pt"

#: Names looked up from the trainer, each with its purpose.
_REQUIRED: tuple[tuple[str, str], ...] = (
    ("_checkpoint_connector._loaded_checkpoint", "a checkpoint passed by the user must not overwrite newer state"),
    ("_checkpoint_connector._restore_modules_and_callbacks", "the same, if a strategy restores it after its setup"),
    ("_logger_connector._first_loop_iter", "decides whether the next self.log() starts a new aggregate"),
    ("_logger_connector._current_fx", "decides the same"),
    ("_logger_connector.metrics", "the step's metrics, before Lightning has merged them"),
    ("_logger_connector.should_update_logs", "whether the step's metrics are about to be logged"),
    ("_logger_connector._callback_metrics", "callback_metrics hands out this dictionary"),
    ("_logger_connector._logged_metrics", "logged_metrics hands out this dictionary"),
    ("_logger_connector._progress_bar_metrics", "progress_bar_metrics hands out this dictionary"),
    ("fit_loop._data_fetcher", "argument of _should_check_val_fx; holds batches fetched ahead"),
    ("fit_loop._combined_loader", "training loaders that were built before the end of strategy.setup()"),
    ("fit_loop._load_combined_loader_states", "called when all training loaders are prepared and none is iterated"),
    ("fit_loop._should_reload_train_dl", "whether they are built again before training"),
    ("fit_loop._can_stop_early", "whether should_stop takes effect"),
    ("fit_loop._last_train_dl_reload_epoch", "when the training loaders are reloaded next"),
    ("fit_loop.epoch_loop._batches_that_stepped", "the step on the loggers' axis"),
    ("fit_loop.epoch_loop._results", "epoch aggregates of self.log(); in no checkpoint"),
    ("fit_loop.epoch_loop._should_accumulate", "whether a batch ends with an optimizer step"),
    ("fit_loop.epoch_loop._is_training_done", "whether a batch is the last one of its epoch"),
    ("fit_loop.epoch_loop._should_check_val_fx", "whether a validation follows a batch"),
    ("fit_loop.epoch_loop.val_loop._combined_loader", "validation loaders that the dead process had not built yet"),
    ("fit_loop.epoch_loop.val_loop._should_reload_val_dl", "whether they are built again"),
    ("fit_loop.epoch_loop.val_loop._has_run", "lets a finished epoch end without another fetch"),
    ("fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch", "when the validation loaders are reloaded next"),
    ("fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader", "the loggers' axis for validation steps"),
)

#: Entries of the loops' state dictionary that `loops` edits.
LOOP_STATE_KEYS = (
    "state_dict", "epoch_progress", "epoch_loop.state_dict", "epoch_loop.batch_progress",
    "epoch_loop.val_loop.batch_progress",
)  # fmt: skip

#: Fields that a callback's own state_dict() omits although its behaviour depends on them.
_CALLBACK_FIELDS: tuple[tuple[type[pl.Callback], tuple[str, ...]], ...] = (
    (
        ModelCheckpoint,
        ("current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"),
    ),
)


def lightning_version() -> tuple[int, ...]:
    """The installed Lightning's release as numbers; ``2.6.0.dev0`` counts as 2.6."""
    numbers: list[int] = []
    for part in lightning.__version__.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_version() -> None:
    """Refuse a Lightning that is too old. Raises MisconfigurationException."""
    if lightning_version() < OLDEST_LIGHTNING:
        oldest = ".".join(map(str, OLDEST_LIGHTNING))
        raise MisconfigurationException(
            f"MemCheckpoint needs lightning>={oldest}, found {lightning.__version__}: its training loop cannot be "
            f"re-entered exactly. Upgrade with `pip install 'lightning>={oldest}'`."
        )


def callback_fields(callback: pl.Callback) -> dict[str, Any]:
    """Values of the fields that `callback` needs and its state_dict() omits."""
    return {
        name: getattr(callback, name)
        for kind, names in _CALLBACK_FIELDS
        if isinstance(callback, kind)
        for name in names
        if hasattr(callback, name)
    }


def set_callback_fields(callback: pl.Callback, fields: Mapping[str, Any]) -> None:
    """Restore what :func:`callback_fields` returned; names that this version lacks are skipped."""
    for name, value in fields.items():
        if hasattr(callback, name):
            setattr(callback, name, value)


def saves_by_wall_clock(callback: ModelCheckpoint) -> bool:
    """Whether elapsed time decides when it saves."""
    return getattr(callback, "_train_time_interval", None) is not None


def is_tuners_own(callback: object) -> bool:
    """Whether a Tuner has added it for its own trial, and not the user for all trainings."""
    return isinstance(callback, (LearningRateFinder, BatchSizeFinder)) and bool(getattr(callback, "_early_exit", False))


def _counts(progress: Any) -> dict[str, Any]:
    """A progress tracker as plain dictionaries; trackers nest, down to integers and booleans."""
    return {
        name: value if isinstance(value, (int, float)) else _counts(value) for name, value in vars(progress).items()
    }


class TrainerInternals:
    """Typed access to the private state of one trainer's fit loop."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer: Any = trainer
        self._progress: dict[str, Any] | None = None
        self._loops: dict[str, Any] = {}

    def verify(self) -> None:
        """Check that every private name exists. Raises MisconfigurationException, which names the missing one."""
        for path, reason in _REQUIRED:
            self._lookup(path, reason)
        state = self.loop_state()
        for key in LOOP_STATE_KEYS:
            if key not in state:
                raise self._unsupported(f"the loops' state entry {key!r}", "the place to resume at")
        self._prepare_fast_loop_state(state)

    def _lookup(self, path: str, reason: str) -> Any:
        value = self._trainer
        for name in path.split("."):
            # A property may raise before training has begun; its existence suffices here.
            if hasattr(type(value), name) and name == path.rsplit(".", 1)[-1]:
                return None
            value = getattr(value, name, _MISSING)
            if value is _MISSING:
                raise self._unsupported(f"trainer.{path}", reason)
        return value

    @staticmethod
    def _unsupported(what: str, reason: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"MemCheckpoint relies on {what} ({reason}), which lightning {lightning.__version__} does not have. "
            "Use a version that lightning-memckpt was released for, or a newer lightning-memckpt."
        )

    @property
    def fit_loop(self) -> Any:
        return self._trainer.fit_loop

    @property
    def epoch_loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    @property
    def val_loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.val_loop

    def loop_state(self) -> dict[str, Any]:
        """The fit loop's state dictionary without the loaders' part, made of new dictionaries.

        `fit_loop.state_dict()` would also call each loader's own state_dict(), which has side effects in torchdata's
        StatefulDataLoader; loader positions are captured elsewhere.
        """
        if self._progress is None:
            return self._lightnings_loop_state()
        return {
            **{key: _counts(progress) for key, progress in self._progress.items()},
            **{key: loop.on_save_checkpoint() for key, loop in self._loops.items()},
            "state_dict": {},
        }

    def _lightnings_loop_state(self) -> dict[str, Any]:
        fit_loop = self.fit_loop
        state: dict[str, Any] = {"state_dict": {}, "epoch_progress": fit_loop.epoch_progress.state_dict()}
        fit_loop.epoch_loop.state_dict(state, "epoch_loop.")
        return state

    def _prepare_fast_loop_state(self, expected: dict[str, Any]) -> None:
        """Look the counters up once, if the result is the same: Lightning's dataclasses.asdict takes far longer."""
        progress: dict[str, Any] = {}
        self._loops = {}

        def visit(loop: Any, prefix: str) -> None:
            for name, value in vars(loop).items():
                key = prefix + name
                if f"{key}.state_dict" in expected:
                    self._loops[f"{key}.state_dict"] = value
                    visit(value, f"{key}.")
                elif key in expected:
                    progress[key] = value

        visit(self.fit_loop, "")
        self._progress = progress
        if self.loop_state() != expected:
            self._progress = None

    def should_accumulate(self) -> bool:
        """Whether the batch that is being trained, or has just ended, only accumulates its gradients."""
        return bool(self.epoch_loop._should_accumulate())

    def epoch_is_over(self) -> bool:
        """Whether no further batch of this epoch follows."""
        stops = self._trainer.should_stop and self.fit_loop._can_stop_early  # should_stop is set, and takes effect now
        return bool(self.epoch_loop._is_training_done or stops)

    def validation_follows(self) -> bool:
        """Whether Lightning validates after the batch that has just ended."""
        return bool(self.epoch_loop._should_check_val_fx(self.fit_loop._data_fetcher))

    def batches_fetched_ahead(self, loaders: int) -> list[int]:
        """Number of batches of each training loader that the fetcher has taken and training has not seen.

        One if no length is known: Lightning then looks ahead to know which batch is the last.
        """
        combined, batches = self.fit_loop._combined_loader, getattr(self.fit_loop._data_fetcher, "batches", ())
        if not batches or combined._mode != "max_size":
            return [len(batches)] * loaders
        # A loader that is exhausted gives None in this mode.
        parts = [combined._spec.flatten_up_to(batch) for batch, _, _ in batches]
        return [sum(part is not None for part in each) for each in zip(*parts, strict=True)]

    def fetched_by_steps(self) -> int | None:
        """Batches of this epoch that training steps have taken by themselves; None if Lightning gives them out."""
        fetcher = self.fit_loop._data_fetcher
        return int(fetcher.fetched) if isinstance(fetcher, _DataLoaderIterDataFetcher) else None

    def fetcher_state(self) -> dict[str, Any]:
        """What the fetcher and the combination of loaders count in an epoch."""
        fetcher, combination = self.fit_loop._data_fetcher, self.fit_loop._combined_loader._iterator
        state = {"index": combination._idx, "consumed": list(getattr(combination, "_consumed", ()))}
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            state |= {"fetched": fetcher.fetched, "batch_idx": fetcher._batch_idx}
        return state

    def set_fetcher_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`fetcher_state` returned, in loops that have loaded their state and do not run yet."""
        fetcher, combination = self.fit_loop._data_fetcher, self.fit_loop._combined_loader._iterator
        combination._idx = state["index"]
        if hasattr(combination, "_consumed"):
            combination._consumed = list(state["consumed"])
        if isinstance(fetcher, _DataLoaderIterDataFetcher) and "fetched" in state:
            # Lightning adds the number of its steps, of which each may have taken several batches.
            fetcher.fetched = state["fetched"] - self.epoch_loop.batch_progress.current.completed
            fetcher._batch_idx = state["batch_idx"]

    def settle_validation(self) -> None:
        """Let the validation that begins count its batches as one that was never interrupted."""
        total = self.val_loop.batch_progress.total
        total.ready = total.started = total.completed

    @property
    def train_loaders_are_built(self) -> bool:
        """Whether the loop has its training loaders and will train with them as they are."""
        return self.fit_loop._combined_loader is not None and not self.fit_loop._should_reload_train_dl

    @property
    def loaders_are_due(self) -> dict[str, bool]:
        """Whether the training and the validation loop build their loaders when next asked to set them up."""
        train, validation = self.fit_loop, self.val_loop
        return {
            "train": train._combined_loader is None or bool(train._should_reload_train_dl),
            "validation": validation._combined_loader is None or bool(validation._should_reload_val_dl),
        }

    def forget_val_loaders(self) -> None:
        """Make the next validation build its loaders."""
        self.val_loop._combined_loader = None

    def callback_metrics(self) -> dict[str, Any]:
        """The metrics that `trainer.callback_metrics` hands out between two epochs."""
        return dict(self._trainer._logger_connector._callback_metrics)

    def set_callback_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Replace them."""
        held = self._trainer._logger_connector._callback_metrics
        held.clear()
        held.update(metrics)

    def iterate_train_loaders_anew(self) -> None:
        """Make the fetcher, which has begun to iterate the training loaders, restart from their current positions."""
        fetcher = self.fit_loop._data_fetcher
        fetcher.combined_loader.reset()  # ends workers of the iterators that are dropped
        iter(fetcher)

    def train_iterators(self) -> list[Any]:
        """The iterators that training takes its batches from, in the order of the loaders; empty if unknown."""
        return list(getattr(getattr(self.fit_loop._combined_loader, "_iterator", None), "iterators", ()))

    @property
    def logger_axis_step(self) -> int:
        """The step under which Lightning logs the training step that has just ended."""
        return int(self.epoch_loop._batches_that_stepped)

    @property
    def validates_by_wall_clock(self) -> bool:
        """Whether validation is due by time; such a Trainer argument exists since Lightning 2.6."""
        return getattr(self._trainer, "_val_check_time_interval", None) is not None

    @property
    def restores_late(self) -> bool:
        """Whether the user's checkpoint is restored after the strategy's setup and `on_fit_start`."""
        return bool(self._trainer.strategy.restore_checkpoint_after_setup)

    def shadow_late_restore(self, shadows: Shadows, function: Callable[..., None]) -> None:
        """Shadow the function that restores it there; its argument is the path, or None."""
        shadows.put(self._trainer._checkpoint_connector, "_restore_modules_and_callbacks", function)

    def user_checkpoint(self) -> dict[str, Any]:
        """The checkpoint that `fit(ckpt_path=...)` is about to restore; empty without one."""
        loaded: dict[str, Any] = self._trainer._checkpoint_connector._loaded_checkpoint
        return loaded

    def read_late_checkpoint(self, path: str) -> dict[str, Any]:
        """The same if the strategy will load it: its contents beside the shards."""
        # As Lightning does it: the path is rank 0's, a directory has a file with everything that is not sharded, and
        # torch's default decides which types may be loaded.
        shared = Path(self._trainer.strategy.broadcast(path))
        sharded = shared.is_dir()
        file = shared / _METADATA_FILENAME if sharded else shared
        checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", mmap=not sharded)
        return checkpoint

    def forget_user_checkpoint(self) -> None:
        """Keep Lightning from restoring the rest of the user's checkpoint over ours."""
        self._trainer._checkpoint_connector._loaded_checkpoint = {}

    def loop_extras(self) -> dict[str, Any]:
        """State of the loops that their state dictionary omits."""
        return {
            "train_reload_epoch": self.fit_loop._last_train_dl_reload_epoch,
            "val_reload_epoch": self.val_loop._last_val_dl_reload_epoch,
            "val_batches_seen": dict(self.val_loop._seen_batches_per_dataloader),
            "val_has_run": self.val_loop._has_run,
        }

    def set_loop_extras(self, extras: Mapping[str, Any]) -> None:
        """Restore what :meth:`loop_extras` returned, except `val_has_run`, which re-entry sets earlier."""
        self.fit_loop._last_train_dl_reload_epoch = extras["train_reload_epoch"]
        self.val_loop._last_val_dl_reload_epoch = extras["val_reload_epoch"]
        self.val_loop._seen_batches_per_dataloader.update(extras["val_batches_seen"])

    @contextmanager
    def keeping_val_counts(self) -> Iterator[None]:
        """Leave what making the validation's loaders resets: they were made in the sanity check, before it counted."""
        loop = self.val_loop
        kept = loop._last_val_dl_reload_epoch, loop._seen_batches_per_dataloader
        yield
        loop._last_val_dl_reload_epoch, loop._seen_batches_per_dataloader = kept

    def set_val_has_run(self, has_run: bool) -> None:
        """Tell the epoch loop whether the validation after its last batch has run."""
        self.val_loop._has_run = has_run

    @property
    def training_results(self) -> Any:
        """Aggregates of everything logged in training hooks (a dict subclass with a `log` method)."""
        return self.epoch_loop._results

    def row_to_come(self) -> dict[str, Any]:
        """What Lightning is about to log for the training step that has just ended; empty if nothing."""
        connector = self._trainer._logger_connector
        row = connector.metrics["log"] if connector.should_update_logs else {}
        if not row:
            return {}
        row = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in row.items()}
        row.setdefault("epoch", self._trainer.current_epoch)
        return {"step": self.logger_axis_step, **row}

    def logger_fields(self) -> dict[str, Any]:
        """State of self.log() between two batches, with the step's metrics as Lightning is about to merge them."""
        connector = self._trainer._logger_connector
        latest = connector.metrics
        return {
            "first_loop_iter": connector._first_loop_iter,
            "current_fx": connector._current_fx,
            "callback_metrics": {**connector._callback_metrics, **latest["callback"]},
            "logged_metrics": {**connector._logged_metrics, **latest["log"]},
            "progress_bar_metrics": {**connector._progress_bar_metrics, **latest["pbar"]},
        }

    def set_logger_fields(self, fields: Mapping[str, Any]) -> None:
        """Restore what :meth:`logger_fields` returned."""
        connector = self._trainer._logger_connector
        connector._first_loop_iter = fields["first_loop_iter"]
        connector._current_fx = fields["current_fx"]
        connector._callback_metrics.update(fields["callback_metrics"])
        connector._logged_metrics.update(fields["logged_metrics"])
        connector._progress_bar_metrics.update(fields["progress_bar_metrics"])
