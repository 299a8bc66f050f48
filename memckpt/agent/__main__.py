"""``python -m memckpt.agent``: how a trainer starts its node's agent. People use ``memckpt agent``."""

from __future__ import annotations

import argparse
import os
import sys

from memckpt.processes.detach import detach, lower_oom_score


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m memckpt.agent", description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--node", required=True)
    parser.add_argument("--linger-seconds", type=float, required=True)
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--ready-fd", type=int, required=True, help="where to report that it answers")
    arguments = parser.parse_args()
    if not detach(arguments.ready_fd):
        return 0
    # Only now: what is imported here may start threads, which a fork does not take along.
    from memckpt.agent.serve import serve
    from memckpt.errors import MemckptError
    from memckpt.processes.address import AgentAddress
    from memckpt.processes.launch import report_failure, report_ready
    from memckpt.processes.log import logging_to_stderr

    with logging_to_stderr():
        lower_oom_score()
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
