"""The replicator's event loop: it sends its node's records to the holders of their fragments, and keeps others'.

It is a process because the erasure code holds Python's lock, and dies with its agent: a node is lost as a whole.
"""

from __future__ import annotations

import contextlib

import zmq

from memckpt.errors import AgentError
from memckpt.memory.pages import LifePage, LifeWatch, PhaseReader, PhasesPage, look_seconds
from memckpt.memory.region import Region
from memckpt.processes.event_loop import EventLoop
from memckpt.processes.helper import AgentEnd
from memckpt.protocol import replication as protocol
from memckpt.protocol.channel import AgentToReplicator, ReplicatorChannel
from memckpt.protocol.descriptors import raise_limit
from memckpt.protocol.replication import Describe, Fill, FromFragments, Join, Listen, Listening, PeerKeys, PhasesAre
from memckpt.protocol.status import PeerLinkStatus, PeersReport, PeersStatus
from memckpt.replication.keeping.fragment_store import FragmentMemory, FragmentStore
from memckpt.replication.keeping.kept_window import KeptWindow
from memckpt.replication.keeping.outgoing import close_all
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.process.node import ReplicationNode
from memckpt.replication.process.questions import MOST_QUESTIONS, Answering, Fetching, Question
from memckpt.replication.transport import messages
from memckpt.replication.transport.transport import Delivery, Met, Transport
from memckpt.state.records import HeldFragments

#: How often the agent is told how things are.
_REPORT_SECONDS = 1.0
#: How long peers may take to receive the final records of a training, in seconds.
_DRAIN_SECONDS = 5.0
#: Messages of peers that are handled before the loop looks at its agent.
_MOST_DELIVERIES = 256


