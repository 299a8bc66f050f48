"""State that is captured under DDP: all ranks change to it together, and all go back to one capture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memckpt.capture.self_test import SelfTest
from tests.support.trainings import killed_ranks, rank_trainings
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_optimizers import Agreeing, Counting, Momentum
from tests.support.trainings.killed_ranks import Death, logs, next_attempt, results, run
from tests.support.trainings.rank_trainings import DdpJob

NODES = pytest.mark.parametrize("nodes", [False, True], ids=["one-agent", "two-agents"])


def job_of(lab: Lab, redo: str = "lazy", every: int = 4, **settings: Any) -> DdpJob:
    job = rank_trainings.job_of(lab, **settings)
    return replace(job, config=config(redo, snapshot_every_steps=every))


def fail_test_of_rank_1(rank: int) -> None:
    if rank == 1:
        SelfTest.after_record = lambda self: "it has failed here"  # type: ignore[method-assign]


def survives(lab: Lab, job: DdpJob, deaths: list[Death], resumed: list[int]) -> str:
    """Each attempt goes on at the expected step, the last result is the reference's; returns all logs."""
    killed_ranks.survives(lab, job, deaths, resumed)
    return logs(lab)


@NODES
def test_what_an_optimizer_hides_is_captured_on_all_ranks(lab: Lab, nodes: bool) -> None:
    """The test is over with record 2, where a generation begins; then records 4, 8 and 12 are captured."""
    deaths = [Death(0, 6, "backward"), Death("all", 9), Death(1, 11, "stepped")]
    job = job_of(lab, nodes=nodes, optimizer=Counting)
    said = survives(lab, job, deaths, [4, 8, 8])
    assert said.count("steps cannot be redone here") == job.world_size * (len(deaths) + 1)  # each start says so


def test_a_step_that_asks_other_ranks_is_captured_and_never_tried_alone(lab: Lab) -> None:
    """A trial of it would wait for ranks that try something else."""
    said = survives(lab, job_of(lab, optimizer=Agreeing), [Death(0, 6, "backward"), Death("all", 9)], [4, 8])
    assert "its step communicates with other ranks" in said


@NODES
def test_one_rank_whose_test_fails_is_enough(lab: Lab, nodes: bool) -> None:
    job = job_of(lab, nodes=nodes, optimizer=Momentum, prepare=fail_test_of_rank_1)
    said = survives(lab, job, [Death(0, 2, "backward"), Death("all", 6, "stepped")], [1, 4])
    assert said.count("it has failed here; the whole state is copied") == job.world_size * 3  # each start says so


def test_all_ranks_pass_and_redo(lab: Lab) -> None:
    said = survives(lab, job_of(lab, optimizer=Momentum, every=100), [Death(0, 7), Death("all", 9, "backward")], [7, 9])
    assert "cannot be redone" not in said


@pytest.mark.promise("trainer, if the state is captured every N steps")
@pytest.mark.parametrize("place", ["backward", "stepped", "committed"])
def test_ranks_that_differ_by_a_capture_go_back_to_a_common_one(lab: Lab, place: str) -> None:
    """Rank 0 dies around its commit of record 8, which is captured; the other one may have it or not."""
    # Steps are counted from 0: record 8 is that of step 7.
    expected = {"backward": 4, "stepped": 4, "committed": 8}[place]
    survives(lab, job_of(lab, "snapshot", nodes=True), [Death(0, 7, place)], [expected])


def test_three_ranks_reduce_in_the_layout_they_had(lab: Lab) -> None:
    survives(lab, job_of(lab, "snapshot", world_size=3), [Death(2, 6), Death(0, 10, "backward")], [4, 8])


def test_a_new_agent_waits_for_a_capture_that_all_make(lab: Lab) -> None:
    """Between two captures only one node would have what it began with."""
    job = job_of(lab, "snapshot", nodes=True)
    first = replace(job, deaths=[Death("agent", 5), Death("all", 9)])
    assert run(lab, first) == [-9, -9]
    assert "protected again from step 8 on" in logs(lab)
    last = next_attempt(lab, first)
    assert run(lab, last) == [0, 0]
    assert [one["resumed"] for one in results(last)] == [8, 8]
