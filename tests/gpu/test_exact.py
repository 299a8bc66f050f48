"""Lazy redo on the device: after real kills training comes to the same bits as without.

Against an undisturbed run, so with deterministic algorithms (``torch.use_deterministic_algorithms(True)`` and
``CUBLAS_WORKSPACE_CONFIG=:4096:8``): what does not repeat itself without a kill does not do so with one.
"""

from __future__ import annotations

import importlib

import pytest

from tests.gpu.cases import BORROWED, GIVEN_UP, OWN
from tests.support.storage.stored_runs import BEFORE_5, stored, until_stored
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Actions, config, kill_both, kill_self
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_steps import kills_of
from tests.support.trainings.engine_training import Case

#: A commit from a device is sent a little later than it is made: a kill right behind it may lose it.
BEFORE = [("before step", 9)]


def point_of(case: Case) -> list[tuple[str, int]]:
    if case.name in ("inductor", "step-in-backward"):
        return [("after commit", 9)]
    return kills_of(case, BEFORE)


@pytest.mark.promise("CUDA")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", [*BORROWED, *OWN], ids=lambda case: case.name)
def test_a_killed_training_resumes_at_its_bits(gpu_lab: Lab, case: Case) -> None:
    if case.name == "inductor":
        importlib.import_module("torch._dynamo")  # takes seconds, which children then need not spend
    first = gpu_lab.train(case, config("lazy", resume_check="witness"), actions=killing(case))
    resumed = gpu_lab.train(case, config("lazy", resume_check="witness"), seed=1001)
    assert len(first.of("killed")) == 1
    assert resumed.restored_step in (6, 7, 8, 9), resumed.log[-3000:]
    assert resumed.mode == ("snapshot" if case.name in GIVEN_UP else "lazy")
    gpu_lab.check_same(case, first, resumed)


def killing(case: Case) -> Actions:
    return dict.fromkeys(point_of(case), kill_self)


def test_a_checkpoint_is_copied_while_training_goes_on(gpu_lab: Lab) -> None:
    settings = stored("lazy")
    actions: Actions = {**BEFORE_5, ("after commit", 7): until_stored(5), ("backward", 9): kill_both}
    first = gpu_lab.train(PLAIN, settings, actions=actions)
    resumed = gpu_lab.train(PLAIN, settings, seed=2)
    assert resumed.restored_step == 5
    gpu_lab.check_same(PLAIN, first, resumed)
