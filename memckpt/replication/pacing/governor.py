"""The governor: how fast records may be sent, so that training stays within the allowed share of its own pace.

Its pace without traffic is learnt from steps in which nothing is sent: those before the first record, and probes. These
are the same steps on all nodes, since one node's traffic slows all reductions. The caller passes all times.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from memckpt.memory.pages import Phase

_WARM_UP_STEPS = 3  # of an attempt: compilers, allocators and caches
# Steps from probe to probe; the second until the baseline is known well, and where it may have moved. Primes, and a
# multiple of the other: what comes round in training (loaders' workers, logging) does not always meet a probe.
_PROBE_EVERY = 209
_PROBE_EVERY_AT_FIRST = 11
_LEAD = (0.25, 0.75)  # shares of the step before a probe, at its end, in which nothing more is sent
_FRESH_STEPS = 50
_BASELINE_STEPS = (12, 64)  # as many as the spread of step times asks for
_BASELINE_ENOUGH = 6
_ERRORS = 2.5  # standard errors by which a difference has to be beyond doubt
_MEDIAN_ERROR = 1.2533  # standard error of a median, in standard deviations of a sample over the root of their number
_WINDOW = (8, 32)  # steps under one rate, from which it is judged: at the least, and at the most
_FIRST_LIMIT = 2.0  # times what records need
_RAISE_FAST = 2.0  # at first, or after so many gentle ones, where twice the cost is well within what is allowed
_GENTLE_RAISES = 3
_MOST = 1e12  # bytes per second, which no link takes
_CHEAP_SHARE = 0.25  # of what is allowed
_RAISE = (1.1, 1.2)  # the latter where steps are far from too slow
_LOWER = (0.3, 0.9)  # factors: at the most, and at the least, in one go
_LOWER_IN_NOISE = (0.6, 0.9)


class StepClock:
    """Durations of steps and backwards by one rank's marks: medians of the last; a backward counts so far at most."""

    def __init__(self, longest_backward: float = math.inf) -> None:
        self._longest_backward = longest_backward
        self.step: int | None = None
        self.phase: Phase | None = None
        self.since_ns = 0
        self._began_ns = 0
        self._backward = 0.0
        self._seconds: deque[float] = deque(maxlen=_WINDOW[1])
        self._backward_seconds: deque[float] = deque(maxlen=_WINDOW[1])
        #: Medians over the last steps; None before there are any.
        self.step_seconds: float | None = None
        self.backward_seconds: float | None = None

    def mark_phase(self, step: int, phase: Phase, ns: int) -> float | None:
        """Note that a phase has begun; returns the seconds of a step that ended with it, or the mean of several."""
        before, ended = self.step, None
        if before is not None and step == before and ns < self.since_ns:
            return None
        if self.phase == Phase.BACKWARD:
            self._backward += min((ns - self.since_ns) * 1e-9, self._longest_backward)
        if before is None or step != before:
            if before is not None and step > before and ns > self._began_ns:
                ended = self._end_steps(step - before, ns)
            self._began_ns, self._backward = ns, 0.0
        self.step, self.phase, self.since_ns = step, phase, ns
        return ended

    def _end_steps(self, steps: int, ns: int) -> float:
        seconds = (ns - self._began_ns) * 1e-9 / steps
        self._seconds.append(seconds)
        self.step_seconds = statistics.median(self._seconds)
        if steps == 1:
            self._backward_seconds.append(self._backward)
            self.backward_seconds = statistics.median(self._backward_seconds)
        return seconds


def _spread(*samples: Sequence[float]) -> float:
    """Standard deviation as the median absolute deviation shows it, each sample about its own median."""
    off = [abs(value - statistics.median(sample)) for sample in samples for value in sample]
    return 1.4826 * statistics.median(off)


