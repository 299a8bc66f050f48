"""Mirrors: replicas of other nodes' ranks, on which their records are redone here as their own agents redo them.

A mirror is an ordinary generation that is redone eagerly, with slots for R = D + 2 records; it takes
(12 + R (4 + 12/T)) bytes per parameter and copy (fp32, Adam). Its regions are filled by the courier, which is told how
far redo has got: a record is acknowledged once the one two before it is applied, if it may be. So the owner, which is
at most D records ahead of what is acknowledged, finds the slots free; one that is not is not overwritten.

Where an owner has not waited and has skipped records, its mirror skips them, too. It can produce nothing then until it
has had T records in a row: their anchors overwrite all of its state by value, and it is exact again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from memckpt.agent.generation import Generation
from memckpt.agent.messages import Alarm, Commit, Credit, Drift, GenerationCommit, Message
from memckpt.agent.mirror_messages import (
    CloseMirror,
    MirrorApplied,
    MirrorFailed,
    MirrorOpened,
    MirrorRecord,
    MirrorRefused,
    MirrorSkip,
    OpenMirror,
)
from memckpt.errors import AgentError, MemckptError
from memckpt.state.layout import StateSpec, first_difference
from memckpt.state.records import Branch, HeldRecords, RecordMeta, decode_meta, timeline_of

_log = logging.getLogger("memckpt.agent")
#: Slots beside those that an owner has: so many records are stored and not yet applied when one is acknowledged.
EXTRA_SLOTS = 2

#: The owner's ranks, and the name of their generation.
MirrorKey = tuple[tuple[int, ...], str]


class Mirror:
    """One generation of an owner's records. Owns the generation that it is redone in; :meth:`close` it."""

    def __init__(self, opened: OpenMirror, generation: Generation) -> None:
        self.opened = opened
        self.generation = generation
        self._virtual: dict[int, RecordMeta] = {}
        #: Of the records that have come without a break, up to the newest.
        self._first = 0
        self._newest: int | None = None
        #: What lies beyond it belongs to a past that is not gone on with.
        self._last: int | None = None

    @property
    def nbytes(self) -> int:
        return self.generation.nbytes

    @property
    def exact_from(self) -> int:
        """From this record on its state is that of the owner, bit for bit."""
        return max(self.opened.base, self._first + self.opened.spec.period - 1)

    def close(self) -> None:
        self.generation.close()

    # Records

    def take(self, message: MirrorRecord) -> None:
        """A record has come; what lies between it and the one before does not come any more."""
        record, base = message.record, self.opened.base
        if self._newest is not None and record <= self._newest:
            return
        gap = self._newest is None or record != self._newest + 1
        if gap:
            self._first = record
            self._virtual.clear()
        self._newest = record
        if record <= base:
            self._virtual[record] = decode_meta(message.meta)
            if record == base:
                self._begin(base, message.step, message.rank_states)
            return
        if not self.generation.complete:
            self._begin(record - 1, 0, {})
        elif gap:
            assert self.generation.replica is not None
            self.generation.replica.skip_to(record - 1)
        first = self.opened.ranks[0]
        for rank in self.opened.ranks:
            meta = message.meta if rank == first else b""
            commit = Commit(self.generation.number, record, message.step, message.rank_states[rank], meta)
            self.generation.commit(rank, commit)

    def skip(self, record: int) -> None:
        """Nothing more comes up to a record."""
        if self.generation.complete and (self._newest is None or record > self._newest):
            assert self.generation.replica is not None
            self._newest, self._first = record, record + 1
            self.generation.replica.skip_to(record)

    def _begin(self, record: int, step: int, rank_states: dict[int, bytes]) -> None:
        """The replica is that after `record`, as far as virtual records have come."""
        missing, plain = self._describe_state()
        number = self.generation.number
        for rank in self.opened.ranks:
            state = rank_states.get(rank, b"")
            self.generation.start(rank, GenerationCommit(number, record, step, state, (), missing, plain))
        self._virtual.clear()

    def _describe_state(self) -> tuple[tuple[tuple[int, int, str], ...], bytes]:
        """What of the optimizer state is not there, and what of it is no tensor, as for a replica.

        Nothing is there of parameters of which no virtual record has come: their optimizer begins as at its first step.
        """
        from memckpt.state import codec  # imports torch

        layout = self.generation.layout
        there = {piece.param for record in self._virtual for piece in layout.due(record)}
        missing = {one for meta in self._virtual.values() for one in meta.missing}
        missing |= {
            (index, owner.optimizer, state.key)
            for index, param in enumerate(layout.spec.params)
            if index not in there
            for owner in param.owners
            for state in owner.state
        }
        plain: dict[int, dict[int, dict[str, object]]] = defaultdict(lambda: defaultdict(dict))
        for _, meta in sorted(self._virtual.items()):
            for param, by_optimizer in (codec.decode(meta.plain) if meta.plain else {}).items():
                for optimizer, values in by_optimizer.items():
                    if param in there:
                        plain[param][optimizer] |= values
        encoded = codec.encode({param: dict(values) for param, values in plain.items()}) if plain else b""
        return tuple(sorted(missing)), encoded

    def let_go_on(self, gate: int) -> None:
        """Redo may go on up to `gate`."""
        if self.generation.gate is None or gate > self.generation.gate:
            self.generation.open_gate(gate)

    # What it can produce

    def forget_beyond(self, record: int) -> None:
        """An attempt goes on behind `record`."""
        self._last = record if self._last is None else min(self._last, record)

    def standing_still(self) -> list[int]:
        """Records whose state it can produce while nothing comes, ascending."""
        if not self.generation.complete:
            return []
        assert self.generation.replica is not None
        self.generation.replica.freeze()
        found = self.generation.reachable()
        return [one for one in found if one >= self.exact_from and (self._last is None or one <= self._last)]

    def stand_at(self, record: int) -> Generation:
        """Go to a record that it can produce, and stay there.

        Raises:
            AgentError: redo failed on the way.
        """
        assert self.generation.replica is not None
        self.forget_beyond(record)
        self.generation.settle(record)
        self.generation.replica.freeze()
        return self.generation

    def held(self, node: str, fingerprint: Sequence[str] | None) -> HeldRecords | None:
        """What it can produce, for the plan; None: nothing."""
        opened, records = self.opened, self.standing_still()
        if not records:
            return None
        spec = opened.spec
        difference = first_difference(spec.fingerprint(), fingerprint) if fingerprint is not None else None
        if difference is not None:
            return HeldRecords(node=node, ranks=opened.ranks, problem=difference, mirror=True)
        return HeldRecords(
            node=node,
            records=tuple(records),
            steps=tuple(self.generation.step_of(record) or 0 for record in records),
            ranks=opened.ranks,
            history=opened.history,
            world_size=spec.world_size,
            digest=spec.digest(),
            sharding=spec.sharding(),
            newest=records[-1],
            replicas=spec.replicas,
            mirror=True,
        )


