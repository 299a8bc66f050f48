"""Exact resume with Accelerate: killed anywhere, any number of times, a run must end as if it never had been."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate_plugin import object_states
from accelerate_plugin.loaders import Follower
from accelerate_plugin.plugin import MemCheckpointPlugin
from memckpt.capture.data.passes import Pass
from memckpt.compression import RandomK
from memckpt.config import StorageConfig
from memckpt.config.arguments import config_from_environment
from tests.support.trainings.accelerate_cases import (
    ALL_ALONG,
    BRIEFLY,
    CASES,
    MORE_CASES,
    MORE_RANKED,
    ONE_AFTER_ANOTHER,
    PLAIN,
    POINTS,
    RANKED,
    RANKED_KILLS,
)
from tests.support.trainings.accelerate_runs import attempt, check_same, entries, reference, survives, survives_chance
from tests.support.trainings.accelerate_training import (
    Case,
    Kill,
    Run,
    kill_agent,
    wait_until_ordered,
    wait_until_stored,
)
from tests.support.trainings.compressed import noted_encodings
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where undisturbed trainings leave their results, one for each case and number of processes."""
    return tmp_path_factory.mktemp("references")


@pytest.mark.promise("Accelerate: a run killed at 17 points equals the uninterrupted run")
@pytest.mark.promise("loops' counters, an owed validation, an owed end of epoch")
def test_one_run_killed_at_every_point(lab: Lab, references: Path) -> None:
    survives(lab, Run(PLAIN, lab.directory / "job"), ONE_AFTER_ANOTHER, references)


@pytest.mark.promise(
    "Accelerate: each way of loading data, accumulation, the scaler, evaluations, loops left early, `save_state` "
    "beside it"
)
@pytest.mark.promise("parameters, frozen ones too; `requires_grad`")
@pytest.mark.promise("the loss of every later step")
@pytest.mark.promise("LR schedulers, gradient scaler")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_feature(case: Case, lab: Lab, references: Path) -> None:
    run = survives(lab, Run(case, lab.directory / "job"), BRIEFLY, references)
    skipped = [entry for entry in entries(run, 0) if entry["event"] == "skipped"]
    assert bool(skipped) is case.scaler, "steps are skipped where gradients are scaled, and only there"


@pytest.mark.promise("Accelerate: two processes, either dies; torchrun restarts them")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", RANKED, ids=str)
def test_two_ranks(case: Case, lab: Lab, references: Path) -> None:
    survives(lab, Run(case, lab.directory / "job", ranks=2, victim=1), RANKED_KILLS, references)


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
def test_two_ranks_with_compressed_averages(lab: Lab, references: Path) -> None:
    """As the environment configures it; the undisturbed training averages by the plain hook."""
    variables = {"": "randomk", "_RATIO": "0.25", "_MIN_ELEMENTS": "16"}
    chosen = config_from_environment({f"MEMCKPT_COMPRESSION{name}": one for name, one in variables.items()}).compression
    assert chosen == RandomK(ratio=0.25, min_elements=16)
    case = Case("compressed", compression=chosen)
    kills: list[Kill] = [("backward", 3), ("committed", 5)]
    run = survives(lab, Run(case, lab.directory / "job", ranks=2, victim=1), kills, references)
    for rank in range(2):  # all but the bias of the last layer
        assert noted_encodings(run.directory / f"encodings-{rank}") == [*["sparse"] * 7, None]


def test_nothing_fails_and_nothing_changes(lab: Lab, references: Path) -> None:
    survives(lab, Run(PLAIN, lab.directory / "job"), [], references)


