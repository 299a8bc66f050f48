"""Exact resume of transformers.Trainer: killed anywhere, a training must end as if it never had been.

One training's processes are killed in turn at the given points; the last one trains to the end. What is compared with
an undisturbed training that never saw the callback stands in `transformers_cases.train`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import memckpt
from memckpt.compression import CompressionConfig, HalfPrecision, RandomK
from memckpt.config import StorageConfig
from memckpt.config.arguments import DISABLE
from memckpt.errors import UnsupportedError, UsageError
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.storage.stored_runs import leave_only_storage
from tests.support.trainings.compressed import noted_encodings
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.flags import parse
from tests.support.trainings.killed_programs import Kill
from tests.support.trainings.transformers_cases import (
    Attempt,
    Case,
    Trainings,
    losses,
    make_trainer,
    sabotage,
    settings,
)
from transformers_memckpt import MemCheckpointTrainerCallback, protect
from transformers_memckpt.notes import verify

# Each process counts from its own start. In the order of one training of three epochs with eleven batches each.
ALL_ALONG: list[Kill] = [
    ("train_begin", 1), ("micro", 1), ("pre_optimizer", 3), ("step_begin", 1), ("optimizer", 1), ("step_end", 3),
    ("log", 1), ("prediction", 2), ("evaluate", 1), ("epoch_end", 1), ("epoch_begin", 1), ("step_begin", 1),
    ("step_begin", 2), ("micro", 4), ("train_begin", 1), ("prediction", 1), ("step_begin", 3), ("train_end", 1),
]  # fmt: skip

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
    ("substep_end", 3), ("micro", 9), ("pre_optimizer", 2), ("prediction", 2), ("step_begin", 2), ("substep_end", 1),
    ("micro", 5),
]  # fmt: skip

BRIEFLY: list[Kill] = [("pre_optimizer", 6), ("step_end", 7), ("step_begin", 3)]

CASES = [
    Case("two_workers", {"dataloader_num_workers": 2}),
    Case(
        "persistent_workers",
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "eval_strategy": "no"},
    ),
    Case("sampler_without_seed", {"accelerator_config": {"use_seedable_sampler": False}}),
    Case("max_steps", {"max_steps": 25}),
    Case("grouped_by_length", {"train_sampling_strategy": "group_by_length"}),
    Case("drop_last", {"dataloader_drop_last": True, "accelerator_config": {"split_batches": True}}, samples=46),
    Case("stream_that_draws", {"max_steps": 25, "accelerator_config": {"dispatch_batches": False}}, stream=True),
    Case("stream", {"max_steps": 25, "accelerator_config": {"dispatch_batches": False}}, stream=True, augmented=False),
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


@pytest.mark.promise(
    "transformers.Trainer: a training killed at 18 points equals the uninterrupted one, including losses, logs and "
    "`training_loss`"
)
def test_killed_in_a_step_in_an_evaluation_and_between_two_epochs(trainings: Trainings) -> None:
    kills: list[Kill] = [("pre_optimizer", 3), ("micro", 6), ("prediction", 2), ("epoch_begin", 1), ("step_end", 2)]
    trainings.survives(Case("plain"), settings(), kills)


def test_a_module_beside_the_model_and_a_generator_go_on(trainings: Trainings) -> None:
    trainings.survives(Case("second", second=True), settings(), [("pre_optimizer", 6), ("step_begin", 3)])


@pytest.mark.promise(
    "transformers.Trainer: accumulations that do not fill an epoch, clipping, cosine, bf16, evaluations by step"
)
@pytest.mark.slow
def test_accumulations_that_do_not_fill_an_epoch(trainings: Trainings) -> None:
    trainings.survives(ACCUMULATED, settings(), [("micro", 9), ("prediction", 2), ("substep_end", 4)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_out", "kill", "differs"),
    [
        # Within an epoch the batches that are fetched again bring the generators to where they were.
        ("generators", ("epoch_begin", 2), "rank 0: .'loss "),
        ("generators of fetches", ("pre_optimizer", 6), "rank 0: .'loss "),
        ("trainer", ("pre_optimizer", 6), "rank 0: .'loss "),
        ("epoch", ("pre_optimizer", 6), "/history"),
    ],
)
def test_the_comparison_notices_what_is_left_out(trainings: Trainings, left_out: str, kill: Kill, differs: str) -> None:
    with pytest.raises(AssertionError, match=differs):
        trainings.survives(Case("plain"), settings(), [kill], sabotage=partial(sabotage, left_out))
    assert not trainings.lab.agent_answers()  # the training came to its end all the same


@pytest.mark.promise(
    "transformers.Trainer: a training killed at 18 points equals the uninterrupted one, including losses, logs and "
    "`training_loss`"
)
@pytest.mark.slow
def test_one_training_killed_all_along(trainings: Trainings) -> None:
    attempts = trainings.survives(Case("plain"), settings(), ALL_ALONG)
    assert sum(len(each.events("killed")) for each in attempts) == len(ALL_ALONG)


@pytest.mark.slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_killed_at_random_instants(redo: str, trainings: Trainings) -> None:
    assert trainings.survive_chance(ACCUMULATED, settings(redo=redo), random.Random(redo)) > 2


@pytest.mark.promise(
    "transformers.Trainer: accumulations that do not fill an epoch, clipping, cosine, bf16, evaluations by step"
)
@pytest.mark.slow
def test_accumulations_killed_all_along(trainings: Trainings) -> None:
    trainings.survives(ACCUMULATED, settings(), IN_ACCUMULATION)


@pytest.mark.promise("transformers.Trainer: workers, samplers, schedulers, optimizers, early stopping; two ranks")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_feature(trainings: Trainings, case: Case) -> None:
    kills = BRIEFLY if case.name != "one_by_one" else [("micro", 8), ("micro", 12)]
    attempts = trainings.survives(case, settings(), kills)
    if case.stream:
        said = any("not go on exactly" in log or "not be exact" in log for each in attempts for log in each.logs)
        assert said is case.augmented


@pytest.mark.promise(
    "transformers.Trainer: accumulations that do not fill an epoch, clipping, cosine, bf16, evaluations by step"
)
@pytest.mark.slow
def test_with_eager_redo(trainings: Trainings) -> None:
    trainings.lab.start_agent()
    trainings.survives(ACCUMULATED, settings(redo="eager"), IN_ACCUMULATION[:4])


@pytest.mark.promise(
    "transformers.Trainer: without memory storage serves; a finished training is recognized as finished"
)
@pytest.mark.slow
def test_a_training_whose_memory_is_gone_goes_on_from_storage(trainings: Trainings) -> None:
    """What a killed trainer leaves goes to storage; then its agent is ended, too."""
    lab = trainings.lab
    saved = []

    def lose_memory() -> None:
        saved.append(leave_only_storage(lab.run_dir).step)

    kills: list[Kill] = [("pre_optimizer", 6), ("prediction", 2)]
    storage = StorageConfig(min_seconds=3600)
    attempts = trainings.survives(Case("plain"), settings(storage), kills, between=lose_memory)
    assert saved == [5, 10]
    for attempt, step in zip(attempts[1:], saved, strict=True):
        assert f"resumed at step {step} from storage" in attempt.log
    # The last step, too, is in storage when the training has ended.
    assert read_catalog(LocalStore(lab.run_dir / "storage")).complete[0].step == 33


@pytest.mark.promise(
    "transformers.Trainer: without memory storage serves; a finished training is recognized as finished"
)
@pytest.mark.promise(
    "Trainer arguments and numbers of accumulation that differ from those of the killed attempt's last step"
)
@pytest.mark.slow
def test_a_finished_training_is_at_its_end_and_can_be_made_longer(trainings: Trainings) -> None:
    config = settings(StorageConfig(min_seconds=3600))
    case = Case("plain", {"lr_scheduler_type": "constant", "num_train_epochs": 2})
    done = trainings.run(case, config)
    again = trainings.run(case, config, seed=7)
    assert done.codes == again.codes == [0], again.log
    assert losses(again) == []
    assert again.outcomes[0]["weights"] == done.outcomes[0]["weights"]
    assert again.outcomes[0]["training loss"] == done.outcomes[0]["training loss"]
    longer = trainings.run(case, config, seed=8, changed={"num_train_epochs": 3})
    assert [step for step, _ in losses(longer)] == list(range(22, 33))
    assert "num_train_epochs was 2 in the run that is continued, and is 3 now" in longer.log
    whole = trainings.run(case, None, changed={"num_train_epochs": 3})
    assert longer.outcomes[0]["weights"] == whole.outcomes[0]["weights"]


def test_the_user_says_how_to_resume(trainings: Trainings) -> None:
    case = Case("plain")
    assert "NothingHeldError" in trainings.run(case, settings(), resume="require").log
    trainings.run(case, settings(), kill=("pre_optimizer", 6))
    assert "resumed at step 4 from local memory" in trainings.run(case, settings(), resume=4, kill=("micro", 3)).log
    anew = trainings.run(case, settings(), resume="never", kill=("micro", 3))
    # The third batch is the one that the process died in.
    assert [step for step, _ in losses(anew)] == [0, 1]
    trainings.lab.stop()


@pytest.mark.slow
def test_a_checkpoint_file_and_held_state(trainings: Trainings) -> None:
    """The newer of them wins, and which it is, is said."""
    case = Case("plain", {"save_strategy": "epoch"})
    expected = trainings.run(case, None)
    trainings.run(case, settings(), kill=("pre_optimizer", 14))  # files of step 11
    held = trainings.run(case, settings(), checkpoint=True, kill=("pre_optimizer", 5))
    assert "training continues from held step 13, and not from" in held.log
    trainings.lab.stop()
    file = trainings.run(case, settings(), checkpoint=True, kill=("pre_optimizer", 3))
    assert [step for step, _ in losses(file)] == [11, 12, 13]
    final = trainings.run(case, settings())
    assert final.codes == [0], final.log
    assert "resumed at step 13" in final.log
    assert final.outcomes[0]["state"] == expected.outcomes[0]["state"]


@pytest.mark.promise("transformers.Trainer: unsupported features are refused, and no held state is dropped")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"auto_find_batch_size": True}, "expected auto_find_batch_size=False, found True"),
        ({"gradient_accumulation_steps": 4}, "expected gradient_accumulation_steps=1, as in the run that is continued"),
    ],
    ids=["auto_find_batch_size", "accumulation"],
)
def test_what_cannot_be_is_refused_with_a_remedy(trainings: Trainings, changed: dict[str, Any], message: str) -> None:
    case = Case("plain")
    trainings.run(case, settings(), kill=("pre_optimizer", 7))  # held are 6 batches, and repeated is the last of them
    refused = trainings.run(case, settings(), changed=changed)
    assert refused.codes == [3]
    assert message in refused.log
    assert trainings.lab.status().step == 6  # and nothing that is held was dropped
    trainings.lab.stop()


def test_a_callback_without_its_trainer_says_how_to_attach_it(trainings: Trainings) -> None:
    def train_unattached() -> None:
        attempt = Attempt(Case("plain"), trainings.lab.directory, protected=False)
        trainer = make_trainer(attempt)
        trainer.add_callback(MemCheckpointTrainerCallback(trainings.lab.run_dir))
        with pytest.raises(UsageError, match=r"call callback.attach\(trainer\) before trainer.train\(\)"):
            trainer.train()
        with pytest.raises(UsageError, match="expected one MemCheckpointTrainerCallback on a Trainer, found 2"):
            protect(trainer, trainings.lab.run_dir)

    child = trainings.lab.fork(train_unattached, "unattached")
    assert child.wait() == 0, child.log.read_text()


@pytest.mark.promise("transformers.Trainer: unsupported features are refused, and no held state is dropped")
def test_a_trainer_without_the_names_we_rely_on_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    trainer = object.__new__(transformers.Trainer)
    monkeypatch.delattr(transformers.Trainer, "_run_epoch")
    with pytest.raises(UnsupportedError, match=r"relies on Trainer._run_epoch\(..., epoch, ...\), which transformers"):
        verify(trainer)
    with pytest.raises(TypeError, match=r"expected a transformers\.Trainer, found builtins\.object"):
        verify(object())


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["halfprecision"], HalfPrecision()),
        pytest.param(
            ["randomk", "--memckpt-compression-min-elements", "1"], RandomK(min_elements=1), marks=pytest.mark.slow
        ),
    ],
    ids=["half", "random"],
)
def test_two_ranks_with_compressed_averages(
    trainings: Trainings, options: list[str], expected: CompressionConfig
) -> None:
    """As a command line configures it; the undisturbed training averages by the plain hook."""
    chosen = parse("--run-dir", "run", "--memckpt-compression", *options).config.compression
    assert chosen == expected
    kills: list[Kill] = [("pre_optimizer", 4)]
    trainings.survives(Case("compressed", compression=chosen), settings(), kills, ranks=2)
    for rank in range(2):
        assert set(noted_encodings(trainings.lab.directory / f"encodings-{rank}")) == {
            "half" if isinstance(expected, HalfPrecision) else "sparse"
        }


@pytest.mark.promise("transformers.Trainer: workers, samplers, schedulers, optimizers, early stopping; two ranks")
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("plain"),
        replace(ACCUMULATED, samples=88),
        Case("sharded", sharded=True),
        replace(ACCUMULATED, name="sharded_accumulated", samples=88, sharded=True),
    ],
    ids=lambda case: case.name,
)
def test_two_ranks(trainings: Trainings, case: Case) -> None:
    kills: list[Kill] = [("pre_optimizer", 4), ("step_begin", 2), ("prediction", 1), ("step_end", 3)]
    trainings.survives(case, settings(), kills, ranks=2)


def test_batches_that_accelerate_dispatches_are_refused_with_the_setting(trainings: Trainings) -> None:
    """It chooses so by itself where the data are a stream."""
    refused = trainings.run(Case("dispatched", {"max_steps": 4}, stream=True), settings())
    assert refused.codes == [3]
    assert 'pass TrainingArguments(accelerator_config={"dispatch_batches": False})' in refused.log


def test_nothing_is_refused_where_protection_is_disabled(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, "1")
    alone = trainings.run(Case("dispatched", {"max_steps": 4}, stream=True), settings())
    assert alone.codes == [0], alone.log


def test_losses_that_are_logged_are_noted(trainings: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memckpt.Session, "log", lambda session, logs: print("noted", sorted(logs)))
    ended = trainings.run(Case("plain", {"num_train_epochs": 1}), settings())
    assert ended.codes == [0], ended.log
    noted = [line for line in ended.log.splitlines() if line.startswith("noted ")]
    assert any("'loss'" in line for line in noted)
    assert not any("memckpt/" in line for line in noted)


@pytest.mark.parametrize(("choice", "number"), [("main", 4), ("all", 14), ("none", 0)])
def test_figures_go_to_the_trainer_s_trackers_and_are_not_printed(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, choice: str, number: int
) -> None:
    from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, TrainerCallback

    def show(callback: TrainerCallback, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        print(type(callback).__name__, "gets", sorted(logs))

    for each in (DefaultFlowCallback, PrinterCallback):  # the first one stands where trackers do
        monkeypatch.setattr(each, "on_log", show)
    ended = trainings.run(Case("plain", {"num_train_epochs": 1}), settings(log_metrics=choice))
    assert ended.codes == [0], ended.log
    losses = [line for line in ended.log.splitlines() if " gets " in line and "'loss'" in line]
    tracked = [line.count("'memckpt/") for line in losses if line.startswith("DefaultFlowCallback")]
    assert set(tracked) == {number}
    printed = [line.count("'memckpt/") for line in losses if line.startswith("PrinterCallback")]
    assert set(printed) == {0}
