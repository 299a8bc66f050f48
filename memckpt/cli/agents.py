"""``memckpt ps`` and ``memckpt stop``: the agents of this machine, what they hold, and their end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from memckpt.cli.common import AsJson, Node, directory_only, no_agent, out, plain_table, print_json, seconds_text
from memckpt.errors import AgentError, AgentNotFoundError, ConfigurationError, StorageError
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import AgentHere, agents_here, ask_status, stop_at
from memckpt.user_messages import nbytes_text

MaybeRun = Annotated[
    Path | None,
    typer.Argument(help="The run directory, if not --all.", callback=directory_only, show_default=False),
]
All = Annotated[bool, typer.Option("--all", help="All agents of this user on this machine, whatever their run.")]
Discard = Annotated[bool, typer.Option("--discard", help="Drop what storage does not have, and do not write it there.")]


def ps(as_json: AsJson = False) -> None:
    """List your agents on this machine: of which run, at which step, with how much memory, and since when.

    Also those whose run directory has been removed. An agent in another container is not seen from here.
    """
    agents = list(agents_here())
    if as_json:
        print_json({"agents": [_as_json(each) for each in agents]})
        return
    if not agents:
        out.print("no agent of yours runs on this machine")
        return
    table = plain_table("run", "step", "memory", "training", "last commit", "agent")
    for each in agents:
        table.add_row(*_row(each))
    out.print(table)


def _as_json(agent: AgentHere) -> dict[str, object]:
    """`agent` is as in ``memckpt status --json``; null: it does not answer."""
    removed = agent.status is not None and not Path(agent.status.run_dir).is_dir()
    return {"pid": agent.pid, "run_dir_removed": removed, "agent": agent.status}


def _row(agent: AgentHere) -> tuple[Text | str, ...]:
    status, pid = agent.status, f"pid {agent.pid}"
    if status is None:
        return Text("does not answer: it is stopped, or hangs", style="red"), "", "", "", "", pid
    run = Text(f"{status.run_dir} on {status.node}")
    if not Path(status.run_dir).is_dir():
        run.append(" (removed)", style="yellow")
    since = status.seconds_since_commit
    return (
        run,
        "" if status.step is None else str(status.step),
        nbytes_text(status.held_bytes),
        ", ".join(f"pid {trainer}" for _, trainer in status.trainers) or Text("none", style="yellow"),
        "" if since is None else f"{seconds_text(since)} ago",
        f"{pid}, up {seconds_text(status.uptime_seconds)}",
    )


def stop(
    run: MaybeRun = None, node: Node = None, every: All = False, discard: Discard = False, as_json: AsJson = False
) -> None:
    """End a run's agent on this node, and release the memory that it holds.

    What storage does not have yet is written there first, unless --discard. Checkpoints in storage stay. Exit status 11
    if there is no agent; 10 if the state could not be written: an agent whose last checkpoint failed stays.
    """
    if (run is None) != every:
        raise ConfigurationError(f"expected RUN or --all, found {'neither' if run is None else 'both'}")
    if every and node is not None:
        raise ConfigurationError(f"--node {node}: expected it with RUN; --all ends the agents of all nodes' names here")
    ended = []
    for each in agents_here() if run is None else _agent_of(AgentAddress.of(run, node)):
        ended.append(_end_agent(each, discard))
        for line in () if as_json else _said(ended[-1]):
            typer.echo(line)  # at once: the next one may write for minutes
    if as_json:
        print_json({"agents": ended} if run is None else ended[0])
    elif not ended:
        typer.echo("no agent of yours runs on this machine")
    if any(one.problem for one in ended):
        raise typer.Exit(StorageError.exit_code)


class _Ended(msgspec.Struct):
    """An agent that was asked to end, and what it held then."""

    run_dir: str
    stopped: int | None  #: its pid; None: it stays
    step: int | None
    saved: bool  #: whether all that this node held of the run is in storage
    trainers: list[int]
    problem: str = ""  #: why it stays, or what it held is not in storage; empty if neither is so


def _agent_of(address: AgentAddress) -> Iterator[AgentHere]:
    serving, status = address.serving(), ask_status(address)
    if serving is None or status is None:
        raise AgentNotFoundError(f"{no_agent(address)}: nothing to stop")
    yield AgentHere(address.connect, status.pid, status)


def _end_agent(agent: AgentHere, discard: bool) -> _Ended:
    """End one agent; a problem does not keep others from it."""
    status = agent.status
    if status is None:
        return _Ended("", None, None, False, [], f"agent pid {agent.pid} does not answer: it is stopped, or hangs")
    ended = _Ended(status.run_dir, None, status.step, False, [pid for _, pid in status.trainers])
    try:
        sock = agent.connect()
        if sock is None:
            ended.problem = f"agent pid {agent.pid} of {status.run_dir} has just ended"
            return ended
        stopped = stop_at(sock, save=not discard)
    except AgentError as error:
        ended.problem = str(error)
        return ended
    if not stopped.ended:
        ended.problem = (
            f"the agent of {status.run_dir} stays until it can write step {status.step}, which is in its memory only: "
            f"{stopped.kept}. Mend that, or drop the step with --discard"
        )
        return ended
    ended.stopped = stopped.pid
    if stopped.kept and not discard:
        ended.problem = f"step {status.step} could not be written to storage: {stopped.kept}"
    ended.saved = not discard and not stopped.kept and status.storage is not None and status.step is not None
    return ended


def _said(ended: _Ended) -> Iterator[str]:
    if ended.stopped is not None:
        held = "it held nothing" if ended.step is None else f"step {ended.step} is no longer held in memory"
        saved = ", and what was held is in storage" if ended.saved else ""
        yield f"agent pid {ended.stopped} of {ended.run_dir} has left; {held}{saved}"
    if ended.problem:
        yield ended.problem
    if ended.stopped is not None and ended.trainers:
        pids = ", ".join(str(pid) for pid in ended.trainers)
        yield f"training goes on (pid {pids}) and starts an agent again at its next commit"