@pytest.mark.promise("Accelerate: after the death of agent and trainer storage serves")
@pytest.mark.slow
def test_agent_and_trainer_die_and_storage_serves(lab: Lab, references: Path) -> None:
    settings = config(storage=StorageConfig(every_steps=4))
    run = Run(PLAIN, lab.directory / "job", config=settings, kill=("committed", 9))
    hooks: dict[Kill, Callable[..., None]] = {
        ("committed", 2): wait_until_ordered,
        ("committed", 8): wait_until_stored,
        ("committed", 9): kill_agent,
    }
    assert attempt(lab, replace(run, hooks=hooks)) == [-signal.SIGKILL]
    assert [each["event"] for each in entries(run, 0)].count("agent killed") == 1
    seen = len(entries(run, 0))
    rarely = config(storage=StorageConfig(every_steps=1000))
    assert attempt(lab, replace(run, kill=None, config=rarely)) == [0]
    resumed = next(each["step"] for each in entries(run, 0)[seen:] if each["event"] == "attached")
    assert resumed in range(4, 10), "it goes on behind the step that was in storage"
    check_same(reference(lab, PLAIN, 1, references), run)


def _no_rng() -> None:
    MemCheckpointPlugin._restore_rng = lambda self: None  # type: ignore[method-assign]


def _no_refetch() -> None:
    record = Pass.record
    Pass.record = lambda self, ahead=0: {**record(self, ahead), "fetches": []}  # type: ignore[method-assign]


def _no_schedulers() -> None:
    load = object_states._load
    object_states._load = lambda kind, objects, states: None if kind == "scheduler" else load(kind, objects, states)


def _no_positions() -> None:
    Follower.continue_after = lambda self, state: None  # type: ignore[method-assign]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("sabotage", [_no_rng, _no_refetch, _no_schedulers, _no_positions])
def test_the_comparison_notices_a_part_left_out(sabotage: Callable[[], None], lab: Lab, references: Path) -> None:
    run = Run(PLAIN, lab.directory / "job", sabotage=sabotage)
    with pytest.raises(AssertionError, match="rank 0: "):
        survives(lab, run, [("backward", 5)], references)


@pytest.mark.promise("Accelerate: a run killed at 17 points equals the uninterrupted run")
@pytest.mark.slow
@pytest.mark.parametrize("kill", POINTS, ids=lambda kill: f"{kill[0].replace(' ', '_')}-{kill[1]}")
def test_each_point(kill: Kill, lab: Lab, references: Path) -> None:
    survives(lab, Run(PLAIN, lab.directory / "job"), [kill], references)


@pytest.mark.promise(
    "Accelerate: each way of loading data, accumulation, the scaler, evaluations, loops left early, `save_state` "
    "beside it"
)
@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=str)
def test_each_feature_killed_all_along(case: Case, lab: Lab, references: Path) -> None:
    survives(lab, Run(case, lab.directory / "job"), ALL_ALONG, references)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in [*CASES, *MORE_CASES] if case.evaluation_loader is not None], ids=str
)
def test_evaluations_that_are_killed(case: Case, lab: Lab, references: Path) -> None:
    kills: list[Kill] = [("evaluated batch", 2), ("evaluated batch", 8), ("evaluated batch", 1), ("batch", 3)]
    survives(lab, Run(case, lab.directory / "job"), kills, references)


@pytest.mark.slow
def test_each_feature_with_a_replica(lab: Lab, references: Path) -> None:
    survives(lab, Run(PLAIN, lab.directory / "job", config=config("eager")), BRIEFLY, references)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_killed_at_random_instants(ranks: int, redo: str, lab: Lab, references: Path) -> None:
    case = next(each for each in (MORE_RANKED if ranks > 1 else MORE_CASES) if each.accumulate > 1)
    run = Run(case, lab.directory / "job", ranks=ranks, victim=ranks - 1, config=config(redo))
    assert survives_chance(lab, run, random.Random(redo), references) > 2


@pytest.mark.promise("Accelerate: two processes, either dies; torchrun restarts them")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("case", [*RANKED, *MORE_RANKED], ids=str)
def test_two_ranks_more(case: Case, victim: int, lab: Lab, references: Path) -> None:
    survives(lab, Run(case, lab.directory / "job", ranks=2, victim=victim), RANKED_KILLS, references)


def test_names_of_cases_differ() -> None:
    for cases in ([PLAIN, *CASES, *MORE_CASES[1:]], [*RANKED, *MORE_RANKED]):
        assert len({case.name for case in cases}) == len(cases), "references are kept by name"
