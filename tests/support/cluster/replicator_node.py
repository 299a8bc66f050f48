"""A replicator of one of three nodes, with its transport and its agent replaced by the test."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from typing import Any

import msgspec

from memckpt.protocol.replication import Join, PeerJob, PeerNode, PeerUnit
from memckpt.replication.coding.blob import STATIC
from memckpt.replication.coding.code import Code, seal_stripe
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.process.node import ReplicationNode
from memckpt.replication.process.replicator import Replicator
from memckpt.replication.transport import messages
from memckpt.replication.transport.transport import Delivery, Met
from tests.support.cluster.peers_records import MemoryRooms, Records, layout_spec

NODES = ("a", "b", "c")
FAR = 1 << 62


class Line:
    """Stand-in for a transport: received messages, and messages sent by peer."""

    def __init__(self) -> None:
        self.come: deque[Delivery | Met] = deque()
        self.sent: dict[str, list[messages.WireMessage]] = defaultdict(list)
        self.forgotten: list[str] = []
        self.hinted: set[str] = set()
        self.refused: Counter[str] = Counter()
        self.bytes_sent = 0
        self.rooms: dict[str, int] = {}
        self.unacknowledged: dict[str, int] = {}
        self.taken: Counter[str] = Counter()
        self.heard_at: dict[str, float | None] = {}

    def receive(self) -> Delivery | Met | None:
        return self.come.popleft() if self.come else None

    def send(self, peer: str, body: bytes, *payload: bytes | memoryview) -> None:
        assert peer in NODES, "its address is unknown"
        self.sent[peer].append(messages.decode(body))

    in_flight_bytes = 0

    def room(self, peer: str) -> int:
        return self.rooms.get(peer, 1)

    def progress(self, peer: str) -> tuple[int, int]:
        return self.unacknowledged.get(peer, 0), self.taken[peer]

    def heard(self) -> dict[str, float | None]:
        return dict(self.heard_at)

    def connect(self, *_: object) -> None:
        """Do nothing, as for an address, of which names are as good, and a poller."""

    address_of = register = unregister = close = connect

    def hint(self, peer: str, address: str) -> None:
        self.hinted.add(peer)

    def forget_peer(self, peer: str) -> None:
        self.forgotten.append(peer)

    def peers(self) -> dict[str, Any]:
        return {}


class Wire:
    """Stand-in for the channel to the agent."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        self.told: list[Any] = []

    def fileno(self) -> int:
        return self._ends[0]

    def send(self, message: Any, fds: object = ()) -> None:
        self.told.append(message)

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


class Node:
    """The replicator of one of three nodes, one rank on each; k = 2 and m = 1: each keeps a fragment of both others."""

    def __init__(self, name: str = "b") -> None:
        self.name = name
        self.now = 0.0
        self.line, self.wire = Line(), Wire()
        self.replicator = Replicator(self.wire)  # type: ignore[arg-type]
        self.fragment_store = FragmentStore(name, MemoryRooms())
        self.replicator._store = self.fragment_store
        self.replicator._node = name
        self.replicator._transport = self.line  # type: ignore[assignment]
        self.job = PeerJob(
            attempt="a1",
            nodes=tuple(PeerNode(one, "tcp://127.0.0.1:1", (one,)) for one in NODES),
            units=tuple(PeerUnit(index, (index,), False) for index in range(3)),
            data=2,
            tolerate=1,
            backend="",
            wait=True,
            rate_bytes_per_second=None,
            overhead=0.01,
            record=0,
        )
        self.replicator._join(Join(self.job))
        self.records = {rank: Records(layout_spec((rank,), elements=64), seed=rank) for rank in range(3)}
        self.code = Code(2, 1)

    @property
    def member(self) -> ReplicationNode:
        assert self.replicator._member is not None
        return self.replicator._member

    @property
    def refused(self) -> int:
        return sum(self.member.refused.values())

    def says(self, peer: str, *said: messages.WireMessage, payload: bytes = b"") -> list[messages.WireMessage]:
        """Receive a peer's messages; returns the replies to it."""
        before = len(self.line.sent[peer])
        for message in said:
            self.line.come.append(Delivery(peer, messages.encode(message), payload))
        while self.line.come or self.member.mail.loopback:
            self.replicator._take_deliveries()
        return self.line.sent[peer][before:]

    def index(self, owner: str) -> int:
        kept = dict(self.member.plan.placement.kept[NODES.index(self.name)])
        return kept[NODES.index(owner)]

    def window(self, owner: str, /, **other: Any) -> Any:
        told = self.records[NODES.index(owner)].window("g" + owner, self.code, node=owner)
        return msgspec.structs.replace(told, **{"index": self.index(owner), **other})

    def put(self, owner: str, record: int, **other: Any) -> tuple[messages.Put, bytes]:
        rank = other.pop("rank", NODES.index(owner))
        place = {"generation": "g" + owner, "owner": (rank,), "record": record, "stripe": 0, "stripes": 1}
        fragment, payload = seal_stripe(self.code, b"data of " + owner.encode(), **place)[self.index(owner)]
        return messages.Put((msgspec.structs.replace(fragment, **other),), 100), bytes(payload)

    def keep(self, owner: str, record: int) -> list[messages.WireMessage]:
        put, payload = self.put(owner, record)
        return self.says(owner, put, payload=payload)

    def send_own(self) -> None:
        """Write a generation of this node's own rank, and send all of it."""
        records = self.records[NODES.index(self.name)]
        self.member.begin_generation(records.send("own"), records.duplicates())
        for owner in self.member.senders:
            for peer in NODES:
                owner.met(peer)
            while owner.pump(1 << 30):
                pass

    def all_store(self, *records: int) -> None:
        rank = (NODES.index(self.name),)
        for peer in NODES:
            if peer != self.name:
                self.says(peer, *(messages.Stored(rank, "own", record) for record in (STATIC, *records)))
        self.member.work(0.0)

    def close(self) -> None:
        self.replicator._leave_attempt()
        self.replicator.close()
        self.wire.close()
        for records in self.records.values():
            records.close()
        self.code.close()
