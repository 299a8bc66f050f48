"""Whoever dies, and wherever: training resumes at the last committed step, bit for bit."""

from __future__ import annotations

import functools
import os
import signal
import sys
import types
from typing import Any
from unittest.mock import patch

import pytest

from memckpt.capture.slot_writer import SlotWriter
from memckpt.errors import AgentError
from memckpt.memory import replica
from memckpt.recovery.restore import Restorer, RestoreTarget
from memckpt.session import connection, link
from memckpt.session.connection import Reconnection
from memckpt.state.redo import RedoGroup
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_agent, kill_both, kill_self
from tests.support.trainings.engine_harness import Lab, collect
from tests.support.trainings.engine_optimizers import Momentum
from tests.support.trainings.engine_state import AddedGroup
from tests.support.trainings.engine_training import Case, Training
from tests.support.trainings.planted_faults import die_after

POINTS = ["before batch", "forward", "backward", "before step", "after step", "in commit", "after commit"]
REDO = pytest.mark.parametrize("redo", ["lazy", "eager"])


@pytest.mark.promise("a kill anywhere in a step loses only what was not committed")
@pytest.mark.promise("trainer: exception, any signal, out of memory, segmentation fault")
@REDO
def test_a_kill_anywhere_in_a_step_loses_only_what_was_not_committed(lab: Lab, redo: str) -> None:
    lab.survives(PLAIN, config(redo), [(point, 4 + 2 * index) for index, point in enumerate(POINTS)])


@REDO
def test_a_kill_of_the_trainer_as_soon_as_it_has_resumed(lab: Lab, redo: str) -> None:
    """The same step is tried again and again."""
    kills = [("after commit", 9), ("before batch", 10), ("in commit", 10), ("backward", 10), ("after commit", 10)]
    lab.survives(PLAIN, config(redo), kills)


@pytest.mark.promise("a kill before anything is committed starts over, cleanly")
@pytest.mark.promise("trainer, before its first commit")
@REDO
@pytest.mark.parametrize("point", ["backward", "in commit"])
def test_a_kill_before_anything_is_committed_starts_over(lab: Lab, redo: str, point: str) -> None:
    attempts = lab.survives(PLAIN, config(redo), [(point, 1)], expected=[None])
    assert "starting over" in attempts[-1].log


@pytest.mark.promise("a kill before anything is committed starts over, cleanly")
@REDO
@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("_stage_piece", 1, marks=pytest.mark.slow),
        ("_stage_piece", 5),
        pytest.param("start_generation", 1, marks=pytest.mark.slow),
        ("seal_generation", 1),
    ],
)
def test_a_kill_before_the_first_generation_is_there_starts_over(lab: Lab, redo: str, name: str, count: int) -> None:
    died = lab.train(PLAIN, config(redo), prepare=die_after(SlotWriter, name, count))
    assert len(died.of("killed")) == 1
    lab.goes_on(PLAIN, config(redo), None, died)


