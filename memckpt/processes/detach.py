"""Leaving the trainer's family: an agent that is nobody's child, with no mark that makes the kernel kill it first.

A session of its own protects from signals to process groups and from terminals, and not from a launcher that walks the
trainer's children and kills them all; so the trainer starts a process that starts the agent and ends. An inherited
``oom_score_adj`` would have the kernel end the agent, which holds most of the memory, in the trainer's place.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from memckpt.processes.handles import start_ticks

_log = logging.getLogger("memckpt.agent")
#: A trainer can be started again from what the agent holds; so it is to be ended first.
_WANTED_OOM_SCORE = -500


def detach(report_fd: int) -> bool:
    """Fork; the child goes on in a session of its own. To be called while there are no other threads.

    Args:
        report_fd: where the parent says which process the child is: its id, and when it started.

    Returns:
        True in the child. False in the parent, which ends now.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        return True
    os.write(report_fd, f"{pid} {start_ticks(pid)}\n".encode())
    return False


def lower_oom_score(path: Path = Path("/proc/self/oom_score_adj")) -> int:
    """Set this process's ``oom_score_adj`` as low as permitted, but not lower than -500; returns what it is now.

    Without privileges a score can be lowered to where the last privileged process has set it, usually 0.
    """
    found = int(path.read_text())
    for score in (_WANTED_OOM_SCORE, 0):
        if score >= found:
            break
        try:
            path.write_text(str(score))
        except PermissionError:
            continue
        return score
    if found > 0:
        _log.warning("oom_score_adj stays at %d, which was set with privileges: the kernel may end the agent", found)
    return found
