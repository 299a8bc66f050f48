"""Ranks that average on a stream of their own, each with a late device: killed, and resumed at their bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memckpt.capture import spec_request
from memckpt.compression import PowerSGD, RandomK, TopK
from tests.support.cluster import sharded_cases
from tests.support.trainings import rank_trainings
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, survives
from tests.support.trainings.rank_trainings import DdpJob

DEATHS = [Death(1, 4, "backward"), Death("all", 7, "stepped")]


def ddp(lab: Lab, **settings: object) -> DdpJob:
    return replace(rank_trainings.job_of(lab), config=config(resume_check="off", **settings))


JOBS = {
    "ddp": ddp,
    "ddp-step": lambda lab: ddp(lab, tap="step"),
    "ddp-topk": lambda lab: ddp(lab, compression=TopK(ratio=0.9)),
    "ddp-randomk": lambda lab: ddp(lab, compression=RandomK(ratio=0.1)),
    "ddp-powersgd": lambda lab: ddp(lab, compression=PowerSGD()),
    "ddp-average": lambda lab: replace(ddp(lab), averages=True),
    "ddp-eager": lambda lab: ddp(lab, redo="eager"),
    "fsdp": lambda lab: sharded_cases.job_of(lab, sharded_cases.Setup(), config(resume_check="off")),
}


@pytest.mark.usefixtures("only_late")  # one device for two ranks: NCCL takes one for each
@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", JOBS)
def test_ranks_resume_at_their_bits(gpu_lab: Lab, device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Averages of the size of a test's model are held once, as large ones are.
    monkeypatch.setattr(spec_request, "SHARED_ABOVE_BYTES", 1000)
    monkeypatch.setattr(spec_request, "SMALL_BY_VALUE_BYTES", 0)
    survives(gpu_lab, replace(JOBS[name](gpu_lab), device=device), DEATHS)
