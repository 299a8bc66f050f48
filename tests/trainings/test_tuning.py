"""Settings that change while training runs: killed around the change, and gone on with, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest

from memckpt.config import AgentConfig, StorageConfig
from memckpt.errors import MemoryBudgetError
from memckpt.memory.pending_generation import PendingGeneration
from memckpt.memory.replica import Replica
from memckpt.planning.tuning import Change, LayoutSettings, LayoutTuner, Measured
from memckpt.recovery import restore
from memckpt.recovery.restore import Restorer
from memckpt.session import mode, protection, tuning
from memckpt.session.generation_switch import GenerationSwitch
from memckpt.session.link import AgentLink
from memckpt.state.records import RecordMeta
from memckpt.state.redo import RedoGroup
from tests.support.cluster.processes import kill_and_wait
from tests.support.storage.stored_runs import until_ordered, until_stored
from tests.support.trainings.ddp_cases import Death, Job, fresh_directory
from tests.support.trainings.ddp_runs import survives as ddp_survives
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_both
from tests.support.trainings.engine_harness import Ended, Lab
from tests.support.trainings.engine_training import Case, Training

FREE = config("auto", period=None)
Decide = Callable[[LayoutTuner, LayoutSettings, Measured], Change | None]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every other record from the fourth on: the first change begins behind record 6."""
    for name, value in {"FIRST_RECORDS": 2, "LEAST_RECORDS": 2, "LOOK_SECONDS": 0.0}.items():
        monkeypatch.setattr(tuning, name, value)
    monkeypatch.setattr(protection, "SETTLED_RECORDS", 2)


def decide_by(monkeypatch: pytest.MonkeyPatch, decide: Decide) -> None:
    monkeypatch.setattr(LayoutTuner, "decide", decide)


