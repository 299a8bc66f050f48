"""Exact resume with Lightning: killed anywhere, any number of times, a run must end as if it never had been.

A run's processes are killed in turn at the given points; the last one trains to the end. What is compared, bit
for bit, with an uninterrupted run that never saw the callback is listed in `lightning_runs`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memckpt.compression import RandomK, TopK
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.storage.export import export
from memckpt.storage.local_store import LocalStore
from tests.support.storage.stored_runs import leave_only_storage
from tests.support.trainings import killed_programs
from tests.support.trainings.compressed import noted_encodings
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hydra_settings import compose
from tests.support.trainings.killed_programs import Ended, Kill, attempt, finish
from tests.support.trainings.lightning_data import Case
from tests.support.trainings.lightning_runs import LightningRun, check_exact, differences, interrupted, sabotage, train

# Where a step, a validation, or an epoch's end can die, in the order of one run: the how-manieth time in the run, and
# in a process of a run that is killed at all of these places one after the other.
_PLACES = [
    ("sanity", 1, 1), ("epoch_start", 1, 1), ("training_step", 1, 1), ("before_optimizer", 1, 1), ("batch_end", 1, 1),
    ("callback_batch_start", 2, 2), ("training_step", 6, 5), ("before_zero_grad", 6, 1), ("before_optimizer", 6, 1),
    ("loss", 6, 1), ("callback_batch_end", 6, 1), ("batch_end", 6, 1), ("batch_end", 11, 6),
    ("callback_val_start", 1, 1), ("validation_step", 2, 2), ("val_epoch_end", 1, 1), ("callback_val_end", 1, 1),
    ("val_end", 1, 1), ("callback_epoch_end", 1, 1), ("epoch_end", 1, 1), ("epoch_start", 2, 1),
    ("callback_batch_start", 12, 1), ("batch_end", 12, 1), ("callback_batch_start", 13, 2), ("training_step", 20, 8),
    ("validation_step", 5, 2), ("epoch_end", 2, 1), ("callback_batch_start", 24, 2), ("batch_end", 33, 10),
    ("validation_step", 8, 2), ("epoch_end", 3, 1), ("train_end", 1, 1),
]  # fmt: skip
POINTS: list[Kill] = [(place, of_run) for place, of_run, _ in _PLACES]
ONE_AFTER_ANOTHER: list[Kill] = [(place, of_process) for place, _, of_process in _PLACES]

# One run of every case: in the middle of a step, in a validation, and in the first batch of the next epoch.
BRIEFLY: list[Kill] = [("before_optimizer", 6), ("validation_step", 2), ("callback_batch_start", 3)]
WITHOUT_VALIDATION: list[Kill] = [("before_optimizer", 6), ("epoch_end", 1), ("callback_batch_start", 3)]

# One run of every case, killed all along; each process counts from its own start.
ALL_ALONG: list[Kill] = [
    ("before_optimizer", 3), ("batch_end", 4), ("validation_step", 2), ("val_end", 1), ("epoch_end", 1),
    ("callback_batch_start", 2), ("training_step", 6), ("validation_step", 1), ("epoch_end", 1), ("training_step", 3),
]  # fmt: skip
VALIDATION_POINTS = {"validation_step", "val_end"}

PERSISTENT: dict[str, Any] = {"workers": 2, "persistent": True}

CASES = [
    Case("accumulation", trainer={"accumulate_grad_batches": 3}),
    Case("validation_mid_epoch", trainer={"val_check_interval": 4}),
    Case("limited_epoch_persistent_workers", trainer={"limit_train_batches": 7}, **PERSISTENT),
    Case("max_steps_at_boundary", trainer={"max_steps": 22, "max_epochs": -1}),
    Case("no_validation", validate=False),
    Case("reload", datamodule=True, trainer={"reload_dataloaders_every_n_epochs": 1}),
    Case("plateau_epoch", scheduler="plateau_epoch"),
    Case("plateau_step", scheduler="plateau_step"),
    Case("milestones", scheduler="milestones"),
    Case("manual", manual=True),
    Case("average", ema=True),
    Case("finetuned", model="finetuned"),
    Case("user_hooks", user_hooks=True, logger=True),
    Case("checkpoint_every_3", every_n_train_steps=3),
    Case("bf16_clipped", trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    Case("stateful_loader", loader="stateful_loader"),
    Case("cycled_loaders", loader="max_size_cycle"),
    Case("estimated", built_early="estimated"),
    Case("peeking", peeks=True),
    Case(
        "attributes",
        attributes=("module.level", "datamodule.stage.scale", "callbacks.Curriculum.noise"),
        datamodule=True,
    ),
]

IN_EVERY_RUN = {
    "accumulation", "validation_mid_epoch", "manual", "average", "bf16_clipped", "stateful_loader", "estimated",
    "attributes",
}  # fmt: skip

MORE_CASES = [
    Case("estimated_workers", built_early="estimated", **PERSISTENT),
    Case("iterable_built_in_setup", built_early="setup", loader="iterable"),
    Case("estimated_stateful_loader", built_early="estimated", loader="stateful_loader"),
    Case("estimated_cycled_loaders", built_early="estimated", loader="max_size_cycle", workers=2),
    Case("built_in_setup", built_early="setup"),
    Case("peeking_workers", peeks=True, workers=2),
    Case("validation_half", trainer={"val_check_interval": 0.5}),
    Case("validation_any_step", trainer={"val_check_interval": 7, "check_val_every_n_epoch": None}),
    Case("validation_every_2", trainer={"check_val_every_n_epoch": 2}),
    Case("limited_epoch", trainer={"limit_train_batches": 7}),
    Case("max_steps", trainer={"max_steps": 20, "max_epochs": -1}),
    Case("datamodule", datamodule=True),
    Case("reload_every_2", datamodule=True, trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}),
    Case("reload_workers", workers=2, datamodule=True, trainer={"reload_dataloaders_every_n_epochs": 1}),
    Case("epoch_scheduler", scheduler="epoch"),
    Case("warmup", scheduler="warmup"),
    Case("one_cycle", scheduler="one_cycle"),
    Case(
        "accumulation_plateau",
        scheduler="plateau_step",
        trainer={"accumulate_grad_batches": 3, "val_check_interval": 0.5},
    ),
    Case("accumulation_schedule", accumulation_schedule={0: 2, 2: 3}),
    Case("groups", model="groups"),
    Case("tied", model="tied"),
    Case("compiled", compiled=True),
    Case("bf16", trainer={"precision": "bf16-true"}),
    Case("clipped_by_value", trainer={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    Case("should_stop", stop_at=8),
    Case("should_stop_without_validation", stop_at=8, validate=False),
    Case("should_stop_too_early", stop_at=8, trainer={"min_epochs": 2}),
    Case("workers", workers=2),
    Case("seeded_workers", workers=2, seed_workers=True),
    Case("persistent_workers", **PERSISTENT),
    Case("persistent_validation", validation_workers=2, **PERSISTENT),
    Case("persistent_validation_every_2", validation_workers=2, trainer={"check_val_every_n_epoch": 2}, **PERSISTENT),
    Case("no_sanity_check", validation_workers=2, trainer={"num_sanity_val_steps": 0}, **PERSISTENT),
    Case("own_generator", loader="generator"),
    Case("own_generator_persistent", loader="generator", **PERSISTENT),
    Case("weighted", loader="weighted"),
    Case("replacement", loader="replacement"),
    Case("own_batch_sampler", loader="batch_sampler"),
    Case("nested_sampler", loader="nested_sampler"),
    Case("unbatched", loader="unbatched"),
    Case("unbatched_workers", loader="unbatched", workers=2),
    Case("iterable", loader="iterable"),
    Case("own_loader", loader="own_loader"),
    Case("shortest_of_two", loader="min_size"),
    Case("cycled_loaders_workers", loader="max_size_cycle", workers=2),
    Case("stateful_loader_workers", loader="stateful_loader", workers=2),
    Case("stateful_loader_persistent", loader="stateful_loader", **PERSISTENT),
]

Reference = Callable[..., Ended]


@pytest.fixture
def reference(lab: Lab) -> Reference:
    """The uninterrupted run of a case, without the callback, made once."""

    def get(case: Case, ranks: int = 1) -> Ended:
        return killed_programs.reference(lab, train, LightningRun(case, lab.directory, ranks=ranks))

    return get


PLAIN = Case("plain")


@pytest.mark.promise("Lightning: a run killed at 32 points equals the uninterrupted run")
@pytest.mark.promise("loops' counters, an owed validation, an owed end of epoch")
@pytest.mark.promise("epoch aggregates of `self.log`, `callback_metrics`")
@pytest.mark.slow
def test_one_run_killed_at_every_point(lab: Lab, reference: Reference, tmp_path: Path) -> None:
    check_exact(reference(PLAIN), interrupted(lab, ONE_AFTER_ANOTHER, PLAIN, tmp_path))


@pytest.mark.promise("attaching changes no bit of the training")
@pytest.mark.parametrize(
    "case",
    [PLAIN, *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES, *MORE_CASES])],
    ids=lambda case: case.name,
)
def test_nothing_fails_and_nothing_changes(case: Case, lab: Lab, reference: Reference, tmp_path: Path) -> None:
    check_exact(reference(case), interrupted(lab, [], case, tmp_path))


@pytest.mark.promise("Lightning: each feature, with the engine")
@pytest.mark.promise("parameters, frozen ones too; `requires_grad`")
@pytest.mark.promise("the loss of every later step")
@pytest.mark.promise("LR schedulers, gradient scaler")
@pytest.mark.promise("state of callbacks, module and datamodule hooks")
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "case",
    [case if case.name in IN_EVERY_RUN else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
def test_each_feature(case: Case, lab: Lab, reference: Reference, tmp_path: Path) -> None:
    kills = BRIEFLY if case.validate else WITHOUT_VALIDATION
    check_exact(reference(case), interrupted(lab, kills, case, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_loaders_built_early_and_reloaded(epochs: int, lab: Lab, reference: Reference, tmp_path: Path) -> None:
    every = {"reload_dataloaders_every_n_epochs": epochs, "max_epochs": 5}
    case = Case(f"estimated_reload_{epochs}", built_early="estimated", datamodule=True, trainer=every)
    check_exact(reference(case), interrupted(lab, [("before_optimizer", 27), ("before_optimizer", 13)], case, tmp_path))


def test_reloaded_loaders_over_samples_that_were_drawn(lab: Lab, reference: Reference, tmp_path: Path) -> None:
    """What train_dataloader() draws from the global generators is drawn again."""
    case = Case("reload_subset", loader="subset", datamodule=True, trainer={"reload_dataloaders_every_n_epochs": 1})
    check_exact(reference(case), interrupted(lab, [("before_optimizer", 12), ("before_optimizer", 10)], case, tmp_path))


def test_loaders_built_before_the_callback_knows_of_it(lab: Lab, tmp_path: Path) -> None:
    """The order is another one than without the callback, as is said; but a resume repeats it."""
    case = Case("built_by_datamodule", built_early="datamodule", datamodule=True)
    expected = finish(lab, train, LightningRun(case, tmp_path / "whole"))
    attempts = interrupted(lab, BRIEFLY, case, tmp_path / "killed")
    check_exact(expected, attempts)
    assert "training loaders were built before MemCheckpoint.setup()" in attempts[0].log


@pytest.mark.promise("after the death of agent and trainer a resume from storage is exact")
@pytest.mark.slow
def test_a_run_whose_memory_is_gone_goes_on_from_storage(lab: Lab, reference: Reference, tmp_path: Path) -> None:
    """What each killed trainer leaves goes to storage; then its agent is ended, too."""
    kills: list[Kill] = [("before_optimizer", 6), ("validation_step", 2), ("training_step", 8)]
    saved, attempts = 0, []
    for kill in kills:
        attempts.append(finish(lab, train, LightningRun(PLAIN, tmp_path, kill=kill, storage=True)))
        before, saved = saved, leave_only_storage(tmp_path / "run").step
        assert saved > before
    attempts.append(finish(lab, train, LightningRun(PLAIN, tmp_path, storage=True)))
    check_exact(reference(PLAIN), attempts)
    assert sum(each.log.count("from storage in") for each in attempts) == len(kills)


@pytest.mark.slow
@pytest.mark.parametrize("case", [PLAIN, Case("manual", manual=True), Case("tied", model="tied")], ids=lambda c: c.name)
def test_lightning_takes_an_export_as_its_own_checkpoint(
    case: Case, lab: Lab, reference: Reference, tmp_path: Path
) -> None:
    finish(lab, train, LightningRun(case, tmp_path, kill=("callback_batch_start", 14), storage=True))
    file = tmp_path / "exported.ckpt"
    export(LocalStore(tmp_path / "run" / "storage"), leave_only_storage(tmp_path / "run"), file, "lightning")
    run = LightningRun(case, tmp_path / "from file", protected=False, checkpoint=str(file))
    (found,), (expected,) = finish(lab, train, run).outcomes, reference(case).outcomes
    assert found["global_step"] == expected["global_step"]
    assert found["epoch"] == expected["epoch"]
    assert found["schedulers"] == expected["schedulers"]
    # It went on behind the exported step, and did not begin anew.
    assert len(found["losses"]) < len(expected["losses"])


@pytest.mark.promise("another number of ranks carries over parameters and optimizer state")
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("case", [PLAIN, Case("fsdp2", strategy="fsdp2")], ids=lambda case: case.name)
def test_another_number_of_ranks_goes_on_behind_the_same_samples(
    case: Case, before: int, after: int, lab: Lab, tmp_path: Path
) -> None:
    """From storage, where the agent brings what it holds first; not bit for bit, and said so. Shards are cut anew."""
    # 44 samples in batches of 4: 11 batches of one rank, 6 of each of two (the last is padded).
    kill: Kill = ("before_optimizer", 5)
    finish(lab, train, LightningRun(case, tmp_path, kill=kill, ranks=before, storage=True))
    found = finish(lab, train, LightningRun(case, tmp_path, ranks=after, storage=True))
    batches = 4 * before // after
    said = f"{before} ranks had trained 4 batches of this epoch each; {after} ranks resume after {batches}"
    assert said in found.logs[0]
    per_epoch = {1: 11, 2: 6}[after]
    for outcome in found.outcomes:
        assert outcome["epoch"] == 3
        assert outcome["global_step"] == 4 + (per_epoch - batches) + 2 * per_epoch
    places = [each["place"] for rank in range(after) for each in found.events("loss", rank)]
    assert min(batch for epoch, batch in places if epoch == 0) == batches


def test_a_finished_run_that_is_started_again_ends_where_it_ended(
    lab: Lab, reference: Reference, tmp_path: Path
) -> None:
    attempts = []
    for _ in range(2):
        attempts.append(finish(lab, train, LightningRun(PLAIN, tmp_path, storage=True)))
        check_exact(reference(PLAIN), attempts)
        assert ask_status(AgentAddress.of(tmp_path / "run")) is None
    assert "from storage in" in attempts[1].log


@pytest.mark.promise("the tests' comparison notices a missing part")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("part", ["rng", "aggregates", "metrics", "restart flags"])
def test_the_comparison_notices_a_part_left_out(part: str, lab: Lab, reference: Reference, tmp_path: Path) -> None:
    case = Case("plateau_epoch", scheduler="plateau_epoch")
    *_, last = interrupted(lab, [("before_optimizer", 6)], case, tmp_path, sabotage=partial(sabotage, part))
    assert differences(reference(case).outcomes[0], last.outcomes[0]) != []


@pytest.mark.promise("Lightning: each feature, with the engine")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks(workers: int, lab: Lab, reference: Reference, tmp_path: Path) -> None:
    case = Case(f"ddp_{workers}", workers=workers, persistent=workers > 0)
    # Behind the epoch's start, in its validation, and in the next epoch, which has another sampler seed.
    kills: list[Kill] = [("before_optimizer", 4), ("validation_step", 1), ("loss", 3)]
    check_exact(reference(case, 2), interrupted(lab, kills, case, tmp_path, ranks=2))


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
@pytest.mark.parametrize("kind", [TopK, pytest.param(RandomK, marks=pytest.mark.slow)])
def test_two_ranks_with_compressed_averages(
    kind: type[TopK | RandomK], lab: Lab, reference: Reference, tmp_path: Path
) -> None:
    """As a Hydra application configures it; the undisturbed run averages by the plain hook."""
    from memckpt_hydra import protection

    settings = ["memckpt.compression.ratio=0.1", "memckpt.compression.min_elements=16"]
    group = f"memckpt/compression={kind.__name__.lower()}"
    chosen = protection(compose("+memckpt=default", group, *settings)).config.compression
    assert chosen == kind(ratio=0.1, min_elements=16)
    case = Case(f"compressed_{kind.__name__}", compression=chosen)
    check_exact(reference(case, 2), interrupted(lab, [("before_optimizer", 8)], case, tmp_path, ranks=2))
    for rank in range(2):  # all but the bias of the last layer
        assert noted_encodings(tmp_path / f"encodings-{rank}") == [*["sparse"] * 5, None]


@pytest.mark.promise("Lightning: a run killed at 32 points equals the uninterrupted run")
@pytest.mark.slow
@pytest.mark.parametrize("kill", POINTS, ids=lambda kill: f"{kill[0]}-{kill[1]}")
def test_each_point(kill: Kill, lab: Lab, reference: Reference, tmp_path: Path) -> None:
    check_exact(reference(PLAIN), interrupted(lab, [kill], PLAIN, tmp_path))


@pytest.mark.promise("Lightning: each feature, with the engine")
@pytest.mark.promise("epoch aggregates of `self.log`, `callback_metrics`")
@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=lambda case: case.name)
def test_each_feature_killed_all_along(case: Case, lab: Lab, reference: Reference, tmp_path: Path) -> None:
    kills = [kill for kill in ALL_ALONG if case.validate or kill[0] not in VALIDATION_POINTS]
    attempts: list[Ended] = []
    for kill in [*kills, None]:
        attempts.append(attempt(lab, train, LightningRun(case, tmp_path, kill=kill)))
        if attempts[-1].codes == [0]:
            break  # to the end: a short case does not reach all points
        assert attempts[-1].codes == [-9], f"{kill}: {attempts[-1].log[-4000:]}"
    assert attempts[-1].codes == [0]
    assert len(attempts) > 3, "expected several deaths"
    check_exact(reference(case), attempts)
