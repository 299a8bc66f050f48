"""Any optimizer, killed at several steps in a row, resumes bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_optimizers import OPTIMIZER_CASES
from tests.support.trainings.engine_training import Case

KILLS = [("after commit", 2), ("backward", 3), ("after step", 9), ("forward", 17)]
#: What makes every ordinary run; the rest is run with the slow ones.
LAZY_FIRST = {
    "sgd-nesterov",
    "adam",
    "adamw-foreach",
    "adamw-fused",
    "adamw-amsgrad",
    "adagrad",
    "rmsprop-centered",
    "radam",
    "adafactor",
    "own",
    "local",
    "muon",
    "sparse-adam",
    "sparse-sgd",
    "sparse-or-dense",
}
EAGER_FIRST = {"sgd-nesterov", "adamw-fused", "own", "local", "muon", "sparse-adam"}
#: These need whole tensors.
WHOLE = {"adafactor", "own", "local", "muon", "sparse-adam", "sparse-adagrad", "sparse-sgd", "sparse-or-dense"}
#: Element-wise classes of torch, which are not tested; with sparse gradients they need whole tensors all the same.
SPARSE = {"sparse-adagrad", "sparse-sgd", "sparse-or-dense"}


def cases(first: set[str]) -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=() if case.name in first else pytest.mark.slow)
        for case in OPTIMIZER_CASES
    ]


@pytest.mark.promise("exact with any optimizer of torch, a custom one, Muon, sparse gradients")
@pytest.mark.promise("optimizer state, its types, its order; groups with all hyperparameters")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", cases(LAZY_FIRST))
def test_lazy_redo_is_exact(lab: Lab, case: Case) -> None:
    attempts = lab.survives(case, config("lazy"), KILLS)
    for attempt in attempts[1:]:
        assert attempt.of("restored")[0]["cut"] == (case.name not in WHOLE)
        assert attempt.of("restored")[0]["lost"] == 0


@pytest.mark.promise("exact with any optimizer of torch, a custom one, Muon, sparse gradients")
@pytest.mark.promise("optimizer state, its types, its order; groups with all hyperparameters")
@pytest.mark.parametrize("case", cases(EAGER_FIRST))
def test_eager_redo_is_exact(lab: Lab, case: Case) -> None:
    attempts = lab.survives(case, config("eager"), KILLS)
    local = case.name == "local"
    # A class that is not known as element-wise is tested in its first three steps, in which two attempts are killed.
    tested = 3 if case.name in WHOLE - SPARSE else 0
    assert [attempt.mode for attempt in attempts[:tested]] == ["snapshot"] * tested
    for attempt in attempts[tested:]:
        assert attempt.mode == ("lazy" if local else "eager")
        if local:
            assert "cannot be imported by name" in attempt.of("attached")[0]["text"]
    assert attempts[-1].end["drift"] == 0.0