class Baseline:
    """Step time without traffic: the median of the last steps in which nothing was sent.

    More steps are `wanted` where their spread exceeds the share `accuracy`. It is `doubtful` after a step far off: the
    next one tells whether training has changed.
    """

    def __init__(self, accuracy: float) -> None:
        self._accuracy = accuracy
        self.samples: deque[float] = deque(maxlen=_BASELINE_STEPS[1])
        self.doubtful = False
        self.wanted = _BASELINE_STEPS[0]

    def add(self, seconds: float) -> None:
        """A step without traffic. Two that both lie far to one side of those before say that training has changed."""
        older = list(self.samples)
        self.samples.append(seconds)
        if len(older) < _BASELINE_ENOUGH:
            return
        *older, last = older
        centre, spread = statistics.median(older), _spread(older)
        far = max(3 * spread, 0.03 * centre)
        off, last_off = ((value > centre + far) - (value < centre - far) for value in (seconds, last))
        self.doubtful = off != 0 and off != last_off
        if off != 0 and off == last_off:
            self.samples.clear()
            self.samples.extend((last, seconds))
            return
        needed = math.ceil((_MEDIAN_ERROR * spread / (self._accuracy * centre)) ** 2)
        self.wanted = min(max(_BASELINE_STEPS[0], needed), _BASELINE_STEPS[1])
        while len(self.samples) > self.wanted:
            self.samples.popleft()

    @property
    def seconds(self) -> float | None:
        """The estimate; None before the second such step."""
        return statistics.median(self.samples) if len(self.samples) > 1 else None


