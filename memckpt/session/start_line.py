"""The line that every start of a training gets: where it resumes, or why it begins at step 0.

It is seen with Python's default logging, too: whoever has to learn from the loss curve that a resume did not happen has
lost more than a line on the screen.
"""

from __future__ import annotations

import logging

from memckpt.session.report import HeldState
from memckpt.user_messages import show_by_default

#: Below the engine's logger, so that whoever has set that one up has set up this one.
_log = logging.getLogger("memckpt.start")


def tell_start(held: HeldState | None, reason: str, drops_held: bool, repeated: int | None = None) -> None:
    """Say it, in the job's first rank.

    Args:
        held: what is resumed; None: nothing.
        reason: why that, in words; empty where it is as it should be.
        drops_held: whether something was held that is dropped now.
        repeated: the step that is taken once more, from the state before it which is `held`; None: none is.
    """
    show_by_default(_log)
    if held is None:
        _log.log(logging.WARNING if drops_held else logging.INFO, "memckpt: starting over: %s", reason)
    else:
        why = f": {reason}" if reason else ""
        step, proof = (held.step, "") if repeated is None else (repeated, ", which is repeated first, as a proof")
        _log.info("memckpt: resuming from %s at step %d%s%s", held.tier, step, proof, why)
