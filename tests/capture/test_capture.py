"""State that is captured, where steps cannot be redone: whoever dies, and wherever, training comes to the same end."""

from __future__ import annotations

import importlib
import os
import re
import select
import signal
from typing import Any

import pytest

from memckpt.capture.slot_writer import SlotWriter
from memckpt.config import StorageConfig
from memckpt.processes.address import AgentAddress
from tests.support.storage.stored_runs import until_ordered, until_stored
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Actions, config, kill_agent, kill_both, kill_self
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_optimizers import COUNTING, HIDDEN_CASES, HONEST, QUASI_CASES, UNFREEZING
from tests.support.trainings.engine_state import COMPILED_LATER, COMPILED_STEP
from tests.support.trainings.engine_training import Case
from tests.support.trainings.planted_faults import die_after

EVERY = pytest.mark.parametrize("every", [1, 4])


def by_name(case: Case) -> str:
    return case.name


def last_captured(step: int, every: int, base: int) -> int:
    """The newest record that is held after `step` was committed, of a generation that began after `base`."""
    return max(base, step // every * every)


@pytest.mark.promise(
    "optimizers with hidden state, random numbers or norms over all tensors, and LBFGS, are detected, captured and "
    "resumed exactly"
)
@pytest.mark.promise(
    "an optimizer whose step depends on more than gradients, groups and state; torch's Adafactor where a group has "
    "two dtypes"
)
@pytest.mark.promise(
    "attributes and state of an optimizer that can be neither copied nor encoded; a module removed while training runs"
)
@pytest.mark.thinned(3)
@EVERY
@pytest.mark.parametrize("case", HIDDEN_CASES, ids=by_name)
def test_what_an_optimizer_hides_is_found_and_captured(lab: Lab, case: Case, every: int) -> None:
    kills = [("backward", 11), ("after commit", 14), ("in commit", 21)]
    # The test is over with step 3 at the latest, and the generation of its end is a capture; so is that of a resume.
    expected = [last_captured(10, every, 3), last_captured(14, every, 3), last_captured(20, every, 3)]
    attempts = lab.survives(case, config("lazy", snapshot_every_steps=every), kills, expected=expected)
    assert all("steps cannot be redone here" in attempt.log for attempt in attempts)
    lost = "none" if every == 1 else f"up to {every - 1} steps"
    assert all(f"a crash loses {lost}" in attempt.log for attempt in attempts)
    assert [attempt.mode for attempt in attempts] == ["snapshot"] * 4


@pytest.mark.parametrize("step", [1, 2])
def test_until_the_test_is_over_every_step_is_captured(lab: Lab, step: int) -> None:
    """In the second step its count shows; from then on state is captured as configured."""
    kills = [("after commit", step), ("before batch", 3)]
    lab.survives(COUNTING, config("lazy", snapshot_every_steps=100), kills, expected=[step, 2])


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_an_optimizer_that_can_be_redone_is(lab: Lab, redo: str) -> None:
    kills = [("after commit", 1), ("backward", 3), ("after commit", 7), ("in commit", 12)]
    attempts = lab.survives(HONEST, config(redo, snapshot_every_steps=100), kills)
    # The first two were killed within its test: what they held was captured, and the test began anew.
    assert [attempt.mode for attempt in attempts] == ["snapshot", "snapshot", "snapshot", redo, redo]
    assert attempts[-1].end["mode"] == redo
    assert not any("cannot be redone" in attempt.log for attempt in attempts)


@pytest.mark.promise(
    "optimizers with hidden state, random numbers or norms over all tensors, and LBFGS, are detected, captured and "
    "resumed exactly"
)
@EVERY
@pytest.mark.parametrize("case", QUASI_CASES, ids=by_name)
def test_lbfgs(lab: Lab, case: Case, every: int) -> None:
    kills = [("before step", 3), ("after commit", 6), ("after step", 10)]
    expected = [last_captured(2, every, 1), last_captured(6, every, 1), last_captured(9, every, 1)]
    attempts = lab.survives(case, config("auto", snapshot_every_steps=every), kills, expected=expected)
    assert "LBFGS evaluates the loss several times" in attempts[0].of("attached")[0]["text"]


@pytest.mark.promise("an optimizer's step under `torch.compile` is captured by value")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [COMPILED_STEP, pytest.param(COMPILED_LATER, marks=pytest.mark.slow)], ids=by_name)
def test_a_compiled_step_is_captured(lab: Lab, case: Case) -> None:
    importlib.import_module("torch._dynamo")  # here, so that children need not
    attempts = lab.survives(case, config("lazy"), [("before step", 8)])
    assert "the step of AdamW is compiled (torch.compile)" in attempts[0].log
    assert [attempt.end["mode"] for attempt in attempts[-1:]] == ["snapshot"]


@pytest.mark.promise(
    "optimizers with hidden state, random numbers or norms over all tensors, and LBFGS, are detected, captured and "
    "resumed exactly"
)
@pytest.mark.promise("trainer, if the state is captured every N steps")
@pytest.mark.promise("any")
@EVERY
def test_capture_as_configured(lab: Lab, every: int) -> None:
    kills = [("after commit", 2), ("backward", 7), ("after commit", 12), ("in commit", 18)]
    expected: list[int | None] = [last_captured(step, every, 1) for step in (2, 6, 12, 17)]
    attempts = lab.survives(PLAIN, config("snapshot", snapshot_every_steps=every), kills, expected=expected)
    assert "snapshots (as configured)" in attempts[0].of("attached")[0]["text"]
    lost = [attempt.of("restored")[0]["lost"] for attempt in attempts[1:]]
    assert lost == [step - back for step, back in zip((2, 6, 12, 17), expected, strict=True) if back is not None]


