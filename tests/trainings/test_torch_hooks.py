"""Torch's own communication hooks under DDP: recognized, and exact after the death of any rank."""

from __future__ import annotations

from typing import Any

import pytest

from memckpt.session.gradient_tap import LATE_POWER_SGD
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, die_and_go_on, noted, results, survives
from tests.support.trainings.rank_trainings import DdpJob, job_of

#: Gloo's ranks do not agree on the order in which torch's PowerSGD reduces several buckets, with or without memckpt.
POWER_SGD: dict[str, Any] = {"users_hook": "powersgd", "ddp": {"bucket_cap_mb": 25}}


def encoded(job: DdpJob) -> list[str]:
    """Kinds of encodings in the last generation of an attempt."""
    return list(noted(job, "shared")[0][-1]["encoded"])


def test_averages_in_16_bits_are_recorded_in_16_bits(lab: Lab) -> None:
    job = job_of(lab, hook="after", users_hook="fp16")
    last = survives(lab, job, [Death(0, 4, "backward"), Death("all", 9)])
    assert encoded(last) == ["half"] * 8


@pytest.mark.parametrize(
    "deaths",
    [pytest.param([Death("all", 2)], marks=pytest.mark.slow), [Death(1, 5, "backward"), Death("all", 9)]],
    ids=["soon", "late"],
)
def test_what_power_sgd_carries_is_carried(lab: Lab, deaths: list[Death]) -> None:
    """It begins behind step 3; errors and factors are those of DDP's buckets, which the resumed process has not yet."""
    job = job_of(lab, hook="after", **POWER_SGD)
    survives(lab, job, deaths)


@pytest.mark.slow
def test_what_power_sgd_carries_in_a_wrapper_is_carried(lab: Lab) -> None:
    """It puts other buffers in the place of buckets."""
    job = job_of(lab, hook="after", users_hook="powersgd-in-fp16", ddp={"bucket_cap_mb": 25})
    survives(lab, job, [Death(1, 5, "backward"), Death("all", 9)])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"users_hook": "fp16"}, POWER_SGD], ids=["fp16", "powersgd"])
def test_four_ranks_add_up_in_the_same_order(lab: Lab, settings: dict[str, Any]) -> None:
    job = job_of(lab, hook="after", world_size=4, **settings)
    survives(lab, job, [Death(1, 5, "backward"), Death("all", 9)])


def test_a_hook_that_was_there_before_is_taken_after_the_step(lab: Lab) -> None:
    job = job_of(lab, hook="before", users_hook="fp16")
    survives(lab, job, [Death(1, 5, "backward")])


def test_what_power_sgd_carries_is_lost_where_it_was_there_before(lab: Lab) -> None:
    job = job_of(lab, hook="before", **POWER_SGD)
    last = die_and_go_on(lab, job, Death("all", 9, "backward"), reasons=[LATE_POWER_SGD])
    assert [one["resumed"] for one in results(last)] == [9, 9]
