"""The figures of a report, drawn by matplotlib: each for light and dark pages, and for wide and narrow ones."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from memckpt.errors import ConfigurationError
from memckpt.journal.events import Sample
from memckpt_tools.report.story import Goodput, Story

#: Most points of a line.
_POINTS = 1_000


@dataclass(frozen=True)
class Theme:
    """Colours of a page."""

    name: str
    ink: str
    faint: str
    paper: str
    blue: str
    orange: str
    green: str
    red: str
    violet: str


#: Okabe and Ito's colours, which the colour-blind can tell apart; lighter ones on dark paper.
LIGHT = Theme("light", "#1f2328", "#d0d7de", "#ffffff", "#0072b2", "#d55e00", "#009e73", "#c0392b", "#7e57c2")
DARK = Theme("dark", "#e6edf3", "#3d444d", "#0d1117", "#56b4e9", "#e69f00", "#2fbf8f", "#ff7b72", "#b39ddb")


@dataclass(frozen=True)
class Picture:
    """A figure of the page; `text` stands for it where it cannot be seen. `sources`: data URLs by theme and width."""

    name: str
    title: str
    text: str
    sources: dict[str, dict[str, str]]


Draw = Callable[[Any, Theme, Story, Goodput], None]


def pictures(story: Story, goodput: Goodput) -> Iterator[Picture]:
    """The figures of a run; those of which nothing is known are left out."""
    samples = [sample for _, _, sample in story.samples]
    stalls = any(sample.stall_ms is not None for sample in samples)
    drawings: list[tuple[bool, str, Draw, float, str, str]] = [
        (True, "timeline", _timeline, 1.2 + 0.35 * len(_rows(story)), "Attempts, failures and what was degraded",
         ("Training over time: each attempt from its first step to its end, the time between a failure and the next "
         "start, and when memory, peers or storage did not do what they were configured for. Dotted lines in the "
         "figures below are failures.")),
        (True, "time", _time, 1.3, "Where the time went",
         ("Shares of the run's time: training, waiting for protection, steps taken again, restarts after failures, the "
         "first start.")),
        (True, "steps", _steps, 3.0, "Newest step of each tier",
         ("The newest step in memory, in other nodes' memory and in storage, over time. Where the line of memory "
         "falls, a restore went back.")),
        (len(samples) > 1, "speed", _speed, 2.0, "Steps a second",
         "Steps a second between two samples of one attempt, with all that a step waits for."),
        (any(_losses(story)), "loss", _loss, 2.4, "Loss",
         "What the script has logged under a name with loss, of which the newest value is sampled every few seconds."),
        (any("lr" in sample.logged for sample in samples), "rate", _rate, 2.0, "Learning rate",
         "The learning rate of the first parameter group."),
        (any(sample.stored_step is not None for sample in samples), "behind", _behind, 2.0,
         "Steps that storage did not have",
         "Steps by which storage was behind memory: what a loss of all nodes would have cost."),
        (stalls, "stall", _stalls, 2.4, "What a step waits for protection",
         "Milliseconds that a step of a rank waited for protection: the mean and the longest between two samples."),
        (any(sample.lag_records is not None for sample in samples), "replica", _replica, 2.4,
         "The replica: lag and drift",
         ("Records that the replica was behind training, and the largest difference that its audit has found, in units "
         "in the last place.")),
        (bool(samples), "memory", _memory, 2.4, "Memory",
         "Memory of the leading node: base and log, records of other nodes, and the agent's own."),
        (bool(story.stored) or any(sample.sent_bytes for sample in samples), "bytes", _bytes, 2.4, "Bytes moved",
         "Bytes that were written to storage as checkpoints, and sent to other nodes, summed up since the begin."),
    ]  # fmt: skip
    for known, name, draw, height, title, text in drawings:
        if known:
            sources = {}
            for theme in (LIGHT, DARK):
                svg = partial(_svg, draw, theme, story, goodput)
                sources[theme.name] = {"wide": svg(10.4, height), "narrow": svg(3.4, max(2.0, height))}
            yield Picture(name, title, text, sources)


def _svg(draw: Draw, theme: Theme, story: Story, goodput: Goodput, width: float, height: float) -> str:
    """A data URL. The same story makes the same bytes: no date, no random names."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "memckpt report: expected matplotlib, found none; pip install 'lightning-memckpt[report]'"
        ) from None
    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "memckpt", "font.family": "sans-serif",
        "font.size": 9 if width > 5 else 7, "text.color": theme.ink, "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.ink, "axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": theme.faint, "grid.linewidth": 0.5,
        "xtick.color": theme.ink, "ytick.color": theme.ink, "legend.frameon": False, "lines.linewidth": 1.4,
    }  # fmt: skip
    out = io.BytesIO()
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        draw(axes, theme, story, goodput)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


# What is drawn


def _moments(times: Iterable[float]) -> list[datetime]:
    return [datetime.fromtimestamp(at) for at in times]


def _is_narrow(axes: Any) -> bool:
    return bool(axes.figure.get_figwidth() < 5)


