"""The replicator's part in mirrors: an owner's records go from the network into their slots, and the agent redoes them.

What is not for a mirror goes to the holder of pieces. So does what there is no replica for: it is kept as plain copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from memckpt.memory.region import Region
from memckpt.protocol.standby import (
    CloseMirror,
    MirrorApplied,
    MirrorFailed,
    MirrorOpened,
    MirrorRefused,
    OpenMirror,
)
from memckpt.protocol.trainer import Message
from memckpt.replication.coding.code import Code
from memckpt.replication.coding.fragments import Fragment
from memckpt.replication.keeping.fragment_store import MOST_WINDOWS, Holder
from memckpt.replication.keeping.kept_window import KeptWindow
from memckpt.replication.keeping.windows import differing, sizes_of
from memckpt.replication.process.standby_window import Key, MirrorWindow
from memckpt.replication.transport.wire import NotStored, Stored, Window, WireMessage
from memckpt.state.received import read_spec

_log = logging.getLogger("memckpt.replicator")
_BEING_MADE = "memory for its replica is being reserved"


class Mirroring:
    """Keeps what owners send: on mirrors where it is for these and the agent makes them, else with the holder.

    Belongs to the replicator's loop.

    Args:
        holder: of pieces and plain copies; left with it.
        ask: has the agent make a mirror; None: the answer follows, by :meth:`answered`.
        tell: gives the agent a message.
    """

    def __init__(
        self,
        holder: Holder,
        ask: Callable[[OpenMirror], tuple[MirrorOpened, list[Region]] | MirrorRefused | None],
        tell: Callable[[Message], None],
    ) -> None:
        self._holder = holder
        self._ask = ask
        self._tell = tell
        self._attempt: str | None = None
        self._mirrors: dict[Key, MirrorWindow] = {}
        #: That the agent is making.
        self._asked: dict[Key, Window] = {}
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
        others = [one for one in self.windows() if not self._holder.keeps_for_itself(one)]
        pieces = [(one.window, max(records)) for one in others if (records := one.records())]
        mirrored = [(one.window, one.newest) for one in self._mirrors.values() if one.newest is not None]
        return tuple((window.node, window.owner, newest) for window, newest in [*pieces, *mirrored])

    def windows(self) -> list[KeptWindow]:
        return self._holder.windows()

    @property
    def holder(self) -> Holder:
        """Of pieces and plain copies."""
        return self._holder

    # Attempts

    def begin(self, attempt: str, record: int | None, code: Code, rejoined: bool = False) -> None:
        """As for a holder."""
        self._attempt = attempt
        self._holder.begin(attempt, record, code, rejoined)

    def halt(self) -> None:
        """The attempt is over: mirrors belong to the agent alone from now on."""
        self._attempt = None
        for mirror in self._mirrors.values():
            mirror.close()
        self._mirrors.clear()
        self._asked.clear()
        self._refused.clear()
        self._holder.halt()

    def forget(self) -> None:
        """Nobody wants what was kept until now. Mirrors are the agent's."""
        self._holder.close()

    def leave(self) -> None:
        """Unmap everything; the agent keeps it."""
        self.halt()
        self._holder.leave()

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
        if key in self._asked:
            return NotStored(*key, window.base, _BEING_MADE, nothing=True)
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
        if answer is None:
            self._asked[key] = window
            return NotStored(*key, window.base, _BEING_MADE, nothing=True)
        if isinstance(answer, MirrorRefused):
            self._note_refused(key, answer)
            return self._holder.open(window)
        self._note_opened(window, *answer)
        return None

    def _note_refused(self, key: Key, answer: MirrorRefused) -> None:
        _log.warning("plain copies are kept of the records of ranks %s: %s", list(key[0]), answer.reason)
        self._refused[key] = answer.reason

    def _note_opened(self, window: Window, answer: MirrorOpened, regions: list[Region]) -> None:
        self._mirrors[window.owner, window.generation] = mirror = MirrorWindow(window, answer, regions, self._tell)
        mirror.watermark = self.watermark

    def answered(self, answer: MirrorOpened | MirrorRefused, regions: list[Region]) -> None:
        """The agent has made a mirror, or cannot; its owner finds that when it tries again."""
        key = answer.ranks, answer.generation
        window = self._asked.pop(key, None)
        if isinstance(answer, MirrorRefused):
            if window is not None:
                self._note_refused(key, answer)
        elif window is not None:
            self._note_opened(window, answer, regions)
        else:
            # The attempt has ended meanwhile.
            for region in regions:
                region.close()
            self._tell(CloseMirror(*key))

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
            if window.attempt == self._attempt and window.base < watermark and not window.cut:  # as holders do
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
