"""Asks of which layout a state is that is to be read from peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from memckpt.agent.peer_messages import BadSourceSeen, Described, UnitSource
from memckpt.courier.reader import LIVE_ALL, PATIENCE_SECONDS
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
        self.result: Described | None = None
        for node in sorted(one for one in self._nodes if one is not None):
            send(node, AskWindow(request, source.ranks, generation))

    def answered(self, peer: str, message: Manifest | Got | WindowIs | GotNone, now: float) -> None:
        """A source has said something."""
        if peer in self._nodes:
            self._said[peer] = message.spec if isinstance(message, WindowIs) else None
        if set(self._said) >= self._nodes:
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
        except msgspec.DecodeError as error:
            self.result = Described(ranks, None, f"ranks {list(ranks)}: {error}", self._bad(set(self._said)))
            return
        self.result = Described(ranks, spec, "", self._bad(silent))

    def _bad(self, nodes: set[str]) -> tuple[BadSourceSeen, ...]:
        return tuple(BadSourceSeen(node, self._source.ranks, self._source.generation) for node in sorted(nodes))
