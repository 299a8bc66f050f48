"""The page of ``memckpt status --watch``, and what would be lost if something died."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from memckpt.cli.run_view import Stored, View
from memckpt.cli.watch_page import losses_of, page, sparkline
from memckpt.journal.events import Degraded, Entry, Envelope, Recovered, Sample, TrainerDied
from memckpt.protocol.status import Status
from tests.support.monitoring.statuses import a_view, an_agent, an_alarm, some_peers


def entries(number: int = 1) -> list[Entry]:
    sample = Sample(1, None, None, 1, 1, 0.1, 0.1, None, 0.0, 1, 0, 1, 0)
    found = [TrainerDied(0, 42, 8), Recovered(8, 8, "local memory", 0.3, 0), Degraded("storage", "no space"), sample]
    return [Entry(Envelope(time=float(at), node="node", attempt=1), event) for at in range(number) for event in found]


def text_of(view: View, width: int = 120, height: int = 50, journal: list[Entry] | None = None) -> str:
    console = Console(width=width, height=height)
    with console.capture() as captured:
        console.print(page(view, entries() if journal is None else journal, console))
    return captured.get()


def stored(step: int | None, age: float = 30.0, **fields: Any) -> Stored:
    return Stored("/s", 2, step, None if step is None else time.time() - age, 5 << 20, **fields)


def loss(view: View) -> dict[str, int | None]:
    return {what: one.steps for what, one in losses_of(view).items()}


def test_a_run_at_a_glance() -> None:
    agent = an_agent(peers=some_peers(), slots=4, recent_stalls=(0.0, 1.0, 2.0, 8.0))
    text = text_of(a_view(agent, stored(8)))
    for row in (
        r"/runs/one on node +2 trainers, eager, agent up 2 h",
        r"! the last checkpoint could not be written: no space left",
        r"memory +step 10 +0.2 s +3 records, 3.0 MiB",
        r"replica +record 7 +━+ +3 records +drift 1 ulp",
        r"peers +record 9 +━+ +1 record +protected, 2 of 2 connected",
        r"storage +step 8 +30 s +━+ +2 steps +the last write failed",
        r"stall +▁▂▃█ +median 1.5 ms, longest 8.0 ms of 4 commits",
        r"trainer +0 steps",
        r"node +1 step: other nodes have record 9",
        r"cluster +2 steps: step 8 is in storage",
        r"trainer of rank 0 died",
        r"recovered step 8 from local memory",
    ):
        assert re.search(row, text), f"{row}\n{text}"
    assert text.count("ms stall") == 0, "samples are no events"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    agent = an_agent(peers=some_peers(), slots=4, recent_stalls=tuple(map(float, range(64))), storage=an_alarm(""))
    lines = text_of(a_view(agent, stored(8)), width, height, entries(20)).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert "last events" in "\n".join(lines)


def test_without_an_agent_storage_and_events_are_left() -> None:
    text = text_of(a_view(None, stored(8)))
    assert "no agent answers" in text
    assert "all steps since step 8, which is in storage" in text
    assert "trainer of rank 0 died" in text
    assert "no journal" in text_of(a_view(None, stored(None)), journal=[])


def test_a_run_that_has_finished_loses_nothing() -> None:
    text = text_of(replace(a_view(None, stored(8)), finished=True))
    assert "step 8" in text
    assert "would be lost" not in text


@pytest.mark.parametrize(
    ("agent", "found", "expected"),
    [
        (an_agent(storage=None), None, {"trainer": 0, "agent": 0, "node": None, "cluster": None}),
        (an_agent(), 8, {"trainer": 0, "agent": 0, "node": 2, "cluster": 2}),
        (an_agent(trainers=()), 8, {"trainer": 0, "agent": 2, "node": 2, "cluster": 2}),
        (an_agent(step=None), 8, {"trainer": None, "agent": None, "node": None, "cluster": None}),
        (an_agent(every=10), 8, {"trainer": 9, "agent": 0, "node": 2, "cluster": 2}),
        (an_agent(peers=some_peers()), 8, {"trainer": 0, "agent": 0, "node": 1, "cluster": 2}),
        (an_agent(peers=some_peers(), trainers=()), 8, {"trainer": 0, "agent": 1, "node": 1, "cluster": 2}),
        (an_agent(peers=some_peers(every=4)), 1, {"trainer": 0, "agent": 0, "node": 8, "cluster": 9}),
        (an_agent(peers=some_peers(protected=False)), 8, {"trainer": 0, "agent": 0, "node": 2, "cluster": 2}),
        (an_agent(unprotected="no memory"), 8, {"trainer": None, "agent": 0, "node": None, "cluster": None}),
        (None, 8, {"trainer": None, "agent": None, "node": None, "cluster": None}),
    ],
)
def test_what_would_be_lost(agent: Status | None, found: int | None, expected: dict[str, int | None]) -> None:
    assert loss(a_view(agent, stored(found))) == expected
    unreadable = View(a_view(agent).address, agent, "", stored(found, problem="away"))
    assert loss(unreadable)["cluster"] is None


def test_storage_that_is_not_read_is_the_agent_s() -> None:
    view = View(a_view(None).address, an_agent(), "", None)
    assert loss(view)["cluster"] == 2


def test_a_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([0.0, 4.0, 8.0]) == "▁▅█"
