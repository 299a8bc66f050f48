"""``memckpt report``: the story that journals tell, where the time went, and the page."""

from __future__ import annotations

import base64
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memckpt.config import StorageConfig
from memckpt.errors import AgentNotFoundError, StorageError
from memckpt.journal import events as journal
from memckpt_tools.report.figures import pictures
from memckpt_tools.report.page import _failures
from memckpt_tools.report.story import measure, tell
from tests.support.monitoring.reports import Told, everything, write
from tests.support.storage.stored_runs import BEFORE_5, until_stored
from tests.support.trainings.cli_harness import invoke, invoke_json
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import config, kill_agent, kill_self
from tests.support.trainings.engine_harness import Lab


def test_a_run_that_dies_twice_and_finishes() -> None:
    told = Told()
    told.begin()
    told.note(journal.StartedOver("nothing is held"))
    told.now += 10
    told.train(1, 100, stall_ms=100.0)
    told.die(100)
    told.now += 5
    told.begin()
    told.recover(100)
    told.now += 5
    told.note(journal.ResumeChecked("equal", "a line"))
    told.train(101, 200, stall_ms=100.0)
    told.die(200)
    told.now += 15
    told.begin()
    told.recover(150, "storage", lost=50, seconds=5.0)
    told.now += 5
    told.train(151, 250, stall_ms=100.0)
    told.note(journal.Finished(250))
    story = tell(told.entries)
    assert [(one.number, one.end, one.first_step, one.last_step) for one in story.attempts] == [
        (1, "died", 1, 100),
        (2, "died", 101, 200),
        (3, "finished", 151, 250),
    ]
    assert story.attempts[0].started_over == "nothing is held"
    assert story.attempts[1].verdict == "equal"
    found = measure(story)
    assert found.wall == 10 + 3 * 99 + 10 + 20
    assert (found.starting, found.down) == (10.0, 30.0)
    assert (found.steps, found.steps_lost) == (300, 50)
    assert found.step == pytest.approx(1.0)
    assert (found.stalled, found.repeated) == pytest.approx((30.0, 50.0))
    assert found.training == pytest.approx(297 - 30 - 50)
    assert found.ettr == pytest.approx(217 / found.wall)
    parts = found.training + found.stalled + found.repeated + found.starting + found.down
    assert parts == pytest.approx(found.wall), "every second is somewhere, and only there"
    # The plan goes back half an interval of storage, and knows no first start.
    assert found.expected is not None
    assert 0.6 < found.expected < 0.9


def test_without_failures_the_plan_is_the_overhead() -> None:
    told = Told()
    told.begin()
    told.train(1, 1001, stall_ms=50.0)
    found = measure(tell(told.entries))
    assert found.expected == pytest.approx(0.95)
    assert found.ettr == pytest.approx(0.95, abs=1e-3)


def test_the_time_after_training_has_finished_is_nobody_s() -> None:
    told = Told()
    told.begin()
    told.train(1, 11)
    told.note(journal.Finished(11))
    told.now += 10_000
    told.begin()
    told.recover(11)
    told.train(12, 21)
    found = measure(tell(told.entries))
    assert found.wall == 10 + 9
    assert (found.steps_lost, found.down) == (0, 0.0)


def test_a_node_that_is_lost_has_nobody_who_says_so() -> None:
    told = Told()
    told.begin("ab")
    told.train(1, 30)
    told.now += 3
    told.begin("ac")
    told.recover(28, "peers", lost=None)
    told.now += 2
    told.train(29, 40)
    told.die(40, "a", "c")
    story = tell(told.entries)
    assert [one.end for one in story.attempts] == ["lost", "died"]
    assert measure(story).steps_lost == 2, "it is known from what was held"
    assert {node for _, node, _ in story.attempts[1].deaths} == {"a", "c"}


def test_numbers_that_begin_again_are_other_attempts() -> None:
    """A run directory whose state was dropped: the count of attempts starts over."""
    told = Told()
    for _ in range(2):
        told.number = 0
        told.begin()
        told.train(1, 5)
        told.die(5)
    story = tell(told.entries)
    assert [one.number for one in story.attempts] == [1, 1]
    assert [position for _, position, _ in story.samples] == [0, 1]


