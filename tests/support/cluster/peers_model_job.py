"""A job on several nodes in one process: its attempts, their events, and the losses that must be tolerated."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from memckpt.memory.generation import branch_off
from memckpt.protocol import replication
from memckpt.recovery.plan import NewAttempt, RestoreRecord, make_plan
from memckpt.recovery.sources import Fetch
from memckpt.replication.coding.blob import BlobReader, Room
from memckpt.replication.coding.code import Code, decode_stripe
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.kept_window import sizes_of
from memckpt.replication.keeping.outgoing import Outgoing
from memckpt.replication.process.node import ReplicationNode
from memckpt.replication.transport.messages import decode
from memckpt.state.records import Branch, HeldFragments
from tests.support.cluster.peers_model import (
    MOST_BYTES,
    Chain,
    Generation,
    Live,
    Network,
    Node,
    Port,
    Setting,
    Unit,
    bytes_of,
)
from tests.support.cluster.peers_records import MemoryRooms


class Job:
    """Attempts of a job, and their events; `room`: most messages in flight from one node to another."""

    def __init__(self, setting: Setting, room: int) -> None:
        self.setting = setting
        self.room = room
        self.code = Code(setting.data, setting.tolerate)
        self.plain_code = Code(1, setting.tolerate)
        self.attempts: dict[str, tuple[Any, Chain]] = {}
        self.bases: dict[str, int] = {}
        self.places: dict[Unit, Node] = {}
        self.members: dict[str, ReplicationNode] = {}
        self.attempt = ""
        self.now = 0.0
        self._names = 0

    def close(self) -> None:
        self.close_members()
        self.code.close()

    # The plan

    def plan(self, places: dict[Unit, Node], nonce: str) -> Any:
        return make_plan(
            [live.inventory(node.name, self.setting) for node in places.values() for live in node.live.values()],
            "auto",
            NewAttempt(self.setting.nodes, nonce, units=[(places[unit].name, unit) for unit in self.setting.units]),
            fragments=self.fragments(places.values()),
            before=self.setting.repeat,
        )

    def known(self, nodes: Iterable[Node]) -> bool:
        """Whether any of these nodes holds something of this attempt."""
        nodes = list(nodes)
        held = [live.history for node in nodes for live in node.live.values() if live.generations]
        return self.history in held or any(index.history == self.history for index in self.fragments(nodes))

    def fragments(self, nodes: Iterable[Node]) -> list[HeldFragments]:
        return [index for node in nodes for index in node.fragment_store.held(lambda window: None)]

    def right(self, history: tuple[Branch, ...], record: int) -> Chain:
        """The makers of the records up to one, in the latest attempt of a history."""
        nonce = history[-1].timeline.nonce
        start = self.attempts[nonce][1]
        return start[: record + 1] + (nonce,) * (record + 1 - len(start))

    def check_plan(self, found: RestoreRecord, places: dict[Unit, Node], promised: int = 0) -> None:
        """Check that every unit gets the record as it was made, and the previous one if its step is repeated."""
        right = self.right(found.history, found.record)
        fetched = {fetch.ranks for fetch in found.fetches}
        nodes = {node.name: node for node in places.values()}
        before = any(fetch.before for fetch in found.fetches)
        assert all(fetch.before == before for fetch in found.fetches)
        for unit, node in places.items():
            if unit not in fetched:
                self._check_live(node, unit, found.record, right, before)
                if self.setting.trails and promised and not self.strayed:
                    live = node.live[unit]
                    assert live.repeats(found.record) or live.begins_with(found.record), (unit, found)
        for fetch in found.fetches:
            if fetch.server is not None:
                name, ranks = fetch.server
                self._check_live(nodes[name], ranks, found.record, right, before)
            if isinstance(fetch.source, replication.FromFragments):
                assert (fetch.server is not None) == self.setting.private
                self._check_decoded(fetch, fetch.source, nodes, right)

    @staticmethod
    def _check_live(node: Node, unit: Unit, record: int, right: Chain, before: bool) -> None:
        reach = node.live[unit].reach()
        assert reach[record] == right
        assert not before or reach[record - 1] == right[:-1]

    def _check_decoded(
        self, fetch: Fetch, source: replication.FromFragments, nodes: dict[str, Node], right: Chain
    ) -> None:
        base = self.bases[source.generation]
        for record in range(fetch.record - fetch.before - source.period + 1, fetch.record + 1):
            virtual = record <= base
            expected = bytes_of(fetch.ranks, record, right[: max(record, base) + 1], virtual)
            assert self._decode(fetch.ranks, source, record, nodes) == expected, (fetch, record)

    def repeats(self, found: RestoreRecord, places: dict[Unit, Node]) -> bool:
        """Whether all units have the previous state as well, so that the step is repeated."""
        fetches = {fetch.ranks: fetch for fetch in found.fetches}
        nodes = {node.name: node for node in places.values()}

        def hands_out(fetch: Fetch) -> bool:
            if fetch.server is None:
                return fetch.before
            name, ranks = fetch.server
            return fetch.before and nodes[name].live[ranks].repeats(found.record)

        return self.setting.repeat and all(
            hands_out(fetches[unit]) if unit in fetches else node.live[unit].repeats(found.record)
            for unit, node in places.items()
        )

    def _decode(self, ranks: Unit, source: replication.FromFragments, record: int, nodes: dict[str, Node]) -> bytes:
        windows = {name: nodes[name].fragment_store.window(ranks, source.generation) for name, _ in source.fragments}
        manifests = {name: one.manifest(record) for name, one in windows.items() if one is not None}
        [manifest] = {one for one in manifests.values() if one is not None}
        nbytes, digests = manifest
        room = bytearray(MOST_BYTES)
        reader = BlobReader([Room(0, memoryview(room))])
        stripes = len(digests) // 16
        for stripe in range(stripes):
            there = [(name, one.fragment(record, stripe)) for name, one in windows.items() if one is not None]
            data, bad = decode_stripe(
                self.code if source.data == self.setting.data else self.plain_code,
                [(name, found[0], bytes(found[1])) for name, found in there if found is not None],
                generation=source.generation,
                owner=ranks,
                record=record,
                stripe=stripe,
                stripes=stripes,
                length=next(found[0].length for _, found in there if found is not None),
            )
            assert not bad
            nbytes -= len(data)
            reader.take(data)
        assert nbytes == 0
        tail = reader.finish()
        assert tail.step == 10 * record
        return bytes(room[: tail.extents[0].nbytes])

    # An attempt

    def begin(self, found: Any, places: dict[Unit, Node], nonce: str, hear: Collection[str]) -> None:
        """Carry out the plan on the nodes that hear of it."""
        going_on = isinstance(found, RestoreRecord)
        start = self.right(found.history, found.record) if going_on else (nonce,)
        self.whole = False  # whether any m nodes could be lost at some time in this attempt
        self.attempts[nonce] = found.timeline, start
        self.attempt, self.places = nonce, places
        self.history = (Branch(found.timeline, None),)
        if going_on:
            self.history = branch_off(found.history, found.record, found.timeline)
        record = found.record if going_on else None
        repeated = going_on and self.repeats(found, places)
        self.strayed = False  # whether waiting was suspended at some time in this attempt
        names = [node.name for node in places.values()]
        self.emptied = set()  # nodes that have lost their memory since
        self.seen = dict.fromkeys(names, record or 0)  # the newest watermark that the trainers of each node know of
        self.waits_suspended: dict[str, bool] = {}  # by node
        self.made = dict.fromkeys(places, record or 0)  # the newest record that each unit's trainers have committed
        self.staging = set()  # units that are filling the slot of the next one
        self.anew = set(places)  # units that begin a generation with it
        self.ordered = {}  # by node, the record whose state is to be copied
        self.network = Network(names)
        self.job = replication.PeerJob(
            attempt=nonce,
            nodes=tuple(replication.PeerNode(name, "", (name,)) for name in names),
            units=tuple(replication.PeerUnit(index, unit, self.setting.private) for index, unit in enumerate(places)),
            data=self.setting.data,
            tolerate=self.setting.tolerate,
            backend="isa_l_rs_cauchy",
            wait=self.setting.wait,
            rate_bytes_per_second=None,
            overhead=0.03,
            record=record,
            every_steps=self.setting.every,
        )
        self.close_members()
        for unit, node in places.items():
            node.fragment_store.end_attempt()
            if node.name not in hear:
                continue
            if record is None:
                node.live.clear()
            node.live[unit] = Live(unit, self.history)
            if record is not None:
                base = record - repeated
                generation = Generation("resumed", unit, self.setting, base, start[: base + 1])
                node.live[unit].generations.append(generation)
                if repeated:
                    generation.slots.open(record)
                    generation.commit(record, start)
            self._join(node, record)

    def _join(self, node: Node, record: int | None, rejoined: bool = False, records: bool = False) -> None:
        port: Any = Port(self.network, node.name, self.room)

        def passed(message: Any) -> None:
            self.seen[node.name] = max(self.seen[node.name], message.record)
            self.waits_suspended[node.name] = message.waits_suspended
            # Nobody waits for records that a node has lost, so others may get too far ahead of it.
            if message.waits_suspended:
                self.whole, self.strayed = False, True
            for live in node.live.values():
                live.let_go(message.record)
            for unit, place in self.places.items():
                if place is node:
                    self._allow(unit)

        job = msgspec.structs.replace(self.job, record=record)
        self.ordered.pop(node.name, None)

        def ask(message: replication.CopyState) -> None:
            self.ordered[node.name] = message.record

        join = replication.Join(job, rejoined, records)
        self.members[node.name] = ReplicationNode(node.name, join, node.fragment_store, port, passed, ask)

    def close_members(self) -> None:
        for member in self.members.values():
            member.close()
        self.members.clear()

    # Events

    def may_stage(self, unit: Unit) -> bool:
        """Whether a unit's trainers may begin to fill the slot of their next record."""
        old = self.made[unit] + 1 - self.setting.slots
        acknowledged = self.seen[self.places[unit].name] >= old + self.setting.standing
        waits_suspended = self.waits_suspended.get(self.places[unit].name, False)
        generation = self._written(unit)
        applied = not self.setting.eager or generation is None or generation.applied >= old
        return unit not in self.staging and applied and (acknowledged or waits_suspended or not self.setting.wait)

    def _written(self, unit: Unit) -> Generation | None:
        """The generation whose slots a unit fills; None if another one begins."""
        generations = self.places[unit].live[unit].generations
        return generations[-1] if generations and unit not in self.anew else None

    def _allow(self, unit: Unit) -> None:
        """Raise the redo limit as an agent does."""
        generation = self._written(unit)
        if not self.setting.eager or generation is None or generation.name == "resumed":
            return
        name = self.places[unit].name
        redo_limit, slots = self.seen[name], self.setting.slots
        if not self.setting.wait or self.waits_suspended.get(name, False):
            needed = generation.newest - (slots - 2 - self.setting.trails)
            # A replicator that is just starting has not been given it yet, so that there is nothing to give up.
            sent = name in self.members
            if redo_limit < generation.base < needed and not generation.given_up and sent:
                generation.given_up = True
                self.members[name].give_up(replication.GiveUp(unit, generation.name))
            redo_limit = max(redo_limit, needed)
        limit = min(generation.newest - 1, redo_limit) - self.setting.trails
        generation.limit = max(generation.limit, limit)

    def redo(self, unit: Unit) -> bool:
        """Let a unit's replica apply one record, if it may; returns whether it has."""
        generation = self._written(unit)
        return self.setting.eager and generation is not None and generation.redo()

    def stage(self, unit: Unit) -> None:
        self.staging.add(unit)
        if unit not in self.anew:
            self.places[unit].live[unit].generations[-1].slots.open(self.made[unit] + 1)

    def may_commit(self, unit: Unit) -> bool:
        """Whether a commit is possible: its backward needs all ranks, and so their commits of the previous record."""
        made = self.made[unit]
        reached = [one > made or (one == made and other in self.staging) for other, one in self.made.items()]
        return unit in self.staging and all(reached)

    def commit(self, unit: Unit) -> None:
        node = self.places[unit]
        live = node.live[unit]
        self.staging.remove(unit)
        record = self.made[unit] = self.made[unit] + 1
        past = self.right(self.history, record)
        if unit in self.anew:
            self._begin_generation(unit)
        else:
            live.generations[-1].commit(record, past)
            self._owner(node, unit).committed(record)
            self._allow(unit)
        live.let_go(self.members[node.name].watermark.record)
        self._copy_state(node, unit, past)

    def _copy_state(self, node: Node, unit: Unit, past: Chain) -> None:
        """Copy the state of a unit if an order names its newest record."""
        record, ordered = self.made[unit], self.ordered.get(node.name, 0)
        states = self.members[node.name].states
        if not ordered or states is None or record < ordered:
            return
        del self.ordered[node.name]
        if record > ordered:
            states.miss(ordered, "too late")
            return
        name = f"{self.attempt}/{unit}/{self._names}/{node.name}/state {record}"
        self._names += 1
        self.bases[name] = self.bases[name + "/own"] = record
        spec = self.setting.spec(unit)
        plain = msgspec.msgpack.encode(past)
        states.take_copy(
            replication.StateCopied(unit, record, name, spec, 10 * record, {}, (), plain, self.history), []
        )

    def slow_down(self, unit: Unit) -> None:
        """Make a unit's links too slow for its records, as far as nodes know."""
        for member in self.members.values():
            member._meter.needed = member._meter.needed or 1
        self.members[self.places[unit].name]._meter.needed = 4

    def may_start(self, unit: Unit) -> bool:
        """Whether a unit's trainers, which have found a new agent, can write their current state."""
        return not self.places[unit].live[unit].generations and self.made[unit] > 0 and unit not in self.staging

    def start(self, unit: Unit) -> None:
        self._begin_generation(unit)

    def _begin_generation(self, unit: Unit) -> None:
        self.anew.discard(unit)
        node, record = self.places[unit], self.made[unit]
        self._names += 1
        name = f"{self.attempt}/{unit}/{self._names}"
        self.bases[name] = record
        past = self.right(self.history, record)
        node.live[unit].generations.append(Generation(name, unit, self.setting, record, past))
        self._send_generation(node, unit)

    def _owner(self, node: Node, unit: Unit) -> Any:
        return next(one for one in self.members[node.name].senders if one.ranks == unit)

    def _send_generation(self, node: Node, unit: Unit) -> None:
        setting, generation = self.setting, node.live[unit].generations[-1]
        spec = setting.spec(unit)
        member = self.members[node.name]
        told = replication.SendGeneration(unit, generation.name, 1, spec, generation.base, {}, (), b"", self.history)
        window = member.plan.window(told)
        member._sources[unit] = generation  # type: ignore[assignment]
        sizes = sizes_of(spec, setting.private)
        outgoing = Outgoing(window, sizes, generation, generation.sendable(self.seen[node.name]))
        member.send_generation(self._owner(node, unit), outgoing, spec)
        member._run_ahead.begin_generation(unit, sizes.kept - sizes.period - setting.standing, sizes.every)

    def begin_anew(self, unit: Unit) -> None:
        """Begin a generation with the next record: its layout has changed."""
        if unit not in self.staging:
            self.anew.add(unit)

    def lose_replicator(self, node: Node) -> None:
        """Lose the replicator. Fragments that it kept stay with its agent, which starts another one."""
        own = {unit: live for unit, live in node.live.items() if self.places.get(unit) is node}
        sendable = [unit for unit, live in own.items() if live.generations and live.generations[-1].name != "resumed"]
        self._restart(node, records=len(sendable) == len(own))
        for unit in sendable:
            self._send_generation(node, unit)

    def lose_agent(self, node: Node) -> None:
        """Lose the agent, its replicator and the fragments. Trainers find another agent, and begin generations."""
        self.emptied.add(node.name)
        node.fragment_store.drop_all()
        node.fragment_store = FragmentStore(node.name, MemoryRooms())
        self._restart(node)
        mine = [unit for unit, other in self.places.items() if other is node]
        node.live = {unit: Live(unit, self.history) for unit in mine}
        self.anew |= set(mine)

    def _restart(self, node: Node, records: bool = False) -> None:
        self.network.restart(node.name)
        self.members.pop(node.name).close()
        self._join(node, None, rejoined=True, records=records)

    def deliver(self, pair: tuple[str, str]) -> Any:
        """Deliver the next message from the first to the second; returns it, or None if they have met."""
        sender, receiver = pair
        message = self.network.pop(pair)
        if message is None:
            self.members[receiver].met(sender)
            return None
        self._handle(receiver, sender, *message)
        return decode(message[0])

    def _handle(self, receiver: str, sender: str, body: bytes, payload: bytes) -> None:
        self.members[receiver].handle(sender, decode(body), payload, self.now)

    def work(self, name: str) -> None:
        """Run one turn of a replicator's loop."""
        self.now += 1.0
        member = self.members[name]
        member.work(self.now)
        while member.mail.loopback:
            self._handle(name, *member.mail.loopback.popleft())

    def settle(self, without: str | None = None) -> None:
        """Send and deliver everything, except to and from one node that is very slow."""
        for _ in range(1000):
            for name in self.members:
                if name != without:
                    self.work(name)
            ready = [pair for pair in self.network.ready() if without not in pair]
            if not ready:
                return
            for pair in ready:
                while self.network.queues[pair]:
                    self.deliver(pair)
            for unit in self.setting.units:
                while self.redo(unit):
                    pass
        raise AssertionError("replicators do not come to rest")

    # Promises

    def look(self) -> None:
        """Note whether the loss of any m nodes can be tolerated."""
        owners = [owner for member in self.members.values() for owner in member.senders]
        everywhere = min(owner.acknowledged for owner in owners)
        noticed = all(None not in queue for queue in self.network.queues.values())
        whole = all(
            owner.whole and owner.since <= everywhere and self.bases_of(owner)[-1] <= everywhere for owner in owners
        )
        leader = next(member.leader for member in self.members.values() if member.leader is not None)
        if noticed and whole and leader.watermark.whole:
            self.whole, self.emptied = True, set()

    @staticmethod
    def bases_of(owner: Any) -> list[int]:
        return [outgoing.window.base for outgoing in owner._generations]

    def promised(self, lost: Collection[str]) -> int:
        """The record that must be reachable without some nodes; 0: none."""
        names = [node.name for node in self.job.nodes]
        if self.setting.every != 1:
            return self._promised_state(len(lost))
        gone = set(lost) | self.emptied
        borne = self.setting.tolerate if self.whole else 0
        groups = next(iter(self.members.values())).plan.placement.groups
        if not self.setting.wait or any(len(gone & {names[one] for one in group}) > borne for group in groups):
            return 0
        return max(seen for name, seen in self.seen.items() if name not in lost)

    def _promised_state(self, lost: int) -> int:
        """The record whose state every node and its holders have by value; 0: none."""
        leader = next((one.leader for one in self.members.values() if one.leader is not None), None)
        if leader is None or leader._cadence is None or lost > self.setting.tolerate:
            return 0
        state = leader._cadence.reached
        noticed = all(None not in queue for queue in self.network.queues.values()) and not self.network.unnoticed()
        there = all(one.states is not None and one.states.hold_state(state) for one in self.members.values())
        return state if state and leader.watermark.record == state and noticed and there else 0
