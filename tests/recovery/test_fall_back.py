"""A restored state that is not what its record says: another one that proves itself is resumed, or it is said."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from memckpt.config import StorageConfig
from memckpt.recovery.restore import Restorer
from memckpt.session.session import Session
from memckpt.session.staging import Changes, Staging
from memckpt.state.redo import RedoGroup
from tests.support.storage.stored_runs import until_ordered, until_stored
from tests.support.trainings.engine_audits import wait_for_audit
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Action, Control, config, kill_self
from tests.support.trainings.engine_harness import Ended, Lab
from tests.support.trainings.engine_optimizers import OnParameters
from tests.support.trainings.engine_training import Case, Training, case_of
from tests.support.trainings.planted_faults import around

CHANGED, LAST = 9, 23


class Changed(Training):
    """A weight is changed by hand behind the step, once."""

    def batch(self, step: int) -> float:
        loss = super().batch(step)
        if step == CHANGED:
            next(iter(self.model.parameters())).data.view(-1)[::2].mul_(1.5)
        return loss


CASE = Case("changed", Changed)


def look_away(control: Control) -> None:
    """Plant the fault: nobody looks for changes by hand in this attempt."""

    def nothing(changes: Any, *_: Any) -> None:
        return None

    for name in ("look_at_commit", "look_before_step"):
        setattr(Changes, name, nothing)


def die_behind_the_change(lab: Lab, settings: Any, later: int = 0, actions: dict[Any, Action] | None = None) -> None:
    actions = {**(actions or {}), ("after commit", CHANGED + later): kill_self}
    lab.train(CASE, settings, prepare=look_away, actions=actions)


def resume(lab: Lab, settings: Any, **arguments: Any) -> Ended:
    return lab.train(CASE, settings, seed=4, **arguments)


@pytest.mark.parametrize("check", ["witness", "replay"])
@pytest.mark.parametrize("later", [0, 1])
def test_an_earlier_record_is_resumed_where_the_newest_is_refuted(lab: Lab, later: int, check: str) -> None:
    settings = config("lazy", resume_check=check)
    die_behind_the_change(lab, settings, later)
    ended = resume(lab, settings, unchecked=None)
    assert ended.restored_step == CHANGED - 1
    assert ended.verdict[0] == "equal"
    assert f"step {CHANGED - 1} is resumed from local memory" in ended.log
    lab.check_same(CASE, ended)


CHAINS = [("lazy", 3, "witness"), ("lazy", 3, "replay"), ("eager", 0, "witness")]


@pytest.mark.parametrize(("redo", "later", "check"), CHAINS)
def test_storage_is_resumed_where_memory_is_refuted(lab: Lab, redo: str, later: int, check: str) -> None:
    """With lazy redo all records in memory are wrong; with eager redo it is not there, and the next anchor is not."""
    # Without the audit, which would find the change while the test waits for storage.
    settings = config(redo, resume_check=check, audit_budget=0.0, storage=StorageConfig(every_steps=4))
    die_behind_the_change(
        lab, settings, later=later, actions={("after commit", 2): until_ordered, ("forward", 6): until_stored(4)}
    )
    ended = resume(lab, settings, unchecked=None)
    assert ended.restored_step in range(4, CHANGED + later + 1, 4)  # those that the trainer got to storage
    assert ended.verdict[0] == "equal"
    assert ended.of("restored")[0].get("repeated") is None
    assert f"step {ended.restored_step} is resumed from storage" in ended.log
    lab.check_same(CASE, ended)


def test_storage_that_is_damaged_keeps_no_state_of_memory_from_its_resume(lab: Lab) -> None:
    settings = config("eager", resume_check="witness", audit_budget=0.0, storage=StorageConfig(every_steps=6))
    die_behind_the_change(lab, settings, actions={("after commit", 4): until_ordered, ("forward", 8): until_stored(6)})
    for file in (lab.run_dir / "storage" / "base").rglob("*.distcp"):
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(b"\xff" * 16)
    ended = resume(lab, settings)
    assert ended.restored_step == CHANGED
    assert ended.verdict[0] == "different"
    assert "no state of storage can be tried" in ended.log


def without_samples(_: Control) -> None:
    """Plant the fault: records lack their sample."""
    Staging._completed = lambda self, point, *_: point.packed  # type: ignore[method-assign]


def test_a_record_without_a_sample_is_resumed_and_not_called_exact(lab: Lab) -> None:
    settings = config("lazy", resume_check="witness")
    lab.train(PLAIN, settings, prepare=without_samples, actions={("after commit", 7): kill_self})
    ended = lab.train(PLAIN, settings, seed=4, unchecked=None)
    assert ended.restored_step == 7
    assert ended.verdict[0] == "none"
    assert not ended.of("restored")[0]["exact"]
    lab.check_same(PLAIN, ended)


def test_where_nothing_proves_itself_the_nearest_is_resumed_and_it_is_said(lab: Lab) -> None:
    """Also at later resumes. Once these are exact but for that, even a user who wants exact ones goes on."""
    settings = config("lazy", resume_check="witness", audit_budget=0.0)
    die_behind_the_change(lab, settings, later=3)
    actions: dict[tuple[str, int], Action] = {("after commit", step): wait_for_audit for step in range(CHANGED, LAST)}
    actions["after commit", LAST] = kill_self
    settings = config("lazy", resume_check="witness", audit_budget=1.0)
    ended = resume(lab, settings, actions=actions)
    assert ended.restored_step == CHANGED + 3
    verdict, line = ended.verdict
    assert verdict == "different"
    assert line.startswith(f"a sample of the state after step {CHANGED + 3}, from local memory is DIFFERENT: parameter")
    later = resume(lab, settings, resume="exact")
    assert later.restored_step == LAST
    assert not later.of("restored")[0]["exact"]
    assert "an earlier resume was not exact, and training went on from it: a sample of the state" in later.log


def test_an_exact_resume_that_cannot_be_had_is_refused_and_nothing_is_lost(lab: Lab) -> None:
    settings = config("lazy", resume_check="witness")
    die_behind_the_change(lab, settings, later=3)
    child, _ = lab.begin(CASE, settings, seed=4, resume="exact")
    assert child.wait() == 3
    assert "ResumeMismatchError: resume='exact'" in child.log.read_text()
    assert resume(lab, settings).restored_step == CHANGED + 3


def test_an_exact_resume_is_one_where_it_can_be_had(lab: Lab) -> None:
    settings = config("lazy", resume_check="witness")
    lab.train(PLAIN, settings, actions={("after commit", 7): kill_self}, resume="exact")
    ended = lab.train(PLAIN, settings, seed=4, resume="exact")
    assert ended.restored_step == 7
    lab.check_same(PLAIN, ended)


def test_a_state_that_cannot_be_made_is_left_for_the_one_before(lab: Lab) -> None:
    """Redo runs the user's classes: what these raise ends no resume."""
    settings = config("lazy", resume_check="witness")
    lab.train(PLAIN, settings, actions={("after commit", CHANGED): kill_self})

    def fail_at_the_last(original: Any, group: RedoGroup, metas: Any, gradients: Any) -> None:
        if any(meta.record == CHANGED for meta in metas):
            raise KeyError("exp_avg")
        original(group, metas, gradients)

    ended = lab.train(PLAIN, settings, seed=4, prepare=lambda control: around(RedoGroup, "apply_all", fail_at_the_last))
    assert ended.restored_step == CHANGED - 1
    assert "cannot be made: KeyError: 'exp_avg'; step 8 is resumed from local memory" in ended.log
    lab.check_same(PLAIN, ended)


