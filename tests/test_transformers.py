"""Exact resume of transformers.Trainer: killed anywhere, a training must end as if it never had been.

One training's processes are killed in turn at the given points; the last one trains to the end. What is compared with
an undisturbed training that never saw the callback stands in `transformers_cases.train`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from memckpt.config import StorageConfig
from tests.engine_harness import Lab
from tests.transformers_cases import Case, Kill, Trainings, compare, settings

# Each process counts from its own start. In the order of one training of three epochs with eleven batches each.
ALL_ALONG: list[Kill] = [
    ("train_begin", 1),
    ("micro", 1),
    ("pre_optimizer", 3),
    ("step_begin", 1),
    ("optimizer", 1),
    ("step_end", 3),
    ("log", 1),
    ("prediction", 2),
    ("evaluate", 1),
    ("epoch_end", 1),
    ("epoch_begin", 1),
    ("step_begin", 1),
    ("step_begin", 2),
    ("micro", 4),
    ("train_begin", 1),
    ("prediction", 1),
    ("step_begin", 3),
    ("train_end", 1),
]

ACCUMULATED = Case(
    "accumulated",
    {
        "gradient_accumulation_steps": 3,  # eleven batches: the last step of an epoch has two
        "max_grad_norm": 0.3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "bf16": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "include_num_input_tokens_seen": "all",
    },
)
IN_ACCUMULATION: list[Kill] = [
    ("substep_end", 3),
    ("micro", 9),
    ("pre_optimizer", 2),
    ("prediction", 2),
    ("step_begin", 2),
    ("substep_end", 1),
    ("micro", 5),
]

BRIEFLY: list[Kill] = [("pre_optimizer", 6), ("step_end", 7), ("step_begin", 3)]

CASES = [
    Case("two_workers", {"dataloader_num_workers": 2}),
    Case("persistent_workers", {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "eval_strategy": "no"}),
    Case("sampler_without_seed", {"accelerator_config": {"use_seedable_sampler": False}}),
    Case("stateful_loader", {"accelerator_config": {"use_stateful_dataloader": True}}),
    Case("max_steps", {"max_steps": 25}),
    Case("plateau", {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}),
    Case("one_by_one", {"gradient_accumulation_steps": 12}),
    Case("sgd", {"optim": "sgd"}),
    Case("adafactor", {"optim": "adafactor"}),
    Case("neftune", {"neftune_noise_alpha": 5.0}),
    Case("eval_on_start", {"eval_on_start": True}),
    Case(
        "early_stopping",
        {
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 3,
            "load_best_model_at_end": True,
            "save_total_limit": 2,
        },
        patience=2,
    ),
]


@pytest.fixture(scope="session")
def _transformers_imported() -> None:
    """Before the lab's children are forked: they need not import it again. Trains nothing."""
    import transformers.models.gpt2.modeling_gpt2
    import transformers.trainer  # noqa: F401


@pytest.fixture
def trainings(_transformers_imported: None, lab: Lab) -> Iterator[Trainings]:
    return Trainings(lab)


def test_nothing_fails_and_nothing_changes(trainings: Trainings) -> None:
    trainings.survives(Case("plain"), settings(), [])


def test_one_training_killed_all_along(trainings: Trainings) -> None:
    attempts = trainings.survives(Case("plain"), settings(), ALL_ALONG)
    assert sum(len(each.events(0, "killed")) for each in attempts) == len(ALL_ALONG)


def test_accumulations_that_do_not_fill_an_epoch(trainings: Trainings) -> None:
    trainings.survives(ACCUMULATED, settings(), IN_ACCUMULATION)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_feature(trainings: Trainings, case: Case) -> None:
    kills = BRIEFLY if case.name != "one_by_one" else [("micro", 8), ("micro", 12)]
    trainings.survives(case, settings(), kills)
