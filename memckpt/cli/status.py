"""``memckpt status`` and ``memckpt stop``: a run's state in this node's memory, its peers' memory and storage."""

from __future__ import annotations

import select
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count as numbers
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memckpt.cli.alarms import problems_of
from memckpt.cli.common import (
    AsJson,
    Node,
    Run,
    Url,
    count,
    nbytes_text,
    no_agent,
    out,
    place_of,
    plain_table,
    print_json,
    seconds_text,
    time_text,
)
from memckpt.cli.peers import show_peers
from memckpt.errors import AgentGoneError, AgentNotFoundError, ConfigurationError, MemckptError, StorageError
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status, stop_agent
from memckpt.protocol.status import Status, StorageStatus
from memckpt.storage.catalog import Catalog, read_catalog
from memckpt.storage.chain import stored_points
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import kept_run, refuse_other
from memckpt.storage.presence import missing_data, without
from memckpt.storage.store import Store
from memckpt.storage.urls import open_store

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")]
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
#: Time limit for reading the catalog.
_STORAGE_SECONDS = 10.0
#: Number of refreshes of a watch; for tests.
Refreshes = Annotated[int | None, typer.Option(hidden=True, min=1)]


@dataclass(frozen=True)
class Stored:
    """Findings in storage.

    Attributes:
        url: location.
        checkpoints: number of complete checkpoints.
        batches: number of batches of records.
        step, created: step and time of the newest state that can be produced.
        nbytes: bytes of the newest checkpoint.
        damaged: number of unusable commit files.
        unreadable: number of commit files that could not be read.
        missing: number of commit files whose data are missing; the other counts ignore them.
        problem: why storage could not be read; empty if it could.
    """

    url: str
    checkpoints: int = 0
    step: int | None = None
    created: float | None = None
    nbytes: int = 0
    damaged: int = 0
    problem: str = ""
    batches: int = 0
    unreadable: int = 0
    missing: int = 0


@dataclass(frozen=True)
class View:
    """A snapshot of a run's status.

    Attributes:
        address: address of the agent.
        agent: status of the agent; None: no agent answered.
        agent_problem: why the agent could not be asked; empty if it could, or if there is none.
        stored: findings in storage; None: storage was not read.
    """

    address: AgentAddress
    agent: Status | None
    agent_problem: str
    stored: Stored | None

    @property
    def empty(self) -> bool:
        """Whether nothing is held or stored, and everything could be read."""
        stored = self.stored
        nothing_stored = stored is None or not (
            stored.checkpoints or stored.damaged or stored.unreadable or stored.missing or stored.problem
        )
        return self.agent is None and not self.agent_problem and nothing_stored

    @property
    def lag_records(self) -> int | None:
        """Records committed and not yet applied to the replica; None: there is no replica (lazy)."""
        agent = self.agent
        if agent is None or agent.applied is None or not agent.committed:
            return None
        return max(0, max(record for _, record in agent.committed) - agent.applied)

    @property
    def steps_behind(self) -> int | None:
        """Steps by which storage is behind memory, lost with the machine; None: unknown."""
        if self.agent is None or self.agent.step is None or self.stored is None or self.stored.step is None:
            return None
        return max(0, self.agent.step - self.stored.step)

    def as_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.address.run_dir),
            "node": self.address.node,
            "agent": self.agent,
            "agent_problem": self.agent_problem,
            "lag_records": self.lag_records,
            "stored": self.stored,
            "steps_behind": self.steps_behind,
        }


