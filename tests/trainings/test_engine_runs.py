"""What a run may and may not do to another one, to itself, and to the machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memckpt
from memckpt.config import AgentConfig
from memckpt.errors import ForeignStateError, MemoryBudgetError, NothingHeldError, RunBusyError, UsageError
from tests.support.trainings.engine_audits import as_if_large
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab, collect
from tests.support.trainings.engine_state import by_hand
from tests.support.trainings.engine_steps import clip_norm
from tests.support.trainings.engine_training import INPUTS, Case, Training, case_of

REDO = pytest.mark.parametrize("redo", ["lazy", "eager"])
DIE_AFTER_9 = {("after commit", 9): kill_self}


def refused(lab: Lab, case: Case, error: type[Exception], **arguments: Any) -> str:
    """Train a case whose attach must raise `error` before the first step; returns the message."""
    note = lab.directory / "refusal"

    def prepare(control: Control) -> None:
        original = memckpt.attach

        def attach(*args: Any, **settings: Any) -> Any:
            try:
                return original(*args, **settings)
            except error as found:
                note.write_text(str(found))
                kill_self(control)

        memckpt.attach = attach  # type: ignore[assignment]

    settings = arguments.pop("settings", config("lazy"))
    ended = lab.train(case, settings, prepare=prepare, **arguments)
    assert ended.of("killed"), f"was not refused:\n{ended.log}"
    assert not ended.losses
    return note.read_text()


# Several runs, several trainers


def test_two_runs_at_once_do_not_disturb_each_other(lab: Lab) -> None:
    other = case_of("other", change=clip_norm)
    runs = [(PLAIN, lab.directory / "a"), (other, lab.directory / "b")]
    for attempt, actions in enumerate([DIE_AFTER_9, {("backward", 17): kill_self}, {}]):
        begun = [
            lab.begin(case, config("lazy"), run_dir=run_dir, actions=actions, seed=1 + 99 * attempt)
            for case, run_dir in runs
        ]
        ended = [collect(*each) for each in begun]
        assert [each.restored_step for each in ended] == [[None, 9, 16][attempt]] * 2
        for (case, _), each in zip(runs, ended, strict=True):
            assert len(each.of("killed")) == len(actions), each.log
            if not actions:
                lab.check_same(case, each)


@pytest.mark.promise("a second trainer is refused with the pid of the first")
def test_a_second_trainer_is_refused_with_the_pid_of_the_first(lab: Lab) -> None:
    read_fd, write_fd = os.pipe()

    def wait_for_the_end(control: Control) -> None:
        os.write(write_fd, b"1")
        select.select([release_read], [], [], 40)

    release_read, release_write = os.pipe()
    child, report = lab.begin(PLAIN, config("lazy"), actions={("before batch", 5): wait_for_the_end})
    assert select.select([read_fd], [], [], 40)[0]
    message = refused(lab, PLAIN, RunBusyError, seed=2)
    assert f"pid {child.pid}" in message
    assert child.alive()
    os.write(release_write, b"1")
    first = collect(child, report)
    assert first.code == 0, first.log
    lab.check_same(PLAIN, first)
    for fd in (read_fd, write_fd, release_read, release_write):
        os.close(fd)


# What is held and what is asked for


class Wider(Training):
    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Dropout(0.2), nn.Linear(200, 10)
        )


class Renamed(Training):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.add_module("extra", nn.Linear(10, 10))
        return model


@pytest.mark.promise("another model is refused, and refusing changes nothing")
@pytest.mark.promise("another model or optimizer class")
@pytest.mark.parametrize(
    ("case", "difference"),
    [
        (Case("wider", Wider), "held: 0.bias [256] float32; this run: 0.bias [200] float32"),
        (Case("renamed", Renamed), "extra.bias [10] float32"),
        (case_of("sgd", make=lambda params: torch.optim.SGD(params, lr=0.1)), "torch.optim.sgd.SGD"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_another_model_or_optimizer_is_refused_and_the_first_difference_named(
    lab: Lab, case: Case, difference: str
) -> None:
    first = lab.train(PLAIN, config("lazy"), actions=DIE_AFTER_9)
    assert difference in refused(lab, case, ForeignStateError)
    # Refusing has changed nothing.
    lab.goes_on(PLAIN, config("lazy"), 9, first)


def test_another_model_may_start_over(lab: Lab) -> None:
    lab.train(PLAIN, config("lazy"), actions=DIE_AFTER_9)
    case = Case("wider", Wider)
    lab.check_same(case, lab.train(case, config("lazy"), resume="never"))


@pytest.mark.promise("a model that does not fit into memory is refused before the first step")
@REDO
def test_too_little_memory_is_refused_before_the_first_step_with_figures(lab: Lab, redo: str) -> None:
    settings = config(redo, agent=AgentConfig(memory_budget_bytes=300_000, linger_seconds=60))
    message = refused(lab, PLAIN, MemoryBudgetError, settings=settings)
    assert "KiB" in message
    assert "agent.memory_budget_bytes" in message
    lab.stop()


def test_resume_require_needs_something_held(lab: Lab) -> None:
    message = refused(lab, PLAIN, NothingHeldError, resume="require")
    assert "nothing is held in local memory" in message
    first = lab.train(PLAIN, config("lazy"), actions=DIE_AFTER_9)
    lab.goes_on(PLAIN, config("lazy"), 9, first, resume="require")


@REDO
def test_resume_never_drops_what_is_held(lab: Lab, redo: str) -> None:
    lab.train(PLAIN, config(redo), actions=DIE_AFTER_9)
    lab.goes_on(PLAIN, config(redo), None, resume="never")


def test_resume_at_an_older_step_that_is_held(lab: Lab) -> None:
    first = lab.train(PLAIN, config("lazy"), actions=DIE_AFTER_9)
    message = refused(lab, PLAIN, NothingHeldError, resume=3)
    assert "expected step 3, found steps [7, 8, 9]" in message
    second = lab.train(PLAIN, config("lazy"), resume=8, seed=2, actions={("forward", 9): kill_self})
    assert second.restored_step == 8
    assert second.of("restored")[0]["lost"] == 1
    # Step 9 of the first attempt is on a branch that was left.
    lab.goes_on(PLAIN, config("lazy"), 8, first, second, seed=3)


@REDO
def test_going_back_again_and_again_stays_exact(lab: Lab, redo: str) -> None:
    """Every attempt resumes the step before the newest, and goes one step further than the last."""
    settings = config(redo, slots=4)
    attempts = [lab.train(PLAIN, settings, actions={("after commit", 10): kill_self})]
    for newest in (10, 11, 12):
        oldest = newest - 1 if redo == "lazy" else newest  # an eager replica may have been applied up to the newest
        actions = {("after commit", newest + 1): kill_self}
        attempts.append(lab.train(PLAIN, settings, resume=oldest, seed=newest, actions=actions))
        assert attempts[-1].restored_step == oldest
    attempts.append(lab.train(PLAIN, settings, seed=77))
    assert attempts[-1].restored_step == 13
    lab.check_same(PLAIN, *attempts)


def test_a_commit_before_the_restore_is_refused(lab: Lab) -> None:
    lab.train(PLAIN, config("lazy"), actions=DIE_AFTER_9)
    run_dir = lab.run_dir

    def body() -> None:
        training = PLAIN.build()
        session = memckpt.attach(training.model, training.optimizers, run_dir=run_dir, config=config("lazy"))
        training.batch(1)
        with pytest.raises(UsageError, match=r"commit\(\) before restore\(\)"):
            session.commit(1)
        session.close(finished=False)

    assert lab.fork(body, "usage").wait() == 0
    lab.goes_on(PLAIN, config("lazy"), 9)


def test_a_commit_after_close_is_refused(lab: Lab) -> None:
    def body() -> None:
        training = PLAIN.build()
        session = memckpt.attach(training.model, training.optimizers, run_dir=lab.run_dir, config=config("lazy"))
        session.close()
        session.close()
        with pytest.raises(UsageError, match="attach again"):
            session.commit(1)

    assert lab.fork(body, "usage").wait() == 0


@REDO
def test_training_on_without_commits_does_not_touch_what_is_held(lab: Lab, redo: str) -> None:
    """The restored state shares no memory with the agent's."""
    lab.train(PLAIN, config(redo), actions=DIE_AFTER_9)
    run_dir = lab.run_dir

    def body() -> None:
        training = PLAIN.build()
        session = memckpt.attach(training.model, training.optimizers, run_dir=run_dir, config=config(redo))
        session.register("scheduler 0", training.registered["scheduler 0"])
        report = session.restore()
        assert report is not None
        for step in range(10, 15):
            training.batch(step)
        with torch.no_grad():
            for tensor in (*training.model.parameters(), *training.model.buffers()):
                tensor.zero_()
            for state in training.optimizers[0].state.values():
                for value in state.values():
                    value.zero_()
        session.close(finished=False)

    assert lab.fork(body, "trains-on").wait() == 0
    lab.goes_on(PLAIN, config(redo), 9)


