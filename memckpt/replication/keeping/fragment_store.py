"""Fragments of other nodes' records, kept in memory that is reserved once for each of their generations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from memckpt.errors import MemckptError
from memckpt.replication.coding.code import STRIPE_BYTES, Code
from memckpt.replication.coding.fragments import Fragment, check
from memckpt.replication.keeping.kept_window import BeingReservedError, Keeper, KeptWindow, Reserve, Room
from memckpt.replication.keeping.record_store import RecordStore
from memckpt.replication.transport.wire import NotStored, Stored, Window
from memckpt.state.records import HeldFragments, RankGroup

_log = logging.getLogger("memckpt.replicator")
#: Number of generations of one owner that are kept while the watermark stands still.
MOST_WINDOWS = 8


class FragmentStore(RecordStore):
    """All fragments that a node keeps for others. Opens and drops windows as their owners and the watermark say.

    Args:
        node: its name.
        reserve: makes room of so many bytes; raises MemckptError if it cannot.
        keeper: is told of each room.

    Attributes:
        watermark: the newest record that is acknowledged for every node of the job, as far as is known here.
    """

    def __init__(self, node: str, reserve: Reserve, keeper: Keeper | None = None) -> None:
        self._node = node
        self._reserve = reserve
        self._keeper = keeper
        self._attempt: str | None = None
        #: Whether the attempt needs what was kept of earlier ones, until it is protected itself.
        self._goes_on = True
        self._code: Code | None = None
        self._windows: dict[tuple[RankGroup, str], KeptWindow] = {}
        self.watermark = 0

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self._windows.values())

    def windows(self) -> list[KeptWindow]:
        return list(self._windows.values())

    def window(self, owner: RankGroup, generation: str) -> KeptWindow | None:
        return self._windows.get((owner, generation))

    # Attempts

    def halt(self) -> None:
        self._attempt = self._code = None

    def adopt(self, window: Window, unit: int, rooms: Mapping[int, Room]) -> None:
        """Take over what a process that has died kept of a generation.

        Args:
            window: the generation.
            unit: bytes of a fragment of a whole stripe.
            rooms: memory where its fragments lie, by slot; closed with the window.

        Raises:
            ValueError: the rooms are not those of such a window.
        """
        kept = KeptWindow(window, unit, self._reserve, self._keeper, rooms)
        self._windows[window.owner, window.generation] = kept

    def begin(self, attempt: str, record: int | None, code: Code, rejoined: bool = False) -> None:
        self._attempt, self._code = attempt, code
        self.watermark = record or 0
        if rejoined:
            return
        self._goes_on = record is not None
        if record is not None:
            for window in self.windows():
                window.drop_beyond(record)

    def close(self) -> None:
        """Drop all that is kept."""
        for window in self.windows():
            self._forget(window)

    def leave(self) -> None:
        for window in self.windows():
            window.leave()
        self._windows.clear()

    def _forget(self, window: KeptWindow) -> None:
        del self._windows[window.window.owner, window.window.generation]
        window.close()

    # What owners say

    def open(self, window: Window) -> NotStored | None:
        key = window.owner, window.generation
        if window.attempt != self._attempt or self._code is None:
            return NotStored(*key, window.base, "it belongs to another attempt than the one that runs here", True)
        known = self._windows.get(key)
        if known is not None and known.window == window:
            return None  # the owner has lost sight of what is here, and sends it once more
        if known is not None:
            self._forget(known)
        count = sum(one.window.owner == window.owner and one.window.attempt == self._attempt for one in self.windows())
        if count >= MOST_WINDOWS:
            return NotStored(*key, window.base, f"{count} generations are kept until every node has what follows", True)
        try:
            self._windows[key] = self._make_window(window, self._code)
        except (MemckptError, ValueError) as error:
            return NotStored(*key, window.base, str(error), True)
        return None

    def _make_window(self, window: Window, code: Code) -> KeptWindow:
        unit = code.fragment_bytes(STRIPE_BYTES)
        try:
            return KeptWindow(window, unit, self._reserve, self._keeper)
        except BeingReservedError:
            raise
        except MemckptError as error:
            former = [one for one in self.windows() if one.window.attempt != self._attempt]
            if self._goes_on or not former:
                raise
            _log.warning("dropping fragments of an earlier attempt, which this one does not use: %s", error)
            for one in former:
                self._forget(one)
            return KeptWindow(window, unit, self._reserve, self._keeper)

    def keep_own(self, window: Window, code: Code) -> KeptWindow:
        """Make room for a state of this node's own ranks, which it keeps itself.

        Args:
            window: what it would tell a holder.
            code: the code of its fragments.

        Raises:
            MemckptError: there is none.
        """
        self.let_go_of(window.owner, window.generation)
        kept = KeptWindow(window, code.fragment_bytes(STRIPE_BYTES), self._reserve, self._keeper)
        self._windows[window.owner, window.generation] = kept
        return kept

    def keeps_for_itself(self, window: KeptWindow) -> bool:
        """Whether a window is of this node's own ranks."""
        return window.window.node == self._node

    def let_go_of(self, owner: RankGroup, generation: str) -> None:
        """Drop a generation that is not needed any more."""
        window = self._windows.get((owner, generation))
        if window is not None:
            self._forget(window)

    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> Stored | NotStored | None:
        key = fragment.owner, fragment.generation
        window = self._windows.get(key)
        if window is None or window.window.attempt != self._attempt or self._code is None:
            return NotStored(*key, fragment.record, "no window of this generation is open here", True)
        problem = check(fragment, payload) or window.misfit(fragment)
        if not problem and len(payload) != (size := self._code.fragment_bytes(fragment.length)):
            problem = f"expected {size} bytes, found {len(payload)}"
        if problem:
            return NotStored(*key, fragment.record, f"a fragment of it came damaged: {problem}")
        try:
            return Stored(*key, fragment.record) if window.put(fragment, step, payload) else None
        except MemckptError as error:
            return NotStored(*key, fragment.record, str(error))

    def abandon(self, owner: RankGroup, generation: str, record: int) -> None:
        window = self._windows.get((owner, generation))
        if window is None:
            return
        window.abandon(record)
        if window.window.cut and not window.records():
            self._forget(window)  # another state is sent instead

    def watermark_advanced(self, watermark: int, whole: bool) -> None:
        self.watermark = max(self.watermark, watermark)
        # Beyond the base: that itself was acknowledged before, where a generation begins because its agent was lost.
        newest = {
            window.window.owner: window.window.base
            for window in sorted(self.windows(), key=lambda one: one.window.base)
            if window.window.attempt == self._attempt and window.window.base < self.watermark and not window.window.cut
        }
        for window in self.windows():
            told = window.window
            if told.attempt != self._attempt:
                if whole:
                    self._forget(window)
            elif told.cut:
                if told.base < self.watermark:
                    self._forget(window)  # a later state is with all its holders, or records reach further
            elif told.base < newest.get(told.owner, told.base):
                self._forget(window)
            else:
                # One more than a state takes, for who repeats a step: where a slot is needed, the oldest goes first.
                window.drop_up_to(self.watermark - told.period * told.every - (not window.snapshots))

    def forget_before(self, owner: RankGroup, base: int) -> None:
        """Drop an owner's generations of this attempt that begin before `base`."""
        for window in self.windows():
            told = window.window
            if told.owner == owner and told.attempt == self._attempt and told.base < base and not told.cut:
                self._forget(window)

    def held(self, fingerprint_of: Callable[[KeptWindow], tuple[str, ...] | None]) -> tuple[HeldFragments, ...]:
        """Description of all that is kept, for the plan."""
        return tuple(window.held(self._node, fingerprint_of(window)) for window in self.windows())