class Looker:
    """Reads a run's status, once or repeatedly. An object store is listed again only after the agent has written to it.

    Args:
        address: address of the agent.
        url: URL of the store; None: the agent's, or the run directory's.
        memory_only: whether storage is not read.
    """

    def __init__(self, address: AgentAddress, url: str | None, memory_only: bool = False) -> None:
        self._address = address
        self._url = url
        self._memory_only = memory_only
        self._seen: tuple[object, Stored] | None = None
        #: Error of the last read of storage; None: it succeeded.
        self.storage_error: MemckptError | None = None

    def look(self) -> View:
        """The current status. An agent that does not answer is reported in the view, not raised."""
        agent, problem = None, ""
        try:
            agent = ask_status(self._address)
        except AgentGoneError as error:
            problem = str(error)
        return View(self._address, agent, problem, None if self._memory_only else self._look_into_storage(agent))

    def _look_into_storage(self, agent: Status | None) -> Stored:
        tier = agent.storage if agent is not None else None
        url = self._url or (tier.url if tier is not None else place_of(self._address.run_dir, None))
        version = (url, tier.step, tier.saving) if tier is not None else (url,)
        if self._seen is not None and self._seen[0] == version:
            return self._seen[1]
        self.storage_error = None
        try:
            store = open_store(url)
            catalog, missing = read_within(store, _STORAGE_SECONDS)
            if kept := kept_run(self._address.run_dir):
                refuse_other(url, catalog.owner, kept, self._address.run_dir)
        except MemckptError as error:
            # Shown, not raised: memory is reported regardless, and a watch survives a mount that is away for a minute.
            self.storage_error = error
            return Stored(url, problem=str(error))
        catalog = without(catalog, missing)
        whole, newest = catalog.complete, next(iter(stored_points(catalog)), None)
        damaged, unreadable = len(catalog.damaged), len(catalog.unreadable)
        stored = Stored(
            url,
            len(whole),
            damaged=damaged,
            batches=len(catalog.batches),
            unreadable=unreadable,
            missing=len(missing),
        )
        if newest is not None:
            created = max([newest.checkpoint.created, *(batch.created for batch in newest.batches)])
            stored = replace(stored, step=newest.step, created=created, nbytes=whole[0].nbytes)
        self._seen = None if isinstance(store, LocalStore) else (version, stored)
        return stored


def read_within(store: Store, seconds: float) -> tuple[Catalog, dict[str, str]]:
    """The catalog, and its commit files whose data are missing, within a time limit.

    A store that does not answer in time keeps its daemon thread until the process ends.

    Raises:
        StorageError: the store did not answer in time, or cannot be read.
    """
    found: list[tuple[Catalog, dict[str, str]] | BaseException] = []

    def read() -> None:
        try:
            catalog = read_catalog(store)
            found.append((catalog, missing_data(store, catalog)))
        except BaseException as error:  # raised again in the thread that waits
            found.append(error)

    reader = threading.Thread(target=read, name="memckpt-storage", daemon=True)
    reader.start()
    reader.join(seconds)
    if not found:
        raise StorageError(f"{store.url} has not answered within {seconds:.0f} s")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


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
    refreshes: Refreshes = None,
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
        _watch(looker, interval, as_json, refreshes)
        return
    view = looker.look()
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


def _watch(looker: Looker, interval: float, as_json: bool, refreshes: int | None) -> None:
    looks = numbers() if refreshes is None else range(refreshes)
    in_place = out.is_terminal and not as_json
    try:
        with Live(console=out, auto_refresh=False) if in_place else nullcontext() as live:
            for look in looks:
                if look:
                    select.select([], [], [], interval)
                view = looker.look()
                if live is not None:
                    live.update(render(view), refresh=True)
                else:
                    _show(view, as_json)
    except KeyboardInterrupt:
        return  # the normal end of a watch


# Presentation


def render(view: View) -> Group:
    """Render a view as a table."""
    title = Text(f"{view.address.run_dir} on {view.address.node}", style="bold")
    table = plain_table()
    if view.agent is not None:
        _show_memory(table, view.agent, view)
    else:
        table.add_row("memory", f"[yellow]{escape(view.agent_problem or no_agent(view.address))}[/]")
    if view.agent is not None and view.agent.peers is not None:
        table.add_section()
        show_peers(table, view.agent.peers)
    if view.stored is not None:
        table.add_section()
        _show_storage(table, view.stored, view)
    return Group(title, table)


