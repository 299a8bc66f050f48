"""The helper's end of a helper process: it dies with its agent, and yields CPU, disk and memory to training."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import signal
from pathlib import Path

_log = logging.getLogger("memckpt.writer")
#: The number of the system call ioprio_set, which the C library has no function for.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282}
_OF_THREAD = 1
#: Niceness above the agent's, which is 10 by default: 19 is the lowest priority that there is.
_NICER = 9
_CLASS_SHIFT, _IDLE = 13, 3
#: A writer that the kernel ends for want of memory costs one checkpoint; a trainer or an agent costs more.
_OOM_SCORE = 500
_PR_SET_PDEATHSIG = 1


def belong_to(agent: int) -> bool:
    """Have this process killed as its agent dies, and leave signals to the agent; False: that is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        return False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent decides: it may have to save before it leaves
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # the agent had held them back
    return True


def step_back() -> None:
    """Have this thread served when nobody else wants a CPU, or the disk. The other threads keep their priorities."""
    os.nice(_NICER)
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _OF_THREAD, 0, _IDLE << _CLASS_SHIFT) < 0:
        # Kernels and sandboxes without it: the thread has its niceness.
        _log.info("the I/O priority cannot be set: %s", os.strerror(ctypes.get_errno()))


def prefer_to_be_ended() -> None:
    """Have the kernel end this process first where memory is short."""
    path = Path("/proc/self/oom_score_adj")
    if int(path.read_text()) < _OOM_SCORE:
        path.write_text(str(_OOM_SCORE))
