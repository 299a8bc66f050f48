"""Where Lightning re-enters its loops: pure functions over the loops' state dictionary.

Lightning's own state, saved as it stands at the end of a training batch, does not lead back to that place: the
batch would not count as completed, a validation due after it would be skipped, and an epoch it finished would
end without its hooks. Each function returns an edited copy for one situation, so that the loops, having loaded
it, continue directly behind the batch.
"""

from __future__ import annotations

from typing import Any

LoopState = dict[str, Any]

_BATCHES = "epoch_loop.batch_progress"
_VALIDATION_BATCHES = "epoch_loop.val_loop.batch_progress"
_EPOCH = "epoch_loop.state_dict"


def behind_batch(state: LoopState, *, validation_follows: bool) -> LoopState:
    """`state` at the end of a training batch, edited to continue behind that batch.

    Args:
        state: the fit loop's state dictionary, taken in the module's `on_train_batch_end`.
        validation_follows: whether Lightning validates after this batch.
    """
    state = _batch_completed(state)
    return _validation_owed(state) if validation_follows else _nothing_owed(state)


def edited_part(state: LoopState) -> LoopState:
    """Those entries of `state` that :func:`behind_batch` edits, as they are."""
    return {key: state[key] for key in (_BATCHES, _VALIDATION_BATCHES, _EPOCH)}


def as_lightning_saves(state: LoopState, unedited: LoopState | None, *, validation_follows: bool) -> LoopState:
    """What :func:`behind_batch` has made of a state, as Lightning's own checkpoint of that batch has it.

    Args:
        state: the edited one.
        unedited: the :func:`edited_part` of the state that it was made of; None if it was not kept: what
            Lightning's counters are as a rule then stands for it.
        validation_follows: as it was edited with.
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
    """How many batches of the current epoch this rank has trained."""
    done: int = state[_BATCHES]["current"]["processed"]
    return done


def with_batches_behind(state: LoopState, batches: int) -> LoopState:
    """`state` at another place in the same epoch: a rank sees more batches when there are fewer of them."""
    progress = state[_BATCHES]
    return {**state, _BATCHES: {**progress, "current": dict.fromkeys(progress["current"], batches)}}


def _batch_completed(state: LoopState) -> LoopState:
    """The batch is done: Lightning itself counts it as completed only after the hook we are called in.

    With ready == started == processed == completed the epoch loop is in its stage "restarted on last": it
    neither repeats the batch nor resets its counters.
    """
    progress = state[_BATCHES]
    completed = {
        count: {**progress[count], "completed": progress[count]["processed"]} for count in ("total", "current")
    }
    return {**state, _BATCHES: {**progress, **completed}}


def _validation_owed(state: LoopState) -> LoopState:
    """A validation is due: make it look interrupted in its first batch.

    The epoch loop then returns at once from its next `advance` and runs the whole validation in
    `on_advance_end`, followed by what always follows it: plateau schedulers, the epoch's end. The step counter
    of the loggers is left alone, because `on_advance_end` raises it.
    """
    progress = state[_VALIDATION_BATCHES]
    done = progress["total"]["completed"]
    total = {**progress["total"], "ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    current = dict.fromkeys(progress["current"], 0)
    return {**state, _VALIDATION_BATCHES: {**progress, "total": total, "current": current, "is_last_batch": False}}


def _nothing_owed(state: LoopState) -> LoopState:
    """No validation is due, in the middle of an epoch or at its end, by batches or by `max_steps`.

    `on_advance_end` of this batch is not run again, so the loggers' step counter is raised here, and the
    plateau schedulers that are stepped there are stepped by the caller. Earlier validations of this epoch are
    behind us: any half-counted batch in their totals would read as an interrupted validation.
    """
    epoch = {**state[_EPOCH], "_batches_that_stepped": state[_EPOCH]["_batches_that_stepped"] + 1}
    progress = state[_VALIDATION_BATCHES]
    total = dict.fromkeys(progress["total"], progress["total"]["completed"])
    return {**state, _EPOCH: epoch, _VALIDATION_BATCHES: {**progress, "total": total}}
