"""``memckpt status``: a run's state in this node's memory, its peers' memory and storage."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memckpt.cli.common import (
    AsJson,
    Node,
    Run,
    Url,
    count,
    no_agent,
    out,
    plain_table,
    print_json,
    ranks_text,
    seconds_text,
    time_text,
)
from memckpt.cli.run_view import Looker, Stored, View, problems_of
from memckpt.cli.watch_page import page
from memckpt.errors import AgentGoneError, AgentNotFoundError, ConfigurationError
from memckpt.journal.events import Entry
from memckpt.journal.journal import Follower
from memckpt.processes.address import AgentAddress
from memckpt.protocol.status import AuditStatus, PeerLinkStatus, PeersStatus, Status, StorageStatus
from memckpt.state.records import RankGroup
from memckpt.user_messages import nbytes_text

#: Entries of the journal that a watch remembers; most of them are samples, which it does not show.
_ENTRIES = 1_000
#: Seconds of a node's silence from which they are shown.
_SILENT_SECONDS = 5.0
#: Most healthy nodes with a row each; more share one row.
_ROWS = 8

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

    With --check one line says that a training is protected, or one line for each problem. That is no trainer, nothing
    held, no commit for longer than --max-age, an alarm of the agent, storage that cannot be read or has damage, storage
    or peers further behind than --max-behind. Exit status 0 if there is no problem, 1 if there is one, 11 if no agent
    answers, 9 if it does not answer in time.
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


def render(view: View) -> Group:
    """A view as a table."""
    table, agent = plain_table(), view.agent
    if agent is None:
        _add(table, "memory", view.agent_problem or no_agent(view.address), "" if view.finished else "yellow")
    else:
        _show_memory(table, agent, view.lag_records)
        if agent.peers is not None:
            table.add_section()
            _show_peers(table, agent.peers)
    if view.stored is not None:
        table.add_section()
        _show_storage(table, view.stored, view)
    return Group(Text(f"{view.address.run_dir} on {view.address.node}", style="bold"), table)


def _add(table: Table, label: str, text: str, style: str = "") -> None:
    """Add a row, unless its text is empty."""
    if text:
        table.add_row(label, Text(text, style=style))


def _show_memory(table: Table, agent: Status, lag: int | None) -> None:
    if agent.step is None:
        _add(table, "memory", "nothing is held yet", "yellow")
    else:
        since = agent.seconds_since_commit
        _add(table, "memory", f"step {agent.step}" + ("" if since is None else f", {seconds_text(since)} ago"), "bold")
        held = f"{count(agent.records_held, 'record')}, {nbytes_text(agent.held_bytes)}"
        _add(table, "held", f"{held}, generation {agent.generation}")
        _add(table, "redo", _redo_text(agent, lag))
    _add(table, "unprotected", agent.unprotected, "red")
    _add(table, "check", agent.check)
    if (audit := agent.audit) is not None:
        _add(table, "audit", _audit_text(audit), "red" if audit.findings else "yellow" if audit.problem else "")
    committed = dict(agent.committed)
    for rank, pid in agent.trainers:
        record = f", committed record {committed[rank]}" if rank in committed else ""
        _add(table, f"rank {rank}", f"pid {pid}{record}")
    _add(table, "trainers", "" if agent.trainers else "none")
    _add(table, "advice", agent.advice and f"{agent.advice} would pay: {agent.advice_reason}")
    _add(table, "journal", agent.journal and f"events are lost: {agent.journal}", "yellow")
    _add(table, "metrics", agent.metrics)
    _add(table, "agent", f"pid {agent.pid}, up {seconds_text(agent.uptime_seconds)}")


def _audit_text(audit: AuditStatus) -> str:
    last = "" if audit.record is None else f", the last one up to record {audit.record}"
    found = count(audit.findings, "finding") if audit.findings else "no finding"
    said = f"{count(audit.pieces, 'piece')} redone{last}, {found}, {audit.cpu_seconds:.1f} CPU s"
    return said + (f"; not all: {audit.problem}" if audit.problem else "")


def _redo_text(agent: Status, lag: int | None) -> str:
    mode = agent.mode if agent.every == 1 else f"{agent.mode} of every {agent.every}th step"
    parts = [f"{mode} ({agent.mode_reason})" if agent.mode_reason else mode]
    if agent.redo_seconds_per_record is not None:
        parts.append(f"{agent.redo_seconds_per_record * 1e3:.1f} ms a record")
    if agent.stall_ms is not None:
        parts.append(f"{agent.stall_ms:.1f} ms stall a step")
    if lag is not None:
        parts += [f"{count(lag, 'record')} behind", f"drift {agent.max_drift_ulp:g} ulp"]
    return ", ".join(parts)


# Storage


def _show_storage(table: Table, stored: Stored, view: View) -> None:
    tier = view.agent.storage if view.agent is not None else None
    if stored.problem:
        _add(table, "storage", stored.problem, "red")
    elif stored.step is None or stored.created is None:
        _add(table, "storage", "no checkpoint yet" if tier is not None else "no checkpoints")
    else:
        behind = view.steps_behind
        behind_memory = "" if behind is None else f", {count(behind, 'step')} behind memory"
        _add(table, "storage", f"step {stored.step}{behind_memory}", "bold")
        _add(table, "written", time_text(stored.created))
        logged = f", {count(stored.batches, 'batch', 'batches')} of records" if stored.batches else ""
        newest = f"{count(stored.checkpoints, 'checkpoint')}, the newest {nbytes_text(stored.nbytes)}"
        _add(table, "held", newest + logged)
    for label, number, what, style in (
        ("damaged", stored.damaged, "", "red"),
        ("missing", stored.missing, "data of ", "red"),
        ("unreadable", stored.unreadable, "", "yellow"),
    ):
        _add(table, label, f"{what}{count(number, 'commit file')}; see memckpt verify" if number else "", style)
    if tier is not None:
        _add(table, "mode", tier.reason and f"{tier.mode}: records are not logged: {tier.reason}")
        _add(table, "interval", _interval_text(tier))
        if tier.loses_at_most is not None:
            peers = view.agent.peers if view.agent is not None else None
            _add(table, "at risk", _risk_text(tier, tier.loses_at_most, view, peers is not None and peers.protected))
        if tier.bytes_per_second is not None:
            _add(table, "rate", f"{nbytes_text(tier.bytes_per_second)}/s")
        _add(table, "alarm", tier.alarm and f"the last one failed: {tier.alarm}", "red")
        _add(table, "untidy", tier.untidy, "yellow")
    elif view.agent is not None:
        _add(table, "interval", "this run writes no checkpoints to storage")
    _add(table, "place", stored.url)


def _interval_text(tier: StorageStatus) -> str:
    if tier.every_steps is not None:
        every = f"every {count(tier.every_steps, 'step')}"
    else:
        every = f"every {seconds_text(tier.interval_seconds or 0.0)} or more"
    if tier.mode == "log" and tier.batch_steps is not None:
        every = f"every step in batches of {tier.batch_steps}, a checkpoint {every}"
    return f"{every}; one is being written now" if tier.saving else every


def _risk_text(tier: StorageStatus, steps: int, view: View, protected: bool) -> str:
    """How many steps storage is behind memory, and may be before the next write; what loses them, and the remedy."""
    when = "all nodes are lost at once" if protected else "this machine is lost"
    fewer = "a shorter interval (storage.every_steps), or storage.mode='log'"
    if tier.mode == "log":
        fewer = "smaller batches (storage.batch_steps)"
    behind = view.steps_behind
    parts = [] if behind is None else [f"{count(behind, 'step is', 'steps are')} in memory only"]
    if steps > (behind or 0):
        # A forecast by the interval, which a short training does not reach.
        parts.append(f"before the next write at most {count(steps, 'step')} may be, if training lasts so long")
    return f"{', '.join(parts)}; lost if {when}; fewer with {fewer}"


# Other nodes' memory


def _show_peers(table: Table, peers: PeersStatus) -> None:
    """Add the rows of the peers tier, protection first."""
    newest = "nothing is acknowledged yet" if peers.watermark is None else f"record {peers.watermark} on every node"
    if peers.protected:
        said = f"protected, {newest}" + (f"; {peers.problem}" if peers.problem else "")
        _add(table, "peers", said, "yellow" if peers.problem else "bold")
    else:
        _add(table, "peers", f"not protected{f': {peers.problem}' if peers.problem else ''}; {newest}", "red")
    _add(table, "recovering", peers.recovering, "yellow")
    curve = peers.security == "curve"
    secure = "encrypted and authenticated" if curve else "neither encrypted nor authenticated"
    _add(table, "scheme", f"{peers.scheme}; {secure} ({peers.security}); ack {peers.ack}")
    if peers.every > 1 or peers.needed > 1:
        what = f"the whole state every {peers.every} steps" if peers.every > 1 else "every record"
        slow = peers.needed > peers.every
        remedy = f"; the links do not carry that: peers.every_steps={peers.needed} would do" if slow else ""
        _add(table, "sends", what + remedy, "yellow" if slow else "")
    _add(table, "acknowledged", _acknowledged_text(peers.acknowledged))
    if peers.gap is not None:
        first, last = peers.gap
        records = f"record {first} was" if first == last else f"records {first} to {last} were"
        _add(table, "gap", f"{records} in no peer's memory", "yellow")
    kept = [f"{node} {ranks_text(ranks)} to record {record}" for node, ranks, record in peers.kept]
    _add(table, "kept here", "; ".join([f"{nbytes_text(peers.held_bytes)} of other nodes", *kept]))
    _show_links(table, peers.links)
    _add(table, "traffic", _traffic_text(peers))
    if peers.refused:
        refused = f"{count(peers.refused, 'message')} of strangers or former processes, damaged, or beyond a limit"
        _add(table, "refused", refused, "yellow")


def _acknowledged_text(acknowledged: Iterable[tuple[RankGroup, int]]) -> str:
    """Ranks grouped by their newest acknowledged record: a thousand nodes at the same record share one entry."""
    records: dict[int, list[int]] = {}
    for ranks, record in acknowledged:
        records.setdefault(record, []).extend(ranks)
    return "; ".join(f"record {record} of {ranks_text(records[record])}" for record in sorted(records, reverse=True))


def _show_links(table: Table, links: Sequence[PeerLinkStatus]) -> None:
    """Add a row for each node; many healthy ones share one row."""
    well = [link for link in links if link.connected and not link.problem]
    folded = well if len(well) > _ROWS else []
    for link in links:
        if link not in folded:
            _add(table, f"peer {link.node}", _link_text(link), "" if link in well else "red")
    if folded:
        behind = max(link.behind_bytes for link in well)
        most = f", at most {nbytes_text(behind)} behind" if behind else ""
        _add(table, "all others" if len(well) < len(links) else "all peers", f"{len(well)} connected{most}")


def _link_text(link: PeerLinkStatus) -> str:
    silent, well = link.seconds_silent, link.connected and not link.problem
    parts = ["connected" if link.connected else "not connected"]
    if not well:
        parts.append("never heard" if silent is None else f"silent for {seconds_text(silent)}")
    if link.behind_bytes:
        parts.append(f"{nbytes_text(link.behind_bytes)} behind")
    if well and silent is not None and silent >= _SILENT_SECONDS:
        parts.append(f"silent for {seconds_text(silent)}")
    return ", ".join(parts) + (f": {link.problem}" if link.problem else "")


def _traffic_text(peers: PeersStatus) -> str:
    parts = [f"{nbytes_text(peers.bytes_sent)} sent"]
    if peers.bytes_per_record is not None:
        parts.append(f"{nbytes_text(peers.bytes_per_record)} a record")
    if peers.rate_limit_bytes_per_second is not None:
        parts.append(f"at most {nbytes_text(peers.rate_limit_bytes_per_second)}/s")
    return ", ".join([*parts, *filter(None, [peers.pace])])
