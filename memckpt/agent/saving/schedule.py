"""Times and records of checkpoints; steps that may be lost until one is there.

Units and nodes are saved apart, after the same record. Where steps decide, that is so by itself. Else the first rank's
saver chooses, tells those of its node, and announces the record in the storage long before.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

from memckpt.config import StorageConfig
from memckpt.journal.events import Decision
from memckpt.memory.generation import Generation
from memckpt.processes.attempt import Attempt
from memckpt.processes.backoff import Backoff
from memckpt.protocol.storing import Saved
from memckpt.protocol.trainer import Observed

_log = logging.getLogger("memckpt.agent")
_DEFAULTS = StorageConfig()

#: Records before a copy of the state at which its memory is taken and its order given, where steps decide.
_ORDER_RECORDS = 16
#: With several nodes: seconds by which the first rank's announces a checkpoint ahead, and between others' looks.
_ANNOUNCE_SECONDS, _LOOK_SECONDS = 8.0, 2.0
#: Records ahead of the newest one at which savers on the same node are told.
_TELL_RECORDS = 4

#: The longest interval: a hundred years.
_LONGEST_SECONDS = 3.2e9
#: Ratio of target to interval up to which the interval stays, and by which it moves at most; looks in a row.
_BAND, _LARGEST_STEP, _LOOKS = 1.25, 4.0, 2


class Follower:
    """A `value` that follows a noisy target: more than 25% off in two looks, it moves, by a factor of four at most."""

    def __init__(self, value: float | None = None) -> None:
        self.value = value
        self._above = self._looks = 0

    def follow(self, target: float) -> bool:
        """Look at the target. Returns whether the value has moved."""
        if self.value is None:
            self.value = target
            return True
        above = (target > self.value * _BAND) - (target < self.value / _BAND)
        self._looks = self._looks + 1 if above and above == self._above else abs(above)
        self._above = above
        if self._looks < _LOOKS:
            return False
        self._looks = 0
        self.value = min(self.value * _LARGEST_STEP, max(self.value / _LARGEST_STEP, target))
        return True


def checkpoint_interval(
    cost_seconds: float, failures_per_second: float, repeated_share: float, least_seconds: float
) -> float:
    """Best seconds between checkpoints, sqrt(2 x cost x MTTF) of Young (1974), not below the least.

    `repeated_share`: cost of a lost second in seconds; 1 where steps are trained again, less where records are logged.
    """
    mttf_seconds = 1 / (failures_per_second * repeated_share)
    return min(_LONGEST_SECONDS, max(least_seconds, math.sqrt(2 * cost_seconds * mttf_seconds)))


def alone(generation: Generation) -> bool:
    """Whether all ranks of the job run on this node and hold the same."""
    return generation.spec.world_size == len(generation.spec.local_ranks)


class Pace:
    """Time per record, over those since :meth:`restart`."""

    _ENOUGH = 8

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._newest: tuple[int, float] | None = None

    def restart(self) -> None:
        self._first = self._newest = None

    def add_record(self, record: int, now: float) -> None:
        """Count a record that was committed at `now`, in seconds of the monotonic clock."""
        self._first = self._first or (record, now)
        self._newest = record, now

    @property
    def seconds(self) -> float | None:
        """Seconds per record; None before there are enough of them."""
        if self._first is None or self._newest is None or self._newest[0] - self._first[0] < self._ENOUGH:
            return None
        return (self._newest[1] - self._first[1]) / (self._newest[0] - self._first[0])


def _spacing(skipped: int) -> int:
    """The power of two above."""
    return 1 << skipped.bit_length()


class Schedule:
    """The schedule of a run's checkpoints. `announce` tells savers here, with True other nodes, which record is next.

    `look` asks what was announced, for :meth:`announced`. `decided` gets each change of the interval.
    """

    def __init__(
        self,
        announce: Callable[[int, bool], None],
        look: Callable[[], None],
        decided: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self._announce_record = announce
        self._look, self._decided = look, decided
        self._config: StorageConfig | None = None
        self.pace = Pace()
        #: Whether no checkpoint of this run has begun yet: until one is there, losing the machine loses everything.
        self._first = True
        #: Whether a checkpoint, or what is in the log's buffers, is wanted as soon as possible.
        self.at_once = False
        self._began = time.monotonic()
        #: Pauses after failures: none, then 1, 2, 4, ... seconds.
        self._backoff = Backoff(lambda: time.monotonic(), at_once=1)
        self._not_before = float("-inf")
        self._copy_seconds = self._cost_seconds = 0.0
        #: Whether records between checkpoints are logged, so that a failure costs their redo only.
        self.logged = False
        #: Measurements of the job; None: none yet, or it does not tune.
        self._observed: Observed | None = None
        self._tuned = Follower()
        #: End of the newest grace period (monotonic clock); whether the agent ends with it.
        self.preempted_until, self._ending = float("-inf"), False
        #: By steps, of several nodes: which multiple of `every_steps` the newest order was for; what divides the next.
        self._multiple: int | None = None
        self._spacing: int | None = None
        #: Whether records are chosen by what the first rank's node announces.
        self._by_announcement = False
        self._announced: int | None = None
        self._looked_at = float("-inf")

    def configure(self, config: StorageConfig | None) -> None:
        self._config = config

    def restart(self) -> None:
        self.pace.restart()
        self._began = time.monotonic()
        self.preempted_until, self._ending, self.at_once = float("-inf"), False, False
        self._not_before = float("-inf")
        self._backoff.reset()
        self._announced = self._multiple = self._spacing = None
        self._observed, self._tuned = None, Follower()

    def preempt(self, grace_seconds: float, ending: bool = False) -> None:
        """Want a checkpoint written within a grace period; if the agent is `ending`, another one makes it no longer."""
        if not self._ending:
            self.preempted_until = time.monotonic() + grace_seconds
        self._ending = self._ending or ending
        self.at_once = True

    @property
    def preempted(self) -> bool:
        """Whether a grace period runs."""
        return time.monotonic() < self.preempted_until

    @property
    def ends_at(self) -> float:
        """Time at which the agent ends, and all writing with it (monotonic clock); infinite while it stays."""
        return self.preempted_until if self._ending else math.inf

    def limit_seconds(self) -> float:
        """Seconds that writing a checkpoint may take."""
        config = self._config or StorageConfig()
        if self._ending:
            return max(0.0, self.ends_at - time.monotonic())
        return config.grace_seconds if self.preempted else config.timeout_seconds

    # When, after which record

    def interval_seconds(self) -> float:
        """Least time from one checkpoint to the next, of which its cost is then the configured share."""
        least = self._least_seconds()
        return least if self._tuned.value is None else max(least, self._tuned.value)

    def _least_seconds(self) -> float:
        assert self._config is not None
        return max(self._config.min_seconds, self._cost_seconds / self._config.overhead)

    def observe(self, observed: Observed) -> None:
        """Take what the job measures, for the interval behind the next checkpoint, unless the user has set limits."""
        if self._config is not None:
            limits = self._config.every_steps, self._config.min_seconds, self._config.overhead
            if limits == (None, _DEFAULTS.min_seconds, _DEFAULTS.overhead):
                self._observed = observed

    def _follow(self) -> None:
        """Look at the best interval, once for each checkpoint: its cost is as good as the last measurement."""
        observed, cost = self._observed, self._cost_seconds
        if observed is None or not cost:
            return
        rate, share, before = observed.failures_per_second, self._repeated_share(observed), self.interval_seconds()
        if self._tuned.value is None:
            self._tuned = Follower(before)
        moved = self._tuned.follow(checkpoint_interval(cost, rate, share, self._least_seconds()))
        now = self.interval_seconds()
        if moved and abs(now - before) >= 1:
            redone = "redo takes" if self.logged else "is trained again, which takes"
            reason = (
                f"a checkpoint costs {cost:.2g} s of training, a failure comes every {1 / rate:,.0f} s, and what it "
                f"loses {redone} {share:.0%} of its time"
            )
            _log.info("interval of checkpoints: %.0f s -> %.0f s: %s", before, now, reason)
            self._decided(Decision("storage interval", round(before), round(now), reason))

    def _repeated_share(self, observed: Observed) -> float:
        """Seconds that a lost second of training costs: all of it, or its redo where records are logged."""
        seconds = self.pace.seconds
        if not self.logged or not seconds:
            return 1.0
        return min(1.0, max(0.01, observed.redo_seconds / seconds))

    def interval_steps(self) -> float | None:
        """Records between two checkpoints, about; None before that can be told."""
        assert self._config is not None
        if self._config.every_steps is not None:
            return self._config.every_steps
        seconds = self.pace.seconds
        return self.interval_seconds() / max(seconds, 1e-9) if seconds is not None else None

    def due_record(self, generation: Generation, attempt: Attempt, lead: int, unbased: bool) -> int | None:
        """Record, `lead` ahead, after which to copy the state; None: not now. `unbased`: the log wants one."""
        config = self._config
        if config is None or (time.monotonic() < self._not_before and not self.preempted):
            return None
        ahead = attempt.newest_record + lead
        one = alone(generation)
        elsewhere = len(attempt.local_ranks) < attempt.world_size
        self._by_announcement = config.every_steps is None and elsewhere
        if config.every_steps is not None and not (one and (self.at_once or unbased)):
            # A record's number may differ from the framework's step; the difference stays while training runs.
            newest = generation.newest
            step = generation.ledger.steps.get(newest)
            offset = step - newest if step is not None else 0
            multiple = -(-(ahead + offset) // config.every_steps)
            if not one:
                multiple = self._next_common(multiple)
            record = multiple * config.every_steps - offset
            # Not long before: memory for the copy is taken when it is ordered, and an export or peers may want one.
            if record - ahead > _ORDER_RECORDS + lead:
                return None
            self._multiple = None if one else multiple
            return record
        if not one and 0 not in generation.spec.local_ranks:
            return self._announced_record(ahead, look=0 not in attempt.local_ranks)
        wait = self._cost_seconds / config.overhead if unbased else self.interval_seconds()
        if not self.at_once and not self._first and time.monotonic() - self._began < wait:
            return None
        return ahead if one else self._announce(ahead, elsewhere)

    def _next_common(self, multiple: int) -> int:
        """A multiple that nodes take, too, which skip others: where some were skipped, that of a power of two."""
        if self._spacing is None:
            skipped = 0 if self._multiple is None else max(0, multiple - self._multiple - 1)
            self._spacing = _spacing(skipped)
        return multiple + -multiple % self._spacing

    def _announce(self, ahead: int, elsewhere: bool) -> int | None:
        record = ahead + _TELL_RECORDS
        if elsewhere:
            seconds = self.pace.seconds
            if seconds is None:
                return None
            record = ahead + math.ceil(_ANNOUNCE_SECONDS / max(seconds, 1e-6))
        self._announce_record(record, elsewhere)
        return record

    def _announced_record(self, ahead: int, look: bool) -> int | None:
        """The announced record, if there is still time for it; `look`: look for news now and then."""
        record, self._announced = self._announced, None
        if record is not None and record >= ahead:
            return record
        now = time.monotonic()
        if look and now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._look()
        return None

    def announced(self, record: int | None) -> None:
        """Note the record that has been announced on this attempt's timeline."""
        self._announced = record

    # How checkpoints go

    def began(self) -> None:
        """Note the beginning of the checkpoint that was due."""
        self.at_once = self._first = False
        self._spacing = None
        self._began = time.monotonic()
        self._backoff.started()

    def failed(self) -> None:
        """Have the next checkpoint wait, the longer the more have failed."""
        self._not_before = time.monotonic() + self._backoff.died()

    def now_it_may_work(self) -> None:
        """Have the next one at once: the reason of the failure is no more."""
        self._not_before, self.at_once = float("-inf"), True

    def again(self) -> None:
        """Have the next one at once: the last one came to nothing, and has not failed."""
        self._began = float("-inf")

    def copied(self, seconds: float) -> None:
        """Note the time that a copy of the state took of the trainers."""
        self._copy_seconds = seconds

    def wrote(self, saved: Saved) -> None:
        """Note the cost of a checkpoint that is in storage."""
        self._not_before = float("-inf")
        self._backoff.reset()
        self._cost_seconds = self._copy_seconds + saved.cpu_seconds / len(os.sched_getaffinity(0))
        self._follow()

    def loses_at_most(self, last: Saved | None, lead: int) -> int | None:
        """Steps from the newest checkpoint until the next is written; None before that can be told."""
        steps, seconds = self.interval_steps(), self.pace.seconds
        if last is None or steps is None or seconds is None:
            return None
        # Twice the last one's time: storage is not always as fast.
        delay = self._copy_seconds + 2 * last.seconds + (_ANNOUNCE_SECONDS if self._by_announcement else 0.0)
        writing = math.ceil(delay / max(seconds, 1e-6)) + lead
        spacing = 1 if self._multiple is None else _spacing(int(writing // steps))
        return math.ceil(steps) * spacing + writing
