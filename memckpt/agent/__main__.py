"""``python -m memckpt.agent``: how a trainer starts its node's agent. People use ``memckpt agent``."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from memckpt.agent.address import AgentAddress
from memckpt.agent.launch import report_failure, report_ready
from memckpt.agent.serve import serve
from memckpt.errors import MemckptError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m memckpt.agent", description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--node", required=True)
    parser.add_argument("--linger-seconds", type=float, required=True)
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--ready-fd", type=int, required=True, help="where to report that it answers")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    os.nice(arguments.niceness)
    address = AgentAddress.of(arguments.run_dir, arguments.node)
    try:
        serve(address, arguments.linger_seconds, lambda: report_ready(arguments.ready_fd))
    except MemckptError as error:
        report_failure(arguments.ready_fd, error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
