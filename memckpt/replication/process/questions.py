"""What this node asks its peers (the layout of a state, and its bytes), and what it answers them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec
import xxhash

from memckpt.memory.region import Region
from memckpt.protocol.replication import (
    BadSourceSeen,
    Describe,
    Described,
    Fill,
    Filled,
    FromNode,
    RecoveryProgress,
    SendGeneration,
    WantedState,
)
from memckpt.replication.coding.blob import Blob
from memckpt.replication.coding.code import Code
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.outgoing import RegionSource
from memckpt.replication.process.reader import LIVE_ALL, LIVE_SHARED, PATIENCE_SECONDS, Answer, Reader
from memckpt.replication.process.send import Mail
from memckpt.replication.transport import messages
from memckpt.state.records import RankGroup
from memckpt.state.spec import StateSpec, read_spec


class Asking:
    """One question to all nodes that have the state: the answer of most counts. `number` makes unique numbers."""

    def __init__(
        self,
        wanted: WantedState,
        send: Callable[[str, messages.WireMessage], None],
        number: Callable[[], int],
        now: float,
    ) -> None:
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
        self._request, self._replica_request = number(), number()
        self.result: Described | None = None
        if self._replica is not None:
            node, ranks = self._replica
            send(node, messages.AskWindow(self._replica_request, ranks, LIVE_SHARED))
        for node in sorted(self._nodes):
            send(node, messages.AskWindow(self._request, wanted.ranks, self._generation or LIVE_ALL))

    def take_answer(self, peer: str, message: Answer) -> None:
        """Take a source's answer. Answers of other nodes, and second answers, do not count."""
        if self.result is not None:
            return
        spec = message.spec if isinstance(message, messages.WindowIs) else None
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


News = RecoveryProgress | Described | Filled


