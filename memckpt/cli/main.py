"""The ``memckpt`` command: its subcommands, here and in other packages, and error handling."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from memckpt.cli.agents import ps, stop
from memckpt.cli.common import Node, Run, err, print_json
from memckpt.cli.events import events
from memckpt.cli.export import export
from memckpt.cli.status import status
from memckpt.cli.stored import ls, verify
from memckpt.cli.tidying import gc, pin, rm
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
    from memckpt.agent.server import serve
    from memckpt.processes.launch import hide_devices, make_run_dir
    from memckpt.processes.log import logging_to_stderr
    from memckpt.protocol.status import MetricsSettings

    if metrics_host is not None and metrics_port is None:
        raise ConfigurationError(f"--metrics-host {metrics_host}: expected it with --metrics-port")
    metrics = MetricsSettings(metrics_port, metrics_host or AgentConfig().metrics_host, metrics_file)
    address = AgentAddress.of(run, node)
    make_run_dir(address.run_dir)
    hide_devices()
    manager = ServiceManager()
    with logging_to_stderr():
        serve(
            address,
            linger_seconds,
            ready=lambda: manager.notify(READY),
            by_operator=True,
            stopping=lambda: manager.notify(_STOPPING),
            metrics=metrics if metrics.on else None,
        )


_VARIABLE = "NOTIFY_SOCKET"
READY, _STOPPING = "READY=1", "STOPPING=1"


class ServiceManager:
    """The service manager whose socket NOTIFY_SOCKET names; without one, nothing is sent.

    The variable is removed from the environment: processes that the agent starts are not the service.
    """

    def __init__(self) -> None:
        self._path = os.environ.pop(_VARIABLE, "")

    def notify(self, state: str) -> None:
        """Send one datagram. A failure is only logged: the agent can serve without it."""
        if not self._path:
            return
        # A leading @ stands for the abstract namespace, whose names begin with a zero byte.
        address = "\0" + self._path[1:] if self._path[0] == "@" else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                sock.sendall(state.encode())
        except OSError as error:
            logging.getLogger("memckpt.agent").warning(
                f"{state} cannot be sent to {_VARIABLE}={self._path}: {error}; expected the socket of a service "
                "manager, which will assume that this agent failed to start"
            )


# The subcommands

#: Commands as the help lists them. A name stands for a command of another package (entry points ``memckpt.commands``).
_PANELS: dict[str, tuple[Callable[..., None] | str, ...]] = {
    "A run": ("run", "worker", ps, status, events, "report", stop, agent),
    "Its checkpoints in storage": (ls, verify, export, pin, rm, gc),
    "This machine, and a run to come": ("drill", "doctor", "plan", "simulate"),
}
#: Those that are given a training's command, whose options are its own.
_WITH_COMMAND = ("run", "worker")
#: Words of typer's messages, which differ with its version, and what is expected.
_KINDS = {"valid int": "a whole number", "valid number": "a number", "valid float": "a number"}


class _Command(TyperCommand):
    """A command. ``--mtbf-hours 24h`` is answered with the value, and with the help text, which has the unit."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            option: Any = error.param
            kind = next((kind for words, kind in _KINDS.items() if words in error.message), None)
            value = None if option is None else _value_of(option.opts, given)
            if kind is None or value is None:
                raise
            message = f"expected {kind}, found {value!r}: {getattr(option, 'help', '') or ''}"
            raise typer.BadParameter(message, ctx=error.ctx, param=option) from error


def _value_of(names: Sequence[str], args: Sequence[str]) -> str | None:
    """The last value that is given to an option."""
    found = None
    for arg, following in itertools.zip_longest(args, args[1:]):
        name, equals, value = arg.partition("=")
        if name in names:
            found = value if equals else following
    return found


def _add_command(panel: str, command: Callable[..., None], name: str) -> None:
    # typer breaks paragraphs where the docstring does, whatever the width of the terminal.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(
        name=name,
        help="\n\n".join(" ".join(each.split()) for each in paragraphs),
        rich_help_panel=panel,
        context_settings={"allow_interspersed_args": False} if name in _WITH_COMMAND else {},
        cls=_Command,
    )(command)


def _add_commands() -> None:
    others = {entry.name: entry for entry in entry_points(group="memckpt.commands")}
    for panel, commands in _PANELS.items():
        for each in commands:
            if not isinstance(each, str):
                _add_command(panel, each, each.__name__)
            elif (entry := others.pop(each, None)) is not None:
                _add_command(panel, entry.load(), each)
    for name, entry in sorted(others.items()):
        _add_command("Of other packages", entry.load(), name)


_add_commands()


def main() -> None:
    """Entry point. A MemckptError becomes one line, with --json also an object, and its class's exit status."""
    try:
        app()
    except MemckptError as error:
        if "--json" in sys.argv[1:]:
            print_json({"error": type(error).__name__, "message": str(error), "exit_status": error.exit_code})
        err.print(f"memckpt: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
