"""Exact resume with Lightning: killed anywhere, any number of times, a run must end as if it never had been.

A run's processes are killed in turn at the given points; the last one trains to the end. What is compared, bit
for bit, with an uninterrupted run that never saw the callback is listed in `lightning_runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memckpt.compression import RandomK, TopK
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.storage.export import export
from memckpt.storage.local_store import LocalStore
from tests.support.faults.check_lines import unproved
from tests.support.storage.stored_runs import leave_only_storage
from tests.support.trainings import fake_session
from tests.support.trainings.compressed import noted_encodings
from tests.support.trainings.hydra_settings import compose
from tests.support.trainings.lightning_cases import Kill
from tests.support.trainings.lightning_data import Case
from tests.support.trainings.lightning_runs import Run, Server, differences, finish, interrupted, wrong_losses

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

Attach = Callable[..., Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    clean = Server()
    yield clean
    clean.close()


STAND_IN: dict[str, Any] = {"attach": fake_session.attach}
ENGINE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def attach() -> dict[str, Any]:
    """The engine that the callback is given: the real one. With STAND_IN what fails is the adapter."""
    return ENGINE


@pytest.fixture(scope="module")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The uninterrupted run of a case, without the callback, made once."""
    known: dict[tuple[str, int], dict[str, Any]] = {}

    def get(case: Case, ranks: int = 1) -> dict[str, Any]:
        if (case.name, ranks) not in known:
            run = Run(case, tmp_path_factory.mktemp(case.name), protected=False, ranks=ranks)
            known[case.name, ranks] = finish(server, run)
        return known[case.name, ranks]

    return get


Reference = Callable[..., dict[str, Any]]


def assert_exact(reference: dict[str, Any], found: dict[str, Any], run: Run) -> None:
    assert differences(reference, found) == []
    assert wrong_losses(reference, run) == []
    if run.attach is None:  # the stand-in checks nothing
        assert unproved(run.log.read_text()) == []


PLAIN = Case("plain")


@pytest.mark.promise("Lightning: a run killed at 32 points equals the uninterrupted run")
@pytest.mark.promise("loops' counters, an owed validation, an owed end of epoch")
@pytest.mark.promise("epoch aggregates of `self.log`, torchmetrics, `callback_metrics`")
@pytest.mark.slow
@pytest.mark.parametrize("engine", [STAND_IN, ENGINE], ids=["stand-in", "engine"])
def test_one_run_killed_at_every_point(
    engine: dict[str, Any], server: Server, reference: Reference, tmp_path: Path
) -> None:
    found = interrupted(server, ONE_AFTER_ANOTHER, PLAIN, tmp_path, **engine)
    assert_exact(reference(PLAIN), found, Run(PLAIN, tmp_path, **engine))


