"""DDP: neutral at 2 and 3 ranks, and exact after the death of any rank, with one agent and with two."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from memckpt.agent import fencing as fence
from memckpt.config import StorageConfig
from memckpt.processes.handles import ProcessHandle
from memckpt.session.compressed_averages import LATE_POWER_SGD
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Child, Lab
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


@pytest.mark.promise("training survives its agent and is protected again")
def test_another_ranks_batch_is_found_by_all_ranks(lab: Lab) -> None:
    job = replace(job_of(lab), config=config(resume_check="require"))
    assert run(lab, replace(job, deaths=[Death("all", 8, "committed")])) == [-9, -9]

    def draw_again(training: Any, step: int) -> None:
        if training.rank == 1:
            torch.manual_seed(7)

    codes = run(lab, next_attempt(lab, job, each_step=draw_again))
    assert not {0, -9} & set(codes), codes
    for log in [path.read_text() for path in sorted(lab.directory.glob("*-rank*.log"))[-2:]]:
        assert "ResumeMismatchError: resume_check='require'" in log
        assert "step 9 was repeated: DIFFERENT: generators torch on rank 1" in log
    mended = next_attempt(lab, job, number=2)
    assert run(lab, mended) == [0, 0]
    check_same(results(mended), reference(lab, job), 9)


@pytest.mark.promise("attaching changes no bit of the training")
@pytest.mark.parametrize("world_size", [2, 3])
def test_protection_changes_no_bit(lab: Lab, world_size: int) -> None:
    job = job_of(lab, world_size=world_size)
    assert run(lab, job) == [0] * world_size
    check_same(results(job), reference(lab, job))


@pytest.mark.promise("with two or three ranks and one or two agents any rank may die anywhere")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("nodes", [False, True], ids=["one-agent", "two-agents"])
@pytest.mark.parametrize("who", [0, 1, "all"])
def test_resumes_exactly_after_the_death_of_ranks(lab: Lab, who: int | str, nodes: bool) -> None:
    survives(lab, job_of(lab, nodes=nodes), [Death(who, 3), Death(who, 9, "backward")])


@pytest.mark.promise("with two or three ranks and one or two agents any rank may die anywhere")
@pytest.mark.parametrize("nodes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one-agent", "two-agents"])
def test_resumes_exactly_from_replicas(lab: Lab, nodes: bool) -> None:
    survives(lab, job_of(lab, "eager", nodes=nodes), [Death(1, 4, "backward"), Death("all", 8, "committed")])


@pytest.mark.promise("with two or three ranks and one or two agents any rank may die anywhere")
@pytest.mark.parametrize("place", ["forward", "backward", "stepped", "committed"])
def test_resumes_exactly_wherever_a_rank_dies(lab: Lab, place: str) -> None:
    """The other rank may have committed the record that the dead one did not: both meet at the older one."""
    # A rank that dies right after its commit of step 6 leaves the other one in the next step's backward.
    survives(lab, job_of(lab), [Death(0, 6, place)])


@pytest.mark.promise("the order of DDP's sums is that of the uninterrupted run")
def test_three_ranks_resume_in_the_bucket_layout_they_had(lab: Lab) -> None:
    """With three ranks a sum's order depends on where in its bucket an element lies."""
    survives(lab, job_of(lab, world_size=3), [Death(2, 4), Death(0, 8, "backward")])


@pytest.mark.promise("DDP with three ranks or more, killed after the very first step")
def test_the_second_step_of_three_ranks_is_not_repeated(lab: Lab) -> None:
    """It was reduced in buckets of which the state behind the first step knows nothing."""
    reason = "DDP of three or more ranks had not laid out its buckets for good before that step"
    survives(lab, job_of(lab, world_size=3), [Death(0, 2)], unchecked=[reason])
    assert f"no step was compared: {reason}" in logs(lab)


