"""``memckpt ps`` and ``memckpt stop``: the agents of this machine, what they hold, and their end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from memckpt.cli.common import AsJson, Node, directory_only, no_agent, out, plain_table, print_json, seconds_text
from memckpt.errors import AgentNotFoundError, ConfigurationError, StorageError
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
    ended = [_end(each, discard) for each in (agents_here() if run is None else _agent_of(AgentAddress.of(run, node)))]
    if as_json:
        print_json({"agents": ended} if run is None else ended[0])
    else:
        for line in [line for one in ended for line in _said(one)] or ["no agent of yours runs on this machine"]:
            typer.echo(line)
    if any(one.problem for one in ended):
        raise typer.Exit(StorageError.exit_code)


class _Ended(msgspec.Struct):
    """An agent that was asked to end, and what it held then."""

    run_dir: str
    stopped: int | None  #: its pid; None: it stays
    step: int | None
    stored_step: int | None
    trainers: list[int]
    problem: str  #: why what it held is not in storage; empty if it is, or nothing was to be


def _agent_of(address: AgentAddress) -> Iterator[AgentHere]:
    serving, status = address.serving(), ask_status(address)
    if serving is None or status is None:
        raise AgentNotFoundError(f"{no_agent(address)}: nothing to stop")
    yield AgentHere(partial(address.connect), status.pid, status)


def _end(agent: AgentHere, discard: bool) -> _Ended:
    status = agent.status
    if status is None:
        return _Ended(
            "", None, None, None, [], f"agent pid {agent.pid} does not answer: it is stopped, or hangs; end it"
        )
    storage = status.storage
    stored = storage.step if storage is not None else None
    ended = _Ended(status.run_dir, None, status.step, stored, [pid for _, pid in status.trainers], "")
    ahead = status.step is not None and (stored is None or stored < status.step)
    if storage is not None and storage.alarm and ahead and not discard:
        ended.problem = (
            f"the agent of {status.run_dir} stays: step {status.step} is in its memory only, as the last checkpoint "
            f"failed: {storage.alarm}. Mend that, or drop the step with --discard"
        )
        return ended
    sock = agent.connect()
    if sock is None:
        return ended  # it has just ended
    ended.stopped, unsaved = stop_at(sock, save=not discard)
    if discard:
        return ended
    ended.problem = unsaved
    if storage is not None and not unsaved:
        ended.stored_step = status.step
    return ended


def _said(ended: _Ended) -> Iterator[str]:
    if ended.stopped is None:
        yield ended.problem or f"the agent of {ended.run_dir} has just ended"
        return
    held = "it held nothing" if ended.step is None else f"step {ended.step} is no longer held in memory"
    stored = "" if ended.stored_step is None else f"; step {ended.stored_step} is in storage"
    yield f"agent pid {ended.stopped} of {ended.run_dir} has left; {held}{stored}"
    if ended.problem:
        yield f"step {ended.step} could not be written to storage: {ended.problem}"
    if ended.trainers:
        pids = ", ".join(str(pid) for pid in ended.trainers)
        yield f"training goes on (pid {pids}) and starts an agent again at its next commit"
