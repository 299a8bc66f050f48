"""``python -m memckpt.agent``: how a trainer starts its node's agent. People use ``memckpt agent``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from memckpt.processes.handles import start_ticks

_log = logging.getLogger("memckpt.agent")
#: Below a trainer's: a trainer can be restarted from the state that the agent holds, so it should be killed first.
_WANTED_OOM_SCORE = -500


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
    from memckpt.agent.server import serve
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


def detach(report_fd: int) -> bool:
    """Fork; returns True in the child, which init adopts: a launcher may kill all descendants of a trainer.

    The parent writes the child's process id and start time to `report_fd`. Call while there are no other threads.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        return True
    os.write(report_fd, f"{pid} {start_ticks(pid)}\n".encode())
    return False


def lower_oom_score(path: Path = Path("/proc/self/oom_score_adj")) -> int:
    """Set this process's ``oom_score_adj`` as low as its privileges permit, but not below -500; returns the score."""
    found = int(path.read_text())
    for score in (_WANTED_OOM_SCORE, 0):
        if score >= found:
            break
        try:
            path.write_text(str(score))
        except PermissionError:
            continue
        return score
    if found > 0:
        _log.warning("oom_score_adj stays at %d, which was set with privileges: the kernel may end the agent", found)
    return found


if __name__ == "__main__":
    sys.exit(main())
