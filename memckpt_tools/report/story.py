"""The story of a run, from its journals: attempts, failures, recoveries, what was degraded. Pure functions.

Its goodput is the share of its time that advanced training (ETTR), beside what the plan's formula gives.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memckpt.journal import events as journal
from memckpt.journal.events import Entry
from memckpt_tools.planning.job import Failures
from memckpt_tools.planning.scheme import Scheme, Tier, expect


@dataclass
class Attempt:
    """One attempt at the training, over all its nodes. Times are in seconds since 1970."""

    number: int
    began: float  #: when its first trainers came
    ranks: dict[str, int] = field(default_factory=dict)  #: number of ranks by node
    world_size: int = 1
    first_step: int | None = None  #: of its first commit; None if it had none
    first_step_at: float | None = None
    recovered: journal.Recovered | None = None  #: the state that it went on from; None if it started over
    started_over: str = ""  #: why it did; empty if it did not
    verdict: str = ""  #: of the resume check; empty before it has one
    deaths: list[tuple[float, str, journal.TrainerDied]] = field(default_factory=list)  #: with time and node
    ended_at: float | None = None
    end: str = ""  #: ``died``, ``left``, ``finished``, ``lost`` (its end was not seen), or empty: it goes on
    last_step: int | None = None
    seen: float = 0.0  #: when it was last heard of
    #: Node whose trainers have left their agent last, and the newest step then.
    left: tuple[str, int] = ("", 0)

    @property
    def seen_ending(self) -> bool:
        """Whether an agent was left that knows how far it came."""
        return self.end != "lost"

    def _goes_on(self, node: str) -> None:
        """The trainers of a node train: those that had left had gone over to another agent."""
        if self.end == "left" and node == self.left[0]:
            self.end, self.ended_at = "", None

    def _reached(self, step: int | None) -> None:
        if step is not None:
            self.last_step = step if self.last_step is None else max(step, self.last_step)


@dataclass(frozen=True)
class Span:
    """A condition from one time to another, both in seconds since 1970; `end` is None where it goes on."""

    node: str
    tier: str
    reason: str
    start: float
    end: float | None = None


@dataclass(frozen=True)
class AgentLoss:
    """An agent that died without leaving, and was replaced."""

    time: float
    node: str
    pid: int


@dataclass
class Story:
    """What the journals of a run tell, oldest first."""

    entries: Sequence[Entry]
    attempts: list[Attempt] = field(default_factory=list)
    degraded: list[Span] = field(default_factory=list)  #: of tiers that did not do what they were configured for
    agents: list[AgentLoss] = field(default_factory=list)
    #: Figures of the leading node (that of rank 0), by time, with the position of their attempt.
    samples: list[tuple[float, int, journal.Sample]] = field(default_factory=list)
    stored: list[tuple[float, journal.Stored]] = field(default_factory=list)
    until: float = 0.0  #: the last moment that is known of

    @property
    def began(self) -> float:
        """When the first attempt did, or the journal; there must be an entry."""
        return self.attempts[0].began if self.attempts else self.entries[0].envelope.time

    @property
    def failures(self) -> list[Attempt]:
        """Attempts that ended otherwise than they should."""
        return [one for one in self.attempts if one.end in ("died", "lost", "left")]


def tell(entries: Sequence[Entry]) -> Story:
    """The story of a run; `entries` are in order, and there is at least one."""
    story = Story(entries)
    open_spans: dict[tuple[str, str], Span] = {}
    leader = _leader(entries)
    for entry in entries:
        at, node, event = entry.envelope.time, entry.envelope.node, entry.event
        story.until = max(story.until, at)
        attempt = _attempt_of(story, entry)
        match event:
            case journal.AgentStarted() if event.replaces is not None:
                story.agents.append(AgentLoss(at, node, event.replaces))
            case journal.Degraded():
                open_spans[node, event.tier] = Span(node, event.tier, event.reason, at)
            case journal.Whole() if (node, event.tier) in open_spans:
                span = open_spans.pop((node, event.tier))
                story.degraded.append(Span(node, span.tier, span.reason, span.start, at))
            case journal.Sample() if node == leader:
                story.samples.append((at, len(story.attempts) - 1, event))
            case journal.Stored():
                story.stored.append((at, event))
        if attempt is not None:
            _note(attempt, at, node, event)
    story.degraded += open_spans.values()
    story.degraded.sort(key=lambda span: span.start)
    _close(story)
    return story


def _leader(entries: Iterable[Entry]) -> str:
    """The node whose figures are shown: that of rank 0, or the first one."""
    nodes = [entry.envelope.node for entry in entries]
    told = (journal.Recovered, journal.StartedOver)
    return next((entry.envelope.node for entry in reversed(list(entries)) if isinstance(entry.event, told)), nodes[0])


def _attempt_of(story: Story, entry: Entry) -> Attempt | None:
    """The attempt that an entry belongs to; made where it begins on the first of its nodes."""
    number, node = entry.envelope.attempt, entry.envelope.node
    known = next((one for one in reversed(story.attempts) if one.number == number), None)
    if isinstance(entry.event, journal.AttemptBegan):
        again = known is not None and not entry.event.rejoined and node in known.ranks
        if known is None or again:
            known = Attempt(number, entry.envelope.time)
            story.attempts.append(known)
        known.ranks.setdefault(node, max(1, len(entry.event.trainers)))
        known.world_size = entry.event.world_size
    return known


def _note(attempt: Attempt, at: float, node: str, event: object) -> None:
    """What an event says of its attempt."""
    match event:
        case journal.FirstStep():
            if attempt.first_step_at is None:
                attempt.first_step, attempt.first_step_at = event.step, at
            attempt._reached(event.step)
        case journal.Recovered():
            attempt.recovered = event
        case journal.StartedOver():
            attempt.started_over = event.reason
        case journal.ResumeChecked():
            attempt.verdict = event.verdict
        case journal.TrainerDied():
            attempt.deaths.append((at, node, event))
            attempt.end, attempt.ended_at = "died", at
            attempt._reached(event.step)
        case journal.TrainerLeft():
            if attempt.end != "died":
                attempt.end, attempt.ended_at = "left", at
                attempt.left = node, event.step or 0
            attempt._reached(event.step)
        case journal.Finished():
            attempt.end, attempt.ended_at = "finished", at
            attempt._reached(event.step)
        case journal.AttemptBegan() if event.rejoined:
            attempt._goes_on(node)
        case journal.Sample():
            if event.step is not None and event.step > attempt.left[1]:
                attempt._goes_on(node)  # its new agent may have written earlier than the one that it left
            attempt._reached(event.step)
        case journal.Stored() if attempt.first_step is not None:  # else it is of the attempt before
            attempt._reached(event.step)
    if isinstance(event, (journal.Sample, journal.FirstStep, journal.Protected, journal.Stored, journal.AttemptBegan)):
        attempt.seen = max(attempt.seen, at)


def _close(story: Story) -> None:
    """An attempt that another one followed has ended, also where no agent saw it: its nodes were lost."""
    for attempt, following in itertools.pairwise(story.attempts):
        if not attempt.end:
            attempt.end, attempt.ended_at = "lost", min(attempt.seen, following.began)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Time of a run by use, in seconds."""

    wall: float  #: from the first attempt's begin to the run's end, without pauses after training had finished
    training: float  #: that advanced it
    stalled: float  #: that ranks have waited for protection
    repeated: float  #: of steps that were taken again: lost ones, and those repeated as a proof
    starting: float  #: from the first attempt's begin to its first step
    down: float  #: from failures to the next first steps
    steps: int
    steps_lost: int  #: committed steps that were taken again; at least that, if `lost_more`
    lost_more: bool  #: whether an attempt has ended without a witness of how far it came
    step: float | None  #: time of a step; None where it is not known
    stall: float | None  #: what of it waits for protection
    ettr: float  #: measured: `training` of `wall`
    #: What the plan's closed form gives for failures, restarts, restores and an overhead as they were.
    expected: float | None