@pytest.mark.promise("a kill during a capture falls back to the previous one")
@pytest.mark.parametrize("name", ["_stage_piece", "stage_by_value"])
def test_a_kill_while_a_capture_is_written_resumes_from_the_one_before(lab: Lab, name: str) -> None:
    settings = config("snapshot", snapshot_every_steps=4)
    died = lab.train(PLAIN, settings, prepare=die_after(SlotWriter, name, step=16))
    assert died.of("killed")[0]["step"] == 16
    final = lab.train(PLAIN, settings, seed=2)
    assert final.restored_step == 12
    assert final.of("restored")[0]["lost"] == 3
    lab.check_same(PLAIN, died, final)


def test_another_interval_or_mode_after_a_resume(lab: Lab) -> None:
    first = lab.train(PLAIN, config("snapshot", snapshot_every_steps=4), actions={("backward", 7): kill_self})
    second = lab.train(
        PLAIN, config("snapshot", snapshot_every_steps=5), seed=2, actions={("after commit", 11): kill_self}
    )
    assert second.restored_step == 4
    third = lab.train(PLAIN, config("lazy"), seed=3, actions={("after commit", 13): kill_self})
    assert third.restored_step == 10
    fourth = lab.train(
        PLAIN, config("snapshot", snapshot_every_steps=10), seed=4, actions={("backward", 16): kill_self}
    )
    assert fourth.restored_step == 13
    final = lab.train(PLAIN, config("lazy"), seed=5)
    assert final.restored_step == 14  # its generation's beginning
    lab.check_same(PLAIN, first, second, third, fourth, final)


def test_parameters_are_unfrozen_while_state_is_captured(lab: Lab) -> None:
    """They were static, and change in step 9: a generation begins there, and they have their place in it."""
    kills = [("after commit", 11), ("backward", 19)]
    lab.survives(UNFREEZING, config("lazy", snapshot_every_steps=4), kills, expected=[9, 16])


def test_training_survives_its_agent(lab: Lab) -> None:
    settings = config("snapshot", snapshot_every_steps=4)
    died = lab.train(PLAIN, settings, actions={("backward", 6): kill_agent, ("before step", 10): kill_self})
    assert "protected again from step 6 on" in died.log
    final = lab.train(PLAIN, settings, seed=2)
    assert final.restored_step == 8
    lab.check_same(PLAIN, died, final)


# Storage


def stored(**settings: Any) -> Any:
    every = settings.pop("snapshot_every_steps", 4)
    return config("lazy", snapshot_every_steps=every, storage=StorageConfig(**settings))


def end_agent(lab: Lab) -> None:
    """It is told to go, and first writes what it holds."""
    pid = lab.status().pid
    handle = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGTERM)
        assert select.select([handle], [], [], 30)[0], f"agent {pid} does not leave"
    finally:
        os.close(handle)


@pytest.mark.parametrize("case", [COUNTING, pytest.param(QUASI_CASES[0], marks=pytest.mark.slow)], ids=by_name)
def test_what_no_trainer_came_back_for_is_resumed_from_storage(lab: Lab, case: Case) -> None:
    """The agent writes the newest capture; it imports no optimizer for that."""
    settings = stored(min_seconds=3600.0)
    died = lab.train(case, settings, actions={("backward", 11): kill_self})
    end_agent(lab)
    written = re.findall(r"step (\d+) is in storage", AgentAddress.of(lab.run_dir).log_path.read_text())
    final = lab.train(case, settings, seed=2)
    # Step 8 was captured for memory. The first checkpoint may be later: it is of a step that its order was in time for.
    assert final.restored_step == max(map(int, written)) >= 8
    assert "resuming from storage" in final.log
    assert final.mode == "snapshot"
    lab.check_same(case, died, final)


@pytest.mark.slow
@pytest.mark.parametrize("case", [COUNTING, pytest.param(QUASI_CASES[0], marks=pytest.mark.slow)], ids=by_name)
def test_a_copy_between_two_captures_is_resumed_from_storage(lab: Lab, case: Case) -> None:
    settings = stored(snapshot_every_steps=100, every_steps=7)

    actions: Actions = {
        ("after commit", 4): until_ordered,
        ("after commit", 9): until_stored(7),
        ("backward", 10): kill_both,
        ("before step", 10): kill_both,
    }
    died = lab.train(case, settings, actions=actions)
    final = lab.train(case, settings, seed=2)
    assert final.restored_step == 7
    assert "resuming from storage" in final.log
    lab.check_same(case, died, final)


def test_the_final_step_is_in_storage(lab: Lab) -> None:
    case = Case("counting-11", COUNTING.build, steps=11)
    done = lab.train(case, stored(snapshot_every_steps=100, min_seconds=3600.0))
    again = lab.train(case, stored(snapshot_every_steps=100, min_seconds=3600.0), seed=2)
    assert again.restored_step == 11
    lab.check_same(case, done, again)


# Neutrality


@pytest.mark.parametrize("case", [*HIDDEN_CASES, HONEST, *QUASI_CASES], ids=by_name)
def test_nothing_of_the_training_changes(lab: Lab, case: Case) -> None:
    attempt = lab.train(case, config("lazy"))
    lab.check_same(case, attempt)
