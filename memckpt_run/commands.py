"""``memckpt run``, a training that is started again when it fails, and ``memckpt worker``, a rank that starts warm."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Annotated

import typer

Restarts = Annotated[int, typer.Option(min=0, help="Most restarts.", metavar="N")]
Warm = Annotated[
    str, typer.Option(help="Modules of your own that are imported ahead of restarts, too.", metavar="MODULE,...")
]
OnFailure = Annotated[
    str | None,
    typer.Option(help="Shell command for each failure; MEMCKPT_FAILURE and MEMCKPT_FOLLOWS say what it is."),
]
Cold = Annotated[bool, typer.Option("--cold", help="Import nothing ahead.")]
Command = Annotated[list[str], typer.Argument(help="The training's command, behind `--`.", metavar="COMMAND...")]


def run(
    command: Command, restarts: Restarts = 100, warm: Warm = "", cold: Cold = False, on_failure: OnFailure = None
) -> None:
    """Run a training on this node, and start it again when it fails: memckpt run -- python train.py.

    Signals are passed on, and the exit status is that of the last attempt. No restart follows SIGTERM, SIGINT, SIGHUP
    or SIGQUIT to this command, nor an error that ends two attempts in a row at the same step. Restarts of a Python
    script need no imports: a process has imported ahead what the first start has imported from installed packages.
    """
    from memckpt_run.attempts import ColdStarter, Starter, end_like, python_command
    from memckpt_run.notes import Notes
    from memckpt_run.supervisor import Supervisor
    from memckpt_run.warm import WarmStarter

    logging.basicConfig(format="memckpt run: %(message)s", stream=sys.stderr)
    logging.getLogger("memckpt.run").setLevel(logging.INFO)
    starter: Starter = ColdStarter(command)
    notes = Notes()
    if not cold:
        python = python_command(command)
        if isinstance(python, str):
            logging.getLogger("memckpt.run").info("restarts will be cold: %s", python)
        else:
            starter = WarmStarter(python, starter.start, notes, [name for name in warm.split(",") if name])
    with contextlib.closing(Supervisor(starter, restarts, notes, on_failure)) as supervisor:
        code = supervisor.run()
    raise typer.Exit(end_like(code))


def worker(command: Command, warm: Warm = "") -> None:
    """Run a rank whose restarts need no imports: torchrun --no-python ... memckpt worker -- train.py.

    Behind `--` stands what torchrun would get: a script, or -m and a module, with arguments; or a whole command that
    begins with python. The first start of each local rank is what torchrun would start; a process beside it imports
    ahead, and later ones are forked from that. It ends with torchrun.
    """
    from memckpt_run.attempts import end_like
    from memckpt_run.worker import work

    rank = os.environ.get("LOCAL_RANK", "?")
    logging.basicConfig(format=f"memckpt worker {rank}: %(message)s", stream=sys.stderr)
    logging.getLogger("memckpt.run").setLevel(logging.INFO)
    raise typer.Exit(end_like(work(command, [name for name in warm.split(",") if name])))