@pytest.mark.promise("a resume with other settings than the last attempt's is exact")
def test_other_settings_than_the_last_attempts_resume_exact(lab: Lab) -> None:
    settings = [
        config("lazy"),
        config("eager"),
        config("lazy", period=8, slots=4),
        config("eager", tap="step"),
        config(),
    ]
    kills = [("after commit", 6), ("forward", 9), ("after commit", 12), ("backward", 15), None]
    comes_from = [None, 6, 8, 12, 14]
    attempts = []
    for number, (chosen, kill) in enumerate(zip(settings, kills, strict=True)):
        actions = {kill: kill_self} if kill else {}
        attempts.append(lab.train(PLAIN, chosen, actions=actions, seed=1 + number))
        assert attempts[-1].restored_step == comes_from[number]
        assert len(attempts[-1].of("killed")) == len(actions)
    lab.check_same(PLAIN, *attempts)


# Changes by hand


@pytest.mark.promise("changes of parameters by hand are noticed")
@pytest.mark.promise(
    "parameters, or tensors of an optimizer's state, changed by anything but a step of their optimizer: also "
    "between backward and step, in hooks, between two optimizers' steps"
)
@REDO
@pytest.mark.parametrize(
    "how",
    ["no_grad", "data", "optimizer state", "optimizer data", pytest.param("other storage", marks=pytest.mark.slow)],
)
def test_a_change_by_hand_is_noticed_at_once_and_reported(lab: Lab, how: str, redo: str) -> None:
    case = by_hand(how)
    attempts = lab.survives(case, config(redo), [("after commit", 7), ("backward", 9), ("after commit", 14)])
    what = "the state of AdamW" if how.startswith("optimizer") else "0.weight"
    assert f"{what} was changed outside the optimizer" in attempts[0].log


