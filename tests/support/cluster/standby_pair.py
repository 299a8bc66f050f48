"""An owner and its standby replica in one process: a training whose records go to another node's agent and replicator.

Work of other processes and the network happens here in the order that a test chooses; only the replicas' threads run by
themselves.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memckpt.agent.replication.standbys import StandbyReplicas
from memckpt.capture.copier import HostCopier
from memckpt.capture.live_state import LiveState
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.spec_request import SpecRequest
from memckpt.memory.generation import Generation
from memckpt.memory.generation_regions import Allowance, GenerationRegions
from memckpt.memory.region import Region
from memckpt.memory.replica import Replica
from memckpt.protocol.messages import Message
from memckpt.protocol.standby import (
    CloseStandby,
    OpenStandby,
    StandbyApplied,
    StandbyFailed,
    StandbyRecord,
    StandbySkip,
)
from memckpt.protocol.trainer import Commit, GenerationCommit
from memckpt.replication.coding.code import Code
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.outgoing import Outgoing
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.process.source import RegionSource
from memckpt.replication.process.standby_feed import StandbyFeed
from memckpt.replication.transport.wire import Abandon, NotStored, Open, Put, Stored, Window, WireMessage
from memckpt.state import codec
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import Branch, HeldRecords, RecordMeta, SubStep, Timeline, encode_meta
from memckpt.state.redo import tensor_at
from memckpt.state.spec import StateSpec

HISTORY = (Branch(Timeline(1, "a"), None),)
PERIOD, SLOTS = 3, 3
RANKS = (1,)


def mapped(region: Region) -> Region:
    """The same memory, as another process maps it."""
    return Region.open(os.dup(region.fd))


class Net(nn.Module):
    """Each half of `wide` is anchored by itself; `idle` has no gradient in every other record."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(90, 64))
        self.narrow = nn.Parameter(torch.randn(3))
        self.idle = nn.Parameter(torch.randn(5))
        self.fixed = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))


