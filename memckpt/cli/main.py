"""``memckpt``: see and steer what is held for a run on this node."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
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
from memckpt.errors import DamagedStateError, MemckptError, NothingHeldError
from memckpt.storage.catalog import Catalog, read_catalog, remove
from memckpt.storage.catalog import verify as verify_checkpoint
from memckpt.storage.store import Store, open_store

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
_out = Console()
_err = Console(stderr=True)

Run = Annotated[Path, typer.Argument(help="the run directory given to MemCheckpoint or memckpt.attach")]
Node = Annotated[str | None, typer.Option(help="node name; default: this host, or MEMCKPT_NODE")]
Url = Annotated[str | None, typer.Option(help="where the checkpoints are; default: storage in the run directory")]
Repair = Annotated[bool, typer.Option(help="remove what is damaged")]
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
    storage = found.storage
    if storage is not None:
        step = "nothing yet" if storage.step is None else f"step {storage.step}"
        every = (
            f"every {storage.every_steps} steps" if storage.every_steps else f"every {storage.interval_seconds:.0f} s"
        )
        rate = "" if storage.bytes_per_second is None else f", {storage.bytes_per_second / 2**20:.0f} MiB/s"
        table.add_row("storage", f"{step}, {every}{rate}, {storage.url}")
        if storage.alarm:
            table.add_row("alarm", storage.alarm)
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


def _store_of(run: Path, url: str | None) -> Store:
    return open_store(url or str(run.resolve() / "storage"))


def _catalog_of(store: Store) -> Catalog:
    catalog = read_catalog(store)
    if not catalog.checkpoints and not catalog.damaged:
        raise NothingHeldError(f"no checkpoints in {store.url}; give the place with --url if it is another one")
    return catalog


@app.command("ls")
def list_(run: Run, url: Url = None, as_json: AsJson = False) -> None:
    """List the checkpoints that a run has in storage. Exit status 4 if there are none."""
    catalog = _catalog_of(_store_of(run, url))
    if as_json:
        rows = [
            {
                "step": one.step,
                "record": one.record,
                "timeline": one.timeline.number,
                "bytes": one.nbytes,
                "created": one.created,
                "world_size": one.world_size,
                "complete": one.complete,
            }
            for one in catalog.checkpoints
        ]
        typer.echo(json.dumps({"checkpoints": rows, "damaged": catalog.damaged}))
        return
    table = Table("step", "attempt", "written", "MiB", "ranks", "", title=f"{run}: checkpoints in storage")
    for one in catalog.checkpoints:
        written = datetime.fromtimestamp(one.created).isoformat(" ", "seconds")
        state = "" if one.complete else "parts are missing"
        size = f"{one.nbytes / 2**20:.1f}"
        table.add_row(str(one.step), str(one.timeline.number), written, size, str(one.world_size), state)
    _out.print(table)
    for problem in catalog.damaged.values():
        _err.print(f"damaged: {problem}", style="red", highlight=False)


@app.command()
def verify(run: Run, url: Url = None, repair: Repair = False, as_json: AsJson = False) -> None:
    """Read and check every file that a run has in storage. Exit status 8 if something is damaged."""
    store = _store_of(run, url)
    catalog = _catalog_of(store)
    problems = {path: [problem] for path, problem in catalog.damaged.items()}
    good = 0
    for one in catalog.checkpoints:
        wrong = verify_checkpoint(store, one)
        if not wrong:
            good += 1
            continue
        problems[f"step {one.step}, attempt {one.timeline.number}"] = wrong
        if repair:
            remove(store, one)
    if repair:
        for path in catalog.damaged:
            store.delete(path)
    if as_json:
        typer.echo(json.dumps({"good": good, "damaged": problems, "repaired": repair}))
    else:
        for name, wrong in problems.items():
            _err.print(f"{name}: {'; '.join(wrong)}", style="red", highlight=False)
        _out.print(
            f"{good} checkpoints are good, {len(problems)} are damaged" + (" and removed" * bool(problems and repair))
        )
    if problems and not repair:
        raise typer.Exit(DamagedStateError.exit_code)


@app.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="the file to write; a directory for dcp")],
    step: Annotated[int | None, typer.Option(help="which step; default: the newest")] = None,
    form: Annotated[str, typer.Option("--format", help="dcp, lightning, safetensors or torch")] = "torch",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint from storage in a format that other tools read."""
    from memckpt.storage.export import export as export_checkpoint

    store = _store_of(run, url)
    complete = _catalog_of(store).complete
    found = next((one for one in complete if step is None or one.step == step), None)
    if found is None:
        raise NothingHeldError(f"expected step {step}, found steps {sorted({one.step for one in complete})}")
    problems = verify_checkpoint(store, found)
    if problems:
        raise DamagedStateError(f"step {found.step} is damaged: {'; '.join(problems)}")
    export_checkpoint(store, found, to, form)
    text = json.dumps({"step": found.step, "to": str(to)}) if as_json else f"step {found.step} is in {to}"
    typer.echo(text)


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
