"""A helper process of an agent: the writers, the auditor, the replicator. Not for people.

It dies with its agent, and yields CPU, disk and memory to training. What it imports comes after that: torch takes long.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import logging
import os
import platform
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from memckpt.errors import AgentGoneError
from memckpt.memory.pages import LifePage, LifeWatch
from memckpt.processes.log import logging_to_stderr
from memckpt.protocol.channel import Channel

_log = logging.getLogger("memckpt.agent")
#: The number of the system call ioprio_set, which the C library has no function for.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282}
_OF_THREAD = 1
#: Niceness above the agent's, which is 10 by default: 19 is the lowest priority that there is.
_NICER = 9
_CLASS_SHIFT, _IDLE = 13, 3
#: A writer that the kernel ends for want of memory costs one checkpoint; a trainer or an agent costs more.
_OOM_SCORE = 500
_PR_SET_PDEATHSIG = 1
#: Seconds without a sign of life of the agent, until that says for how long.
_AGENT_SECONDS = 15.0


class AgentEnd(NamedTuple):
    """What a helper process is given: the channel, the page in which it shows that it lives, a watch on its agent."""

    channel: Channel[Any, Any]
    life: LifePage | None
    agent: LifeWatch | None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m memckpt.processes.helper", description=__doc__)
    parser.add_argument("module", help="its `main` gets an AgentEnd")
    parser.add_argument("--fd", type=int, required=True, help="the socket to its agent")
    parser.add_argument("--agent", type=int, required=True, help="its agent's pid")
    parser.add_argument("--life", type=int, help="descriptor of the page in which it shows that it lives")
    parser.add_argument("--agent-life", type=int, help="descriptor of the page in which its agent does")
    arguments = parser.parse_args()
    if not belong_to(arguments.agent):
        return 0
    if arguments.life is None:  # training does not wait for it
        prefer_to_be_ended()
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(contextlib.closing(Channel[Any, Any](socket.socket(fileno=arguments.fd))))
        stack.enter_context(logging_to_stderr(arguments.module.rpartition(".")[2]))
        pages = [None if fd is None else LifePage.open(fd) for fd in (arguments.life, arguments.agent_life)]
        for page in filter(None, pages):
            stack.callback(page.close)
        life, agent = pages
        watch = None if agent is None else LifeWatch(agent, arguments.agent, _AGENT_SECONDS, "all")
        with contextlib.suppress(AgentGoneError):  # it has let go of this process
            importlib.import_module(arguments.module).main(AgentEnd(channel, life, watch))
    return 0


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
    """Have this thread served when no other wants a CPU, or the disk. The other threads keep their priorities."""
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


if __name__ == "__main__":
    sys.exit(main())
