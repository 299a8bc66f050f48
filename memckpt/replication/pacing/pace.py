"""Times at which records may be sent: the rate cap, the governor's limit, and the phases of training, put together.

The caller passes the time, in seconds, and asks before each piece of bulk. Acknowledgements and watermarks do not ask.
"""

from __future__ import annotations

from memckpt.memory.pages import Phase
from memckpt.replication.pacing.governor import Governor, StepClock

_BURST_SECONDS = 0.02
_LOOK_AGAIN_SHARE = 0.01  # of a step: marks are in shared memory, and nobody says that a phase is over
_LOOK_AGAIN_SECONDS = (0.002, 0.02)  # a look takes a quarter of a millisecond, which is not to slow steps down
_HOLD_SECONDS = 1.0  # bulk is held back in one backward for so long at the most,
_HOLD_SHARE = 0.75  # for this share of a step,
_HOLD_UNKNOWN_SECONDS = 0.25  # and for so long while step times are not known
_STILL_STEPS, _STILL_SECONDS = 10, 5.0  # without a mark for so long, no step is running
_URGENT_SHARE = 0.75  # of the room for records that wait
_WAIT_SHARE, _WAIT_SECONDS = 0.005, 0.001  # shorter waits for acknowledgements are none
_SETTLED_SHARE = 0.1  # of a step: what was sent earlier has arrived when the next one begins,
_SETTLED_BYTES = 256 << 10  # unless more than that is not acknowledged
_LONG_STEP = 3.0  # in a probe, a step of so many times the usual length waits for what is held back
_WAITED_STEPS, _URGENT_STEPS = 8, 2  # for which nothing is slowed down afterwards
_FLOOR_MARGIN = 1.1


