"""The page of ``memckpt status --watch``: a run at a glance."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from memckpt.cli.common import count, no_agent, seconds_text
from memckpt.cli.events import style_of, words_of
from memckpt.cli.run_view import Stored, View, alarms_of
from memckpt.journal.events import Entry, Sample
from memckpt.protocol.status import PeersStatus, Status
from memckpt.user_messages import nbytes_text

_BARS = "▁▂▃▄▅▆▇█"
#: Widest bar, in characters.
_BAR_WIDTH = 16
#: Least and usual number of events that are shown.
_EVENTS_AT_LEAST, _EVENTS = 3, 10


def page(view: View, entries: Sequence[Entry], console: Console) -> Group:
    """All of a run, with its journal (oldest first), on a page that fits the console if that is high enough."""
    parts: list[RenderableType] = [_headline(view), *_problems(view), Text(), _tiers(view), Text()]
    if view.agent is not None and view.agent.recent_stalls:
        parts += [_stalls(view.agent.recent_stalls, console.width), Text()]
    if not view.finished:
        parts.append(_losses(view))
    used = sum(len(console.render_lines(part, pad=False)) for part in parts)
    room = console.height - used - 3  # a frame, and the cursor's line
    parts.append(_events(entries, min(_EVENTS, max(_EVENTS_AT_LEAST, room))))
    return Group(*parts)


def _headline(view: View) -> Text:
    text = Text(f"{view.address.run_dir} on {view.address.node}", style="bold")
    agent = view.agent
    if agent is not None:
        mode = f", {agent.mode}" if agent.mode else ""
        ranks = count(len(agent.trainers), "trainer") if agent.trainers else "no trainer"
        text.append(f"   {ranks}{mode}, agent up {seconds_text(agent.uptime_seconds)}", style="dim")
    return text


def _problems(view: View) -> list[Text]:
    if view.agent is None:
        return [Text(view.agent_problem or no_agent(view.address), style="" if view.finished else "yellow")]
    problems = list(alarms_of(view.agent))
    if not view.agent.trainers:
        problems.insert(0, "no trainer is connected")
    return [Text(f"! {problem}", style="bold red") for problem in problems]


# Tiers


def _tiers(view: View) -> Table:
    """A row a tier: newest step, its age, how far behind training, whether that is well."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, expand=True, pad_edge=False, header_style="bold")
    for name, justify in (("tier", "left"), ("newest", "right"), ("age", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # one of the literals that rich takes
    table.add_column("behind training", ratio=1, no_wrap=True)
    table.add_column("state", ratio=1, overflow="fold")
    agent = view.agent
    if agent is not None:
        _add_memory(table, agent, view.lag_records)
        if agent.peers is not None:
            _add_peers(table, agent, agent.peers)
    if view.stored is not None:
        _add_storage(table, view, view.stored)
    return table


def _add_memory(table: Table, agent: Status, lag: int | None) -> None:
    since = agent.seconds_since_commit
    age = "" if since is None else seconds_text(since)
    newest = "" if agent.step is None else f"step {agent.step}"
    state = Text("nothing is held yet", style="yellow")
    if agent.unprotected:
        state = Text("not protected", style="bold red")
    elif agent.step is not None:
        state = Text(f"{count(agent.records_held, 'record')}, {nbytes_text(agent.held_bytes)}", style="green")
    table.add_row("memory", newest, age, "", state)
    if agent.applied is not None and lag is not None:
        limit = max(1, agent.slots - 1)
        drift = f"drift {agent.max_drift_ulp:g} ulp" if agent.max_drift_ulp else "no drift"
        table.add_row("  replica", f"record {agent.applied}", "", _bar(lag, limit, "record"), drift)


def _add_peers(table: Table, agent: Status, peers: PeersStatus) -> None:
    newest = agent.newest_committed
    known = peers.watermark
    bar: RenderableType = ""
    if newest is not None and known is not None:
        bar = _bar(max(0, newest - known), 2 * peers.every if peers.every > 1 else max(1, agent.slots), "record")
    connected = sum(link.connected for link in peers.links)
    well = Text(f"protected, {connected} of {len(peers.links)} connected", style="green")
    state = well if peers.protected else Text(peers.problem or "not protected", style="bold red")
    table.add_row("peers", "" if known is None else f"record {known}", "", bar, state)


def _add_storage(table: Table, view: View, stored: Stored) -> None:
    tier = view.agent.storage if view.agent is not None else None
    if stored.problem:
        table.add_row("storage", "", "", "", Text(stored.problem, style="bold red"))
        return
    bar: RenderableType = ""
    age = None if stored.created is None else max(0.0, time.time() - stored.created)
    if view.steps_behind is not None and age is not None:
        # Full after two intervals: then a checkpoint is missing.
        share = age / (2 * tier.interval_seconds) if tier is not None and tier.interval_seconds else 0.0
        if tier is not None and tier.every_steps is not None:
            share = view.steps_behind / (2 * tier.every_steps)
        bar = _bar_of(share if view.steps_behind else 0.0, count(view.steps_behind, "step"))
    newest = "" if stored.step is None else f"step {stored.step}"
    if tier is not None and tier.alarm:
        state = Text("the last write failed", style="bold red")
    elif stored.damaged or stored.missing:
        state = Text("damaged: see memckpt verify", style="bold red")
    elif stored.step is None:
        state = Text("no checkpoint yet", style="yellow")
    else:
        writing = ", one is being written" if tier is not None and tier.saving else ""
        state = Text(f"{count(stored.checkpoints, 'checkpoint')}{writing}", style="green")
    table.add_row("storage", newest, "" if age is None else seconds_text(age), bar, state)


def _bar(behind: int, limit: int, noun: str) -> Table:
    return _bar_of(behind / limit, count(behind, noun))


def _bar_of(share: float, text: str) -> Table:
    """A bar that is full at 1, and changes its colour on the way there."""
    style = "green" if share < 0.75 else ("yellow" if share < 1 else "red")
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(max_width=_BAR_WIDTH)
    grid.add_column(no_wrap=True)
    bar = ProgressBar(total=1.0, completed=min(1.0, share), complete_style=style, finished_style=style)
    grid.add_row(bar, text)
    return grid


# The rest


def sparkline(values: Iterable[float]) -> str:
    """A character a value, from none to the largest."""
    values = list(values)
    most = max(values, default=0.0)
    if most <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)))] for value in values)