@pytest.mark.promise("attaching changes no bit of the training")
@pytest.mark.parametrize(
    "case", [PLAIN, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)], ids=lambda case: case.name
)
def test_nothing_fails_and_nothing_changes(
    case: Case, server: Server, reference: Reference, attach: dict[str, Any], tmp_path: Path
) -> None:
    found = finish(server, Run(case, tmp_path, **attach))
    assert_exact(reference(case), found, Run(case, tmp_path))


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
def test_each_feature(case: Case, server: Server, reference: Reference, attach: dict[str, Any], tmp_path: Path) -> None:
    kills = BRIEFLY if case.validate else WITHOUT_VALIDATION
    found = interrupted(server, kills, case, tmp_path, **attach)
    assert_exact(reference(case), found, Run(case, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_loaders_built_early_and_reloaded(
    epochs: int, server: Server, reference: Reference, attach: dict[str, Any], tmp_path: Path
) -> None:
    every = {"reload_dataloaders_every_n_epochs": epochs, "max_epochs": 5}
    case = Case(f"estimated_reload_{epochs}", built_early="estimated", datamodule=True, trainer=every)
    found = interrupted(server, [("before_optimizer", 27), ("before_optimizer", 13)], case, tmp_path, **attach)
    expected = reference(case)
    assert_exact(expected, found, Run(case, tmp_path))


def test_reloaded_loaders_over_samples_that_were_drawn(
    server: Server, reference: Reference, attach: dict[str, Any], tmp_path: Path
) -> None:
    """What train_dataloader() draws from the global generators is drawn again."""
    case = Case("reload_subset", loader="subset", datamodule=True, trainer={"reload_dataloaders_every_n_epochs": 1})
    found = interrupted(server, [("before_optimizer", 12), ("before_optimizer", 10)], case, tmp_path, **attach)
    assert_exact(reference(case), found, Run(case, tmp_path))


def test_loaders_built_before_the_callback_knows_of_it(server: Server, attach: dict[str, Any], tmp_path: Path) -> None:
    """The order is another one than without the callback, as is said; but a resume repeats it."""
    case = Case("built_by_datamodule", built_early="datamodule", datamodule=True)
    expected = finish(server, Run(case, tmp_path / "whole", **attach))
    (directory := tmp_path / "killed").mkdir()
    found = interrupted(server, BRIEFLY, case, directory, **attach)
    assert_exact(expected, found, Run(case, directory))
    assert "training loaders were built before MemCheckpoint.setup()" in (directory / "log.txt").read_text()


@pytest.mark.promise("after the death of agent and trainer a resume from storage is exact")
@pytest.mark.slow
def test_a_run_whose_memory_is_gone_goes_on_from_storage(server: Server, reference: Reference, tmp_path: Path) -> None:
    """What each killed trainer leaves goes to storage; then its agent is ended, too."""
    kills: list[Kill] = [("before_optimizer", 6), ("validation_step", 2), ("training_step", 8)]
    saved = 0
    for kill in kills:
        assert server.run(Run(PLAIN, tmp_path, kill=kill, storage=True)) == [-9]
        before, saved = saved, leave_only_storage(tmp_path / "run").step
        assert saved > before
    found = finish(server, Run(PLAIN, tmp_path, storage=True))
    assert_exact(reference(PLAIN), found, Run(PLAIN, tmp_path))
    assert (tmp_path / "log.txt").read_text().count("from storage in") == len(kills)


@pytest.mark.slow
@pytest.mark.parametrize("case", [PLAIN, Case("manual", manual=True), Case("tied", model="tied")], ids=lambda c: c.name)
def test_lightning_takes_an_export_as_its_own_checkpoint(
    case: Case, server: Server, reference: Reference, tmp_path: Path
) -> None:
    assert server.run(Run(case, tmp_path, kill=("callback_batch_start", 14), storage=True)) == [-9]
    file = tmp_path / "exported.ckpt"
    export(LocalStore(tmp_path / "run" / "storage"), leave_only_storage(tmp_path / "run"), file, "lightning")
    run = Run(case, tmp_path / "from file", protected=False, checkpoint=str(file))
    found = finish(server, run)
    expected = reference(case)
    assert found["global_step"] == expected["global_step"]
    assert found["epoch"] == expected["epoch"]
    assert found["schedulers"] == expected["schedulers"]
    # It went on behind the exported step, and did not begin anew.
    assert len(found["losses"]) < len(expected["losses"])


@pytest.mark.promise("another number of ranks carries over parameters and optimizer state")
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_behind_the_same_samples(
    before: int, after: int, server: Server, tmp_path: Path
) -> None:
    """From storage, where the agent brings what it holds first; not bit for bit, and said so."""
    # 44 samples in batches of 4: 11 batches of one rank, 6 of each of two (the last is padded).
    kill: Kill = ("before_optimizer", 5)
    assert server.run(Run(PLAIN, tmp_path, kill=kill, ranks=before, storage=True))[-1] == -9
    (tmp_path / "losses.txt").unlink()
    found = finish(server, Run(PLAIN, tmp_path, ranks=after, storage=True))
    log = (tmp_path / "log.txt").read_text()
    batches = 4 * before // after
    assert f"{before} ranks had trained 4 batches of this epoch each; {after} ranks resume after {batches}" in log
    outcomes = [found] if after == 1 else list(found.values())
    per_epoch = {1: 11, 2: 6}[after]
    for outcome in outcomes:
        assert outcome["epoch"] == 3
        assert outcome["global_step"] == 4 + (per_epoch - batches) + 2 * per_epoch
    lines = [line.split() for line in (tmp_path / "losses.txt").read_text().splitlines()]
    assert min(int(batch) for epoch, batch, *_ in lines if epoch == "0") == batches


def test_a_finished_run_that_is_started_again_ends_where_it_ended(
    server: Server, reference: Reference, tmp_path: Path
) -> None:
    for _ in range(2):
        found = finish(server, Run(PLAIN, tmp_path, storage=True))
        assert_exact(reference(PLAIN), found, Run(PLAIN, tmp_path))
        assert ask_status(AgentAddress.of(tmp_path / "run")) is None
    assert "from storage in" in (tmp_path / "log.txt").read_text()


@pytest.mark.promise("the tests' comparison notices a missing part")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("sabotage", ["rng", "aggregates", "metrics", "restart flags"])
def test_the_comparison_notices_a_part_left_out(
    sabotage: str, server: Server, reference: Reference, tmp_path: Path
) -> None:
    case = Case("plateau_epoch", scheduler="plateau_epoch")
    found = interrupted(server, [("before_optimizer", 6)], case, tmp_path, sabotage=sabotage, **STAND_IN)
    assert differences(reference(case), found) != []


@pytest.mark.promise("Lightning: each feature, with the engine")
@pytest.mark.parametrize("engine", [STAND_IN, pytest.param(ENGINE, marks=pytest.mark.slow)], ids=["stand-in", "engine"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks(workers: int, engine: dict[str, Any], server: Server, reference: Reference, tmp_path: Path) -> None:
    case = Case(f"ddp_{workers}", workers=workers, persistent=workers > 0)
    # Behind the epoch's start, in its validation, and in the next epoch, which has another sampler seed.
    kills: list[Kill] = [("before_optimizer", 4), ("validation_step", 1), ("loss", 3)]
    found = interrupted(server, kills, case, tmp_path, ranks=2, **engine)
    expected = reference(case, 2)
    assert {rank: differences(expected[rank], found[rank]) for rank in expected} == {"rank 0": [], "rank 1": []}


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
@pytest.mark.parametrize("kind", [TopK, pytest.param(RandomK, marks=pytest.mark.slow)])
def test_two_ranks_with_compressed_averages(
    kind: type[TopK | RandomK], server: Server, reference: Reference, tmp_path: Path
) -> None:
    """As a Hydra application configures it; the undisturbed run averages by the plain hook."""
    from memckpt_hydra import protection

    settings = ["memckpt.compression.ratio=0.1", "memckpt.compression.min_elements=16"]
    group = f"memckpt/compression={kind.__name__.lower()}"
    chosen = protection(compose("+memckpt=default", group, *settings)).config.compression
    assert chosen == kind(ratio=0.1, min_elements=16)
    case = Case(f"compressed_{kind.__name__}", compression=chosen)
    found = interrupted(server, [("before_optimizer", 8)], case, tmp_path, ranks=2)
    expected = reference(case, 2)
    assert {rank: differences(expected[rank], found[rank]) for rank in expected} == {"rank 0": [], "rank 1": []}
    assert unproved((tmp_path / "log.txt").read_text()) == []
    for rank in range(2):  # all but the bias of the last layer
        assert noted_encodings(tmp_path / f"encodings-{rank}") == [*["sparse"] * 5, None]


@pytest.mark.promise("Lightning: a run killed at 32 points equals the uninterrupted run")
@pytest.mark.slow
@pytest.mark.parametrize("kill", POINTS, ids=lambda kill: f"{kill[0]}-{kill[1]}")
def test_each_point(kill: Kill, server: Server, reference: Reference, attach: dict[str, Any], tmp_path: Path) -> None:
    found = interrupted(server, [kill], PLAIN, tmp_path, **attach)
    assert_exact(reference(PLAIN), found, Run(PLAIN, tmp_path))


@pytest.mark.promise("Lightning: each feature, with the engine")
@pytest.mark.promise("epoch aggregates of `self.log`, torchmetrics, `callback_metrics`")
@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=lambda case: case.name)
def test_each_feature_killed_all_along(
    case: Case, server: Server, reference: Reference, attach: dict[str, Any], tmp_path: Path
) -> None:
    expected = reference(case)
    kills = [kill for kill in ALL_ALONG if case.validate or kill[0] not in VALIDATION_POINTS]
    deaths = 0
    for kill in [*kills, None]:
        run = Run(case, tmp_path, kill=kill, **attach)
        code = server.run(run)[-1]
        if code == 0:
            break  # to the end: a short case does not reach all points
        assert code == -9, f"expected death at {kill}, found exit code {code}: {run.log.read_text()[-4000:]}"
        deaths += 1
    assert code == 0
    assert deaths >= 3, f"expected several deaths, found {deaths}"
    assert_exact(expected, torch.load(tmp_path / "result-0.pt", weights_only=False), Run(case, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_nothing_fails_and_nothing_changes_more(
    case: Case, server: Server, reference: Reference, attach: dict[str, Any], tmp_path: Path
) -> None:
    found = finish(server, Run(case, tmp_path, **attach))
    assert_exact(reference(case), found, Run(case, tmp_path))
