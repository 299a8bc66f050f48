"""A unit's records in real regions, its fragments at real holders, and a network that a test can tamper with."""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing
from memckpt.protocol.replication import Filled, SendGeneration, WantedState
from memckpt.replication.coding.code import Code
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.kept_window import sizes_of
from memckpt.replication.keeping.outgoing import Outgoing, Part, RegionSource
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.process.questions import Answering
from memckpt.replication.process.reader import PATIENCE_SECONDS, Reader
from memckpt.replication.transport import messages
from memckpt.state.layout import Layout
from memckpt.state.records import Branch, RecordMeta, SubStep, Timeline, encode_meta
from memckpt.state.spec import OptimizerSpec, OwnerSpec, ParamSpec, StateSpec, StateTensorSpec, TensorSpec

Bytes = bytes | memoryview
#: A node's answers to a question; a test may change them.
Answers = list[tuple[str, messages.WireMessage, Bytes]]
T1 = Timeline(1, "a")
RANKS = (0, 1)
#: What belongs to a record: its step, its scalars, and the states of ranks.
Held = tuple[int, bytes, dict[int, bytes]]
STRIPED = 36_000


def layout_spec(ranks: tuple[int, ...] = RANKS, elements: int = STRIPED, **other: object) -> StateSpec:
    """Records of several stripes, or of one with few elements: gradients, anchors, by-value and static tensors."""
    momentum = StateTensorSpec("momentum", (elements,), "float32", True, False)
    spec = StateSpec(
        params=(
            ParamSpec(TensorSpec("w", (elements,), "float32"), (OwnerSpec(0, 0, (momentum,)),), False, 0),
            ParamSpec(TensorSpec("b", (100,), "float32"), (OwnerSpec(0, 0, ()),), False, 0),
        ),
        optimizers=(OptimizerSpec("torch.optim", "SGD", b"", (2,), 1),),
        static=(TensorSpec("frozen", (elements,), "float32"),),
        by_value=(TensorSpec("buffer", (50,), "float32"),),
        mode="lazy",
        period=2,
        slots=3,
        local_ranks=ranks,
        world_size=4,
    )
    return msgspec.structs.replace(spec, **other)


class MemoryRoom:
    """Memory for fragments, in this process."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bytes = bytearray(nbytes)
        self.closed = False

    @property
    def map(self) -> bytearray:
        assert not self.closed
        return self._bytes

    def mapped_again(self) -> MemoryRoom:
        """The same memory, as another process would map it."""
        other = MemoryRoom(self.nbytes)
        other._bytes = self._bytes
        return other

    def close(self) -> None:
        self.closed = True


class MemoryRooms:
    """Makes such rooms."""

    def make_room(self, window: messages.Window, unit: int, slot: int, nbytes: int) -> MemoryRoom:
        return MemoryRoom(nbytes)

    def drop_room(self, window: messages.Window, slot: int) -> None:
        pass


class Records:
    """A unit's memory after some steps: random bytes, different in each record. :meth:`close` it."""

    def __init__(self, spec: StateSpec, base: int = 2, newest: int = 5, seed: int = 0) -> None:
        self.spec, self.layout = spec, Layout(spec)
        self.base, self.newest = base, newest
        numbers = random.Random(seed)
        sizes = [self.layout.slots_bytes, *([self.layout.static_bytes] if spec.static else [])]
        self.regions = [Region.create("test", nbytes) for nbytes in sizes]
        for region in self.regions:
            region.map[:] = numbers.randbytes(region.nbytes)
        self.ring = SlotRing(self.regions[0], self.layout, 1)
        self.held: dict[int, Held] = {}
        for record in range(base - spec.period + 1, newest + 1):
            self.fill(record)

    def fill(self, record: int) -> None:
        virtual = record <= self.base
        steps = () if virtual else tuple(SubStep(i, 0, b"") for i in range(len(self.spec.optimizers)))
        meta = encode_meta(RecordMeta(record, self.base if virtual else record - 1, virtual, steps))
        states = {rank: f"{rank} after {record}".encode() for rank in self.spec.local_ranks}
        for rank in self.spec.local_ranks:
            self.ring.seal(record, rank)
        self.held[record] = (100 + record, meta, states if record >= self.base else {})

    def source(self, part: Part = "all") -> RegionSource:
        """The records as a replicator reads them: through regions of its own on the same memory."""
        return RegionSource(self._message("", self.held), self.duplicates(), part)

    def _message(self, generation: str, records: dict[int, Held], serve: bool = False) -> SendGeneration:
        return SendGeneration(
            self.spec.local_ranks, generation, 1, self.spec, self.base, records, (), b"", (), serve=serve
        )

    def send(self, generation: str) -> SendGeneration:
        """The agent's message that a generation is complete."""
        return self._message(generation, self.held)

    def duplicates(self) -> list[Region]:
        return [Region.open(os.dup(region.fd)) for region in self.regions]

    def serve(self, record: int, before: bool = False) -> SendGeneration:
        """The agent's message that hands out a state, and with `before` the previous one."""
        oldest = record - before
        window = range(oldest - self.spec.period + 1, record + 1)
        records = {one: self.held[one] if one >= oldest else (*self.held[one][:2], {}) for one in window}
        return self._message("", records, serve=True)

    def window(self, generation: str, code: Code, *, node: str = "owner", private: bool = False) -> messages.Window:
        return messages.Window(
            owner=self.spec.local_ranks,
            node=node,
            generation=generation,
            attempt="a1",
            index=0,
            data=code.data,
            tolerate=code.tolerate,
            base=self.base,
            private=private,
            history=(Branch(T1, None),),
            spec=msgspec.msgpack.encode(self.spec),
        )

    def shared_bytes(self, record: int, regions: Sequence[Region]) -> bytes:
        """The bytes of a record's slot that every replica has, as they lie in some regions."""
        areas = [self.layout.anchor_area(record)]
        if record > self.base:
            areas += [self.layout.gradient_area(index, 0) for index in range(len(self.spec.optimizers))]
        return self._bytes(record, regions, areas)

    def own_bytes(self, record: int, regions: Sequence[Region]) -> bytes:
        """The bytes of a record's slot that are private to its ranks."""
        start = self.layout.by_value_base(record)
        return regions[0].map[start : start + self.layout.by_value_area()[1]]

    def _bytes(self, record: int, regions: Sequence[Region], areas: Sequence[tuple[int, int]]) -> bytes:
        start = self.layout.slot_offset(record)
        return b"".join(regions[0].map[start + offset : start + offset + nbytes] for offset, nbytes in areas)

    def close(self) -> None:
        for region in self.regions:
            region.close()


