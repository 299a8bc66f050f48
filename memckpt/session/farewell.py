"""The end of a training, as the trainer sees its agent leave."""

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
#: At the end of a training, how long to see the agent leave once all is in storage.
_END_SECONDS = 20.0


def say_goodbye(conversation: Conversation, finished: bool, saving_seconds: float) -> None:
    """Tell the agent that this rank leaves.

    Args:
        conversation: with the agent; its owner closes it.
        finished: training ended as it should. Then the agent lets go of everything, and is waited for.
        saving_seconds: how long it may take to bring the last step to storage before it goes.
    """
    try:
        conversation.channel.send(Goodbye(finished), timeout=5.0)
        if finished:
            _wait_for_end(conversation, saving_seconds)
    except AgentGoneError as error:
        # That it is gone is all that a goodbye asks for, unless it had something to do before.
        if finished and saving_seconds:
            _log.warning("memckpt: whether the final step is in storage is not known: %s", error)


def _wait_for_end(conversation: Conversation, saving_seconds: float) -> None:
    """Unless other ranks still train, the agent says that it leaves; see it end. Or it says that it cannot yet."""
    deadline = time.monotonic() + _END_SECONDS + saving_seconds
    while True:
        message, fds = conversation.hear()
        if time.monotonic() > deadline:
            raise AgentGoneError(f"the agent has not left within {_END_SECONDS + saving_seconds:.0f} s")
        for fd in fds:
            os.close(fd)
        if isinstance(message, OthersStay):
            return
        if isinstance(message, Leaving):
            break
        if isinstance(message, HoldingOn):
            _log.warning(
                "memckpt: the final step is not in storage: %s; the agent (pid %d) keeps it in memory for "
                "%.0f s, and tries again",
                message.reason,
                conversation.agent_pid,
                message.linger_seconds,
            )
            return
    _see_end(conversation.agent_pid)


def _see_end(pid: int) -> None:
    """Wait until a process ends, and reap it where nobody else does."""
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
