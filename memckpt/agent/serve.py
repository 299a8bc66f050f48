"""An agent in a process of its own: the one of its address, told by signals when to leave."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from memckpt.agent.server import Agent
from memckpt.errors import RunBusyError
from memckpt.processes.address import AgentAddress, peer
from memckpt.processes.control import relieve
from memckpt.protocol.descriptors import raise_limit
from memckpt.protocol.status import MetricsSettings

_log = logging.getLogger("memckpt.agent")


def serve(
    address: AgentAddress,
    linger_seconds: float,
    ready: Callable[[], None],
    by_operator: bool = False,
    stopping: Callable[[], None] = lambda: None,
    metrics: MetricsSettings | None = None,
) -> None:
    """Run an agent in this process until it is told to leave. Called in the process's main thread.

    Args:
        address: of the run and node.
        linger_seconds: how long to hold the state with no trainer.
        ready: called once it answers.
        by_operator: as for :class:`Agent`.
        stopping, metrics: as for :class:`Agent`.

    Raises:
        RunBusyError: another agent serves this run on this node. One that runs by operator takes over from one that
            living trainers have started.
    """
    raise_limit()
    agent = Agent(address, linger_seconds, by_operator, stopping, metrics)
    if by_operator:
        relieve(address)
    with address.starting():
        other = address.connect()
        if other is not None:
            pid = peer(other)[0]
            other.close()
            raise RunBusyError(f"an agent already serves {address.run_dir} on node {address.node} (pid {pid})")
        address.say_if_copied(_log)
        agent.listen()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: agent.leave_run(f"signal {signal.Signals(received).name}"))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    agent.run(ready)
