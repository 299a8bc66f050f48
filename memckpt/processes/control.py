"""Commands to a run's agent from outside the training: status, save, stop."""

from __future__ import annotations

import logging
import os
import time

from memckpt.errors import AgentError, AgentGoneError, AgentNotFoundError, NothingHeldError
from memckpt.processes.address import AgentAddress, peer
from memckpt.processes.handles import ProcessHandle
from memckpt.protocol.channel import TrainerChannel
from memckpt.protocol.descriptors import readable
from memckpt.protocol.status import Status, StatusRequest, StopRequest
from memckpt.protocol.storing import Saved, SaveFailed, SaveTo
from memckpt.protocol.trainer import Leaving

_log = logging.getLogger("memckpt.agent")


def ask_status(address: AgentAddress, timeout: float = 10.0) -> Status | None:
    """The agent's status; None if no agent answers. Raises AgentError: the answer is of another type."""
    sock = address.connect()
    if sock is None:
        return None
    channel = TrainerChannel(sock)
    try:
        channel.send(StatusRequest(), timeout=timeout)
        answer, _ = channel.receive(timeout)
    finally:
        channel.close()
    if not isinstance(answer, Status):
        raise AgentError(f"expected a Status from the agent, found {type(answer).__name__}")
    return answer


def save_to(address: AgentAddress, url: str, timeout: float) -> Saved:
    """Have the agent write its newest step as a checkpoint to another store; training continues meanwhile.

    `address`: address of the run's agent on the node with rank 0. `url`: URL of an empty store; a directory's path must
    be absolute. `timeout`: seconds; while training runs, the next step has to end first.

    Raises:
        AgentNotFoundError: there is no agent.
        AgentGoneError: it has not answered within `timeout` seconds.
        NothingHeldError: the save failed; the message says why.
    """
    sock = address.connect()
    if sock is None:
        raise AgentNotFoundError(f"no agent serves {address.run_dir} on node {address.node}: nothing is held in memory")
    channel = TrainerChannel(sock)
    try:
        channel.send(SaveTo(url), timeout=timeout)
        answer, _ = channel.receive(timeout)
    finally:
        channel.close()
    if isinstance(answer, Saved):
        return answer
    if isinstance(answer, SaveFailed):
        raise NothingHeldError(f"memory could not be saved: {answer.reason}")
    raise AgentError(f"expected Saved or SaveFailed from the agent, found {type(answer).__name__}")


def stop_agent(address: AgentAddress, timeout: float = 10.0) -> int | None:
    """Make the agent drop everything and end; returns its pid, or None if there was none.

    Raises AgentError: it has not ended within `timeout` seconds.
    """
    sock = address.connect()
    if sock is None:
        return None
    pid = peer(sock)[0]
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        sock.close()
        return pid  # it has just ended
    channel = TrainerChannel(sock)
    try:
        channel.send(StopRequest(), timeout=timeout)
        while not isinstance(channel.receive(timeout)[0], Leaving):
            continue
        if not readable(process, timeout):
            raise AgentError(f"agent pid {pid} announced its end but has not ended within {timeout:.0f} s")
    except AgentGoneError as error:
        if not readable(process, timeout):
            raise AgentError(f"agent pid {pid} does not end: {error}") from error
    finally:
        channel.close()
        os.close(process)
    return pid


def relieve(address: AgentAddress, timeout: float = 10.0) -> None:
    """Make an agent leave that running trainers have started: it might end with them; the caller's agent does not.

    It stops answering at once, and writes its state to storage before it ends. The trainers write their state again to
    the agent that answers then. An agent without trainers is left alone: it holds the state that they resume from.
    Raises AgentError: it still answers after `timeout` seconds.
    """
    status = ask_status(address)
    sock = address.connect()
    if status is None or sock is None:
        return
    pid = peer(sock)[0]
    if status.by_operator or not status.trainers or pid != status.pid:
        sock.close()
        return
    try:
        process = ProcessHandle.of_peer(sock, pid)
    except ProcessLookupError:
        return  # it has just ended
    finally:
        sock.close()
    _log.info("taking over from agent pid %d, which a trainer started", pid)
    deadline = time.monotonic() + timeout
    try:
        process.terminate()
        while _answers(address, pid):
            if time.monotonic() > deadline:
                raise AgentError(f"agent pid {pid} was told to leave but still answers after {timeout:.0f} s")
            process.wait(0.005)
    finally:
        process.close()


def _answers(address: AgentAddress, pid: int) -> bool:
    sock = address.connect()
    if sock is None:
        return False
    with sock:
        return peer(sock)[0] == pid
