"""``memckpt worker``: a local rank of torchrun whose restarts are warm."""

from __future__ import annotations

import logging
import os
import sys

import typer

from memckpt.cli.run import Command, Warm


def worker(command: Command, warm: Warm = "") -> None:
    """Run a rank whose restarts need no imports: torchrun --no-python ... memckpt worker -- train.py.

    Behind `--` stands what torchrun would get: a script, or -m and a module, with arguments; or a whole command that
    begins with python. The first start of each local rank is what torchrun would start; a process beside it imports
    ahead, and later ones are forked from that. It ends with torchrun.
    """
    from memckpt.supervision.signals import end_like
    from memckpt.supervision.worker import work

    rank = os.environ.get("LOCAL_RANK", "?")
    logging.basicConfig(format=f"memckpt worker {rank}: %(message)s", stream=sys.stderr)
    logging.getLogger("memckpt.run").setLevel(logging.INFO)
    raise typer.Exit(end_like(work(command, [name for name in warm.split(",") if name])))