def lost_steps(before: Attempt, after: Attempt) -> tuple[int, bool]:
    """Committed steps of an attempt that the next one has to take again, and whether they are all.

    Where agent and trainers have died together, the steps since the last figures in the journal are not among them.
    """
    if after.recovered is None:
        return before.last_step or 0, before.seen_ending
    if after.recovered.steps_lost is not None:
        return after.recovered.steps_lost, True
    return max(0, (before.last_step or 0) - after.recovered.step), before.seen_ending


def measure(story: Story) -> Goodput:
    """The goodput of a run that has at least one attempt."""
    attempts = story.attempts
    ends = [one.ended_at if one.ended_at is not None else story.until for one in attempts]
    step = _step_seconds(story)
    starting = (attempts[0].first_step_at or ends[0]) - attempts[0].began
    up = steps = lost = again = 0.0
    down = paused = 0.0
    known = True
    for number, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
        if attempt.first_step_at is not None and attempt.first_step is not None:
            up += max(0.0, end - attempt.first_step_at)
            steps += max(0, (attempt.last_step or attempt.first_step) - attempt.first_step + 1)
        if not number:
            continue
        before, ended = attempts[number - 1], ends[number - 1]
        back = attempt.first_step_at if attempt.first_step_at is not None else end
        if before.end == "finished":
            paused += max(0.0, attempt.began - ended)
            down += max(0.0, back - attempt.began)
        else:
            down += max(0.0, back - ended)
            steps_again, all_known = lost_steps(before, attempt)
            lost, known = lost + steps_again, known and all_known
        again += attempt.recovered is not None and attempt.recovered.repeated is not None
    stall = _stall_seconds(story)
    stalled = min(up, steps * stall) if stall is not None else 0.0
    repeated = min(up - stalled, (lost + again) * (step or 0.0))
    wall = max(1e-9, ends[-1] - attempts[0].began - paused)
    training = max(0.0, up - stalled - repeated)
    return Goodput(
        wall=wall,
        training=training,
        stalled=stalled,
        repeated=repeated,
        starting=max(0.0, starting),
        down=down,
        steps=int(steps),
        steps_lost=int(lost),
        lost_more=not known,
        step=step,
        stall=stall,
        ettr=min(1.0, training / wall),
        expected=_expected(story, wall, step, stall),
    )


