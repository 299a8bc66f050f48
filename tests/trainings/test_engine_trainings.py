"""Trainings of every shape, killed at several steps in a row, resume bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memckpt.capture.copier import HostCopier
from tests.support.trainings import engine_steps
from tests.support.trainings.engine_cases import PLAIN, SHAPE_CASES
from tests.support.trainings.engine_child import Control, config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_state import COMPILED, MOMENTUM_ENCODER_CASES, by_hand
from tests.support.trainings.engine_training import Case

#: Around the things that happen at steps 6, 8, 10, 15 and 16 in some of the cases.
KILLS = [("forward", 3), ("after commit", 7), ("before step", 9), ("after commit", 16)]
MORE_KILLS = [("after commit", 1), ("before step", 2), ("after commit", 6), ("forward", 11), ("after commit", 15)]
EAGER_FIRST = {"adversarial", "clip-norm", "scaler-fused", "unfrozen", "unused", "buffers"}
#: Each has a close relative that makes every run.
LAZY_LATER = {"scaler-clip", "bf16-adamw", "gradient-penalty", "one-cycle", "moving-average"}

#: Weights change outside the optimizer at every step: after five steps in a row, snapshots take the place of redo.
CHANGED_OUTSIDE = {"projection"}


def cases(first: set[str]) -> list[Any]:
    """All cases; those that are not in `first` among the slow tests."""
    return [
        pytest.param(case, id=case.name, marks=() if case.name in first else pytest.mark.slow) for case in SHAPE_CASES
    ]


def names(case: Case) -> str:
    return case.name


@pytest.mark.promise(
    "exact with clipping, scaling, accumulation, groups, freezing, tied weights, buffers, averages, several optimizers"
)
@pytest.mark.promise("parameters, frozen ones too; `requires_grad`")
@pytest.mark.promise(
    "buffers and parameters, also replaced, resized, tied or late ones in modules that a new process has; "
    "averaged models outside the model"
)
@pytest.mark.promise("global generators of torch, numpy, Python; of the rank's own accelerator, on whichever card")
@pytest.mark.promise("the loss of every later step")
@pytest.mark.promise("LR schedulers, gradient scaler")
@pytest.mark.promise("CPU, fp32 or fp64")
@pytest.mark.promise("*equal*")
@pytest.mark.thinned(4)
@pytest.mark.parametrize("case", cases({case.name for case in SHAPE_CASES} - LAZY_LATER))
def test_lazy_redo_is_exact(lab: Lab, case: Case) -> None:
    lab.survives(case, config("lazy"), engine_steps.kills_of(case, KILLS))


@pytest.mark.parametrize("case", cases(EAGER_FIRST))
def test_eager_redo_is_exact(lab: Lab, case: Case) -> None:
    attempts = lab.survives(case, config("eager"), engine_steps.kills_of(case, KILLS))
    *before, last = attempts
    assert {attempt.mode for attempt in before} == {"eager"}
    assert last.mode == ("snapshot" if case.name in CHANGED_OUTSIDE else "eager")
    assert last.end["drift"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("case", SHAPE_CASES, ids=names)
def test_more_kills(lab: Lab, case: Case, redo: str) -> None:
    lab.survives(case, config(redo), engine_steps.kills_of(case, MORE_KILLS))


@pytest.mark.promise(
    "exact with clipping, scaling, accumulation, groups, freezing, tied weights, buffers, averages, several optimizers"
)
@pytest.mark.slow
@pytest.mark.parametrize("case", SHAPE_CASES, ids=names)
def test_step_tap_is_exact(lab: Lab, case: Case) -> None:
    attempts = lab.survives(case, config("lazy", tap="step"), engine_steps.kills_of(case, KILLS[1:3]))
    assert attempts[-1].end["tap"] == "step"


@pytest.mark.thinned(4)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("case", engine_steps.STEP_CASES, ids=names)
def test_steps_are_recorded_as_they_are_really_taken(lab: Lab, case: Case, redo: str) -> None:
    attempts = lab.survives(case, config(redo), [("after commit", 5), ("before batch", 8), ("after commit", 15)])
    assert {attempt.mode for attempt in attempts} <= {redo, "snapshot"}  # the latter during a self-test


def test_what_changes_at_every_step_is_captured(lab: Lab) -> None:
    case = by_hand("every step")
    lab.survives(case, config("lazy", snapshot_every_steps=4), [("after commit", 11)], expected=[8])


@pytest.mark.promise("unannounced changes of gradients are noticed")
@pytest.mark.promise("gradients changed between backward and step in an unknown way (own clipping, noise)")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", engine_steps.UNKNOWN_CHANGE_CASES, ids=names)
def test_changes_of_gradients_that_streaming_does_not_know_are_noticed(lab: Lab, case: Case) -> None:
    kills = [("after commit", 2), ("backward", 3), ("after commit", 7), ("forward", 11)]
    attempts = lab.survives(case, config("lazy"), kills)
    assert attempts[-1].end["tap"] == "step"
    assert "in a way that streaming does not know" in attempts[-1].end["tap_reason"]
    assert "gradients are now taken at the optimizer's step" in attempts[-1].log


@pytest.mark.promise("exact with gradients of another dtype than their parameters'")
@pytest.mark.promise("CPU, bf16 or fp16 parameters")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("case", engine_steps.OTHER_GRADIENT_CASES, ids=names)
def test_gradients_of_another_dtype_than_their_parameters(lab: Lab, case: Case, redo: str) -> None:
    lab.survives(case, config(redo), KILLS)


@pytest.mark.promise("large buffers and frozen parameters that change")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("redo", ["lazy", "eager", "snapshot"])
@pytest.mark.parametrize("case", MOMENTUM_ENCODER_CASES, ids=names)
def test_frozen_tensors_that_are_written_behind_the_counters_back(lab: Lab, case: Case, redo: str) -> None:
    attempts = lab.survives(case, config(redo), [("after commit", 2), ("before step", 9), ("after commit", 12)])
    found = [line for each in attempts for line in each.log.splitlines() if "will be staged with every record" in line]
    # All four of them in one generation; a resume knows them.
    assert len(found) == 1
    assert "and 3 more" in found[0]


def test_clipping_by_a_norm_that_was_taken_before_is_known_to_streaming(lab: Lab) -> None:
    ended = lab.train(engine_steps.CLIP_GIVEN_NORM, config("lazy"), last_step=3)
    assert ended.end["tap"] == "streaming"
    lab.stop()


@pytest.mark.promise("gradients changed between backward and step in an unknown way (own clipping, noise)")
def test_own_clipping_is_noticed_on_the_first_logged_record(lab: Lab) -> None:
    case = engine_steps.UNKNOWN_CHANGE_CASES[0]
    # The first record begins the generation, the second is the first that carries gradients.
    ended = lab.train(case, config("lazy"), last_step=2)
    assert ended.end["tap"] == "step"
    lab.stop()


@pytest.mark.promise(
    "exact with clipping, scaling, accumulation, groups, freezing, tied weights, buffers, averages, several optimizers"
)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_accumulation_resumes_at_the_last_optimizer_step(lab: Lab, redo: str) -> None:
    kills = [("after commit", 4), ("after commit", 9), ("forward", 11), ("before step", 15), ("backward", 16)]
    attempts = lab.survives(engine_steps.ACCUMULATION, config(redo), kills, expected=[3, 9, 9, 12, 15])
    done = [each["step"] for attempt in attempts for each in attempt.of("commit") if each["done"]]
    assert all(step % 3 == 0 for step in done)
    not_done = [each["step"] for attempt in attempts for each in attempt.of("commit") if not each["done"]]
    assert all(step % 3 for step in not_done)


@pytest.mark.parametrize("case", [engine_steps.ANNOUNCED, engine_steps.LIED], ids=names)
def test_gradients_that_are_only_added_to_are_not_copied(lab: Lab, case: Case) -> None:
    """Where no gradient was copied that a step then uses, it is taken behind that step."""

    def prepare(control: Control) -> None:
        original = HostCopier.copy

        def copy(self: HostCopier, destination: torch.Tensor, source: torch.Tensor) -> None:
            control.journal.note("copy", step=control.step, backward=torch._C._current_graph_task_id() != -1)
            original(self, destination, source)

        HostCopier.copy = copy  # type: ignore[method-assign]

    kills = [("after commit", 4), ("forward", 11), ("before step", 15), ("backward", 16)]
    attempts = lab.survives(case, config("lazy"), kills, expected=[3, 9, 12, 15], prepare=prepare)
    copied = {one["step"] for attempt in attempts for one in attempt.of("copy") if one["backward"]}
    assert copied == (set() if case is engine_steps.LIED else set(range(6, 25, 3)))
    assert attempts[-1].end["tap"] == "streaming"


@pytest.mark.promise("attaching changes no bit of the training")
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("case", [PLAIN, engine_steps.ACCUMULATION], ids=names)
def test_without_a_kill_training_is_what_it_is_without_memckpt(lab: Lab, case: Case, redo: str) -> None:
    lab.check_same(case, lab.train(case, config(redo)))


@pytest.mark.promise("attaching changes no bit of the training")
@pytest.mark.slow
@pytest.mark.parametrize("case", [*SHAPE_CASES, *engine_steps.UNKNOWN_CHANGE_CASES], ids=names)
def test_neutral_for_every_training(lab: Lab, case: Case) -> None:
    lab.check_same(case, lab.train(case, config("lazy")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_model_resumes(lab: Lab) -> None:
    lab.survives(COMPILED, config("lazy"), [("after commit", 5), ("before step", 8)])


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_with_the_default_periods(lab: Lab, redo: str) -> None:
    """Not one round of anchors passes before the first kill."""
    lab.survives(PLAIN, config(redo, period=None), [("after commit", 4), ("backward", 14)])


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 2, 7])
@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_any_period_and_number_of_slots(lab: Lab, redo: str, slots: int, period: int) -> None:
    lab.survives(
        PLAIN, config(redo, period=period, slots=slots), [("after commit", 2), ("backward", 3), ("after step", 14)]
    )