def _over_time(axes: Any, theme: Theme, story: Story, unit: str | None = None) -> None:
    """Give a figure the time axis that all share, the failures, and a legend.

    `unit` is that of an axis from 0 up; None: another axis, which has its own marks of failures.
    """
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=1, maxticks=4 if _is_narrow(axes) else 9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    start, end = story.began, max(story.until, story.began + 1)
    margin = 0.01 * (end - start)
    axes.set_xlim(*_moments((start - margin, end + margin)))
    if unit is not None:
        axes.set_ylim(bottom=0)
        axes.set_ylabel(unit)
        _mark_failures(axes, theme, story)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(labels), 3 if _is_narrow(axes) else 6)
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2)


def _mark_failures(axes: Any, theme: Theme, story: Story) -> None:
    for attempt in story.failures:
        if attempt.ended_at is not None:
            axes.axvline(_moments([attempt.ended_at])[0], color=theme.red, linewidth=0.8, linestyle=":")


def _rows(story: Story) -> list[str]:
    """Rows of the timeline: training, tiers that were degraded, and agents if one died."""
    tiers = sorted({span.tier for span in story.degraded}, key=["memory", "peers", "storage"].index)
    return ["training", *tiers, *(["agent"] if story.agents else [])]


def _timeline(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    from matplotlib.dates import date2num

    rows = _rows(story)
    place = {row: number for number, row in enumerate(rows)}

    def bar(row: str, start: float, end: float, color: str, label: str) -> None:
        known = axes.get_legend_handles_labels()[1]
        axes.broken_barh(
            [(date2num(datetime.fromtimestamp(start)), max(end - start, 0.0) / 86400)],
            (place[row] - 0.3, 0.6),
            facecolor=color,
            edgecolor=theme.paper,
            linewidth=0.5,
            label=label if label not in known else None,
        )

    for before, after in itertools.pairwise(story.attempts):
        if before.ended_at is not None and before.ended_at < after.began:
            bar("training", before.ended_at, after.began, theme.faint, "down")
    for attempt in story.attempts:
        end = attempt.ended_at if attempt.ended_at is not None else story.until
        first = min(attempt.first_step_at if attempt.first_step_at is not None else end, end)
        bar("training", attempt.began, first, theme.orange, "starting")
        bar("training", first, end, theme.blue, "training")
    for span in story.degraded:
        bar(span.tier, span.start, span.end if span.end is not None else story.until, theme.red, "degraded")
    # Failures stand above their bar, agents in a row without one.
    marks = [(attempt.ended_at, place["training"] - 0.45, "failure") for attempt in story.failures]
    marks += [(loss.time, float(place["agent"]), "agent died") for loss in story.agents]
    for label in dict.fromkeys(label for _, _, label in marks):
        these = [(at, y) for at, y, found in marks if found == label and at is not None]
        axes.scatter(
            _moments(at for at, _ in these), [y for _, y in these], marker="x", color=theme.red, zorder=3, label=label
        )
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.75)
    axes.grid(False, axis="y")
    _over_time(axes, theme, story)


