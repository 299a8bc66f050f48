"""The replicator's part in standby replicas: an owner's records go from the network into their slots, and the agent
redoes them.

What is not for a standby replica goes to the holder of fragments. So does what there is no replica for: it is kept as
plain copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from memckpt.memory.region import Region
from memckpt.protocol.messages import ReplicatorToAgent
from memckpt.protocol.standby import (
    CloseStandby,
    OpenStandby,
    StandbyApplied,
    StandbyFailed,
    StandbyOpened,
    StandbyRefused,
)
from memckpt.replication.coding.code import Code
from memckpt.replication.coding.fragments import Fragment
from memckpt.replication.keeping.fragment_store import MOST_WINDOWS, FragmentStore
from memckpt.replication.keeping.kept_window import KeptWindow
from memckpt.replication.keeping.record_store import RecordStore
from memckpt.replication.keeping.windows import differing, sizes_of
from memckpt.replication.process.standby_window import Key, StandbyWindow
from memckpt.replication.transport.wire import BEING_MADE, NotStored, Stored, Window, WireMessage
from memckpt.state.received import read_spec
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.replicator")


class StandbyFeed(RecordStore):
    """Keeps what owners send: on standby replicas where it is for these and the agent makes them, else with the holder.

    Args:
        fragment_store: keeps fragments and plain copies.
        ask: has the agent make a standby replica; the answer follows, by :meth:`answered`.
        tell: gives the agent a message.
    """

    def __init__(
        self,
        fragment_store: FragmentStore,
        ask: Callable[[OpenStandby], None],
        tell: Callable[[ReplicatorToAgent], None],
    ) -> None:
        self._fragment_store = fragment_store
        self._ask = ask
        self._tell = tell
        self._attempt: str | None = None
        self._standbys: dict[Key, StandbyWindow] = {}
        #: Windows whose standby replica the agent is making.
        self._asked: dict[Key, Window] = {}
        #: Windows that are kept as plain copies instead, and why.
        self._refused: dict[Key, str] = {}

    @property
    def watermark(self) -> int:
        """The newest record that is acknowledged for every node, as far as is known here."""
        return self._fragment_store.watermark

    @property
    def nbytes(self) -> int:
        """Memory of fragments and plain copies; standby replicas are the agent's."""
        return self._fragment_store.nbytes

    @property
    def problem(self) -> str:
        """Reason for plain copies in place of replicas, in words; empty if there are none."""
        return next((f"ranks {list(key[0])}: {reason}" for key, reason in self._refused.items()), "")

    def kept(self) -> tuple[tuple[str, RankGroup, int], ...]:
        """Node, ranks and newest record of all that is kept."""
        others = [one for one in self.windows() if not self._fragment_store.keeps_for_itself(one)]
        fragments = [(one.window, max(records)) for one in others if (records := one.records())]
        as_standby = [(one.window, one.newest) for one in self._standbys.values() if one.newest is not None]
        return tuple((window.node, window.owner, newest) for window, newest in [*fragments, *as_standby])

    def windows(self) -> list[KeptWindow]:
        return self._fragment_store.windows()

    @property
    def fragment_store(self) -> FragmentStore:
        """The store of fragments and plain copies."""
        return self._fragment_store

    # Attempts

    def begin(self, attempt: str, record: int | None, code: Code, rejoined: bool = False) -> None:
        self._attempt = attempt
        self._fragment_store.begin(attempt, record, code, rejoined)

    def halt(self) -> None:
        # Standby replicas belong to the agent alone from now on.
        self._attempt = None
        for standby in self._standbys.values():
            standby.close()
        self._standbys.clear()
        self._asked.clear()
        self._refused.clear()
        self._fragment_store.halt()

    def forget(self) -> None:
        """Drop all fragments: nobody wants them. Standby replicas are the agent's."""
        self._fragment_store.close()

    def leave(self) -> None:
        self.halt()
        self._fragment_store.leave()

    # What owners say

    def open(self, window: Window) -> NotStored | None:
        key = window.owner, window.generation
        if not window.standby or key in self._refused or window.attempt != self._attempt:
            return self._fragment_store.open(window)
        known = self._standbys.get(key)
        if known is not None and known.window == window:
            known.opened_by_owner()
            return None
        if known is not None:
            self._drop(known)
        if key in self._asked:
            return NotStored(*key, window.base, BEING_MADE, nothing=True)
        count = sum(one.window.owner == window.owner for one in self._standbys.values())
        if count >= MOST_WINDOWS:
            reason = f"{count} generations are kept until every node has what follows"
            return NotStored(*key, window.base, reason, nothing=True)
        try:
            spec = read_spec(window.spec)
            if problem := differing(window, spec, sizes_of(spec, private=False)):
                raise ValueError(problem)
        except ValueError as error:
            return NotStored(*key, window.base, str(error), nothing=True)
        self._asked[key] = window
        self._ask(OpenStandby(*key, window.attempt, window.base, spec, window.history))
        return NotStored(*key, window.base, BEING_MADE, nothing=True)

    def answered(self, answer: StandbyOpened | StandbyRefused, regions: list[Region]) -> None:
        """The agent has made a standby replica, or cannot; its owner finds that when it tries again."""
        key = answer.ranks, answer.generation
        window = self._asked.pop(key, None)
        if isinstance(answer, StandbyRefused):
            if window is not None:
                _log.warning("plain copies are kept of the records of ranks %s: %s", list(key[0]), answer.reason)
                self._refused[key] = answer.reason
        elif window is not None:
            self._standbys[key] = standby = StandbyWindow(window, answer, regions, self._tell)
            standby.watermark = self.watermark
        else:
            # The attempt has ended meanwhile.
            for region in regions:
                region.close()
            self._tell(CloseStandby(*key))

    def put(self, fragment: Fragment, step: int, payload: memoryview | bytes) -> Stored | NotStored | None:
        key = fragment.owner, fragment.generation
        if key in self._asked:
            return None  # on its way when the owner was told to begin anew
        standby = self._standbys.get(key)
        if standby is None:
            return self._fragment_store.put(fragment, step, payload)
        return standby.put(fragment, payload)

    def abandon(self, owner: RankGroup, generation: str, record: int) -> None:
        standby = self._standbys.get((owner, generation))
        if standby is not None:
            standby.abandon(record)
        else:
            self._fragment_store.abandon(owner, generation, record)

    def watermark_advanced(self, watermark: int, whole: bool) -> None:
        self._fragment_store.watermark_advanced(watermark, whole)
        for standby in self._standbys.values():
            standby.watermark = self.watermark
        newest: dict[RankGroup, int] = {}
        begun = [one.window for one in self._standbys.values()] + [one.window for one in self.windows()]
        for window in begun:
            if window.attempt == self._attempt and window.base < watermark and not window.cut:  # as holders do
                newest[window.owner] = max(window.base, newest.get(window.owner, window.base))
        for owner, base in newest.items():
            self._fragment_store.forget_before(owner, base)
            for standby in [one for one in self._standbys.values() if one.window.owner == owner]:
                if standby.window.base < base:
                    self._drop(standby)

    def _drop(self, standby: StandbyWindow) -> None:
        del self._standbys[standby.key]
        standby.close()
        self._tell(CloseStandby(*standby.key))

    # What the agent says

    def heard(self, message: StandbyApplied | StandbyFailed) -> list[tuple[str, WireMessage]]:
        """News of a standby replica: what its owner is to get, and the owner's node."""
        standby = self._standbys.get((message.ranks, message.generation))
        if standby is None:
            return []
        node = standby.window.node
        if isinstance(message, StandbyApplied):
            return [(node, stored) for stored in standby.applied(message.applied)]
        del self._standbys[standby.key]
        standby.close()
        self._refused[standby.key] = message.reason
        _log.warning("plain copies are kept of the records of ranks %s: %s", list(message.ranks), message.reason)
        record = standby.window.base if standby.newest is None else standby.newest
        reason = f"its replica here is gone, plain copies are kept instead: {message.reason}"
        return [(node, NotStored(*standby.key, record, reason, nothing=True))]
