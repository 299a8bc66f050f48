"""The page of a report: what stands on it, and its making from a template."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from memckpt.cli.common import count, ranks_text
from memckpt.cli.events import style_of, words_of
from memckpt.errors import ConfigurationError
from memckpt.journal import events as journal
from memckpt.user_messages import nbytes_text, seconds_text
from memckpt_tools.report.figures import pictures
from memckpt_tools.report.story import Attempt, Goodput, Story, lost_steps

#: Most rows of a table; the oldest are left out.
_ROWS = 200
_STYLES = {"red": "bad", "yellow": "warn", "green": "good"}
#: Events that stand in the list of all of them.
_LISTED_NOT = (journal.Sample, journal.Stored, journal.FirstStep, journal.AttemptBegan)


@dataclass(frozen=True)
class Kept:
    """A checkpoint that storage has; `created` is in seconds since 1970."""

    step: int
    attempt: int
    created: float
    nbytes: int
    state: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Card:
    """A number at the top."""

    name: str
    value: str
    text: str = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table; `none` stands in its place where it has no rows. It is opened by a click if it is `folded`."""

    name: str
    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    none: str
    folded: bool = False


def render(
    run: str, story: Story, goodput: Goodput, kept: Sequence[Kept], problem: str, renew: float | None = None
) -> str:
    """The page: the run's name, its story, its goodput, the checkpoints in storage, or why that could not be read.

    A browser loads it anew every `renew` seconds.
    """
    try:
        import jinja2
    except ImportError:
        raise ConfigurationError(
            "memckpt report: expected jinja2, found none; pip install 'lightning-memckpt[report]'"
        ) from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html.jinja").read_text())
    return template.render(
        run=run,
        renew=renew,
        state=_state(story),
        began=_moment(story.began),
        until=_moment(story.until),
        nodes=sorted({entry.envelope.node for entry in story.entries}),
        cards=_cards(story, goodput),
        pictures=list(pictures(story, goodput)),
        tables=[_failures(story), _attempts(story), _kept(kept, problem), _decisions(story), _events(story)],
        version=version("lightning-memckpt"),
        made=_moment(time.time()),
        zone=datetime.now().astimezone().tzname() or "this machine",
    )


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).isoformat(" ", "seconds")


def _state(story: Story) -> str:
    last = story.attempts[-1]
    if last.end == "finished":
        return f"Finished after step {last.last_step}."
    if last.end:
        return f"Not running: attempt {last.number} ended at step {last.last_step}."
    return f"Training when last heard of, at step {last.last_step}."


def _cards(story: Story, goodput: Goodput) -> list[Card]:
    failures = len(story.failures)
    recovered = [one for one in story.attempts if one.recovered is not None]
    differ = sum(one.verdict == "different" for one in story.attempts)
    equal = sum(one.verdict == "equal" for one in story.attempts)
    planned = "too little is known for the plan's"
    if goodput.expected is not None:
        planned = f"the plan's: {goodput.expected:.2%}"
    stall = "" if goodput.stall is None else f"{1e3 * goodput.stall:.2g} ms a step"
    share = goodput.stalled / goodput.wall
    step = "" if goodput.step is None else f"{goodput.step:.3g} s a step"
    return [
        Card("goodput (ETTR)", f"{goodput.ettr:.2%}", planned),
        Card("steps", str(story.attempts[-1].last_step or 0), step),
        Card("failures", str(failures), count(len(story.attempts), "attempt"), "warn" if failures else ""),
        Card("recoveries", str(len(recovered)), _tiers(recovered)),
        Card("steps lost", *_lost(goodput)),
        Card("waiting for protection", f"{share:.2%}", stall),
        Card("resume checks", f"{equal} equal", f"{differ} different", "bad" if differ else ""),
        Card("time", seconds_text(goodput.wall), f"{seconds_text(goodput.down)} of it in restarts"),
    ]


def _lost(goodput: Goodput) -> tuple[str, str, str]:
    """Number of steps lost, what it is, and how good that is."""
    if goodput.lost_more:
        return f"{goodput.steps_lost} or more", "taken again; agent and trainers died together", "bad"
    return str(goodput.steps_lost), "taken again", "bad" if goodput.steps_lost else "good"


def _tiers(recovered: Sequence[Attempt]) -> str:
    numbers: dict[str, int] = {}
    for one in recovered:
        assert one.recovered is not None
        numbers[one.recovered.tier] = numbers.get(one.recovered.tier, 0) + 1
    return ", ".join(f"{number} from {tier}" for tier, number in numbers.items())


def _row(*texts: str) -> list[Cell]:
    return [Cell(text) for text in texts]