def test_where_agent_and_trainers_die_together_more_steps_may_be_lost_than_are_known() -> None:
    told = Told()
    told.begin()
    told.train(1, 30)
    told.now += 60
    told.begin()
    told.recover(20, "storage", lost=None)
    told.train(21, 40)
    told.die(40)
    found = measure(tell(told.entries))
    assert (found.steps_lost, found.lost_more) == (10, True)
    assert found.step == pytest.approx(1.0), "of the attempt whose end was seen"
    assert "10 or more" in {cell.text for row in _failures(tell(told.entries)).rows for cell in row}


@pytest.mark.parametrize("end", ["died", "finished"])
def test_figures_that_come_after_the_end_make_no_step_longer(end: str) -> None:
    """An agent notes them every few seconds, whether trainers are there or not."""
    told = Told()
    told.begin()
    told.train(1, 20)
    told.now += 4.0
    if end == "died":
        told.die(24)
    else:
        told.note(journal.Finished(24))
    told.now += 56.0
    told.note(journal.Sample(24, None, None, 24, 20, 0.0, 0.0, 0, 0.0, 1 << 20, 0, 1 << 20, 0))
    assert measure(tell(told.entries)).step == pytest.approx(1.0)


@pytest.mark.parametrize("said_late", [False, True])
@pytest.mark.parametrize("end", ["goes on", "lost", "left"])
def test_trainers_that_go_over_to_another_agent_train_on(end: str, said_late: bool) -> None:
    """The agent was told to end, or another one took over: neither is an end of the attempt."""
    told = Told()
    told.begin()
    told.train(1, 20)
    left, came = journal.TrainerLeft(0, 1, 20), journal.AttemptBegan(2, ((0, 1), (1, 2)), rejoined=True)
    for event in (came, left) if said_late else (left, came):
        told.note(event)
    told.now += 1
    for step in range(21, 41):
        told.now += 1.0
        if step % 10 == 0:
            told.note(journal.Sample(step, None, None, step, 20, 0.0, 0.0, 0, 0.0, 1 << 20, 0, 1 << 20, 0))
    if end == "left":
        told.note(journal.TrainerLeft(0, 1, 40))
    elif end == "lost":
        told.begin()
        told.recover(10, "storage", lost=None)
        told.train(11, 12)
    story = tell(told.entries)
    assert len(story.attempts) == (2 if end == "lost" else 1)
    assert story.attempts[0].end == {"goes on": "", "lost": "lost", "left": "left"}[end]
    assert len(story.failures) == (end != "goes on")
    assert story.attempts[0].last_step == 40
    if end == "goes on":
        assert story.attempts[0].ended_at is None
        assert measure(story).wall == told.now - 1000.0


def test_tiers_and_agents() -> None:
    told = Told()
    told.begin()
    told.note(journal.Degraded("storage", "full"))
    told.now += 7
    told.note(journal.Whole("storage", 7.0))
    told.note(journal.Degraded("peers", "silent"))
    told.note(journal.AgentStarted(9, False, replaces=4))
    told.note(journal.AttemptBegan(1, ((0, 1),), rejoined=True))
    story = tell(told.entries)
    assert [(span.tier, span.start, span.end) for span in story.degraded] == [
        ("storage", 1000.0, 1007.0),
        ("peers", 1007.0, None),
    ]
    assert [loss.pid for loss in story.agents] == [4]
    assert len(story.attempts) == 1, "trainers that rejoin go on"


# The page


