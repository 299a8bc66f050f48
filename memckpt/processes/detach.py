"""Detaching an agent from the trainer: not its descendant, and no preferred victim of the OOM killer.

A session of its own protects from signals to process groups and from terminals, but not from a launcher that walks the
trainer's children and kills them all. So the trainer starts a process that starts the agent and ends. An inherited
``oom_score_adj`` would make the kernel kill the agent, which holds most of the memory, in the trainer's place.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from memckpt.processes.handles import start_ticks

_log = logging.getLogger("memckpt.agent")
#: Below a trainer's: a trainer can be restarted from the state that the agent holds, so it should be killed first.
_WANTED_OOM_SCORE = -500


def detach(report_fd: int) -> bool:
    """Fork; the child continues in a session of its own. Call while there are no other threads.

    Args:
        report_fd: descriptor to which the parent writes the child's process id and start time.

    Returns:
        True in the child. False in the parent, which has to end.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        return True
    os.write(report_fd, f"{pid} {start_ticks(pid)}\n".encode())
    return False


def lower_oom_score(path: Path = Path("/proc/self/oom_score_adj")) -> int:
    """Set this process's ``oom_score_adj`` as low as permitted, but not below -500; returns the resulting score.

    Without privileges a score can be lowered to the value that the last privileged process has set, usually 0.
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
