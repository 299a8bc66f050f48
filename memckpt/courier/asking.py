"""Asks of which layout a state is that is to be read from peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from memckpt.agent.peer_messages import BadSourceSeen, Described, UnitSource
from memckpt.courier.reader import LIVE_ALL, LIVE_SHARED, PATIENCE_SECONDS
from memckpt.peers.wire import AskWindow, Got, GotNone, Manifest, WindowIs, WireMessage
from memckpt.state.layout import StateSpec


class Asking:
    """One question to all that have the state: what most of them say counts.

    Attributes:
        request: the question's number.
        result: None until it is there.
    """

    def __init__(self, source: UnitSource, request: int, send: Callable[[str, WireMessage], None], now: float) -> None:
        self._source = source
        self.request = request
        self._started = now
        self._said: dict[str, bytes | None] = {}
        generation = LIVE_ALL if source.live is not None else source.generation
        self._nodes = {source.live} if source.live is not None else {node for node, _ in source.pieces}
        #: Of the node and ranks that have the rest, where pieces have only what is these ranks' own.
        self._replica = source.replica if source.live is None and source.private else None
        self._replica_spec: bytes | None = None
        self.result: Described | None = None
        if self._replica is not None:
            node, ranks = self._replica
            send(node, AskWindow(request, ranks, LIVE_SHARED))
        for node in sorted(one for one in self._nodes if one is not None):
            send(node, AskWindow(request, source.ranks, generation))

    def answered(self, peer: str, message: Manifest | Got | WindowIs | GotNone, now: float) -> None:
        """A source has said something."""
        if self._replica is not None and isinstance(message, WindowIs) and (peer, message.owner) == self._replica:
            self._replica_spec = message.spec
        elif peer in self._nodes:
            self._said[peer] = message.spec if isinstance(message, WindowIs) else None
        if set(self._said) >= self._nodes and (self._replica is None or self._replica_spec is not None):
            self._count()

    def tend(self, now: float) -> None:
        """After a while, those count that have answered."""
        if self.result is None and now - self._started > PATIENCE_SECONDS:
            self._count()

    def _count(self) -> None:
        ranks = self._source.ranks
        votes = Counter(one for one in self._said.values() if one is not None).most_common(2)
        silent = {node for node in self._nodes if node is not None and self._said.get(node) is None}
        if not votes or (len(votes) > 1 and votes[0][1] == votes[1][1]):
            problem = f"ranks {list(ranks)}: nobody says what their state consists of"
            if votes:
                problem = f"ranks {list(ranks)}: peers say different things of what their state consists of"
            self.result = Described(ranks, None, problem, self._bad(silent))
            return
        try:
            spec = msgspec.msgpack.decode(votes[0][0], type=StateSpec)
        except ValueError as error:  # of msgspec, or of text that is no UTF-8
            self.result = Described(ranks, None, f"ranks {list(ranks)}: {error}", self._bad(set(self._said)))
            return
        problem = self._differs(spec)
        if problem and self._replica is not None:
            node, others = self._replica
            self.result = Described(ranks, None, problem, (BadSourceSeen(node, others, ""),))
            return
        self.result = Described(ranks, spec, "", self._bad(silent))

    def _differs(self, spec: StateSpec) -> str:
        """Why the bytes of the replica do not fit where they are to go, in words; empty if they do."""
        if self._replica is None:
            return ""
        node, ranks = self._replica
        if self._replica_spec is None:
            return f"{node} does not say what the state of ranks {list(ranks)} consists of"
        try:
            other = msgspec.msgpack.decode(self._replica_spec, type=StateSpec)
        except ValueError as error:  # of msgspec, or of text that is no UTF-8
            return f"{node}: the layout of ranks {list(ranks)} cannot be read: {error}"
        ours, theirs = ((one.params, one.optimizers, one.static, one.period) for one in (spec, other))
        return "" if ours == theirs else f"ranks {list(ranks)} on {node} are protected with another layout"

    def _bad(self, nodes: set[str]) -> tuple[BadSourceSeen, ...]:
        return tuple(BadSourceSeen(node, self._source.ranks, self._source.generation) for node in sorted(nodes))