@dataclass
class Node:
    """A replicator as far as it answers questions."""

    name: str
    fragment_store: FragmentStore = field(init=False)
    answering: Answering = field(default_factory=Answering)

    def __post_init__(self) -> None:
        self.fragment_store = FragmentStore(self.name, MemoryRooms())

    def take(self, message: messages.WireMessage, payload: Bytes) -> messages.Stored | messages.NotStored | None:
        """Store a message of an owner."""
        match message:
            case messages.Open(window):
                return self.fragment_store.open(window)
            case messages.Put(fragments, step):
                return self.fragment_store.put(fragments, step, payload)
        raise AssertionError(message)

    def answer(self, question: messages.WireMessage) -> tuple[messages.WireMessage, Bytes]:
        assert isinstance(question, messages.AskManifest | messages.Get | messages.AskWindow)
        return self.answering.find_answer(question, self.fragment_store)

    def close(self) -> None:
        self.answering.close()
        self.fragment_store.drop_all()


def spread(records: Records, code: Code, nodes: Sequence[Node], *, private: bool = False) -> None:
    """Send all records to the holders of their fragments, as generation ``g``."""
    told: deque[tuple[str, messages.WireMessage | None]] = deque()
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        node.fragment_store.begin_attempt("a1", 0, code)

    def send(peer: str, message: messages.WireMessage, payload: Sequence[Bytes]) -> None:
        told.append((peer, by_name[peer].take(message, b"".join(payload))))

    owner = Sender(records.spec.local_ranks, code, list(by_name), send, lambda peer: 1, 0)
    window = records.window("g", code, private=private)
    source = records.source("private" if private else "all")
    first = records.base if private else records.base - records.spec.period + 1
    owner.begin_generation(Outgoing(window, sizes_of(records.spec, private), source, range(first, records.newest + 1)))
    for node in nodes:
        owner.met(node.name)
    while owner.pump(1 << 30):
        pass
    for peer, answer in told:
        if answer is not None:
            assert isinstance(answer, messages.Stored), answer
            owner.stored(peer, answer)
    assert owner.acknowledged == records.newest
    assert owner.whole
    owner.close()


#: Changes a node's answer: the node, the question, its true answer and payload.
Bend = Callable[[Node, messages.WireMessage, messages.WireMessage, Bytes], Answers]


def straight(node: Node, question: messages.WireMessage, answer: messages.WireMessage, payload: Bytes) -> Answers:
    return [(node.name, answer, payload)]


class Network:
    """Network between a reader and nodes; answers arrive in order, or in a random one."""

    def __init__(self, nodes: Sequence[Node], bend: Bend = straight, order: random.Random | None = None) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._bend = bend
        self._order = order
        self._questions: deque[tuple[str, bytes]] = deque()
        self._numbers = itertools.count(1)
        self.now = 1000.0
        self.steps: list[int] = []  # progress, as it was reported
        self.fetched: list[tuple[int, int]] = []  # bytes of the state, and bytes expected, at each arrival

    def send(self, peer: str, message: messages.WireMessage) -> None:
        self._questions.append((peer, messages.encode(message)))

    def number(self) -> int:
        return next(self._numbers)

    @property
    def progress(self) -> int:
        """Bytes that were reported."""
        return sum(self.steps)

    def answers(self) -> Answers:
        """Answers to the pending questions."""
        said: Answers = []
        while self._questions:
            peer, body = self._questions.popleft()
            if peer in self._nodes:
                node, question = self._nodes[peer], messages.decode(body)
                said += self._bend(node, question, *node.answer(question))
        if self._order is not None:
            self._order.shuffle(said)
        return [(peer, messages.decode(messages.encode(answer)), bytes(payload)) for peer, answer, payload in said]

    def read(self, wanted: WantedState, spec: StateSpec, code: Code) -> tuple[Filled, list[Region]]:
        """Read a state; the caller owns the regions with it."""
        layout = Layout(spec)
        sizes = [layout.slots_bytes, *([layout.static_bytes] if spec.static else [])]
        regions = [Region.create("test", nbytes) for nbytes in sizes]

        own = [Region.open(os.dup(region.fd)) for region in regions]
        reader = Reader(wanted, spec, own, code, self.send, self.number, self.now)
        for _ in range(200):
            while reader.result is None and (answers := self.answers()):
                for peer, answer, payload in answers:
                    assert isinstance(answer, messages.Manifest | messages.Got | messages.GotNone)
                    reader.take_answer(peer, answer, payload, self.now)
                    self.steps.append(reader.take_progress())
                    self.fetched.append((reader.taken_bytes, reader.expected_bytes))
            if reader.result is not None:
                break
            self.now += PATIENCE_SECONDS / 4
            reader.tend(self.now)
        reader.close()
        assert reader.result is not None, "it waits for nobody, and is not done"
        assert not [region for region in own if region.fd >= 0]
        return reader.result, regions