def eager_at_first(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the automatic choice be eager redo, which it is not for a model as small."""
    monkeypatch.setattr(mode, "choose_redo", lambda *arguments: ("eager", "a core is free"))
    lab.start_agent()


def becomes_lazy(tuner: LayoutTuner, now: LayoutSettings, measured: Measured) -> Change | None:
    return Change("redo", LayoutSettings("lazy", 5, 4), "it waits") if now.mode == "eager" else None


def longer_period(tuner: LayoutTuner, now: LayoutSettings, measured: Measured) -> Change | None:
    if not tuner._free.period or now.period == 6:
        return None
    return Change("anchor_period_steps", replace(now, period=6), "fewer copies")


def tuned(ended: Ended) -> list[str]:
    return [line for line in ended.log.splitlines() if " -> " in line and "from step" in line]


def note_changes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Have each rank note the generations that tuning begins. Returns a function that reads the notes."""
    file, tune = lab.directory / "changes", GenerationSwitch.tune

    def noted(switch: GenerationSwitch, record: int) -> None:
        tune(switch, record)
        with file.open("a") as notes:
            notes.write(f"rank {switch._ranks.rank}, record {record}, T={switch.request.period}\n")

    monkeypatch.setattr(GenerationSwitch, "tune", noted)
    return lambda: file.read_text().splitlines() if file.exists() else []


# Deaths around a change


def test_redo_that_becomes_lazy_while_training_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    eager_at_first(lab, monkeypatch)
    decide_by(monkeypatch, becomes_lazy)
    kills = [("after commit", 3), ("backward", 13), ("after commit", 14), ("before batch", 20)]
    first, second, *later = lab.survives(PLAIN, FREE, kills)
    assert "eager" in first.of("attached")[0]["text"]
    assert not tuned(first), "it was killed before"
    assert len(tuned(second)) == 1
    assert not any(map(tuned, later)), "once"
    assert "INFO memckpt.tuning memckpt: redo: eager -> lazy" in second.log, "of the logger that is shown by default"
    for ended in later:
        assert "lazy redo (as tuned before), tap: " in ended.of("attached")[0]["text"]
        assert "T=5, D=4" in ended.of("attached")[0]["text"]
        assert ended.log.count("is complete") <= 1, "the generation of the dead attempt goes on"


@pytest.mark.parametrize("step", [5, 6, 7])
def test_a_death_at_each_step_of_a_change_of_the_period(lab: Lab, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    decide_by(monkeypatch, longer_period)
    first, second = lab.survives(PLAIN, FREE, [("after commit", step)])
    assert len(tuned(first) + tuned(second)) >= 1
    assert "T=6" in second.of("attached")[0]["text"] or tuned(second)


@pytest.mark.parametrize("nodes", [False, True], ids=["one-agent", "two-agents"])
def test_all_ranks_change_after_the_same_record(lab: Lab, monkeypatch: pytest.MonkeyPatch, nodes: bool) -> None:
    decide_by(monkeypatch, longer_period)
    changes = note_changes(lab, monkeypatch)
    job = Job(fresh_directory(lab), lab.run_dir, FREE, nodes=nodes)
    ddp_survives(lab, job, [Death("all", 8, "committed"), Death(1, 11, "backward")], [8, 11])
    assert sorted(changes()) == ["rank 0, record 6, T=6", "rank 1, record 6, T=6"]


@pytest.mark.parametrize("nodes", [False, True], ids=["one-agent", "two-agents"])
def test_where_one_rank_has_no_room_no_rank_changes(lab: Lab, monkeypatch: pytest.MonkeyPatch, nodes: bool) -> None:
    original, give_up = AgentLink.prepare, PendingGeneration.give_up
    refused = lab.directory / "given-up"

    def prepare(link: AgentLink, *arguments: Any, optional: bool = False, **settings: Any) -> Any:
        if optional and link._ranks.rank == 1:
            raise MemoryBudgetError("expected room, found none")
        return original(link, *arguments, optional=optional, **settings)

    def noted(pending: PendingGeneration, record: int) -> None:
        before = pending.generation
        give_up(pending, record)
        with refused.open("a") as file:
            if pending._begins == record:  # a later one may have been asked for meanwhile
                file.write(f"{record}: {before is not None} -> {pending.generation is not None}\n")

    monkeypatch.setattr(AgentLink, "prepare", prepare)
    monkeypatch.setattr(PendingGeneration, "give_up", noted)
    decide_by(monkeypatch, longer_period)
    changes = note_changes(lab, monkeypatch)
    if not nodes:
        lab.start_agent()  # forked, so that it notes
    job = Job(fresh_directory(lab), lab.run_dir, FREE, nodes=nodes)
    ddp_survives(lab, job, [Death("all", 8, "committed")], [9])
    assert changes() == []
    assert "does not fit: expected room, found none" in "".join(log.read_text() for log in lab.directory.glob("*.log"))
    if not nodes:
        said = refused.read_text().splitlines()
        assert "6: True -> False" in said, "the memory that one rank had got is given back"
        assert not any("-> True" in line for line in said)


def test_an_agent_that_is_lost_before_the_generation_begins(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = GenerationSwitch.tune

    def killing(switch: GenerationSwitch, record: int) -> None:
        tune(switch, record)
        pid = switch._link.agent_pid
        assert pid is not None
        kill_and_wait(pid)

    decide_by(monkeypatch, longer_period)
    monkeypatch.setattr(GenerationSwitch, "tune", killing)
    first, second = lab.survives(PLAIN, FREE, [("after commit", 12)])
    assert len(tuned(first)) == 1
    assert "protected again" in first.log
    assert "T=6" in second.of("attached")[0]["text"]


def test_settings_that_no_longer_fit_are_not_gone_on_with(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has less memory than the one on which they were found."""

    def longest(tuner: LayoutTuner, now: LayoutSettings, measured: Measured) -> Change | None:
        return None if now.period == 16 else Change("anchor_period_steps", replace(now, period=16), "fewer copies")

    decide_by(monkeypatch, longest)
    # Long after the change: the order for the generation before is dropped with it, and given anew.
    settings = replace(FREE, storage=StorageConfig(every_steps=20))
    actions = {
        ("after commit", 18): until_ordered,
        ("after commit", 22): until_stored(20),
        ("backward", 23): kill_both,
    }
    first = lab.train(PLAIN, settings, actions=actions)
    assert tuned(first)
    state = sum(param.nbytes for param in PLAIN.build().model.parameters())
    smaller = replace(settings, agent=AgentConfig(linger_seconds=60, memory_budget_bytes=state * 24))
    second = lab.train(PLAIN, smaller, seed=2)
    assert "T=8" in second.of("attached")[0]["text"]
    assert "and not lazy, T=16, D=3 as before: it would take" in second.log
    lab.check_same(PLAIN, second)


# What stays


def test_what_the_user_has_set_is_left_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def prepare(control: Control) -> None:
        original = LayoutTuner.__init__

        def noted(self: LayoutTuner, free: Any, budget: float) -> None:
            control.journal.note("free", mode=free.mode, period=free.period, slots=free.slots)
            original(self, free, budget)

        LayoutTuner.__init__ = noted  # type: ignore[method-assign]

    for settings in (config("lazy", slots=4), FREE):
        ended = lab.train(PLAIN, settings, prepare=prepare, run_dir=lab.directory / f"run-{settings.redo}")
        seen += [{key: found[key] for key in ("mode", "period", "slots")} for found in ended.of("free")]
    assert seen == [dict.fromkeys(("mode", "period", "slots"), False), dict.fromkeys(("mode", "period", "slots"), True)]


def test_a_resume_with_settings_of_the_user_s_takes_these(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_by(monkeypatch, longer_period)
    lab.survives(PLAIN, FREE, [("after commit", 12)])
    first = lab.train(PLAIN, FREE, last_step=12, run_dir=lab.directory / "other")
    assert tuned(first)
    second = lab.train(PLAIN, config("auto", period=9), run_dir=lab.directory / "other", seed=2)
    assert "T=9" in second.of("attached")[0]["text"]
    assert not tuned(second)
    lab.check_same(PLAIN, second)


def test_switched_off_nothing_is_measured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_by(monkeypatch, longer_period)
    ended = lab.train(PLAIN, replace(FREE, tuning="off"))
    assert not tuned(ended)
    assert "T=8" in ended.of("attached")[0]["text"]


def test_without_room_beside_what_is_held_nothing_changes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new generation alone would fit: what is held must not go for it."""

    def wider(tuner: LayoutTuner, now: LayoutSettings, measured: Measured) -> Change | None:
        return Change("slots", replace(now, slots=8), "it waits")

    whole = PLAIN.build()
    state = sum(param.nbytes for param in whole.model.parameters())
    decide_by(monkeypatch, wider)
    budget = int(state * (1 + 3 / 8) * 22)
    settings = replace(FREE, agent=AgentConfig(linger_seconds=60, memory_budget_bytes=budget))
    first, second = lab.survives(PLAIN, settings, [("after commit", 12)])
    for ended in (first, second):
        assert not tuned(ended)
        assert "does not fit" in ended.log
        assert "not protected" not in ended.log
        assert "without protection" not in ended.log


def test_an_error_while_settings_are_prepared_never_reaches_training(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    original = AgentLink.prepare

    def prepare(link: AgentLink, *arguments: Any, optional: bool = False, **settings: Any) -> Any:
        if optional and link.agent_pid:
            raise OSError("cannot be mapped")
        return original(link, *arguments, **settings)

    monkeypatch.setattr(AgentLink, "prepare", prepare)
    decide_by(monkeypatch, longer_period)
    for ended in lab.survives(PLAIN, FREE, [("after commit", 12)]):
        assert not tuned(ended)
        assert "does not fit: OSError: cannot be mapped" in ended.log


# What is measured


def test_a_record_s_redo_is_timed_without_copies(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of T records each redoes a T-th of the parameters from its anchor on; here redo of a T-th takes a second."""

    def prepare(control: Control) -> None:
        now = [0.0]
        anchored, apply_all, redid = Restorer._anchored, RedoGroup.apply_all, tuning.Tuning.redid

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
        tuning.Tuning.redid = noted  # type: ignore[method-assign]

    period = 5
    _, ended = lab.survives(PLAIN, config("lazy", period=period), [("after commit", 12)], prepare=prepare)
    assert [event["seconds"] for event in ended.of("redid")] == [pytest.approx(period)]


# A real agent that is too slow


def slow(apply: Callable[[Replica, RecordMeta], None], replica: Replica, meta: RecordMeta) -> None:
    """Redo a record in 150 ms or more: longer than a step takes on a machine that is busy with other things."""
    until = time.perf_counter() + 0.15
    apply(replica, meta)
    while time.perf_counter() < until:
        pass


def test_training_stops_waiting_for_an_agent_that_is_too_slow(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "_apply", partialmethod(partial(slow, Replica._apply)))
    eager_at_first(lab, monkeypatch)
    monkeypatch.setattr(tuning, "LEAST_RECORDS", 8)
    monkeypatch.setattr(protection, "SETTLED_RECORDS", 6)
    case = Case("slow agent", Training, steps=90)
    killed, ended = lab.survives(case, FREE, [("after commit", 80)])
    assert [line.split(": ")[1] for line in tuned(killed)][:2] == ["slots", "redo"]
    assert "eager -> lazy" in tuned(killed)[1]
    assert "training waits" in tuned(killed)[1]
    assert not any("slots" in line or "redo" in line for line in tuned(ended))
    assert ended.mode == "lazy"
