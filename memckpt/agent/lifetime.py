"""When an agent writes what trainers have left in memory, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from memckpt.agent.unit_host import Host
from memckpt.agent.units import Units

#: How long an agent that holds nothing waits for a trainer, at most.
_ORPHAN_SECONDS = 120.0
#: Time between two looks for the file that trainers find an idle agent by. Missing twice, it has been removed.
_FILE_SECONDS = 10.0


class Lifetime:
    """Belongs to the agent's event loop. `linger_seconds`: time for which state is held without a trainer."""

    def __init__(
        self,
        units: Units,
        host: Host,
        linger_seconds: float,
        by_operator: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._units, self._host = clock, units, host
        self.linger_seconds, self.by_operator = linger_seconds, by_operator
        self.started = clock()
        #: Since when no trainer is here; None while one is, or is awaited.
        self.idle_since: float | None = self.started
        #: Why the agent ends; None as long as it does not.
        self.over: str | None = None
        #: Training has finished, and its final step has to be in storage first, whatever time that takes.
        self.finishing = False
        self._had_attempt = False
        #: Why it ends as soon as what it holds is in storage; None: it stays.
        self._over_when_saved: str | None = None
        self._ordered = False
        #: Whether it stays until what it holds is in storage, whatever time that takes: a user has stopped it.
        self._patient = False
        self._saved_alone = False
        self._look_at = self.started + _FILE_SECONDS
        self._is_missed = False

    # What happens

    def trainer_came(self) -> None:
        self.idle_since = None
        self._is_missed = False

    def trainers_left(self) -> None:
        self.idle_since = self._clock()

    def begin_attempt(self, first: bool) -> None:
        """Stay for the trainers of a new attempt, unless the end was ordered."""
        self._had_attempt = True
        if not first and not self._ordered:
            self.over = self._over_when_saved = None
            self.finishing = self._patient = False
        self._saved_alone = False

    def end_when_saved(self, reason: str, finishing: bool = False, ordered: bool = False) -> None:
        """End once what is held is in storage: at any time if training is `finishing`, else within grace."""
        self._ordered = self._ordered or ordered
        self._over_when_saved, self.finishing = reason, finishing and not self._ordered
        self._save(as_checkpoint=finishing)

    def stop_when_saved(self, reason: str) -> None:
        """End once what no trainer will commit again is in storage, however long that takes."""
        if not self.finishing:  # then it ends so by itself
            self._patient = True
            self.end_when_saved(reason)

    def checkpoint_failed(self) -> bool:
        """Try again what is not in storage after all; returns whether trainers that have finished wait for it."""
        if not self._saved_alone:
            return False
        self._saved_alone = False
        self._units.retry_later()
        return self.finishing

    # The clock

    def look_at_clock(self) -> None:
        if self.idle_since is not None:
            self._units.save_asked()
        if self._must_save and self._clock() >= self._units.may_save_from(self.idle_since or 0.0):
            self._save(as_checkpoint=self.finishing)
        if self._over_when_saved is not None and not self._units.saving and not self._owes:
            lost = f"; what it held could not be saved: {self.unsaved}" if self.unsaved else ""
            self.over = self._over_when_saved + lost
        lingers_until = self._lingers_until()
        if lingers_until is not None and self._clock() >= lingers_until and not self._units.saving:
            self.over = f"no trainer came back within {self.linger_seconds:.0f} s"
        if self._watches_file and self._clock() >= self._look_at:
            self._look_at = self._clock() + _FILE_SECONDS
            was_missed, self._is_missed = self._is_missed, self._host.has_lost_file()
            if was_missed and self._is_missed:
                self.over = "its run directory was removed, and no trainer finds it any more"

    def deadline(self) -> float | None:
        """When something is due by the clock; None: nothing is."""
        # What is being saved has a deadline of its own, and its end is an event.
        lingers_until = None if self._units.saving else self._lingers_until()
        save_from = self._units.may_save_from(self.idle_since or 0.0) if self._must_save else None
        graced_until = self._units.preempted_until if self._over_when_saved is not None and self._owes else None
        look_at = self._look_at if self._watches_file else None
        return min((at for at in (lingers_until, save_from, graced_until, look_at) if at is not None), default=None)

    @property
    def _watches_file(self) -> bool:
        """Whether a trainer may yet look for it: what it holds is no use to anybody once its file is gone."""
        return self.idle_since is not None and self._over_when_saved is None and not self._units.saving

    @property
    def _owes(self) -> bool:
        """Whether it stays although it is to end: what it holds could not be saved, and is tried again."""
        in_grace = self._in_grace and bool(self._units.complete_generations)
        return not self._saved_alone and (self.finishing or in_grace or self._patient)

    @property
    def unsaved(self) -> str:
        """Why what it holds is not in storage; empty if it is, or nothing is to be."""
        if not self._units.enabled or not self._units.complete_generations:
            return ""
        if self._saved_alone and not self._units.saving:
            return ""
        return self._units.alarm or "there was no time for it"

    def _lingers_until(self) -> float | None:
        """When lingering ends; None while a trainer is here."""
        if self.idle_since is None or (self.by_operator and not self._had_attempt):
            return None
        holds = bool(self._units.complete_generations) or self._host.bytes_for_peers() > 0
        limit = self.linger_seconds if holds else min(self.linger_seconds, _ORPHAN_SECONDS)
        return self.idle_since + limit

    @property
    def _must_save(self) -> bool:
        """Whether no trainer is here, or the end is ordered, and what is held is not on its way to storage yet."""
        alone = self.idle_since is not None or self._in_grace
        held = bool(self._units.complete_generations)
        return alone and held and not self._saved_alone and self._units.enabled

    @property
    def _in_grace(self) -> bool:
        return self._ordered and self._units.preempted_until is not None

    def _save(self, as_checkpoint: bool) -> None:
        self._saved_alone = True
        self._units.save_held(as_checkpoint)
