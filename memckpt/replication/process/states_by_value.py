"""States that this node protects by value, one at a time, where its links do not carry every record.

The agent has the state copied, and the copy is cut into T virtual records. The node's own holder keeps them first, as
slots do not reach back so far; from there they are sent as slowly as links take them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from memckpt.errors import MemckptError
from memckpt.memory.region import Region
from memckpt.protocol.replication import CopyState, StateCopied
from memckpt.replication.coding.blob import STATIC, Blob, Extent, RecordTail
from memckpt.replication.coding.code import Code, seal_stripe
from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.keeping.kept_window import BeingReservedError, KeptWindow
from memckpt.replication.keeping.outgoing import Outgoing, close_all, replica_extents, static_blob
from memckpt.replication.keeping.sender import Sender
from memckpt.replication.process.send import NodePlan
from memckpt.replication.transport.messages import Window
from memckpt.state.layout import Layout
from memckpt.state.records import RankGroup, RecordMeta, encode_meta

#: Bytes that are copied before the loop looks at what has arrived.
_COPY_BYTES = 16 << 20
#: End of the name of what a node keeps of a state of its own.
_OWN = "/own"


class _StateCopy:
    """A copy of a state, read as virtual records. Owns its regions."""

    def __init__(self, message: StateCopied, regions: list[Region]) -> None:
        self.message = message
        self.layout = Layout(message.spec)
        self._regions = regions

    @property
    def records(self) -> range:
        return range(self.message.record - self.message.spec.period + 1, self.message.record + 1)

    def open(self, record: int) -> Blob:
        """The bytes of a virtual record, or of what is static."""
        told, layout = self.message, self.layout
        if record == STATIC:
            return static_blob(self._regions[1])
        view = memoryview(self._regions[0].map)
        extents, views = replica_extents(layout, record, view)
        last = record == told.record
        offset, nbytes = layout.by_value_area()
        if last and nbytes:
            extents.append(Extent(offset, nbytes))
            views.append(view[layout.state_bytes : layout.state_bytes + nbytes])
        meta = encode_meta(RecordMeta(record, told.record, True, (), told.missing, told.plain))
        states = told.rank_states if last else {}
        return Blob(RecordTail(told.step if last else 0, meta, states, tuple(extents)), views)

    def close(self) -> None:
        close_all(self._regions)


class _Stripes:
    """A record of which a node keeps all stripes itself."""

    def __init__(self, kept: KeptWindow, record: int, nbytes: int, stripes: int) -> None:
        self._kept, self._record = kept, record
        self.nbytes, self.stripes = nbytes, stripes

    def stripe(self, index: int) -> memoryview:
        found = self._kept.fragment(self._record, index)
        assert found is not None
        return found[1]

    def release(self) -> None:
        pass


class _OwnCopy:
    """The node's own copy of a state, as a source. Belongs to the fragment store."""

    def __init__(self, kept: KeptWindow, step: int) -> None:
        self._kept, self._step = kept, step

    def open(self, record: int) -> _Stripes | None:
        found = self._kept.manifest(record)
        if found is None:
            return None
        nbytes, digests = found
        return _Stripes(self._kept, record, nbytes, len(digests) // 16)

    def intact(self, record: int) -> bool:
        return True

    def step(self, record: int) -> int:
        return self._step

    def close(self) -> None:
        pass


class StatesByValue:
    """States of one node that are protected by value, in place of records. Closes its senders.

    `ordered`: the record whose state is to be protected; 0: none yet. `missed`: the newest that cannot be, and why.
    """

    def __init__(
        self,
        plan: NodePlan,
        code: Code,
        fragment_store: FragmentStore,
        senders: Mapping[RankGroup, Sender],
        ask: Callable[[CopyState], None],
    ) -> None:
        self._plan = plan
        self._own_code = Code(1, code.tolerate)
        self._fragment_store, self._senders, self._ask = fragment_store, senders, ask
        self.ordered = self.missed = 0
        self.problem = ""
        self._watermark = 0
        #: By unit, the own copies: their records and the names under which they are kept.
        self._kept: dict[RankGroup, dict[int, str]] = {ranks: {} for ranks in senders}
        #: Copies for which memory is yet to be had, and those that are being kept.
        self._arrived: list[_StateCopy] = []
        self._copying: deque[tuple[_StateCopy, Iterator[int]]] = deque()
        #: More memory for what is being kept is yet to be had.
        self._waits = False

    def close(self) -> None:
        self._drop_copies()
        for sender in self._senders.values():
            sender.close()

    def _drop_copies(self) -> None:
        for taken in [*self._arrived, *(taken for taken, _ in self._copying)]:
            taken.close()
        self._arrived.clear()
        self._copying.clear()

    @property
    def senders(self) -> Collection[Sender]:
        return self._senders.values()

    @property
    def waiting_bytes(self) -> int:
        return sum(sender.waiting_bytes for sender in self._senders.values())

    @property
    def acknowledged(self) -> int:
        """The newest record whose state this node and all its holders have."""
        return min((sender.acknowledged for sender in self._senders.values()), default=0)

    def acknowledged_of(self, ranks: RankGroup) -> int:
        return self._senders[ranks].acknowledged

    def hold_state(self, record: int) -> bool:
        """Whether this node and all its holders have the state after a record."""
        return all(sender.holds(record) for sender in self._senders.values())

    def watermark_advanced(self, watermark: int) -> None:
        """Drop states before the watermark: they are not needed any more."""
        self._watermark = max(self._watermark, watermark)
        for ranks, sender in self._senders.items():
            sender.watermark_advanced(watermark)
            self._drop_own(ranks, [record for record in self._kept[ranks] if record < watermark])

    def order(self, record: int) -> None:
        """Protect the state after this record, in place of one that is not protected yet."""
        if record <= self.ordered:
            return
        self.ordered = record
        self._drop_copies()
        for ranks, sender in self._senders.items():
            sender.withdraw_newer()
            self._drop_own(ranks, [one for one in self._kept[ranks] if one > self._watermark])
        self._ask(CopyState(record))

    def _drop_own(self, ranks: RankGroup, records: Sequence[int]) -> None:
        for record in records:
            self._fragment_store.drop_generation(ranks, self._kept[ranks].pop(record))

    def miss(self, record: int, problem: str) -> None:
        """Note that a state was not copied, or that there is no room for it."""
        if record == self.ordered:
            self.missed, self.problem = record, problem

    def take_copy(self, message: StateCopied, regions: list[Region]) -> None:
        """Take a copy of some ranks' state."""
        taken = _StateCopy(message, regions)
        if message.ranks not in self._senders or message.record != self.ordered or self.missed == self.ordered:
            taken.close()
            return
        self._arrived.append(taken)
        self._keep_arrived()

    def _keep_arrived(self) -> None:
        for taken in list(self._arrived):
            told = taken.message
            window = self._plan.window(told)
            own = msgspec.structs.replace(window, generation=window.generation + _OWN, data=1, index=0)
            try:
                kept = self._fragment_store.keep_own(own, self._own_code)
            except BeingReservedError:
                continue  # asked for again in the loop's next turn
            except (MemckptError, ValueError) as error:
                self._arrived.remove(taken)
                taken.close()
                self.miss(told.record, f"the state of ranks {list(told.ranks)} is not kept here: {error}")
                continue
            self._arrived.remove(taken)
            self._kept[told.ranks][told.record] = own.generation
            self._copying.append((taken, self._copy(taken, window, kept, self._senders[told.ranks])))

    def _copy(self, taken: _StateCopy, window: Window, kept: KeptWindow, sender: Sender) -> Iterator[int]:
        """Keep a state, and have it sent from there; yields the bytes of each step, 0 while there is no room yet."""
        told = taken.message
        for record in ([STATIC] if kept.sizes.static else []) + list(taken.records):
            blob = taken.open(record)
            for stripe in range(blob.stripes):
                data = blob.stripe(stripe)
                fragment, payload = seal_stripe(
                    self._own_code,
                    data,
                    generation=kept.window.generation,
                    owner=told.ranks,
                    record=record,
                    stripe=stripe,
                    stripes=blob.stripes,
                )[0]
                while True:
                    try:
                        kept.put(fragment, told.step, payload)
                        break
                    except BeingReservedError:
                        yield 0
                yield len(payload)
            blob.release()
        self.problem = ""
        sender.begin_generation(Outgoing(window, kept.sizes, _OwnCopy(kept, told.step), taken.records))

    @property
    def busy(self) -> bool:
        """Whether there is something to copy, and room for it."""
        return bool(self._copying) and not self._waits

    def work(self) -> None:
        """Copy some bytes of the states that are to be kept."""
        self._keep_arrived()
        left, self._waits = _COPY_BYTES, False
        while self._copying and left > 0 and not self._waits:
            taken, steps = self._copying[0]
            try:
                copied = next(steps, None)
            except MemckptError as error:  # no room for what is larger than such a record is as a rule
                copied = None
                self.miss(taken.message.record, str(error))
            if copied is None:
                self._copying.popleft()
                taken.close()
            else:
                left -= copied
                self._waits = not copied
