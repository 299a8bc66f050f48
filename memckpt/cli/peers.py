"""The peer rows of ``memckpt status``: this node's records in other nodes' memory, and theirs in this one's."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from memckpt.cli.common import count, seconds_text
from memckpt.protocol.status import PeerLinkStatus, PeersStatus
from memckpt.state.records import RankGroup
from memckpt.user_messages import nbytes_text

#: Seconds of silence from which they are shown.
_SILENT_SECONDS = 5.0
#: Most healthy nodes with a row each; more share one row.
_ROWS = 8


def show_peers(table: Table, peers: PeersStatus) -> None:
    """Add the rows of the peers tier, protection first."""
    table.add_row("peers", _protection_text(peers))
    if peers.recovering:
        table.add_row("recovering", f"[yellow]{escape(peers.recovering)}[/]")
    table.add_row("scheme", escape(f"{peers.scheme}; {_security_text(peers.security)}; ack {peers.ack}"))
    if peers.every > 1 or peers.needed > 1:
        what = f"the whole state every {peers.every} steps" if peers.every > 1 else "every record"
        if peers.needed > peers.every:
            what += f"; [yellow]the links do not carry that: peers.every_steps={peers.needed} would do[/]"
        table.add_row("cadence", what)
    if peers.acknowledged:
        table.add_row("acknowledged", _acknowledged_text(peers.acknowledged))
    if peers.gap is not None:
        first, last = peers.gap
        records = f"record {first} was" if first == last else f"records {first} to {last} were"
        table.add_row("gap", f"[yellow]{records} in no peer's memory[/]")
    kept = [f"{escape(node)} {ranks_text(ranks)} to record {record}" for node, ranks, record in peers.kept]
    table.add_row("kept here", "; ".join([f"{nbytes_text(peers.held_bytes)} of other nodes", *kept]))
    _show_links(table, peers.links)
    table.add_row("traffic", _traffic_text(peers))
    if peers.refused:
        messages = count(peers.refused, "message")
        table.add_row("refused", f"[yellow]{messages} of strangers or former processes, or damaged[/]")


def _protection_text(peers: PeersStatus) -> str:
    newest = "nothing is acknowledged yet" if peers.watermark is None else f"record {peers.watermark} on every node"
    if peers.protected:
        return f"[bold]protected[/], {newest}" + (f"; [yellow]{escape(peers.problem)}[/]" if peers.problem else "")
    why = f": {escape(peers.problem)}" if peers.problem else ""
    return f"[red]not protected{why}[/]; {newest}"


def _security_text(security: str) -> str:
    return (
        "encrypted and authenticated (curve)"
        if security == "curve"
        else f"neither encrypted nor authenticated ({security})"
    )


def _acknowledged_text(acknowledged: Iterable[tuple[RankGroup, int]]) -> str:
    """Ranks grouped by their newest acknowledged record: a thousand nodes at the same record share one entry."""
    records: dict[int, list[int]] = {}
    for ranks, record in acknowledged:
        records.setdefault(record, []).extend(ranks)
    return "; ".join(f"record {record} of {ranks_text(records[record])}" for record in sorted(records, reverse=True))


def ranks_text(ranks: Iterable[int]) -> str:
    """``ranks 0-3, 8``."""
    numbers = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    spans = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank {spans}" if len(numbers) == 1 else f"ranks {spans}"


def _show_links(table: Table, links: tuple[PeerLinkStatus, ...]) -> None:
    well = [link for link in links if link.connected and not link.problem]
    folded = len(well) > _ROWS
    for link in links:
        if not (folded and link in well):
            table.add_row(f"peer {escape(link.node)}", _link_text(link))
    if folded:
        behind = max(link.behind_bytes for link in well)
        most = f", at most {nbytes_text(behind)} behind" if behind else ""
        table.add_row("all others" if len(well) < len(links) else "all peers", f"{len(well)} connected{most}")


def _link_text(link: PeerLinkStatus) -> str:
    silent = link.seconds_silent
    if link.connected and not link.problem:
        parts = ["connected" if not link.behind_bytes else f"connected, {nbytes_text(link.behind_bytes)} behind"]
        if silent is not None and silent >= _SILENT_SECONDS:
            parts.append(f"silent for {seconds_text(silent)}")
        return ", ".join(parts)
    state = "connected" if link.connected else "not connected"
    since = ", never heard" if silent is None else f", silent for {seconds_text(silent)}"
    behind = f", {nbytes_text(link.behind_bytes)} behind" if link.behind_bytes else ""
    problem = f": {escape(link.problem)}" if link.problem else ""
    return f"[red]{state}{since}{behind}{problem}[/]"


def _traffic_text(peers: PeersStatus) -> str:
    parts = [f"{nbytes_text(peers.bytes_sent)} sent"]
    if peers.bytes_per_record is not None:
        parts.append(f"{nbytes_text(peers.bytes_per_record)} a record")
    if peers.rate_limit_bytes_per_second is not None:
        parts.append(f"at most {nbytes_text(peers.rate_limit_bytes_per_second)}/s")
    if peers.pace:
        parts.append(escape(peers.pace))
    return ", ".join(parts)
