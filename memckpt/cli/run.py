"""``memckpt run``: a training that is started again when it fails."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Annotated

import typer

Restarts = Annotated[int, typer.Option(min=0, help="Most restarts.", metavar="N")]
Command = Annotated[list[str], typer.Argument(help="The training's command, behind `--`.", metavar="COMMAND...")]


def run(command: Command, restarts: Restarts = 100) -> None:
    """Run a training on this node, and start it again when it fails: memckpt run -- python train.py.

    Signals are passed on, and the exit status is that of the last attempt. No restart follows SIGTERM, SIGINT, SIGHUP
    or SIGQUIT to this command, nor an error that ends two attempts in a row at the same step.
    """
    from memckpt.supervision.attempts import ColdStarter
    from memckpt.supervision.signals import end_like
    from memckpt.supervision.supervisor import Supervisor

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    with contextlib.closing(Supervisor(ColdStarter(command), restarts)) as supervisor:
        code = supervisor.run()
    raise typer.Exit(end_like(code))
