"""Options, output and number formats shared by the commands."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from memckpt.config.arguments import config_from_environment
from memckpt.errors import ConfigurationError
from memckpt.journal.events import Finished
from memckpt.journal.journal import find_finish
from memckpt.processes.address import AgentAddress
from memckpt.storage.owner import kept_url
from memckpt.storage.store import Store
from memckpt.storage.urls import open_store
from memckpt.user_messages import seconds_text as seconds_text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def directory_only(run: Path | None) -> Path | None:
    """Refuse a URL, which would be taken for a relative path. An existing directory of that name is accepted."""
    if run is not None and re.match(r"[A-Za-z][\w+.-]*:/", str(run)) and not run.exists():
        url = str(run).replace(":/", "://", 1)  # Path merges the slashes
        raise ConfigurationError(
            f"RUN: expected a run directory, found the URL {url}; the place of checkpoints is --url"
        )
    return run


Run = Annotated[
    Path,
    typer.Argument(help="The run directory given to MemCheckpoint or memckpt.attach.", callback=directory_only),
]
Node = Annotated[str | None, typer.Option(help="Node name. Default: MEMCKPT_NODE, or this host's name.")]
Url = Annotated[
    str | None,
    typer.Option(
        help="Location of the checkpoints, a directory or URL. Default: MEMCKPT_STORAGE_URL, or the run's last one."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def print_json(value: Any) -> None:
    """Print one object in one line; infinity, which JSON does not have, becomes null."""
    typer.echo(msgspec.json.encode(value).decode())


def place_of(run: Path, url: str | None) -> str:
    """Location of a run's checkpoints: the one asked for, the environment's, or the last one that the run used.

    Raises DamagedStateError or StorageError if the run directory's record of it cannot be read.
    """
    configured = config_from_environment().storage
    asked = url or (configured.url if configured is not None else None)
    return asked or kept_url(run) or str(run.resolve() / "storage")


def store_of(run: Path, url: str | None) -> Store:
    return open_store(place_of(run, url))


def no_agent(address: AgentAddress) -> str:
    """A message that no agent answers, with the likely reason."""
    said = f"no agent answers for {address.run_dir} on node {address.node}"
    if not address.run_dir.is_dir():
        return f"{said}: there is no such directory"
    if original := address.original():
        return f"{said}: it is a copy of {original}, and its {address.file_path.name} names the agent of that run"
    with contextlib.suppress(OSError):  # whoever may not list the directory is told less
        for agent in address.leaving():
            if not agent.ends(within=0.0):
                return f"{said}: pid {agent.pid} was told to end, and still writes to storage what it holds"
    below = sorted(str(path.parent) for path in address.run_dir.glob("*/run.json"))[:5]
    if below and not address.run_dir.joinpath("run.json").exists():
        return f"{said}; there are runs below it: {', '.join(below)}"
    if (finish := find_finish(address.run_dir, address.node)) is not None and isinstance(finish.event, Finished):
        step = "" if finish.event.step is None else f" at step {finish.event.step}"
        said = f"{said}: training has finished{step}, {time_text(finish.envelope.time)}"
    others = sorted(path.stem.removeprefix("agent-") for path in address.run_dir.glob("agent-*.log"))
    others = [name for name in others if name != address.node]
    if others and finish is None:
        return f"{said}; this run had agents on {', '.join(others)}: ask there, or name one with --node"
    later = sorted(address.run_dir.glob("training-*"))
    return f"{said}; a later training of its script is in {later[-1]}" if later else said


def time_text(created: float) -> str:
    """A local time, and its age."""
    moment = datetime.fromtimestamp(created).isoformat(" ", "seconds")
    return f"{moment} ({seconds_text(time.time() - created)} ago)"


def count(number: int, noun: str, nouns: str = "") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {nouns or noun + 's'}"


def ranks_text(ranks: Iterable[int]) -> str:
    """``ranks 0-3, 8``."""
    numbers = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    spans = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank {spans}" if len(numbers) == 1 else f"ranks {spans}"


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table whose cells are folded, never truncated: paths and reasons must be readable."""
    table = Table(title=title, show_header=bool(columns), title_justify="left", title_style="bold")
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    return table
