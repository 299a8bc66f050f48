"""The lines of resume checks in the logs of trainings that were killed and resumed, judged."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Why a resume may go without its proof: to repeat the step would repeat more, or nothing is before it.
REASONS = (
    "a generation began at record",
    "an epoch ended before it",
    "an epoch ends with it",
    "an epoch, or another iteration over a loader, ended before it",
    "a validation ran before it",
    "an evaluation followed it",
    "a checkpoint file was written",
    "save_state() ran in it",
    "load_state() ran in it",
    "storage does not have the state from which",
)


def unproved(log: str, reasons: Sequence[str] = ()) -> list[str]:
    """Resumes without a verdict, and verdicts that are not *equal*, and not *none* for a good reason.

    An eager replica goes on to a record once its step is repeated; a process that dies before its next commit leaves
    nothing before it. So a process that resumes where the one before did may find that the replica has gone past.

    Args:
        log: of one process after the other.
        reasons: that are good ones in this test beside `REASONS`.
    """
    found: list[str] = []
    step = ""
    judged = False  # the verdict comes before the line that says where training goes on
    for resumed, line in re.findall(r"memckpt: (?:resumed at step (\d+) |resume check: (.*))", log):
        if resumed:
            step = resumed
            if not judged:
                found.append(f"resumed at step {step} without a verdict")
            judged = False
            continue
        judged = True
        if gone := re.search(r"the replica has gone past record (\d+)", line):
            found += [line] if step != str(int(gone[1]) + 1) else []
        elif "equal, bit for bit" not in line and not any(each in line for each in (*REASONS, *reasons)):
            found.append(line)
    return found