def _show_memory(table: Table, agent: Status, view: View) -> None:
    if agent.step is None:
        table.add_row("memory", "[yellow]nothing is held yet[/]")
    else:
        since = agent.seconds_since_commit
        age = "" if since is None else f", {seconds_text(since)} ago"
        table.add_row("memory", f"[bold]step {agent.step}[/]{age}")
        held = f"{count(agent.records_held, 'record')}, {nbytes_text(agent.held_bytes)}"
        table.add_row("held", f"{held}, generation {agent.generation}")
        table.add_row("redo", _redo_text(agent, view.lag_records))
    if agent.check:
        table.add_row("check", escape(agent.check))
    committed = dict(agent.committed)
    for rank, pid in agent.trainers:
        record = f", committed record {committed[rank]}" if rank in committed else ""
        table.add_row(f"rank {rank}", f"pid {pid}{record}")
    if not agent.trainers:
        table.add_row("trainers", "none")
    table.add_row("agent", f"pid {agent.pid}, up {seconds_text(agent.uptime_seconds)}")


def _redo_text(agent: Status, lag: int | None) -> str:
    mode = agent.mode if agent.every == 1 else f"{agent.mode} of every {agent.every}th step"
    parts = [f"{mode} ({escape(agent.mode_reason)})" if agent.mode_reason else mode]
    if agent.redo_seconds_per_record is not None:
        parts.append(f"{agent.redo_seconds_per_record * 1e3:.1f} ms a record")
    if agent.stall_ms is not None:
        parts.append(f"{agent.stall_ms:.1f} ms stall a step")
    if lag is not None:
        parts += [f"{count(lag, 'record')} behind", f"drift {agent.max_drift_ulp:g} ulp"]
    return ", ".join(parts)


def _show_storage(table: Table, stored: Stored, view: View) -> None:
    tier = view.agent.storage if view.agent is not None else None
    if stored.problem:
        table.add_row("storage", f"[red]{escape(stored.problem)}[/]")
    elif stored.step is None or stored.created is None:
        table.add_row("storage", "no checkpoint yet" if tier is not None else "no checkpoints")
    else:
        behind = view.steps_behind
        lost = "" if behind is None else f", {count(behind, 'step')} behind memory"
        table.add_row("storage", f"[bold]step {stored.step}[/]{lost}")
        table.add_row("written", time_text(stored.created))
        logged = f", {count(stored.batches, 'batch', 'batches')} of records" if stored.batches else ""
        held = f"{count(stored.checkpoints, 'checkpoint')}, the newest {nbytes_text(stored.nbytes)}{logged}"
        table.add_row("held", held)
    if stored.damaged:
        table.add_row("damaged", f"[red]{count(stored.damaged, 'commit file')}; see memckpt verify[/]")
    if stored.missing:
        table.add_row("missing", f"[red]data of {count(stored.missing, 'commit file')}; see memckpt verify[/]")
    if stored.unreadable:
        table.add_row("unreadable", f"[yellow]{count(stored.unreadable, 'file')}; see memckpt verify[/]")
    if tier is not None:
        if tier.reason:
            table.add_row("mode", escape(f"{tier.mode}: {tier.reason}"))
        table.add_row("interval", _interval_text(tier))
        if tier.loses_at_most is not None:
            table.add_row("at risk", f"at most {count(tier.loses_at_most, 'step')}, if this node is lost")
        if tier.bytes_per_second is not None:
            table.add_row("rate", f"{nbytes_text(tier.bytes_per_second)}/s")
        if tier.alarm:
            table.add_row("alarm", f"[red]the last one failed: {escape(tier.alarm)}[/]")
        if tier.untidy:
            table.add_row("untidy", f"[yellow]{escape(tier.untidy)}[/]")
    elif view.agent is not None:
        table.add_row("interval", "this run writes no checkpoints to storage")
    table.add_row("place", escape(stored.url))


def _interval_text(tier: StorageStatus) -> str:
    if tier.every_steps is not None:
        every = f"every {count(tier.every_steps, 'step')}"
    else:
        every = f"every {seconds_text(tier.interval_seconds or 0.0)} or more"
    if tier.mode == "log" and tier.batch_steps is not None:
        every = f"every step in batches of {tier.batch_steps}, a checkpoint {every}"
    return f"{every}; one is being written now" if tier.saving else every


# Stop


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
