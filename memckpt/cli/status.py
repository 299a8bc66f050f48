"""``memckpt status`` and ``memckpt stop``: a run's state in this node's memory, its peers' memory and storage."""

from __future__ import annotations

import select
from collections import deque
from contextlib import closing, suppress
from typing import Annotated

import typer
from rich.live import Live

from memckpt.cli.alarms import problems_of
from memckpt.cli.common import AsJson, Node, Run, Url, count, no_agent, out, print_json, seconds_text
from memckpt.cli.run_view import Looker, View
from memckpt.cli.status_table import render
from memckpt.cli.watch_page import page
from memckpt.errors import AgentGoneError, AgentNotFoundError, ConfigurationError
from memckpt.journal.events import Entry
from memckpt.journal.reading import Follower
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status, stop_agent

#: Entries of the journal that a watch remembers; most of them are samples, which it does not show.
_ENTRIES = 1_000

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show a page, and refresh it until Ctrl-C.")]
MemoryOnly = Annotated[bool, typer.Option("--memory", help="Ask the agent only, and do not read storage: for probes.")]
Check = Annotated[bool, typer.Option("--check", help="Report problems by the exit status: for monitoring.")]
MaxBehind = Annotated[
    int | None,
    typer.Option(min=0, help="With --check: how many steps storage and peers may be behind memory.", metavar="N"),
]
MaxAge = Annotated[
    float | None,
    typer.Option(min=0, help="With --check: how many seconds ago the last commit may be.", metavar="SECONDS"),
]
Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes, with --watch.")]


def status(
    run: Run,
    node: Node = None,
    url: Url = None,
    memory: MemoryOnly = False,
    watch: Watch = False,
    interval: Interval = 2.0,
    check: Check = False,
    max_behind: MaxBehind = None,
    max_age: MaxAge = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's state in this node's memory and in storage.

    Without --url a live agent provides the location of storage. Exit status 11 if no agent answers and storage is
    empty; with --memory, if no agent answers. 9 if an agent does not answer in time, 10 if there is none and storage
    cannot be read. With --watch --json: one line for each refresh.

    With --check one line says that a training is protected, or one line for each problem: no trainer, nothing held, no
    commit for longer than --max-age, an alarm of the agent, storage that cannot be read or has damage, storage or peers
    further behind than --max-behind. Exit status 0 if there is no problem, 1 if there is one, 11 if no agent answers,
    9 if it does not answer in time.
    """
    if max_behind is not None and (not check or memory):
        raise ConfigurationError(f"--max-behind {max_behind}: expected it with --check and without --memory")
    if max_age is not None and not check:
        raise ConfigurationError(f"--max-age {max_age:g}: expected it with --check")
    if check and watch:
        raise ConfigurationError("--check: expected no --watch with it; call it repeatedly")
    if memory and url is not None:
        raise ConfigurationError(f"--url {url}: expected no --url with --memory, which does not read storage")
    looker = Looker(AgentAddress.of(run, node), url, memory)
    if watch:
        _watch(looker, interval, as_json)
        return
    view = looker.view_run()
    if check:
        _check(view, max_behind, max_age, as_json)
        return
    if view.empty:
        stored = "" if view.stored is None else f", and there are no checkpoints in {view.stored.url}"
        raise AgentNotFoundError(no_agent(view.address) + stored)
    if view.agent is None and not view.agent_problem and looker.storage_error is not None:
        raise looker.storage_error
    _show(view, as_json)
    if view.agent_problem:
        raise typer.Exit(AgentGoneError.exit_code)


def _check(view: View, max_behind: int | None, max_age: float | None, as_json: bool) -> None:
    agent = view.agent
    if agent is None and view.agent_problem:
        raise AgentGoneError(view.agent_problem)
    if agent is None:
        raise AgentNotFoundError(no_agent(view.address))
    problems = list(problems_of(agent, view.stored, max_behind, max_age))
    if as_json:
        print_json(view.as_json() | {"well": not problems, "problems": problems})
    else:
        for problem in problems:
            out.print(problem, style="red", markup=False, soft_wrap=True)
        if not problems:
            since, behind = agent.seconds_since_commit, view.steps_behind
            age = "" if since is None else f", the last commit {seconds_text(since)} ago"
            stored = "" if behind is None else f", storage {count(behind, 'step')} behind"
            out.print(f"well: step {agent.step} in memory{age}{stored}", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def _show(view: View, as_json: bool) -> None:
    if as_json:
        print_json(view.as_json())
    else:
        out.print(render(view))


def _watch(looker: Looker, interval: float, as_json: bool) -> None:
    """A page that changes in place on a terminal; elsewhere one table, or line, for each look."""
    if as_json or not out.is_terminal:
        with suppress(KeyboardInterrupt):  # the normal end of a watch
            while True:
                _show(looker.view_run(), as_json)
                select.select([], [], [], interval)
        return
    entries: deque[Entry] = deque(maxlen=_ENTRIES)
    with (
        closing(Follower(looker.address.run_dir)) as journal,
        Live(console=out, auto_refresh=False, vertical_overflow="crop") as live,
        suppress(KeyboardInterrupt),
    ):
        while True:
            view = looker.view_run()
            with suppress(OSError):  # the page does without events while the run directory cannot be read
                entries.extend(journal.poll())
            live.update(page(view, tuple(entries), out), refresh=True)
            select.select([], [], [], interval)


def stop(run: Run, node: Node = None, as_json: AsJson = False) -> None:
    """Release the state that this node's memory holds for a run, and end its agent.

    Checkpoints in storage stay. Exit status 11 if there is no agent.
    """
    address = AgentAddress.of(run, node)
    held = ask_status(address)
    pid = stop_agent(address)
    if held is None or pid is None:
        raise AgentNotFoundError(f"{no_agent(address)}: nothing to stop")
    stored = held.storage.step if held.storage is not None else None
    if as_json:
        print_json({"stopped": pid, "step": held.step, "stored_step": stored})
        return
    what = "it held nothing" if held.step is None else f"step {held.step} is no longer held in memory"
    typer.echo(f"agent pid {pid} has left; {what}" + ("" if stored is None else f"; step {stored} is in storage"))
    if held.trainers:
        pids = ", ".join(str(trainer) for _, trainer in held.trainers)
        typer.echo(f"training goes on (pid {pids}) and starts an agent again at its next commit")
