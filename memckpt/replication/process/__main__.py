"""``python -m memckpt.replication.process``: the process through which an agent reaches those of other nodes.

A process of its own because the erasure code holds Python's lock while it works. The memory in which it keeps other
nodes' records is the agent's, too: another replicator goes on with it. With the agent it dies: a node is lost as a
whole.
"""

from __future__ import annotations

import contextlib
import sys

from memckpt.processes.helper_process import AgentEnd, run_helper
from memckpt.protocol.descriptors import raise_limit
from memckpt.replication.process.replicator import Replicator


def serve(end: AgentEnd) -> None:
    raise_limit()
    with contextlib.closing(Replicator(end.channel, end.life, end.agent)) as replicator:
        replicator.run()


if __name__ == "__main__":
    sys.exit(run_helper("replicator", serve))
