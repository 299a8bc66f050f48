"""DDP with compressed averages: exact after the death of any rank, as without memckpt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memckpt.compression import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK, reducer_for
from memckpt.compression.reduction import Bucket
from memckpt.config import ErasureConfig, LossyConfig, StorageConfig
from memckpt.session.compressed_averages import DROPPED, _Settings
from tests.gpu.cases import alone
from tests.support.storage.stored_runs import catalog_of
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import (
    Death,
    check_same,
    check_verdicts,
    die_and_go_on,
    fresh_directory,
    logs,
    next_attempt,
    noted,
    reference,
    results,
    run,
    survives,
)
from tests.support.trainings.rank_trainings import DdpJob, job_of

COMPRESSORS = [
    TopK(ratio=0.05),
    RandomK(ratio=0.1, seed=3),
    Quantized8(block_elements=64),
    PowerSGD(rank=2),
    HalfPrecision(),
    HalfPrecision(dtype="fp16"),
]
NAMES = ["top-k", "random-k", "quantized", "power-sgd", "bf16", "fp16"]
#: All but one are slow; of top-k a log that has been harmed is in every run.
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]
OFTEN_POWER_SGD = [
    one if isinstance(one, PowerSGD) else pytest.param(one, marks=pytest.mark.slow) for one in COMPRESSORS
]


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("compression", COMPRESSORS, ids=NAMES)
def test_protection_changes_no_bit(lab: Lab, compression: CompressionConfig) -> None:
    job = job_of(lab, compression=compression)
    assert run(lab, job) == [0, 0]
    check_same(results(job), reference(lab, job))


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
@pytest.mark.promise("`HalfPrecision`, or `error_feedback=False`")
@pytest.mark.promise('`residual="keep"`, and `"auto"` without peers and with `storage.mode` other than `"log"`')
@pytest.mark.thinned(3)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("compression", COMPRESSORS, ids=NAMES)
def test_resumes_exactly_after_the_death_of_ranks(lab: Lab, compression: CompressionConfig, redo: str) -> None:
    survives(lab, job_of(lab, redo, compression=compression), [Death(0, 4, "backward"), Death("all", 9)])


LOSE_MEMORY = (Death("agent", 9, "forward"), Death("all", 9, "backward"))


def lose_memory_and_go_on(lab: Lab, job: DdpJob) -> int:
    """The attempt after one whose agent and ranks die ends as the reference; returns the step that it went on at."""
    last = results(die_and_go_on(lab, job, *LOSE_MEMORY))
    check_same(last, reference(lab, job))
    return int(last[0]["resumed"])


def with_residual(compression: CompressionConfig) -> CompressionConfig:
    return replace(compression, residual="keep") if isinstance(compression, LossyConfig) else compression


def logged(lab: Lab, compression: CompressionConfig, **settings: Any) -> DdpJob:
    """A training with a log, in which what was left out is in each record; it has a base behind the first step."""
    job = job_of(lab, compression=with_residual(compression), log=True, **settings)
    storage = StorageConfig(mode="log", min_seconds=3600, batch_steps=1)
    return replace(job, config=replace(job.config, storage=storage))


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
@pytest.mark.promise('`residual="keep"`, and `"auto"` without peers and with `storage.mode` other than `"log"`')
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("compression", OFTEN_POWER_SGD, ids=NAMES)
def test_resumes_exactly_from_the_log(lab: Lab, compression: CompressionConfig, ranks: int) -> None:
    job = logged(lab, compression, world_size=ranks)
    assert lose_memory_and_go_on(lab, job) >= 8


@pytest.mark.parametrize("harm", ["damaged", pytest.param("missing", marks=pytest.mark.slow)])
def test_a_harmed_record_ends_redo_at_the_step_before_it(lab: Lab, harm: str) -> None:
    """Records behind it are there and good, and are not applied."""
    job = logged(lab, TopK(ratio=0.05))
    died = replace(job, deaths=LOSE_MEMORY)
    assert run(lab, died) == [-9, -9]
    newest = max(batch.last for batch in catalog_of(lab).batches)
    path = next(batch.log_path for batch in catalog_of(lab).batches if batch.first == newest - 1)
    file = lab.run_dir / "storage" / path
    if harm == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    last = next_attempt(lab, died)
    assert run(lab, last) == [0, 0]
    check_verdicts([died, last])
    check_same(results(last), reference(lab, job), newest - 2)
    assert f"passed over: step {newest}: {path}: " in logs(lab)


@pytest.mark.promise(
    "compressed gradients: protection changes no bit, and resumes from memory, the log and peers are exact"
)
@pytest.mark.promise('`residual="keep"`, and `"auto"` without peers and with `storage.mode` other than `"log"`')
@pytest.mark.thinned(2 * len(COMPRESSORS))
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("compression", COMPRESSORS, ids=NAMES)
def test_resumes_exactly_from_peers(lab: Lab, compression: CompressionConfig, ranks: int) -> None:
    """The node of rank 0 is lost; what was left out of its gradients comes from the other ones, too."""
    job = job_of(lab, compression=with_residual(compression), nodes=True, world_size=ranks)
    job = replace(job, config=replace(job.config, peers=ErasureConfig(data=ranks // 2, tolerate=ranks // 2)))
    assert lose_memory_and_go_on(lab, job) >= 5


WAYS: dict[str, dict[str, Any]] = {
    "unused": {"ddp": {"find_unused_parameters": True}},
    "views": {"ddp": {"gradient_as_bucket_view": True}},
    "static": {"ddp": {"static_graph": True}},
    "accumulation": {"accumulate": 3},
    "averages": {"averages": True},
    "all": {"ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": True}, "accumulate": 2},
}


@pytest.mark.parametrize(
    ("compression", "way"),
    [
        pytest.param(one, way, id=f"{name}-{way}", marks=() if (name, way) == ("top-k", "all") else pytest.mark.slow)
        for one, name in zip(COMPRESSORS[:5], NAMES, strict=False)
        for way in WAYS
    ],
)
def test_ways_to_train(lab: Lab, compression: CompressionConfig, way: str) -> None:
    job = job_of(lab, compression=compression, **WAYS[way])
    survives(lab, job, [Death(0, 4, "backward"), Death("all", 9)])


@pytest.mark.slow
def test_a_union_that_is_larger_than_the_gradient_is_recorded_as_the_gradient(lab: Lab) -> None:
    """What is left out is carried all the same."""
    job = job_of(lab, compression=TopK(ratio=0.4))
    last = survives(lab, job, [Death(0, 4, "backward"), Death("all", 9)])
    shared, _ = noted(last, "shared")
    assert shared
    assert not any(one["encoded"] for one in shared)


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSORS, ids=NAMES)
def test_four_ranks_resume_exactly_from_memory(lab: Lab, compression: CompressionConfig) -> None:
    job = job_of(lab, compression=compression, world_size=4)
    survives(lab, job, [Death(2, 4, "backward"), Death("all", 9)])


@pytest.mark.promise('`residual="drop"`, and `"auto"` otherwise')
def test_what_was_dropped_is_said(lab: Lab) -> None:
    job = job_of(lab, compression=TopK(ratio=0.05, residual="drop"))
    last = die_and_go_on(lab, job, Death("all", 9, "backward"), reasons=[DROPPED])
    assert [one["resumed"] for one in results(last)] == [9, 9]


@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps", [(3,), pytest.param((1, 6), marks=pytest.mark.slow)], ids=["once", "twice"])
def test_a_gradient_that_is_changed_by_hand_is_found_by_all_ranks(lab: Lab, steps: tuple[int, ...], redo: str) -> None:
    """One rank stages it; all go on with gradients as they are."""
    job = job_of(lab, redo, compression=TopK(ratio=0.05), halved=steps)
    last = survives(lab, job, [Death("all", 9, "backward")])
    assert noted(last, "restored")[0][-1]["exact"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now"),
    [
        (TopK(ratio=0.05), None),
        (TopK(ratio=0.05), RandomK(ratio=0.1)),
        (PowerSGD(rank=1), PowerSGD(rank=2)),
        (TopK(), TopK(error_feedback=False)),
    ],
    ids=["none", "kind", "rank", "feedback"],
)
def test_another_compressor_than_before_is_said(lab: Lab, before: LossyConfig, now: LossyConfig | None) -> None:
    job = job_of(lab, compression=before)
    assert run(lab, replace(job, deaths=[Death("all", 9, "backward")])) == [-9, -9]
    last = job_of(lab, compression=now, number=1)
    assert run(lab, last) == [0, 0]
    assert [one["resumed"] for one in results(last)] == [9, 9]
    assert not noted(last, "restored")[0][-1]["exact"]
    assert "compression was" in logs(lab)


def test_compression_may_be_switched_off_and_on(lab: Lab) -> None:
    """The state of one attempt is restored into the other; only what was left out is not there."""
    job = job_of(lab, compression=TopK(ratio=0.05), last_step=12)
    attempts = [replace(job, deaths=[Death("all", 4, "backward")])]
    off = replace(job, config=replace(job.config, compression=None))
    attempts.append(replace(off, directory=fresh_directory(lab), number=1, deaths=[Death("all", 8, "backward")]))
    attempts.append(replace(job, directory=fresh_directory(lab), number=2))
    assert [run(lab, one) for one in attempts] == [[-9, -9], [-9, -9], [0, 0]]
    assert [one["resumed"] for one in results(attempts[-1])] == [8, 8]


# Parameters that are trained only after training was attached: what is left out of them is not held, and said


def train_another(config: CompressionConfig) -> None:
    alone()
    params = [torch.zeros(64, 64), torch.zeros(64, 64)]
    reducer = reducer_for(config, params)
    reducer.carried(params[:1])
    settings = _Settings(config, reducer)

    def average(trained: list[torch.Tensor]) -> None:
        buffer = torch.randn(sum(param.numel() for param in trained))
        gradients = buffer.split([param.numel() for param in trained])
        reducer.average(Bucket(trained, gradients, buffer), last=True).wait()

    average(params[:1])
    assert settings.state_dict()["whole"]
    average(params)
    held = settings.state_dict()
    assert not held["whole"]
    resumed = _Settings(config, reducer_for(config, params))
    resumed.load_state_dict(held)
    assert not resumed.whole


@pytest.mark.parametrize(
    "config", [TopK(ratio=0.1), RandomK(ratio=0.1), Quantized8(), PowerSGD()], ids=lambda one: type(one).__name__
)
def test_left_out_parts_of_a_parameter_trained_since_are_not_held(lab: Lab, config: CompressionConfig) -> None:
    child = lab.fork(lambda: train_another(config), "later")
    assert child.wait() == 0, child.log.read_text()[-4000:]
