"""A run's status as a table."""

from __future__ import annotations

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memckpt.cli.common import count, no_agent, plain_table, seconds_text, time_text
from memckpt.cli.peers import show_peers
from memckpt.cli.run_view import Stored, View
from memckpt.protocol.status import AuditStatus, Status, StorageStatus
from memckpt.user_messages import nbytes_text


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
    if agent.unprotected:
        table.add_row("unprotected", f"[red]{escape(agent.unprotected)}[/]")
    if agent.check:
        table.add_row("check", escape(agent.check))
    if agent.audit is not None:
        table.add_row("audit", _audit_text(agent.audit))
    committed = dict(agent.committed)
    for rank, pid in agent.trainers:
        record = f", committed record {committed[rank]}" if rank in committed else ""
        table.add_row(f"rank {rank}", f"pid {pid}{record}")
    if not agent.trainers:
        table.add_row("trainers", "none")
    if agent.advice:
        table.add_row("advice", escape(f"{agent.advice} would pay: {agent.advice_reason}"))
    if agent.journal:
        table.add_row("journal", f"[yellow]events are lost: {escape(agent.journal)}[/]")
    if agent.metrics:
        table.add_row("metrics", escape(agent.metrics))
    table.add_row("agent", f"pid {agent.pid}, up {seconds_text(agent.uptime_seconds)}")


def _audit_text(audit: AuditStatus) -> str:
    found = f"[red]{count(audit.findings, 'finding')}[/]" if audit.findings else "no finding"
    last = "" if audit.record is None else f", the last one up to record {audit.record}"
    parts = [f"{count(audit.pieces, 'piece')} redone{last}", found, f"{audit.cpu_seconds:.1f} CPU s"]
    return ", ".join(parts) + (f"; [yellow]not all: {escape(audit.problem)}[/]" if audit.problem else "")


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
            table.add_row("mode", escape(f"{tier.mode}: records are not logged: {tier.reason}"))
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
