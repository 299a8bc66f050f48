"""``memckpt``: see and steer what is held for a run on this node."""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from memckpt.agent.address import AgentAddress
from memckpt.agent.control import ask_status, stop_agent
from memckpt.agent.messages import Status
from memckpt.agent.server import serve
from memckpt.config import AgentConfig
from memckpt.errors import MemckptError, NothingHeldError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
_out = Console()
_err = Console(stderr=True)

Run = Annotated[Path, typer.Argument(help="the run directory given to MemCheckpoint or memckpt.attach")]
Node = Annotated[str | None, typer.Option(help="node name; default: this host, or MEMCKPT_NODE")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"memckpt {version('lightning-memckpt')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """See and steer what is held for a run on this node."""


@app.command()
def status(run: Run, node: Node = None, as_json: AsJson = False) -> None:
    """Show what this node's agent holds for a run. Exit status 4 if no agent answers."""
    address = AgentAddress.of(run, node)
    found = ask_status(address)
    if found is None:
        raise NothingHeldError(f"no agent answers for {address.run_dir} on node {address.node}: nothing is held here")
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found)))
        return
    _out.print(_table(found))


def _table(found: Status) -> Table:
    table = Table(title=f"{found.run_dir} on {found.node}", show_header=False)
    held = (
        "nothing yet" if found.step is None else f"step {found.step}, generation {found.generation}, {found.mode} redo"
    )
    table.add_row("held", held)
    trainers = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in found.trainers) or "none"
    table.add_row("trainers", trainers)
    for rank, record in found.committed:
        table.add_row(f"rank {rank} committed", f"record {record}")
    if found.applied is not None:
        table.add_row("replica applied", f"record {found.applied}")
        table.add_row("drift", f"{found.max_drift_ulp:g} ulp")
    if found.redo_seconds_per_record is not None:
        table.add_row("redo", f"{found.redo_seconds_per_record * 1e3:.1f} ms a record")
    table.add_row("memory", f"{found.held_bytes / 2**20:.0f} MiB")
    table.add_row("agent", f"pid {found.pid}")
    return table


@app.command()
def stop(run: Run, node: Node = None, as_json: AsJson = False) -> None:
    """Let go of everything this node holds for a run and end its agent. Exit status 4 if there is none."""
    address = AgentAddress.of(run, node)
    pid = stop_agent(address)
    if pid is None:
        raise NothingHeldError(f"no agent answers for {address.run_dir} on node {address.node}: nothing to stop")
    typer.echo(json.dumps({"stopped": pid}) if as_json else f"agent pid {pid} has left; nothing is held on this node")


@app.command()
def agent(run: Run, node: Node = None, linger_seconds: float = AgentConfig().linger_seconds) -> None:
    """Run the agent in the foreground, beside a job whose own processes may not outlive it (systemd, sidecar)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    address = AgentAddress.of(run, node)
    address.run_dir.mkdir(parents=True, exist_ok=True)
    serve(address, linger_seconds, ready=lambda: None, by_operator=True)


def main() -> None:
    """Entry point: an error of ours is one line and its kind's exit status."""
    try:
        app()
    except MemckptError as error:
        _err.print(f"memckpt: {error}", style="bold red", highlight=False)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