def change_in_the_commit(control: Control) -> None:
    """Nothing that a repeated step does again."""
    assert control.training is not None
    next(iter(control.training.model.parameters())).data.view(-1).mul_(1.5)


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_what_a_repeated_step_led_to_is_compared_with_its_sample(lab: Lab, redo: str) -> None:
    """A repeated step would not show it, as training writes to a tensor behind what is recorded of its step."""
    settings = config(redo, audit_budget=0.0)
    actions = {("in commit", CHANGED): change_in_the_commit, ("after commit", CHANGED): kill_self}
    lab.train(PLAIN, settings, prepare=look_away, actions=actions)
    ended = lab.train(PLAIN, settings, seed=4, unchecked=None)
    assert ended.restored_step == CHANGED - 1
    assert ended.verdict[0] == "equal"


def read_held_first(_: Control) -> None:
    """As adapters do, whose loops go on behind the step that they are told of."""
    around(Session, "restore_tensors", lambda original, session: session.held and original(session))


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_a_user_who_was_told_of_a_step_goes_on_behind_it(lab: Lab, redo: str) -> None:
    settings = config(redo, resume_check="replay", audit_budget=0.0)
    die_behind_the_change(lab, settings)
    ended = resume(lab, settings, unchecked=None, prepare=read_held_first)
    assert ended.restored_step == CHANGED - 1
    assert f"step {CHANGED - 1} is resumed" in ended.log
    lab.check_same(CASE, ended)


