"""Re-entry of Lightning's loops: pure functions over the loops' state dictionary.

Lightning's own state, saved at the end of a training batch, does not lead back to that point: the batch would not count
as completed, a validation due after it would be skipped, and an epoch that it finished would end without its hooks.
Each function returns an edited copy for one situation, so that the loops, having loaded it, continue directly after the
batch.
"""

from __future__ import annotations

from typing import Any

LoopState = dict[str, Any]

_BATCHES = "epoch_loop.batch_progress"
_VALIDATION_BATCHES = "epoch_loop.val_loop.batch_progress"
_EPOCH = "epoch_loop.state_dict"


def behind_batch(state: LoopState, *, validation_follows: bool) -> LoopState:
    """`state` at the end of a training batch, edited to continue after that batch.

    Args:
        state: the fit loop's state dictionary, taken in the module's `on_train_batch_end`.
        validation_follows: whether Lightning validates after this batch.
    """
    state = _batch_completed(state)
    return _validation_owed(state) if validation_follows else _nothing_owed(state)


def edited_part(state: LoopState) -> LoopState:
    """The entries of `state` that :func:`behind_batch` edits, unchanged."""
    return {key: state[key] for key in (_BATCHES, _VALIDATION_BATCHES, _EPOCH)}


def as_lightning_saves(state: LoopState, unedited: LoopState | None, *, validation_follows: bool) -> LoopState:
    """A state edited by :func:`behind_batch`, converted back to that of Lightning's own checkpoint of the batch.

    Args:
        state: the edited state.
        unedited: the :func:`edited_part` of the original state; None if it was not kept: then the usual values of
            Lightning's counters are used.
        validation_follows: as given to :func:`behind_batch`.
    """
    return {**state, **(_usual(state, validation_follows) if unedited is None else unedited)}


def _usual(state: LoopState, validation_follows: bool) -> LoopState:
    batches = state[_BATCHES]
    counted = {
        count: {**batches[count], "completed": batches[count]["processed"] - 1} for count in ("total", "current")
    }
    validation, epoch = state[_VALIDATION_BATCHES], state[_EPOCH]
    if validation_follows:
        total = dict.fromkeys(validation["total"], validation["total"]["completed"])
        validation = {**validation, "total": total}
    else:
        epoch = {**epoch, "_batches_that_stepped": epoch["_batches_that_stepped"] - 1}
    return {_BATCHES: {**batches, **counted}, _VALIDATION_BATCHES: validation, _EPOCH: epoch}


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
    followed by the usual: plateau schedulers, the epoch's end. The step counter of the loggers stays, because
    `on_advance_end` increments it.
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
