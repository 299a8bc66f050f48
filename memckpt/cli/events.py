"""``memckpt events``: the journal of a run."""

from __future__ import annotations

import contextlib
import select
from typing import Annotated

import typer
from rich.text import Text

from memckpt.cli.common import AsJson, Node, Run, out
from memckpt.cli.events_text import line_of, style_of
from memckpt.errors import AgentNotFoundError, StorageError
from memckpt.journal.events import Entry, Sample, encode
from memckpt.journal.reading import Follower

#: Seconds between two looks at the files.
_POLL_SECONDS = 0.5

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, and show what comes.")]
Samples = Annotated[bool, typer.Option("--samples", help="Show regular figures, too.")]
Last = Annotated[int | None, typer.Option("--last", "-n", min=0, help="Only the newest N.", metavar="N")]


def events(
    run: Run,
    node: Node = None,
    follow: Follow = False,
    last: Last = None,
    samples: Samples = False,
    as_json: AsJson = False,
) -> None:
    """Show what has happened to a run: starts, failures, recoveries, stalls, tiers, checkpoints.

    Read from the journals in the run directory, of all nodes or of --node; no agent need live. With --json: the lines
    of the journal. Exit status 11 if there is none, and no --follow.
    """
    follower = Follower(run, node)
    shown = 0

    def show(entries: list[Entry]) -> None:
        nonlocal shown
        for entry in entries:
            shown += 1
            if as_json:
                typer.echo(encode(entry.envelope, entry.event).decode())
            else:
                out.print(Text(line_of(entry, nodes=node is None), style=style_of(entry.event)), soft_wrap=True)

    def poll() -> list[Entry]:
        try:
            entries = follower.poll()
        except OSError as error:
            raise StorageError(f"the journal cannot be read: {error}") from error
        return [entry for entry in entries if samples or as_json or not isinstance(entry.event, Sample)]

    with contextlib.closing(follower), contextlib.suppress(KeyboardInterrupt):  # the normal end
        found = poll()
        show(found if last is None else found[max(0, len(found) - last) :])
        while follow:
            select.select([], [], [], _POLL_SECONDS)
            show(poll())
    if not shown and not follow and not found:
        raise AgentNotFoundError(
            f"no journal in {run}" + (f" of node {node}" if node else "") + ": expected events-NODE.jsonl of an agent"
        )
