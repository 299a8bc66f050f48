"""The ``memckpt`` command: sub-commands and error handling."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from memckpt.cli.common import Node, Run, err, print_json
from memckpt.cli.doctor import doctor
from memckpt.cli.drill import drill
from memckpt.cli.events import events
from memckpt.cli.export import export
from memckpt.cli.ls import ls
from memckpt.cli.number_options import NumbersCommand
from memckpt.cli.plan import plan
from memckpt.cli.report.command import report
from memckpt.cli.run import run
from memckpt.cli.simulate import simulate
from memckpt.cli.status import status, stop
from memckpt.cli.tidying import gc, pin, rm
from memckpt.cli.verify import verify
from memckpt.cli.worker import worker
from memckpt.config import AgentConfig
from memckpt.errors import ConfigurationError, MemckptError
from memckpt.processes.address import AgentAddress

app = typer.Typer(no_args_is_help=True, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Linger = Annotated[float, typer.Option(min=0, help="Seconds to hold the state without a trainer.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="PORT",
        help="TCP port at which Prometheus is answered; 0: any. Default: the trainers' agent.metrics_port.",
    ),
]
MetricsHost = Annotated[
    str | None, typer.Option(metavar="HOST", help="Address at which it is. Default: this machine only.")
]
MetricsFile = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="File that gets the metrics every 15 seconds. Default: agent.metrics_file."),
]
_LINGER_SECONDS = AgentConfig().linger_seconds


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"memckpt {version('lightning-memckpt')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Inspect and control the state held for a training run, in this node's memory and in storage."""


def agent(
    run: Run,
    node: Node = None,
    linger_seconds: Linger = _LINGER_SECONDS,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    metrics_file: MetricsFile = None,
) -> None:
    """Run the agent in the foreground, outside the job, so that it outlives the job's processes.

    For systemd, Slurm, or a separate container. Notifies a service manager that set NOTIFY_SOCKET when it is ready and
    when it stops. Takes over from an agent that a running trainer has started. Exit status 0 when training has
    finished, no trainer has come back, or it was told to leave; 7 if this node has another agent of the run.
    """
    from memckpt.agent.serve import serve
    from memckpt.processes.launch import make_run_dir
    from memckpt.processes.log import logging_to_stderr
    from memckpt.processes.sd_notify import READY, STOPPING, ServiceManager
    from memckpt.protocol.status import MetricsSettings

    if metrics_host is not None and metrics_port is None:
        raise ConfigurationError(f"--metrics-host {metrics_host}: expected it with --metrics-port")
    metrics = MetricsSettings(metrics_port, metrics_host or AgentConfig().metrics_host, metrics_file)
    address = AgentAddress.of(run, node)
    make_run_dir(address.run_dir)
    manager = ServiceManager()
    with logging_to_stderr():
        serve(
            address,
            linger_seconds,
            ready=lambda: manager.notify(READY),
            by_operator=True,
            stopping=lambda: manager.notify(STOPPING),
            metrics=metrics if metrics.on else None,
        )


_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "A run": (run, worker, status, events, report, stop, agent),
    "Its checkpoints in storage": (ls, verify, export, pin, rm, gc),
    "This machine, and a run to come": (drill, doctor, plan, simulate),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        # The options of a training's command are its own.
        takes_command = {"allow_interspersed_args": False} if _command in (run, worker) else {}
        # typer breaks paragraphs where the docstring does, whatever the width of the terminal.
        _paragraphs = inspect.cleandoc(_command.__doc__ or "").split("\n\n")
        _help = "\n\n".join(" ".join(each.split()) for each in _paragraphs)
        app.command(help=_help, rich_help_panel=_panel, context_settings=takes_command, cls=NumbersCommand)(_command)


def main() -> None:
    """Entry point. A MemckptError becomes one line, with --json also an object, and its class's exit status."""
    try:
        app()
    except MemckptError as error:
        if "--json" in sys.argv[1:]:
            print_json({"error": type(error).__name__, "message": str(error), "exit_status": error.exit_code})
        err.print(f"memckpt: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
