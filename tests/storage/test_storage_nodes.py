"""Several nodes, each with an agent of its own, and one store: a checkpoint is one record on all of them, or none."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from dataclasses import replace
from typing import Any

import pytest

from memckpt.agent.saving import schedule
from memckpt.config import StorageConfig
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.waiting import until
from tests.support.storage.stored_runs import catalog_of
from tests.support.trainings import killed_ranks
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.rank_trainings import DdpJob

REDO = pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])


def slow_second(training: Any, step: int) -> None:
    """Rank 1 is slower than the other."""
    if training.rank == 1:
        sum(range(200_000))


def die_when_stored(training: Any, step: int) -> None:
    """Rank 0 dies as soon as it hears that something is in storage."""
    slow_second(training, step)
    if training.rank == 0 and training.session is not None and training.session.stored_step is not None:
        os.kill(os.getpid(), signal.SIGKILL)


def job_of(lab: Lab, redo: str, **settings: object) -> DdpJob:
    storage = StorageConfig(**settings)  # type: ignore[arg-type]
    return DdpJob(killed_ranks.fresh_directory(lab), lab.run_dir, config(redo, storage=storage), nodes=2)


@pytest.mark.promise("several nodes have the same record in storage, or none")
@pytest.mark.slow
@REDO
def test_nodes_take_the_checkpoint_that_the_first_one_s_agent_announces(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, redo: str
) -> None:
    """By time, not by steps, and with nodes of different speed: nobody could choose the record alone."""
    monkeypatch.setattr(schedule, "_ANNOUNCE_SECONDS", 0.5)
    monkeypatch.setattr(schedule, "_LOOK_SECONDS", 0.05)
    job = replace(job_of(lab, redo, min_seconds=0.2, overhead=1.0), each_step=die_when_stored, last_step=20_000)
    both = killed_ranks.start_agents(lab, job)
    codes = killed_ranks.run(lab, job)
    assert codes[0] == -9
    assert codes[1] != 0
    until(lambda: bool(catalog_of(lab).complete))
    for agent in both:
        kill_and_wait(agent.pid)
    newest = catalog_of(lab).complete[0]
    assert {name: part.ranks for name, part in newest.parts.items()} == {"node0": (0,), "node1": (1,)}
    killed_ranks.start_agents(lab, job)
    last = killed_ranks.next_attempt(lab, job, each_step=None, last_step=newest.step + 9)
    assert killed_ranks.run(lab, last) == [0, 0]
    killed_ranks.check_same(killed_ranks.results(last), killed_ranks.reference(lab, last), newest.step)


@pytest.mark.slow
@REDO
def test_what_dead_trainers_left_on_two_nodes_goes_to_storage(lab: Lab, redo: str) -> None:
    """Neither agent knows how far the other one is: they save what the other may need, and agree by what is there."""
    job = replace(job_of(lab, redo, every_steps=1000), deaths=[killed_ranks.Death("all", 8, "backward")])
    both = killed_ranks.start_agents(lab, job)
    assert killed_ranks.run(lab, job) == [-9, -9]
    until(lambda: bool(catalog_of(lab).complete))
    for agent in both:
        kill_and_wait(agent.pid)
    killed_ranks.start_agents(lab, job)
    last = killed_ranks.next_attempt(lab, job)
    assert killed_ranks.run(lab, last) == [0, 0]
    killed_ranks.check_same(killed_ranks.results(last), killed_ranks.reference(lab, last), 8)


@pytest.mark.promise("several nodes have the same record in storage, or none")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replica", "log"])
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_nodes_of_different_speed_killed_at_random(lab: Lab, redo: str, mode: str) -> None:
    """Trainers and agents together, again and again: what is in storage by then is the same on both, or not used."""
    chance = random.Random(f"{redo} {mode}")
    job = replace(job_of(lab, redo, every_steps=7, mode=mode, batch_steps=3), each_step=slow_second, last_step=400)
    began = []
    for number in range(5):
        attempt = replace(job, directory=killed_ranks.fresh_directory(lab), number=number)
        both = killed_ranks.start_agents(lab, job)
        ranks = [lab.fork(lambda rank=rank, a=attempt: killed_ranks.train(a, rank), f"rank{rank}") for rank in range(2)]
        delay = chance.uniform(3.0, 9.0)
        with contextlib.suppress(TimeoutError):
            ranks[0].wait(delay)
        for process in [*ranks, *both]:
            if process.alive():
                kill_and_wait(process.pid)
        began.append(catalog_of(lab).latest_attempt)
    assert began == sorted(began)
    killed_ranks.start_agents(lab, job)
    last = killed_ranks.next_attempt(lab, job, number=9, each_step=None)
    assert killed_ranks.run(lab, last) == [0, 0]
    killed_ranks.check_same(killed_ranks.results(last), killed_ranks.reference(lab, last))
