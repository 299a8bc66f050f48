"""Exact resume with Accelerate: killed anywhere, any number of times, a run must end as if it never had been."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from accelerate_plugin import prepared
from accelerate_plugin.loaders import Follower
from accelerate_plugin.plugin import MemCheckpointPlugin
from memckpt.capture.data.passes import Pass
from memckpt.compression import HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.config import StorageConfig
from memckpt.config.arguments import config_from_environment
from tests.support.trainings.accelerate_training import (
    PLAIN,
    AccelerateRun,
    Case,
    kill_agent,
    survives,
    survives_chance,
    train,
    wait_until_ordered,
    wait_until_stored,
)
from tests.support.trainings.compressed import noted_encodings
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_programs import Kill, check_same, finish, reference

PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
DISPATCH = {"dispatch_batches": True}
STATEFUL = {"use_stateful_dataloader": True}

#: One run that is killed at each of these: each process counts from its own start. 11 batches an epoch, 3 epochs: the
#: fifth commit is behind the last batch of an epoch.
ONE_AFTER_ANOTHER: list[Kill] = [
    ("batch", 1), ("stepped", 1), ("commit", 1), ("committed", 1), ("batch", 2), ("backward", 4), ("commit", 2),
    ("committed", 5), ("epoch end", 1), ("evaluation", 1), ("evaluated", 1), ("batch", 1), ("committed", 1),
    ("stepped", 10), ("epoch end", 1), ("committed", 11), ("end", 1),
]  # fmt: skip
#: The same places, for runs that are killed once.
POINTS: list[Kill] = [
    *[
        (place, visit)
        for place in ("batch", "backward", "stepped", "commit", "committed")
        for visit in (1, 2, 10, 11, 12)
    ],
    *[(place, visit) for place in ("epoch end", "evaluation", "evaluated") for visit in (1, 2, 3)],
    ("committed", 33),
    ("end", 1),
]
#: In the middle of an epoch, after one, and in the first batches of the next. Reached with any accumulation.
BRIEFLY: list[Kill] = [("backward", 5), ("epoch end", 1), ("batch", 2)]
ALL_ALONG: list[Kill] = [
    ("backward", 5), ("committed", 6), ("epoch end", 1), ("evaluated", 1), ("batch", 2), ("commit", 2), ("stepped", 2),
    ("committed", 3), ("evaluation", 1), ("end", 1),
]  # fmt: skip

CASES = [
    Case("dispatch", samples=46, loading=DISPATCH),
    Case("accumulate", samples=42, accumulate=3),
    Case("persistent_workers", loader=PERSISTENT),
    Case("stateful", loading=STATEFUL),
    Case("stateful_evaluation", loading=STATEFUL, evaluate_every=4, evaluation_loader={}),
    Case("stateful_evaluation_elsewhere", loading=STATEFUL, evaluate_every=4, evaluation_loader={"elsewhere": True}),
    Case("scaler", scaler=True),
    Case("evaluated_inside", evaluate_every=4),
    Case("evaluation_loader", evaluate_every=4, evaluation_loader={}),
    Case("evaluation_generator", evaluate_every=4, evaluation_loader={"elsewhere": True, "seed": 5}),
    Case("limited", limit=7),
    Case("two_loaders", two=True),
    Case("save_state", saves=True),
    Case("accumulate_in_turns", accumulate=2, in_turns=True),
    Case("accumulate_left", samples=42, accumulate=3, evaluate_every=4, evaluation_loader={}, left=True),
]
MORE_CASES = [
    PLAIN,
    Case("seedable", loading={"use_seedable_sampler": True}),
    Case("not_seedable", loading={"use_seedable_sampler": False}),
    Case("uneven", samples=42),
    Case("split", loading={"split_batches": True}),
    Case("accumulate_seedable", samples=42, accumulate=3, loading={"use_seedable_sampler": True}),
    Case("workers", loader={"num_workers": 2}),
    Case("stateful_seedable", loading={**STATEFUL, "use_seedable_sampler": True}),
    Case("stateful_own", loading=STATEFUL, own_loader=True),
    Case("stateful_workers", loading=STATEFUL, loader={"num_workers": 2}),
    Case("stateful_persistent", loading=STATEFUL, loader=PERSISTENT),
    Case("evaluation_workers", evaluate_every=4, evaluation_loader=PERSISTENT),
    Case("bf16", accelerator={"mixed_precision": "bf16"}),
    Case("limited_persistent", limit=7, loader=PERSISTENT),
    Case("stream", stream=True),
    Case("stream_workers", stream=True, loader={"num_workers": 2}),
    Case("drop_last", samples=42, loader={"drop_last": True}),
    Case("rng_types", accelerator={"rng_types": ["torch", "generator"]}),
]

#: Two processes: 5 or 6 batches an epoch each.
RANKED = [
    Case("uneven", samples=42),
    Case("dispatch_padded", samples=43, loading=DISPATCH),
    Case("fsdp2", cut="fsdp2"),
]
MORE_RANKED = [
    PLAIN,
    Case("seedable", loading={"use_seedable_sampler": True}),
    Case("dispatch", samples=46, loading=DISPATCH),
    Case("dispatch_workers", samples=43, loading=DISPATCH, loader=PERSISTENT),
    Case("dispatch_split", samples=43, loading={**DISPATCH, "split_batches": True}),
    Case("dispatch_stateful", samples=43, loading={**DISPATCH, **STATEFUL}),
    Case("split", loading={"split_batches": True}),
    Case("not_evened", samples=40, loading={"even_batches": False}),
    Case("accumulate", samples=42, accumulate=2),
    Case("persistent_workers", loader=PERSISTENT),
    Case("stateful", loading=STATEFUL),
    Case("stream", stream=True),
    Case("rng_types", accelerator={"rng_types": ["torch", "generator"]}),
    Case("limited", samples=43, limit=4),
    Case("fsdp2_accumulate", samples=42, accumulate=2, cut="fsdp2"),
    Case("fsdp2_bf16", accelerator={"mixed_precision": "bf16"}, cut="fsdp2"),
    Case("fsdp2_evaluated_inside", evaluate_every=2, cut="fsdp2"),
    Case("compressed_accumulate", samples=42, accumulate=2, compression=TopK(ratio=0.25, min_elements=16)),
    *(
        Case(f"scaler_{type(compression).__name__}", scaler=True, compression=compression)
        for compression in (
            TopK(ratio=0.25, min_elements=16),
            RandomK(ratio=0.25, min_elements=16),
            Quantized8(min_elements=16),
            PowerSGD(rank=1, min_elements=16),
            HalfPrecision(),
        )
    ),
    Case("compressed_evaluated_inside", evaluate_every=2, compression=RandomK(ratio=0.25, min_elements=16)),
    Case("fsdp1", cut="fsdp1"),
    Case("fsdp1_accumulate", samples=42, accumulate=2, cut="fsdp1"),
]
RANKED_KILLS: list[Kill] = [("backward", 3), ("committed", 3), ("epoch end", 1), ("batch", 2)]


@pytest.mark.promise("Accelerate: a run killed at 17 points equals the uninterrupted run")
@pytest.mark.promise("loops' counters, an owed validation, an owed end of epoch")
def test_one_run_killed_at_every_point(lab: Lab) -> None:
    survives(lab, AccelerateRun(PLAIN, lab.directory / "job"), ONE_AFTER_ANOTHER)


@pytest.mark.promise(
    "Accelerate: each way of loading data, accumulation, the scaler, evaluations, loops left early, `save_state` "
    "beside it"
)
@pytest.mark.promise("parameters, frozen ones too; `requires_grad`")
@pytest.mark.promise("the loss of every later step")
@pytest.mark.promise("LR schedulers, gradient scaler")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_feature(case: Case, lab: Lab) -> None:
    attempts = survives(lab, AccelerateRun(case, lab.directory / "job"), BRIEFLY)
    skipped = any(each.events("skipped") for each in attempts)
    assert skipped is case.scaler, "steps are skipped where gradients are scaled, and only there"


def test_numbered_directories_of_save_state_go_on_and_orphans_are_moved_aside(lab: Lab) -> None:
    """Some kills are behind a save and before its commit: the directory that is saved again exists."""
    run = AccelerateRun(Case("numbered", numbered=True), lab.directory / "run")
    kills: list[Kill] = [("commit", 4), ("committed", 5), ("commit", 11), ("committed", 1)]
    attempts = survives(lab, run, kills)
    assert attempts[-1].outcomes[0]["saved"] == ["checkpoint_3", "checkpoint_4", "checkpoint_5"]
    orphans = sorted(each.name for each in run.directory.glob("project/checkpoints_orphans/*"))
    assert orphans == ["checkpoint_0", "checkpoint_2"]
    assert [each.log.count("moved to") for each in attempts] == [0, 1, 0, 1, 0]


@pytest.mark.promise("Accelerate: two processes, either dies; torchrun restarts them")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", RANKED, ids=str)
def test_two_ranks(case: Case, lab: Lab) -> None:
    survives(lab, AccelerateRun(case, lab.directory / "job", ranks=2, victim=1), RANKED_KILLS)


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
def test_two_ranks_with_compressed_averages(lab: Lab) -> None:
    """As the environment configures it; the undisturbed training averages by the plain hook."""
    variables = {"": "randomk", "_RATIO": "0.25", "_MIN_ELEMENTS": "16"}
    chosen = config_from_environment({f"MEMCKPT_COMPRESSION{name}": one for name, one in variables.items()}).compression
    assert chosen == RandomK(ratio=0.25, min_elements=16)
    case = Case("compressed", compression=chosen)
    kills: list[Kill] = [("backward", 3), ("committed", 5)]
    run = AccelerateRun(case, lab.directory / "job", ranks=2, victim=1)
    survives(lab, run, kills)
    for rank in range(2):  # all but the bias of the last layer
        assert noted_encodings(run.directory / f"encodings-{rank}") == [*["sparse"] * 7, None]


def test_nothing_fails_and_nothing_changes(lab: Lab) -> None:
    survives(lab, AccelerateRun(PLAIN, lab.directory / "job"), [])


@pytest.mark.promise("Accelerate: after the death of agent and trainer storage serves")
@pytest.mark.slow
def test_agent_and_trainer_die_and_storage_serves(lab: Lab) -> None:
    settings = config(storage=StorageConfig(every_steps=4))
    run = AccelerateRun(PLAIN, lab.directory / "job", config=settings, kill=("committed", 9))
    hooks: dict[Kill, Callable[..., None]] = {
        ("committed", 2): wait_until_ordered,
        ("committed", 8): wait_until_stored,
        ("committed", 9): kill_agent,
    }
    died = finish(lab, train, replace(run, hooks=hooks))
    assert len(died.events("agent killed")) == 1
    rarely = config(storage=StorageConfig(every_steps=1000))
    last = finish(lab, train, replace(run, kill=None, config=rarely))
    resumed = last.events("attached")[0]["step"]
    assert resumed in range(4, 10), "it goes on behind the step that was in storage"
    check_same(reference(lab, train, run), [died, last])


def _no_rng() -> None:
    MemCheckpointPlugin._restore_rng = lambda self: None  # type: ignore[method-assign]


def _no_refetch() -> None:
    record = Pass.record
    Pass.record = lambda self, ahead=0: {**record(self, ahead), "fetches": []}  # type: ignore[method-assign]


def _no_schedulers() -> None:
    load = prepared._load
    prepared._load = lambda kind, objects, states: None if kind == "scheduler" else load(kind, objects, states)


def _no_positions() -> None:
    Follower.continue_after = lambda self, state: None  # type: ignore[method-assign]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("sabotage", [_no_rng, _no_refetch, _no_schedulers, _no_positions])
def test_the_comparison_notices_a_part_left_out(sabotage: Callable[[], None], lab: Lab) -> None:
    run = AccelerateRun(PLAIN, lab.directory / "job", sabotage=sabotage)
    with pytest.raises(AssertionError, match="rank 0: "):
        survives(lab, run, [("backward", 5)])


@pytest.mark.promise("Accelerate: a run killed at 17 points equals the uninterrupted run")
@pytest.mark.slow
@pytest.mark.parametrize("kill", POINTS, ids=lambda kill: f"{kill[0].replace(' ', '_')}-{kill[1]}")
def test_each_point(kill: Kill, lab: Lab) -> None:
    survives(lab, AccelerateRun(PLAIN, lab.directory / "job"), [kill])


@pytest.mark.promise(
    "Accelerate: each way of loading data, accumulation, the scaler, evaluations, loops left early, `save_state` "
    "beside it"
)
@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=str)
def test_each_feature_killed_all_along(case: Case, lab: Lab) -> None:
    survives(lab, AccelerateRun(case, lab.directory / "job"), ALL_ALONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in [*CASES, *MORE_CASES] if case.evaluation_loader is not None], ids=str
)
def test_evaluations_that_are_killed(case: Case, lab: Lab) -> None:
    kills: list[Kill] = [("evaluated batch", 2), ("evaluated batch", 8), ("evaluated batch", 1), ("batch", 3)]
    survives(lab, AccelerateRun(case, lab.directory / "job"), kills)


@pytest.mark.slow
def test_each_feature_with_a_replica(lab: Lab) -> None:
    survives(lab, AccelerateRun(PLAIN, lab.directory / "job", config=config("eager")), BRIEFLY)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_killed_at_random_instants(ranks: int, redo: str, lab: Lab) -> None:
    case = next(each for each in (MORE_RANKED if ranks > 1 else MORE_CASES) if each.accumulate > 1)
    run = AccelerateRun(case, lab.directory / "job", ranks=ranks, victim=ranks - 1, config=config(redo))
    assert survives_chance(lab, run, random.Random(redo)) > 2


@pytest.mark.promise("Accelerate: two processes, either dies; torchrun restarts them")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("case", [*RANKED, *MORE_RANKED], ids=str)
def test_two_ranks_more(case: Case, victim: int, lab: Lab) -> None:
    survives(lab, AccelerateRun(case, lab.directory / "job", ranks=2, victim=victim), RANKED_KILLS)
