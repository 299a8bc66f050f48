"""The start line: the step at which training resumes, or the reason why it starts over.

It is shown with Python's default logging, too: a resume that did not happen must not be noticed in the loss curve only.
"""

from __future__ import annotations

import logging

from memckpt.session.report import HeldState
from memckpt.user_messages import show_by_default

#: A child of the engine's logger: a handler or level of that one applies here as well.
_log = logging.getLogger("memckpt.start")


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
