"""Advice while training runs: said, shown and written down, while no setting changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest

from memckpt.journal.events import Advised
from memckpt.journal.journal import read_journal
from memckpt.memory.replica import Replica
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.recovery import restore
from memckpt.recovery.restore import Restorer
from memckpt.session import mode, protection, tuning
from memckpt.session.tuning import Advice, Adviser, FailureRate, Measured
from memckpt.state.records import RecordMeta
from memckpt.state.redo import RedoGroup
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config
from tests.support.trainings.engine_harness import Ended, Lab
from tests.support.trainings.engine_training import Case, Training
from tests.support.trainings.killed_ranks import Death
from tests.support.trainings.killed_ranks import survives as ddp_survives
from tests.support.trainings.rank_trainings import job_of

FREE = config("auto", period=None)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every other record from the fourth on: the first advice comes behind record 8."""
    for name, value in {"FIRST_RECORDS": 2, "LEAST_RECORDS": 2, "LOOK_SECONDS": 0.0}.items():
        monkeypatch.setattr(tuning, name, value)
    monkeypatch.setattr(protection, "SETTLED_RECORDS", 2)


def advised(ended: Ended) -> list[str]:
    return [line for line in ended.log.splitlines() if "INFO memckpt.tuning memckpt: " in line]


def slow(apply: Callable[[Replica, RecordMeta], None], replica: Replica, meta: RecordMeta) -> None:
    """Redo a record in 150 ms or more: longer than a step takes on a machine that is busy with other things."""
    until = time.perf_counter() + 0.15
    apply(replica, meta)
    while time.perf_counter() < until:
        pass


def test_an_agent_that_is_too_slow_is_said_and_nothing_changes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "_apply", partialmethod(partial(slow, Replica._apply)))
    # The automatic choice, which it is not for a model as small.
    monkeypatch.setattr(mode, "choose_redo", lambda *arguments: ("eager", "a core is free"))
    monkeypatch.setattr(tuning, "LEAST_RECORDS", 8)
    monkeypatch.setattr(protection, "SETTLED_RECORDS", 6)
    lab.start_agent()

    def look_at_status(control: Control) -> None:
        status = ask_status(AgentAddress.of(lab.run_dir))
        assert status is not None
        control.journal.note("status", line=status.advice, reason=status.advice_reason)

    case = Case("slow agent", Training, steps=60)
    actions = {("after commit", 58): look_at_status}
    ended = lab.train(case, FREE, actions=actions)
    lab.check_same(case, ended)
    [line] = advised(ended)
    assert "slots=6 would pay from the next start on: training waits" in line
    assert "more memory on each node" in line
    [shown] = ended.of("status")
    assert shown["line"] == "slots=6"
    assert "training waits" in shown["reason"]
    events = [entry.event for entry in read_journal(lab.run_dir) if isinstance(entry.event, Advised)]
    assert [event.line for event in events] == ["slots=6"]
    assert ended.mode == "eager"
    assert ended.log.count("is complete") <= 1, "one generation: nothing is laid out anew"


def test_only_rank_0_says_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at(adviser: Adviser, now: Any, measured: Measured) -> bool:
        first = adviser.advice is None
        adviser.advice = Advice("slots=9", replace(now, slots=9), "a reason")
        return first

    monkeypatch.setattr(Adviser, "look_at", look_at)
    ddp_survives(lab, replace(job_of(lab, nodes=True), config=FREE), [Death("all", 10, "committed")])
    logs = "".join(log.read_text() for log in lab.directory.glob("*.log"))
    assert logs.count("would pay from the next start on") == 1
    events = [entry for entry in read_journal(lab.run_dir) if isinstance(entry.event, Advised)]
    assert len({entry.envelope.node for entry in events}) == 2, "each node tells its agent"


def test_failures_are_counted_across_attempts(lab: Lab) -> None:
    def prepare(control: Control) -> None:
        failed = FailureRate.failed

        def noted(rate: FailureRate) -> None:
            failed(rate)
            control.journal.note("failed", failures=rate.failures)

        FailureRate.failed = noted  # type: ignore[method-assign]

    first, *later = lab.survives(PLAIN, FREE, [("after commit", 8), ("after commit", 12)], prepare=prepare)
    assert first.of("failed") == []
    assert [ended.of("failed")[0]["failures"] for ended in later] == [1.0, 1.875]


def test_switched_off_nothing_is_measured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.Tuning, "_look_at_figures", lambda *arguments: pytest.fail("a look"))
    ended = lab.train(PLAIN, replace(FREE, tuning="off"))
    lab.check_same(PLAIN, ended)


def test_a_record_s_redo_is_timed_without_copies(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of T records each redoes a T-th of the parameters from its anchor on; here redo of a T-th takes a second."""

    def prepare(control: Control) -> None:
        now = [0.0]
        anchored, apply_all, redid = Restorer._anchored, RedoGroup.apply_all, tuning.Tuning.set_redo_seconds

        def copies(*arguments: Any) -> Any:
            now[0] += 1000.0
            return anchored(*arguments)

        def redoes(group: RedoGroup, metas: Any, gradients: Any) -> None:
            now[0] += len(metas)
            apply_all(group, metas, gradients)

        def noted(tuner: tuning.Tuning, seconds: float | None) -> None:
            control.journal.note("redid", seconds=seconds)
            redid(tuner, seconds)

        restore.time = SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[attr-defined]
        Restorer._anchored, RedoGroup.apply_all = copies, redoes  # type: ignore[method-assign]
        tuning.Tuning.set_redo_seconds = noted  # type: ignore[method-assign]

    period = 5
    _, ended = lab.survives(PLAIN, config("lazy", period=period), [("after commit", 12)], prepare=prepare)
    assert [event["seconds"] for event in ended.of("redid")] == [pytest.approx(period)]