def _failures(story: Story) -> Table:
    rows = []
    for attempt, following in zip(story.attempts, [*story.attempts[1:], None], strict=True):
        if attempt.end not in ("died", "lost", "left"):
            continue
        at = attempt.ended_at if attempt.ended_at is not None else attempt.seen
        cells = _row(_moment(at), f"#{attempt.number}", str(attempt.last_step))
        rows.append(cells + _after(attempt, following, at))
    for loss in story.agents:
        killed = Cell(f"agent pid {loss.pid} on {loss.node} was killed", "warn")
        rows.append([*_row(_moment(loss.time), *[""] * 6), killed])
    rows.sort(key=lambda row: row[0].text)
    columns = ["time", "attempt", "at step", "from", "resumed after", "lost", "down", "what"]
    text = "Down is the time from the last trainer's end to the next attempt's first step; lost are steps taken again."
    return Table("failures", "Failures and recoveries", text, columns, rows[-_ROWS:], "Nothing has failed.")


def _after(attempt: Attempt, following: Attempt | None, at: float) -> list[Cell]:
    dead: dict[str, list[int]] = {}
    for _, node, death in attempt.deaths:
        dead.setdefault(node, []).append(death.rank)
    who = "; ".join(f"{ranks_text(ranks)} on {node}" for node, ranks in dead.items())
    words = {"died": f"died: {who}", "left": "trainers left", "lost": "its nodes were lost"}[attempt.end]
    if following is None:
        return [Cell("not yet", "warn"), *_row("", "", "", words)]
    verdict = f"; check {following.verdict}" if following.verdict else ""
    down = "" if following.first_step_at is None else seconds_text(following.first_step_at - at)
    lost, known = lost_steps(attempt, following)
    steps = str(lost) if known else f"{lost} or more"
    if following.recovered is None:
        back = Cell("start over", "bad")
        return [back, Cell(""), Cell(steps, "bad" if lost or not known else ""), Cell(down), Cell(words)]
    recovered = following.recovered
    from_where = _row(recovered.tier, f"step {recovered.step}, {seconds_text(recovered.seconds)}")
    style = "bad" if following.verdict == "different" else ""
    return [*from_where, Cell(steps, "warn" if lost or not known else "good"), Cell(down), Cell(words + verdict, style)]


def _attempts(story: Story) -> Table:
    rows = []
    for one in story.attempts[-_ROWS:]:
        first = "" if one.first_step is None else f"{one.first_step} to {one.last_step}"
        ready = "" if one.first_step_at is None else seconds_text(one.first_step_at - one.began)
        begun = one.recovered
        how = f"from {begun.tier}" if begun is not None else (one.started_over or "")
        end = one.end or "goes on"
        ranks = count(one.world_size, "rank")
        rows.append(_row(f"#{one.number}", _moment(one.began), ranks, first, ready, end, how))
    columns = ["attempt", "began", "ranks", "steps", "to first step", "end", "begun"]
    return Table("attempts", "Attempts", "", columns, rows, "There was no attempt.")


def _kept(kept: Sequence[Kept], problem: str) -> Table:
    rows = []
    for one in kept[:_ROWS]:
        state = Cell(one.state, "" if one.state in ("whole", "whole, pinned") else "bad")
        rows.append(
            [*_row(f"step {one.step}", f"#{one.attempt}", _moment(one.created), nbytes_text(one.nbytes)), state]
        )
    none = f"Storage could not be read: {problem}" if problem else "There is no checkpoint in storage."
    columns = ["step", "attempt", "written", "size", "state"]
    return Table("checkpoints", "Checkpoints kept", "", columns, rows, none)


def _decisions(story: Story) -> Table:
    decided = [(entry.envelope.time, entry.event) for entry in story.entries]
    rows = [
        _row(_moment(at), event.name, f"{event.old} → {event.new}", event.reason)
        for at, event in decided
        if isinstance(event, journal.Decision)
    ]
    columns = ["time", "what", "change", "why"]
    none = "Nothing was changed by the system itself."
    return Table("decisions", "Decisions of the system", "", columns, rows[-_ROWS:], none)


def _events(story: Story) -> Table:
    listed = [entry for entry in story.entries if not isinstance(entry.event, _LISTED_NOT)]
    several = len({entry.envelope.node for entry in story.entries}) > 1
    rows = []
    for entry in listed[-_ROWS:]:
        where = entry.envelope
        words = Cell(words_of(entry.event), _STYLES.get(style_of(entry.event), ""))
        rows.append([*_row(_moment(where.time), f"#{where.attempt}", *([where.node] if several else [])), words])
    more = f"The newest {_ROWS} of {len(listed)}; " if len(listed) > _ROWS else ""
    columns = ["time", "attempt", *(["node"] if several else []), "event"]
    return Table("events", "Events", f"{more}memckpt events shows all of them.", columns, rows, "There are none.", True)


def in_json(story: Story, goodput: Goodput) -> Mapping[str, object]:
    """The numbers of the page, for programs; times in seconds."""
    return {
        "began": story.began,
        "until": story.until,
        "attempts": len(story.attempts),
        "failures": len(story.failures),
        "recoveries": [
            {
                "step": one.recovered.step,
                "tier": one.recovered.tier,
                "seconds": one.recovered.seconds,
                "verdict": one.verdict or None,
            }
            for one in story.attempts
            if one.recovered is not None
        ],
        "last_step": story.attempts[-1].last_step,
        "end": story.attempts[-1].end or None,
        "goodput": goodput,
    }