@pytest.mark.promise("a kill during restore or redo is harmless")
@pytest.mark.promise("trainer, while it restores")
@REDO
@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [
        (RestoreTarget, "forget_optimizer_state", 1),
        pytest.param(Restorer, "_restore_static", 1, marks=pytest.mark.slow),
        (Restorer, "_restore_by_value", 1),
        (SlotWriter, "stage_anchors", 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_kill_during_a_restore_is_harmless(lab: Lab, redo: str, owner: type, name: str, count: int) -> None:
    first = lab.train(PLAIN, config(redo), actions={("backward", 12): kill_self})
    second = lab.train(PLAIN, config(redo), seed=2, prepare=die_after(owner, name, count))
    assert len(second.of("killed")) == 1
    assert set(second.losses) <= {11}  # the repeated step, behind which anchors are staged again
    lab.goes_on(PLAIN, config(redo), 11, first, seed=3)


@pytest.mark.promise("a kill during restore or redo is harmless")
@pytest.mark.promise("trainer, while it restores")
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_kill_in_the_middle_of_lazy_redo_is_harmless(lab: Lab, count: int) -> None:
    first = lab.train(PLAIN, config("lazy"), actions={("backward", 12): kill_self})
    second = lab.train(PLAIN, config("lazy"), seed=2, prepare=die_after(RedoGroup, "_apply_sub_step", count))
    assert len(second.of("killed")) == 1
    lab.goes_on(PLAIN, config("lazy"), 11, first, seed=3)


@pytest.mark.promise("a kill while a new base is written falls back to the old one")
@pytest.mark.parametrize("name", ["_stage_piece", "seal_generation"])
@REDO
def test_a_kill_while_a_later_generation_is_written_falls_back_on_the_old_one(lab: Lab, redo: str, name: str) -> None:
    """An agent's death brings a new generation; here one comes because the groups change."""
    case = Case("added-group", AddedGroup)

    died = lab.train(case, config(redo), prepare=die_after(SlotWriter, name, step=8))
    assert died.of("killed")[0]["step"] == 8
    lab.goes_on(case, config(redo), 7, died)


# The agent


@pytest.mark.promise("training survives its agent and is protected again")
@pytest.mark.promise("agent")
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", [pytest.param("before batch", marks=pytest.mark.slow), "backward", "in commit"])
def test_training_survives_its_agent_and_is_protected_again(lab: Lab, redo: str, point: str) -> None:
    """The agent dies alone; a new one is started (by a real start), and the trainer's death later loses nothing."""
    died = lab.train(PLAIN, config(redo), actions={(point, 6): kill_agent, ("before step", 9): kill_self})
    assert [each["who"] for each in died.of("killed")] == ["agent", "trainer"]
    assert "training goes on without protection since step 6" in died.log
    assert "protected again from step 6 on" in died.log
    lab.goes_on(PLAIN, config(redo), 8, died)


@pytest.mark.promise("training survives its agent and is protected again")
def test_several_agents_die_in_one_run(lab: Lab) -> None:
    deaths = {("forward", step): kill_agent for step in (1, 2, 5, 6, 12)}
    died = lab.train(PLAIN, config("lazy"), actions={**deaths, ("after commit", 14): kill_self})
    assert len(died.of("killed")) == 6
    lab.goes_on(PLAIN, config("lazy"), 14, died)


@pytest.mark.promise("after the death of agent and trainer no stale state is used")
@pytest.mark.promise("agent")
@REDO
def test_nothing_is_held_when_agent_and_trainer_die(lab: Lab, redo: str) -> None:
    died = lab.train(PLAIN, config(redo), actions={("backward", 9): kill_both})
    assert [each["who"] for each in died.of("killed")] == ["agent", "trainer"]
    final = lab.goes_on(PLAIN, config(redo), None, died)
    assert "starting over: nothing is held in local memory" in final.log


@pytest.mark.promise("after the death of agent and trainer no stale state is used")
def test_an_agent_that_dies_while_it_applies_a_record_leaves_nothing_to_trust(lab: Lab) -> None:
    """The node dies in the middle of a record: the agent is a fork of a process in which redo ends both."""
    original = replica.Replica._keep_in_replica
    trainer = lab.directory / "trainer"
    calls = 0

    def dying(self: Any, member: Any) -> None:
        nonlocal calls
        calls += 1
        original(self, member)
        if calls == 15:  # some members of the third record are done, some not
            os.kill(int(trainer.read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(replica.Replica, "_keep_in_replica", dying):
        agent = lab.start_agent()
    child, report = lab.begin(
        PLAIN, config("eager"), prepare=lambda control: trainer.write_text(str(os.getpid())) and None
    )
    died = collect(child, report)
    assert died.code == -signal.SIGKILL
    assert agent.wait() == -signal.SIGKILL
    assert max(died.losses) >= 4
    final = lab.goes_on(PLAIN, config("eager"), None, died)
    assert "starting over: nothing is held" in final.log


@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_an_agent_that_dies_while_a_generation_is_written(lab: Lab, redo: str) -> None:
    """The new agent dies, too, before its generation is complete: another one follows."""

    def prepare(control: Control) -> None:
        original = SlotWriter.start_generation
        calls = 0

        def dying(self: SlotWriter, record: int) -> Any:
            nonlocal calls
            calls += 1
            result = original(self, record)
            if calls == 1:
                kill_agent(control)
            return result

        SlotWriter.start_generation = dying  # type: ignore[method-assign]

    died = lab.train(PLAIN, config(redo), prepare=prepare, actions={("backward", 4): kill_self})
    assert [each["who"] for each in died.of("killed")] == ["agent", "trainer"]
    lab.goes_on(PLAIN, config(redo), 3, died)


@pytest.mark.promise("steps without protection are counted and reported")
@pytest.mark.promise("no new agent can be started")
@pytest.mark.promise("a step without protection")
def test_steps_without_protection_are_counted(lab: Lab) -> None:
    """No agent can be started for a while: training goes on, and the gap is reported with its length."""

    def prepare(control: Control) -> None:
        original = connection.spawn_agent

        def failing(*arguments: Any) -> Any:
            if 6 <= control.step < 9:
                control.journal.note("refused", step=control.step)
                raise AgentError("out of processes")
            return original(*arguments)

        connection.spawn_agent = failing
        # A clock that counts steps: pauses of 1, then 2.
        link.Reconnection = functools.partial(Reconnection, clock=lambda: float(control.step))  # type: ignore[assignment, misc]

    actions = {("forward", 6): kill_agent, ("after commit", 15): kill_self}
    died = lab.train(PLAIN, config(), prepare=prepare, actions=actions)
    assert [each["step"] for each in died.of("refused")] == [6, 7]
    assert "training goes on without protection since step 6" in died.log
    assert "out of processes" in died.log
    assert "protected again from step 9 on; 3 steps were not" in died.log
    lab.goes_on(PLAIN, config(), 15, died)


def test_an_optimizer_that_the_agent_cannot_import_is_redone_lazily(lab: Lab) -> None:
    """The trainer finds the class by name, the agent does not: the agent says so, and training falls back."""

    def build() -> Any:
        module = types.ModuleType("only_in_the_trainer")
        found = type("Nowhere", (Momentum,), {"__module__": "only_in_the_trainer", "__qualname__": "Nowhere"})
        module.Nowhere = found  # type: ignore[attr-defined]
        sys.modules["only_in_the_trainer"] = module
        return Training(make=found)

    case = Case("nowhere", build)
    attempts = lab.survives(case, config("eager"), [("after commit", 9), ("backward", 17)])
    assert "only_in_the_trainer" in attempts[0].log
    assert "the agent's redo failed" in attempts[0].log or "redo of record" in attempts[0].log
