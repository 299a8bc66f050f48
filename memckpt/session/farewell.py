"""The end of a connection: goodbye to the agent, and the wait for its end."""

from __future__ import annotations

import contextlib
import logging
import os
import time

from memckpt.errors import AgentGoneError
from memckpt.protocol.descriptors import readable
from memckpt.protocol.trainer import Goodbye, HoldingOn, Leaving, OthersStay
from memckpt.session.conversation import Conversation

_log = logging.getLogger("memckpt")
#: Time that the agent may take to end after the last step is in storage.
_END_SECONDS = 20.0


def say_goodbye(conversation: Conversation, finished: bool, saving_seconds: float) -> None:
    """Tell the agent that this rank leaves.

    Args:
        conversation: connection to the agent; its owner closes it.
        finished: whether training has finished. Then this waits for the agent's answer, and for its end.
        saving_seconds: time that the agent may take to write the last step to storage.
    """
    try:
        conversation.channel.send(Goodbye(finished), timeout=5.0)
        if finished:
            _wait_for_end(conversation, saving_seconds)
    except AgentGoneError as error:
        # A goodbye asks for no more, unless the agent had a step to write.
        if finished and saving_seconds:
            _log.warning("memckpt: whether the final step is in storage is not known: %s", error)


def _wait_for_end(conversation: Conversation, saving_seconds: float) -> None:
    """Wait until the agent ends, or says that other ranks still train, or that the last step is not in storage yet."""
    deadline = time.monotonic() + _END_SECONDS + saving_seconds
    while True:
        message, fds = conversation.hear()
        if time.monotonic() > deadline:
            raise AgentGoneError(f"the agent has not left within {_END_SECONDS + saving_seconds:.0f} s")
        for fd in fds:
            os.close(fd)
        match message:
            case OthersStay():
                return
            case Leaving(last=True):  # before, one that was told to end says so, and has to write yet
                break
            case HoldingOn():
                _log.warning(
                    "memckpt: the final step is not in storage: %s; the agent (pid %d) keeps it in memory for "
                    "%.0f s, and tries again",
                    message.reason,
                    conversation.agent_pid,
                    message.linger_seconds,
                )
                return
    if message.unsaved:
        _log.warning(
            "memckpt: the final step is not in storage: %s; the agent (pid %d) was told to end, and has ended",
            message.unsaved,
            conversation.agent_pid,
        )
    _see_end(conversation.agent_pid)


def _see_end(pid: int) -> None:
    """Wait until a process ends; reap it if this is the first process of a container."""
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not readable(process_fd, _END_SECONDS):
            _log.warning("memckpt: the agent (pid %d) has let go of everything but does not end", pid)
    finally:
        os.close(process_fd)
    if os.getpid() == 1:  # the first process of a container gets all orphans
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