class Stamped(nn.BatchNorm1d):
    """Its extra state is the time at which it is asked for."""

    def get_extra_state(self) -> dict[str, int]:
        return {"at": time.time_ns()}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class StampedTraining(Training):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        model[1] = Stamped(256)  # type: ignore[operator]
        return model


@pytest.mark.parametrize("check", ["witness", "replay"])
def test_extra_state_that_depends_on_the_clock_refutes_nothing(lab: Lab, check: str) -> None:
    case, settings = Case("stamped", StampedTraining), config("lazy", resume_check=check)
    lab.train(case, settings, actions={("after commit", CHANGED): kill_self})
    ended = lab.train(case, settings, seed=4)
    assert ended.restored_step == CHANGED
    assert ended.verdict[0] == "equal"
    lab.check_same(case, ended)


def test_a_state_that_cannot_be_put_back_is_left_at_the_next_start(lab: Lab) -> None:
    settings = config("lazy", resume_check="auto")
    lab.train(PLAIN, settings, actions={("after commit", CHANGED): kill_self})

    restored: list[int] = []

    def fail_to_put_back(original: Any, restorer: Restorer, record: int, *arguments: Any) -> None:
        restored.append(record)
        if restored.count(CHANGED) == 2:  # once it was proved, then its step was repeated
            raise KeyError("exp_avg")
        original(restorer, record, *arguments)

    child, _ = lab.begin(PLAIN, settings, seed=4, prepare=lambda control: around(Restorer, "restore", fail_to_put_back))
    assert child.wait() not in (0, -9)
    log = child.log.read_text()
    assert f"expected to put the state after step {CHANGED} back, which was repeated, found KeyError: 'exp_avg'" in log
    ended = lab.train(PLAIN, settings, seed=4, unchecked=None)
    assert ended.restored_step == CHANGED
    assert ended.of("restored")[0]["exact"]
    assert "was repeated" not in ended.log
    lab.check_same(PLAIN, ended)


def test_state_outside_of_slots_is_written_twice_and_stays_itself(lab: Lab) -> None:
    """The state that a repeated step leads to is proven before the step, and put back behind it."""
    case = case_of("on-parameters", make=OnParameters)
    settings = config("snapshot", snapshot_every_steps=1, resume_check="replay")
    lab.train(case, settings, actions={("after commit", 9): kill_self})
    ended = lab.train(case, settings, seed=4)
    assert ended.verdict[0] == "equal"
    lab.check_same(case, ended)


class CallsItsBase(torch.optim.RMSprop):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class RMSprop(torch.optim.RMSprop):
    """Named like its base, of which no optimizer is made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def halving(params: list[nn.Parameter], kind: type[torch.optim.RMSprop] = CallsItsBase) -> torch.optim.RMSprop:
    def halve(*_: Any) -> None:
        for param in params:
            if param.grad is not None:
                param.grad.mul_(0.5)

    optimizer = kind(params, lr=1e-2)
    optimizer.register_step_pre_hook(halve)
    return optimizer


def make_the_base(_: Any, step: int) -> None:
    if step == 3:
        torch.optim.RMSprop(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize("twice", [True, False])
def test_hooks_are_called_behind_a_resume_as_often_as_before(lab: Lab, twice: bool) -> None:
    """torch has a class call the hooks of its optimizers once one is made of it, which a new process has not done."""
    case = case_of("base-made-later", make=halving, change=make_the_base)
    if not twice:
        case = case_of("named-like-its-base", make=partial(halving, kind=RMSprop))
    settings = config("lazy", resume_check="off")
    lab.train(case, settings, actions={("after commit", 6): kill_self})
    ended = lab.train(case, settings, seed=4, unchecked=None)
    assert ended.restored_step == 6
    lab.check_same(case, ended)


class Late(torch.optim.Optimizer):
    """Its steps depend on an attribute that begins to change when the self-test is over."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        self.rate = 0.01

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] > 5:
                self.rate *= 0.99
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-self.rate)


def test_a_redo_that_is_refuted_at_each_resume_is_given_up(lab: Lab) -> None:
    """Else each restart would go on from storage, or begin anew, as the one before.

    Without an audit nothing would say that gradients taken at the step have helped.
    """
    case = case_of("late", make=Late, scheduled=False)
    settings = config("lazy", resume_check="witness", audit_budget=0.0, snapshot_every_steps=2)
    for kill in (9, 14):
        died = lab.train(case, settings, seed=4, unchecked=None, actions={("after commit", kill): kill_self})
    assert "a sample of the state after step 9" in died.log
    assert "the whole state is copied after one step of 2 instead" in died.log
    assert lab.train(case, settings, seed=4, unchecked=None).restored_step == 14