class Mirrors:
    """All mirrors of a node. Belongs to the agent's event loop; :meth:`close` it.

    Those of the attempt that runs take records. Those of earlier ones stand still: they are there for the case that
    this one ends before it is protected itself.

    Args:
        node: its name.
        notify: takes what a redo thread says of a mirror, from that thread.
        beside: bytes that the node holds beside mirrors.

    Attributes:
        attempt: the nonce of the one that runs; None between attempts.
    """

    def __init__(self, node: str, notify: Callable[[MirrorKey, Message], None], beside: Callable[[], int]) -> None:
        self._node = node
        self._notify = notify
        self._beside = beside
        self._all: dict[MirrorKey, Mirror] = {}
        self._number = 0
        self.attempt: str | None = None
        self._watermark = 0
        self._budget: int | None = None
        self._threads = 1

    @property
    def nbytes(self) -> int:
        """Shared memory of all of them."""
        return sum(one.nbytes for one in self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def close(self) -> None:
        for key in list(self._all):
            self._drop(key)

    def _drop(self, key: MirrorKey) -> None:
        self._all.pop(key).close()

    # Attempts

    def begin(self, attempt: str, record: int | None, budget: int | None, threads: int) -> None:
        """An attempt begins; it goes on behind `record`, or uses nothing of what is here (None).

        Args:
            budget: the configured limit on the node's memory, in bytes.
            threads: for redo.
        """
        self.attempt, self._watermark = attempt, record or 0
        self._budget, self._threads = budget, threads
        for key, mirror in list(self._all.items()):
            if mirror.opened.attempt == attempt:
                continue  # the plan is made once more
            if record is None:
                self._drop(key)
            else:
                mirror.forget_beyond(record)

    def halt(self) -> None:
        """The attempt is over; all that its courier had received is here."""
        self.attempt = None

    def passed(self, watermark: int, whole: bool) -> None:
        """The watermark has got so far; `whole`: every node is protected by this attempt."""
        self._watermark = max(self._watermark, watermark)
        for key, mirror in list(self._all.items()):
            if mirror.opened.attempt == self.attempt:
                mirror.let_go_on(self._gate(mirror))
            elif whole:
                self._drop(key)

    def _gate(self, mirror: Mirror) -> int:
        """Up to which record redo may go.

        An owner has a record only once the one D before it was acknowledged for every node, known here or not: an
        agent that is new in its attempt has yet to hear of it. One that does not wait goes back no further itself.
        """
        newest = max(mirror.generation.committed.values(), default=0)
        return max(self._watermark, newest - mirror.opened.spec.slots)

    # What the courier says

    def open(self, message: OpenMirror) -> tuple[MirrorOpened | MirrorRefused, list[int]]:
        """Make room for an owner's generation: the answer, and the descriptors of its regions."""
        key = message.ranks, message.generation
        try:
            mirror = self._make(message)
        except Exception as error:  # of foreign code, too: an optimizer that another node names, and its constructor
            problem = _in_words(error)
            _log.warning("ranks %s of another node get no replica here: %s", list(message.ranks), problem)
            return MirrorRefused(*key, problem), []
        self._all[key] = mirror
        generation = mirror.generation
        _log.info("ranks %s of another node are mirrored from record %d on", list(message.ranks), message.base)
        return MirrorOpened(*key, generation.number, generation.spec), [one.fd for one in generation.regions]

    def _make(self, message: OpenMirror) -> Mirror:
        if message.attempt != self.attempt:
            raise AgentError("it belongs to another attempt than the one that runs here")
        if message.spec.mode == "capture":
            raise AgentError("its steps cannot be redone")
        from memckpt.state.optimizers import resolve  # imports torch

        for optimizer in message.spec.optimizers:
            resolve(optimizer.module, optimizer.qualname)
        key = message.ranks, message.generation
        if key in self._all:  # of a courier that has died
            self._drop(key)
        try:
            return self._allocate(message)
        except MemckptError as error:
            former = [one for one, mirror in self._all.items() if mirror.opened.attempt != self.attempt]
            if not former:
                raise
            _log.warning(
                "mirrors of an earlier attempt go before this one's are whole (a gap in protection): %s", error
            )
            for one in former:
                self._drop(one)
            return self._allocate(message)

    def _allocate(self, message: OpenMirror) -> Mirror:
        self._number += 1
        key = message.ranks, message.generation
        generation = Generation(
            self._number,
            mirrored(message.spec, message.ranks),
            held_bytes=self.nbytes + self._beside(),
            budget=self._budget,
            threads=self._threads,
            notify=lambda said: self._notify(key, said),
        )
        return Mirror(message, generation)

    def record(self, message: MirrorRecord) -> MirrorFailed | None:
        """A record is whole in its slot; what the courier is to know if it is of no use."""
        key = message.ranks, message.generation
        mirror = self._all.get(key)
        if mirror is None or mirror.opened.attempt != self.attempt:
            return None
        if mirror.generation.gate is None:
            mirror.generation.gate = self._watermark
        try:
            mirror.take(message)
        except Exception as error:  # of foreign code, too: what a peer has sent is decoded, its optimizers are made
            problem = f"record {message.record}: {_in_words(error)}"
            _log.error("the replica of ranks %s of another node: %s", list(message.ranks), problem)
            self._drop(key)
            return MirrorFailed(*key, problem)
        mirror.let_go_on(self._gate(mirror))
        return None

    def skip(self, message: MirrorSkip) -> None:
        """Nothing more comes up to a record."""
        mirror = self._all.get((message.ranks, message.generation))
        if mirror is not None and mirror.opened.attempt == self.attempt:
            mirror.skip(message.record)

    def close_one(self, message: CloseMirror) -> None:
        """Nobody needs this one any more."""
        key = message.ranks, message.generation
        if key in self._all:
            self._drop(key)

    def told(self, key: MirrorKey, message: Message) -> MirrorApplied | MirrorFailed | None:
        """What a redo thread has said: what the courier is to know of it."""
        mirror = self._all.get(key)
        if mirror is None:
            return None  # it has been let go of since
        match message:
            case Credit():
                return MirrorApplied(*key, message.applied)
            case Alarm():
                _log.error("the replica of ranks %s of another node: %s", list(key[0]), message.reason)
                self._drop(key)
                return MirrorFailed(*key, message.reason)
            case Drift() if message.record > mirror.exact_from:
                _log.info(
                    "drift of %g ulp at record %d of ranks %s in %s",
                    message.max_ulp,
                    message.record,
                    list(key[0]),
                    message.tensor,
                )
        return None

    # Recovery

    def inventory(self, fingerprint_of: Callable[[tuple[int, ...]], Sequence[str] | None]) -> tuple[HeldRecords, ...]:
        """What can be produced, for the plan.

        Args:
            fingerprint_of: a rank of these, of the model that is to be resumed; None: there is nothing to compare with.
        """
        found: dict[tuple[object, ...], HeldRecords] = {}
        for mirror in self._all.values():
            held = mirror.held(self._node, fingerprint_of(mirror.opened.ranks))
            if held is None:
                continue
            # Of one owner there are several where a generation has begun after another one.
            key = held.ranks, held.history
            found[key] = held if key not in found else _merged(found[key], held)
        return tuple(found.values())

    def find(self, ranks: tuple[int, ...], record: int, history: Sequence[Branch]) -> Mirror | None:
        """One that can produce the state of these ranks after a record that is of this history."""
        for mirror in reversed(self._all.values()):
            opened = mirror.opened
            same = timeline_of(opened.history, record) == timeline_of(history, record)
            if opened.ranks == ranks and same and record in mirror.standing_still():
                return mirror
        return None


def mirrored(spec: StateSpec, ranks: tuple[int, ...]) -> StateSpec:
    """What an owner's state consists of, on a mirror."""
    return msgspec.structs.replace(spec, mode="eager", local_ranks=ranks, slots=spec.slots + EXTRA_SLOTS)


def _in_words(error: Exception) -> str:
    """What an error says; of one that is not ours also what it is."""
    return str(error) if isinstance(error, MemckptError) else f"{type(error).__name__}: {error}"


def _merged(one: HeldRecords, other: HeldRecords) -> HeldRecords:
    steps = dict(zip(one.records + other.records, one.steps + other.steps, strict=True))
    return msgspec.structs.replace(
        other,
        records=tuple(sorted(steps)),
        steps=tuple(steps[record] for record in sorted(steps)),
        newest=max(one.newest, other.newest),
        problem=one.problem or other.problem,
    )