def _step_seconds(story: Story) -> float | None:
    """The mean time of a step between samples, as stalls are means; of a short run that of whole attempts."""
    seconds, steps = 0.0, 0
    for (at, attempt, sample), (later, same, after) in itertools.pairwise(story.samples):
        if attempt == same and sample.step is not None and after.step is not None and after.step > sample.step:
            ended_at = story.attempts[attempt].ended_at if attempt >= 0 else None
            if ended_at is not None and at < ended_at < later:
                later = ended_at  # the next figures came when nothing was trained any more
            seconds, steps = seconds + later - at, steps + after.step - sample.step
    if not steps:
        for one in story.attempts:
            end = one.ended_at if one.ended_at is not None else story.until
            if not one.seen_ending or one.first_step is None or one.first_step_at is None:
                continue
            if (one.last_step or 0) > one.first_step:
                seconds += end - one.first_step_at
                steps += (one.last_step or 0) - one.first_step
    return seconds / steps if steps else None


def _stall_seconds(story: Story) -> float | None:
    """What a rank's step waits, on average."""
    known = [(sample.commits, sample.stall_ms) for _, _, sample in story.samples if sample.stall_ms is not None]
    commits = sum(number for number, _ in known)
    return sum(number * stall for number, stall in known) / commits / 1e3 if commits else None


def _expected(story: Story, wall: float, step: float | None, stall: float | None) -> float | None:
    if step is None or stall is None or step <= stall:
        return None
    seconds: dict[str, list[float]] = {"local memory": [], "peers": [], "storage": []}
    counts = dict.fromkeys(seconds, 0)
    restarts = []
    for before, after in itertools.pairwise(story.attempts):
        if before.end == "finished":
            continue
        tier = after.recovered.tier if after.recovered is not None else ""
        kind = tier if tier in counts else "storage"  # a start over, and other places: no memory was left
        counts[kind] += 1
        restore = after.recovered.seconds if after.recovered is not None else 0.0
        if after.recovered is not None:
            seconds[kind].append(restore)
        if before.ended_at is not None and after.first_step_at is not None:
            restarts.append(max(0.0, after.first_step_at - before.ended_at - restore))
    bare = step - stall
    steps = [stored.step for _, stored in story.stored]
    gaps = [after - before for before, after in itertools.pairwise(steps) if after > before]
    mean = {name: statistics.fmean(values) if values else 0.0 for name, values in seconds.items()}
    tiers = [Tier(name="local memory", every_steps=1, lag_steps=0, restore_seconds=mean["local memory"])]
    if counts["peers"]:
        peers = mean["peers"]
        tiers.append(Tier(name="peers", every_steps=1, lag_steps=1, restore_seconds=peers, group_nodes=2, tolerates=1))
    every = statistics.fmean(gaps) if gaps else max(1.0, wall / step)
    storage = mean["storage"]
    tiers.append(Tier(name="storage", every_steps=every, lag_steps=0, restore_seconds=storage, survives_cluster=True))
    failures = Failures(
        process=counts["local memory"] / wall, node=counts["peers"] / wall, cluster=counts["storage"] / wall
    )
    return expect(
        Scheme(name="as measured", overhead=stall / bare, tiers=tuple(tiers)),
        failures,
        step_seconds=bare,
        run_seconds=wall,
        restart_seconds=statistics.fmean(restarts) if restarts else 0.0,
    ).ettr
