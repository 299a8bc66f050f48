"""A node's replication, as it is shown to people and to the agent."""

from __future__ import annotations

from memckpt.protocol.status import PeerLinkStatus, PeersStatus
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.process.node import ReplicationNode


def describe(node: ReplicationNode, security: str, recovering: str) -> PeersStatus:
    """A node's replication, as it is shown.

    Args:
        node: the node.
        security: of the transport.
        recovering: what is being fetched, in words; empty if nothing is.
    """
    job = node.job
    senders = node.senders
    sizes = [sender.last_record_bytes for sender in senders if sender.last_record_bytes is not None]
    pace = node.pacer.state()
    return PeersStatus(
        scheme=f"erasure code, k={job.data}, m={job.tolerate}" if job.data > 1 else f"{job.tolerate + 1} copies",
        security=security,
        ack="wait" if job.wait else "proceed",
        watermark=node.watermark.record if node.watermark.record else None,
        acknowledged=tuple((sender.ranks, record) for sender in senders if (record := _newest_of(node, sender))),
        protected=node.watermark.whole,
        problem=_problem(node),
        held_bytes=node.store.nbytes,
        kept=node.store.kept(),
        links=_links(node),
        bytes_sent=node.transport.bytes_sent,
        bytes_per_record=float(sum(sizes)) if sizes else None,
        rate_limit_bytes_per_second=pace.rate_limit_bytes_per_second,
        pace=pace.reason,
        refused=sum(node.transport.refused.values()) + sum(node.refused.values()),
        gap=next((sender.gap for sender in senders if sender.gap is not None), None),
        recovering=recovering,
        every=node.watermark.every,
        needed=node.watermark.needed,
    )


def _newest_of(node: ReplicationNode, sender: Sender) -> int:
    """The newest record of a unit's that all its holders have, or whose state they have."""
    return max(sender.acknowledged, node.states.acknowledged_of(sender.ranks) if node.states is not None else 0)


def _links(node: ReplicationNode) -> tuple[PeerLinkStatus, ...]:
    problems: dict[str, str] = {}
    for sender in node.all_senders:
        problems |= sender.problems
    return tuple(
        PeerLinkStatus(
            node=peer,
            connected=bool(state.incarnation) and state.connected and not state.silent,
            behind_bytes=state.unacknowledged_bytes,
            seconds_silent=state.heard_seconds if state.incarnation else None,
            problem=problems.get(peer, ""),
        )
        for peer, state in sorted(node.transport.peers().items())
    )


def _problem(node: ReplicationNode) -> str:
    """Why not every node can be lost, in words; empty if each can."""
    if node.watermark.whole:
        return ""
    if node.deserted:
        return f"training goes on without the peers of this node: {node.deserted}"
    for sender in node.all_senders:
        for holder, problem in sender.problems.items():
            return f"{holder} does not keep the records of ranks {list(sender.ranks)}: {problem}"
    if left := node.laggards.overdue | node.laggards.away:
        return f"training does not wait for {', '.join(sorted(left))}, of which nothing comes"
    silent = [link.node for link in _links(node) if not link.connected]
    if silent:
        return f"nothing is heard of {', '.join(silent)}"
    if node.states is not None and node.states.ordered > node.states.acknowledged and node.states.problem:
        return f"the state after record {node.states.ordered} is not copied: {node.states.problem}"
    if any(node.is_late(sender.ranks) for sender in node.senders):
        return "training is so far ahead of its peers that it cannot go back to what they have"
    if node.leader is not None and (missing := node.leader.missing()):
        return f"the records of {', '.join(missing)} are not with all their peers yet"
    return "records are on their way"
