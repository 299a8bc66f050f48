"""Check of the resume-check lines in logs of trainings that were killed and resumed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

#: Valid reasons for a resume without a proof: the step has further effects, or there is no state before it.
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
    steps: list[str] = []
    verdicts = 0
    for resumed, line in re.findall(r"memckpt: (?:resumed at step (\d+) |resume check: (.*))", log):
        if resumed:
            steps.append(resumed)
            continue
        verdicts += 1
        if gone := re.search(r"the replica has gone past record (\d+)", line):
            # Known before training continues, so that its line precedes the one that names the step.
            found += [line] if (steps or [""])[-1] != str(int(gone[1]) + 1) else []
        elif "equal, bit for bit" not in line and not any(each in line for each in (*REASONS, *reasons)):
            found.append(line)
    # A process that dies in the repeated step has no verdict, and its successor resumes where it did.
    died = sum(step == following for step, following in pairwise(steps))
    if verdicts < len(steps) - died:
        found.append(f"{verdicts} verdicts on resumes at the steps {steps}")
    return found
