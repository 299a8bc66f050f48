"""Asking a run's agent from outside the training: what it holds, and to leave."""

from __future__ import annotations

import os
import select

from memckpt.agent.address import AgentAddress, peer
from memckpt.agent.channel import Channel
from memckpt.agent.messages import Leaving, Status, StatusRequest, StopRequest
from memckpt.errors import AgentError, AgentGoneError


def ask_status(address: AgentAddress, timeout: float = 10.0) -> Status | None:
    """What the agent holds; None if no agent answers.

    Raises:
        AgentError: it answers with something else.
    """
    sock = address.connect()
    if sock is None:
        return None
    channel = Channel(sock)
    try:
        channel.send(StatusRequest(), timeout=timeout)
        answer, _ = channel.receive(timeout)
    finally:
        channel.close()
    if not isinstance(answer, Status):
        raise AgentError(f"expected a Status from the agent, found {type(answer).__name__}")
    return answer


def stop_agent(address: AgentAddress, timeout: float = 10.0) -> int | None:
    """Have the agent let go of everything and end; returns its pid, or None if there was none.

    Raises:
        AgentError: it has not ended within `timeout` seconds.
    """
    sock = address.connect()
    if sock is None:
        return None
    pid = peer(sock)[0]
    process = os.pidfd_open(pid)
    channel = Channel(sock)
    try:
        channel.send(StopRequest(), timeout=timeout)
        while not isinstance(channel.receive(timeout)[0], Leaving):
            continue
        if not select.select([process], [], [], timeout)[0]:
            raise AgentError(f"agent pid {pid} said that it leaves but has not ended within {timeout:.0f} s")
    except AgentGoneError as error:
        if not select.select([process], [], [], timeout)[0]:
            raise AgentError(f"agent pid {pid} does not leave: {error}") from error
    finally:
        channel.close()
        os.close(process)
    return pid
