"""Commands to agents from outside the training: status, save, stop."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from memckpt.errors import AgentError, AgentGoneError, AgentNotFoundError, NothingHeldError
from memckpt.processes.address import AgentAddress, agent_sockets, connect_to, peer
from memckpt.processes.handles import ProcessHandle
from memckpt.protocol.channel import AgentToTrainer, TrainerChannel, TrainerToAgent
from memckpt.protocol.status import Status, StatusRequest, StopRequest
from memckpt.protocol.storing import Saved, SaveFailed, SaveTo
from memckpt.protocol.trainer import Leaving

_log = logging.getLogger("memckpt.agent")
#: Seconds between two questions whether an agent that writes before it ends is well.
_ASK_AGAIN_SECONDS = 1.0


def _ask(address: AgentAddress, message: TrainerToAgent, timeout: float) -> AgentToTrainer | None:
    """The agent's answer; None if no agent answers."""
    sock = address.connect()
    if sock is None:
        return None
    with contextlib.closing(TrainerChannel(sock)) as channel:
        channel.send(message, timeout=timeout)
        return channel.receive(timeout)[0]


def ask_status(address: AgentAddress, timeout: float = 10.0) -> Status | None:
    """The agent's status; None if no agent answers, or one that leaves. Raises AgentError: it answers otherwise."""
    answer = _ask(address, StatusRequest(), timeout)
    if isinstance(answer, Leaving):
        return None
    if answer is not None and not isinstance(answer, Status):
        raise AgentError(f"expected a Status from the agent, found {type(answer).__name__}")
    return answer


def save_to(address: AgentAddress, url: str, timeout: float) -> Saved:
    """Have the agent of rank 0's node write its newest step to an empty store, while training goes on.

    Raises AgentNotFoundError; AgentGoneError: no answer in `timeout` seconds; NothingHeldError: the save failed.
    """
    answer = _ask(address, SaveTo(url), timeout)
    if answer is None:
        raise AgentNotFoundError(f"no agent serves {address.run_dir} on node {address.node}: nothing is held in memory")
    if isinstance(answer, SaveFailed):
        raise NothingHeldError(f"memory could not be saved: {answer.reason}")
    if not isinstance(answer, Saved):
        raise AgentError(f"expected Saved or SaveFailed from the agent, found {type(answer).__name__}")
    return answer


def stop_agent(address: AgentAddress, timeout: float = 10.0) -> int | None:
    """Make the agent drop everything and end; returns its pid, if there was one. Raises AgentError: it does not end."""
    sock = address.connect()
    return None if sock is None else stop_at(sock, save=False, timeout=timeout).pid


class Stopped(NamedTuple):
    """An agent that was asked to end. `kept`: why it stays, or why what it held is not in storage; else empty."""

    pid: int
    kept: str = ""
    ended: bool = True


def stop_at(sock: socket.socket, save: bool, timeout: float = 10.0) -> Stopped:
    """Make the agent at the other end leave, which drops what it holds; closes the socket.

    With `save` what storage lacks is written there first, however long that takes. If that fails the agent stays, and
    tries again. Raises AgentError: it does not end, or does not answer for `timeout` seconds.
    """
    pid = peer(sock)[0]
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(contextlib.closing(TrainerChannel(sock)))
        try:
            process = stack.enter_context(contextlib.closing(ProcessHandle.of_peer(sock, pid)))
        except ProcessLookupError:
            return Stopped(pid)  # it has just ended
        unsaved = "it ended before it said that it is" if save else ""
        try:
            channel.send(StopRequest(save), timeout=timeout)
            asked_at = time.monotonic()
            while True:
                received = channel.poll(_ASK_AGAIN_SECONDS)
                message = received[0] if received is not None else None
                if isinstance(message, Leaving) and message.last:
                    unsaved = message.unsaved
                    break
                if isinstance(message, Status):
                    asked_at = time.monotonic()
                    if message.storage is not None and message.storage.alarm:
                        return Stopped(pid, message.storage.alarm, ended=False)
                elif time.monotonic() > asked_at + timeout:
                    raise AgentError(f"agent pid {pid} does not answer for {timeout:.0f} s")
                elif save:
                    channel.send(StatusRequest(), timeout=timeout)  # it is there, and writes
            if not process.wait(timeout):
                raise AgentError(f"agent pid {pid} announced its end but has not ended within {timeout:.0f} s")
        except AgentGoneError as error:
            if not process.wait(timeout):
                raise AgentError(f"agent pid {pid} does not end: {error}") from error
    return Stopped(pid, unsaved)


class AgentHere(NamedTuple):
    """An agent of this user on this machine. `status`: None where it does not answer, being stopped or hanging."""

    connect: Callable[[], socket.socket | None]
    pid: int
    status: Status | None


def agents_here(timeout: float = 10.0) -> Iterator[AgentHere]:
    """All agents of this user, also of run directories that are gone; not those of other network namespaces."""
    for name in agent_sockets():
        sock = connect_to(name)
        if sock is None:
            continue
        pid, answer = peer(sock)[0], None
        with contextlib.closing(TrainerChannel(sock)) as channel:
            try:
                channel.send(StatusRequest(), timeout=timeout)
                answer = channel.receive(timeout)[0]
            except AgentGoneError as error:
                _log.info("agent pid %d: %s", pid, error)
        yield AgentHere(partial(connect_to, name), pid, answer if isinstance(answer, Status) else None)


def relieve(address: AgentAddress, timeout: float = 10.0) -> None:
    """Have an agent that running trainers have started leave: it might end with them.

    Its trainers write their state to the next one. Without trainers it stays: it holds what they resume from. Raises
    AgentError: it still answers after `timeout` seconds.
    """
    status = ask_status(address)
    sock = address.connect()
    if status is None or sock is None:
        return
    with sock:
        pid = peer(sock)[0]
        if status.by_operator or not status.trainers or pid != status.pid:
            return
        try:
            process = ProcessHandle.of_peer(sock, pid)
        except ProcessLookupError:
            return  # it has just ended
    _log.info("taking over from agent pid %d, which a trainer started", pid)
    deadline = time.monotonic() + timeout
    with contextlib.closing(process):
        process.terminate()
        while _answers(address, pid):
            if time.monotonic() > deadline:
                raise AgentError(f"agent pid {pid} was told to leave but still answers after {timeout:.0f} s")
            process.wait(0.005)


def _answers(address: AgentAddress, pid: int) -> bool:
    sock = address.connect()
    if sock is None:
        return False
    with sock:
        return peer(sock)[0] == pid
