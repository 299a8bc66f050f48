"""``python -m memckpt.replication.process``: the process through which an agent reaches those of other nodes.

It is apart because the erasure code holds Python's lock. It dies with its agent: a node is lost as a whole.
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
