"""Connection of a trainer to its agent, with a watch on the agent's liveness."""

from __future__ import annotations

import logging
import os
import socket
import time
import weakref
from collections.abc import Callable

from memckpt.config import AgentConfig
from memckpt.errors import AgentError, AgentGoneError
from memckpt.memory.life import LifePage, LifeWatch
from memckpt.processes.address import AgentAddress, peer
from memckpt.processes.launch import spawn_agent
from memckpt.protocol.channel import TrainerChannel, encode
from memckpt.protocol.descriptors import writable
from memckpt.protocol.messages import AgentToTrainer, TrainerToAgent
from memckpt.protocol.status import StatusRequest

_log = logging.getLogger("memckpt")
_live: weakref.WeakSet[Conversation] = weakref.WeakSet()


def reach_agent(address: AgentAddress, config: AgentConfig) -> tuple[socket.socket, bool]:
    """Connect to the run's agent on this node; start one if none answers.

    Returns:
        The socket, which the caller closes, and whether the agent was started for it.

    Raises:
        AgentError: no agent answers and none could be started.
    """
    sock, started = address.connect(), False
    if sock is None:
        address.say_if_copied(_log)
        try:
            spawn_agent(address, config)
            started = True
        except AgentError:
            # Another rank of this node may have been faster.
            sock = address.connect()
            if sock is None:
                raise
        else:
            sock = address.connect()
    if sock is None:
        raise AgentError(f"the agent of {address.run_dir} started but does not answer; see {address.log_path}")
    return sock, started


class Conversation:
    """One connection to an agent. Not thread-safe. Its owner calls :meth:`close`.

    The socket is closed in a forked child: loader workers must not keep a dead trainer's connection open.

    Attributes:
        channel: the connection.
        agent_pid: process id of the agent.
    """

    def __init__(self, channel: TrainerChannel, config: AgentConfig) -> None:
        self.channel = channel
        self.agent_pid = peer(channel.sock)[0]
        self._config = config
        #: The agent's page, on which its loop counts, after hello.
        self._life: LifePage | None = None
        self._watch: LifeWatch | None = None
        _live.add(self)

    def watch(self, descriptor: int) -> None:
        """Watch the agent's page while waiting. Takes the page's descriptor."""
        self._stop_watching()
        self._life = LifePage.open(descriptor)
        # The redo thread counts, too: the loop may wait for it.
        self._watch = LifeWatch(self._life, self.agent_pid, self._config.liveness_seconds, "all")

    def send(self, message: TrainerToAgent) -> None:
        """Send a message.

        Raises:
            AgentGoneError: the agent is gone, stands still, or has accepted nothing within the time limit.
        """
        body = encode(message)
        if self.channel.offer(body):
            return
        limit = self._config.start_seconds
        if not self._wait(lambda seconds: writable(self.channel.sock, seconds) and self.channel.offer(body), limit):
            raise AgentGoneError(f"it has taken no message for {limit:.0f} s (overloaded?)")

    def poll(self, limit: float) -> tuple[AgentToTrainer, list[int]] | None:
        """The next message and its descriptors; None if there is none within `limit` seconds.

        Raises:
            AgentGoneError: the agent is gone, or stands still.
        """
        received: tuple[AgentToTrainer, list[int]] | None = None

        def hear(seconds: float) -> bool:
            nonlocal received
            received = self.channel.poll(seconds)
            return received is not None

        self._wait(hear, limit)
        return received

    def _wait(self, ready: Callable[[float], bool], limit: float) -> bool:
        """Wait until `ready(seconds)` is true, and watch the agent meanwhile. Returns False after `limit` seconds."""
        until, watch = time.monotonic() + limit, self._watch
        while True:
            left = max(0.0, until - time.monotonic())
            if ready(left if watch is None else min(left, watch.pause)):
                return True
            if left == 0.0:
                return False
            if watch is not None and watch.stands_still():
                raise AgentGoneError(f"it has shown no sign of life for {watch.limit:g} s (stopped?)")

    def hear(self) -> tuple[AgentToTrainer, list[int]]:
        """The next message, however long it takes, as long as the agent's loop runs.

        Raises:
            AgentGoneError: the agent is gone, stands still, or has not answered within the time limit.
        """
        half = self._config.start_seconds / 2
        return self.poll(half) or self.sign_of_life(half)

    def sign_of_life(self, limit: float) -> tuple[AgentToTrainer, list[int]]:
        """Ask for the agent's status, which it answers at once. Returns the answer or an earlier message.

        Raises:
            AgentGoneError: the agent is gone, stands still, or has not answered within `limit` seconds.
        """
        self.send(StatusRequest())
        received = self.poll(limit)
        if received is None:
            raise AgentGoneError(f"it has not answered for {limit:g} s (stopped or overloaded?)")
        return received

    def close(self) -> None:
        """Close the connection without a word."""
        self._stop_watching()
        self.channel.close()

    def _stop_watching(self) -> None:
        life, self._life, self._watch = self._life, None, None
        if life is not None:
            life.close()


def _forget_in_child() -> None:
    for one in list(_live):
        one.channel.close()


os.register_at_fork(after_in_child=_forget_in_child)
