"""What nobody has thought of: it is no error in the user's step, and it is told."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from memckpt.capture.copier import HostCopier
from memckpt.capture.presence import PendingGradients
from memckpt.capture.recorder import Recorder
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.staging_check import StagingCheck
from memckpt.capture.watch import ParameterWatch, StaticWatch
from memckpt.session.staging import Staging
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab, collect
from tests.support.trainings.engine_state import DOUBLE_COMPLEX, INFERENCE_TENSORS
from tests.support.trainings.engine_training import Case


class Mishap(Exception):
    """An exception of a kind that no code catches by name."""


def failing(owner: type, name: str, *steps: int) -> Callable[[Control], None]:
    """Make a method raise when it is first called in each of these steps."""

    def prepare(control: Control) -> None:
        original, left = getattr(owner, name), set(steps)

        def method(*args: Any, **kwargs: Any) -> Any:
            if control.step in left:
                left.remove(control.step)
                control.journal.note("mishap", step=control.step)
                raise Mishap(f"in {name}")
            return original(*args, **kwargs)

        setattr(owner, name, method)  # in a child, until its end

    return prepare


KILLS = [("after commit", 3), ("backward", 6), ("after commit", 7), ("before step", 12)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("redo", ["lazy", "eager", "snapshot"])
@pytest.mark.parametrize("case", [INFERENCE_TENSORS, DOUBLE_COMPLEX], ids=lambda case: case.name)
def test_tensors_of_other_kinds(lab: Lab, case: Case, redo: str) -> None:
    attempts = lab.survives(case, config(redo), KILLS)
    assert not any("failed" in attempt.log for attempt in attempts)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HostCopier, "copy"),
        (PendingGradients, "seen"),
        (PendingGradients, "stepped"),
        (Recorder, "_note_step"),
        (Recorder, "backward_runs"),
        (StagingCheck, "compare"),
        (ParameterWatch, "accept_changes"),
        (ParameterWatch, "changed"),
    ],
)
def test_a_failure_in_a_hook_costs_a_copy_of_the_state(lab: Lab, owner: type, name: str) -> None:
    prepare = failing(owner, name, 7)
    died = lab.train(PLAIN, config("lazy"), prepare=prepare, actions={("after commit", 7): kill_self})
    assert died.of("mishap")
    assert f"Mishap: in {name}" in died.log
    assert "training goes on" in died.log
    # The record was written by value, as the start of a generation: not even that step is lost. But gradients that have
    # not been seen to be used go on waiting.
    final = lab.train(PLAIN, config("lazy"), seed=2)
    assert final.restored_step == (6 if name == "stepped" else 7)
    lab.check_same(PLAIN, died, final)


@pytest.mark.parametrize(
    ("owner", "name", "redo"),
    [
        (StaticWatch, "changed", "lazy"),
        (SlotWriter, "stage_anchors", "lazy"),
        (SlotWriter, "stage_by_value", "eager"),
        (SlotWriter, "capture", "snapshot"),
        (Staging, "seal", "lazy"),
    ],
)
def test_a_failure_in_a_commit_is_a_gap_that_is_counted(lab: Lab, owner: type, name: str, redo: str) -> None:
    ended = lab.train(PLAIN, config(redo), prepare=failing(owner, name, 7))
    assert ended.of("mishap")
    assert (
        f"training goes on without protection since step 7: protecting a step failed (Mishap: in {name})" in ended.log
    )
    assert ended.log.count("memckpt: protected from step 1 on") == 1
    assert "protected again from step 8 on; 1 step was not" in ended.log
    lab.check_same(PLAIN, ended)


@pytest.mark.parametrize(("owner", "name"), [(Staging, "seal"), (Recorder, "stage")])
def test_what_a_signal_s_handler_raises_is_the_user_s(lab: Lab, owner: type, name: str) -> None:
    """As torch's handler does, where a worker of a loader has died: in a commit, and in backward."""

    def handler(number: int, frame: Any) -> None:
        raise Mishap("of a worker")

    def prepare(control: Control) -> None:
        original = getattr(owner, name)

        def replaced(*args: Any) -> Any:
            if control.step == 7:
                signal.signal(signal.SIGUSR1, handler)
                signal.raise_signal(signal.SIGUSR1)
            return original(*args)

        setattr(owner, name, replaced)  # in a child, until its end

    died = collect(*lab.begin(PLAIN, config("lazy"), prepare=prepare))
    assert died.log.rstrip().endswith("Mishap: of a worker")
    assert "please report it" not in died.log
    final = lab.train(PLAIN, config("lazy"), seed=2)
    assert final.restored_step == 6
    lab.check_same(PLAIN, died, final)


def test_a_failure_in_every_step_ends_protection_for_a_while(lab: Lab) -> None:
    ended = lab.train(PLAIN, config("lazy"), prepare=failing(Recorder, "_note_step", *range(3, 25)))
    assert "training goes on without protection since step" in ended.log
    assert "that happens again and again; trying again in" in ended.log
    assert ended.log.count("Traceback") == 1
    lab.check_same(PLAIN, ended)
    lab.stop()
