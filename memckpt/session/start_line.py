"""The start line: the step at which training resumes, or the reason why it starts over; and when a log would pay.

It is shown with Python's default logging, too: a resume that did not happen must not be noticed in the loss curve only.
"""

from __future__ import annotations

import logging

from memckpt.config import StorageConfig
from memckpt.session.report import HeldState
from memckpt.state.layout import Layout
from memckpt.state.spec import StateSpec
from memckpt.storage.batch import not_loggable
from memckpt.user_messages import show_by_default

#: A child of the engine's logger: a handler or level of that one applies here as well.
_log = logging.getLogger("memckpt.start")
#: Steps from this duration on are not counted on where a log is mentioned: with plain fp32 it pays from 20 s on.
_LONG_STEP_SECONDS = 5.0


def tell_start(
    held: HeldState | None, reason: str, drops_held: bool, repeated: int | None = None, lost: int | None = None
) -> None:
    """Log the start line. Called on rank 0.

    Args:
        held: the state that is resumed; None if training starts over.
        reason: why this state, or none, in words; empty if it is the newest one in memory.
        drops_held: whether a held state is dropped.
        repeated: step that is repeated from `held`, which is the state before it; None if no step is.
        lost: number of committed steps beyond it; None where that is not known.
    """
    show_by_default(_log)
    if held is None:
        _log.log(logging.WARNING if drops_held else logging.INFO, "memckpt: starting over: %s", reason)
    else:
        why = f": {reason}" if reason else ""
        step, proof = (held.step, "") if repeated is None else (repeated, ", which is repeated first, as a proof")
        gone = f" ({lost} committed step{'' if lost == 1 else 's'} behind it to be taken again)" if lost else ""
        _log.info("memckpt: resuming from %s at step %d%s%s%s", held.tier, step, gone, proof, why)


def tell_when_log_pays(storage: StorageConfig | None, spec: StateSpec) -> None:
    """Log when ``storage.mode="log"`` would write no more than checkpoints alone do. Called on rank 0.

    Args:
        storage: settings of storage; None: nothing is written.
        spec: layout of the state.
    """
    if storage is None or storage.mode == "log" or not_loggable(spec):
        return
    layout = Layout(spec)
    share = layout.logged_bytes / max(layout.checkpoint_bytes, 1)
    if storage.every_steps is not None:
        condition = "" if share * storage.every_steps <= 1 else None
    else:
        seconds = share * storage.min_seconds
        condition = f", where steps take {seconds:.2g} s or longer" if seconds < _LONG_STEP_SECONDS else None
    if condition is not None:
        _log.info(
            'memckpt: storage.mode="log" would have each step in storage, and write no more than checkpoints do%s: a '
            "record is %.1f%% of a checkpoint",
            condition,
            100 * share,
        )