def _stalls(stalls: Sequence[float], width: int) -> Text:
    text = Text("stall  ", style="bold")
    shown = stalls[-max(8, width - 60) :]
    text.append(sparkline(shown), style="cyan")
    median, longest = statistics.median(stalls), max(stalls)
    text.append(f"  median {median:.1f} ms, longest {longest:.1f} ms of {count(len(stalls), 'commit')}", style="dim")
    return text


def _losses(view: View) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, expand=True, pad_edge=False, header_style="bold")
    table.add_column("if it died now", no_wrap=True)
    table.add_column("this would be lost", ratio=1, overflow="fold")
    for what, loss in losses_of(view).items():
        style = "green" if loss.steps == 0 else ("red" if loss.steps is None else "yellow")
        table.add_row(what, Text(loss.words, style=style))
    return table


def _events(entries: Sequence[Entry], number: int) -> Panel:
    shown = [entry for entry in entries if not isinstance(entry.event, Sample)][-number:]
    lines = Text(no_wrap=True, overflow="ellipsis")
    for position, entry in enumerate(shown):
        moment = time.strftime("%H:%M:%S", time.localtime(entry.envelope.time))
        lines.append(f"{moment}  ", style="dim")
        lines.append(words_of(entry.event), style=style_of(entry.event))
        lines.append("\n" if position < len(shown) - 1 else "")
    if not shown:
        lines.append("no journal in the run directory", style="dim")
    return Panel(lines, title="last events", title_align="left", box=box.SIMPLE, padding=0)


# What would be lost


class Loss(NamedTuple):
    """What would be lost if something died now."""

    steps: int | None  #: steps that would be lost, at most; None: all of them, or not known
    words: str  #: the same, and what it depends on


def losses_of(view: View) -> dict[str, Loss]:
    """The loss with the trainer, the agent, the node (this one, with both), and the cluster (all nodes)."""
    agent = view.agent
    all_nodes = _without_memory(view)
    node = all_nodes if agent is None else _without_node(agent, all_nodes)
    trainer, own = node, node
    if agent is not None and agent.step is not None:
        trainer = _without_trainer(agent)
        if agent.trainers:
            own = Loss(0, "0 steps: training goes on, and gives its state to a new agent")
    return {"trainer": trainer, "agent": own, "node": node, "cluster": all_nodes}


def _without_trainer(agent: Status) -> Loss:
    if agent.unprotected:
        return Loss(None, f"all steps since step {agent.step}: training is not protected now")
    if agent.every > 1:
        return Loss(agent.every - 1, f"at most {count(agent.every - 1, 'step')}: each {agent.every}th is held")
    return Loss(0, "0 steps: only the one that is being taken")


def _without_node(agent: Status, all_nodes: Loss) -> Loss:
    """What is lost with this node if the others live on."""
    peers = agent.peers
    if peers is None:
        return all_nodes
    newest = agent.newest_committed
    if not peers.protected or peers.watermark is None or newest is None or agent.unprotected:
        return Loss(all_nodes.steps, f"{all_nodes.words}; other nodes do not protect this one now")
    if peers.every > 1:
        most = 2 * peers.every
        return Loss(most, f"about {count(most, 'step')} at most: other nodes get each {peers.every}th state")
    behind = max(0, newest - peers.watermark)
    return Loss(behind, f"{count(behind, 'step')}: other nodes have record {peers.watermark}")


def _without_memory(view: View) -> Loss:
    """What is lost if only storage is left."""
    agent, stored = view.agent, view.stored
    tier = agent.storage if agent is not None else None
    held = agent.step if agent is not None else None
    if stored is not None and stored.problem:
        return Loss(None, "not known: storage cannot be read")
    step = stored.step if stored is not None else (tier.step if tier is not None else None)
    if step is None:
        return Loss(None, "everything: there is no checkpoint in storage")
    if held is None or (agent is not None and agent.unprotected):
        return Loss(None, f"all steps since step {step}, which is in storage")
    behind = max(0, held - step)
    return Loss(behind, f"{count(behind, 'step')}: step {step} is in storage")
