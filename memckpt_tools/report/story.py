"""The story of a run, from its journals: attempts, failures, recoveries, what was degraded. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memckpt.journal import events as journal
from memckpt.journal.events import Entry


@dataclass
class Attempt:
    """One attempt at the training, over all its nodes. Times are in seconds since 1970.

    Attributes:
        began: when its first trainers came.
        ranks: number of ranks by node.
        first_step, first_step_at: its first commit; None if it had none.
        recovered: the state that it went on from; None if it started over.
        started_over: why it did; empty if it did not.
        verdict: of the resume check; empty before it has one.
        deaths: trainers that died, with node and time.
        end: ``"died"``, ``"left"``, ``"finished"``, ``"lost"`` (its end was not seen), or empty: it goes on.
        seen: when it was last heard of.
    """

    number: int
    began: float
    ranks: dict[str, int] = field(default_factory=dict)
    world_size: int = 1
    first_step: int | None = None
    first_step_at: float | None = None
    recovered: journal.Recovered | None = None
    started_over: str = ""
    verdict: str = ""
    deaths: list[tuple[float, str, journal.TrainerDied]] = field(default_factory=list)
    ended_at: float | None = None
    end: str = ""
    last_step: int | None = None
    seen: float = 0.0
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
    """What the journals of a run tell, oldest first.

    Attributes:
        degraded: tiers that did not do what they were configured for.
        agents: agents that were killed.
        samples: figures of the leading node (that of rank 0), by time, with the position of their attempt.
        until: the last moment that is known of.
    """

    entries: Sequence[Entry]
    attempts: list[Attempt] = field(default_factory=list)
    degraded: list[Span] = field(default_factory=list)
    agents: list[AgentLoss] = field(default_factory=list)
    samples: list[tuple[float, int, journal.Sample]] = field(default_factory=list)
    stored: list[tuple[float, journal.Stored]] = field(default_factory=list)
    until: float = 0.0

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