class Fetching:
    """The states that are being read for the newest recovery, and the layouts that are asked for it."""

    def __init__(self) -> None:
        #: Number of the recovery that all below work for.
        self._recovery = 0
        self._readers: list[Reader] = []
        self._asking: list[Asking] = []
        self._last_number = 0

    @property
    def busy(self) -> bool:
        return bool(self._readers or self._asking)

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def describe(self, message: Describe, mail: Mail, now: float) -> None:
        """Ask peers which layout a state has."""
        self._begin_recovery(message.recovery)
        self._asking.append(Asking(message.wanted, mail.send, self._number, now))

    def fill(self, message: Fill, regions: list[Region], code: Code, mail: Mail, now: float) -> None:
        """Read a state from peers into regions."""
        self._begin_recovery(message.recovery)
        self._readers.append(Reader(message.wanted, message.spec, regions, code, mail.send, self._number, now))

    def _begin_recovery(self, recovery: int) -> None:
        if recovery != self._recovery:
            self.stop()
            self._recovery = recovery

    def stop(self) -> None:
        """Read nothing more: nobody waits for it."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()
        self._asking.clear()

    def take_answer(self, peer: str, message: Answer, payload: bytes | memoryview, now: float) -> None:
        for asking in self._asking:
            asking.take_answer(peer, message)
        for reader in self._readers:
            reader.take_answer(peer, message, payload, now)

    def tend(self, now: float) -> None:
        """Give up peers that say nothing. To be called every second or so."""
        for reader in self._readers:
            reader.tend(now)
        for asking in self._asking:
            asking.tend(now)

    def take_news(self) -> list[News]:
        """What the agent is to know since the last call; readers that are through are closed."""
        news: list[News] = []
        for reader in list(self._readers):
            if nbytes := reader.take_progress():
                news.append(RecoveryProgress(nbytes))
            if reader.result is not None:
                self._readers.remove(reader)
                reader.close()
                news.append(msgspec.structs.replace(reader.result, recovery=self._recovery))
        for asking in list(self._asking):
            if asking.result is not None:
                self._asking.remove(asking)
                news.append(msgspec.structs.replace(asking.result, recovery=self._recovery))
        return news

    def __str__(self) -> str:
        """What is being read, and how far that is; empty if nothing is."""
        if not self._readers:
            return ""
        taken = sum(reader.taken_bytes for reader in self._readers)
        expected = sum(reader.expected_bytes for reader in self._readers)
        ranks = ", ".join(str(rank) for rank in sorted({rank for one in self._readers for rank in one.wanted.ranks}))
        record = self._readers[0].wanted.record
        return (
            f"ranks {ranks} from peers after record {record}, {taken / max(1, expected):.0%} of {expected / 1e6:.1f} MB"
        )


Question = messages.AskManifest | messages.Get | messages.AskWindow
#: An answer, and the bytes beside it.
Reply = tuple[messages.WireMessage, bytes | memoryview]


#: Limit on questions of one peer that wait until it has room for the answers.
MOST_QUESTIONS = 4096


class Answering:
    """Answers peers from kept fragments and states that stand still, whose regions it closes, as they have room."""

    def __init__(self) -> None:
        self._sources: dict[RankGroup, RegionSource] = {}
        self._blobs: dict[tuple[RankGroup, str, int], Blob] = {}
        self._waiting: dict[str, deque[Question]] = {}

    def hand_out(self, message: SendGeneration, regions: list[Region]) -> None:
        """Hand out this state from now on, and no other one of these ranks."""
        former = self._sources.pop(message.ranks, None)
        for key in [key for key in self._blobs if key[0] == message.ranks]:
            self._blobs.pop(key).release()
        if former is not None:
            former.close()
        self._sources[message.ranks] = RegionSource(message, regions)

    def stop_handing_out(self) -> None:
        for blob in self._blobs.values():
            blob.release()
        self._blobs.clear()
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def add_question(self, peer: str, question: Question) -> bool:
        """Queue a question; False: the peer has so many that it is not."""
        waiting = self._waiting.setdefault(peer, deque())
        if len(waiting) >= MOST_QUESTIONS:
            return False
        waiting.append(question)
        return True

    def answer_peer(self, peer: str, mail: Mail, store: FragmentStore) -> None:
        """Answer questions of a peer, as far as it has room."""
        waiting = self._waiting[peer]
        while waiting and mail.room(peer) > 0:
            message, payload = self.find_answer(waiting.popleft(), store)
            mail.send(peer, message, [payload])
        if not waiting:
            del self._waiting[peer]

    def answer_all(self, mail: Mail, store: FragmentStore) -> None:
        """Answer what peers have room for by now."""
        for peer in list(self._waiting):
            self.answer_peer(peer, mail, store)

    def drop_questions(self, peer: str) -> None:
        self._waiting.pop(peer, None)

    def close(self) -> None:
        self._waiting.clear()
        self.stop_handing_out()

    def find_answer(self, question: Question, store: FragmentStore) -> Reply:
        """The answer to a question: of what stands still here, or from fragments that are kept."""
        live = question.generation in (LIVE_ALL, LIVE_SHARED)
        found = self._find_live(question) if live else self._find_kept(question, store)
        return found if isinstance(found, tuple) else (messages.GotNone(question.request, found), b"")

    def _find_live(self, question: Question) -> Reply | str:
        source = self._sources.get(question.owner)
        if source is None:
            return f"ranks {list(question.owner)} are not handed out here"
        if isinstance(question, messages.AskWindow):
            return messages.WindowIs(question.request, question.owner, msgspec.msgpack.encode(source.spec)), b""
        key = question.owner, question.generation, question.record
        blob = self._blobs.get(key)
        if blob is None:
            blob = source.open(question.record, "all" if question.generation == LIVE_ALL else "shared")
            if blob is None:
                return f"record {question.record} is not here any more"
            self._blobs[key] = blob
        if isinstance(question, messages.AskManifest):
            return messages.Manifest(question.request, question.record, blob.nbytes, b""), b""
        if not 0 <= question.stripe < blob.stripes:
            return f"record {question.record} has {blob.stripes} stripes"
        stripe = blob.stripe(question.stripe)
        digest = xxhash.xxh3_128_digest(stripe)
        return messages.Got(question.request, question.record, question.stripe, None, digest), stripe

    @staticmethod
    def _find_kept(question: Question, store: FragmentStore) -> Reply | str:
        window = store.window(question.owner, question.generation)
        if window is None:
            return f"nothing is kept of generation {question.generation}"
        if isinstance(question, messages.AskWindow):
            return messages.WindowIs(question.request, question.owner, window.window.spec), b""
        if isinstance(question, messages.AskManifest):
            if (found := window.manifest(question.record)) is not None:
                return messages.Manifest(question.request, question.record, *found), b""
        elif (kept := window.fragment(question.record, question.stripe)) is not None:
            return messages.Got(question.request, question.record, question.stripe, kept[0]), bytes(kept[1])
        return f"record {question.record} is not complete here"
