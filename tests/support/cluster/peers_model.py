"""Model of several nodes in one process: a test delivers replicators' messages, and loses nodes.

Owners, holders, leaders and the code are real. In place of an agent's state there is a ring of slots with made-up
bytes, and by record the attempts that made the records up to it. With eager redo there is also a replica, which
advances when a test says so and no further than it may; its earlier states are lost.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from memckpt.protocol.replication import StateCopied
from memckpt.replication.coding.blob import Blob, Extent, RecordTail
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.state.records import Branch, HeldRecords
from memckpt.state.spec import StateSpec
from tests.support.cluster.peers_records import MemoryRooms
from tests.support.cluster.storage_node import spec_of

Unit = tuple[int, ...]
#: By record from 0 on, the attempts that made them; the first one started over.
Chain = tuple[str, ...]
#: Most bytes of a record.
MOST_BYTES = 400


@dataclass(frozen=True)
class Setting:
    """Protection of a job."""

    data: int
    tolerate: int
    nodes: int
    period: int = 2
    slots: int = 2
    private: bool = False
    wait: bool = True
    eager: bool = False
    repeat: bool = False
    every: int | None = 1

    def __str__(self) -> str:
        words = f"{self.data}+{self.tolerate} on {self.nodes}, T={self.period}, D={self.slots}"
        words += ", private" * self.private + ", proceed" * (not self.wait)
        return words + ", eager" * self.eager + ", repeat" * self.repeat + f", N={self.every}" * (self.every != 1)

    @property
    def trails(self) -> bool:
        """Whether a replica stays one record behind what it may apply."""
        return self.eager and self.repeat

    @property
    def standing(self) -> int:
        """Slots that a replica occupies, so that training waits earlier for acknowledgements."""
        return 1 + self.trails if self.eager else 0

    @property
    def units(self) -> list[Unit]:
        return [(rank,) for rank in range(self.nodes)]

    def spec(self, unit: Unit) -> StateSpec:
        """A layout with these parameters; the bytes of its records are made up."""
        spec = spec_of(unit, self.nodes)
        replicas = () if self.private else unit
        mode = "eager" if self.eager else spec.mode
        return msgspec.structs.replace(
            spec, period=self.period, slots=self.slots, replicas=replicas, mode=mode, trails=self.trails
        )


def bytes_of(unit: Unit, record: int, chain: Chain, virtual: bool) -> bytes:
    """A record's bytes: different for each unit, number, past and kind, and of varying length."""
    drawn = random.Random(repr((unit, record, chain, virtual)))
    return drawn.randbytes(drawn.randint(1, MOST_BYTES))


class Slots:
    """The ring of one generation. Staging a record destroys the previous content of its slot."""

    def __init__(self, ring: int) -> None:
        self._stamps: list[int | None] = [None] * ring
        self._bytes = [b""] * ring

    def open(self, record: int) -> None:
        self._stamps[record % len(self._stamps)] = None

    def seal(self, record: int, data: bytes) -> None:
        self._stamps[record % len(self._stamps)] = record
        self._bytes[record % len(self._stamps)] = data

    def intact(self, record: int) -> bool:
        return self._stamps[record % len(self._stamps)] == record

    def read(self, record: int) -> bytes:
        return self._bytes[record % len(self._stamps)]


class Generation:
    """Base and log of a unit on its node, also the source of its owner's records."""

    def __init__(self, name: str, unit: Unit, setting: Setting, base: int, past: Chain) -> None:
        self.name, self.unit, self.setting, self.base = name, unit, setting, base
        self.slots = Slots(setting.slots + (0 if setting.eager else setting.period))
        self.spec = setting.spec(unit)
        self.chains = {base: past}
        self.newest = self.applied = self.limit = base
        self.given_up = False
        virtual = range(base - setting.period + 1, base + 1)
        made = {record: bytes_of(unit, record, past, virtual=True) for record in virtual}
        #: The virtual records as cut out of the replica.
        self.replica = {record: bytearray(data) for record, data in made.items()} if setting.eager else {}
        for record in range(base, base + 1) if setting.eager else virtual:
            self.slots.seal(record, made[record])

    def commit(self, record: int, past: Chain) -> None:
        self.chains[record], self.newest = past, record
        self.slots.seal(record, bytes_of(self.unit, record, past, virtual=False))

    def redo(self) -> bool:
        """Let the replica apply the next record, if it may; returns whether it has."""
        if self.applied >= min(self.limit, self.newest):
            return False
        self.applied += 1
        assert self.slots.intact(self.applied)
        for data in self.replica.values():
            data[:] = bytes(len(data))
        return True

    def reach(self) -> list[int]:
        """Records whose window is complete; or which the replica can reach with by-value tensors in their slots."""
        if self.setting.eager:
            rest = range(self.applied + 1, self.newest + 1)
            broken = next((one for one in rest if not self.slots.intact(one)), self.newest + 1)
            return [record for record in range(self.applied, broken) if self.slots.intact(record)]
        period = self.setting.period
        oldest = max(self.base, self.newest - self.setting.slots)
        return [
            record
            for record in range(oldest, self.newest + 1)
            if all(self.slots.intact(one) for one in range(record - period + 1, record + 1))
        ]

    def sendable(self, watermark: int) -> list[int]:
        first = self.base - self.setting.period + 1
        there = [record for record in range(first, self.newest + 1) if self.intact(record)]
        stays = self.applied == self.limit == self.base and watermark < self.base
        if self.setting.eager and not stays:
            there = [record for record in there if record > self.base]
        return [one for one in there if one >= self.base] if self.setting.private else there

    # As a source

    def open(self, record: int) -> Blob | None:
        if not self.intact(record):
            return None
        virtual = record in self.replica and not self.setting.private
        data = self.replica[record] if virtual else self.slots.read(record)
        return Blob(RecordTail(10 * record, b"", {}, (Extent(0, len(data)),)), [memoryview(data)])

    def intact(self, record: int) -> bool:
        return (record in self.replica and record < self.base) or self.slots.intact(record)

    def step(self, record: int) -> int:
        return 10 * record

    def close(self) -> None:
        pass


