"""Conditions of a run whose begin and end are events: tiers, lags, stalls."""

from __future__ import annotations

from collections.abc import Callable

from memckpt.journal.events import AnyEvent, CaughtUp, Degraded, Lagging, Stalled, Whole

#: Seconds for which a lag lasts before it is an event.
_LAG_SECONDS = 5.0
#: Stall of a step that is an event, in milliseconds; seconds in which several are one event.
_STALL_MS, _STALLS_SECONDS = 1000.0, 10.0

Note = Callable[[AnyEvent], None]
Clock = Callable[[], float]


class Tier:
    """A tier that is whole or degraded.

    Args:
        name: its name in events.
        note: takes events.
        clock: monotonic, in seconds.
    """

    def __init__(self, name: str, note: Note, clock: Clock) -> None:
        self._name = name
        self._note = note
        self._clock = clock
        #: Why it is degraded; empty: it is whole; None: it has not been whole yet.
        self._reason: str | None = ""
        self._since = 0.0

    @property
    def reason(self) -> str:
        """Why it is degraded; empty if it is not."""
        return self._reason or ""

    def restart(self) -> None:
        """Begin anew: what is not whole yet is not degraded either."""
        self._reason, self._since = None, self._clock()

    def see(self, reason: str) -> None:
        """Note a change. `reason`: why it is degraded; empty if it is whole."""
        if (not reason) == (self._reason == ""):
            return
        now = self._clock()
        if reason:
            self._since = now
            self._note(Degraded(self._name, reason))
        else:
            self._note(Whole(self._name, round(now - self._since, 3)))
        self._reason = reason


class Lag:
    """A tier that is behind training by as many records as slots allow, for a while."""

    def __init__(self, tier: str, note: Note, clock: Clock) -> None:
        self._tier = tier
        self._note = note
        self._clock = clock
        self._since: float | None = None
        self._noted = False

    def see(self, behind: int, limit: int) -> None:
        """Note a change; called every second or so."""
        now = self._clock()
        if behind < limit:
            if self._noted and self._since is not None:
                self._note(CaughtUp(self._tier, round(now - self._since, 3)))
            self._since, self._noted = None, False
            return
        self._since = now if self._since is None else self._since
        if not self._noted and now - self._since >= _LAG_SECONDS:
            self._noted = True
            self._note(Lagging(self._tier, behind, limit))


class Stalls:
    """Steps that protection has kept waiting for long."""

    def __init__(self, note: Note, clock: Clock) -> None:
        self._note = note
        self._clock = clock
        self._step: int | None = None
        self._longest_ms, self._count = 0.0, 0
        self._note_at = 0.0

    def add(self, step: int, stall_ms: float) -> None:
        """A step has waited."""
        if stall_ms >= _STALL_MS:
            self._step, self._longest_ms = step, max(stall_ms, self._longest_ms)
            self._count += 1

    def look(self) -> None:
        """Note what has come together."""
        now = self._clock()
        if self._count and now >= self._note_at:
            self._note(Stalled(self._step, round(self._longest_ms, 1), self._count))
            self._longest_ms, self._count, self._note_at = 0.0, 0, now + _STALLS_SECONDS
