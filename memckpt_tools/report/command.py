"""``memckpt report``: a run on one page of HTML."""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memckpt.cli.common import AsJson, Run, Url, out, place_of, print_json
from memckpt.errors import AgentNotFoundError, ConfigurationError, MemckptError, StorageError
from memckpt.journal.journal import read_journal

if TYPE_CHECKING:  # imported only when a page is made, so that other commands start fast
    from memckpt_tools.report.page import Kept
    from memckpt_tools.report.story import Goodput, Story

#: Time limit for reading storage, in seconds.
_STORAGE_SECONDS = 30.0

To = Annotated[Path | None, typer.Option("--to", help="File to write. Default: report.html in the run directory.")]
Follow = Annotated[
    float | None,
    typer.Option(
        "--follow",
        min=1.0,
        metavar="SECONDS",
        help="Write the page anew every SECONDS until the run has finished, or Ctrl-C; a browser reloads it.",
    ),
]


def report(run: Run, to: To = None, url: Url = None, follow: Follow = None, as_json: AsJson = False) -> None:
    """Write the story of a run as one page of HTML that needs nothing else.

    Attempts, failures and recoveries, the newest step of each tier over time, loss and learning rate, stalls, drift,
    memory, bytes, checkpoints kept, and the goodput measured beside the plan's. Read from the journals in the run
    directory and from storage; no agent need live. With --json the numbers, and no page unless --to names one. Exit
    status 11 if there is no journal of a training.
    """
    from memckpt_tools.report.page import in_json
    from memckpt_tools.report.story import measure

    if follow is not None and as_json:
        raise ConfigurationError("--follow: expected no --json with it; call it repeatedly")
    path = to or (None if as_json else run / "report.html")
    if path is not None and not path.absolute().parent.is_dir():
        raise StorageError(f"--to {path}: expected a directory, found none at {path.absolute().parent}")
    with suppress(KeyboardInterrupt) if follow is not None else nullcontext():  # the normal end of following a run
        while True:
            story = _story(run)
            goodput = measure(story)
            running = story.attempts[-1].end != "finished"
            if path is not None:
                _write(path, run, url, story, goodput, follow if running else None)
            if as_json:
                print_json(in_json(story, goodput))
            else:
                out.print(f"{path}: goodput {goodput.ettr:.2%}", markup=False, soft_wrap=True)
            if follow is None or not running:
                return
            select.select([], [], [], follow)


def _story(run: Path) -> Story:
    from memckpt_tools.report.story import tell

    try:
        entries = read_journal(run)
    except OSError as error:
        raise StorageError(f"the journal cannot be read: {error}") from error
    story = tell(entries) if entries else None
    if story is None or not story.attempts:
        raise AgentNotFoundError(f"no journal of a training in {run}: expected events-NODE.jsonl with an attempt")
    return story


def _write(path: Path, run: Path, url: str | None, story: Story, goodput: Goodput, renew: float | None) -> None:
    """Write the page. A browser that reads a half of it loads it anew: that stands in its head."""
    from memckpt_tools.report.page import render

    kept, problem = _kept(run, url)
    text = render(str(run.resolve()), story, goodput, kept, problem, renew)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--to {path}: {error.strerror or error}; name another file") from error


def _kept(run: Path, url: str | None) -> tuple[Sequence[Kept], str]:
    """The checkpoints in storage, newest first, and why they are not known (empty: they are)."""
    from memckpt.cli.run_view import read_within
    from memckpt.storage.catalog import PINNED, read_keys
    from memckpt.storage.urls import open_store
    from memckpt_tools.report.page import Kept

    try:
        store = open_store(place_of(run, url))
        catalog, missing = read_within(store, _STORAGE_SECONDS)
        pins = read_keys(store, PINNED)
    except MemckptError as error:
        return [], str(error)
    kept = []
    for one in catalog.checkpoints:
        state = "whole" if one.complete else "in parts"
        if any(part.commit_path in missing for part in one.parts.values()):
            state = "data are missing"
        elif one.key in pins:
            state += ", pinned"
        kept.append(Kept(one.step, one.timeline.number, one.created, one.nbytes, state))
    return kept, ""
