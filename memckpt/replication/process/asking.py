"""The layout of a state that is to be read from peers, as they describe it."""

from __future__ import annotations

from collections import Counter

from memckpt.protocol.recovery import BadSourceSeen, Described, FromNode, WantedState
from memckpt.replication.process.questions import Questions
from memckpt.replication.process.reader import LIVE_ALL, LIVE_SHARED, PATIENCE_SECONDS
from memckpt.replication.transport.wire import AskWindow, Got, GotNone, Manifest, WindowIs
from memckpt.state.received import read_spec
from memckpt.state.records import RankGroup
from memckpt.state.spec import StateSpec


class Asking:
    """One question to all nodes that have the state: the answer of most counts.

    Args:
        wanted: which state, and where it is.
        questions: how peers are asked.
        now: seconds of a clock that only goes forward.

    Attributes:
        requests: the numbers of what is asked.
        result: None until it is there.
    """

    def __init__(self, wanted: WantedState, questions: Questions, now: float) -> None:
        self._ranks = wanted.ranks
        self._started = now
        self._said: dict[str, bytes | None] = {}
        source = wanted.source
        #: Node and ranks that have the rest, where fragments hold only what is private to these ranks.
        self._replica: tuple[str, RankGroup] | None = None
        #: Generation of the fragments; empty where a node sends all.
        self._generation = ""
        if isinstance(source, FromNode):
            self._nodes = {source.node}
        else:
            self._nodes = {node for node, _ in source.fragments}
            self._generation, self._replica = source.generation, source.replica
        self._replica_said: list[bytes | None] = []
        self._request, self._replica_request = questions.number(), questions.number()
        self.requests = {self._request, self._replica_request}
        self.result: Described | None = None
        if self._replica is not None:
            node, ranks = self._replica
            questions.send(node, AskWindow(self._replica_request, ranks, LIVE_SHARED))
        for node in sorted(self._nodes):
            questions.send(node, AskWindow(self._request, wanted.ranks, self._generation or LIVE_ALL))

    def answered(self, peer: str, message: Manifest | Got | WindowIs | GotNone, now: float) -> None:
        """Take a source's answer. Answers of other nodes, and second answers, do not count."""
        if self.result is not None:
            return
        spec = message.spec if isinstance(message, WindowIs) else None
        if message.request == self._request and peer in self._nodes:
            self._said.setdefault(peer, spec)
        elif message.request == self._replica_request and self._replica is not None and peer == self._replica[0]:
            self._replica_said.append(spec)
        if set(self._said) >= self._nodes and (self._replica is None or self._replica_said):
            self._count()

    def tend(self, now: float) -> None:
        """Count the answers that are there, once the others are late."""
        if self.result is None and now - self._started > PATIENCE_SECONDS:
            self._count()

    def _count(self) -> None:
        ranks = self._ranks
        votes = Counter(one for one in self._said.values() if one is not None).most_common(2)
        silent = {node for node in self._nodes if self._said.get(node) is None}
        if not votes:
            problem = f"ranks {list(ranks)}: no node has told the layout of their state"
            self.result = Described(ranks, None, problem, self._bad(silent))
            return
        if len(votes) > 1 and votes[0][1] == votes[1][1]:
            problem = f"ranks {list(ranks)}: {', '.join(sorted(self._said))} describe their state differently"
            self.result = Described(ranks, None, problem, self._bad(self._nodes))
            return
        chosen = votes[0][0]
        try:
            spec = read_spec(chosen)
        except ValueError as error:
            self.result = Described(ranks, None, f"ranks {list(ranks)}: {error}", self._bad(self._nodes))
            return
        problem = self._differs(spec)
        if problem and self._replica is not None:
            node, others = self._replica
            bad = BadSourceSeen(node, others, "", not self._replica_said)
            self.result = Described(ranks, None, problem, (bad,))
            return
        self.result = Described(
            ranks, spec, "", self._bad({one for one in self._nodes if self._said.get(one) != chosen})
        )

    def _differs(self, spec: StateSpec) -> str:
        """Why the bytes of the replica do not fit the state's layout, in words; empty if they do."""
        if self._replica is None:
            return ""
        node, ranks = self._replica
        said = self._replica_said[0] if self._replica_said else None
        if said is None:
            return f"{node} has not told the layout of ranks {list(ranks)}"
        try:
            other = read_spec(said)
        except ValueError as error:
            return f"{node}: the layout of ranks {list(ranks)} cannot be read: {error}"
        ours, theirs = (
            (one.params, one.optimizers, one.static, one.period, one.mode == "snapshot") for one in (spec, other)
        )
        return "" if ours == theirs else f"ranks {list(ranks)} on {node} are protected with another layout"

    def _bad(self, nodes: set[str]) -> tuple[BadSourceSeen, ...]:
        said = self._said
        return tuple(BadSourceSeen(node, self._ranks, self._generation, node not in said) for node in sorted(nodes))