class Replicator:
    """The event loop of a replicator. Belongs to one thread. The channel and both pages of life are the caller's."""

    def __init__(
        self, channel: ReplicatorChannel, life: LifePage | None = None, agent: LifeWatch | None = None
    ) -> None:
        self._channel, self._agent = channel, agent
        #: The transport registers its sockets.
        self._poller = zmq.Poller()
        self._loop = EventLoop(life, poller=self._poller)
        self._loop.beat_seconds = 1.0
        self._loop.attend(channel, self._hear_agent)
        self._loop.each_turn(self._work, self._deadline)
        self._transport: Transport | None = None
        self._node = ""
        self._memory = FragmentMemory(channel)
        self._store = FragmentStore("", self._memory)
        self._member: ReplicationNode | None = None
        self._answering = Answering()
        self._fetching = Fetching()
        self._phases: PhasesPage | None = None
        self._marks: PhaseReader | None = None
        self._reported = 0.0
        self._security = ""
        self._draining_until: float | None = None

    def run(self) -> None:
        """Serve until the agent is gone; that raises AgentGoneError."""
        while True:
            self._loop.turn()

    def _hear_agent(self) -> None:
        # All that is there: the agent sends some messages a step, and queues no more than HelperProcess allows. Peers
        # are not trusted that far, so that their messages have a limit.
        while (received := self._channel.poll()) is not None:
            self._handle(*received)

    def _work(self) -> None:
        self._take_deliveries()
        now = self._loop.clock()
        if self._draining_until is not None:
            self._drain(now)
        elif self._member is not None:
            if self._marks is not None:
                for mark in self._marks.read():
                    self._member.pacer.mark_phase(mark.step, mark.phase, mark.ns, mark.position)
            if self._transport is not None:
                self._member.unheard = self._transport.silent
            self._look_at_agent()
            self._member.work(now)
            self._report(now)
        self._fetching.tend(now)
        if self._member is not None:
            self._answering.answer_all(self._member.mail, self._store)
        for news in self._fetching.take_news():
            self._channel.send(news)

    def _look_at_agent(self) -> None:
        assert self._member is not None
        if self._agent is not None and self._agent.stands_still():
            self._member.deserted = "its agent stands still"

    def _drain(self, now: float) -> None:
        """Tell the agent once peers have received what is on its way to them, or time is up."""
        assert self._draining_until is not None
        peers = [] if self._transport is None else list(self._transport.peers().values())
        if now >= self._draining_until or not any(peer.link.unacknowledged_messages for peer in peers):
            self._draining_until = None
            self._leave_attempt()
            self._channel.send(protocol.Drained())

    def _deadline(self) -> float | None:
        now = self._loop.clock()
        limits = []
        if self._transport is not None:
            limits.append(self._transport.tend(now))
        if self._member is not None:
            limits += [self._member.patience(now), self._reported + _REPORT_SECONDS - now]
        if self._fetching.busy:
            limits.append(1.0)
        if self._draining_until is not None:
            limits.append(0.05)  # what arrives wakes us, but not that a peer is gone
        return now + min(limits) if limits else None

    def close(self) -> None:
        """Close everything; what is kept for others stays with the agent."""
        self._leave_attempt()
        self._store.unmap()
        self._memory.close()
        self._loop.close()

    def _close_phases(self) -> None:
        phases, self._phases, self._marks = self._phases, None, None
        if phases is not None:
            phases.close()

    def _leave_attempt(self) -> None:
        self._fetching.stop()
        self._answering.close()
        self._memory.halt()
        self._close_phases()
        if self._member is not None:
            self._member.close()
            self._member = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._store.end_attempt()

    # What the agent says

    def _handle(self, message: AgentToReplicator, fds: list[int]) -> None:
        if isinstance(message, PhasesAre):
            self._close_phases()
            self._phases = PhasesPage.open(fds[0])
            self._marks = PhaseReader(self._phases)
            return
        regions = [Region.open(fd) for fd in fds]
        match message:
            case protocol.KeepRoom():
                self._memory.inherit(message, regions[0])
            case Listen():
                self._listen(message)
            case Join():
                self._join(message)
            case protocol.ListFragments():
                self._channel.send(protocol.Fragments(self._list_fragments(message.fingerprints)))
            case protocol.SendGeneration():
                self._send_generation(message, regions)
            case protocol.SendRecord():
                if self._member is not None:
                    self._member.deserted = ""
                    self._member.committed(message)
            case protocol.Deserted():
                if self._member is not None:
                    self._member.deserted = "its trainers go on without their agent"
            case protocol.StateCopied() | protocol.StateNotCopied():
                self._take_copy(message, regions)
            case protocol.GiveUp():
                if self._member is not None:
                    self._member.give_up(message)
                self._channel.send(protocol.GivenUp(message.ranks, message.generation))
            case protocol.Holds():
                self._memory.own_bytes = message.nbytes
            case protocol.Drain():
                self._draining_until = self._loop.clock() + _DRAIN_SECONDS
                if self._member is not None and message.finished:
                    self._member.leave_attempt(self._loop.clock())
            case Describe():
                assert self._member is not None
                self._fetching.describe(message, self._member.mail, self._loop.clock())
            case Fill():
                self._fill(message, regions)
            case protocol.Halt():
                self._leave_attempt()
                self._channel.send(protocol.Halted())
            case _:
                raise AgentError(f"unexpected {type(message).__name__} from the agent")

    def _listen(self, message: Listen) -> None:
        self._leave_attempt()
        self._memory.budget = message.memory_budget_bytes
        self._security = "curve" if isinstance(message.keys, PeerKeys) else "plain"
        self._node = message.node
        self._loop.beat_seconds = look_seconds(message.liveness_seconds)
        if self._agent is not None:
            self._agent.limit = message.liveness_seconds
        self._store.node = message.node
        self._memory.hand_over(self._store)
        self._transport = Transport(message.node, message.host, message.port, keys=message.keys)
        self._channel.send(Listening(self._transport.address))

    def _join(self, message: Join) -> None:
        assert self._transport is not None
        if self._member is not None:
            self._fetching.stop()  # with the member goes its code, by which readers decode
            self._member.close()
        self._member = ReplicationNode(
            self._node,
            message,
            self._store,
            self._transport,
            self._tell_watermark,
            self._channel.send,
        )
        # Not before: nothing is taken without a plan, and what waits would keep the loop awake.
        self._transport.register(self._poller)
        for name, peer in self._transport.peers().items():
            if peer.link.met and name in self._member.plan.addresses:  # met before the plan was made once more
                self._member.met(name)

    def _tell_watermark(self, advanced: protocol.WatermarkAdvanced) -> None:
        if advanced.whole:
            self._answering.stop_handing_out()  # all have what they restore
        self._channel.send(advanced)

    def _report(self, now: float) -> None:
        if self._member is None or self._transport is None or now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        self._channel.send(PeersReport(describe(self._member, self._security, str(self._fetching))))

    def _list_fragments(self, fingerprints: dict[int, tuple[str, ...]]) -> tuple[HeldFragments, ...]:
        def fingerprint_of(window: KeptWindow) -> tuple[str, ...] | None:
            return next((fingerprints[rank] for rank in window.window.owner if rank in fingerprints), None)

        return self._store.held(fingerprint_of)

    def _send_generation(self, message: protocol.SendGeneration, regions: list[Region]) -> None:
        if message.serve:
            self._answering.hand_out(message, regions)
        elif self._member is not None:
            self._member.deserted = ""
            self._member.begin_generation(message, regions)
        else:
            close_all(regions)

    def _take_copy(self, message: protocol.StateCopied | protocol.StateNotCopied, regions: list[Region]) -> None:
        states = self._member.states if self._member is not None else None
        if states is None:
            close_all(regions)
        elif isinstance(message, protocol.StateNotCopied):
            states.miss(message.record, "the order came too late, or storage was being served")
        else:
            states.take_copy(message, regions)

    def _fill(self, message: Fill, regions: list[Region]) -> None:
        assert self._member is not None
        source = message.wanted.source
        # What a node hands out live is not encoded: any code does.
        code = self._member.code_for(source.data if isinstance(source, FromFragments) else self._member.job.data)
        self._fetching.fill(message, regions, code, self._member.mail, self._loop.clock())

    # What peers say

    def _take_deliveries(self) -> None:
        if self._transport is None or self._member is None:
            return  # before the attempt has its plan nothing is taken; it waits where it is
        now = self._loop.clock()
        for _ in range(_MOST_DELIVERIES):
            loopback = self._member.mail.loopback
            event = loopback.popleft() if loopback else self._transport.receive()
            if event is None:
                return
            if event.peer not in self._member.plan.addresses:
                self._member.refuse(f"{event.peer}: no node of this job")
                self._transport.forget_peer(event.peer)
            elif isinstance(event, Met):
                self._answering.drop_questions(event.peer)  # whoever had asked is gone
                self._member.met(event.peer)
            else:
                self._deliver(event, now)

    def _deliver(self, delivery: Delivery, now: float) -> None:
        assert self._member is not None
        peer = delivery.peer
        try:
            message = messages.decode(delivery.body)
        except ValueError as error:  # of msgspec, or of text that is no UTF-8
            self._member.refuse(f"{peer}: {error}")
            return
        match message:
            case messages.AskManifest() | messages.Get() | messages.AskWindow():
                self._answer(peer, message)
            case messages.Manifest() | messages.Got() | messages.WindowIs() | messages.GotNone():
                self._fetching.take_answer(peer, message, delivery.payload, now)
            case _:
                self._member.handle(peer, message, delivery.payload, now)

    def _answer(self, peer: str, question: Question) -> None:
        assert self._member is not None
        if self._answering.add_question(peer, question):
            self._answering.answer_peer(peer, self._member.mail, self._store)
        else:
            self._member.refuse(f"{peer}: more than {MOST_QUESTIONS} questions whose answers it does not take")


def main(end: AgentEnd) -> None:
    raise_limit()
    with contextlib.closing(Replicator(end.channel, end.life, end.agent)) as replicator:
        replicator.run()


def describe(node: ReplicationNode, security: str, recovering: str) -> PeersStatus:
    """A node's replication, as it is shown; `recovering`: what is being fetched, in words; empty if nothing is."""
    job = node.job
    senders = node.senders
    sizes = [sender.last_record_bytes for sender in senders if sender.last_record_bytes is not None]
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
        rate_limit_bytes_per_second=node.pacer.rate_limit,
        pace=node.pacer.reason,
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
            node=name,
            connected=bool(peer.link.met) and not peer.link.down and not peer.silent,
            behind_bytes=peer.link.unacknowledged_bytes,
            seconds_silent=peer.heard_seconds if peer.link.met else None,
            problem=problems.get(name, ""),
        )
        for name, peer in sorted(node.transport.peers().items())
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
    if left := node.laggards.overdue.nodes | node.laggards.away.nodes:
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