class Page(html.parser.HTMLParser):
    """Elements, and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.addresses += [value for name in ("src", "srcset", "href") if (value := found.get(name))]
        self.ids += [value for name in ("id",) if (value := found.get(name))]
        if tag not in ("meta", "link", "img", "source", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_shows_everything(tmp_path: Path) -> None:
    run = tmp_path / "a <run>"
    write(run, everything())
    code, text = invoke("report", run)
    assert code == 0
    assert "report.html: goodput" in text.replace("\n", "")
    source = (run / "report.html").read_text()
    page = Page(source)
    assert page.open == []
    assert all(address.startswith("data:") for address in page.addresses), "nothing is loaded from elsewhere"
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in source
    assert {
        "timeline",
        "time",
        "steps",
        "loss",
        "rate",
        "speed",
        "stall",
        "replica",
        "memory",
        "bytes",
        "failures",
    } <= set(page.ids)
    assert "<b>silent" not in source
    assert "&lt;b&gt;silent" in source
    assert "a &lt;run&gt;" in source
    shown = re.sub(r"<[^>]*>", " ", re.sub(r"data:[^\"]*", "", source))
    for words in ("ranks 0-1 on a", "agent pid 4 on a was killed", "eager → lazy", "recovered step 60 from local"):
        assert words in shown


def drawn(told: Told) -> dict[str, str]:
    """The figures of a run, wide and light."""
    story = tell(told.entries)
    encoded = {one.name: one.sources["light"]["wide"] for one in pictures(story, measure(story))}
    return {name: base64.b64decode(url.partition(",")[2]).decode() for name, url in encoded.items()}


def test_losses_and_rate_are_drawn_over_time_with_the_failures() -> None:
    found, silent = drawn(everything()), everything()
    for number, entry in enumerate(silent.entries):
        if isinstance(entry.event, journal.Sample):
            silent.entries[number] = msgspec.structs.replace(
                entry, event=msgspec.structs.replace(entry.event, logged={})
            )
    assert drawn(silent).keys() == found.keys() - {"loss", "rate"}
    for name, labels in (("loss", [">loss<", ">val_loss<"]), ("rate", [">rate<"])):
        assert found[name].count("stroke-dasharray") == found["speed"].count("stroke-dasharray"), "the failure"
        assert all(label in found[name] for label in labels)


def test_a_page_that_follows_a_run_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, run = everything(), tmp_path / "run"
    write(run, told)
    pages = []

    def finish_meanwhile(*waited: object) -> None:
        pages.append((run / "report.html").read_text())
        for node in run.glob("events-*"):
            node.unlink()
        told.note(journal.Finished(90))
        write(run, told)

    monkeypatch.setattr("memckpt_tools.report.command.select.select", finish_meanwhile)
    assert invoke("report", run, "--follow", "7")[0] == 0
    (while_it_ran,) = pages
    assert '<meta http-equiv="refresh" content="7">' in while_it_ran
    ended = (run / "report.html").read_text()
    assert 'http-equiv="refresh"' not in ended
    assert "Finished after step 90" in ended
    assert [path.name for path in run.iterdir() if "html" in path.name] == ["report.html"]


def test_its_numbers_for_programs(tmp_path: Path) -> None:
    write(tmp_path / "run", everything())
    code, found = invoke_json("report", tmp_path / "run")
    assert code == 0
    assert (found["attempts"], found["failures"], found["last_step"]) == (2, 1, 90)
    assert 0 < found["goodput"]["ettr"] < 1
    assert not (tmp_path / "run" / "report.html").exists()


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    with pytest.raises(AgentNotFoundError, match=r"expected events-NODE\.jsonl"):
        invoke("report", tmp_path)
    write(tmp_path, everything())
    with pytest.raises(StorageError, match=r"--to .*: expected a directory"):
        invoke("report", tmp_path, "--to", tmp_path / "no" / "page.html")


@pytest.mark.slow
def test_the_report_of_a_real_run(lab: Lab) -> None:
    settings = config("lazy", storage=StorageConfig(every_steps=5, min_seconds=3600))
    actions: Any = {**BEFORE_5, ("after commit", 7): until_stored(5), ("backward", 9): kill_self}
    lab.train(PLAIN, settings, actions=actions)
    lab.train(PLAIN, settings, seed=2, actions={("after commit", 11): kill_agent})
    code, found = invoke_json("report", lab.run_dir, "--to", lab.directory / "page.html")
    assert code == 0
    assert (found["attempts"], found["failures"], found["end"]) == (2, 1, "finished")
    (recovery,) = found["recoveries"]
    assert (recovery["tier"], recovery["verdict"]) == ("local memory", "equal")
    shown = (lab.directory / "page.html").read_text()
    assert "was killed" in shown, "the agent"
    assert re.search(r"<td class=\"n\">step \d+</td>.*whole", shown, re.DOTALL), "a checkpoint"
    assert json.loads(json.dumps(found["goodput"]))["steps"] >= 10