class Taken:
    """A copy of a unit's state, as a replicator reads it; the message's `plain` names its makers."""

    def __init__(self, message: StateCopied, regions: list[Any]) -> None:
        self.message = message
        self.records = range(message.record - message.spec.period + 1, message.record + 1)

    def open(self, record: int) -> Blob:
        past = msgspec.msgpack.decode(self.message.plain, type=tuple[str, ...])
        data = bytes_of(self.message.ranks, record, past, virtual=True)
        return Blob(RecordTail(10 * record, b"", {}, (Extent(0, len(data)),)), [memoryview(data)])

    def close(self) -> None:
        pass


@dataclass
class Live:
    """A node's live state of a unit, as an agent holds it."""

    unit: Unit
    history: tuple[Branch, ...]
    generations: list[Generation] = field(default_factory=list)

    @property
    def newest(self) -> int:
        return self.generations[-1].newest if self.generations else -1

    def reach(self) -> dict[int, Chain]:
        return {record: one.chains[record] for one in self.generations for record in one.reach()}

    def begins_with(self, record: int) -> bool:
        """Whether the holder of a record began with it, so that nothing earlier exists."""
        return [one.base for one in self.generations if record in one.reach()][-1:] == [record]

    def repeats(self, record: int) -> bool:
        """Whether the holder of a record can produce the previous state, too."""
        there = [one for one in self.generations if record in one.reach()]
        return bool(there) and record - 1 in there[-1].reach()

    def let_go(self, watermark: int) -> None:
        """Drop old generations as an agent does."""
        while len(self.generations) > 1:
            base = self.generations[1].base
            if self.newest <= base + 1 or watermark < base:
                return
            self.generations.pop(0)

    def inventory(self, node: str, setting: Setting) -> HeldRecords:
        if not self.generations:
            return HeldRecords(node, ranks=self.unit)
        records = tuple(sorted(self.reach()))
        spec = setting.spec(self.unit)
        return HeldRecords(
            node,
            records,
            tuple(10 * one for one in records),
            self.unit,
            self.history,
            setting.nodes,
            newest=max(self.newest, 0),
            replicas=spec.replicas,
        )


class Node:
    """State that outlives attempts: fragments, and the agent's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fragment_store = FragmentStore(name, MemoryRooms())
        self.live: dict[Unit, Live] = {}


class Network:
    """A queue for each direction of each pair of nodes. The first message announces a peer.

    A node that comes back empty has lost messages in flight to it, and gets none from a peer until that has noticed.
    """

    def __init__(self, nodes: Collection[str]) -> None:
        self.queues: dict[tuple[str, str], deque[Any]] = {
            (one, other): deque([None]) for one in nodes for other in nodes if one != other
        }
        self._unnoticed: set[tuple[str, str]] = set()

    def send(self, sender: str, receiver: str, body: bytes, payload: bytes) -> None:
        if (sender, receiver) not in self._unnoticed:
            self.queues[sender, receiver].append((body, payload))

    def restart(self, node: str) -> None:
        for (sender, receiver), queue in self.queues.items():
            if node in (sender, receiver):
                queue.clear()
                queue.append(None)
            if node == receiver:
                self._unnoticed.add((sender, receiver))

    def pop(self, pair: tuple[str, str]) -> Any:
        """The next message of a pair; None: the sender's announcement."""
        message = self.queues[pair].popleft()
        if message is None:
            self._unnoticed.discard((pair[1], pair[0]))
        return message

    def unnoticed(self) -> bool:
        """Whether some node still sends to one that is gone."""
        return bool(self._unnoticed)

    def ready(self) -> list[tuple[str, str]]:
        return sorted(pair for pair, queue in self.queues.items() if queue)


class Port:
    """A node's end of the network, as seen by its member."""

    def __init__(self, network: Network, node: str, room: int) -> None:
        self._network, self._node, self._room = network, node, room

    def connect(self, *_: str) -> None:
        """Its names are its addresses."""

    address_of = connect

    def send(self, peer: str, body: bytes, *payload: bytes | memoryview) -> None:
        self._network.send(self._node, peer, body, b"".join(payload))

    in_flight_bytes = 0

    def progress(self, peer: str) -> tuple[int, None]:
        return 0, None

    def heard(self) -> dict[str, float | None]:
        return {}

    def room(self, peer: str) -> int:
        return self._room - len(self._network.queues[self._node, peer])