class Strict(Optimizer):
    """Optimizer that makes its state at once or not at all; some of it is not in tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                if not state:
                    state |= {"count": 0, "velocity": torch.zeros_like(param)}
                state["count"] += 1
                state["velocity"].mul_(0.9).add_(param.grad)
                param.sub_(state["velocity"] / state["count"], alpha=0.1)


class Training:
    """One rank of two, whose state is known after each record.

    Attributes:
        truth: by record: tensors by name, optimizer state by parameter, and the part of it that is not in tensors.
    """

    def __init__(self, mode: str, make_optimizer: Any, base: int, trails: bool = False) -> None:
        torch.manual_seed(0)
        self.mode: Any = mode
        self.trails = trails
        self.slots = SLOTS + (trails and mode == "eager")
        self.model = Net()
        self.optimizer = make_optimizer([param for param in self.model.parameters() if param.requires_grad])
        self.live = LiveState(self.model, [self.optimizer], {})
        self.truth: dict[int, dict[str, Any]] = {}
        self.record = 0
        self.number = 0
        self.generation: Generation | None = None
        self.writer: SlotWriter | None = None
        for _ in range(base):
            self._train()
        self.begin()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.generation is not None:
            self.generation.close()
        self.writer = self.generation = None

    @property
    def held(self) -> Generation:
        assert self.generation is not None
        return self.generation

    def spec(self) -> StateSpec:
        return self.live.spec(SpecRequest(self.mode, PERIOD, self.slots, RANKS, 2, RANKS, trails=self.trails))

    def begin(self) -> None:
        """Begin a generation after the newest record."""
        self.close()
        self.number += 1
        self.generation = Generation(self.number, self.spec(), Allowance(), threads=1, notify=lambda message: None)
        regions = GenerationRegions.of(self.held.layout, [mapped(region) for region in self.held.regions])
        self.writer = SlotWriter(regions, self.number, self.live, RANKS[0], HostCopier())
        metas, missing, plain = self.writer.start_generation(self.record)
        self.writer.seal_generation(self.record)
        self.held.redo_limit = self.record
        state = f"state {self.record}".encode()
        self.held.start(
            RANKS[0], GenerationCommit(self.number, self.record, 10 * self.record, state, metas, missing, plain)
        )

    def step(self) -> None:
        """Train and commit a record."""
        assert self.writer is not None
        record = self.record + 1
        if self.held.replica is not None:
            wait_applied(self.held.replica, record - self.slots)
        self.writer.ring.open_for_writing(record, RANKS[0])
        missing, plain = self.writer.stage_anchors(record)
        gradients = self._train()
        absent = []
        for index, param in enumerate(self.writer.params):
            gradient = gradients.get(id(param))
            if gradient is None:
                absent.append(index)
            else:
                self.writer.gradient_places.view(record, 0, 0, index).copy_(gradient)
        self.writer.stage_by_value(record)
        self.writer.ring.seal(record, RANKS[0])
        groups = codec.encode(hyperparameters(self.optimizer))
        meta = RecordMeta(record, record - 1, False, (SubStep(0, 0, groups, tuple(absent)),), missing, plain)
        state = f"state {record}".encode()
        self.held.commit(RANKS[0], Commit(self.number, record, 10 * record, state, encode_meta(meta)))

    def _train(self) -> dict[int, torch.Tensor]:
        self.record += 1
        generator = torch.Generator().manual_seed(self.record)
        gradients = {}
        self.optimizer.zero_grad()
        for param in self.optimizer.param_groups[0]["params"]:
            if param is not self.model.idle or self.record % 2:
                param.grad = torch.randn(param.shape, generator=generator)
                gradients[id(param)] = param.grad.clone()
        self.optimizer.step()
        self.model.mean += self.record
        states = {
            name: self.optimizer.state[param]
            for name, param in self.model.named_parameters()
            if param in self.optimizer.state
        }
        self.truth[self.record] = {
            "tensors": {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()},
            "states": {
                name: {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
                for name, state in states.items()
            },
            "plain": {
                name: found
                for name, state in states.items()
                if (found := {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)})
            },
        }
        return gradients


def wait_applied(replica: Replica, record: int) -> None:
    """Wait until redo has applied a record that it may apply."""
    with replica._condition:
        assert replica._condition.wait_for(lambda: replica.applied >= record or replica._broken is not None, 60)


def wait_idle(replica: Replica) -> None:
    """Wait until redo has nothing left that it may apply."""
    with replica._condition:
        assert replica._condition.wait_for(lambda: not replica._busy and not replica._ready(), 60)


class Pair:
    """A training, and a node with its standby replica.

    Attributes:
        watermark: watermark that all nodes know.
        answers: answers to the owner, oldest first.
    """

    def __init__(self, mode: str, make_optimizer: Any, base: int = 1, wait: bool = True, trails: bool = False) -> None:
        self.wait = wait
        self.watermark = base
        self.answers: list[Stored | NotStored] = []
        self.now = 0.0
        self.training = Training(mode, make_optimizer, base, trails)
        self._wire: deque[tuple[WireMessage, bytes]] = deque()
        self._code = Code(1, 1)
        self.owner = Sender(RANKS, self._code, ["m"], self._sent, lambda node: 1 << 30, base)
        self._source: RegionSource | None = None
        self._told_agent: deque[Message] = deque()
        self._said: deque[Any] = deque()
        self._watermark_known = True
        self.standbys, self.standby_feed = self._make_node(base)
        self._given_up: set[str] = set()
        self.send_generation()
        self.owner.met("m")

    def close(self) -> None:
        self.owner.close()
        self.standby_feed.leave()
        self.standbys.close()
        self.training.close()

    # The owner's node

    @property
    def generation(self) -> str:
        return f"g{self.training.number}"

    def send_generation(self) -> None:
        """Pass the training's new generation to the owner's replicator."""
        held = self.training.held
        assert held.base is not None
        missing, plain = held.replica.describe_state() if held.replica is not None else ((), b"")
        self._source = RegionSource(
            held.spec, held.number, held.base, [mapped(one) for one in held.regions], missing, plain
        )
        records = held.sendable()
        for record, (step, meta, states) in records.items():
            self._source.note(record, step, meta, states)
        layout = self._source.layout
        window = Window(
            owner=RANKS,
            node="o",
            generation=self.generation,
            attempt="a",
            index=0,
            data=1,
            tolerate=1,
            base=held.base,
            period=PERIOD,
            kept=PERIOD + self.training.slots,
            every=1,
            private=False,
            replicas=RANKS,
            record_bytes=layout.gradient_bytes + layout.anchor_bytes + layout.by_value_area()[1],
            static=True,
            history=HISTORY,
            spec=codec_of(held.spec),
            standby=True,
        )
        self.owner.begin(Outgoing(window, self._source, sorted(records)))

    @property
    def may_train(self) -> bool:
        """Whether the next record's slot is free as far as peers are concerned."""
        ahead = self.training.slots - (1 + self.training.trails if self.training.mode == "eager" else 0)
        return not self.wait or self.training.record + 1 - ahead <= self.watermark

    def train(self) -> bool:
        """Train a record, unless training has to wait."""
        if not self.may_train:
            return False
        self._raise_redo_limit()
        self.training.step()
        held = self.training.held
        record = held.log_record(self.training.record)
        assert record is not None
        assert self._source is not None
        self._source.note(record.record, record.step, record.meta, record.rank_states)
        self.owner.committed(record.record)
        return True

    def _raise_redo_limit(self) -> None:
        held = self.training.held
        assert held.base is not None
        redo_limit = self.watermark
        if not self.wait:
            needed = self.training.record + 1 - self.training.slots + held.spec.trails
            if self.watermark < held.base < needed and self.generation not in self._given_up:
                self.owner.give_up(self.generation)
                self._given_up.add(self.generation)
            redo_limit = max(redo_limit, needed)
        held.raise_redo_limit(redo_limit)

    def _sent(self, node: str, message: WireMessage, payload: memoryview | bytes) -> None:
        self._wire.append((message, bytes(payload)))

    def send(self, limit: int = 1 << 30) -> None:
        self.owner.pump(limit)

    # The standby replica's node

    def _make_node(self, record: int | None) -> tuple[StandbyReplicas, StandbyFeed]:
        standbys = StandbyReplicas("m", lambda key, message: self._said.append((key, message)), lambda: 0)
        kind = type(self.training.optimizer)
        standbys.optimizers = frozenset([f"{kind.__module__}.{kind.__qualname__}"])
        standbys.begin("a", record, None, 1)
        standby_feed = StandbyFeed(FragmentStore("m", _Room), self._told_agent.append, self._told_agent.append)
        standby_feed.begin("a", record, self._code)
        return standbys, standby_feed

    def replace_agent(self) -> None:
        """Kill agent and replicator. The next agent learns a watermark once this training has passed it."""
        self.standby_feed.leave()
        self.standbys.close()
        self._told_agent.clear()
        self._said.clear()
        self._watermark_known = False
        self.standbys, self.standby_feed = self._make_node(None)
        self.lose()

    def replace_owner(self) -> None:
        """Kill the owner's replicator; the next one knows what lies in the slots, and nothing of what was sent."""
        self.owner.close()
        self._wire.clear()
        held = self.training.held
        self.owner = Sender(RANKS, self._code, ["m"], self._sent, lambda node: 1 << 30, held.base or 0)
        self.send_generation()
        self.owner.met("m")

    def deliver(self, count: int = 1 << 30) -> int:
        """Deliver so many messages; returns the number delivered."""
        brought = 0
        while self._wire and brought < count:
            message, payload = self._wire.popleft()
            brought += 1
            match message:
                case Open():
                    self._answer(self.standby_feed.open(message.window))
                case Put():
                    self._answer(self.standby_feed.put(message.fragment, message.step, payload))
                case Abandon():
                    self.standby_feed.abandon(message.owner, message.generation, message.record)
        return brought

    def lose(self) -> None:
        """Lose messages in flight, and let both meet again."""
        self._wire.clear()
        self.owner.met("m")

    def _answer(self, answer: Stored | NotStored | None) -> None:
        if answer is not None:
            self.answers.append(answer)
            if isinstance(answer, Stored):
                self.owner.stored("m", answer)
            else:
                self.owner.not_stored("m", answer, self.now)

    def retry(self) -> None:
        """Let time pass."""
        self.now += 10.0
        self.owner.retry(self.now)

    def _make_standby(self, message: OpenStandby) -> None:
        answer, fds = self.standbys.open(message)
        self.standby_feed.answered(answer, [Region.open(os.dup(fd)) for fd in fds])

    def agent(self, count: int = 1 << 30) -> None:
        """Let the standby replica's agent handle so many messages of its replicator."""
        while self._told_agent and count:
            count -= 1
            match self._told_agent.popleft():
                case OpenStandby() as opened:
                    self._make_standby(opened)
                case StandbyRecord() as record:
                    self._hear(self.standbys.record(record))
                case StandbySkip() as skipped:
                    self.standbys.skip(skipped)
                case CloseStandby() as closed:
                    self.standbys.close_one(closed)

    def redo(self) -> None:
        """Let redo run as far as it may, and report it to the replicator."""
        for standby in list(self.standbys._all.values()):
            assert standby.generation.replica is not None
            wait_idle(standby.generation.replica)
        while self._said:
            self._hear(self.standbys.told(*self._said.popleft()))

    def _hear(self, news: StandbyApplied | StandbyFailed | None) -> None:
        if news is not None:
            for _, answer in self.standby_feed.heard(news):
                assert isinstance(answer, (Stored, NotStored))
                self._answer(answer)

    def pass_watermark(self) -> None:
        """Tell all nodes what is acknowledged."""
        if self.owner.acknowledged > self.watermark:
            self.watermark = self.owner.acknowledged
        self.owner.watermark_advanced(self.watermark)
        self._watermark_known |= self.owner.acknowledged == self.training.record
        if self._watermark_known:
            self.standby_feed.watermark_advanced(self.watermark, self.owner.whole)
            self.standbys.watermark_advanced(self.watermark, self.owner.whole)
        self._raise_redo_limit()

    def settle(self) -> None:
        """Deliver all messages in flight, and redo their records."""
        for _ in range(2 * (PERIOD + SLOTS)):
            self.retry()
            self.send()
            self.deliver()
            self.agent()
            self.redo()
            self.pass_watermark()

    # The end

    def end(self) -> list[HeldRecords]:
        """Lose the owner's node and end the attempt; returns what the standby replica's node can produce."""
        self.agent()
        self.standby_feed.halt()
        self.agent()
        self.standbys.halt()
        return list(self.standbys.inventory(lambda ranks: None))

    def check(self, record: int) -> None:
        """Check the replica's state after `record` against the training, bit for bit; call in ascending order."""
        standby = self.standbys.find(RANKS, record, HISTORY)
        assert standby is not None
        held = standby.generation
        assert held.replica is not None
        held.replica.advance_to(record)
        held.replica.freeze()
        assert held.ledger.rank_states(record) == {RANKS[0]: f"state {record}".encode()}
        assert held.ledger.step_of(record) == 10 * record
        truth, layout = self.training.truth[record], held.layout
        assert held.regions.replica is not None
        missing, encoded = held.replica.describe_state()
        plain = codec.decode(encoded) if encoded else {}
        for index, (param, (offset, states)) in enumerate(zip(layout.spec.params, layout.replica_offsets, strict=True)):
            tensor, name = param.tensor, param.tensor.name
            found = tensor_at(held.regions.replica.map, offset, tensor.shape, tensor.dtype)
            assert torch.equal(found, truth["tensors"][name]), f"{name} after record {record}"
            expected = truth["states"].get(name, {})
            for state in param.owners[0].state:
                if (index, 0, state.key) in missing:
                    assert state.key not in expected, f"{name} has no {state.key} after record {record}"
                    continue
                found = tensor_at(held.regions.replica.map, states[0, state.key], state.shape, state.dtype)
                assert torch.equal(found, expected[state.key]), f"{name}'s {state.key} after record {record}"
            assert plain.get(index, {}).get(0, {}) == truth["plain"].get(name, {})
        base = layout.by_value_base(record)
        mean = tensor_at(held.regions.slots.map, base + layout.by_value_offsets(RANKS[0])[0], (2,), "float32")
        assert torch.equal(mean, truth["tensors"]["mean"]), f"mean after record {record}"
        assert held.regions.static is not None
        fixed = tensor_at(held.regions.static.map, 0, (4,), "float32")
        assert torch.equal(fixed, truth["tensors"]["fixed"])


class _Room:
    def __init__(self, nbytes: int) -> None:
        self._room = bytearray(nbytes)

    @property
    def view(self) -> memoryview:
        return memoryview(self._room)

    def close(self) -> None:
        pass


def codec_of(spec: StateSpec) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(spec)
