"""Programs with habits that Lightning allows: after kills they end as if they had never been killed, or say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.trainings import lightning_programs as programs
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.lightning_programs import Attempt, survive

Program = Callable[[Attempt], None]


BUILT = [("keeps 1", ["8", "17"]), ("keeps 0", ["3", "8"]), ("chunks 2", ["17"]), ("makes-up 2", ["17"])]
BUILT += [("reads 2 sanity", ["7", "val15", "17"]), ("keeps 2 seldom", ["8", "17"])]
UNSIZED = [("sampler", ["4", "9"]), ("batches", ["4", "13"]), ("stream", ["2", "8"]), ("sampler workers", ["4", "9"])]
UNSIZED += [("max_size_cycle", ["2", "7", "17"]), ("max_size", ["2", "7", "17"]), ("min_size", ["2", "7", "12"])]
UNSIZED += [("max_size_cycle reversed", ["2", "7", "17"]), ("max_size workers", ["7", "17"])]
UNSIZED += [("max_size_cycle limited", ["7", "12"])]
CASES: list[tuple[Program, str, list[str]]] = [
    *((programs.loaders_that_are_built_anew, *each) for each in BUILT),
    (programs.loaders_of_a_module, "hooks", ["3", "12", "17"]),
    (programs.loaders_of_a_module, "named", ["12"]),
    *((programs.loaders_without_a_length, *each) for each in UNSIZED),
    (programs.steps_that_take_their_batches, "2", ["1", "4"]),
    (programs.steps_that_take_their_batches, "1", ["2", "8"]),
    (programs.steps_that_take_their_batches, "1 endless", ["2", "8"]),
    (programs.checkpoint_files, "", ["val5", "8", "val15"]),
    (programs.checkpoint_files, "steps often", ["4", "val8", "12"]),
    (programs.rows_of_a_table, "1", ["3", "val5", "start7", "12"]),
    (programs.rows_of_a_table, "3", ["7", "val15"]),
    (programs.objects_of_the_module, "", ["4", "11"]),
    (programs.objects_of_the_module, "named", ["4", "11"]),
    (programs.objects_of_the_module, "large named", ["4"]),
    (programs.accumulation_of_ones_own, "", ["0 4", "1 1", "2 5"]),
    (programs.modes_of_modules, "", ["7", "val10", "12"]),
]


@pytest.mark.promise(
    "generators, and objects with `state_dict()` and `load_state_dict()`, on the model and its modules"
)
@pytest.mark.parametrize(
    ("program", "variant", "kills"),
    CASES,
    ids=[f"{program.__name__} {variant}".strip() for program, variant, _ in CASES],
)
def test_as_if_never_killed(program: Program, variant: str, kills: list[str], lab: Lab) -> None:
    differing, log = survive(lab, program, kills, variant)
    assert differing == {}, log[-3000:]
    assert "not exact" not in log
    assert "DIFFERENT" not in log
    assert "will not be exact" not in log
    assert log.count("resumed at step") >= len(kills) - 1


@pytest.mark.parametrize(
    ("program", "variant", "said"),
    [
        (programs.the_model_chooses_the_data, "", "the model runs while train loaders are built"),
        (programs.steps_that_take_their_batches, "1 ahead", "those taken in advance are left out"),
        (programs.loaders_without_a_length, "stream noisy", "draws from a global generator"),
        (programs.objects_of_the_module, "large", "name it in `attributes`"),
    ],
)
def test_what_cannot_be_is_said(program: Program, variant: str, said: str, lab: Lab) -> None:
    _, log = survive(lab, program, ["4", "8"], variant)
    assert said in log
    assert "training does not go on exactly" in log