WAYS: dict[str, dict[str, Any]] = {
    "find-unused": {"ddp": {"find_unused_parameters": True}},
    "bucket-view": {"ddp": {"gradient_as_bucket_view": True}},
    "static-graph": {"ddp": {"static_graph": True}},
    "accumulation-without-synchronization": {"accumulate": 3},
    "hook-after": {"hook": "after"},
    "hook-before": {"hook": "before"},
    "hook-that-was-there-before": {"hook": "before", "users_hook": "fp16"},
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train(lab: Lab, way: str) -> None:
    survives(lab, job_of(lab, **WAYS[way]), [Death(1, 5, "backward")])


def leave_a_stuck_rank(lab: Lab, job: DdpJob) -> tuple[DdpJob, Child]:
    """An attempt in which one rank has died, and the other one, which lives on: launchers leave orphans."""
    first = replace(job, directory=fresh_directory(lab), deaths=[Death(0, 5, "backward")], hang=1)
    assert run(lab, first)[0] == -9
    return first, next(child for child in lab._children if child.log.name.endswith("rank1.log") and child.alive())


def go_on_without_it(lab: Lab, first: DdpJob, stuck: Child) -> None:
    """The next attempt of the same launch makes sure that the orphan can write no more."""
    second = next_attempt(lab, first)
    assert run(lab, second) == [0, 0]
    assert stuck.wait(10) == -9
    check_verdicts([first, second])
    check_same(results(second), reference(lab, first))


@pytest.mark.promise("a stuck rank of an earlier attempt can no longer write")
def test_a_stuck_survivor_of_an_earlier_attempt_is_fenced(lab: Lab) -> None:
    go_on_without_it(lab, *leave_a_stuck_rank(lab, job_of(lab)))


@pytest.mark.promise("a new attempt begins when the last one's ranks have ended, and not before")
def test_a_new_attempt_waits_for_a_rank_that_takes_long_to_die(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's SIGKILL has no effect for a while, as in a driver that takes its contexts apart."""
    with monkeypatch.context() as patch:
        patch.setattr(ProcessHandle, "kill", lambda process: None)
        patch.setattr(fence, "_REPORT_SECONDS", 0.05)
        lab.start_agent()
    first, stuck = leave_a_stuck_rank(lab, job_of(lab))

    def end_it() -> None:
        said = f"pid {stuck.pid} (rank 1), state S (sleeping)"
        until(lambda: any(said in log.read_text() for log in lab.directory.glob("*-rank?.log")))
        os.kill(stuck.pid, signal.SIGKILL)

    ender = lab.fork(end_it, "ender")
    go_on_without_it(lab, first, stuck)
    assert ender.wait() == 0


@pytest.mark.parametrize("nodes", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one-agent", "two-agents"])
def test_training_survives_its_agent_and_is_protected_again(lab: Lab, nodes: bool) -> None:
    job = job_of(lab, nodes=nodes)
    expected = reference(lab, job)
    last = die_and_go_on(lab, job, Death("agent", 3), Death("all", 9))
    assert "without protection" in logs(lab)
    assert "protected again" in logs(lab)
    check_same(results(last), expected, 9)


@pytest.mark.promise("after the death of agent and trainer a resume from storage is exact")
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("nodes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one-agent", "two-agents"])
def test_resumes_from_storage_when_an_agent_and_all_ranks_are_gone(lab: Lab, nodes: bool, redo: str) -> None:
    """With two agents, the one that lives is not enough; each has written its own part of the checkpoint.

    One agent that holds the state itself takes the newest step that it has when it comes to it. On a busy machine that
    is a later one, for which it waits until training goes on: it gets a second chance.
    """
    alone = redo == "eager" and not nodes
    settings = config(redo, storage=StorageConfig(every_steps=3 if alone else 5))
    job = replace(job_of(lab, nodes=nodes), config=settings)
    expected = reference(lab, job)
    if alone:
        lab.start_agent()
    last = die_and_go_on(lab, job, Death("agent", 8), Death("all", 8, "backward"), wait_at=7 if alone else 6)
    assert {each["tier"] for rank in noted(last, "restored") for each in rank} == {"storage"}
    found = results(last)
    resumed = found[0]["resumed"]
    assert resumed in (range(3, 8) if alone else [5])
    check_same(found, expected, resumed)


@pytest.mark.promise("another number of ranks carries over parameters and optimizer state")
@pytest.mark.parametrize("after", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on_from_storage(lab: Lab, after: int, redo: str) -> None:
    """The agent first brings there what it holds of the old ranks. Parameters and optimizer state are carried over."""
    settings = config(redo, storage=StorageConfig(every_steps=100))
    if redo == "eager":
        lab.start_agent()
    died = replace(job_of(lab), config=settings, deaths=[Death("all", 6, "committed")])
    assert run(lab, died) == [-9, -9]
    other = next_attempt(lab, died, world_size=after, last_step=7)
    assert run(lab, other) == [0] * after
    found = results(other)
    assert all(not ours["losses"] for ours in found)  # what is compared is what was restored
    expected = reference(lab, replace(died, last_step=7))[0]["state"]
    for ours in found:
        assert ours["state"]["params"] == expected["params"]
        assert ours["state"]["optimizer"] == expected["optimizer"]
    assert len({ours["state"]["rng"] for ours in found}) == after, "ranks must not draw the same numbers"


# Torch's own communication hooks

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


def test_what_power_sgd_carries_is_lost_where_it_was_there_before(lab: Lab) -> None:
    job = job_of(lab, hook="before", **POWER_SGD)
    last = die_and_go_on(lab, job, Death("all", 9, "backward"), reasons=[LATE_POWER_SGD])
    assert [one["resumed"] for one in results(last)] == [9, 9]
