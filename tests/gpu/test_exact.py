"""On the device: after real kills training comes to the same bits as without.

Against an undisturbed run, so with deterministic algorithms (``torch.use_deterministic_algorithms(True)`` and
``CUBLAS_WORKSPACE_CONFIG=:4096:8``): what does not repeat itself without a kill does not do so with one.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from memckpt.capture import slot_writer
from memckpt.capture.gradient_staging import GradientStaging
from memckpt.capture.slot_writer import SlotWriter
from tests.gpu.cases import BORROWED, GIVEN_UP, OWN
from tests.support.late import device as late
from tests.support.storage.stored_runs import BEFORE_5, stored, until_stored
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Actions, Control, config, kill_both, kill_self
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_steps import ACCUMULATION, kills_of
from tests.support.trainings.engine_training import Case

#: A commit from a device is sent a little later than it is made: a kill right behind it may lose it.
BEFORE = [("before step", 9)]


def point_of(case: Case) -> list[tuple[str, int]]:
    if case.name in ("inductor", "step-in-backward"):
        return [("after commit", 9)]
    return kills_of(case, BEFORE)


#: In each of these something else changes what is being copied: buffers, gradients within the step and behind it, the
#: next backward, a backward that raises.
HARD = {"adversarial", "interrupted", "zeroed-in-place", "closure", "clip-norm", "scaler-fused", "sgd-nesterov"}
CASES: list[Any] = [(case, {}) for case in [*BORROWED, *OWN]]
CASES += [(case, {"tap": "step"}) for case in BORROWED if case.name in HARD]
CASES += [(case, {"redo": "snapshot"}) for case in BORROWED if case.name in ("interrupted", "zeroed-in-place")]


@pytest.mark.promise("CUDA")
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("case", "changed"), CASES, ids=[" ".join([case.name, *changed.values()]) for case, changed in CASES]
)
def test_a_killed_training_resumes_at_its_bits(gpu_lab: Lab, case: Case, changed: dict[str, str]) -> None:
    if case.name == "inductor":
        importlib.import_module("torch._dynamo")  # takes seconds, which children then need not spend
    settings = config(resume_check="witness", **changed)
    first = gpu_lab.train(case, settings, actions=killing(case))
    resumed = gpu_lab.train(case, settings, seed=1001)
    assert len(first.of("killed")) == 1
    assert resumed.restored_step in (6, 7, 8, 9), resumed.log[-3000:]
    assert resumed.mode == ("snapshot" if case.name in GIVEN_UP else settings.redo)
    assert resumed.verdict[0] == "equal" or gpu_lab.device == "cuda", resumed.verdict
    gpu_lab.check_same(case, first, resumed)


(ADVERSARIAL,) = [case for case in BORROWED if case.name == "adversarial"]


def killing(case: Case) -> Actions:
    return dict.fromkeys(point_of(case), kill_self)


@pytest.mark.usefixtures("only_late")  # another one is as slow as it likes
@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", [case for case in BORROWED if case.name in HARD], ids=lambda case: case.name)
def test_a_killed_training_whose_kernels_are_slow_resumes_at_its_bits(gpu_lab: Lab, case: Case) -> None:
    """Copies are slow elsewhere: there a source may change too early, and here it is copied before it is made."""

    def slow(control: Control) -> None:
        late.be_slow(compute=100)

    slowly: Actions = {("before batch", step): slow for step in range(1, case.steps + 1)}
    settings = config(resume_check="witness")
    first = gpu_lab.train(case, settings, actions={**slowly, **killing(case)})
    resumed = gpu_lab.train(case, settings, seed=1001, actions=slowly)
    assert len(first.of("killed")) == 1
    assert resumed.restored_step in (6, 7, 8, 9), resumed.log[-3000:]
    gpu_lab.check_same(case, first, resumed)


@pytest.mark.usefixtures("only_late")  # another one page-locks as it likes
def test_page_locking_that_is_refused_in_part(gpu_lab: Lab) -> None:
    """Copies to some slots are queued, and those to others wait for the device: before a kill and behind it."""

    def prepare(control: Control) -> None:
        register = late._PageLocking.cudaHostRegister

        def noted(address: int, nbytes: int, flags: int) -> int:
            result = register(address, nbytes, flags)
            control.journal.note("page-locked", nbytes=nbytes, result=result)
            return result

        late._PageLocking.cudaHostRegister = staticmethod(noted)  # type: ignore[method-assign, assignment]
        late.limit_page_locking(most_bytes=400_000)  # four of seven slots, and two once parameters were added
        slot_writer.LOCKED_BYTES = 1 << 12

    settings = config(resume_check="witness")
    first = gpu_lab.train(ADVERSARIAL, settings, actions=killing(ADVERSARIAL), prepare=prepare)
    resumed = gpu_lab.train(ADVERSARIAL, settings, seed=1001, prepare=prepare)
    for attempt in (first, resumed):
        assert {each["result"] == 0 for each in attempt.of("page-locked")} == {True, False}
    assert len(first.of("killed")) == 1
    gpu_lab.check_same(ADVERSARIAL, first, resumed)


@pytest.mark.usefixtures("only_late")
def test_a_device_whose_generator_is_not_carried_is_no_exact_resume(gpu_lab: Lab) -> None:
    def prepare(control: Control) -> None:
        late.load()
        del torch.get_device_module("late").is_initialized  # as torch.mps

    first = gpu_lab.train(PLAIN, config(resume_check="off"), actions=killing(PLAIN), prepare=prepare)
    resumed = gpu_lab.train(PLAIN, config(resume_check="off"), seed=1001, prepare=prepare)
    assert len(first.of("killed")) == 1
    assert [each["exact"] for each in resumed.of("restored")] == [False]
    reason = "the generator of late is not carried, as torch.late has no is_initialized()"
    assert f"a resume of this run will not be exact: {reason}" in first.log
    assert reason in resumed.log


def test_a_checkpoint_is_copied_while_training_goes_on(gpu_lab: Lab) -> None:
    settings = stored("lazy")
    actions: Actions = {**BEFORE_5, ("after commit", 7): until_stored(5), ("backward", 9): kill_both}
    first = gpu_lab.train(PLAIN, settings, actions=actions)
    resumed = gpu_lab.train(PLAIN, settings, seed=2)
    assert resumed.restored_step == 5
    gpu_lab.check_same(PLAIN, first, resumed)


def test_accumulation_that_nobody_announces_is_learned(gpu_lab: Lab, device: str) -> None:
    """From two steps alike: then only the gradients of a step's last batch are copied."""
    if device == "cpu":
        pytest.skip("copies nothing ahead")

    def prepare(control: Control) -> None:
        original = GradientStaging.stage

        def stage(staging: GradientStaging, writer: SlotWriter, param: Any, gradient: Any) -> None:
            original(staging, writer, param, gradient)
            copied = staging._staged_after[writer.index[id(param)]] > 0
            control.journal.note("made", batch=control.step, copied=copied)

        GradientStaging.stage = stage  # type: ignore[method-assign]

    ended = gpu_lab.train(ACCUMULATION, config("lazy"), prepare=prepare)
    gpu_lab.check_same(ACCUMULATION, ended)
    made = ended.of("made")
    early, later = range(4, 10), range(10, ACCUMULATION.steps + 1)  # nothing is staged before the first generation
    expected = {*early, *(batch for batch in later if batch % 3 == 0)}
    assert {one["batch"] for one in made if one["copied"]} == expected
    assert {one["batch"] for one in made if not one["copied"]} == {*early, *later} - expected
