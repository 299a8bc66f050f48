"""The courier's part in mirrors: an owner's records go from the network into their slots, and the agent redoes them.

What is not for a mirror goes to the holder of pieces. So does what there is no replica for: it is kept as plain copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from memckpt.agent.messages import Message
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
from memckpt.courier.source import replica_parts
from memckpt.errors import DamagedStateError
from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing
from memckpt.peers.blob import STATIC, BlobReader, RecordTail
from memckpt.peers.code import Code
from memckpt.peers.fragments import Fragment, check
from memckpt.peers.holder import MOST_WINDOWS, Holder, KeptWindow
from memckpt.peers.windows import differing, misfit, sizes_of
from memckpt.peers.wire import NotStored, Stored, Window, WireMessage
from memckpt.state.layout import Layout
from memckpt.state.received import read_spec
from memckpt.state.records import decode_meta

_log = logging.getLogger("memckpt.courier")

Key = tuple[tuple[int, ...], str]


class _AllLostError(DamagedStateError):
    """What was stored before is of no use any more, either."""


class MirrorWindow:
    """One generation of an owner's records on their way into the slots of its mirror. Closes the regions.

    Args:
        window: what the owner has said of it.
        opened: what the agent has made for it.
        regions: slots, then static where present, and replica.
        tell: a record is whole, or records are lost.

    Attributes:
        newest: the last record that has come; None before the first.
        watermark: up to which record redo may go, at least.
    """

    def __init__(
        self,
        window: Window,
        opened: MirrorOpened,
        regions: list[Region],
        tell: Callable[[MirrorRecord | MirrorSkip], None],
    ) -> None:
        self.window = window
        self.newest: int | None = None
        self.watermark = 0
        owners = read_spec(window.spec)
        self._sizes = sizes_of(owners, private=False)
        self._layout = Layout(opened.spec)
        self._regions = regions
        rest = regions[1:]
        self._slots, self._replica = regions[0], rest.pop()
        self._static = rest.pop() if rest else None
        self._ring = SlotRing(self._slots, self._layout, opened.number)
        self._tell = tell
        #: How many records may be stored and not yet applied when one is acknowledged.
        self._ahead = opened.spec.slots - owners.slots
        self._slots_of_owner = owners.slots
        self._applied: int | None = None
        self._static_here = False
        #: Records that are here, and not applied as far as is known; and those that are not acknowledged.
        self._to_redo: list[int] = []
        self._unacknowledged: list[int] = []
        self._into: BlobReader | None = None
        self._next = (0, 0)
        #: Something was refused: all is ignored until the owner begins anew.
        self._deaf = False

    def close(self) -> None:
        """Let go of the regions."""
        self._into = None
        for region in self._regions:
            region.close()

    def reopened(self) -> None:
        """The owner has lost sight of what is here, and sends it once more."""
        self._into, self._deaf = None, False

    def abandon(self, record: int) -> None:
        """No more comes of a record."""
        if self._next[0] == record:
            self._into = None

    def put(self, fragment: Fragment, payload: memoryview | bytes) -> Stored | NotStored | None:
        """Take the next stripe; the answer that the owner is to get, if any."""
        record, told = fragment.record, self.window
        if self._deaf:
            return None
        problem = check(fragment, payload) or misfit(told, self._sizes, fragment)
        if not problem and len(payload) != fragment.length:  # a code of one piece: it is the stripe itself
            problem = f"expected {fragment.length} bytes, found {len(payload)}"
        if problem:
            return self._refuse(record, f"a fragment of it came damaged: {problem}")
        if self._has(record):
            last = fragment.stripe == fragment.stripes - 1
            return self._stored(record) if last and record not in self._unacknowledged else None
        try:
            if fragment.stripe == 0:
                self._begin(record)
            if self._into is None or self._next != (record, fragment.stripe):
                raise DamagedStateError(f"expected stripe {self._next[1]} of record {self._next[0]}")
            self._into.take(bytes(payload))
            self._next = record, fragment.stripe + 1
            if self._next[1] < fragment.stripes:
                return None
            tail = self._into.finish()
            self._into = None
            self._check(record, tail)
        except DamagedStateError as error:
            return self._refuse(record, str(error), nothing=isinstance(error, _AllLostError))
        self._complete(record, tail)
        if record > self.window.base and not self._may_acknowledge(record):
            self._unacknowledged.append(record)
            return None
        return self._stored(record)

    def _refuse(self, record: int, reason: str, nothing: bool = False) -> NotStored:
        self._into, self._deaf = None, True
        return NotStored(*self.key, record, reason, nothing)

    @property
    def key(self) -> Key:
        return self.window.owner, self.window.generation

    def _has(self, record: int) -> bool:
        if record == STATIC:
            return self._static_here
        return self.newest is not None and record <= self.newest

    def _stored(self, record: int) -> Stored:
        return Stored(*self.key, record)

    def _may_acknowledge(self, record: int) -> bool:
        """Whether redo keeps up: all is applied but a few records, and what it may not apply yet."""
        assert self._applied is not None
        may_apply = max(self.watermark, record - self._slots_of_owner)
        return self._applied >= min(record - self._ahead, may_apply)

    def _begin(self, record: int) -> None:
        """The first stripe of a record has come: where it goes to.

        Raises:
            DamagedStateError: redo still needs its slot.
        """
        self._next = record, 0
        if record == STATIC:
            if self._static is None:
                raise DamagedStateError("its layout has nothing that is sent once")
            self._into = BlobReader(memoryview(self._static.map))
            return
        if record > self.window.base:
            if self._applied is None:
                self._applied = record - 1  # what the replica begins with is missing: it goes on from anything
            self._claim_slot(record)
        for rank in self.window.owner:
            self._ring.open_for_writing(record, rank)
        start = self._layout.slot_offset(record)
        self._into = BlobReader(memoryview(self._slots.map)[start : start + self._layout.slot_bytes])

    def _claim_slot(self, record: int) -> None:
        """Make sure that redo does not need the slot of a record any more.

        Raises:
            DamagedStateError: it does.
        """
        slot = self._layout.slot_number(record)
        if all(self._layout.slot_number(one) != slot for one in self._to_redo):
            return
        problem = f"the replica here is {len(self._to_redo)} records behind; agent.threads gives it more CPU time"
        if self.newest is None or record == self.newest + 1:
            raise DamagedStateError(problem)
        # What it has got is of no use without what is lost between: it need not be redone.
        self.newest = record - 1
        self._tell(MirrorSkip(*self.key, record - 1))
        raise _AllLostError(problem)

    def _check(self, record: int, tail: RecordTail) -> None:
        if record == STATIC:
            return
        try:
            meta = decode_meta(tail.meta)
        except ValueError as error:  # of msgspec, or of text that is no UTF-8
            raise DamagedStateError(f"what it consists of cannot be read: {error}") from error
        if meta.record != record:
            raise DamagedStateError(f"expected what record {record} consists of, found that of {meta.record}")
        lacking = set(self.window.owner) - set(tail.rank_states)
        if record >= self.window.base and lacking:
            raise DamagedStateError(f"expected the states of all its ranks, found none of {sorted(lacking)}")

    def _complete(self, record: int, tail: RecordTail) -> None:
        """All of a record is here."""
        if record == STATIC:
            self._static_here = True
            return
        base = self.window.base
        if record <= base:
            self._take_anchors(record)
        for rank in self.window.owner:
            self._ring.seal(record, rank)
        if record == base:
            self._applied = base
        if record > base:
            self._to_redo.append(record)
        self.newest = record
        self._tell(MirrorRecord(*self.key, record, tail.step, tail.meta, tail.rank_states))

    def _take_anchors(self, record: int) -> None:
        """What a virtual record carries is the state itself."""
        start = self._layout.slot_offset(record)
        slots, replica = memoryview(self._slots.map), memoryview(self._replica.map)
        for offset, target, nbytes in replica_parts(self._layout, record):
            replica[target : target + nbytes] = slots[start + offset : start + offset + nbytes]

    def applied(self, record: int) -> list[Stored]:
        """Redo has got so far: what the owner is to get."""
        if self._applied is None or record > self._applied:
            self._applied = record
        self._to_redo = [one for one in self._to_redo if one > self._applied]
        free = [one for one in self._unacknowledged if self._may_acknowledge(one)]
        self._unacknowledged = [one for one in self._unacknowledged if one not in free]
        return [self._stored(one) for one in free]


class Mirroring:
    """Keeps what owners send: on mirrors where it is for these and the agent makes them, else with the holder.

    Belongs to the courier's loop.

    Args:
        holder: of pieces and plain copies; closed with it.
        ask: has the agent make a mirror, and waits for it.
        tell: gives the agent a message.
    """

    def __init__(
        self,
        holder: Holder,
        ask: Callable[[OpenMirror], tuple[MirrorOpened, list[Region]] | MirrorRefused],
        tell: Callable[[Message], None],
    ) -> None:
        self._holder = holder
        self._ask = ask
        self._tell = tell
        self._attempt: str | None = None
        self._mirrors: dict[Key, MirrorWindow] = {}
        #: Of which there are plain copies instead, and why.
        self._refused: dict[Key, str] = {}

    @property
    def watermark(self) -> int:
        """As the holder knows it."""
        return self._holder.watermark

    @property
    def nbytes(self) -> int:
        """Memory of pieces and plain copies; mirrors are the agent's."""
        return self._holder.nbytes

    @property
    def problem(self) -> str:
        """Why there are plain copies in place of replicas, in words; empty if there are none."""
        return next((f"ranks {list(key[0])}: {reason}" for key, reason in self._refused.items()), "")

    def kept(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """Node, ranks and newest record of all that is kept."""
        pieces = [(one.window, max(records)) for one in self.windows() if (records := one.records())]
        mirrored = [(one.window, one.newest) for one in self._mirrors.values() if one.newest is not None]
        return tuple((window.node, window.owner, newest) for window, newest in [*pieces, *mirrored])

    def windows(self) -> list[KeptWindow]:
        return self._holder.windows()

    @property
    def holder(self) -> Holder:
        """Of pieces and plain copies."""
        return self._holder

    # Attempts

    def begin(self, attempt: str, record: int | None, code: Code) -> None:
        """As for a holder."""
        self._attempt = attempt
        self._holder.begin(attempt, record, code)

    def halt(self) -> None:
        """The attempt is over: mirrors belong to the agent alone from now on."""
        self._attempt = None
        for mirror in self._mirrors.values():
            mirror.close()
        self._mirrors.clear()
        self._refused.clear()
        self._holder.halt()

    def close(self) -> None:
        self.halt()
        self._holder.close()

    # What owners say

    def open(self, window: Window) -> NotStored | None:
        """Make room for a generation; an answer only if there is none."""
        key = window.owner, window.generation
        if not window.mirror or key in self._refused or window.attempt != self._attempt:
            return self._holder.open(window)
        known = self._mirrors.get(key)
        if known is not None and known.window == window:
            known.reopened()
            return None
        if known is not None:
            self._drop(known)
        count = sum(one.window.owner == window.owner for one in self._mirrors.values())
        if count >= MOST_WINDOWS:
            reason = f"{count} generations are kept until every node has what follows"
            return NotStored(*key, window.base, reason, nothing=True)
        try:
            spec = read_spec(window.spec)
            if problem := differing(window, spec, sizes_of(spec, private=False)):
                raise ValueError(problem)
        except ValueError as error:
            return NotStored(*key, window.base, str(error), nothing=True)
        answer = self._ask(OpenMirror(*key, window.attempt, window.base, spec, window.history))
        if isinstance(answer, MirrorRefused):
            _log.warning("plain copies are kept of the records of ranks %s: %s", list(window.owner), answer.reason)
            self._refused[key] = answer.reason
            return self._holder.open(window)
        self._mirrors[key] = mirror = MirrorWindow(window, *answer, self._tell)
        mirror.watermark = self.watermark
        return None

    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> Stored | NotStored | None:
        """Take a fragment; the answer that its owner is to get, if any."""
        mirror = self._mirrors.get((fragment.owner, fragment.generation))
        if mirror is None:
            return self._holder.put(fragment, step, payload)
        return mirror.put(fragment, payload)

    def abandon(self, owner: tuple[int, ...], generation: str, record: int) -> None:
        mirror = self._mirrors.get((owner, generation))
        if mirror is not None:
            mirror.abandon(record)
        else:
            self._holder.abandon(owner, generation, record)

    def passed(self, watermark: int, whole: bool) -> None:
        """The watermark is known to have got so far; `whole`: every node is protected by this attempt's windows."""
        self._holder.passed(watermark, whole)
        for mirror in self._mirrors.values():
            mirror.watermark = self.watermark
        newest: dict[tuple[int, ...], int] = {}
        begun = [one.window for one in self._mirrors.values()] + [one.window for one in self.windows()]
        for window in begun:
            if window.attempt == self._attempt and window.base <= watermark:
                newest[window.owner] = max(window.base, newest.get(window.owner, window.base))
        for owner, base in newest.items():
            self._holder.forget_before(owner, base)
            for mirror in [one for one in self._mirrors.values() if one.window.owner == owner]:
                if mirror.window.base < base:
                    self._drop(mirror)

    def _drop(self, mirror: MirrorWindow) -> None:
        del self._mirrors[mirror.key]
        mirror.close()
        self._tell(CloseMirror(*mirror.key))

    # What the agent says

    def heard(self, message: MirrorApplied | MirrorFailed) -> list[tuple[str, WireMessage]]:
        """News of a mirror: what its owner is to get, and the owner's node."""
        mirror = self._mirrors.get((message.ranks, message.generation))
        if mirror is None:
            return []
        node = mirror.window.node
        if isinstance(message, MirrorApplied):
            return [(node, stored) for stored in mirror.applied(message.applied)]
        del self._mirrors[mirror.key]
        mirror.close()
        self._refused[mirror.key] = message.reason
        _log.warning("plain copies are kept of the records of ranks %s: %s", list(message.ranks), message.reason)
        record = mirror.window.base if mirror.newest is None else mirror.newest
        reason = f"its replica here is gone, plain copies are kept instead: {message.reason}"
        return [(node, NotStored(*mirror.key, record, reason, nothing=True))]
