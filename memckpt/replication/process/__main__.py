"""``python -m memckpt.replication.process``: what an agent reaches those of other nodes through. Not for people.

A process of its own because the erasure code holds Python's lock while it works. The memory in which it keeps other
nodes' records is the agent's, too: another replicator goes on with it. With the agent it dies: a node is lost as a
whole.
"""

from __future__ import annotations

import argparse
import socket
import sys

from memckpt.errors import AgentGoneError
from memckpt.memory.pages import LifePage, LifeWatch
from memckpt.processes.helper_process import belong_to
from memckpt.processes.log import logging_to_stderr
from memckpt.protocol.channel import ReplicatorChannel
from memckpt.protocol.descriptors import raise_limit
from memckpt.replication.process.replicator import Replicator

#: Seconds without a sign of life of its agent, until that says for how long.
_AGENT_SECONDS = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m memckpt.replication.process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket to its agent")
    parser.add_argument("--agent", type=int, required=True, help="its agent's pid")
    parser.add_argument("--life", type=int, help="descriptor of the page in which it shows that it lives")
    parser.add_argument("--agent-life", type=int, help="descriptor of the page in which its agent does")
    arguments = parser.parse_args()
    if not belong_to(arguments.agent):
        return 0
    channel = ReplicatorChannel(socket.socket(fileno=arguments.fd))
    with logging_to_stderr("replicator"):
        raise_limit()
        life = None if arguments.life is None else LifePage.open(arguments.life)
        agent = None if arguments.agent_life is None else LifePage.open(arguments.agent_life)
        watch = None if agent is None else LifeWatch(agent, arguments.agent, _AGENT_SECONDS, "all")
        replicator = Replicator(channel, life, watch)
        try:
            replicator.run()
        except AgentGoneError:
            pass  # the agent has closed the connection
        finally:
            replicator.close()
            channel.close()
            for page in (life, agent):
                if page is not None:
                    page.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