@REDO
def test_a_change_by_hand_after_every_step_is_exact(lab: Lab, redo: str) -> None:
    lab.survives(by_hand("every step"), config(redo), [("after commit", 3), ("backward", 9), ("after commit", 14)])


@pytest.mark.promise("changes of parameters by hand are noticed")
@pytest.mark.promise("the same in too few elements for the sample; or whatever else redo does not know of")
def test_the_audit_finds_what_version_counters_do_not_show(lab: Lab) -> None:
    """Eager: within one period of anchors (4 steps) the change is found, reported and healed."""
    case = by_hand("one element")
    attempts = lab.survives(case, config("eager"), [("after commit", 13), ("backward", 17)], prepare=as_if_large)
    assert "the audit found" in attempts[0].log
    assert "0.weight" in attempts[0].log


@pytest.mark.promise("changes of parameters by hand are noticed")
@REDO
@pytest.mark.parametrize("large", [False, True], ids=["few-bytes", "sampled"])
def test_a_tensor_that_was_written_to_once_is_compared_whole(lab: Lab, redo: str, large: bool) -> None:
    """Also by the attempts that follow: a later write of one element is noticed in its own step."""
    kills = [("after commit", 5), ("after commit", 8), ("after commit", 12), ("backward", 17)]
    attempts = lab.survives(
        by_hand("now and then"), config(redo), kills, prepare=as_if_large if large else lambda control: None
    )
    for attempt in attempts[1:]:
        assert attempt.of("restored")[0]["exact"]
        assert "0.weight was changed outside the optimizer" in attempt.log


@pytest.mark.promise("changes of parameters by hand are noticed")
@REDO
@pytest.mark.parametrize("how", ["behind the step", "behind the step, in the sample", "behind the step, counted"])
def test_state_of_an_optimizer_that_was_written_to_before_the_commit_is_in_the_record(
    lab: Lab, how: str, redo: str
) -> None:
    """One element of many, and the trainer dies behind that very commit."""
    kills = [("after commit", 6), ("after commit", 12)]
    large = how.endswith("sample")
    attempts = lab.survives(by_hand(how), config(redo), kills, prepare=as_if_large if large else lambda control: None)
    for attempt in attempts[1:]:
        assert attempt.of("restored")[0]["exact"]


@pytest.mark.promise("the same in too few elements for the sample; or whatever else redo does not know of")
def test_lazy_anchors_heal_within_one_period(lab: Lab) -> None:
    lab.survives(by_hand("one element"), config("lazy"), [("after commit", 12), ("backward", 17)])


def test_no_change_by_hand_no_report(lab: Lab) -> None:
    for redo in ("lazy", "eager"):
        ended = lab.train(PLAIN, config(redo), run_dir=lab.directory / redo)
        assert "WARNING" not in ended.log
        assert ended.end["drift"] == 0.0


# Without a test harness in between


@pytest.mark.slow
def test_a_script_of_its_own_resumes_through_the_real_start(lab: Lab) -> None:
    """Trainer and agent as users start them: an interpreter for each, nothing forked."""
    script = lab.directory / "script.py"
    script.write_text(
        "import os, sys, torch, memckpt\n"
        "torch.manual_seed(0); torch.set_num_threads(1)\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "config = memckpt.MemckptConfig(redo='lazy', storage=None)\n"
        "session = memckpt.attach(model, optimizer, run_dir=sys.argv[1], config=config)\n"
        "report = session.restore()\n"
        "for step in range(report.step if report else 0, 8):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 8)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    session.commit()\n"
        "    if step == int(sys.argv[2]): os.kill(os.getpid(), 9)\n"
        "session.close()\n"
        "print(report.step if report else None, float(model.weight.sum()).hex())\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_WAIT_POLICY": "passive"}

    def run(name: str, kill: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(lab.directory / name), str(kill)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    undisturbed = run("undisturbed", -1)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert run("killed", 4).returncode == -signal.SIGKILL
    resumed = run("killed", -1)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.split() == ["4", undisturbed.stdout.split()[1]], "the last step is taken once more"


def test_the_case_by_hand_really_changes_something(lab: Lab) -> None:
    """The oracle of the tests above would not notice a change that does nothing."""
    reference, changed = lab.reference(PLAIN), lab.reference(by_hand("one element"))
    assert reference.losses[6] == changed.losses[6]
    assert reference.losses[7] != changed.losses[7]
