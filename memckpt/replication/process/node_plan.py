"""One node's part in a job's plan: what it sends to whom, what it keeps for whom, and who leads."""

from __future__ import annotations

import msgspec

from memckpt.protocol.peer_job import PeerJob
from memckpt.protocol.replication import SendGeneration, StateCopied
from memckpt.replication.coding.placement import place
from memckpt.replication.keeping.windows import sizes_of
from memckpt.replication.transport.wire import (
    Abandon,
    Acknowledged,
    NotStored,
    Open,
    Put,
    Stored,
    Watermark,
    Whereabouts,
    Window,
    WireMessage,
)


class NodePlan:
    """One node's part in a job's plan. It does not change.

    Args:
        node: name of this node.
        job: the plan of the attempt.

    Attributes:
        addresses: all nodes of the job, by name.
        leader: name of the node that puts together what all have acknowledged.
        placement: who keeps whose fragments.
        holders: nodes that keep a fragment of this node's records, by the index of the fragment.
        own: units of this node, by their ranks.
        private: units of which only their ranks' own bytes are sent.
    """

    def __init__(self, node: str, job: PeerJob) -> None:
        self.node = node
        self.job = job
        self.addresses = {one.name: one.address for one in job.nodes}
        names = list(self.addresses)
        own = names.index(node)
        self.leader = names[0]
        self.placement = place([one.domain for one in job.nodes], job.data, job.tolerate)
        self.holders = tuple(names[other] for other in self.placement.holders(own))
        self.own = tuple(unit.ranks for unit in job.units if unit.node == own)
        self.private = frozenset(unit.ranks for unit in job.units if unit.private)
        kept = {names[owner]: index for owner, index in self.placement.kept_by(own)}
        self._owners = frozenset(kept)
        #: By unit, its node and which of the node's fragments is kept here.
        self._kept = {
            unit.ranks: (names[unit.node], kept[names[unit.node]]) for unit in job.units if names[unit.node] in kept
        }

    @property
    def leads(self) -> bool:
        """Whether this node is the leader."""
        return self.node == self.leader

    @property
    def partners(self) -> frozenset[str]:
        """Nodes with which this one exchanges messages all the time; it may be among them."""
        return frozenset(self.addresses) if self.leads else frozenset({*self.holders, *self._owners, self.leader})

    def window(self, message: SendGeneration | StateCopied) -> Window:
        """A generation of this node's records, or one of its states by value, as holders are told; for fragment 0."""
        spec, by_value = message.spec, isinstance(message, StateCopied)
        private = message.ranks in self.private and not by_value
        sizes = sizes_of(spec, private, by_value)
        return Window(
            owner=message.ranks,
            node=self.node,
            generation=message.generation,
            attempt=self.job.attempt,
            index=0,
            data=self.job.data,
            tolerate=self.job.tolerate,
            base=message.record if isinstance(message, StateCopied) else message.base,
            period=sizes.period,
            kept=sizes.kept,
            every=sizes.every,
            private=private,
            replicas=spec.serves,
            record_bytes=sizes.record_bytes,
            static=sizes.static,
            history=message.history,
            spec=msgspec.msgpack.encode(spec),
            by_value=by_value,
        )

    def unfit(self, peer: str, message: WireMessage) -> str:
        """Why a peer may not say something, in words; empty if it may."""
        job = self.job
        match message:
            case Open(window):
                expected = (*self._kept.get(window.owner, ("", 0)), job.data, job.tolerate)
                if (peer, window.index, window.data, window.tolerate) != expected or window.node != peer:
                    return f"fragment {window.index} of ranks {list(window.owner)} on {window.node} is not to be kept"
                if window.private != (window.owner in self.private):
                    return f"private={window.private} is not as planned"
                if window.by_value and (window.private or job.every_steps == 1):
                    return "no state by value of it is planned"
            case Put() | Abandon():
                owner = message.fragment.owner if isinstance(message, Put) else message.owner
                if self._kept.get(owner, ("", 0))[0] != peer:
                    return f"ranks {list(owner)} are not on it"
            case Stored() | NotStored():
                if message.owner not in self.own or peer not in self.holders:
                    return f"it keeps nothing of ranks {list(message.owner)} for this node"
            case Acknowledged():
                if not self.leads or message.node != peer:
                    return f"it speaks for {message.node}"
            case Watermark():
                if peer != self.leader or self.leads:
                    return "it does not lead"
            case Whereabouts():
                if message.node not in self.addresses or message.node == self.node:
                    return f"{message.node} is no other node of this job"
            case _:
                return "unexpected"
        return ""
