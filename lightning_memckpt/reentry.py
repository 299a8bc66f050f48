"""Re-entry of a resumed fit into Lightning's loops, directly behind the captured batch.

Lightning's own state, saved at the end of a training batch, does not lead back to that point. The batch would
not count as completed, a validation due after it would be skipped, and an epoch that it finished would end without its
hooks.
Pure functions over the loops' state dictionary edit it.

After the last step of a run (`max_steps` reached, or `trainer.should_stop` set) a validation and the epoch's end hooks
still follow. A new fit loop that finds such a stop condition returns without running them. So :class:`Reentry` lifts
stop conditions when the loops are loaded, and puts them back inside the epoch loop, behind the check that would have
ended it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_memckpt.internals import TrainerInternals
from lightning_memckpt.shadowing import Shadows

LoopState = dict[str, Any]

_BATCHES = "epoch_loop.batch_progress"
_VALIDATION_BATCHES = "epoch_loop.val_loop.batch_progress"
_EPOCH = "epoch_loop.state_dict"


def behind_batch(state: LoopState, *, validation_follows: bool) -> LoopState:
    """`state`, taken in the module's `on_train_batch_end`, edited to continue after that batch.

    Args:
        validation_follows: whether Lightning validates after this batch.
    """
    state = _batch_completed(state)
    return _validation_owed(state) if validation_follows else _nothing_owed(state)


def edited_part(state: LoopState) -> LoopState:
    """The entries of `state` that :func:`behind_batch` edits, unchanged."""
    return {key: state[key] for key in (_BATCHES, _VALIDATION_BATCHES, _EPOCH)}


def batches_behind(state: LoopState) -> int:
    """Number of batches of the current epoch that this rank has trained."""
    done: int = state[_BATCHES]["current"]["processed"]
    return done


def with_batches_behind(state: LoopState, batches: int) -> LoopState:
    """`state` at another place in the same epoch: with fewer ranks each rank sees more batches."""
    progress = state[_BATCHES]
    return {**state, _BATCHES: {**progress, "current": dict.fromkeys(progress["current"], batches)}}


def _batch_completed(state: LoopState) -> LoopState:
    """Mark the batch as completed: Lightning itself does so only after the hook in which we run.

    With ready == started == processed == completed the epoch loop is in its stage "restarted on last": it neither
    repeats the batch nor resets its counters.
    """
    progress = state[_BATCHES]
    completed = {
        count: {**progress[count], "completed": progress[count]["processed"]} for count in ("total", "current")
    }
    return {**state, _BATCHES: {**progress, **completed}}


def _validation_owed(state: LoopState) -> LoopState:
    """Make a validation that is due look interrupted in its first batch.

    The epoch loop then returns at once from its next `advance` and runs the whole validation in `on_advance_end`,
    followed by the usual. That is plateau schedulers, the epoch's end, the step counter of the loggers.
    """
    progress = state[_VALIDATION_BATCHES]
    done = progress["total"]["completed"]
    total = {**progress["total"], "ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    current = dict.fromkeys(progress["current"], 0)
    return {**state, _VALIDATION_BATCHES: {**progress, "total": total, "current": current, "is_last_batch": False}}


def _nothing_owed(state: LoopState) -> LoopState:
    """Continue without a validation, inside an epoch or at its end, by batches or by `max_steps`.

    `on_advance_end` of this batch does not run again, so the loggers' step counter is incremented here, and the caller
    steps the plateau schedulers that are stepped there. Earlier validations of this epoch are complete: a half-counted
    batch in their totals would read as an interrupted validation.
    """
    epoch = {**state[_EPOCH], "_batches_that_stepped": state[_EPOCH]["_batches_that_stepped"] + 1}
    progress = state[_VALIDATION_BATCHES]
    total = dict.fromkeys(progress["total"], progress["total"]["completed"])
    return {**state, _EPOCH: epoch, _VALIDATION_BATCHES: {**progress, "total": total}}


class Reentry:
    """Re-entry of one resumed fit into its loops; without effect after the first `on_train_epoch_end`.

    Args:
        trainer: its loops have loaded the edited state.
        validation_owed: whether a validation follows the captured batch.
        epoch_over: whether the captured batch was the last one of its epoch.
        should_stop: `trainer.should_stop` as captured.
        val_has_run: whether any validation had run in the killed process.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        internals: TrainerInternals,
        *,
        validation_owed: bool,
        epoch_over: bool,
        should_stop: bool,
        val_has_run: bool,
    ) -> None:
        self._trainer = trainer
        self._internals = internals
        self._validation_owed = validation_owed
        self._epoch_over = epoch_over
        self._should_stop = should_stop
        self._val_has_run = val_has_run
        self._shadows = Shadows()
        self._max_steps: int | None = None

    def lift(self) -> None:
        """Lift the stop conditions; call before the fit loop runs."""
        epoch_loop = self._internals.epoch_loop
        if epoch_loop.max_steps != -1 and epoch_loop.global_step >= epoch_loop.max_steps:
            self._max_steps = epoch_loop.max_steps
            epoch_loop.max_steps = epoch_loop.global_step + 1
        if self._validation_owed:
            # Else an epoch that is over would end before its validation: one of a fit before, as a Tuner's, counts.
            self._internals.set_val_has_run(False)
            # Lightning decides again, from the clock or from should_stop; the killed process's decision holds.
            self._shadows.put(epoch_loop, "_should_check_val_fx", lambda original, *args: True)
            self._shadows.put(epoch_loop, "on_advance_end", self._end_advance)
        else:
            # A finished epoch must not fetch another batch. `_has_run` means "the validation after the last batch is
            # done", which lets the epoch loop end before its first `advance`.
            self._internals.set_val_has_run(self._epoch_over or self._val_has_run)
            self._shadows.put(epoch_loop, "on_run_start", self._start_run)

    def _start_run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._shadows.remove(self._internals.epoch_loop, "on_run_start")
        result = original(*args, **kwargs)
        self._put_back()
        return result

    def _end_advance(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._shadows.remove(self._internals.epoch_loop, "on_advance_end")
        self._put_back()
        # The original asks `_should_check_val_fx` once, at its start, before any user code runs.
        self._shadows.put(self._internals.val_loop, "run", self._validate)
        return original(*args, **kwargs)

    def _validate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._shadows.remove(self._internals.val_loop, "run")
        self._shadows.remove(self._internals.epoch_loop, "_should_check_val_fx")
        self._internals.settle_validation()
        return original(*args, **kwargs)

    def _put_back(self) -> None:
        if self._max_steps is not None:
            self._internals.epoch_loop.max_steps = self._max_steps
            self._max_steps = None
        if self._should_stop:
            self._trainer.should_stop = True
            self._should_stop = False

    def finish(self) -> None:
        """End the restart; call in the first `on_train_epoch_end`.

        Lightning clears its restart flags after each iteration, but an epoch that ends before its first iteration keeps
        them. The fit loop keeps its own until after this hook, where it would leave ReduceLROnPlateau(interval="epoch")
        without its step.
        """
        self._internals.epoch_loop.on_iteration_done()
        self._internals.fit_loop.on_iteration_done()
        if not self._validation_owed and self._epoch_over:
            self._internals.set_val_has_run(self._val_has_run)
        self.abandon()

    def abandon(self) -> None:
        """Remove everything of ours from the loops."""
        self._put_back()
        self._shadows.remove_all()
