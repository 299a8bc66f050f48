"""DDP with compressed averages: exact after the death of any rank, as without memckpt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memckpt.compression import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.config import ErasureConfig, LossyConfig, StorageConfig
from memckpt.session.compression import DROPPED
from tests.support.trainings.ddp_cases import Death, check_verdicts, fresh_directory, results, run
from tests.support.trainings.engine_harness import Lab
from tests.trainings.test_ddp import job_of, reference, survives

COMPRESSORS = [
    TopK(ratio=0.05),
    RandomK(ratio=0.1, seed=3),
    Quantized8(block_elements=64),
    PowerSGD(rank=2),
    HalfPrecision(),
    HalfPrecision(dtype="fp16"),
]
NAMES = ["top-k", "random-k", "quantized", "power-sgd", "bf16", "fp16"]


@pytest.mark.parametrize("compression", COMPRESSORS, ids=NAMES)
def test_protection_changes_no_bit(lab: Lab, compression: CompressionConfig) -> None:
    job = job_of(lab, compression=compression)
    expected = reference(lab, job)
    assert run(lab, job) == [0, 0]
    assert results(job) == expected


@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("compression", COMPRESSORS, ids=NAMES)
def test_resumes_exactly_after_the_death_of_ranks(lab: Lab, compression: CompressionConfig, redo: str) -> None:
    survives(lab, job_of(lab, redo, compression=compression), [Death(0, 4, "backward"), Death("all", 9)], [4, 9])


@pytest.mark.parametrize("compression", COMPRESSORS, ids=NAMES)
def test_resumes_exactly_from_the_log(lab: Lab, compression: CompressionConfig) -> None:
    """With what was left out in each record; the log has a base behind the first step."""
    if isinstance(compression, LossyConfig):
        compression = replace(compression, residual="keep")
    job = job_of(lab, compression=compression)
    storage = StorageConfig(mode="log", min_seconds=3600, batch_steps=1)
    job = replace(job, config=replace(job.config, storage=storage))
    expected = reference(lab, job)
    deaths = [Death("agent", 9, "forward"), Death("all", 9, "backward")]
    died = replace(job, directory=fresh_directory(lab), deaths=deaths, log=True)
    assert run(lab, died) == [-9, -9]
    last = replace(job, directory=fresh_directory(lab), number=1)
    assert run(lab, last) == [0, 0]
    check_verdicts([died, last], died=False)
    for ours, theirs in zip(results(last), expected, strict=True):
        assert ours["resumed"] >= 8
        assert [name for name, value in theirs["state"].items() if ours["state"][name] != value] == []


@pytest.mark.parametrize("compression", COMPRESSORS, ids=NAMES)
def test_resumes_exactly_from_peers(lab: Lab, compression: CompressionConfig) -> None:
    """The node of rank 0 is lost; what was left out of its gradients comes from the other one, too."""
    if isinstance(compression, LossyConfig):
        compression = replace(compression, residual="keep")
    job = job_of(lab, compression=compression, nodes=True)
    job = replace(job, config=replace(job.config, peers=ErasureConfig(data=1, tolerate=1)))
    expected = reference(lab, job)
    deaths = [Death("agent", 9, "forward"), Death("all", 9, "backward")]
    died = replace(job, directory=fresh_directory(lab), deaths=deaths)
    assert run(lab, died) == [-9, -9]
    last = replace(job, directory=fresh_directory(lab), number=1)
    assert run(lab, last) == [0, 0]
    check_verdicts([died, last], died=False)
    for ours, theirs in zip(results(last), expected, strict=True):
        assert ours["resumed"] >= 5
        assert [name for name, value in theirs["state"].items() if ours["state"][name] != value] == []


def test_what_was_dropped_is_said(lab: Lab) -> None:
    job = job_of(lab, compression=TopK(ratio=0.05, residual="drop"))
    died = replace(job, directory=fresh_directory(lab), deaths=[Death("all", 9, "backward")])
    assert run(lab, died) == [-9, -9]
    last = replace(job, directory=fresh_directory(lab), number=1)
    assert run(lab, last) == [0, 0]
    check_verdicts([died, last], died=False, reasons=[DROPPED])
    assert [one["resumed"] for one in results(last)] == [9, 9]


def test_compression_may_be_switched_off_and_on(lab: Lab) -> None:
    """The state of one attempt is restored into the other; only what was left out is not there."""
    job = job_of(lab, compression=TopK(ratio=0.05), last_step=12)
    attempts = [replace(job, deaths=[Death("all", 4, "backward")])]
    off = replace(job, config=replace(job.config, compression=None))
    attempts.append(replace(off, directory=fresh_directory(lab), number=1, deaths=[Death("all", 8, "backward")]))
    attempts.append(replace(job, directory=fresh_directory(lab), number=2))
    assert [run(lab, one) for one in attempts] == [[-9, -9], [-9, -9], [0, 0]]
    assert [one["resumed"] for one in results(attempts[-1])] == [8, 8]