def _time(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    parts = {
        "training": (goodput.training, theme.blue),
        "waiting for protection": (goodput.stalled, theme.violet),
        "steps again": (goodput.repeated, theme.orange),
        "restarts": (goodput.down, theme.red),
        "first start": (goodput.starting, theme.faint),
    }
    left = 0.0
    for label, (seconds, color) in parts.items():
        share = 100 * seconds / goodput.wall
        axes.barh([0], [share], left=left, color=color, height=0.6, label=f"{label} {share:.2f}%")
        left += share
    axes.set_xlim(0, max(100.0, left))
    axes.set_yticks([])
    axes.set_xlabel("% of the time")
    axes.grid(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2 if _is_narrow(axes) else 5, borderaxespad=0.2)


def _steps(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    label: str | None = "memory"
    for number, attempt in enumerate(story.attempts):
        points = [(at, sample.step) for at, position, sample in story.samples if position == number]
        points = [(at, step) for at, step in points if attempt.began <= at <= (attempt.ended_at or math.inf)]
        if attempt.first_step_at is not None:
            points.append((attempt.first_step_at, attempt.first_step))
        if attempt.ended_at is not None:
            points.append((attempt.ended_at, attempt.last_step))
        known = sorted((at, step) for at, step in points if step is not None)
        if known:
            _line(axes, known, color=theme.blue, label=label, marker="." if len(known) < 30 else None)
            label = None
    peers = [
        (at, sample.step - (sample.record - sample.peers_record))
        for at, _, sample in story.samples
        if sample.step is not None and sample.record is not None and sample.peers_record is not None
    ]
    if peers:
        _line(axes, peers, color=theme.violet, label="peers", linestyle="--")
    stored = [(at, event.step) for at, event in story.stored]
    stored += [(at, sample.stored_step) for at, _, sample in story.samples if sample.stored_step is not None]
    if stored:
        _line(axes, sorted(stored), color=theme.green, label="storage", drawstyle="steps-post")
    _mark_failures(axes, theme, story)
    axes.set_ylabel("step")
    _over_time(axes, theme, story)


def _speed(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    for position in range(len(story.attempts)):
        known = [(at, one.step) for at, number, one in story.samples if number == position and one.step is not None]
        rates = [
            (at, (step - before) / (at - since))
            for (since, before), (at, step) in itertools.pairwise(known)
            if at > since and step > before
        ]
        if rates:
            _line(axes, rates, color=theme.blue)
    _over_time(axes, theme, story, "steps a second")


def _losses(story: Story) -> list[str]:
    """Names of the losses that were logged, in the order in which they came."""
    return [name for name in dict.fromkeys(name for _, _, one in story.samples for name in one.logged) if name != "lr"]


def _loss(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    colors = itertools.cycle((theme.blue, theme.orange, theme.green, theme.violet))
    for name, color in zip(_losses(story), colors, strict=False):
        _logged(axes, story, name, color, name)
    _mark_failures(axes, theme, story)
    axes.set_ylabel("loss")
    _over_time(axes, theme, story)


def _rate(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    _logged(axes, story, "lr", theme.blue)
    _over_time(axes, theme, story, "rate")


def _logged(axes: Any, story: Story, name: str, color: str, label: str | None = None) -> None:
    """A line for each attempt: behind a restore values may come again."""
    for position in range(len(story.attempts)):
        known = [
            (at, one.logged[name]) for at, number, one in story.samples if number == position and name in one.logged
        ]
        if known:
            _line(axes, known, color=color, label=label)
            label = None


def _behind(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    known = [(at, sample.step, sample.stored_step) for at, _, sample in story.samples]
    behind = [(at, float(max(0, step - there))) for at, step, there in known if step is not None and there is not None]
    _line(axes, behind, color=theme.green)
    _over_time(axes, theme, story, "steps")


def _stalls(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    known = [(at, sample) for at, _, sample in story.samples if sample.stall_ms is not None]
    _line(axes, [(at, sample.longest_stall_ms) for at, sample in known], color=theme.orange, label="longest")
    _line(axes, [(at, sample.stall_ms or 0.0) for at, sample in known], color=theme.blue, label="mean")
    axes.set_yscale("symlog", linthresh=1.0)
    _over_time(axes, theme, story, "ms")


def _replica(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    _line(axes, _values(story, lambda sample: sample.lag_records), color=theme.blue, label="records behind")
    _line(axes, _values(story, lambda sample: sample.drift_ulp), color=theme.red, label="drift, ulp")
    _over_time(axes, theme, story, "")


def _memory(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    samples = [sample for _, _, sample in story.samples]
    size, unit = _unit(max(max(one.held_bytes, one.peers_bytes, one.agent_bytes) for one in samples))
    _line(axes, _values(story, lambda one: one.held_bytes / size), color=theme.blue, label="base and log")
    if any(sample.peers_bytes for sample in samples):
        _line(axes, _values(story, lambda one: one.peers_bytes / size), color=theme.violet, label="of other nodes")
    _line(axes, _values(story, lambda one: one.agent_bytes / size), color=theme.orange, label="agent")
    _over_time(axes, theme, story, unit)


def _bytes(axes: Any, theme: Theme, story: Story, goodput: Goodput) -> None:
    stored = [(story.began, 0)]
    for at, event in story.stored:
        stored.append((at, stored[-1][1] + event.nbytes))
    stored.append((story.until, stored[-1][1]))
    sent, before, attempt = 0, 0, None
    points = []
    for at, number, sample in story.samples:
        sent += sample.sent_bytes - (before if number == attempt and sample.sent_bytes >= before else 0)
        before, attempt = sample.sent_bytes, number
        points.append((at, sent))
    size, unit = _unit(max(sent, stored[-1][1]))
    _line(axes, [(at, n / size) for at, n in stored], color=theme.green, label="storage", drawstyle="steps-post")
    if sent:
        _line(axes, [(at, n / size) for at, n in points], color=theme.violet, label="peers")
    _over_time(axes, theme, story, unit)


def _unit(nbytes: int) -> tuple[float, str]:
    """The size in bytes and the name of the unit in which an axis up to `nbytes` is legible."""
    for size, name in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if nbytes >= size:
            return size, name
    return 1.0, "bytes"


def _values(story: Story, value: Callable[[Sample], float | None]) -> list[tuple[float, float]]:
    found = [(at, value(sample)) for at, _, sample in story.samples]
    return [(at, known) for at, known in found if known is not None]


def _line(axes: Any, points: Sequence[tuple[float, float]], **style: Any) -> None:
    """A line of at most so many points: of each few the highest."""
    every = math.ceil(len(points) / _POINTS) or 1
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    thinned = [max(group, key=lambda point: point[1]) for group in groups]
    style = {name: value for name, value in style.items() if value is not None}
    if len(thinned) == 1:
        style.setdefault("marker", ".")
    axes.plot(_moments(at for at, _ in thinned), [value for _, value in thinned], **style)
