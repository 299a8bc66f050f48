"""``python -m memckpt.agent.saving.writer``: the process that writes what an agent holds. Not for people.

Storage may hang, and an agent that redoes lazily lives without torch: hence a process of its own. It dies with its
agent; what it has not committed by then does not count.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys

from memckpt.errors import AgentGoneError
from memckpt.processes.helper_process import belong_to, prefer_to_be_ended
from memckpt.protocol.channel import WriterChannel


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m memckpt.agent.saving.writer", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket to its agent")
    parser.add_argument("--agent", type=int, required=True, help="its agent's pid")
    parser.add_argument("--what", choices=["checkpoints", "records"], default="checkpoints", help="what it writes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s writer %(levelname)s %(message)s", stream=sys.stderr)
    if not belong_to(arguments.agent):
        return 0
    prefer_to_be_ended()
    if arguments.what == "records":
        os.nice(5)  # it has to keep up with training
        from memckpt.agent.saving.writer.record_writer import serve
    else:  # only this one imports torch
        from memckpt.agent.saving.writer.checkpoint_writer import serve
    channel = WriterChannel(socket.socket(fileno=arguments.fd))
    try:
        serve(channel)
    except AgentGoneError:
        pass  # the agent has let go of us
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