class RateCap:
    """A token bucket: in any t seconds at most `rate` * t bytes go, and a burst of 20 ms worth, or one piece."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._full_at = 0.0  # when all that was sent will have been paid for

    @property
    def rate(self) -> float | None:
        return self._rate

    def set_rate(self, rate: float | None, now: float) -> None:
        """Change the rate; what is owed stays owed."""
        if self._rate is not None and rate is not None and self._full_at > now:
            self._full_at = now + (self._full_at - now) * self._rate / rate
        self._rate = rate

    def delay(self, nbytes: int, now: float) -> float:
        """Seconds until `nbytes` may go; 0: now."""
        if self._rate is None:
            return 0.0
        cost = nbytes / self._rate
        return max(0.0, self._full_at + cost - max(_BURST_SECONDS, cost) - now)

    def sent(self, nbytes: int, now: float) -> None:
        """Charge bytes that went."""
        if self._rate is not None:
            self._full_at = max(self._full_at, now) + nbytes / self._rate


class Pacer:
    """Decides when bulk may go: never above the rate cap, and so that steps are slower by `overhead` at most."""

    def __init__(self, rate_bytes_per_second: float | None = None, overhead: float = 0.03) -> None:
        self._cap = RateCap(rate_bytes_per_second)
        self._soft = RateCap(None)
        self.clock = StepClock(_HOLD_SECONDS)
        self.governor = Governor(overhead)
        self._backwards: dict[int, float] = {}  # ranks in backward, since when
        self._marked_at: float | None = None
        self._needed = 0.0
        self._room: int | None = None
        self._waiting = 0
        self._in_flight = 0
        # What has happened in the step that runs.
        self._step_sent = 0
        self._step_waited = 0.0
        self._step_probes = False  # a probe, and nothing has gone before training waited
        self._busy_seconds = 0.0
        self._binding = False
        self._settled = False
        self._began = 0.0
        self._last_sent: float | None = None
        self._held_since: float | None = None  # nothing has gone since then
        self.holding = False
        self._why = ""

    # What happens

    def mark_phase(self, step: int, phase: Phase | int, ns: int, rank: int = 0) -> None:
        """A local rank has entered a phase; `ns` of the monotonic clock. Step times are those of rank position 0."""
        phase, at = Phase(phase), ns * 1e-9
        self._marked_at = at if self._marked_at is None else max(self._marked_at, at)
        if phase == Phase.BACKWARD:
            self._backwards[rank] = at
        else:
            self._backwards.pop(rank, None)
        if rank == 0:
            ended = self.clock.mark_phase(step, phase, ns)
            if ended is not None:
                self._step_ended(step, ended, at)

    def needs(self, bytes_per_step: float, waiting: int, room: int | None = None) -> None:
        """Note the bytes that each step adds, those queued, and how many may be before training waits (`room`)."""
        self._needed, self._waiting, self._room = bytes_per_step, waiting, room

    def sent(self, nbytes: int, now: float) -> None:
        """Note bytes of bulk that went."""
        self._cap.sent(nbytes, now)
        if self._limited(now):
            self._soft.sent(nbytes, now)
        self._step_probes &= self._step_waited > 0
        if self._last_sent is not None and self._step_sent:
            self._busy_seconds += min(max(now - self._last_sent, 0.0), _BURST_SECONDS)
        self._step_sent += nbytes
        self._waiting = max(0, self._waiting - nbytes)
        self._last_sent, self._held_since = now, None

    def in_flight(self, nbytes: int) -> None:
        """Note the bytes that are not acknowledged. Kernels take MiBs long before they are on the wire."""
        self._in_flight = nbytes

    def waited(self, seconds: float) -> None:
        """Note seconds that training has waited for acknowledgements. A probe ends with it, and counts without."""
        self._step_waited += seconds
        if self._step_waited > max(_WAIT_SECONDS, _WAIT_SHARE * (self.clock.step_seconds or 0.0)):
            self.governor.overrule("training waits for acknowledgements", _WAITED_STEPS)

    def _step_ended(self, step: int, seconds: float, at: float) -> None:
        rate = self._step_sent / (max(self._busy_seconds, 1e-4) if self._busy_seconds > 0 else seconds)
        floor = self._floor()
        self._step_probes &= self._step_waited < seconds  # or part of the waiting was before it
        sent = 0 if self._step_probes else self._step_sent
        seconds -= self._step_waited if self._step_probes else 0.0
        self.governor.step_ended(
            step, seconds, sent=sent, settled=self._settled, rate=rate, floor=floor, binding=self._binding
        )
        self._step_probes = self.governor.probing
        self._step_sent, self._step_waited, self._busy_seconds, self._binding = 0, 0.0, 0.0, False
        self._began = at
        long_ago = self._last_sent is None or at - self._last_sent > _SETTLED_SHARE * seconds
        self._settled = long_ago and self._in_flight <= _SETTLED_BYTES
        limit = self.governor.limit
        self._soft.set_rate(None if limit is None else max(limit, floor), at)

    def _floor(self) -> float:
        """Bytes per second that records need, in the time that is not held."""
        step = self.clock.step_seconds
        if step is None:
            return 0.0
        held = min(self.clock.backward_seconds or 0.0, _HOLD_SHARE * step)
        return _FLOOR_MARGIN * self._needed / max(step - held, 1e-9)

    # What follows from it

    def piece(self, most: int) -> int:
        """Bytes to send in one go, `most` at most: no more than a burst at the configured rate."""
        return most if self._cap.rate is None else max(1, min(most, int(self._cap.rate * _BURST_SECONDS)))

    def delay(self, nbytes: int, now: float) -> float:
        """Seconds after which to ask again whether so many bytes may go; 0: now. Read the marks first."""
        wait = self._cap.delay(nbytes, now)
        if wait > 0:
            self._why = "at the configured rate"
        self.holding = self._is_held(now)
        if self.holding:
            if self._held_since is None:
                self._held_since = now
            return max(wait, self._look_again())
        if self._limited(now):
            soft = self._soft.delay(nbytes, now)
            self._binding |= soft > wait
            wait = max(wait, soft)
        return wait

    def _is_held(self, now: float) -> bool:
        if self._is_overruled():
            return False
        if self.governor.probing:
            if now - self._began <= _LONG_STEP * (self.clock.step_seconds or 0.0) + _BURST_SECONDS:
                self._why = "held back for some steps, to learn the step time without traffic"
                return True
            self.governor.end_probe()
        if self._leads_to_probe(now):
            self._why = "held back for some steps, to learn the step time without traffic"
            return True
        longest = self._longest_hold()
        if self._held_since is not None and now - self._held_since >= longest:
            return False
        if any(now - since < longest for since in self._backwards.values()):
            self._why = "held back while gradients are reduced"
            return True
        return False

    def _leads_to_probe(self, now: float) -> bool:
        """Whether this is the end of the step before a probe; one that takes longer than others waits no further."""
        step, since, lead = self.clock.step_seconds, now - self._began, self.governor.lead
        return self.governor.probe_follows and step is not None and (1 - lead) * step <= since <= _LONG_STEP * step

    def _limited(self, now: float) -> bool:
        if self._soft.rate is None or self.governor.probe_follows:  # before a probe what waits has to go
            return False
        return self._runs(now) and not self._is_overruled()

    def _runs(self, now: float) -> bool:
        """Whether steps are being made: else nobody can be slowed down."""
        still = max(_STILL_SECONDS, _STILL_STEPS * (self.clock.step_seconds or 0.0))
        return self._marked_at is not None and now - self._marked_at < still

    def _is_overruled(self) -> bool:
        if self._room is not None and self._waiting > _URGENT_SHARE * self._room:
            self.governor.overrule("there is hardly any room left for records that wait to be sent", _URGENT_STEPS)
        return self.governor.overruled

    def _look_again(self) -> float:
        shortest, longest = _LOOK_AGAIN_SECONDS
        return min(max(shortest, _LOOK_AGAIN_SHARE * (self.clock.step_seconds or 0.0)), longest)

    def _longest_hold(self) -> float:
        step = self.clock.step_seconds
        return _HOLD_UNKNOWN_SECONDS if step is None else min(_HOLD_SECONDS, _HOLD_SHARE * step)

    @property
    def rate_limit(self) -> float | None:
        """Bytes per second that may be sent at present, as of the last call of :meth:`delay`; None: no limit."""
        soft = None if self.governor.overruled else self._soft.rate
        return min((rate for rate in (self._cap.rate, soft) if rate is not None), default=None)

    @property
    def reason(self) -> str:
        """Why records are sent as fast as they are, in words."""
        return self._why if self.holding else self.governor.reason
