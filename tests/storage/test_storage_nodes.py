"""Several nodes, each with an agent of its own, and one store: a checkpoint is one record on all of them, or none."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from memckpt.agent.saving import schedule
from memckpt.config import StorageConfig
from memckpt.processes.address import NODE_VARIABLE
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.waiting import until
from tests.support.storage.stored_runs import catalog_of
from tests.support.trainings.ddp_cases import Job, run, train
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Child, Lab
from tests.support.trainings.rank_group import Death, fresh_directory, results

REDO = pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])


@contextmanager
def node(name: str) -> Iterator[None]:
    before = os.environ[NODE_VARIABLE]
    os.environ[NODE_VARIABLE] = name
    try:
        yield
    finally:
        os.environ[NODE_VARIABLE] = before


def agents(lab: Lab) -> list[Child]:
    """Both nodes' agents, forked from here: what is patched here is patched in them."""
    started = []
    for name in ("node0", "node1"):
        with node(name):
            started.append(lab.start_agent())
    return started


def job_of(lab: Lab, redo: str, **settings: object) -> Job:
    storage = StorageConfig(**settings)  # type: ignore[arg-type]
    return Job(fresh_directory(lab), lab.run_dir, config(redo, storage=storage), nodes=True)


def same_as_undisturbed(lab: Lab, job: Job) -> None:
    undisturbed = replace(job, directory=fresh_directory(lab), run_dir=None, deaths=(), die_when_stored=False)
    assert run(lab, undisturbed) == [0, 0]
    for ours, theirs in zip(results(job), results(undisturbed), strict=True):
        assert [step for step, loss in ours["losses"].items() if loss != theirs["losses"][step]] == []
        assert [name for name, value in theirs["state"].items() if ours["state"][name] != value] == []


@pytest.mark.promise("several nodes have the same record in storage, or none")
@pytest.mark.slow
@REDO
def test_nodes_take_the_checkpoint_that_the_first_one_s_agent_announces(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, redo: str
) -> None:
    """By time, not by steps, and with nodes of different speed: nobody could choose the record alone."""
    monkeypatch.setattr(schedule, "_ANNOUNCE_SECONDS", 0.5)
    monkeypatch.setattr(schedule, "_LOOK_SECONDS", 0.05)
    job = replace(job_of(lab, redo, min_seconds=0.2, overhead=1.0), die_when_stored=True, slow_rank=1, last_step=20_000)
    both = agents(lab)
    codes = run(lab, job)
    assert codes[0] == -9
    assert codes[1] != 0
    until(lambda: bool(catalog_of(lab).complete))
    for agent in both:
        kill_and_wait(agent.pid)
    newest = catalog_of(lab).complete[0]
    assert {name: part.ranks for name, part in newest.parts.items()} == {"node0": (0,), "node1": (1,)}
    agents(lab)
    last = replace(job, directory=fresh_directory(lab), number=1, die_when_stored=False, last_step=newest.step + 9)
    assert run(lab, last) == [0, 0]
    assert [one["resumed"] for one in results(last)] == [newest.step] * 2
    same_as_undisturbed(lab, last)


@pytest.mark.slow
@REDO
def test_what_dead_trainers_left_on_two_nodes_goes_to_storage(lab: Lab, redo: str) -> None:
    """Neither agent knows how far the other one is: they save what the other may need, and agree by what is there."""
    job = replace(job_of(lab, redo, every_steps=1000), deaths=[Death("all", 8, "backward")])
    both = agents(lab)
    assert run(lab, job) == [-9, -9]
    until(lambda: bool(catalog_of(lab).complete))
    for agent in both:
        kill_and_wait(agent.pid)
    agents(lab)
    last = replace(job, directory=fresh_directory(lab), number=1, deaths=())
    assert run(lab, last) == [0, 0]
    assert [one["resumed"] for one in results(last)] == [8, 8]
    same_as_undisturbed(lab, last)


@pytest.mark.promise("several nodes have the same record in storage, or none")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replica", "log"])
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_nodes_of_different_speed_killed_at_random(lab: Lab, redo: str, mode: str) -> None:
    """Trainers and agents together, again and again: what is in storage by then is the same on both, or not used."""
    chance = random.Random(f"{redo} {mode}")
    job = replace(job_of(lab, redo, every_steps=7, mode=mode, batch_steps=3), slow_rank=1, last_step=400)
    began = []
    for number in range(5):
        attempt = replace(job, directory=fresh_directory(lab), number=number)
        both = agents(lab)
        ranks = [lab.fork(lambda rank=rank, a=attempt: train(a, rank), f"rank{rank}") for rank in range(2)]
        delay = chance.uniform(3.0, 9.0)
        with contextlib.suppress(TimeoutError):
            ranks[0].wait(delay)
        for process in [*ranks, *both]:
            if process.alive():
                kill_and_wait(process.pid)
        began.append(catalog_of(lab).latest_attempt)
    assert began == sorted(began)
    agents(lab)
    last = replace(job, directory=fresh_directory(lab), number=9)
    assert run(lab, last) == [0, 0]
    same_as_undisturbed(lab, last)
