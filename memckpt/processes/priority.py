"""Priorities of a process that works beside training: CPU, disk and memory go to the training beside it first."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
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