class Governor:
    """Lowers the permitted rate while steps are slower than allowed, and raises it gently while they are not.

    It begins at twice what records need, and doubles that while it costs next to nothing: kernels take some MiB at
    once, so the pace of handing over tells nothing.
    `limit`: bytes per second; None: none. `share`: slowdown when last judged. `probing`: nothing is to be sent in this
    step; `probe_follows`: nor in the next, and nothing in the share `lead` at this one's end. `overruled`: training
    waits for what is sent: limits and probes are off.
    """

    def __init__(self, overhead: float) -> None:
        self._overhead = overhead
        self.baseline = Baseline(overhead / 4)
        self._loaded: deque[float] = deque(maxlen=_WINDOW[1])
        self.limit: float | None = None
        self.share: float | None = None
        self.reason = "no step has been timed yet"
        self._binding = False
        self._steps = 0
        self._quiet_before = False
        self._since_quiet = 0
        self._suspects = False
        self._confirmed = False
        self._lowered_since_quiet = False
        self._gentle_raises = _GENTLE_RAISES  # since it was lowered last
        self._first: float | None = _FIRST_LIMIT  # the limit, in what records need; None: judged since
        self._unlimited_from = math.inf  # a limit that held nothing up
        self.probing = False
        self._probe_waits = False
        self.lead = _LEAD[0]
        self._sent_since_probe = False
        self._overruled_left = 0
        self.probe_follows = False

    @property
    def overruled(self) -> bool:
        return self._overruled_left > 0

    def overrule(self, reason: str, steps: int) -> None:
        """Send as fast as possible for some steps, from which nothing is learnt: training waits for what is sent."""
        if self.probing or self._probe_waits:  # that is why, and it is over with this step
            self.probing, self._probe_waits = False, True
            self._overruled_left = max(self._overruled_left, 1)
            return
        if not self.overruled and self.limit is not None:
            self.limit = min(1.5 * self.limit, _MOST)  # it was too low
            self._first = None if self._first is None else self._first * 1.5
            self._begin_window()
        self._overruled_left = max(self._overruled_left, steps)
        self.reason = reason

    def end_probe(self) -> None:
        """End a probe: training gets no further without what is held back."""
        self.probing = False

    def step_ended(
        self, step: int, seconds: float, *, sent: int, settled: bool, rate: float, floor: float, binding: bool
    ) -> None:
        """Note the end of a step; `step` begins.

        `sent`: its bytes. `settled`: nothing was on its way when it began. `rate`: bytes per second while there was
        something to send; `floor`: that records need. `binding`: the limit held something up.
        """
        self._steps += 1
        quiet, probe = sent == 0, self.probing or self._probe_waits
        if probe and quiet and not settled:  # what was handed over last was still on its way
            self.lead = min(2 * self.lead, _LEAD[1])
        if self._steps > _WARM_UP_STEPS:
            self._take_sample(seconds, quiet, settled, binding)
            if self.overruled:
                self._overruled_left -= 1
            elif not self.probing:
                self._judge(rate, floor)
        self._quiet_before, self._probe_waits = quiet, False
        self._sent_since_probe |= not quiet
        self._plan_probe(step)

    def _take_sample(self, seconds: float, quiet: bool, settled: bool, binding: bool) -> None:
        self._since_quiet += 1
        if quiet and (settled or self._quiet_before) and (self._probe_waits or not self.overruled):
            self.baseline.add(seconds)
            self._confirmed |= self._suspects
            self._since_quiet, self._suspects, self._lowered_since_quiet = 0, False, False
        elif not quiet and not self.overruled and not self.probe_follows:
            self._loaded.append(seconds)
            self._binding |= binding

    def _plan_probe(self, step: int) -> None:
        self.probing = self.probe_follows = False
        unsure = self._suspects or len(self.baseline.samples) < self.baseline.wanted
        every = _PROBE_EVERY_AT_FIRST if unsure else _PROBE_EVERY
        if not self._sent_since_probe or self.overruled:
            return
        if step % every == 0:
            self.probing, self._sent_since_probe = True, False
        self.probe_follows = (step + 1) % every == 0

    def _judge(self, rate: float, floor: float) -> None:
        base, steps = self.baseline.seconds, len(self._loaded)
        if self._first is not None and floor > 0:
            self.limit = self._first * floor
        if base is None:
            self.reason = "the step time without traffic is not known yet"
            return
        if steps < _WINDOW[0]:
            if self.share is None:
                self.reason = "steps with traffic are being timed"
            return
        spread = max(_spread(self._loaded, self.baseline.samples), 0.005 * base)
        quiet_steps = len(self.baseline.samples)
        error = _MEDIAN_ERROR * spread / base * math.sqrt(1 / steps + 1 / quiet_steps)
        margin = _ERRORS * error * (1 + 2 / min(steps, quiet_steps))  # of few, the spread is not known well either
        self.share = share = statistics.median(self._loaded) / base - 1
        full = steps == _WINDOW[1]
        beyond = share - margin > self._overhead
        noisy = margin > self._overhead / 2
        # Where times are spread widely, one wrong baseline must not lower the rate again and again.
        old = self._since_quiet > _FRESH_STEPS or (noisy and self._lowered_since_quiet)
        doubtful = old or not self._confirmed or self.baseline.doubtful
        if share + margin < -self._overhead:
            self._suspects = True
            self.reason = "steps are faster than those without traffic were, and the next probe will tell how fast"
        elif doubtful and (beyond or (full and share > self._overhead)):
            self._suspects = True  # before anything is slowed down: is it still the traffic?
            self.reason = "steps are slower than allowed, and the next probe will tell whether traffic is why"
        elif beyond or (full and share > self._overhead > margin):
            self._lower(share, _LOWER_IN_NOISE if noisy else _LOWER, rate, floor)
        elif share + margin < self._overhead or (full and share < 0.6 * self._overhead):
            self._raise(share)
        elif full:
            self.reason = "step time is as allowed, as far as its spread shows"

    def _lower(self, share: float, factors: tuple[float, float], rate: float, floor: float) -> None:
        current = min(rate, self._unlimited_from) if self.limit is None else self.limit
        least, most = factors
        lowered = current * min(max(self._overhead / share, least), most)
        at_floor = lowered <= floor
        self.limit = max(lowered, floor)
        self._first, self._gentle_raises, self._lowered_since_quiet = None, 0, True
        self._begin_window()
        self.reason = (
            "steps are slower than allowed, but records need what is sent"
            if at_floor
            else "slowed down: steps were slower than allowed"
        )

    def _raise(self, share: float) -> None:
        if self.limit is None:
            self.reason = "step time is as allowed"
        elif not self._binding:
            self._unlimited_from, self.limit, self._first = self.limit, None, None
            self.reason = "step time is as allowed, and the limit held nothing up"
        else:
            fast = share < _CHEAP_SHARE * self._overhead and self._gentle_raises >= _GENTLE_RAISES
            self._first, self._gentle_raises = None, self._gentle_raises + 1
            self.limit *= _RAISE_FAST if fast else _RAISE[share < self._overhead / 2]
            self.reason = "raised: step time is as allowed"
        self._confirmed = False
        self._begin_window()

    def _begin_window(self) -> None:
        self._loaded.clear()
        self._binding = False
